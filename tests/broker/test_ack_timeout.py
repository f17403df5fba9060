"""ack_timeout: how long the broker waits for an ack, and what becomes of handlers that take longer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import ClassVar

import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, RetryAfter
from rabbit_tasks import consumer as consumers
from rabbit_tasks.broker import Connection
from rabbit_tasks.declare import check, declare
from rabbit_tasks.observer import Settled
from tests.conftest import eventually
from tests.support import patient
from tests.support.brokers import Broker
from tests.support.inprocess import Running
from tests.support.obedient import Order
from tests.support.queues import depth
from tests.support.workers import Runs

Run = Callable[[App], Awaitable[Running]]


def is_prompt(broker: Broker) -> bool:
    """Whether this broker looks at the time itself, and not once a minute."""
    return tuple(map(int, broker.version.split(".")[:2])) >= (4, 3)


class Film(Consumer[bytes]):
    queue = "films"

    async def handle(self, body: bytes, message: Message) -> None: ...


class LongFilm(Film):
    ack_timeout: ClassVar[timedelta | None] = timedelta(hours=2)


class LongerFilm(Film):
    ack_timeout: ClassVar[timedelta | None] = timedelta(hours=3)


async def test_an_ack_timeout_is_declared_and_a_change_of_it_is_a_difference(
    connection: Connection, broker: Broker
) -> None:
    """Told where the broker tells it: from 4.3 on. Before, it takes any redeclaration for equal."""
    await declare(connection, App("films", [LongFilm()]).topology)
    assert await check(connection, App("films", [LongFilm()]).topology) == []
    for other, found, wanted in ((Film, "7200000", "none"), (LongerFilm, "7200000", "10800000")):
        told = [str(one) for one in await check(connection, App("films", [other()]).topology)]
        if is_prompt(broker):
            (line,) = told
            assert line.startswith(f"films: x-consumer-timeout is {found}, wanted {wanted}; it can")
        else:
            assert told == []


async def test_the_longest_ack_timeout_is_taken(
    connection: Connection, publisher: Publisher, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LongFilm, "ack_timeout", consumers.MAX_ACK_TIMEOUT)
    settled: list[Settled] = []
    await run(App("films", [LongFilm()], observers=[settled.append]))
    await publisher.publish(LongFilm, b"")
    await eventually(lambda: settled)


async def test_a_handler_that_outlasts_its_ack_timeout_runs_once_and_is_settled_once(
    connection: Connection, publisher: Publisher, broker: Broker, run: Run, runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Async, in a thread and in a process: the broker takes it back, and the redelivery joins."""
    if not is_prompt(broker):
        pytest.skip("before 4.3 the shortest timeout that can be tested is a minute")
    monkeypatch.setenv("OBEDIENT_RUNS", str(runs.path))
    monkeypatch.setattr(consumers, "MIN_ACK_TIMEOUT", timedelta())
    for kind in patient.KINDS:
        monkeypatch.setattr(kind, "ack_timeout", timedelta(milliseconds=1500))
    settled: list[Settled] = []
    app = App("patient", [kind() for kind in patient.KINDS], observers=[settled.append])
    running = await run(app)
    for kind in patient.KINDS:
        await publisher.publish(
            kind, Order(do="raise", seconds=2.5, times=1), message_id=kind.queue
        )
    await eventually(lambda: len(runs.all("end")) == 3)
    await eventually(lambda: len(settled) == 6)
    await running.end()
    for kind in patient.KINDS:
        assert runs.attempts(kind.queue) == [1, 2]
        first, _ = (one for one in settled if one.message.queue == kind.queue)
        assert isinstance(first.outcome, RetryAfter)
    for queue in app.topology.queues:
        assert await depth(connection, queue.name) == 0


class Slow(Film):
    queue = "slow"
    timeout = timedelta(minutes=45)


async def test_a_worker_says_at_its_start_what_the_broker_does_to_its_long_handlers(
    connection: Connection, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rabbit_tasks")
    await run(App("films", [LongFilm() if connection.server_version[0] == "4" else Film(), Slow()]))
    await eventually(lambda: "connected to RabbitMQ" in caplog.text)
    (line,) = (one for one in caplog.messages if "its handler may take" in one)
    assert line.startswith("slow: its handler may take 45m (timeout), but RabbitMQ")
