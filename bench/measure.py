"""What is measured, how much of it, and which ratio to raw aio-pika rabbit_tasks is to reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Size = Literal["tiny", "quick", "whole"]

SKIPPED: Final = 0.1
"""Part of a run's messages, at its beginning, that is not timed: connections, first imports."""
WINDOW: Final = 200
"""Unconfirmed messages at a time where many are published."""
PAUSE: Final = 0.01
"""Seconds that a handler of `handlers-100` waits."""
WORK: Final = 0.005
"""Seconds of CPU that a handler of `isolated` burns."""
DELAY_MS: Final = 100
"""Of a retry."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a run of a measure yields.

    goal    the ratio to raw aio-pika, at least where more is better, at most where less is; or, where
            `is_absolute`, the number itself
    """

    name: str
    text: str
    unit: str
    goal: float | None = None
    more_is_better: bool = False
    is_absolute: bool = False

    def bound(self, slack: float = 1.0) -> float | None:
        """The goal, or what is so much worse."""
        if self.goal is None:
            return None
        return self.goal / slack if self.more_is_better else self.goal * slack

    def is_reached(self, found: float, slack: float = 1.0) -> bool:
        bound = self.bound(slack)
        return bound is None or (found >= bound if self.more_is_better else found <= bound)


@dataclass(frozen=True, slots=True)
class Measure:
    """A kind of work that every contender does in its own way.

    method  of Contender that does it
    slots   handlers at once
    counts  messages, in a run of each size
    filled  whether the messages are in the queue before it begins
    """

    name: str
    method: str
    figures: tuple[Figure, ...]
    counts: tuple[int, int, int]
    slots: int = 1
    filled: bool = False

    def count(self, size: Size) -> int:
        return self.counts[("tiny", "quick", "whole").index(size)]


def _rate(text: str, goal: float) -> Figure:
    return Figure("rate", text, "/s", goal, more_is_better=True)


def _cpu(goal: float | None = None) -> Figure:
    return Figure("cpu", "its CPU time per message", "µs", goal)


def _drain(slots: int, goal: float, counts: tuple[int, int, int], cpu: float | None) -> Measure:
    text = f"drain a full queue, {slots} at once" if slots > 1 else "drain a full queue, one by one"
    return Measure(
        f"drain-{slots}", "drain", (_rate(text, goal), _cpu(cpu)), counts, slots, filled=True
    )


MEASURES: Final = (
    _drain(64, 3.0, (100, 2000, 8000), 0.35),
    _drain(8, 1.8, (40, 1500, 6000), None),
    _drain(1, 1.2, (20, 400, 2000), None),
    Measure(
        "publish-one", "publish_one",
        (_rate("publish, confirmed, one by one", 1.5), _cpu()), (20, 300, 1500),
    ),
    Measure(
        "publish-many", "publish_many",
        (_rate(f"publish, confirmed, {WINDOW} outstanding", 3.0), _cpu(0.35)), (100, 2000, 8000),
    ),
    Measure(
        "handlers-100", "handlers",
        (_rate("handlers of 10 ms, 100 at once", 1.8), _cpu()), (100, 2000, 6000), 100,
        filled=True,
    ),
    Measure(
        "retry", "retry",
        (_rate(f"fail once, retry after {DELAY_MS} ms, succeed; 64 at once", 0.9), _cpu()),
        (40, 500, 2000), 64, filled=True,
    ),
    Measure(
        "retry-delay", "retry",
        (Figure("p50", "delay of a retry over its nominal one, idle, p50", "ms", 5.0,
                is_absolute=True),), (2, 6, 20),
    ),
    Measure(
        "latency", "latency",
        (Figure("p50", "publish to handler start, idle, p50", "ms", 1.0),
         Figure("p99", "publish to handler start, idle, p99", "ms", 1.0)), (10, 150, 600),
    ),
    Measure(
        "start", "command",
        (Figure("time", "start of a process to its first message", "ms", 2.0),), (1, 1, 1),
    ),
    Measure(
        "isolated", "isolated",
        (Figure("overhead", "CPU over the handler's own, in child processes, 8 at once", "ms", 1.0,
                is_absolute=True),), (8, 120, 400), 8, filled=True,
    ),
)  # fmt: skip
