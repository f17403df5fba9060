"""Durations as people and queue names write them: 500ms, 10s, 5m, 2h, 1d."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

_UNITS: Final = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}


def duration_text(duration: timedelta) -> str:
    """The shortest exact form in one unit, from whole milliseconds: 1500ms, 90s, 5m.

    >>> duration_text(timedelta(seconds=90))
    '90s'
    """
    for unit, length in _UNITS.items():
        if duration and duration % length == timedelta():
            return f"{duration // length}{unit}"
    return f"{duration // _UNITS['ms']}ms"


def age_text(age: timedelta) -> str:
    """About how long, in its largest unit, for a person: 90 minutes are 1h.

    >>> age_text(timedelta(minutes=90))
    '1h'
    """
    for unit in ("d", "h", "m"):
        if age >= _UNITS[unit]:
            return f"{age // _UNITS[unit]}{unit}"
    return f"{max(0, age // _UNITS['s'])}s"


def duration_of(text: str | float | timedelta) -> timedelta:
    """A duration from text or from a number of seconds; ValueError for anything else.

    >>> duration_of("1.5h")
    datetime.timedelta(seconds=5400)
    """
    if isinstance(text, timedelta):
        return text
    number, unit = text, ""
    if isinstance(text, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*", text)
        number, unit = found.groups() if found else ("nan", "")
    try:
        return float(number) * _UNITS[unit or "s"]
    except (ValueError, OverflowError, TypeError):
        raise ValueError(
            f"{text!r} is no duration; write seconds, or a unit: 500ms, 10s, 5m, 2h, 1d"
        ) from None
