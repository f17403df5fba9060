"""The worker processes of a run, kept alive by `rabbit-tasks work --processes`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rabbit_tasks.chaos.app import VARIABLE
from rabbit_tasks.chaos.plan import Plan
from rabbit_tasks.settings import PREFIX, Settings

LOG: Final = "fleet.log"
GRACE: Final = 10
"""Seconds for a handler that runs when the fleet is stopped."""
OVERTIME: Final = 20.0
"""Seconds after the grace time until what is left of the fleet is killed."""
RESTART_CAP: Final = "100ms"
"""The longest pause after a death: here, deaths are the point."""


COMMAND: Final = """
import rabbit_tasks.chaos.app
from rabbit_tasks.cli import main
main()
"""
"""`rabbit-tasks`, with the app's module loaded before the workers' processes part from the supervisor's:
there are thousands of them, and where Python may not keep what it compiles, each would do it anew."""


class Fleet:
    """The supervisor's process, and its workers through it."""

    def __init__(self, process: Process, folder: Path) -> None:
        self._process = process
        self._log = folder / LOG

    @classmethod
    async def start(cls, plan: Plan, settings: Settings, folder: Path) -> Fleet:
        """Start the workers of this plan."""
        with (folder / LOG).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", COMMAND, "--app", "rabbit_tasks.chaos.app:app",
                "work", "--processes", str(plan.workers),
                "--log-format", "json", "--grace", f"{GRACE}s",
                env={
                    **os.environ,
                    # Not as an argument: everybody on the machine may read those.
                    f"{PREFIX}URL": settings.url,
                    f"{PREFIX}RESTART_CAP": RESTART_CAP,
                    VARIABLE: str(folder),
                },
                stdin=DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C is for us, who stop it in good order
            )  # fmt: skip
        return cls(process, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.returncode

    async def stop(self, *, now: bool = False) -> None:
        """SIGTERM, or twice for `now`; what is left some time after the grace time is killed."""
        for _ in range(2 if now else 1):
            with suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.sleep(0.05 if now else 0)
        try:
            async with asyncio.timeout(OVERTIME + (0 if now else GRACE)):
                await self._process.wait()
        except TimeoutError:
            pass
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def lines(self) -> list[dict[str, Any]]:
        """Its log lines, decoded; others come from a process that was killed in mid-word."""
        found = []
        for line in self._log.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                if isinstance(told := json.loads(line), dict):
                    found.append(told)
        return found

    def deaths(self) -> int:
        """Workers that the supervisor found dead."""
        return sum("lived" in line for line in self.lines())

    def last_words(self) -> str:
        """What a person should know of a fleet that has ended by itself."""
        said = self._log.read_text(errors="replace").splitlines()[-1:]
        worst = [line for line in self.lines() if line.get("level") == "error"]
        return str(worst[-1].get("message")) if worst else " ".join(said)
