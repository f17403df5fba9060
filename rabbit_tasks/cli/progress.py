"""A count of what is done, on long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
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
