"""Discard: parked messages go for good."""

from __future__ import annotations

from collections.abc import Callable

from rabbit_tasks.broker import Connection
from rabbit_tasks.parking.look import Moved, taking
from rabbit_tasks.parking.parked import Choose, ParkedMessage


async def discard(
    connection: Connection,
    queue: str,
    choose: Choose,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    told: Callable[[ParkedMessage], None] = lambda _message: None,
) -> Moved:
    """Remove chosen messages for good, of those that were there at the start."""
    moved = Moved()
    async with taking(connection, queue) as taken:
        moved.there = taken.count
        async for delivery, message in taken:
            if (limit is not None and moved.chosen >= limit) or not choose(message):
                continue
            moved.chosen += 1
            if not dry_run:
                await taken.ack(delivery)
            told(message)
        await taken.arrived()
    return moved
