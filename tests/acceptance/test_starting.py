"""What keeps a worker from starting is one line with the way out; what will pass, it waits for."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rabbit_tasks import App, Publisher
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.line import Line
from tests.support.obedient import Obey, Order
from tests.support.obedient import app as obedient
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]


async def refusal(worker: WorkerProcess, code: int = 1) -> str:
    """The one line that it says before it ends."""
    assert await asyncio.to_thread(worker.wait, 15) == code, worker.log
    (line,) = worker.log.splitlines()
    assert line.startswith("error: ")
    return line


async def test_a_worker_whose_queues_are_missing_says_what_to_type(start_worker: Start) -> None:
    line = await refusal(start_worker("obey.async"))
    for name in ("parking-lot", "obey.async", "obey.async.retry.2.400ms", " and 4 more; create"):
        assert name in line
    assert "rabbit-tasks topology declare" in line
    assert "obey.thread" not in line


async def test_one_retry_queue_missing_is_enough_to_refuse(
    start_worker: Start, declared: Declared, broker: Broker, vhost: str
) -> None:
    await declared(obedient)
    broker.delete(vhost, "queues", "obey.thread.retry.2.400ms")
    line = await refusal(start_worker())
    assert "missing: obey.thread.retry.2.400ms; create" in line


async def test_with_declare_it_creates_them_and_works(
    start_worker: Start, publisher: Publisher, runs: Runs
) -> None:
    worker = start_worker("--declare", "obey.async").ready()
    message_id = await publisher.publish(Obey, Order(do="raise", times=2))
    await eventually(lambda: runs.all("end", message_id))
    assert runs.attempts(message_id) == [1, 2, 3]
    assert worker.log.count("created obey.async") == 8


def resident(pid: int) -> float:
    """MiB of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@pytest.mark.parametrize("queues", [["obey.async"], []], ids=["one consumer", "all of them"])
async def test_an_idle_worker_takes_less_than_60_mib(
    queues: list[str], start_worker: Start, declared: Declared
) -> None:
    await declared(obedient)
    worker = start_worker(*queues).ready()
    assert 10 < resident(worker.pid) < 60


async def test_who_may_not_declare_may_work(
    start_worker: Start, declared: Declared, broker: Broker, vhost: str, publisher: Publisher,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(obedient)
    name = f"worker-{vhost[-8:]}"
    broker.create_user(name, "secret-word")
    try:
        broker.allow(vhost, name, configure="^$")
        start_worker(RABBIT_TASKS_USER=name, RABBIT_TASKS_PASSWORD="secret-word").ready()
        message_id = await publisher.publish(Obey, Order(do="raise"))
        await eventually(lambda: len(runs.attempts(message_id)) == 3)
        broker.allow(vhost, name, configure="^$", write="^$", read="^$")
        line = await refusal(
            start_worker("--declare", RABBIT_TASKS_USER=name, RABBIT_TASKS_PASSWORD="secret-word")
        )
        assert "set_permissions" in line
        assert "secret-word" not in line
    finally:
        broker.delete_user(name)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("RABBIT_TASKS_PASSWORD", "wrong/wor:d", "RABBIT_TASKS_PASSWORD"),
        ("RABBIT_TASKS_VHOST", "no/such", "add_vhost"),
        ("RABBIT_TASKS_USER", "nobody", "RABBIT_TASKS_USER"),
    ],
)
async def test_who_is_not_let_in_is_told_by_which_setting(
    setting: str, value: str, said: str, start_worker: Start
) -> None:
    line = await refusal(start_worker(**{setting: value}))
    assert said in line
    assert "wrong/wor:d" not in line


async def test_a_user_without_the_virtual_host_is_told_the_permission(
    start_worker: Start, broker: Broker, vhost: str
) -> None:
    name = f"stranger-{vhost[-8:]}"
    broker.create_user(name, "secret-word")
    try:
        line = await refusal(
            start_worker(RABBIT_TASKS_USER=name, RABBIT_TASKS_PASSWORD="secret-word")
        )
    finally:
        broker.delete_user(name)
    assert "set_permissions" in line
    assert "secret-word" not in line


async def test_a_worker_waits_for_a_broker_that_is_not_there_yet(
    start_worker: Start, declared: Declared, broker: Broker, vhost: str, publisher: Publisher,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(obedient)
    line = Line(broker)
    worker = start_worker("obey.async", RABBIT_TASKS_URL=line.url(vhost))
    await eventually(lambda: "next try in" in worker.log)
    tries = worker.lines()
    assert all("cannot be reached" in line["message"] for line in tries)
    assert all("RABBIT_TASKS_URL" in line["message"] for line in tries)
    assert len(worker.log.splitlines()) == len(tries)
    await line.up()
    try:
        await eventually(lambda: "connected to RabbitMQ" in worker.log)
        message_id = await publisher.publish(Obey, Order())
        await eventually(lambda: runs.all("end", message_id))
        assert await asyncio.to_thread(worker.terminate) == 0
    finally:
        line.down()
