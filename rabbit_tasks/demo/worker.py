"""The demo's worker: `rabbit-tasks work` in a process of its own, followed by its log lines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from rabbit_tasks.errors import RabbitTasksError
from rabbit_tasks.settings import PREFIX, Settings

TIME_TO_END: Final = 15.0
"""Seconds for a worker to finish what it has in hand, after SIGTERM, before it is killed."""


class WorkerEnded(RabbitTasksError):
    """The worker ended before its time."""


class WorkerProcess:
    """A worker that runs, and what it says."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._last_words = ""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    @asynccontextmanager
    async def running(cls, settings: Settings, app: str) -> AsyncIterator[WorkerProcess]:
        """Run one for the length of a block; it is gone afterwards, whatever happened."""
        worker = cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rabbit_tasks", "--app", app,
                "work", "--log-format", "json", "--grace", "5s",
                # Not as an argument: everybody on the machine may read those.
                env={**os.environ, f"{PREFIX}URL": settings.url},
                stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, limit=2**20,
            )
        )  # fmt: skip
        try:
            yield worker
        finally:
            await worker.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def next_event(self) -> dict[str, Any]:
        """The next log line, decoded. WorkerEnded when there is none to come."""
        event = await self._events.get()
        if event is None:
            code = await self._process.wait()
            raise WorkerEnded(f"the worker ended with exit code {code}: {self._last_words}")
        return event

    async def end(self) -> int:
        """SIGTERM; after 15 s SIGKILL. The exit code."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(TIME_TO_END):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
        await self._reading
        return await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            text = line.decode(errors="replace").strip()
            self._last_words = text or self._last_words
            if text.startswith("{"):
                self._events.put_nowait(json.loads(text))
                self._last_words = json.loads(text)["message"]
        self._events.put_nowait(None)
