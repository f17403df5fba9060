"""Figures that acceptance tests measure; they are shown when all is done."""

from __future__ import annotations

from typing import Final

import pytest

_TOLD: Final = pytest.StashKey[list[str]]()


class Figures:
    """What was measured, a line each."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def add(self, line: str) -> None:
        self._told.append(line)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Lines for the end of the run's report."""
    return Figures(request.config.stash.setdefault(_TOLD, []))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if told := config.stash.get(_TOLD, []):
        terminalreporter.section("measured")
        for line in told:
            terminalreporter.write_line(line)
