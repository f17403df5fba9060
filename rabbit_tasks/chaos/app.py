"""The app whose workers are killed: `rabbit-tasks --app rabbit_tasks.chaos.app:app work`.

It does no work but time, and writes each step of it into the ledger before the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from rabbit_tasks.app import App
from rabbit_tasks.chaos.ledger import Kind, Ledger
from rabbit_tasks.chaos.plan import Plan
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.message import Message
from rabbit_tasks.observer import Observer, Settled
from rabbit_tasks.retry import RetryPolicy

VARIABLE: Final = "RABBIT_TASKS_CHAOS"
"""Names the folder of the run."""
ORPHANED: Final = 1.0
"""Seconds between two looks whether the process that makes the run is there."""
RETRY: Final = RetryPolicy(
    delays=tuple(timedelta(milliseconds=ms) for ms in (100, 200, 300, 100, 200, 300, 400))
)
"""Eight attempts: with a tenth of all attempts failing, one task in 100 million spends them all."""


class Task(BaseModel):
    """One task; its number is also its message id."""

    task: int
    poison: bool = False


class Failure(Exception):
    """An ordinary failure."""


class Work(Consumer[Task]):
    """Half of the work, the death that this run may have in store, the other half."""

    retry = RETRY

    def __init__(self, plan: Plan, ledger: Ledger | None) -> None:
        self._plan = plan
        self._ledger = ledger

    async def handle(self, body: Task, message: Message) -> None:
        task, attempt, ledger = body.task, message.attempt, self._ledger
        assert ledger is not None
        run = ledger.count(task)
        ledger.write("start", task, attempt, redelivered=message.redelivered)
        half = self._plan.work_time.total_seconds() / 2
        try:
            await asyncio.sleep(half)
            death = self._plan.death(task, run, poison=body.poison)
            if death == 0:
                _die(ledger, task, attempt)
            await asyncio.sleep(half)
        except asyncio.CancelledError:
            ledger.write("cancel", task, attempt)
            raise
        if death is not None:
            asyncio.get_running_loop().call_later(death, _die, ledger, task, attempt)
        if self._plan.fails(task, attempt):
            ledger.write("fail", task, attempt)
            raise Failure(f"task {task} was to fail at attempt {attempt}")
        ledger.write("done", task, attempt)


def _die(ledger: Ledger, task: int, attempt: int) -> None:
    ledger.write("kill", task, attempt)
    os.kill(os.getpid(), signal.SIGKILL)


def app_of(plan: Plan, ledger: Ledger | None = None) -> App:
    """The app of a run; without a ledger it is only good for its topology."""
    # A class per run: a queue's name and its limits belong to the class.
    kind = type(
        "Work",
        (Work,),
        {
            "queue": plan.queue,
            "concurrency": plan.concurrency,
            "delivery_limit": plan.delivery_limit,
            "__doc__": Work.__doc__,
        },
    )
    if ledger is None:
        return App("chaos", [kind(plan, ledger)])
    return App(
        "chaos",
        [kind(plan, ledger)],
        lifespan=_lifespan(plan, ledger),
        observers=[_observer(ledger)],
    )


def app() -> App:
    """The app of the run whose folder RABBIT_TASKS_CHAOS names."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise ConfigurationError(f"{VARIABLE} names no run; this app is for: rabbit-tasks chaos")
    try:
        plan = Plan.read(Path(folder))
    except OSError as error:
        raise ConfigurationError(f"{VARIABLE}: {folder} holds no run ({error.strerror})") from None
    return app_of(plan, Ledger(Path(folder), plan.tasks))


def _observer(ledger: Ledger) -> Observer:
    def tell_settled(settled: Settled) -> None:
        ledger.write("settled", _number(settled.message.id), settled.message.attempt)

    return tell_settled


def _lifespan(plan: Plan, ledger: Ledger) -> Callable[[], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def listening() -> AsyncIterator[None]:
        handler = _Listener(ledger)
        log = logging.getLogger("rabbit_tasks")
        log.addHandler(handler)
        orphaned = asyncio.create_task(_end_without(plan.pid))
        try:
            yield
        finally:
            log.removeHandler(handler)
            orphaned.cancel()
            with suppress(asyncio.CancelledError):
                await orphaned
            ledger.write("left")

    return listening


async def _end_without(pid: int) -> None:
    """End the fleet when the process that makes the run is gone, be it by SIGKILL."""
    while pid:
        await asyncio.sleep(ORPHANED)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        except PermissionError:
            pass
    else:
        return
    if (supervisor := os.getppid()) > 1:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(supervisor, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


class _Listener(logging.Handler):
    """Writes down what only a worker's log tells: lost connections, and copies made twice."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.INFO)
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        if kind := kind_of(record.getMessage()):
            fields = getattr(record, "fields", {})
            self._ledger.write(kind, _number(fields.get("id")), fields.get("attempt", 0))


def kind_of(text: str) -> Kind | None:
    """What a log line means for the account. (In an outage not every one is said.)"""
    if "comes again: " in text and "run again in" in text:
        return "waits"
    if "is held, its copy was not taken" in text or "is held no more" in text:
        return "held"
    if "connected to RabbitMQ" in text and "; again" not in text:
        return "ready"
    if any(words in text for words in _OF_LOSSES):
        return "lost"
    return None


_OF_LOSSES: Final = ("connected to RabbitMQ", "channel lost with message", "not consuming (",
                     "consuming again", "connection lost", "; next try in")  # fmt: skip


def _number(message_id: object) -> int:
    return int(message_id) if isinstance(message_id, str) and message_id.isdecimal() else -1
