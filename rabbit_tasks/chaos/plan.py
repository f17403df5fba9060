"""What happens to each task: decided by the seed, before anything runs."""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Self

from rabbit_tasks.errors import ConfigurationError

PREFIX: Final = "rabbit-tasks-chaos"
FILE: Final = "plan.json"

LATE: Final = 0.2
"""The share of deaths that come after the work."""
LATEST: Final = 0.005
"""Seconds after the work until which they come: about the time of a confirm and an ack."""


@dataclass(frozen=True)
class Plan:
    """The run's figures; everything that chance decides is a function of them.

    tasks, kill, fail    how many; how probable it is that one run kills its worker, or fails
    poison               how many always kill their worker; below 1, how probable it is for each
    run                  names the queues of this run; no part of any decision
    """

    tasks: int
    seed: int
    run: str
    kill: float = 0.0
    fail: float = 0.0
    poison: float = 0.0
    workers: int = 4
    concurrency: int = 1
    work_time: timedelta = timedelta(0)
    delivery_limit: int = 5
    pid: int = 0
    """Of the process that makes the run: without it the fleet ends by itself."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("tasks", 1, 100_000_000), ("workers", 1, 500), ("concurrency", 1, 1000),
            ("delivery_limit", 1, 1_000_000),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ConfigurationError(
                    f"{_option(name)} is {getattr(self, name)}; it takes a whole number "
                    f"from {low} to {high}"
                )
        for name in ("kill", "fail"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(
                    f"{_option(name)} is {getattr(self, name):g}; it takes a probability, 0 to 1"
                )
        if not 0 <= self.poison <= self.tasks or (self.poison > 1 and self.poison % 1):
            raise ConfigurationError(
                f"--poison is {self.poison:g}; it takes a probability below 1, or a whole number of "
                f"tasks up to --tasks ({self.tasks})"
            )
        if not re.fullmatch(r"[a-z0-9]{1,40}", self.run):
            raise ConfigurationError(f"{self.run!r} does not name a run")

    @property
    def prefix(self) -> str:
        """What the names of all queues of this run begin with."""
        return f"{PREFIX}.{self.run}."

    @property
    def queue(self) -> str:
        """The main queue."""
        return f"{self.prefix}tasks"

    def poisoned(self) -> frozenset[int]:
        """The tasks that always kill their worker."""
        if 0 < self.poison < 1:
            return frozenset(t for t in range(self.tasks) if self._draw("poison", t) < self.poison)
        # (no string: the numbers are then the same in every version of Python)
        dice = random.Random(int(self._draw("poisoned") * 2**53))
        return frozenset(dice.sample(range(self.tasks), int(self.poison)))

    def death(self, task: int, run: int, *, poison: bool) -> float | None:
        """Whether a task's `run`-th run, from 1, kills its worker: so many seconds after the work.

        0.0 is in mid-work, as most of them are. The others hit the worker while it brings the outcome
        to the broker, or with its next message in hand. Which worker it is, is no part of it.
        """
        if poison:
            return 0.0
        if self._draw("kill", task, run) >= self.kill:
            return None
        if self._draw("late", task, run) >= LATE:
            return 0.0
        return LATEST * (1 - self._draw("moment", task, run))

    def fails(self, task: int, attempt: int) -> bool:
        """Whether this attempt at a task fails, if its worker lives so long."""
        return self._draw("fail", task, attempt) < self.fail

    def _draw(self, *what: object) -> float:
        """From 0 up to, not including, 1."""
        text = " ".join(str(one) for one in (self.seed, *what))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53

    def write(self, folder: Path) -> None:
        told = {**asdict(self), "work_time": self.work_time.total_seconds()}
        (folder / FILE).write_text(json.dumps(told, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        told = json.loads((folder / FILE).read_text())
        return cls(**{**told, "work_time": timedelta(seconds=told["work_time"])})


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
