"""What every worker did, written down outside of the broker.

A line per event in one file, each appended by a single write(2): lines of many processes do not mix,
and what was written is there when its process is killed in the next moment. (It is in the kernel's
hands, not on the disk: the ledger outlives any process, not the machine.)

A line that a kill has cut is told by its missing end, and the next one begins on a line of its own.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

FILE: Final = "ledger"
RUNS_FILE: Final = "runs"

Kind = Literal["start", "kill", "done", "fail", "cancel", "settled", "held", "waits", "lost",
               "ready", "left"]  # fmt: skip
"""start     a handler has the task            kill      … and is about to SIGKILL its process
done      … has done it                     fail      … raises
cancel    … is stopped, its message put back
settled   the outcome is on the broker, and the ack was sent
held      the copy was not confirmed, and is published again
waits     its workers died more than once: a copy goes to a crashed queue, without a run
lost      the channel or connection is gone; with its task, where one was in hand
ready     a worker process takes messages      left      … ends in good order"""
KINDS: Final = frozenset(get_args(Kind))


class Event(NamedTuple):
    """One line."""

    kind: str
    task: int
    """-1 where it is about none."""
    attempt: int
    worker: str
    """One process: its id, and what tells it from another one that had this id before."""
    at: float
    """By the machine's monotonic clock, which all its processes share."""
    redelivered: bool = False

    def line(self) -> bytes:
        text = (
            f"\n{self.kind} {self.task} {self.attempt} {self.worker} {self.at:.6f} "
            f"{self.redelivered:d} .\n"
        )
        return text.encode()


def parse(line: bytes) -> Event | None:
    """The event of a line; None where it was cut."""
    parts = line.split()
    if len(parts) != 7:  # the last is a full stop, without which a number might have been longer
        return None
    try:
        kind = parts[0].decode()
        return (
            Event(kind, int(parts[1]), int(parts[2]), parts[3].decode(), float(parts[4]),
                  parts[5] == b"1")
            if kind in KINDS else None
        )  # fmt: skip
    except ValueError:
        return None


class Ledger:
    """The ledger of a run, and how often each task was run: one byte each."""

    def __init__(self, folder: Path, tasks: int) -> None:
        self.path = folder / FILE
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        runs = os.open(folder / RUNS_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(runs).st_size < tasks:
            os.ftruncate(runs, tasks)
        # Shared with every other process that maps it, and theirs when this one is killed.
        self._runs = mmap.mmap(runs, tasks)
        os.close(runs)
        self._pid = 0
        self._worker = ""

    def close(self) -> None:
        os.close(self._file)
        self._runs.close()

    def write(
        self, kind: Kind, task: int = -1, attempt: int = 0, *, redelivered: bool = False
    ) -> None:
        event = Event(kind, task, attempt, self._name(), time.monotonic(), redelivered)
        os.write(self._file, event.line())

    def count(self, task: int) -> int:
        """One more run of this task; how many that makes."""
        self._runs[task] = count = min(255, self._runs[task] + 1)
        return count

    def _name(self) -> str:
        if self._pid != os.getpid():  # the process was forked since
            self._pid = os.getpid()
            self._worker = f"{self._pid}-{time.monotonic_ns() // 1000:x}"
        return self._worker


class Reading:
    """Reads what has been added to a ledger since the last time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._at = 0
        self._rest = b""
        self.cut = 0
        """Lines that a kill has cut."""

    def new(self) -> Iterator[Event]:
        """The events that have come."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            while chunk := file.read(1 << 20):
                self._at += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    if not line:
                        continue
                    event = parse(line)
                    if event is None:
                        self.cut += 1
                    else:
                        yield event


def events(folder: Path) -> Iterator[Event]:
    """All of them, in the order in which they were written."""
    return Reading(folder).new()
