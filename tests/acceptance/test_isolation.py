"""isolation = "process": a handler that crashes or hangs harms its own message and no other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from rabbit_tasks import App, Publisher
from rabbit_tasks.broker import Connection
from tests.conftest import eventually
from tests.support import unruly
from tests.support.obedient import Obey, ObeyInProcess, Order
from tests.support.obedient import app as obedient
from tests.support.queues import depth, take_all
from tests.support.workers import Runs, WorkerProcess, is_gone

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]


async def test_a_handler_whose_time_is_up_is_killed_and_tried_again(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(obedient)
    worker = start_worker().ready()
    slow = await publisher.publish(ObeyInProcess, Order(do="sleep", seconds=600, times=3))
    stuck = await publisher.publish(ObeyInProcess, Order(do="block", seconds=600, times=1))
    await eventually(lambda: runs.attempts(slow))
    other = await publisher.publish(Obey, Order())
    await eventually(lambda: runs.all("end", other), within=1)  # while both are in the way
    await eventually(lambda: runs.all("end", stuck), within=20)
    await eventually(lambda: depth(connection, "obey.process.parked"), within=20)
    (parked,) = await take_all(connection, "obey.process.parked")
    assert parked.properties.text("message_id") == slow
    assert parked.properties.headers["x-error-type"] == "TimeoutError"
    assert "outlasted its 2 s" in parked.properties.headers["x-error-message"]
    assert runs.attempts(slow) == [1, 2, 3]
    assert runs.attempts(stuck) == [1, 2]
    ended = {row["pid"] for row in runs.all("start", slow)}
    assert len(ended) == 3  # each run in a fresh child
    assert all(is_gone(pid) for pid in ended)
    assert worker.is_running


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("segv", "was killed by SIGSEGV"),
        ("kill", "was killed by SIGKILL"),
        ("vanish", "exit code 7"),
    ],
)
async def test_a_crash_fails_its_own_message_only_and_says_how_it_ended(
    deed: str, said: str, publisher: Publisher, connection: Connection, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    await declared(obedient)
    worker = start_worker("obey.process").ready()
    always = await publisher.publish(ObeyInProcess, Order(do=deed))
    once = await publisher.publish(ObeyInProcess, Order(do=deed, times=1))
    others = [await publisher.publish(ObeyInProcess, Order()) for _ in range(5)]
    await eventually(lambda: depth(connection, "obey.process.parked"), within=20)
    await eventually(lambda: len(runs.all("end")) == 6, within=20)
    assert [runs.attempts(one) for one in others] == [[1]] * 5
    assert runs.attempts(once) == [1, 2]
    assert runs.attempts(always) == [1, 2, 3]
    (parked,) = await take_all(connection, "obey.process.parked")
    assert parked.properties.text("message_id") == always
    assert said in parked.properties.headers["x-error-message"]
    assert said in worker.log
    assert "Traceback" not in worker.log
    assert worker.is_running


@pytest.mark.parametrize("deed", ["exit", "interrupt", "cancel", "custom"])
async def test_what_is_no_exception_is_a_failed_attempt_like_any_other(
    deed: str, publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    await declared(obedient)
    worker = start_worker("obey.process").ready()
    message_id = await publisher.publish(ObeyInProcess, Order(do=deed, times=1))
    await eventually(lambda: runs.all("end", message_id))
    assert runs.attempts(message_id) == [1, 2]
    assert worker.is_running
    assert "Traceback" not in worker.log


async def test_a_child_that_died_while_it_was_idle_costs_no_message_an_attempt(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    await declared(obedient)
    worker = start_worker("obey.process").ready()
    (child,) = worker.handlers()
    os.kill(child, signal.SIGKILL)  # as the kernel does when memory is short
    await eventually(lambda: is_gone(child))
    message_id = await publisher.publish(ObeyInProcess, Order())
    await eventually(lambda: runs.all("end", message_id))
    assert runs.attempts(message_id) == [1]
    assert worker.handlers() == [runs.all("end")[0]["pid"]]


async def test_what_a_handler_prints_is_kept_though_its_process_is_killed(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    await declared(unruly.app)
    worker = start_worker(
        "unruly.talks", app="tests.support.unruly:app", PYTHONUNBUFFERED=""
    ).ready()
    await publisher.publish(unruly.Talks, "hello")
    await eventually(lambda: runs.all("end"))
    await publisher.publish(unruly.Talks, "die")
    await eventually(lambda: "killed by SIGABRT" in worker.log)
    assert "the handler says hello" in worker.log
    assert "the handler says die" in worker.log
    assert await asyncio.to_thread(worker.terminate, 8) == 0


@pytest.mark.parametrize(
    ("app", "words"),
    [
        ("unpicklable", ("Open has isolation", "cannot pickle '_thread.lock' object", "paths")),
        ("unloadable", ("Unloadable cannot be loaded", "OSError: the licence server")),
    ],
)
async def test_a_consumer_that_cannot_be_sent_to_a_child_is_one_line_at_the_start(
    app: str, words: tuple[str, ...], start_worker: Start
) -> None:
    worker = start_worker(app=f"tests.support.unruly:{app}")
    assert await asyncio.to_thread(worker.wait, 15) == 2
    (line,) = worker.log.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
