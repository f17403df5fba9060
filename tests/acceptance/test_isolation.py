"""isolation = "process": a handler that crashes or hangs harms its own message and no other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
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
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    await declared(obedient)
    worker = start_worker().ready()
    slow = await publisher.publish(ObeyInProcess, Order(do="sleep", seconds=600, times=1))
    await eventually(lambda: runs.attempts(slow))
    (child,) = worker.handlers()
    other = await publisher.publish(Obey, Order())
    await eventually(lambda: runs.all("end", other))
    assert not is_gone(child)  # it is in the way
    await eventually(lambda: is_gone(child))
    await eventually(lambda: "outlasted its 2 s and was killed" in worker.log)
    behind = await publisher.publish(ObeyInProcess, Order())
    await eventually(lambda: runs.all("end", behind))
    await eventually(lambda: runs.attempts(slow)[:2] == [1, 2])
    assert runs.attempts(behind) == [1]
    assert runs.all("start", slow)[0]["pid"] == child
    assert child not in worker.handlers()
    assert "Traceback" not in worker.log


DEEDS = {
    "segv": "was killed by SIGSEGV",
    "kill": "was killed by SIGKILL (by the kernel, if memory ran out)",
    "vanish": "exit code 7",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "cancel": "CancelledError",
    "custom": "Custom: told to",
}


async def test_a_crash_fails_its_own_message_only_and_says_how_it_ended(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    """And so does whatever else a handler may end with."""
    await declared(obedient)
    worker = start_worker("obey.process").ready()
    always = await publisher.publish(ObeyInProcess, Order(do="segv"))
    once, others = {}, []
    for deed in DEEDS:
        once[await publisher.publish(ObeyInProcess, Order(do=deed, times=1))] = deed
        others.append(await publisher.publish(ObeyInProcess, Order()))
    await eventually(lambda: depth(connection, "obey.process.parked"))
    await eventually(lambda: len(runs.all("end")) == 2 * len(DEEDS))
    assert [runs.attempts(one) for one in others] == [[1]] * len(DEEDS)
    assert [runs.attempts(one) for one in once] == [[1, 2]] * len(DEEDS)
    assert runs.attempts(always) == [1, 2, 3]
    for message_id, deed in once.items():
        (failure,) = [
            line["error"] for line in worker.lines()
            if line.get("id") == message_id and "error" in line
        ]  # fmt: skip
        assert DEEDS[deed] in failure
    (parked,) = await take_all(connection, "obey.process.parked")
    assert parked.properties.text("message_id") == always
    assert DEEDS["segv"] in parked.properties.headers["x-error-message"]
    assert "Traceback" not in worker.log
    assert worker.is_running


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


async def test_what_a_handler_prints_and_logs_is_kept_though_its_process_is_killed(
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
    assert any(line["message"] == "the handler logs die" for line in worker.lines())
    assert await asyncio.to_thread(worker.terminate) == 0


async def test_recycled_processes_cost_no_message_an_attempt_and_leave_nothing(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    await declared(unruly.app)
    worker = start_worker("unruly.forgets", app="tests.support.unruly:app").ready()
    published = [await publisher.publish(unruly.Forgets, "") for _ in range(22)]
    await eventually(lambda: len(runs.all("end")) == 22)
    assert sorted(row["id"] for row in runs.all("start")) == sorted(published)
    assert {row["attempt"] for row in runs.all("start")} == {1}
    pids = Counter(row["pid"] for row in runs.all("end"))
    assert max(pids.values()) == 5
    spent = [pid for pid, times in pids.items() if times == 5]
    await eventually(lambda: worker.log.count("recycled after 5 messages") == len(spent))
    await eventually(lambda: all(map(is_gone, spent)))
    assert "failed" not in worker.log
    assert await asyncio.to_thread(worker.terminate) == 0
    assert all(map(is_gone, pids))


@pytest.mark.parametrize(
    ("app", "words"),
    [
        ("unpicklable", ("Open has isolation", "its lock: cannot pickle '_thread.lock'", "paths")),
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
