"""SIGTERM and SIGINT: what is in hand is finished or put back, and nothing is spent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rabbit_tasks import App, Publisher
from rabbit_tasks.broker import Connection
from tests.conftest import eventually
from tests.support import patient, unruly
from tests.support.brokers import Broker
from tests.support.obedient import Obey, Order
from tests.support.obedient import app as obedient
from tests.support.queues import depth, take_all
from tests.support.workers import SOON, Runs, WorkerProcess, is_gone

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
PATIENT = "tests.support.patient:app"
QUEUES = [kind.queue for kind in patient.KINDS]

both_signals = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


async def stopped(worker: WorkerProcess) -> int:
    """Its exit code; it must end soon."""
    return await asyncio.to_thread(worker.wait, SOON)


async def publish_to_each(publisher: Publisher, order: Order) -> list[str]:
    return [await publisher.publish(kind, order) for kind in patient.KINDS]


@both_signals
async def test_a_handler_that_runs_is_finished_and_acked(
    number: int, publisher: Publisher, connection: Connection, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    await declared(patient.app)
    worker = start_worker(app=PATIENT).ready()
    ids = await publish_to_each(publisher, Order(do="sleep", seconds=0.6))
    await eventually(lambda: len(runs.all()) == 3)
    await publish_to_each(publisher, Order())  # not to be taken any more
    worker.signal(number)
    assert await stopped(worker) == 0
    assert sorted(row["id"] for row in runs.all("end")) == sorted(ids)
    assert len(runs.all()) == 3
    assert [await depth(connection, queue) for queue in QUEUES] == [1, 1, 1]
    assert "Traceback" not in worker.log


@pytest.mark.parametrize(
    "rounds", [12, pytest.param(30, marks=[pytest.mark.heavy, pytest.mark.timeout(300)])]
)
async def test_workers_in_a_row_put_back_what_they_could_not_finish(
    rounds: int, publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs, tmp_path: Path,
) -> None:  # fmt: skip
    """More than twice the delivery limit, or six times; async, thread and process handlers at once."""
    await declared(patient.app)
    ids = await publish_to_each(publisher, Order(do="sleep", seconds=600))
    loading: deque[tuple[WorkerProcess, Path]] = deque()
    for number in range(rounds + 2):
        if number < rounds:
            gate = tmp_path / f"gate-{number}"
            loading.append(
                (start_worker("--grace", "0.1", app=PATIENT, PATIENT_GATE=str(gate)), gate)
            )
        if number < 2:
            continue  # they load two ahead, behind their gates
        worker, gate = loading.popleft()
        gate.touch()
        await eventually(lambda n=number: len(runs.all()) == 3 * (n - 1))  # type: ignore[misc]
        worker.signal(signal.SIGTERM)
        assert await stopped(worker) == 0, worker.log
        assert "Traceback" not in worker.log
    for message_id in ids:
        assert runs.attempts(message_id) == [1] * rounds
    assert not runs.all("end")
    assert not any(row["redelivered"] for row in runs.all())
    for queue in QUEUES:
        (back,) = await take_all(connection, queue)
        assert back.body == Order(do="sleep", seconds=600).model_dump_json().encode()
        assert not {"x-retry-count", "x-error-type"} & set(back.properties.headers)
        assert back.properties.headers.get("x-delivery-count", 0) == 0  # (3.10 sends the 0)
        assert await depth(connection, f"{queue}.parked") == 0


async def test_a_thread_that_goes_on_does_not_hold_the_worker(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(patient.app)
    worker = start_worker("--grace", "0.2", "patient.thread", app=PATIENT).ready()
    await publisher.publish(patient.PatientInThread, Order(do="sleep", seconds=600))
    await eventually(lambda: runs.all())
    worker.signal(signal.SIGTERM)
    assert await stopped(worker) == 0
    assert await depth(connection, "patient.thread") == 1


@both_signals
async def test_a_second_signal_stops_now(
    number: int, publisher: Publisher, connection: Connection, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    await declared(patient.app)
    worker = start_worker("--grace", "10m", app=PATIENT).ready()
    ids = await publish_to_each(publisher, Order(do="sleep", seconds=600))
    await eventually(lambda: len(runs.all()) == 3)
    worker.signal(number)
    await eventually(lambda: "stopping" in worker.log)
    await asyncio.to_thread(time.sleep, 0.3)  # it must be waiting when the second one comes
    assert worker.is_running
    worker.signal(number)
    assert await stopped(worker) == 0
    for queue, message_id in zip(QUEUES, ids, strict=True):
        (back,) = await take_all(connection, queue)
        assert back.properties.text("message_id") == message_id
        assert "x-retry-count" not in back.properties.headers


@both_signals
async def test_an_idle_worker_stops_at_once(
    number: int, declared: Declared, start_worker: Start
) -> None:
    await declared(obedient)
    worker = start_worker().ready()
    worker.signal(number)
    assert await stopped(worker) == 0
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("listening", [False, True], ids=["refused", "silent"])
async def test_a_worker_without_a_broker_stops_at_once(
    listening: bool, start_worker: Start, tmp_path: Path
) -> None:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if listening:
            port.listen(16)  # takes connections, and never says a word
        url = f"amqp://127.0.0.1:{port.getsockname()[1]}/"
        worker = start_worker("obey.async", RABBIT_TASKS_URL=url)
        if listening:
            port.settimeout(10)
            talk, _ = await asyncio.to_thread(port.accept)
        else:
            await eventually(lambda: "next try" in worker.log)
        worker.signal(signal.SIGTERM)
        assert await stopped(worker) == 0
        if listening:
            talk.close()
    assert "Traceback" not in worker.log


async def test_a_message_that_is_held_because_its_retry_queue_is_missing_is_put_back(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    broker: Broker, vhost: str, runs: Runs,
) -> None:  # fmt: skip
    await declared(obedient)
    worker = start_worker("--grace", "0.2", "obey.async").ready()
    broker.delete(vhost, "queues", "obey.async.retry.1.200ms")
    await publisher.publish(Obey, Order(do="raise"))
    await eventually(lambda: "is held" in worker.log)
    worker.signal(signal.SIGTERM)
    assert await stopped(worker) == 0
    (back,) = await take_all(connection, "obey.async")
    assert "x-retry-count" not in back.properties.headers
    assert "x-error-type" not in back.properties.headers


async def test_signals_during_the_start_end_it(
    declared: Declared, start_worker: Start, tmp_path: Path
) -> None:
    """Whenever they come: while Python loads, while the children start, while it connects."""
    await declared(patient.app)
    early = []
    for tenths in (1, 4, 7):
        early.append(start_worker(app=PATIENT))
        await asyncio.to_thread(time.sleep, tenths / 10)  # the moments are the point
        early[-1].signal(signal.SIGTERM)
    for worker in early:
        # Before our own first line Python has its way with a signal, which does no harm.
        assert await stopped(worker) in (0, -signal.SIGTERM)
    gate = tmp_path / "gate"
    late = [start_worker("patient.async", app=PATIENT, PATIENT_GATE=str(gate)) for _ in range(6)]
    for worker in late:
        await eventually(lambda worker=worker: "at the gate" in worker.log)  # type: ignore[misc]
    gate.touch()
    for worker in late:  # some in the handshake, some before, some behind
        await asyncio.to_thread(time.sleep, 0.007)
        worker.signal(signal.SIGTERM)
    for worker in late:
        assert await stopped(worker) == 0
    for worker in (*early, *late):
        for word in ("traceback", "error", "never", "destroyed"):
            assert word not in worker.log.lower(), worker.log


async def test_a_signal_ends_a_start_that_hangs(start_worker: Start, declared: Declared) -> None:
    await declared(unruly.slow_to_open)
    worker = start_worker("--grace", "0.5", app="tests.support.unruly:slow_to_open")
    await eventually(lambda: "lifespan: opening" in worker.log)
    worker.signal(signal.SIGTERM)
    assert await stopped(worker) == 0
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_child_outlives_its_worker(
    number: int, publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    """Not even one that never lets go of the interpreter, as a bad regular expression does."""
    await declared(unruly.app)
    await declared(patient.app)
    workers = [
        start_worker("--grace", "0.2", "unruly.endless", app="tests.support.unruly:app").ready(),
        start_worker("--grace", "0.2", "patient.process", app=PATIENT).ready(),
    ]
    await publisher.publish(unruly.Endless, b"")
    await publisher.publish(patient.PatientInProcess, Order(do="sleep", seconds=600))
    await eventually(lambda: len(runs.all()) == 2)
    children = [row["pid"] for row in runs.all()]
    assert not any(is_gone(pid) for pid in children)
    for worker in workers:
        worker.signal(number)
    for worker in workers:
        assert await stopped(worker) == (-number if number == signal.SIGKILL else 0)
    await eventually(lambda: all(is_gone(pid) for pid in children))
    for worker in workers:
        with pytest.raises(ProcessLookupError):  # nor anything else of its group
            await eventually(lambda worker=worker: os.killpg(worker.pid, 0))  # type: ignore[misc]
