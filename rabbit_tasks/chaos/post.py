"""Publishes the tasks, each again until it is confirmed; not faster than they are worked off."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from rabbit_tasks.chaos.app import Task
from rabbit_tasks.chaos.plan import Plan
from rabbit_tasks.errors import PublishError, Unroutable
from rabbit_tasks.publisher import Publisher

WINDOW: Final = 100
"""Publishes on their way at once."""
BACKLOG: Final = 1_000
"""Tasks that are published and not yet worked off, at most, or some more for a large fleet: memory
stays flat for millions, and what comes again does not wait behind all the others."""
PAUSE: Final = 1.0


class Post:
    """The publishing half of a run."""

    def __init__(self, plan: Plan, publisher: Publisher, finished: Callable[[], int]) -> None:
        self._plan = plan
        self._publisher = publisher
        self._finished = finished
        self._poison = plan.poisoned()
        self._backlog = max(BACKLOG, 4 * plan.workers * plan.concurrency)
        self._next = 0
        self._turn = asyncio.Lock()
        self._stop = asyncio.Event()
        self.confirmed = bytearray(plan.tasks)
        self.count = 0
        """Confirmed."""
        self.repeats = 0
        self.repeated: Counter[int] = Counter()
        """By task: publishes that were not confirmed and may be stored all the same."""

    @property
    def poison(self) -> frozenset[int]:
        return self._poison

    @property
    def is_through(self) -> bool:
        return self.count == self._plan.tasks

    def stop(self) -> None:
        """Publish no further task. What is on its way is waited for."""
        self._stop.set()

    async def run(self) -> None:
        """Publish all tasks. Unroutable where the queue is gone."""
        async with asyncio.TaskGroup() as pumps:
            for _ in range(min(WINDOW, self._plan.tasks)):
                pumps.create_task(self._pump())

    async def _pump(self) -> None:
        while (task := await self._take()) is not None:
            await self._publish(task)

    async def _take(self) -> int | None:
        """The next task, when there is room for it; None when there is none, or we are to stop."""
        async with self._turn:  # one waits for room, the others for their turn
            while self._next - self._finished() >= self._backlog and not self._stop.is_set():
                await asyncio.sleep(0.05)
            if self._stop.is_set() or self._next >= self._plan.tasks:
                return None
            task, self._next = self._next, self._next + 1
            return task

    async def _publish(self, task: int) -> None:
        body = Task(task=task, poison=task in self._poison).model_dump_json().encode()
        while True:
            try:
                await self._publisher.publish(
                    self._plan.queue, body, message_id=str(task), content_type="application/json"
                )
            except Unroutable:
                raise
            except PublishError as error:
                self.repeats += 1
                if error.maybe_stored:
                    self.repeated[task] += 1
                if self._stop.is_set():
                    return
                await self._pause()
            else:
                self.confirmed[task] = 1
                self.count += 1
                return

    async def _pause(self) -> None:
        """Not all of them at once, on a broker that has just come back."""
        try:
            async with asyncio.timeout(random.uniform(0.1, PAUSE)):
                await self._stop.wait()
        except TimeoutError:
            pass
