"""The broker is hurt, or its topology: the worker comes back by itself, and every message is there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from urllib.parse import quote

import pytest

from rabbit_tasks import App, Consumer, Publisher, PublishError, Settings
from rabbit_tasks.broker import Connection, connected
from tests.conftest import eventually
from tests.support import patient, queues
from tests.support.brokers import ROOT, Broker
from tests.support.line import line
from tests.support.obedient import Obey, ObeyInProcess, ObeyInThread, Order
from tests.support.obedient import app as obedient
from tests.support.queues import depth, take_all
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
KINDS = (Obey, ObeyInThread, ObeyInProcess)
SLOTS = {"obey.async": 2, "obey.thread": 2, "obey.process": 1}


async def declare_by_hand(url: str, app: str = "tests.support.obedient:app") -> None:
    """What the log says to type."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rabbit_tasks", "--app", app, "topology", "declare",
        cwd=ROOT, env={**os.environ, "RABBIT_TASKS_URL": url},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


def assert_clean(worker: WorkerProcess) -> None:
    assert worker.is_running, worker.log
    for word in ("Traceback", "never retrieved", "please report"):
        assert word not in worker.log, worker.log


def held(worker: WorkerProcess, message_id: str) -> list[str]:
    return [
        line["message"] for line in worker.lines()
        if message_id in line["message"] and "is held" in line["message"]
    ]  # fmt: skip


# --- a part of the topology is gone ---------------------------------------------------------------


async def test_with_a_part_of_its_topology_gone_it_holds_the_message_until_the_part_is_back(
    url: str, publisher: Publisher, connection: Connection, declared: Declared,
    start_worker: Start, broker: Broker, vhost: str, runs: Runs,
) -> None:  # fmt: skip
    """A retry queue, a parking queue, a binding; each with its consumer, all at once."""
    await declared(obedient)
    worker = start_worker().ready()
    broker.delete(vhost, "queues", "obey.async.retry.1.200ms")
    broker.delete(vhost, "queues", "obey.thread.parked")
    broker.delete(vhost, "bindings", "e", "parking-lot", "q", "obey.process.parked", "obey.process")
    retried = await publisher.publish(Obey, Order(do="raise", times=1))
    parked = await publisher.publish(ObeyInThread, Order(do="park"))
    unbound = await publisher.publish(ObeyInProcess, Order(do="park"))
    for message_id, missing in (
        (retried, "obey.async.retry.1.200ms"), (parked, "obey.thread"), (unbound, "obey.process"),
    ):  # fmt: skip
        await eventually(lambda m=message_id: held(worker, m))  # type: ignore[misc]
        (line, *_) = held(worker, message_id)
        assert missing in line
        assert "missing" in line or "no such queue" in line
        assert "rabbit-tasks topology declare" in line
    others = [await publisher.publish(kind, Order()) for kind in (Obey, ObeyInThread)]
    await eventually(lambda: {row["id"] for row in runs.all("end")} == set(others), within=2)
    await eventually(lambda: len(held(worker, retried)) == 3, within=8)
    await declare_by_hand(url)
    await eventually(lambda: runs.all("end", retried), within=10)
    for queue, message_id in (("obey.thread", parked), ("obey.process", unbound)):
        await eventually(lambda q=queue: depth(connection, f"{q}.parked"), within=10)  # type: ignore[misc]
        (found,) = await take_all(connection, f"{queue}.parked")
        assert found.properties.text("message_id") == message_id
        assert runs.attempts(message_id) == [1]
    assert runs.attempts(retried) == [1, 2]
    assert_clean(worker)


async def test_with_the_parking_exchange_gone_it_holds_the_message_and_does_not_spin(
    url: str, publisher: Publisher, connection: Connection, declared: Declared,
    start_worker: Start, broker: Broker, vhost: str, runs: Runs,
) -> None:  # fmt: skip
    """Nor with a missing retry queue: what the broker returned is what the log tells of."""
    await declared(obedient)
    worker = start_worker("obey.async").ready()
    broker.delete(vhost, "exchanges", "parking-lot")
    parked = await publisher.publish(Obey, Order(do="park"))
    await eventually(lambda: held(worker, parked))
    assert "parking-lot" in held(worker, parked)[0]
    assert "rabbit-tasks topology declare" in held(worker, parked)[0]
    other = await publisher.publish(Obey, Order())
    await eventually(lambda: runs.all("end", other), within=2)

    broker.delete(vhost, "queues", "obey.async.retry.1.200ms")
    retried = await publisher.publish(Obey, Order(do="raise", times=1))

    def returned() -> int:
        stats = broker.api("GET", f"/vhosts/{quote(vhost, safe='')}").get("message_stats", {})
        return int(stats.get("return_unroutable", 0))

    await eventually(returned, within=15)  # (the broker counts every five seconds)
    assert returned() <= len(held(worker, retried)) <= 6  # 0.5, 1, 2, 4 s and a little
    assert len(worker.log.splitlines()) < 20
    await declare_by_hand(url)
    await eventually(lambda: runs.all("end", retried), within=15)
    await eventually(lambda: depth(connection, "obey.async.parked"), within=15)
    assert runs.attempts(retried) == [1, 2]
    assert runs.attempts(parked) == [1]
    assert_clean(worker)


# --- under load -----------------------------------------------------------------------------------


class Load:
    """Publishes to every consumer, on and on; knows what the broker has confirmed."""

    def __init__(self, publisher: Publisher, orders: tuple[Order, ...]) -> None:
        self.confirmed: list[str] = []
        self.unsure: list[str] = []
        self._publisher = publisher
        self._orders = cycle(orders)
        self._number = 0

    async def one(self, kind: type[Consumer[Order]]) -> None:
        self._number += 1
        message_id = f"load-{self._number}"
        try:
            await self._publisher.publish(kind, next(self._orders), message_id=message_id)
        except PublishError:
            self.unsure.append(message_id)
            await asyncio.sleep(0.1)
        else:
            self.confirmed.append(message_id)

    async def go_on(self) -> None:
        for kind in cycle((Obey, ObeyInThread, Obey, ObeyInThread, ObeyInProcess)):
            await self.one(kind)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def under_load(settings: Settings, *orders: Order) -> AsyncIterator[Load]:
    async with Publisher.open(settings) as publisher:
        load = Load(publisher, orders)
        task = asyncio.create_task(load.go_on())
        try:
            yield load
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task.exception()


async def consumers(broker: Broker, vhost: str, connection: Connection) -> Counter[str]:
    """Per queue its consumers, each alone on a channel and with prefetch 1."""
    rows = await asyncio.to_thread(broker.api, "GET", f"/consumers/{quote(vhost, safe='')}")
    # (It goes on listing the consumers of a queue that was deleted, without their channels.)
    rows = [row for row in rows if row["channel_details"]]
    channels = {row["channel_details"]["name"] for row in rows}
    if len(channels) != len(rows) or any(row["prefetch_count"] != 1 for row in rows):
        return Counter()
    listed = Counter(row["queue"]["name"] for row in rows)
    counted = Counter({queue: await queues.consumers(connection, queue) for queue in SLOTS})
    return listed if listed == counted else Counter()


async def works_again(settings: Settings, runs: Runs) -> None:
    """Within 30 s and without help, every consumer does what is published now."""
    async with Publisher.open(settings) as publisher:
        probes = {await publisher.publish(kind, Order()) for kind in KINDS}
        await eventually(lambda: probes <= {r["id"] for r in runs.all("end")}, within=30)


def runs_at_once(runs: Runs) -> list[str]:
    """Messages that had two runs at one moment."""
    twice = []
    rows = sorted(runs.all("start") + runs.all("end"), key=lambda row: row["time"])
    going: Counter[tuple[str, int]] = Counter()
    for row in rows:
        key = (row["id"], row["attempt"])
        if row["event"] == "end":
            going[key] -= 1
        else:
            going[key] += 1
            if going[key] > 1 and row["id"] not in twice:
                twice.append(row["id"])
    return twice


async def everything_is_accounted_for(
    settings: Settings, broker: Broker, vhost: str, runs: Runs, load: Load, worker: WorkerProcess
) -> None:
    def undone() -> set[str]:
        return set(load.confirmed) - {row["id"] for row in runs.all("end")}

    try:
        await eventually(lambda: not undone(), within=30)
    except AssertionError:
        raise AssertionError(f"lost: {sorted(undone())}") from None
    async with connected(settings, "test") as connection:
        for queue in obedient.topology.queues:
            await eventually(partial(_is_empty, connection, queue.name))

        async def one_consumer_per_slot() -> bool:
            return await consumers(broker, vhost, connection) == Counter(SLOTS)

        await eventually(one_consumer_per_slot, within=25)
    assert not runs_at_once(runs)
    assert_clean(worker)


def _ended(runs: Runs, queue: str) -> int:
    return sum(row["queue"] == queue for row in runs.all("end"))


async def _is_empty(connection: Connection, queue: str) -> bool:
    return await depth(connection, queue) == 0


SOME_FAIL = (Order(do="sleep", seconds=0.05), Order(), Order(do="raise", times=1))


async def test_connections_closed_by_an_operator_again_and_again(
    settings: Settings, broker: Broker, vhost: str, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(obedient)
    worker = start_worker().ready()
    async with under_load(settings, *SOME_FAIL) as load:
        for times in range(1, 4):

            async def lost_again(times: int = times) -> bool:
                await asyncio.to_thread(broker.close_connections, vhost)
                return worker.log.count("connection lost: 320 CONNECTION_FORCED") >= times

            await eventually(lost_again, within=15)  # (the list of connections comes late)
            await eventually(partial(_connected, worker, times + 1), within=30)
        await works_again(settings, runs)
    await everything_is_accounted_for(settings, broker, vhost, runs, load, worker)


async def test_a_main_queue_that_was_deleted_is_consumed_again_once_it_is_back(
    settings: Settings, url: str, broker: Broker, vhost: str, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    """What was in it went with it; the handlers in hand end, and the other queues go on."""
    await declared(obedient)
    worker = start_worker().ready()
    async with under_load(settings, Order(do="sleep", seconds=0.02), Order()) as load:
        await eventually(lambda: len(runs.all("end")) > 20)
        for queue in ("obey.async", "obey.thread"):
            broker.delete(vhost, "queues", queue)
        await eventually(
            lambda: all(f"{q}: not consuming" in worker.log for q in ("obey.async", "obey.thread"))
        )
        before = _ended(runs, "obey.process")
        await eventually(lambda: _ended(runs, "obey.process") > before + 2)
        assert "rabbit-tasks topology declare" in worker.log
        assert worker.log.count("not consuming") < 20
        await declare_by_hand(url)
        load.confirmed.clear()
        await works_again(settings, runs)
    await everything_is_accounted_for(settings, broker, vhost, runs, load, worker)
    assert {r["id"] for r in runs.all("start")} == {r["id"] for r in runs.all("end")}


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_a_broker_that_goes_and_comes_back_finds_its_worker_back(
    verb: str, settings: Settings, broker: Broker, vhost: str, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    if not broker.can_be_hurt:
        pytest.skip("this broker must not be stopped: RABBIT_TASKS_TEST_BROKER is not set")
    await declared(obedient)
    worker = start_worker().ready()
    async with under_load(settings, *SOME_FAIL) as load:
        await asyncio.sleep(2)  # a quorum queue's first half second does not survive a SIGKILL
        await asyncio.to_thread(broker.hurt, verb)
        await eventually(lambda: "next try in" in worker.log)
        await asyncio.to_thread(broker.hurt, "start")
        await works_again(settings, runs)
    await everything_is_accounted_for(settings, broker, vhost, runs, load, worker)


# --- a connection lost in mid-handler --------------------------------------------------------------


async def test_a_connection_lost_in_mid_handler_makes_no_second_run(
    publisher: Publisher, connection: Connection, broker: Broker, vhost: str, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    """The redelivery joins the run that goes on; twice lost; for async, thread and process."""
    await declared(patient.app)
    async with line(broker) as cable:
        worker = start_worker(app="tests.support.patient:app", RABBIT_TASKS_URL=cable.url(vhost))
        await eventually(partial(_connected, worker, 1), within=30)  # (this loop is the line)
        failing = [
            await publisher.publish(kind, Order(do="raise", seconds=4, times=1))
            for kind in patient.KINDS
        ]
        await eventually(lambda: len(runs.all()) == 3)
        for times in (1, 2):
            assert cable.cut() == 2
            await eventually(partial(_connected, worker, times + 1))
        assert " failed: " not in worker.log, "too slow: the handlers ended before the second loss"
        await eventually(lambda: len(runs.all("end")) == 3, within=20)
        assert all(runs.attempts(message_id) == [1, 2] for message_id in failing)

        # Lost while it runs and through before the redelivery: the outcome waits for it.
        quick = [
            await publisher.publish(kind, Order(do="sleep", seconds=0.3)) for kind in patient.KINDS
        ]
        await eventually(lambda: {row["id"] for row in runs.all()} >= set(quick))
        cable.down()
        await eventually(lambda: {row["id"] for row in runs.all("end")} >= set(quick))
        await cable.up()
        await eventually(partial(_connected, worker, 4), within=15)
        for queue in patient.app.topology.queues:
            await eventually(partial(_is_empty, connection, queue.name))
        marks = [await publisher.publish(kind, Order()) for kind in patient.KINDS]
        await eventually(lambda: {row["id"] for row in runs.all("end")} >= set(marks))
        assert all(runs.attempts(message_id) == [1] for message_id in quick)
        assert_clean(worker)
        assert await asyncio.to_thread(worker.terminate, 10) == 0
    for kind in patient.KINDS:  # acked, all of them: nothing comes back
        assert await depth(connection, kind.queue) == 0
        assert await depth(connection, f"{kind.queue}.parked") == 0


async def test_a_handler_that_outlasts_the_brokers_consumer_timeout_runs_once(
    publisher: Publisher, connection: Connection, broker: Broker, vhost: str, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    """The broker cancels the consumer and gives the message to the other slot, which joins."""
    if int(broker.version.split(".")[0]) < 4 or broker.version.startswith(("4.0", "4.1", "4.2")):
        pytest.skip("before 4.3 the shortest timeout that can be tested is a minute")
    await declared(obedient)
    broker.api(
        "PUT", f"/policies/{quote(vhost, safe='')}/impatient",
        {"pattern": "^obey", "definition": {"consumer-timeout": 1500}, "apply-to": "quorum_queues"},
    )  # fmt: skip
    worker = start_worker("obey.async").ready()
    message_id = await publisher.publish(Obey, Order(seconds=5))
    await eventually(lambda: runs.all("end"))
    await eventually(lambda: f"lost with message {message_id} in hand" in worker.log)
    others = {await publisher.publish(Obey, Order()) for _ in range(4)}
    await eventually(lambda: {row["id"] for row in runs.all("end")} == others | {message_id})
    assert runs.attempts(message_id) == [1]
    assert_clean(worker)
    assert await asyncio.to_thread(worker.terminate, 10) == 0
    assert await depth(connection, "obey.async") == 0


def _connected(worker: WorkerProcess, times: int) -> bool:
    return worker.log.count("connected to RabbitMQ") >= times
