"""The process in which one contender works, seen from outside."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bench.contender import FIRST, QUEUE, URL
from bench.measure import Measure

ROOT: Final = Path(__file__).parents[1]
PATIENCE: Final = 180.0
"""Seconds for one order."""


UNCOMPILED: Final = ("PYTHONDONTWRITEBYTECODE", "PYTHONOPTIMIZE")
"""Variables that contenders do not inherit."""


class Failed(Exception):
    """A contender could not do it; the text says who, what and why."""


class Lane:
    """Runs one contender, idle between two orders."""

    def __init__(self, name: str, url: str, queue: str) -> None:
        self.name = name
        self.queue = queue
        self.version = "?"
        self.is_warm = False
        """Whether a process of it has started before, so that the next one compiles nothing."""
        # What is installed has its bytecode. What somebody works on may have none, or may not write it
        # down, and would be compiled at every start.
        self._bytecode = tempfile.TemporaryDirectory()
        self._environment = {
            **{name: value for name, value in os.environ.items() if name not in UNCOMPILED},
            URL: url,
            QUEUE: queue,
            "PYTHONPYCACHEPREFIX": self._bytecode.name,
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
            ),
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the lane)
        self._buffer = b""
        self._told = 0
        # A session of its own: Ctrl-C is for us, who end it and then remove the queues.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.runner", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=self._environment, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        _end(self._process)
        self._log.close()
        self._bytecode.cleanup()

    def ask(self, do: str, **more: Any) -> Any:
        """The answer to an order; Failed with the last line of what went wrong."""
        assert self._process.stdin is not None
        self._told = self._log.seek(0, os.SEEK_END)
        try:
            self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self._process.stdin.flush()
            found = json.loads(self._line())
        except (BrokenPipeError, EOFError):
            raise Failed(f"{self.name}: its process ended\n{self.told()}") from None
        if "missing" in found:
            raise Failed(
                f"{self.name} needs {found['missing']}, which is not installed: pip install '.[bench]'"
            )
        if "error" in found:
            raise Failed(f"{self.name}: {do}: {found['error']}\n{self.told()}")
        return found["answer"]

    def run(self, measure: Measure, count: int, profile: Path | None = None) -> Any:
        """The figures of one run; None where it has nothing of the kind."""
        slots = min(measure.slots, max(1, count // 4))
        return self.ask(
            "run", name=measure.name, method=measure.method, count=count, slots=slots,
            profile=str(profile) if profile else None,
        )  # fmt: skip

    def start(self) -> dict[str, float]:
        """Milliseconds from the start of a new process to the first message, which is there."""
        command, more = self.ask("command")
        with tempfile.TemporaryDirectory() as folder:
            first = Path(folder, "first")
            environment = {**self._environment, **more, FIRST: str(first)}
            began = time.monotonic()
            process = subprocess.Popen(
                command, env=environment, start_new_session=True, cwd=folder,
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            )  # fmt: skip
            try:
                while not first.exists() or not first.read_text().endswith("\n"):
                    if process.poll() is not None or time.monotonic() > began + PATIENCE:
                        raise Failed(f"{self.name}: start: no first message\n{self.told()}")
                    time.sleep(0.01)
                self.is_warm = True
                return {"time": (float(first.read_text().split()[0]) - began) * 1e3}
            finally:
                _end(process)

    def told(self) -> str:
        """The end of what it wrote on stderr since the last order."""
        self._log.seek(max(self._told, self._log.seek(0, os.SEEK_END) - 4000))
        text = self._log.read().decode(errors="replace")
        self._log.seek(0, os.SEEK_END)
        return text

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise Failed(f"{self.name}: no answer within {PATIENCE:g} s\n{self.told()}")
            read = os.read(descriptor, 65_536)
            if not read:
                raise EOFError
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it has started."""
    if process.stdin is not None:
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
    if process.stdin is None:
        process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
