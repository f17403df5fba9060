"""A message in the parking lot, as it lies there. Pure: properties and bytes in, what they tell out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from rabbit_tasks import history
from rabbit_tasks import message as names
from rabbit_tasks.properties import Properties
from rabbit_tasks.text import escaped


@dataclass(frozen=True)
class ParkedMessage:
    """A message in the parking lot, as it lies there."""

    position: int
    """From 1, in the order in which messages were parked."""
    body: bytes = field(repr=False)
    properties: Properties = field(repr=False)

    @property
    def id(self) -> str:
        """The message id; for a message without one, ~ and a digest of what it is."""
        return self.properties.text("message_id") or "~" + self._digest

    def is_called(self, name: str) -> bool:
        """Whether this is its id, as it is or as a terminal shows it, control characters escaped."""
        return name in (self.id, escaped(self.id))

    @cached_property
    def _digest(self) -> str:
        # 3.10 sorts a message's headers when it first counts a look at it.
        told = self.properties.replace({}, without=names.is_brokers).by_name().encode()
        return hashlib.blake2b(told + self.body, digest_size=6).hexdigest()

    @property
    def reason(self) -> str:
        """Why it is parked, in words."""
        return history.reason(self.properties)

    @property
    def error_type(self) -> str | None:
        found = self.properties.header(names.ERROR_TYPE)
        return found if isinstance(found, str) else None

    @property
    def error_message(self) -> str | None:
        found = self.properties.header(names.ERROR_MESSAGE)
        return found if isinstance(found, str) else None

    @property
    def stack(self) -> str | None:
        found = self.properties.header(names.ERROR_STACK)
        return found if isinstance(found, str) else None

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The history: attempt, when, seconds, error, worker; oldest first."""
        return history.attempts(self.properties)

    @property
    def deaths(self) -> int:
        """Workers that died with it in their hands, by its own header."""
        return names.crashes(self.properties)

    @property
    def last_seen(self) -> tuple[str, str] | None:
        """Of those deaths: the last worker that is known to have had it, and when."""
        table = self.properties.header(names.CRASHES)
        if not isinstance(table, dict):
            return None
        worker, when = table.get("worker"), table.get("when")
        return (worker, when) if isinstance(worker, str) and isinstance(when, str) else None

    @property
    def headers(self) -> dict[str, Any]:
        """All headers, but for the broker's count of looks at it."""
        return {
            name: value
            for name, value in self.properties.headers.items()
            if name not in (names.DELIVERY_COUNT, names.ACQUIRED_COUNT)
        }

    @property
    def parked_at(self) -> str | None:
        """When, as ISO 8601; of a message that the broker parked, to the second."""
        ours = self.properties.header(names.PARKED_AT)
        if isinstance(ours, str):
            return ours
        death = history.last_death(self.properties)
        when = death.get("time") if death else None
        return when.isoformat() if isinstance(when, datetime) else None

    @property
    def parked_time(self) -> datetime | None:
        """When, to reckon with; None where nothing tells, or not in a way we can read."""
        try:
            found = datetime.fromisoformat(self.parked_at or "")
        except ValueError:
            return None
        return found if found.tzinfo else found.replace(tzinfo=UTC)

    @property
    def fingerprint(self) -> str:
        """What groups it with others that failed in the same way."""
        return history.fingerprint(self.properties)

    @property
    def origin(self) -> str | None:
        """The main queue it came from; None where nothing tells."""
        return history.origin(self.properties)

    @property
    def replays(self) -> int:
        """How often it was replayed before."""
        last = self.properties.header(names.REPLAYED)
        count = last.get("count") if isinstance(last, dict) else 0
        return count if isinstance(count, int) else 0

    def has_error(self, kind: str) -> bool:
        """Whether it failed with this type of error, by its full or its short name."""
        return self.error_type is not None and kind in (
            self.error_type, self.error_type.rpartition(".")[2]
        )  # fmt: skip


def kept(properties: Properties) -> Properties:
    """The properties with which a message was parked: without the broker's counts of looks at it."""
    counts = (names.DELIVERY_COUNT, names.ACQUIRED_COUNT)
    return properties.without(*counts) if properties.headers.keys() & set(counts) else properties


def identity(message: ParkedMessage) -> bytes:
    """What tells a message from every other, but from its own copy: a digest of all of it.

    What the next look finds otherwise is left out: the broker's counts of looks, and the headers'
    order (3.10 sorts them when it adds its count).
    """
    properties = (
        message.properties.without(names.DELIVERY_COUNT, names.ACQUIRED_COUNT).by_name().encode()
    )
    digest = hashlib.blake2b(len(properties).to_bytes(4, "big") + properties, digest_size=16)
    digest.update(message.body)
    return digest.digest()


Choose = Callable[[ParkedMessage], bool]
"""Which of them: asked once per message, in order."""
