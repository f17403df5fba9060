"""Apps that misbehave in ways of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from rabbit_tasks import App, Consumer, Message, RetryPolicy
from tests.support.obedient import record

ONCE_MORE = RetryPolicy(attempts=2, base=timedelta(seconds=1), jitter=False)
"""With one retry queue instead of a dozen, which cost the broker as much as the test."""


class Open(Consumer[bytes]):
    """Holds what cannot be sent to a child process."""

    queue = "unruly.open"
    isolation = "process"

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def handle(self, body: bytes, message: Message) -> None: ...


def unpicklable() -> App:
    return App("unpicklable", [Open()])


class Unloadable(Consumer[bytes]):
    """Can be sent, but not be made again on the other side."""

    queue = "unruly.unloadable"
    isolation = "process"

    def __init__(self) -> None:
        self.made_in = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        raise OSError("the licence server does not answer")

    def handle(self, body: bytes, message: Message) -> None: ...


def unloadable() -> App:
    return App("unloadable", [Unloadable()])


class Endless(Consumer[bytes]):
    """Keeps the interpreter to itself: no other thread of its process runs."""

    queue = "unruly.endless"
    retry = ONCE_MORE
    isolation = "process"

    def handle(self, body: bytes, message: Message) -> None:
        record("start", message)
        re.match(r"(a|aa)+$", "a" * 60 + "b")


class Talks(Consumer[str]):
    """Prints, and may die of it."""

    queue = "unruly.talks"
    retry = ONCE_MORE
    isolation = "process"

    def handle(self, body: str, message: Message) -> None:
        print(f"the handler says {body}")  # noqa: T201 (what is tested)
        logging.getLogger("unruly").info("the handler logs %s", body)
        if body == "die":
            os.abort()
        record("end", message)


class Forgets(Consumer[str]):
    """Is given a new process after every fifth message."""

    queue = "unruly.forgets"
    retry = ONCE_MORE
    isolation = "process"
    concurrency = 2
    recycle_after = 5

    def handle(self, body: str, message: Message) -> None:
        record("start", message)
        record("end", message)


class Blocks(Consumer[str]):
    """An async handler that forgot to await."""

    queue = "unruly.blocks"
    retry = ONCE_MORE

    async def handle(self, body: str, message: Message) -> None:
        record("start", message)
        time.sleep(float(body))  # noqa: ASYNC251 (what is tested)
        record("end", message)


class Long(Consumer[bytes]):
    """May take longer than the broker waits, if nobody has told it otherwise."""

    queue = "unruly.long"
    retry = ONCE_MORE
    timeout = timedelta(minutes=45)

    async def handle(self, body: bytes, message: Message) -> None: ...


@asynccontextmanager
async def _slow() -> AsyncIterator[None]:
    print("lifespan: opening", flush=True)  # noqa: T201 (the tests wait for it)
    await asyncio.sleep(600)
    yield


app = App("unruly", [Endless(), Talks(), Forgets(), Blocks()])
long = App("long", [Long()])
slow_to_open = App("slow", [Blocks()], lifespan=_slow)
