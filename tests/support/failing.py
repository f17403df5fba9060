"""Consumers that fail in every way Python has, and an app per place where code of ours runs theirs.

The body of a message is the name of the error to raise; `good` is done. Importable, because some of
it runs in child processes and in workers of their own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, NoReturn

from pydantic import BaseModel, field_validator

from rabbit_tasks import App, Consumer, Message, Park, RetryPolicy


class Custom(BaseException):
    """Neither an Exception nor anything that asyncio knows."""


class Unspeakable(Exception):
    """Whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Deadly(Exception):
    """Whose text ends the process."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class Untouchable(BaseException):
    """Of which nothing can be had."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(4)


class Subtle(str):
    """A text that is not one."""

    def encode(self, *_: Any) -> NoReturn:
        raise SystemExit(5)


class TalksSubtly(Exception):
    def __str__(self) -> str:
        return Subtle("subtle")


class ParksDeadly(Park):
    """Whose reason ends the process."""

    def __init__(self) -> None:
        pass

    @property
    def reason(self) -> str:  # type: ignore[override]
        raise SystemExit(6)


def _of_a_long_name() -> BaseException:
    return type("N" * 1_000_000, (Exception,), {"__module__": "\ud800"})("long name")  # type: ignore[no-any-return]


def _nested(depth: int) -> BaseException:
    group: BaseException = KeyboardInterrupt("inner")
    for _ in range(depth):
        group = BaseExceptionGroup("outer", [group])
    return group


def _endless() -> BaseException:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def _noted() -> BaseException:
    error = ValueError("noted")
    error.__notes__ = [Deadly(), 3, "n" * 1_000_000]  # type: ignore[list-item]
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("no"),
    "1 MB": lambda: ValueError("x" * 1_000_000),
    "not UTF-8": lambda: ValueError("\ud800 \x1b[2J \0"),
    "long name": _of_a_long_name,
    "unspeakable": Unspeakable,
    "deadly": Deadly,
    "untouchable": Untouchable,
    "subtle": TalksSubtly,
    "noted": _noted,
    "group": lambda: ExceptionGroup("several", [ValueError("a"), Deadly(), OSError("b")]),
    "deep group": lambda: _nested(5_000),
    "endless": _endless,
    "SystemExit": lambda: SystemExit(3),
    "SystemExit 0": lambda: SystemExit(0),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": lambda: asyncio.CancelledError("cancelled"),
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration("value"),
    "StopAsyncIteration": StopAsyncIteration,
    "TimeoutError": TimeoutError,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "Custom": lambda: Custom("custom"),
}
PARKS: dict[str, Callable[[], BaseException]] = {
    "1 MB of reason": lambda: Park("r" * 1_000_000),
    "a reason with controls": lambda: Park("\x1b[2J\ud800\n"),
    "a deadly reason": ParksDeadly,
    "no text for a reason": lambda: Park(Unspeakable()),  # type: ignore[arg-type]
}


def fail(name: str) -> None:
    """Raise the error of this name, if it is one."""
    if error := (ERRORS | PARKS).get(name):
        raise error()


class Fails(Consumer[str]):
    """What they have in common: one slot, two attempts, and what was done."""

    queue = "failing"
    retry = RetryPolicy(attempts=2, base=timedelta(milliseconds=100), jitter=False)

    def __init__(self) -> None:
        self.done: list[str] = []

    def handle(self, body: str, message: Message) -> Awaitable[None] | None:
        self.done.append(str(message.id))
        return None


class FailsAsync(Fails):
    queue = "failing"

    async def handle(self, body: str, message: Message) -> None:
        await asyncio.sleep(0)
        fail(body)
        self.done.append(str(message.id))


class FailsInTime(FailsAsync):
    """async, with a time limit around it."""

    queue = "failing"
    timeout = timedelta(seconds=20)


class FailsInThread(Fails):
    queue = "failing"

    def handle(self, body: str, message: Message) -> None:
        fail(body)
        self.done.append(str(message.id))


class FailsInProcess(Fails):
    queue = "failing"
    isolation = "process"

    def handle(self, body: str, message: Message) -> None:
        fail(body)


class FailsAsyncInProcess(Fails):
    queue = "failing"
    isolation = "process"

    async def handle(self, body: str, message: Message) -> None:
        await asyncio.sleep(0)
        fail(body)


class Validated(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def check(cls, name: str) -> str:
        fail(name)
        return name


class FailsInValidator(Consumer[Validated]):
    queue = "failing"
    retry = Fails.retry

    def __init__(self) -> None:
        self.done: list[str] = []

    async def handle(self, body: Validated, message: Message) -> None:
        self.done.append(str(message.id))


class CancelsItself(Fails):
    """As libraries do that cancel the current task to stop what it awaits, and forget to say so."""

    queue = "failing"

    async def handle(self, body: str, message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        if body == "cancels itself":
            task.cancel()
            await asyncio.sleep(10)
        elif body == "cancels itself and returns":
            task.cancel()
        elif body == "cancels itself and raises":
            task.cancel()
            raise ValueError("after it was cancelled")
        elif body == "cancels itself and swallows it":
            task.cancel()
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                pass
        self.done.append(str(message.id))


class Spawns(Fails):
    """Starts a task that ends the event loop, and waits for it."""

    queue = "failing"
    delivery_limit = 1

    async def handle(self, body: str, message: Message) -> None:
        if body != "good":
            await asyncio.create_task(self._raise(body))

    async def _raise(self, body: str) -> None:
        fail(body)


# --- for workers of their own ---------------------------------------------------------------------

FAILING = os.environ.get("FAILING", "good")


class Built(FailsAsync):
    """Fails in its constructor."""

    queue = "failing"

    def __init__(self) -> None:
        super().__init__()
        fail(FAILING)


class Unpacked(FailsInProcess):
    """Fails in its child process, before the first message."""

    queue = "failing"

    def __setstate__(self, state: dict[str, Any]) -> None:
        fail(FAILING)
        self.__dict__.update(state)


@asynccontextmanager
async def fails_at_entry() -> AsyncIterator[None]:
    fail(FAILING)
    yield


@asynccontextmanager
async def fails_at_exit() -> AsyncIterator[None]:
    yield
    fail(FAILING)


def built() -> App:
    return App("failing", [Built()])


def unpacked() -> App:
    return App("failing", [Unpacked()])


entry = App("failing", [FailsAsync()], lifespan=fails_at_entry)
leaving = App("failing", [FailsAsync()], lifespan=fails_at_exit)
spawns = App("failing", [Spawns()])
