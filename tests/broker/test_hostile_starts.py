"""Errors of every kind before a worker takes its first message, and when it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from rabbit_tasks import App, Publisher
from rabbit_tasks.broker import Connection
from tests.conftest import eventually
from tests.support import failing
from tests.support.failing import ERRORS
from tests.support.queues import depth
from tests.support.workers import WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
QUICKLY = ("ValueError", "SystemExit 0", "KeyboardInterrupt", "CancelledError",
           "GeneratorExit", "StopIteration", "Custom")  # fmt: skip


@pytest.mark.parametrize("place", ["built", "unpacked", "entry"])
async def test_a_worker_that_cannot_start_says_why_and_takes_no_message(
    place: str,
    start_worker: Start,
    declared: Declared,
    connection: Connection,
    publisher: Publisher,
) -> None:
    """A constructor, a child's unpickling, a lifespan: whatever they raise."""
    await declared(failing.entry)
    await publisher.publish("failing", "good")
    app = f"tests.support.failing:{place}"
    workers = {name: start_worker(app=app, FAILING=name) for name in QUICKLY}
    await eventually(lambda: not any(one.is_running for one in workers.values()), 60)
    for name, worker in workers.items():
        assert worker.wait() not in (0, -6, -9, -11), f"{name}: {worker.log}"
        if (
            name != "KeyboardInterrupt" or place != "built"
        ):  # Ctrl-C while it imports: 130, no words
            assert type(ERRORS[name]()).__name__ in worker.log, f"{name}: {worker.log}"
        assert "connected to" not in worker.log
    assert await depth(connection, "failing") == 1


async def test_a_lifespan_that_fails_at_its_end_loses_nothing(
    start_worker: Start, declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(failing.leaving)
    workers = {
        name: start_worker(app="tests.support.failing:leaving", FAILING=name) for name in QUICKLY
    }
    for worker in workers.values():
        worker.ready()
    for name in QUICKLY:
        await publisher.publish("failing", "good", message_id=name)
    await eventually(lambda: _empty(connection))
    for name, worker in workers.items():
        worker.terminate()
        assert type(ERRORS[name]()).__name__ in worker.log, f"{name}: {worker.log}"
        assert worker.wait() not in (0, -6, -9, -11), f"{name}: {worker.log}"
    assert await depth(connection, "failing") == 0
    assert await depth(connection, "failing.parked") == 0


async def _empty(connection: Connection) -> bool:
    return await depth(connection, "failing") == 0
