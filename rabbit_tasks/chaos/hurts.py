"""The command that hurts the broker: run now and then, its words and its exit code kept."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rabbit_tasks.chaos.account import Hurt
from rabbit_tasks.text import one_line

LIMIT: Final = 300.0
"""Seconds for one run of the command; then it is killed."""


@dataclass(frozen=True)
class Done:
    """One run of the command."""

    hurt: Hurt
    code: int | None
    """None where it was killed, its time being over."""
    output: str

    def __str__(self) -> str:
        took = self.hurt.ended - self.hurt.began
        ended = f"exit code {self.code}" if self.code is not None else f"killed after {LIMIT:g} s"
        said = f": {one_line(self.output, 200)}" if self.output else ""
        return f"{ended}, {took:.1f} s{said}"


class Hurts:
    """Runs the command at even parts of the work: so many times in all."""

    def __init__(self, command: str, times: int, folder: Path) -> None:
        self._command = command
        self.times = times
        self._folder = folder
        self.done: list[Done] = []
        self.running: asyncio.Task[Done] | None = None

    def due(self, share: float) -> bool:
        """Whether it is time for the next one, this share of the work being done."""
        return (
            self.running is None
            and len(self.done) < self.times
            and share >= (len(self.done) + 1) / (self.times + 1)
        )

    def start(self) -> None:
        self.running = asyncio.create_task(self._run())

    def collect(self) -> Done | None:
        """What has just ended, once."""
        if self.running is None or not self.running.done():
            return None
        ended, self.running = self.running.result(), None
        self.done.append(ended)
        return ended

    async def _run(self) -> Done:
        began = time.monotonic()
        # A file, not a pipe: a broker that the command starts may keep a pipe open for ever.
        path = self._folder / f"broker-command-{len(self.done) + 1}.log"
        with path.open("wb") as output:
            process = await asyncio.create_subprocess_shell(
                self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: a broker half down could not be cleaned
            )
            code: int | None = None
            try:
                async with asyncio.timeout(LIMIT):
                    code = await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        said = path.read_text(errors="replace")[-2000:].strip()
        return Done(Hurt(began, time.monotonic()), code, said)
