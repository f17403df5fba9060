"""Discard: parked messages go for good."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rabbit_tasks.broker import Connection
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.parking.look import Moved, taking
from rabbit_tasks.parking.parked import Choose, ParkedMessage, identity
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.parking.staging import is_unfinished

_TOGETHER: Final = 100
"""Messages that are let go in one write, and the bytes of their bodies."""
_BYTES_TOGETHER: Final = 2**20


@dataclass
class Asked:
    """The messages that somebody was asked about: what they are, by kind, and which ones.

    What is parked meanwhile is not among them, though it may fit the same choice.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    """How many of each kind: an error type, or the reason where there was none."""
    _left: Counter[bytes] = field(default_factory=Counter, repr=False)

    def add(self, message: ParkedMessage) -> None:
        self.kinds[message.error_type or message.reason] += 1
        self._left[identity(message)] += 1

    @property
    def count(self) -> int:
        return self.kinds.total()

    def __call__(self, message: ParkedMessage) -> bool:
        """Whether it is one of them; each is met once."""
        one = identity(message)
        if not self._left[one]:
            return False
        self._left[one] -= 1
        return True


async def discard(
    connection: Connection,
    queue: str | ParkingQueue,
    choose: Choose,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    began: Callable[[int], None] = lambda _count: None,
    told: Callable[[ParkedMessage], None] = lambda _message: None,
) -> Moved:
    """Remove chosen messages for good, of those that were there at the start.

    `began` is told how many that are, `told` is called after each. Ended in the middle, those it was
    told of are gone, and no others. ParkingError after a replay that was killed: what it had on its
    way could come home all the same.
    """
    lot = ParkingQueue.of(queue)
    moved = Moved()
    batch: list[tuple[int, ParkedMessage]] = []
    size = 0

    async def let_go() -> None:
        acks = taken.ack_all([tag for tag, _ in batch])
        going = asyncio.create_task(acks)
        try:
            await asyncio.shield(going)
        finally:
            await going  # interrupted or not: it may be written already, so it is
            for _, message in batch:
                told(message)
            batch.clear()

    async with taking(connection, lot) as taken:
        if not dry_run and await is_unfinished(connection, lot):
            raise ParkingError(
                f"{lot}: a replay was killed, and copies of what is parked are on their way; end it "
                f"first: {lot.to_type('replay', '--resume')}"
            )
        moved.there = taken.count
        began(taken.count)
        async for tag, message in taken:
            if limit is not None and moved.chosen >= limit:
                break
            if not choose(message):
                continue
            moved.chosen += 1
            if dry_run:
                told(message)
                continue
            batch.append((tag, message))
            size += len(message.body)
            if len(batch) == _TOGETHER or size > _BYTES_TOGETHER:
                await let_go()
                size = 0
        if batch:
            await let_go()
        await taken.arrived()
    return moved
