"""CPU-bound work in child processes, and what it cost them.

Every handler burns the same CPU time, however fast the machine; each process notes how much it has
used when a handler of it ends. What lies between two notes, less the work, is overhead.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.measure import WORK

RECORDS = "BENCH_RECORDS"
"""The variable that names the file of notes."""


def burn() -> None:
    """The work of one handler, noted down."""
    until = time.process_time() + WORK
    while time.process_time() < until:
        pass
    with open(os.environ[RECORDS], "ab", buffering=0) as records:
        records.write(f"{os.getpid()} {time.process_time()}\n".encode())


def overhead(records: Path) -> float:
    """Seconds of CPU per message that the child processes used beside the work."""
    of: dict[str, list[float]] = {}
    for line in records.read_text().splitlines():
        pid, used = line.split()
        of.setdefault(pid, []).append(float(used))
    used_in_all = sum(times[-1] - times[0] for times in of.values())
    messages = sum(len(times) - 1 for times in of.values())
    return used_in_all / messages - WORK if messages else 0.0
