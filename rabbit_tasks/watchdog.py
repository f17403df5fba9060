"""Says which handler blocks the event loop.

An `async def` handler that computes or waits without awaiting stops every other slot, and after
about three heartbeats the broker takes the connection for dead and delivers its messages again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterable
from types import CodeType
from typing import Any, Final

from rabbit_tasks.consumer import Consumer

log = logging.getLogger("rabbit_tasks")

BEAT: Final = 0.5


class Watchdog:
    """A thread that watches one event loop; `patience` is how many seconds it may stand still."""

    def __init__(self, consumers: Iterable[Consumer[Any]], patience: float) -> None:
        self._handlers: dict[CodeType, str] = {
            type(c).handle.__code__: type(c).__qualname__
            for c in consumers
            if hasattr(type(c).handle, "__code__")
        }
        self._patience = patience
        # Well within our patience, or a loop that only waits would seem to stand.
        self._beat_every = min(BEAT, patience / 4)
        self._over = threading.Event()
        self._beaten = 0.0
        self._thread_id = 0

    def start(self) -> None:
        """Watch the running loop, from its own thread."""
        self._thread_id = threading.get_ident()
        self._beat(asyncio.get_running_loop())
        threading.Thread(target=self._watch, name="rabbit-tasks-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beaten = time.monotonic()
        if not self._over.is_set():
            loop.call_later(self._beat_every, self._beat, loop)

    def _watch(self) -> None:
        told = 0.0
        while not self._over.wait(BEAT):
            stood = time.monotonic() - self._beaten
            if stood > self._patience and told != self._beaten:
                told = self._beaten
                log.error(
                    "the event loop has stood still for %.0f s in %s: no message moves meanwhile; "
                    "make the handler a plain def, which runs in a thread, or use "
                    'isolation = "process"',
                    stood, self._where(),
                )  # fmt: skip

    def _where(self) -> str:
        """The handler on the loop's stack, else the innermost function."""
        frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 (documented)
        innermost = frame.f_code.co_qualname if frame else "?"
        while frame is not None:
            if name := self._handlers.get(frame.f_code):
                return f"{name}.handle (at {innermost})"
            frame = frame.f_back
        return innermost
