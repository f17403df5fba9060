"""Commands that were run: what came of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """Stdout as JSON lines, by the letter of the standard."""
        return [json.loads(line, parse_constant=no_constant) for line in self.out.splitlines()]


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


Run = Callable[..., Result]
