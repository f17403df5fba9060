"""What is parked, by kind of failure: one row each."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from rabbit_tasks import history
from rabbit_tasks.parking.parked import Choose, ParkedMessage
from rabbit_tasks.text import one_line


@dataclass
class Group:
    """The messages that are parked for one kind of failure."""

    fingerprint: str
    error: str | None
    """The type of the error; None where they are parked for something else: a Park's words, dead
    workers, the broker."""
    message: str
    """In one line, of the oldest: what its error said, or the reason."""
    example: str
    """The id of the oldest."""
    count: int = 0
    first: datetime | None = None
    """When the first and the last of them were parked; None where nothing tells."""
    last: datetime | None = None

    @classmethod
    def of(cls, message: ParkedMessage) -> Self:
        """The group of this message, with nothing in it yet."""
        error = history.failed_with(message.properties)
        said = message.error_message if error else None
        return cls(message.fingerprint, error, one_line(said or message.reason, 120), message.id)

    def add(self, message: ParkedMessage) -> None:
        self.count += 1
        if (when := message.parked_time) is not None:
            self.first = min(self.first or when, when)
            self.last = max(self.last or when, when)


class Groups:
    """Groups of messages, as they are added: the largest first, and of equals the older one."""

    def __init__(self) -> None:
        self._found: dict[str, Group] = {}

    def add(self, message: ParkedMessage) -> None:
        fingerprint = message.fingerprint
        group = self._found.get(fingerprint)
        if group is None:
            group = self._found[fingerprint] = Group.of(message)
        group.add(message)

    @property
    def rows(self) -> list[Group]:
        return sorted(self._found.values(), key=lambda group: -group.count)


async def grouped(
    messages: AsyncIterable[ParkedMessage], choose: Choose = lambda _message: True
) -> list[Group]:
    """One group for each kind of failure among the chosen messages, the largest first."""
    groups = Groups()
    async for message in messages:
        if choose(message):
            groups.add(message)
    return groups.rows
