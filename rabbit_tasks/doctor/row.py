"""A row of the diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

State = Literal["ok", "warning", "fault", "unseen"]

SHOWN: Final = 3
"""Names that are told; of more, how many."""


@dataclass(frozen=True)
class Row:
    """What is so, and what to do about it."""

    state: State
    about: str
    says: str
    remedy: str = ""
    """What to type; nothing where there is nothing to do."""


def names(of: Iterable[str]) -> str:
    """Some names for a person, and how many more."""
    found = list(of)
    more = len(found) - SHOWN
    return ", ".join(found[:SHOWN]) + (f" and {more} more" if more > 0 else "")
