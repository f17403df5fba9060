"""What a run was timed by: handlers that ran, or a block of publishes."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from bench.measure import SKIPPED

REST: Final = 0.002
"""Seconds between two messages whose latency is taken."""


class Tally:
    """Counts handled messages, from any thread, and times those after the first tenth.

    skip    messages before the clock starts
    """

    def __init__(self, total: int, slots: int = 1) -> None:
        self.total = total
        self.skip = max(1, min(total - 1, max(slots, int(total * SKIPPED))))
        self.done = threading.Event()
        self.on_hit: Callable[[], None] = lambda: None
        self.waits: list[float] = []
        """Seconds from a failed attempt to the next one."""
        self._numbers = itertools.count(1)
        self._failed_at: dict[object, float] = {}
        self._ring: Callable[[], None] = lambda: None
        self._wall = self._cpu = 0.0

    def hit(self) -> None:
        """A message is handled."""
        number = next(self._numbers)
        if number == self.skip:
            self._wall, self._cpu = time.perf_counter(), time.process_time()
        elif number == self.total:
            self._wall = time.perf_counter() - self._wall
            self._cpu = time.process_time() - self._cpu
            self.done.set()
            self._ring()
        self.on_hit()

    def failed(self, message_id: str | None) -> None:
        """The first attempt of a message ends here."""
        self._failed_at[message_id] = time.perf_counter()

    def again(self, message_id: str | None) -> None:
        """Its second attempt begins."""
        self.waits.append(time.perf_counter() - self._failed_at.pop(message_id))

    def fail_once(self, number: object) -> None:
        """For handlers that are not told which attempt it is: a message's first one raises."""
        if number not in self._failed_at:
            self._failed_at[number] = time.perf_counter()
            raise ValueError("the first attempt fails")
        self.waits.append(time.perf_counter() - self._failed_at.pop(number))
        self.hit()

    async def wait(self) -> None:
        """Until all are handled."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def ring() -> None:
            loop.call_soon_threadsafe(done.set)

        self._ring = ring
        if not self.done.is_set():
            await done.wait()

    @property
    def timed(self) -> int:
        """Messages that the figures are of."""
        return self.total - self.skip

    def figures(self) -> dict[str, float]:
        return {"rate": self.timed / self._wall, "cpu": self._cpu / self.timed * 1e6}


class Stopwatch:
    """Times one block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._wall = self._cpu = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._wall, self._cpu = time.perf_counter() - wall, time.process_time() - cpu

    def figures(self) -> dict[str, float]:
        return {"rate": self.count / self._wall, "cpu": self._cpu / self.count * 1e6}


class Times:
    """Seconds, of which the middle and the worst percent are told.

    began   set before a publish; `now` is called at the handler's start
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.seconds: list[float] = []
        self.began = 0.0
        self.seen = asyncio.Event()

    def now(self) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.seen.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a publish."""
        self.seen.clear()
        self.began = time.perf_counter()
        yield

    async def rest(self) -> None:
        """Until it was handled, and the queue idle again."""
        await self.seen.wait()
        await asyncio.sleep(REST)

    def figures(self) -> dict[str, float]:
        seconds = self.seconds[max(1, len(self.seconds) // 20) :]  # (without the first, cold ones)
        return {
            "p50": statistics.median(seconds) * 1e3,
            "p99": sorted(seconds)[int(len(seconds) * 0.99)] * 1e3,
        }
