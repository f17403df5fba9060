"""A handler that blocks the event loop is called by its name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

import pytest

from rabbit_tasks import App, Publisher
from rabbit_tasks.watchdog import Watchdog
from tests.conftest import eventually
from tests.support import unruly
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]


async def test_an_async_handler_that_blocks_the_loop_is_reported_while_it_blocks(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    await declared(unruly.app)
    worker = start_worker(
        "unruly.blocks", app="tests.support.unruly:app", RABBIT_TASKS_HEARTBEAT="2"
    ).ready()
    await publisher.publish(unruly.Blocks, "3")
    await eventually(lambda: "has stood still" in worker.log and runs.all("end"))
    (report,) = [line for line in worker.lines() if "has stood still" in line["message"]]
    assert "Blocks.handle" in report["message"]
    assert "plain def" in report["message"]
    assert datetime.fromisoformat(report["time"]).timestamp() < runs.all("end")[0]["time"]
    await publisher.publish(unruly.Blocks, "0")  # it works on, and blames nobody twice
    await eventually(lambda: len(runs.all("end")) == 2)
    assert worker.log.count("has stood still") == 1


async def test_a_handler_that_computes_in_short_steps_is_not_blamed(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    await declared(unruly.app)
    worker = start_worker(
        "unruly.blocks", app="tests.support.unruly:app", RABBIT_TASKS_HEARTBEAT="4"
    ).ready()
    for _ in range(5):
        await publisher.publish(unruly.Blocks, "0.5")
    await eventually(lambda: len(runs.all("end")) == 5)
    assert "has stood still" not in worker.log


async def test_a_loop_that_only_waits_is_not_blamed_whatever_the_heartbeat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one of 1 s it has half a second, and may not be heard less often than that."""
    watchdog = Watchdog((), patience=0.6)
    watchdog.start()
    time.sleep(1.2)  # noqa: ASYNC251 (so that it beats and is looked at at different moments)
    assert caplog.text.count("has stood still") == 1
    await asyncio.sleep(1.5)
    watchdog.stop()
    assert caplog.text.count("has stood still") == 1
