"""Where CPU time goes: samples of the stack, by the clock of the process's own CPU time.

A sampler and not cProfile, which would charge small functions for being called, two- to threefold.
Time in functions written in C counts for the Python function that called them.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

EVERY: Final = 0.001
"""Seconds of CPU time between two samples; Linux rounds it up to its tick, 1 to 10 ms."""
DEPTH: Final = 60
SERVANTS: Final = ("asyncio", "standard library", "generated code")
"""Whose time is that of their callers."""

Place = tuple[str, str, int]
"""File, function, and the line where it begins."""


@contextmanager
def sampled(path: Path) -> Iterator[None]:
    """Write the stacks of the block down, the innermost place first, with how often each was seen."""
    seen: Counter[tuple[Place, ...]] = Counter()

    def look(_: int, frame: FrameType | None) -> None:
        stack: list[Place] = []
        while frame is not None and len(stack) < DEPTH:
            code = frame.f_code
            stack.append((code.co_filename, code.co_qualname, code.co_firstlineno))
            frame = frame.f_back
        seen[tuple(stack)] += 1

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        path.write_text(json.dumps([[stack, times] for stack, times in seen.items()]))


@dataclass(frozen=True, slots=True)
class Function:
    """Its share of the samples: on top of the stack, and anywhere in it."""

    place: str
    own: float
    total: float


class Profile:
    """The samples of a run."""

    def __init__(self, path: Path) -> None:
        self._stacks: list[tuple[list[Place], int]] = [
            ([(file, name, line) for file, name, line in stack], times)
            for stack, times in json.loads(path.read_text())
        ]
        self.samples = sum(times for _, times in self._stacks)

    def libraries(self) -> list[tuple[str, float, float]]:
        """Each library's share of the CPU time: its own code's, and with what asyncio and the standard
        library did when it called them; the largest first."""
        own: Counter[str] = Counter()
        caused: Counter[str] = Counter()
        for stack, times in self._stacks:
            libraries = [library_of(file) for file, _, _ in stack]
            own[libraries[0]] += times
            # At the root of every stack are the event loop and our own runner, who cause nothing else.
            causes = (name for name in libraries if name not in (*SERVANTS, "bench"))
            caused["bench" if libraries[0] == "bench" else next(causes, "asyncio")] += times
        return [
            (name, own[name] / self.samples, caused[name] / self.samples)
            for name, _ in (own | caused).most_common()
        ]

    def functions(self, most: int, *, by_own: bool = True) -> list[Function]:
        """Those that take most, by themselves or with all that they call."""
        own: Counter[Place] = Counter()
        total: Counter[Place] = Counter()
        for stack, times in self._stacks:
            own[stack[0]] += times
            for place in set(stack):
                total[place] += times
        return [
            Function(_shown(place), own[place] / self.samples, total[place] / self.samples)
            for place in (one for one, _ in (own if by_own else total).most_common(most))
        ]


def library_of(file: str) -> str:
    """The package that a file belongs to."""
    if file.startswith("<"):
        return "generated code"
    parts = Path(file).parts
    for home in ("site-packages", "dist-packages"):
        if home in parts:
            return parts[parts.index(home) + 1].removesuffix(".py")
    for ours in ("rabbit_tasks", "bench"):
        # (bench has a file of the other's name)
        if ours in parts and not (ours == "rabbit_tasks" and "bench" in parts):
            return ours
    return "asyncio" if "asyncio" in parts else "standard library"


def _shown(place: Place) -> str:
    file, name, line = place
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"
