"""Discard: parked messages go for good."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from aiormq.abc import DeliveredMessage

from rabbit_tasks.broker import Connection
from rabbit_tasks.message import ACQUIRED_COUNT, DELIVERY_COUNT
from rabbit_tasks.parking.look import Moved, taking
from rabbit_tasks.parking.parked import Choose, ParkedMessage
from rabbit_tasks.parking.queue import ParkingQueue

_TOGETHER: Final = 100
"""Messages that are let go in one write, and the bytes of their bodies."""
_BYTES_TOGETHER: Final = 2**20


def identity(message: ParkedMessage) -> bytes:
    """What tells a message from every other, but from its own copy: a digest of all of it.

    What the next look finds otherwise is left out: the broker's counts of looks, and the headers'
    order (3.10 sorts them when it adds its count).
    """
    properties = message.properties.without(DELIVERY_COUNT, ACQUIRED_COUNT).by_name().encode()
    digest = hashlib.blake2b(len(properties).to_bytes(4, "big") + properties, digest_size=16)
    digest.update(message.body)
    return digest.digest()


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
    told of are gone, and no others.
    """
    moved = Moved()
    batch: list[tuple[DeliveredMessage, ParkedMessage]] = []
    size = 0

    async def let_go() -> None:
        acks = taken.ack_all([delivery for delivery, _ in batch])
        going = asyncio.create_task(acks)
        try:
            await asyncio.shield(going)
        finally:
            await going  # interrupted or not: it may be written already, so it is
            for _, message in batch:
                told(message)
            batch.clear()

    async with taking(connection, queue) as taken:
        moved.there = taken.count
        began(taken.count)
        async for delivery, message in taken:
            if limit is not None and moved.chosen >= limit:
                break
            if not choose(message):
                continue
            moved.chosen += 1
            if dry_run:
                told(message)
                continue
            batch.append((delivery, message))
            size += len(message.body)
            if len(batch) == _TOGETHER or size > _BYTES_TOGETHER:
                await let_go()
                size = 0
        if batch:
            await let_go()
        await taken.arrived()
    return moved
