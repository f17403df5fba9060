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
COUNT = 12


class Gated(Consumer[int]):
    """Handles nothing before it may."""

    queue = "gated"
    prefetch = 8

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.may_go_on = asyncio.Event()

    async def handle(self, body: int, message: Message) -> None:
        self.seen.append((body, message.attempt))
        await self.may_go_on.wait()


@pytest.fixture
async def gated(declared: Declared, publisher: Publisher) -> Gated:
    gated = Gated()
    await declared(App("gated", [gated]))
    await publisher.publish_many(Gated, range(COUNT))
    return gated


async def test_a_slot_holds_as_many_as_its_prefetch_says_and_handles_one_after_another(
    gated: Gated, settings: Settings, connection: Connection
) -> None:
    running = Running(App("gated", [gated]), settings)
    await eventually(lambda: _waits(connection, COUNT - Gated.prefetch))
    assert gated.seen == [(0, 1)]
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
    await eventually(lambda: _waits(connection, COUNT - Gated.prefetch))
    running.worker.stop()
    await eventually(lambda: _waits(connection, COUNT - 1))  # while the one in hand goes on
    assert running.is_running
    gated.may_go_on.set()
    await asyncio.wait_for(running.task, 15)
    assert gated.seen == [(0, 1)]
    assert caplog.text.count("put back") == Gated.prefetch - 1
    back = await take_all(connection, "gated")
    assert sorted(int(one.body) for one in back) == list(range(1, COUNT))
    assert not any(one.properties.headers.get("x-delivery-count") for one in back)
    assert not any("x-retry-count" in one.properties.headers for one in back)


async def test_a_connection_lost_with_a_full_slot_loses_nothing_and_runs_nothing_twice(
    gated: Gated, settings: Settings, connection: Connection
) -> None:
    running = Running(App("gated", [gated]), settings)
    await eventually(lambda: _waits(connection, COUNT - Gated.prefetch))
    held = running.worker._connection  # noqa: SLF001
    assert held is not None
    held.abort()  # as a cut cable would
    gated.may_go_on.set()
    await eventually(lambda: len(gated.seen) >= COUNT, within=20)
    await eventually(lambda: _waits(connection, 0))
    await running.end()
    assert sorted(gated.seen) == [(number, 1) for number in range(COUNT)]
    assert await depth(connection, "gated") == await depth(connection, "gated.parked") == 0


async def _waits(connection: Connection, count: int) -> bool:
    return await depth(connection, "gated") == count
