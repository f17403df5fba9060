"""Consumers for child processes; what happens in them is told by outcomes and in a file.

CONFINED_LOG names the file, one word and process id a line.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rabbit_tasks import Consumer, Message, Park


def note(word: str, pid: int | None = None) -> None:
    if path := os.environ.get("CONFINED_LOG"):
        with Path(path).open("a") as file:
            file.write(f"{word} {pid or os.getpid()}\n")


def noted(word: str) -> list[int]:
    """The process ids of those that noted this word."""
    return [pid for one, pid in _notes() if one == word]


def words() -> list[str]:
    """What was noted, in order."""
    return [word for word, _ in _notes()]


def _notes() -> list[tuple[str, int]]:
    path = Path(os.environ["CONFINED_LOG"])
    lines = path.read_text().splitlines() if path.exists() else []
    return [(word, int(pid)) for word, pid in map(str.split, lines)]


def log_setup() -> None:
    note("logs")


note("import")

SEEN: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


class Tells(Consumer[str]):
    """Parks with its process id as the reason."""

    queue = "tells"
    isolation = "process"

    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        note("load")
        if os.environ.get("CONFINED_FAULT"):
            raise OSError("no licence")
        self.__dict__.update(state)

    def handle(self, body: str, message: Message) -> None:
        if body == "grow":
            self.kept.append(bytearray(b"x") * (200 * 1_048_576))
        if body == "until the next has loaded":
            deadline = time.monotonic() + 20
            while len(noted("load")) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(noted("load")) == 2
        if body == "slowly":
            time.sleep(0.05)
        if body == "hold on":
            threading.Thread(target=time.sleep, args=[600]).start()
        raise Park(str(os.getpid()))


class Twice(Tells):
    recycle_after = 2
    concurrency = 1


class Big(Tells):
    recycle_above = 180


class Small(Tells):
    recycle_above = 2_000


class Does(Consumer[str]):
    """A `def` that does what handlers do."""

    queue = "does"
    isolation = "process"
    timeout = timedelta(seconds=20)

    def handle(self, body: str, message: Message) -> None:
        result: Any = getattr(self, body)()
        return result  # type: ignore[no-any-return]

    def runs_a_loop(self) -> None:
        asyncio.run(asyncio.sleep(0))

    def returns_a_value(self) -> int:
        return 5

    def returns_an_awaitable(self) -> Awaitable[None]:
        return asyncio.sleep(0)

    def sees(self) -> None:
        seen = SEEN.get()
        SEEN.set("another's")
        raise Park(seen)

    def has_processes(self) -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]

    def ends_a_program(self) -> None:
        program = subprocess.Popen(["sleep", "600"])
        program.terminate()
        assert program.wait(10) == -signal.SIGTERM

    def forks_and_dies(self) -> None:
        libc = ctypes.PyDLL(None)  # as a library in C does: Python hears nothing of it
        if (other := libc.fork()) == 0:
            while True:
                libc.sleep(600)
        note("fork", other)
        os.kill(os.getpid(), signal.SIGSEGV)

    def forks_and_returns_twice(self) -> None:
        if (other := os.fork()) == 0:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)  # its complaint, that it has nobody to answer
        else:
            note("fork", other)
            os.waitpid(other, 0)

    def fills_the_memory(self) -> None:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 64 * 1_048_576, -1))
        kept: list[Any] = []
        while True:
            kept = [kept]

    def tells_its_process(self) -> None:
        raise Park(str(os.getpid()))

    def is_well(self) -> None:
        bytearray(20 * 1_048_576)


class Outlasts(Consumer[str]):
    queue = "outlasts"
    isolation = "process"
    timeout = timedelta(milliseconds=300)

    def handle(self, body: str, message: Message) -> None:
        program = subprocess.Popen(["sleep", "600"])
        note("fork", program.pid)
        program.wait()


class DoesAsync(Consumer[str]):
    """An `async def`, in a loop that is kept."""

    queue = "does.async"
    isolation = "process"

    async def handle(self, body: str, message: Message) -> None:
        await getattr(self, body)()

    async def sees(self) -> None:
        seen = SEEN.get()
        SEEN.set("another's")
        raise Park(seen)

    async def leaves_a_task(self) -> None:
        self.task = asyncio.create_task(self._later())

    async def _later(self) -> None:
        await asyncio.sleep(0.1)
        note("later")

    async def cancels_itself(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def is_well(self) -> None:
        logging.getLogger("confined").debug("well")
