"""The moment at which the process is gone, whatever still runs in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deadline:
    """A thread that calls `overdue` when the time is up, also where the event loop stands still."""

    def __init__(self, overdue: Callable[[], None]) -> None:
        self._overdue = overdue
        self._at = float("inf")
        self._sooner = threading.Condition()
        self._thread: threading.Thread | None = None

    def set(self, at: float) -> None:
        """By the monotonic clock; of several the first one counts. May be called from any thread."""
        with self._sooner:
            self._at = min(self._at, at)
            self._sooner.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._wait, name="rabbit-tasks-deadline", daemon=True
                )
                self._thread.start()

    def _wait(self) -> None:
        with self._sooner:
            while (left := self._at - time.monotonic()) > 0:
                self._sooner.wait(left)
        self._overdue()
