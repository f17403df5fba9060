"""A part of the topology is missing, or the connection is: what is in hand is held, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import quote

from rabbit_tasks import App, Publisher
from rabbit_tasks.broker import Connection
from tests.conftest import eventually
from tests.support import patient
from tests.support.brokers import Broker
from tests.support.faults import declare_by_hand
from tests.support.line import line
from tests.support.obedient import Obey, ObeyInProcess, ObeyInThread, Order
from tests.support.obedient import app as obedient
from tests.support.queues import depth, take_all
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]


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
    await eventually(lambda: {row["id"] for row in runs.all("end")} == set(others))
    await eventually(lambda: len(held(worker, retried)) == 3)
    await declare_by_hand(url)
    await eventually(lambda: runs.all("end", retried))
    for queue, message_id in (("obey.thread", parked), ("obey.process", unbound)):
        await eventually(lambda q=queue: depth(connection, f"{q}.parked"))  # type: ignore[misc]
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
    await eventually(lambda: runs.all("end", other))

    broker.delete(vhost, "queues", "obey.async.retry.1.200ms")
    retried = await publisher.publish(Obey, Order(do="raise", times=1))

    def returned() -> int:
        stats = broker.api("GET", f"/vhosts/{quote(vhost, safe='')}").get("message_stats", {})
        return int(stats.get("return_unroutable", 0))

    await eventually(returned)  # (the broker counts every five seconds)
    assert returned() <= len(held(worker, retried)) <= 6  # 0.5, 1, 2, 4 s and a little
    assert len(worker.log.splitlines()) < 20
    await declare_by_hand(url)
    await eventually(lambda: runs.all("end", retried))
    await eventually(lambda: depth(connection, "obey.async.parked"))
    assert runs.attempts(retried) == [1, 2]
    assert runs.attempts(parked) == [1]
    assert_clean(worker)


# --- a connection lost in mid-handler --------------------------------------------------------------


async def test_a_connection_lost_in_mid_handler_makes_no_second_run(
    publisher: Publisher, connection: Connection, broker: Broker, vhost: str, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    """The redelivery joins the run that goes on; twice lost; for async, thread and process."""
    await declared(patient.app)
    async with line(broker) as cable:
        worker = start_worker(app="tests.support.patient:app", RABBIT_TASKS_URL=cable.url(vhost))
        await eventually(partial(_connected, worker, 1))  # (this loop is the line)
        failing = [
            await publisher.publish(kind, Order(do="raise", seconds=4, times=1))
            for kind in patient.KINDS
        ]
        await eventually(lambda: len(runs.all()) == 3)
        for times in (1, 2):
            assert cable.cut() == 2
            await eventually(partial(_connected, worker, times + 1))
        assert " failed: " not in worker.log, "too slow: the handlers ended before the second loss"
        await eventually(lambda: len(runs.all("end")) == 3)
        assert all(runs.attempts(message_id) == [1, 2] for message_id in failing)

        # Lost while it runs and through before the redelivery: the outcome waits for it.
        quick = [
            await publisher.publish(kind, Order(do="sleep", seconds=0.3)) for kind in patient.KINDS
        ]
        await eventually(lambda: {row["id"] for row in runs.all()} >= set(quick))
        cable.down()
        await eventually(lambda: {row["id"] for row in runs.all("end")} >= set(quick))
        await cable.up()
        await eventually(partial(_connected, worker, 4))
        for queue in patient.app.topology.queues:
            await eventually(partial(_is_empty, connection, queue.name))
        marks = [await publisher.publish(kind, Order()) for kind in patient.KINDS]
        await eventually(lambda: {row["id"] for row in runs.all("end")} >= set(marks))
        assert all(runs.attempts(message_id) == [1] for message_id in quick)
        assert_clean(worker)
        assert await asyncio.to_thread(worker.terminate) == 0
    for kind in patient.KINDS:  # acked, all of them: nothing comes back
        assert await depth(connection, kind.queue) == 0
        assert await depth(connection, f"{kind.queue}.parked") == 0


def _connected(worker: WorkerProcess, times: int) -> bool:
    return worker.log.count("connected to RabbitMQ") >= times


async def _is_empty(connection: Connection, queue: str) -> bool:
    return await depth(connection, queue) == 0
