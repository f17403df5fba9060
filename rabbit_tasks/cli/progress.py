"""A count of what is done, on long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def counting(verb: str, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Call what it gives once per message. It shows on stderr, and on a terminal only."""
    with Progress(
        SpinnerColumn(), TextColumn(verb), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), disable=not (shown and sys.stderr.isatty()), transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(verb, total=None)
        yield lambda: progress.advance(task)


@contextmanager
def moving() -> Iterator[Callable[[str, int, int], None]]:
    """Call what it gives with where messages go, how many went, and of how many. Shown likewise."""
    with Progress(
        SpinnerColumn(), TextColumn("moving {task.description}"), BarColumn(),
        MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=None)
        yield lambda where, done, total: progress.update(
            task, description=where, completed=done, total=total
        )


class Going:
    """How far long work is."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._since = time.monotonic()

    def began(self, total: int) -> None:
        self._since = time.monotonic()
        self._progress.update(self._task, total=total, completed=0)

    def at(self, position: int, done: int) -> None:
        """So many of all were looked at; and so many were done with."""
        rate = done / max(0.001, time.monotonic() - self._since)
        self._progress.update(self._task, completed=position, done=done, rate=rate)


@contextmanager
def going(verb: str, *, shown: bool = True) -> Iterator[Going]:
    """Tell it how far the work is: shown with its rate and the time left, on a terminal only."""
    with Progress(
        SpinnerColumn(), TextColumn(verb + " {task.fields[done]}"), BarColumn(),
        MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f}/s"), TimeRemainingColumn(),
        console=Console(stderr=True), disable=not (shown and sys.stderr.isatty()), transient=True,
    ) as progress:  # fmt: skip
        yield Going(progress, progress.add_task(verb, total=None, done=0, rate=0.0))
