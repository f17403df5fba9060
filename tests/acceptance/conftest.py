"""The command in this process; figures that acceptance tests measure, shown when all is done."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Final

import pytest

from rabbit_tasks.cli import command
from tests.support.commands import Result, Run

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


@pytest.fixture
def cli(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Run:
    """The command in this process, in an empty folder."""
    monkeypatch.setenv("RABBIT_TASKS_URL", url)
    monkeypatch.delenv("RABBIT_TASKS_APP", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: bytes = b"") -> Result:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["rabbit-tasks", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            command()
        out, err = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        assert "Traceback" not in err
        return Result(code, out, err)

    return call
