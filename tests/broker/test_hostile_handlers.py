"""Errors of every kind, in every place where code of others runs: no message is lost, no slot stalls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rabbit_tasks import App, Consumer, Publisher, parking
from rabbit_tasks.broker import Connection
from rabbit_tasks.observer import Settled
from tests.conftest import eventually
from tests.support import failing
from tests.support.failing import ERRORS, PARKS, fail
from tests.support.inprocess import Running
from tests.support.queues import depth
from tests.support.workers import WorkerProcess

Run = Callable[[App], Awaitable[Running]]
Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]


def body_for(kind: type[Consumer[Any]], name: str) -> Any:
    return {"name": name} if kind is failing.FailsInValidator else name


@pytest.mark.parametrize(
    "kind",
    [
        failing.FailsAsync, failing.FailsInTime, failing.FailsInThread, failing.FailsInProcess,
        failing.FailsAsyncInProcess, failing.FailsInValidator,
    ],
)  # fmt: skip
async def test_whatever_a_handler_raises_its_message_is_retried_and_parked(
    kind: type[failing.FailsAsync | failing.FailsInValidator],
    run: Run,
    connection: Connection,
    publisher: Publisher,
) -> None:
    names = [*ERRORS, *PARKS]
    settled: list[str] = []

    def observe(what: Settled) -> None:
        settled.append(f"{what.message.id} {type(what.outcome).__name__}")

    running = await run(App("failing", [kind()], observers=[observe]))
    for name in names:
        await publisher.publish("failing", body_for(kind, name), message_id=name)
        await publisher.publish("failing", body_for(kind, "good"), message_id=f"after {name}")

    async def all_settled() -> bool:
        assert running.is_running
        return await depth(connection, "failing.parked") == len(names) and all(
            f"after {name} Done" in settled for name in names
        )

    await eventually(all_settled, 40)
    parked = {one.id: one async for one in parking.browse(connection, "failing")}
    assert set(parked) == set(names)
    malformed = {name for name, one in parked.items() if one.reason == "malformed body"}
    # pydantic takes these from a validator for what it says about the body.
    assert malformed == ({
        "ValueError", "1 MB", "not UTF-8", "endless", "noted"
    } if kind is failing.FailsInValidator else set())  # fmt: skip
    for name, one in parked.items():
        once = name in PARKS or name in malformed
        assert len(one.attempts) == (1 if once else 2), name
        assert one.error_type, name
        assert settled.count(f"{name} RetryAfter") == (0 if once else 1), name
        assert settled.count(f"{name} Parked") == 1, name
    assert await depth(connection, "failing") == 0
    await running.end()


async def test_a_handler_that_cancels_its_own_task_has_failed_and_its_slot_goes_on(
    run: Run, connection: Connection, publisher: Publisher
) -> None:
    consumer = failing.CancelsItself()
    running = await run(App("failing", [consumer]))
    for name in (
        "cancels itself", "cancels itself and raises", "good", "cancels itself and returns",
        "cancels itself and swallows it", "last",
    ):  # fmt: skip
        await publisher.publish("failing", name, message_id=name)
    await eventually(lambda: _has(connection, 2))
    await eventually(lambda: "last" in consumer.done)
    parked = {one.id: one async for one in parking.browse(connection, "failing")}
    assert {"cancels itself", "cancels itself and raises"} == set(parked)
    assert all(len(one.attempts) == 2 for one in parked.values())
    assert "good" in consumer.done
    assert await depth(connection, "failing") == 0
    await running.end()


async def test_whatever_an_observer_raises_each_message_is_settled_once(
    run: Run, connection: Connection, publisher: Publisher
) -> None:
    seen: list[str] = []
    consumer = failing.FailsAsync()

    def raises(settled: Settled) -> None:
        fail(str(settled.message.id).removeprefix("done "))

    def after(settled: Settled) -> None:
        seen.append(f"{settled.message.id} {type(settled.outcome).__name__}")

    running = await run(App("failing", [consumer], observers=[raises, after]))
    for name in ERRORS:
        await publisher.publish("failing", "good", message_id=f"done {name}")
        await publisher.publish("failing", "ValueError", message_id=name)
    await eventually(lambda: len(seen) == 3 * len(ERRORS))
    assert running.is_running
    assert sorted(seen) == sorted(
        line for name in ERRORS
        for line in (f"done {name} Done", f"{name} RetryAfter", f"{name} Parked")
    )  # fmt: skip
    assert await depth(connection, "failing.parked") == len(ERRORS)
    assert await depth(connection, "failing") == 0
    await running.end()


async def test_whatever_the_redaction_raises_the_error_is_hidden_and_the_message_parked(
    run: Run, connection: Connection, publisher: Publisher
) -> None:
    consumer = failing.FailsAsync()
    current: list[str] = []

    def redact(text: str) -> str:
        fail(current[0])
        return text

    running = await run(App("failing", [consumer], redact=redact))
    for count, name in enumerate(ERRORS, 1):
        current[:] = [name]
        await publisher.publish("failing", "ValueError", message_id=name)
        await publisher.publish("failing", "good", message_id=f"after {name}")
        await eventually(lambda n=count: _has(connection, n))  # type: ignore[misc]
        assert running.is_running
    parked = {one.id: one async for one in parking.browse(connection, "failing")}
    assert set(parked) == set(ERRORS)
    for name, one in parked.items():
        assert len(one.attempts) == 2
        assert one.error_message is not None
        assert one.error_message.startswith("<redact raised"), name
        assert "no" not in one.error_message.split()
    assert consumer.done == [f"after {name}" for name in ERRORS]
    await running.end()


async def _has(connection: Connection, count: int) -> bool:
    return await depth(connection, "failing.parked") == count


@pytest.mark.parametrize("name", ["SystemExit 0", "KeyboardInterrupt"])
async def test_a_task_of_a_handler_that_ends_the_event_loop_ends_in_the_parking_lot(
    name: str,
    start_worker: Start,
    declared: Declared,
    connection: Connection,
    publisher: Publisher,
) -> None:
    """It takes the worker with it, and that is counted."""
    await declared(failing.spawns)
    await publisher.publish("failing", name, message_id="bad")
    await publisher.publish("failing", "good")
    for _ in range(failing.Spawns.delivery_limit + 1):
        worker = start_worker(app="tests.support.failing:spawns")
        await eventually(lambda w=worker: not w.is_running)  # type: ignore[misc]
        assert worker.wait() != 0, worker.log
    worker = start_worker(app="tests.support.failing:spawns").ready()
    await eventually(lambda: _has(connection, 1))
    (parked,) = [one async for one in parking.browse(connection, "failing")]
    assert parked.id == "bad"
    assert parked.reason == "its worker died 2 times"
    assert worker.terminate() == 0
