"""Real worker processes, and what they wrote down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.support.brokers import ROOT

SOON: Final = 20.0
"""Seconds that "at once" takes at most, on a machine that is busy; less than the grace time."""


class WorkerProcess:
    """`rabbit-tasks work` in a process of its own, in its own process group.

    under   a command that runs it, such as `unshare --pid`
    """

    def __init__(
        self, url: str, folder: Path, *arguments: str, app: str, under: str = "", **env: str
    ) -> None:
        self.log_path = folder / f"worker-{time.monotonic_ns()}.log"
        self._log = self.log_path.open("wb")
        self._process = subprocess.Popen(
            [*under.split(), sys.executable, "-m", "rabbit_tasks", "--app", app, "work",
             "--log-format", "json", *arguments],
            cwd=ROOT,
            env={**os.environ, "RABBIT_TASKS_URL": url, **env},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """The log's JSON lines; others are the handlers' own prints."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def ready(self, within: float = 30) -> WorkerProcess:
        """Wait until it consumes."""
        wait_until(lambda: "connected to RabbitMQ" in self.log or not self.is_running, within)
        assert self.is_running, self.log
        return self

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def handlers(self) -> list[int]:
        """The process ids of its consumers' children."""
        return [pid for pid, _, parent, what in processes()
                if parent == self.pid and "spawn_main" in what]  # fmt: skip

    def workers(self) -> list[int]:
        """The process ids of its workers, where it is a supervisor (or what `under` runs)."""
        return [pid for pid, state, parent, what in processes()
                if parent == self.pid and "rabbit_tasks" in what and state != "Z"]  # fmt: skip

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, within: float = 60) -> int:
        return self._process.wait(within)

    def terminate(self, within: float = 60) -> int:
        """SIGTERM and wait; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(within)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(10)

    def end(self) -> None:
        """After the test: nothing of it is left."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(10)
        self._log.close()


class Runs:
    """What the handlers of tests.support.obedient wrote down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[dict[str, Any]] = []
        self._read = 0

    def rows(self) -> list[dict[str, Any]]:
        """Every line, in the order in which they were written."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                # (The last line may be half there.)
                written, end, _ = file.read().rpartition(b"\n")
            self._read += len(written) + len(end)
            self._rows += [json.loads(line) for line in written.splitlines()]
        return self._rows

    def all(self, event: str = "start", message_id: str | None = None) -> list[dict[str, Any]]:
        return [
            row for row in self.rows()
            if row["event"] == event and message_id in (None, row["id"])
        ]  # fmt: skip

    def attempts(self, message_id: str) -> list[int]:
        """The attempt numbers of the runs that started, in order."""
        return [row["attempt"] for row in self.all("start", message_id)]


def processes() -> Iterator[tuple[int, str, int, str]]:
    """Every process: id, state, parent, command."""
    if sys.platform != "linux":
        command = ["ps", "-A", "-ww", "-o", "pid=,state=,ppid=,command="]
        for line in subprocess.check_output(command, text=True).splitlines():
            pid, state, parent, what = line.split(maxsplit=3)
            yield int(pid), state[0], int(parent), what
        return
    for folder in Path("/proc").glob("[0-9]*"):  # (a minimal Debian has no ps)
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            what = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue
        yield int(folder.name), state, int(parent), what


def is_gone(pid: int) -> bool:
    """Whether no such process runs; one that ended and that nobody asked how counts as gone."""
    return not any(one == pid and state != "Z" for one, state, _, _ in processes())


def wait_until(condition: Callable[[], object], within: float = 30, every: float = 0.02) -> None:
    """Return when the condition holds; AssertionError when it does not in time."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s: {condition}"
        time.sleep(every)
