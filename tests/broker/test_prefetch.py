"""A slot that holds more than the message it handles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, Settings
from rabbit_tasks.broker import Connection
from tests.conftest import eventually
from tests.support.inprocess import Running
from tests.support.queues import depth, take_all

Declared = Callable[[App], Awaitable[None]]
COUNT = 30
SLOTS = 3


class Gated(Consumer[int]):
    """Handles nothing before it may."""

    queue = "gated"
    concurrency = SLOTS
    prefetch = 4

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.may_go_on = asyncio.Event()

    async def handle(self, body: int, message: Message) -> None:
        self.seen.append((body, message.attempt))
        await self.may_go_on.wait()


HELD = SLOTS * Gated.prefetch


@pytest.fixture
async def gated(declared: Declared, publisher: Publisher) -> Gated:
    gated = Gated()
    await declared(App("gated", [gated]))
    await publisher.publish_many(Gated, range(COUNT))
    return gated


async def test_slots_hold_as_many_as_their_prefetch_says_and_each_handles_one_at_a_time(
    gated: Gated, settings: Settings, connection: Connection
) -> None:
    running = Running(App("gated", [gated]), settings)
    await eventually(lambda: _waits(connection, COUNT - HELD))
    assert gated.seen == [(number, 1) for number in range(SLOTS)]
    gated.may_go_on.set()
    await eventually(lambda: len(gated.seen) == COUNT)
    assert gated.seen == [(number, 1) for number in range(COUNT)]
    await running.end()
    assert await depth(connection, "gated") == 0


async def test_what_waits_in_a_slot_when_a_worker_stops_is_put_back_at_once_and_counts_nothing(
    gated: Gated, settings: Settings, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rabbit_tasks")
    running = Running(App("gated", [gated]), settings.changed(grace=timedelta(seconds=20)))
    await eventually(lambda: _waits(connection, COUNT - HELD))
    running.worker.stop()
    await eventually(lambda: _waits(connection, COUNT - SLOTS))  # while what is in hand goes on
    assert running.is_running
    gated.may_go_on.set()
    await asyncio.wait_for(running.task, 15)
    assert gated.seen == [(number, 1) for number in range(SLOTS)]
    assert caplog.text.count("put back") == HELD - SLOTS
    back = await take_all(connection, "gated")
    assert sorted(int(one.body) for one in back) == list(range(SLOTS, COUNT))
    assert not any(one.properties.headers.get("x-delivery-count") for one in back)
    assert not any("x-retry-count" in one.properties.headers for one in back)


async def test_a_connection_lost_with_a_full_slot_loses_nothing_and_runs_nothing_twice(
    gated: Gated, settings: Settings, connection: Connection
) -> None:
    running = Running(App("gated", [gated]), settings)
    await eventually(lambda: _waits(connection, COUNT - HELD))
    held = running.worker._connection  # noqa: SLF001
    assert held is not None
    held.abort()  # as a cut cable would
    gated.may_go_on.set()
    await eventually(lambda: len(gated.seen) >= COUNT, within=20)
    await eventually(lambda: _waits(connection, 0))
    await running.end()
    assert sorted(gated.seen) == [(number, 1) for number in range(COUNT)]
    assert await depth(connection, "gated") == await depth(connection, "gated.parked") == 0


async def test_what_is_acked_together_is_none_that_is_still_in_hand(
    declared: Declared, publisher: Publisher, settings: Settings, connection: Connection
) -> None:
    class Stuck(Gated):
        """Handles all but one."""

        queue = "stuck"

        async def handle(self, body: int, message: Message) -> None:
            self.seen.append((body, message.attempt))
            if body == 3:
                await self.may_go_on.wait()

    stuck = Stuck()
    await declared(App("stuck", [stuck]))
    await publisher.publish_many(Stuck, range(COUNT))
    running = Running(App("stuck", [stuck]), settings)
    await eventually(lambda: len(stuck.seen) == COUNT)
    lost = running.worker._connection  # noqa: SLF001
    assert lost is not None
    channel = await lost.open()  # what was written before this is answered is with the broker
    await channel.close()
    lost.abort()
    await eventually(lambda: len(stuck.seen) >= COUNT)
    await running.drop()
    (left,) = await _left(connection)
    assert left == 3
    assert len(stuck.seen) == COUNT


async def _left(connection: Connection) -> list[int]:
    await eventually(lambda: depth(connection, "stuck"))
    return [int(one.body) for one in await take_all(connection, "stuck")]


async def _waits(connection: Connection, count: int) -> bool:
    return await depth(connection, "gated") == count
