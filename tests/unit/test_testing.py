"""perform: one message through the production path, without a broker."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from rabbit_tasks import (
    ConfigurationError,
    Consumer,
    Done,
    Message,
    Park,
    Parked,
    RetryAfter,
    RetryPolicy,
)
from rabbit_tasks.errors import MalformedBody
from rabbit_tasks.testing import perform

SECOND = timedelta(seconds=1)
POLICY = RetryPolicy(attempts=3, jitter=False, park_on=(FileNotFoundError,))


class Order(BaseModel):
    do: str = "ok"


class Custom(BaseException):
    """Neither an Exception nor anything that asyncio knows."""


FAULTS: dict[str, BaseException] = {
    "ValueError": ValueError("no"),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "CancelledError": asyncio.CancelledError(),
    "StopIteration": StopIteration(5),
    "StopAsyncIteration": StopAsyncIteration(),
    "GeneratorExit": GeneratorExit(),
    "TimeoutError": TimeoutError("its own"),
    "Custom": Custom(),
    "ExceptionGroup": ExceptionGroup("g", [ValueError(), KeyError()]),
    "BaseExceptionGroup": BaseExceptionGroup("g", [SystemExit()]),
    "Park": Park("no such image"),
    "FileNotFoundError": FileNotFoundError("a.jpg"),
    "ParkInGroup": ExceptionGroup("g", [ValueError(), Park("inner")]),
}


def obey(order: Order) -> None:
    if order.do in FAULTS:
        raise FAULTS[order.do]


class InLoop(Consumer[Order]):
    queue = "q.loop"
    retry = POLICY
    timeout: ClassVar[timedelta | None] = timedelta(milliseconds=100)

    def __init__(self) -> None:
        self.seen: list[Message] = []
        self.was_cancelled = False

    async def handle(self, order: Order, message: Message) -> None:
        self.seen.append(message)
        if order.do == "wait":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        obey(order)


class InThread(Consumer[Order]):
    queue = "q.thread"
    retry = POLICY

    def __init__(self) -> None:
        self.thread = 0

    def handle(self, order: Order, message: Message) -> None:
        self.thread = threading.get_ident()
        obey(order)


class InProcess(Consumer[Order]):
    queue = "q.process"
    retry = POLICY
    isolation = "process"
    timeout = SECOND

    def handle(self, order: Order, message: Message) -> None:
        if order.do == "wait":
            time.sleep(60)
        if order.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        assert message.attempt == 1
        obey(order)


class InProcessAsync(InProcess):
    queue = "q.process.async"

    async def handle(self, order: Order, message: Message) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        obey(order)


KINDS: list[type[Consumer[Order]]] = [InLoop, InThread]


@pytest.mark.parametrize("kind", [*KINDS, InProcess, InProcessAsync])
async def test_a_handler_that_returns_is_done(kind: type[Consumer[Order]]) -> None:
    assert await perform(kind(), Order()) == Done()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", sorted(FAULTS))
async def test_whatever_a_handler_raises_becomes_an_outcome(
    kind: type[Consumer[Order]], fault: str
) -> None:
    outcome = await perform(kind(), Order(do=fault))
    match fault:
        case "Park":
            assert outcome == Parked("no such image", FAULTS[fault])
        case "ParkInGroup":
            assert outcome == Parked("inner", FAULTS[fault])
        case "FileNotFoundError":
            reason = "FileNotFoundError is never retried (park_on)"
            assert outcome == Parked(reason, FAULTS[fault])
        case _:
            assert isinstance(outcome, RetryAfter)
            assert (outcome.attempt, outcome.delay) == (1, SECOND)
            # (Python itself does not let a StopIteration out of a coroutine)
            assert FAULTS[fault] in (outcome.error, outcome.error.__cause__)


@pytest.mark.parametrize(
    ("do", "expected", "error"),
    [
        ("ValueError", RetryAfter, "no"),
        ("Park", Parked, "no such image"),
        (
            "kill",
            RetryAfter,
            "the handler's process was killed by SIGKILL (by the kernel, if memory ran out)",
        ),
        ("wait", RetryAfter, "the handler outlasted its 1 s and was killed"),
    ],
)
async def test_a_process_of_its_own_fails_as_any_handler(
    do: str, expected: type[RetryAfter | Parked], error: str
) -> None:
    outcome = await perform(InProcess(), Order(do=do))
    assert isinstance(outcome, expected)
    assert str(outcome.error) == error


@pytest.mark.parametrize("raw", [b"", b"{", b'{"do":1}', b"\xff"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_malformed_body_is_parked_and_never_handled(
    kind: type[Consumer[Order]], raw: bytes
) -> None:
    outcome = await perform(kind(), raw)
    assert isinstance(outcome, Parked)
    assert outcome.reason == "malformed body"
    assert isinstance(outcome.error, MalformedBody)


async def test_a_malformed_body_is_parked_by_a_process_of_its_own() -> None:
    outcome = await perform(InProcess(), b"{")
    assert isinstance(outcome, Parked)
    assert outcome.reason == "malformed body"


@pytest.mark.parametrize("kind", KINDS)
async def test_the_last_attempt_is_parked(kind: type[Consumer[Order]]) -> None:
    outcomes = [await perform(kind(), Order(do="Custom"), attempt=n) for n in (1, 2, 3, 4)]
    error = FAULTS["Custom"]
    assert outcomes == [
        RetryAfter(1, SECOND, error),
        RetryAfter(2, 2 * SECOND, error),
        Parked("failed 3 attempts of 3", error),
        Parked("failed 4 attempts of 3", error),
    ]


async def test_a_handler_that_outlasts_its_time_limit_has_failed() -> None:
    consumer = InLoop()
    outcome = await perform(consumer, Order(do="wait"))
    assert isinstance(outcome, RetryAfter)
    assert str(outcome.error) == "the handler outlasted its 0.1 s"
    assert consumer.was_cancelled


async def test_a_time_limit_is_not_blamed_for_a_handlers_own_timeout() -> None:
    outcome = await perform(InLoop(), Order(do="TimeoutError"))
    assert isinstance(outcome, RetryAfter)
    assert outcome.error is FAULTS["TimeoutError"]


async def test_cancelling_perform_cancels_the_handler_and_passes_through() -> None:
    class Patient(InLoop):
        queue = "q.patient"
        timeout = None

        async def handle(self, order: Order, message: Message) -> None:
            try:
                await super().handle(order, message)
            except asyncio.CancelledError:
                raise ValueError("a library that hides a cancellation") from None

    consumer = Patient()
    task = asyncio.create_task(perform(consumer, Order(do="wait")))
    while not consumer.seen:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert consumer.was_cancelled


async def test_a_handler_may_cancel_the_task_it_runs_in_without_cancelling_perform() -> None:
    class CancelsItself(Consumer[str]):
        queue = "q"

        async def handle(self, body: str, message: Message) -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    outcome = await perform(CancelsItself(), "")
    assert isinstance(outcome, RetryAfter)
    assert isinstance(outcome.error, asyncio.CancelledError)


async def test_a_plain_handler_runs_in_a_thread() -> None:
    consumer = InThread()
    await perform(consumer, Order())
    assert consumer.thread not in (0, threading.get_ident())


async def test_a_plain_handler_that_returns_a_coroutine_is_told_so() -> None:
    class Forgot(Consumer[str]):
        queue = "q"

        def handle(self, body: str, message: Message) -> Any:
            return asyncio.sleep(0)

    outcome = await perform(Forgot(), "")
    assert isinstance(outcome, RetryAfter)
    assert "write it as async def" in str(outcome.error)


async def test_the_handler_sees_the_message_as_given() -> None:
    consumer = InLoop()
    await perform(
        consumer, Order(), attempt=2, message_id="m", headers={"tenant": "a", "n": 2**40},
        correlation_id="c", priority=3, type="t",
    )  # fmt: skip
    (message,) = consumer.seen
    assert (message.queue, message.body, message.id) == ("q.loop", b'{"do":"ok"}', "m")
    assert (message.attempt, message.redelivered) == (2, False)
    assert message.headers == {"tenant": "a", "n": 2**40, "x-retry-count": 1}
    assert (message.correlation_id, message.priority, message.type) == ("c", 3, "t")
    assert message.timestamp is not None
    assert datetime.now(UTC) - message.timestamp < timedelta(seconds=60)
    assert repr(message) == "<Message m of q.loop, attempt 2, 11 bytes>"


async def test_a_first_attempt_has_no_header_of_ours() -> None:
    consumer = InLoop()
    await perform(consumer, Order())
    (message,) = consumer.seen
    assert (message.attempt, message.headers) == (1, {})
    assert message.id


async def test_the_content_type_is_that_of_the_body() -> None:
    consumer = InLoop()
    await perform(consumer, Order())
    await perform(consumer, Order(), content_type="application/vnd.shop+json")
    await perform(consumer, b"{}")
    types = [message.content_type for message in consumer.seen]
    assert types == ["application/json", "application/vnd.shop+json", None]


async def test_a_body_of_another_type_is_the_tests_own_mistake() -> None:
    with pytest.raises(TypeError, match="InLoop takes Order, not this dict"):
        await perform(InLoop(), {"do": "ok"})  # type: ignore[misc]
    with pytest.raises(ValueError, match="header x is nan"):
        await perform(InLoop(), Order(), headers={"x": float("nan")})


async def test_a_consumer_that_cannot_cross_into_a_process_is_refused() -> None:
    class Local(InProcess):
        queue = "q.local"

    with pytest.raises(ConfigurationError, match=r"Local has isolation.*cannot be sent to a child"):
        await perform(Local(), Order())
