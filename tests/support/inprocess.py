"""Workers that run in the test's own process, where a test can look into their handlers."""

from __future__ import annotations

import asyncio

from rabbit_tasks import App, Settings
from rabbit_tasks.worker import Worker


class Running:
    """A worker that runs beside the test."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.worker = Worker(app, settings)
        self.task = asyncio.create_task(self.worker.run())

    @property
    def is_running(self) -> bool:
        return not self.task.done()

    async def end(self) -> None:
        """Stop it; raises what it died of."""
        self.worker.stop()
        await asyncio.wait_for(self.task, 30)

    async def drop(self) -> None:
        """After the test: nothing of it is left, whatever became of it."""
        self.worker.stop()
        self.worker.stop()
        await asyncio.wait([self.task], timeout=30)
        if self.task.done() and not self.task.cancelled():
            self.task.exception()  # the test has seen it, or does not care
