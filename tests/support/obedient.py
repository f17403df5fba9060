"""An app whose consumers do what their message says; each run is written down outside the broker.

The runs go to the file that OBEDIENT_RUNS names, one JSON object a line, written in one call each.
Queues begin with OBEDIENT_QUEUE (default `obey`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rabbit_tasks import App, Consumer, Message, Park, RetryPolicy

PREFIX = os.environ.get("OBEDIENT_QUEUE", "obey")


class Order(BaseModel):
    """What to do: ok, raise, park, sleep, block, kill, segv, vanish, or raise what is no Exception."""

    do: str = "ok"
    seconds: float = 0.0
    """How long it takes, whatever it is; `block` does not let go of the interpreter's thread."""
    times: int = 10**9
    """Do it for so many attempts, then `ok`."""
    pad: str = ""
    until: str = ""
    """A file: it goes on once that is there."""


class Custom(BaseException):
    """Neither an Exception nor anything that asyncio knows."""


def record(event: str, message: Message, **more: Any) -> None:
    path = os.environ.get("OBEDIENT_RUNS")
    if path is None:
        return
    line = json.dumps(
        {"event": event, "id": message.id, "attempt": message.attempt, "queue": message.queue,
         "redelivered": message.redelivered, "pid": os.getpid(), "time": time.time(), **more}
    )  # fmt: skip
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)


def obey(order: Order, message: Message) -> None:
    match order.do if message.attempt <= order.times else "ok":
        case "raise":
            raise ValueError(f"told to, attempt {message.attempt}")
        case "park":
            raise Park("told to")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "vanish":
            record("fail", message)
            os._exit(7)
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "custom":
            raise Custom("told to")
        case "block":
            time.sleep(order.seconds)


async def run_async(order: Order, message: Message) -> None:
    with _recorded(message):
        while order.until and not Path(order.until).exists():  # noqa: ASYNC240 (a test's own file)
            await asyncio.sleep(0.02)
        if order.do != "block":
            await asyncio.sleep(order.seconds)
        obey(order, message)


def run(order: Order, message: Message) -> None:
    with _recorded(message):
        while order.until and not Path(order.until).exists():
            time.sleep(0.02)
        if order.do != "block":
            time.sleep(order.seconds)
        obey(order, message)


@contextmanager
def _recorded(message: Message) -> Iterator[None]:
    """`start`, and then `end`, or `fail` where it raised."""
    record("start", message)
    try:
        yield
    except BaseException:
        record("fail", message)
        raise
    record("end", message)


QUICK = RetryPolicy(attempts=3, base=timedelta(milliseconds=200), jitter=False)


class Obey(Consumer[Order]):
    """async def"""

    queue = f"{PREFIX}.async"
    retry = QUICK
    concurrency = int(os.environ.get("OBEDIENT_CONCURRENCY", "2"))

    async def handle(self, order: Order, message: Message) -> None:
        await run_async(order, message)


class ObeyInThread(Consumer[Order]):
    """def"""

    queue = f"{PREFIX}.thread"
    retry = QUICK
    concurrency = 2

    def handle(self, order: Order, message: Message) -> None:
        run(order, message)


class ObeyInProcess(Consumer[Order]):
    """def in a child process, with a time limit"""

    queue = f"{PREFIX}.process"
    retry = QUICK
    concurrency = int(os.environ.get("OBEDIENT_PROCESSES", "1"))
    isolation = "process"
    timeout = timedelta(seconds=float(os.environ.get("OBEDIENT_TIMEOUT", "2")))

    def handle(self, order: Order, message: Message) -> None:
        run(order, message)


app = App("obedient", [Obey(), ObeyInThread(), ObeyInProcess()])
