"""Somebody who works with the same broker: a small class with one method per measure."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import ClassVar, Final

from bench.tally import Stopwatch, Tally, Times

URL: Final = "BENCH_URL"
"""The variable with the broker's URL, of this run's contenders."""
QUEUE: Final = "BENCH_QUEUE"
FIRST: Final = "BENCH_FIRST"
"""The variable that names a file for the moment of the first message."""


class Unsupported(Exception):
    """This contender has nothing of the kind."""


class Contender:
    """Works on one queue of its own, durable and quorum, with persistent messages, publisher confirms
    and `mandatory`, and acks after the handler.

    A method returns when all is done and its connections are closed. What it does not override it
    does not have.
    """

    distribution: ClassVar[str]
    """What it is called on PyPI."""

    def __init__(self, url: str, queue: str) -> None:
        self.url = url
        self.queue = queue

    def names(self) -> list[str]:
        """The queues that `declare` may make."""
        return [self.queue]

    def exchanges(self) -> list[str]:
        """Likewise, exchanges; those that were there before, or that others use, are left alone."""
        return []

    def declare(self) -> None:
        """Make its queues."""
        raise NotImplementedError

    def fill(self, count: int) -> None:
        """Put messages into its queue; not timed. Here: JSON, as everybody but some peers reads."""
        from bench import load  # (it needs aiormq, for which not every process is to wait)

        load.fill(self.url, self.queue, count)

    def drain(self, tally: Tally, slots: int) -> None:
        """Handle what is in the queue, so many at once, and do nothing with it."""
        raise Unsupported

    def handlers(self, tally: Tally, slots: int) -> None:
        """The same with handlers that wait for PAUSE."""
        raise Unsupported

    def publish_one(self, watch: Stopwatch) -> None:
        """Publish, each after the confirm of the one before."""
        raise Unsupported

    def publish_many(self, watch: Stopwatch) -> None:
        """Publish with WINDOW unconfirmed at a time."""
        raise Unsupported

    def retry(self, tally: Tally, slots: int) -> None:
        """Fail every message once, have it back after DELAY_MS, and succeed."""
        raise Unsupported

    def latency(self, times: Times) -> None:
        """Publish one, wait until its handler has begun, and so on."""
        raise Unsupported

    def command(self) -> list[str]:
        """What starts a process whose handler calls `first_message`."""
        return [sys.executable, "-m", "bench.runner", type(self).__module__.rpartition(".")[2]]

    def environment(self) -> Mapping[str, str]:
        """Of that process."""
        return {}

    def first(self) -> None:
        """What the process does where `command` is not overridden; it ends by SIGTERM."""
        raise Unsupported

    def isolated(self, tally: Tally, slots: int) -> None:
        """Handle each message by `burn()` in a child process."""
        raise Unsupported


def first_message() -> None:
    """Note the moment, by a clock that all processes share."""
    with open(os.environ[FIRST], "a") as file:
        file.write(f"{time.monotonic()}\n")
