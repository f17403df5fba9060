"""A canary: the first few of a replay, and what becomes of them before the others follow.

What AMQP can tell of a copy that was replayed: that it is parked again, since its id is in its header.
It cannot tell that it is done. Ready messages of a queue can be counted, those in a worker's hands
cannot, nor can queues be listed. So a copy that is not back within the time that was given, of a queue
that has nothing left waiting, counts as done; where something waits, nothing is known. The management
API counts what workers hold as well: with it, nobody waits longer than it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from rabbit_tasks import history
from rabbit_tasks.broker import Connection
from rabbit_tasks.errors import ManagementError
from rabbit_tasks.management import Management
from rabbit_tasks.parking.look import browse
from rabbit_tasks.parking.parked import ParkedMessage
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.parking.replaying import Replayed
from rabbit_tasks.parking.staging import explained, left

OTHERS: Final = 5.0
"""Seconds for which others may come back once one is: there is a summary, and it is no success."""
_LAG: Final = 6.0
"""Seconds by which the management API's counts may be late."""
_PAUSE: Final = 0.2


@dataclass
class Verdict:
    """What became of the canary."""

    sent: int
    back: Counter[str] = field(default_factory=Counter)
    """Of those that are parked again: how many of which error type, or reason."""
    same: int = 0
    """Of those: how many failed as before."""
    waiting: dict[str, int] = field(default_factory=dict)
    """Queues in which messages still wait that may be some of them, and how many."""

    @property
    def is_done(self) -> bool:
        """Whether the others may follow."""
        return not self.back and not self.waiting

    def __str__(self) -> str:
        if self.back:
            failed = self.back.total()
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.back.most_common(5))
            how = "the same way as before" if self.same == failed else f"{self.same} as before"
            return f"{failed} of {self.sent} failed again, {how}: {kinds}"
        if self.waiting:
            queues = ", ".join(f"{count} in {queue}" for queue, count in self.waiting.items())
            return f"not known what became of {self.sent}: messages still wait, {queues}"
        return f"{self.sent} are not parked again"


async def watch(
    connection: Connection,
    queue: str | ParkingQueue,
    replayed: Replayed,
    *,
    wait: timedelta,
    beside: tuple[str, ...] = (),
    management: Management | None = None,
    stop: asyncio.Event | None = None,
) -> Verdict:
    """Wait until the copies of this replay, up to 1,000, are done or parked again.

    wait    for so long at most
    beside  queues through which they come back to their own, as far as they are known
    """
    lot = ParkingQueue.of(queue)
    with explained(lot.name):
        return await _watch(
            connection, lot, replayed, wait, beside, management, stop or asyncio.Event()
        )


async def _watch(
    connection: Connection,
    lot: ParkingQueue,
    replayed: Replayed,
    wait: timedelta,
    beside: tuple[str, ...],
    management: Management | None,
    stop: asyncio.Event,
) -> Verdict:
    verdict = Verdict(len(replayed.copies))
    began = time.monotonic()
    until, next_look, depth = began + wait.total_seconds(), began, -1
    while verdict.back.total() < verdict.sent:
        now, there = time.monotonic(), await left(connection, lot.name)
        is_over = now >= until or stop.is_set()
        if (there != depth and now >= next_look) or is_over:
            depth = there or 0
            verdict.back, verdict.same = await _back(connection, lot, replayed)
            # Not all the time: whoever else wants to look must wait for us.
            next_look = time.monotonic() + 4 * (time.monotonic() - now)
            if verdict.back:
                until = min(until, now + OTHERS)
        if is_over:
            break
        if now > began + _LAG and management and not await _held(management, replayed):
            is_quiet = depth == await left(connection, lot.name)
            if is_quiet:
                return verdict
        with suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE):
                await stop.wait()
    for name in (*replayed.to, *beside):
        if not verdict.back and (count := await left(connection, name)):
            verdict.waiting[name] = count
    return verdict


async def _back(
    connection: Connection, lot: ParkingQueue, replayed: Replayed
) -> tuple[Counter[str], int]:
    """What of it is parked again: how many of which kind, and how many as before."""
    kinds: Counter[str] = Counter()
    same = 0
    async for message in browse(connection, lot):
        replay = history.replay_id(message.properties)
        if replay in replayed.copies:
            kinds[kind_of(message)] += 1
            same += replayed.copies[replay] == message.fingerprint
    return kinds, same


def kind_of(message: ParkedMessage) -> str:
    return message.error_type or message.reason


async def _held(management: Management, replayed: Replayed) -> bool:
    """Whether something waits or is in a worker's hands; True where that is not known."""
    try:
        queues = await management.rows("queues", management.vhost)
    except ManagementError:
        return True
    return any(
        one.get("messages") != 0
        for one in queues
        for name in replayed.to
        if str(one.get("name", "")) == name
        or str(one.get("name", "")).startswith((f"{name}.retry.", f"{name}.crashed."))
    )
