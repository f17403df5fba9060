"""What was just said in the log is not said again and again: it is counted."""

from __future__ import annotations

import re
import time
from typing import Final

EVERY: Final = 30.0
"""Seconds between two lines about the same thing."""


class Repeats:
    """What was said of each thing that goes on, such as an outage, until it is over."""

    def __init__(self) -> None:
        self._things: dict[str, _Thing] = {}

    def say(self, about: str, reason: str = "", *, first: int = 1) -> str | None:
        """How a line about it ends, whether it was silenced meanwhile; None: only count this one.

        The first lines that give a reason are said, and then one in 30 s.
        """
        now = time.monotonic()
        thing = self._things.setdefault(about, _Thing(now))
        thing.times += 1
        # (The same reason may differ in its figures: a port, a pause, a number of the library's.)
        key = re.sub(r"\d+", "0", reason)
        said = thing.said.setdefault(key, _Said())
        if said.lines >= first and now - said.at < EVERY:
            said.silenced += 1
            return None
        silenced, said.silenced = said.silenced, 0
        said.lines, said.at = said.lines + 1, now
        return f" ({silenced} more times since this was last said)" if silenced else ""

    def over(self, about: str) -> str | None:
        """For how long and how often, once it is over; None where there was nothing of it."""
        thing = self._things.pop(about, None)
        if thing is None:
            return None
        times = f"{thing.times} failures" if thing.times > 1 else "one failure"
        return f"after {time.monotonic() - thing.since:.1f} s and {times}"


class _Said:
    __slots__ = ("at", "lines", "silenced")

    def __init__(self) -> None:
        self.at = 0.0
        self.lines = 0
        self.silenced = 0


class _Thing:
    __slots__ = ("said", "since", "times")

    def __init__(self, since: float) -> None:
        self.since = since
        self.times = 0
        self.said: dict[str, _Said] = {}
