"""Workers that die with a message in their hands: counted, given air, parked; and what is no death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

import pytest

from rabbit_tasks import App, Publisher, Settings
from rabbit_tasks.broker import Connection
from rabbit_tasks.parking import ParkedMessage, browse
from tests.conftest import eventually
from tests.support import mortal
from tests.support.brokers import Broker
from tests.support.mortal import Mortal
from tests.support.obedient import Order
from tests.support.queues import depth
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
APP = "tests.support.mortal:app"


class Fleet:
    """So many workers; one that died is replaced at once."""

    def __init__(self, start: Callable[[], WorkerProcess], size: int) -> None:
        self._start = start
        self.workers = [start() for _ in range(size)]
        self.deaths = 0
        for worker in self.workers:
            worker.ready()

    def tend(self) -> None:
        for i, worker in enumerate(self.workers):
            if not worker.is_running:
                self.deaths += 1
                self.workers[i] = self._start()

    def logged(self, text: str) -> int:
        return sum(worker.log.count(text) for worker in self.workers)


async def parked(connection: Connection, queue: str = "mortal") -> list[ParkedMessage]:
    return [one async for one in browse(connection, queue)]


async def test_a_deadly_message_costs_its_limit_of_workers_and_is_parked_with_their_number(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    """Meanwhile the fleet does more than half of what it does without it."""
    await declared(mortal.app)
    fleet = Fleet(lambda: start_worker(app=APP), 4)

    async def rate(until: Callable[[], Awaitable[bool]]) -> float:
        """Messages done each second, of a backlog that does not end."""
        done, began = len(runs.all("end")), time.monotonic()
        while not await until():
            fleet.tend()
            if await depth(connection, "mortal") < 50:
                await publisher.publish_many(Mortal, [Order(seconds=0.02)] * 50)
            await asyncio.sleep(0.02)
        return (len(runs.all("end")) - done) / (time.monotonic() - began)

    over = time.monotonic() + 4

    async def time_is_up() -> bool:
        return time.monotonic() > over

    before = await rate(time_is_up)
    deadly = await publisher.publish(Mortal, Order(do="kill"))

    async def is_parked() -> bool:
        return await depth(connection, "mortal.parked") > 0

    meanwhile = await rate(is_parked)
    assert fleet.deaths == 3
    assert runs.attempts(deadly) == [1] * 3  # a death is no attempt
    (one,) = await parked(connection)
    assert one.id == deadly
    assert one.reason == "its worker died 3 times"
    assert one.origin == "mortal"
    assert one.properties.header("x-retry-count") is None
    crashes = one.properties.header("x-crashes")
    assert crashes["count"] == 3
    assert crashes["worker"].rpartition(":")[2] in {str(w.pid) for w in fleet.workers}
    assert abs(datetime.fromisoformat(crashes["when"]).timestamp() - time.time()) < 30
    assert meanwhile > before / 2
    starts = [row["time"] for row in runs.all("start", deadly)]
    assert starts[1] - starts[0] < 0.5  # at once after the first
    assert starts[2] - starts[1] > 1  # and then with a pause


async def test_what_dies_twice_beside_a_deadly_message_is_done_in_the_end(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    """And then its count begins anew."""
    await declared(mortal.app)
    unlucky = await publisher.publish(Mortal, Order(seconds=1))
    for times in (1, 2):
        worker = start_worker(app=APP).ready()
        await eventually(lambda times=times: len(runs.all("start", unlucky)) == times)  # type: ignore[misc]
        worker.kill()
    worker = start_worker(app=APP).ready()
    await eventually(lambda: runs.all("end", unlucky), within=20)
    assert "its worker died 2 times" in worker.log
    assert await asyncio.to_thread(worker.terminate) == 0
    assert all([await depth(connection, q.name) == 0 for q in mortal.app.topology.queues])


async def test_a_failed_attempt_ends_the_count_of_deaths(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(mortal.app)
    message_id = await publisher.publish(Mortal, Order(do="raise", seconds=1))
    for times in (1, 2):
        worker = start_worker(app=APP).ready()
        await eventually(lambda times=times: len(runs.all("start", message_id)) == times)  # type: ignore[misc]
        worker.kill()
    worker = start_worker(app=APP).ready()
    await eventually(lambda: depth(connection, "mortal.parked"), within=30)
    (one,) = await parked(connection)
    assert one.reason == "failed 2 attempts of 2"
    assert runs.attempts(message_id) == [1, 1, 1, 2]
    assert one.properties.header("x-crashes") is None


# --- healthy interruptions ------------------------------------------------------------------------


async def interrupted(
    times: int, interrupt: Callable[[], Awaitable[None]], publisher: Publisher,
    connection: Connection, runs: Runs, worker: Callable[[], WorkerProcess],
) -> None:  # fmt: skip
    """A message in hand all the while; and one for each time, which shows that the worker works."""
    long = await publisher.publish(Mortal, Order(seconds=2 + 4 * times))
    await eventually(lambda: runs.all("start", long), within=20)
    for _ in range(times):
        await interrupt()
        assert worker().is_running
    await eventually(lambda: runs.all("end", long), within=60 + 5 * times)
    await eventually(lambda: _is_empty(connection), within=30)
    assert await parked(connection) == []
    assert "Traceback" not in worker().log


async def _is_empty(connection: Connection) -> bool:
    return all([await depth(connection, q.name) == 0 for q in mortal.app.topology.queues])
