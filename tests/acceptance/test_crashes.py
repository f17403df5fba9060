"""Workers that die with a message in their hands: counted, given air, parked; and what is no death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from rabbit_tasks import App, Publisher, Settings
from rabbit_tasks.broker import Connection, connect
from rabbit_tasks.parking import ParkedMessage, browse
from tests.conftest import eventually
from tests.support import mortal
from tests.support.brokers import Broker
from tests.support.line import line
from tests.support.mortal import Common, Mortal
from tests.support.obedient import Order
from tests.support.queues import depth
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
APP, COMMON = "tests.support.mortal:app", "tests.support.mortal:common"


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
    fleet.tend()
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
    assert starts[1] - starts[0] < 0.9  # at once after the first
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
    await eventually(lambda: runs.all("end", unlucky))
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
    await eventually(lambda: depth(connection, "mortal.parked"))
    (one,) = await parked(connection)
    assert one.reason == "failed 2 attempts of 2"
    assert runs.attempts(message_id) == [1, 1, 1, 2]
    assert one.properties.header("x-crashes") is None


# --- healthy interruptions ------------------------------------------------------------------------


async def _is_empty(connection: Connection, app: App) -> bool:
    return all([await depth(connection, queue.name) == 0 for queue in app.topology.queues])


@pytest.mark.parametrize(
    "times", [8, pytest.param(30, marks=[pytest.mark.heavy, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize("workers", [1, 2])
async def test_lost_connections_park_nothing(
    workers: int, times: int, publisher: Publisher, connection: Connection, broker: Broker,
    vhost: str, declared: Declared, start_worker: Start, runs: Runs, tmp_path: Path,
) -> None:  # fmt: skip
    """The message in hand is never settled meanwhile, and its broker counts each time."""
    await declared(mortal.common)
    async with line(broker) as one, line(broker) as another:
        lines = [one, another][:workers]
        fleet = [
            start_worker(
                app=COMMON, RABBIT_TASKS_URL=each.url(vhost), RABBIT_TASKS_RECONNECT_CAP="1s"
            )
            for each in lines
        ]
        for worker in fleet:
            await eventually(partial(_connected, worker, 1))
        end = tmp_path / "end"
        long = await publisher.publish(Common, Order(until=str(end)))
        await eventually(lambda: runs.all("start", long))
        for lost in range(times):
            each, worker = lines[lost % workers], fleet[lost % workers]
            before = worker.log.count("connected to RabbitMQ")
            assert each.cut() > 0
            await eventually(partial(_connected, worker, before + 1))
            # A copy must be confirmed once in so many deliveries as the limit allows.
            await asyncio.sleep(0.5)
        end.touch()
        await eventually(lambda: runs.all("end", long))
        await eventually(partial(_is_empty, connection, mortal.common))
        assert len(runs.all("start", long)) <= workers  # never two at once in one process
        for worker in fleet:
            assert await asyncio.to_thread(worker.terminate) == 0
            assert "Traceback" not in worker.log


@pytest.mark.parametrize(
    ("verb", "times"),
    [
        ("kill", 3),
        pytest.param("kill", 30, marks=[pytest.mark.heavy, pytest.mark.timeout(1200)]),
        pytest.param("stop", 30, marks=[pytest.mark.heavy, pytest.mark.timeout(1200)]),
    ],
)
async def test_broker_restarts_park_nothing(
    verb: str, times: int, settings: Settings, broker: Broker, declared: Declared,
    start_worker: Start, runs: Runs, tmp_path: Path,
) -> None:  # fmt: skip
    if not broker.can_be_hurt:
        pytest.skip("this broker must not be stopped: RABBIT_TASKS_TEST_BROKER is not set")
    await declared(mortal.app)
    fleet = [start_worker(app=APP).ready() for _ in range(2)]
    async with Publisher.open(settings) as publisher:
        longs = await publisher.publish_many(Mortal, [Order(until=str(tmp_path / "end"))] * 2)
    await eventually(lambda: {row["id"] for row in runs.all("start")} == set(longs))
    await asyncio.sleep(2)  # a quorum queue's first half second does not survive a SIGKILL
    for restarts in range(1, times + 1):
        await asyncio.to_thread(broker.hurt, verb)
        await asyncio.to_thread(broker.hurt, "start")
        for worker in fleet:
            await eventually(partial(_connected, worker, restarts + 1), within=40)
        # A copy must be confirmed once in so many deliveries as the limit allows, and here it is low.
        await asyncio.sleep(2)
    (tmp_path / "end").touch()
    await eventually(lambda: {row["id"] for row in runs.all("end")} == set(longs))
    opened = await connect(settings, "test")
    await eventually(partial(_is_empty, opened, mortal.app), within=60)
    await opened.end()
    for worker in fleet:
        assert await asyncio.to_thread(worker.terminate) == 0
        assert "Traceback" not in worker.log


def _connected(worker: WorkerProcess, times: int) -> bool:
    return worker.log.count("connected to RabbitMQ") >= times
