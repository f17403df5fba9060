"""A row of the diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "fault", "unseen"]


@dataclass(frozen=True)
class Row:
    """What is so, and what to do about it."""

    state: State
    about: str
    says: str
    remedy: str = ""
    """What to type; nothing where there is nothing to do."""
