"""rabbit_tasks, as its users use it: a worker with consumers, a publisher."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from bench.body import body_of
from bench.burning import burn
from bench.contender import QUEUE, URL, Contender, first_message
from bench.measure import DELAY_MS, PAUSE, WINDOW
from bench.tally import Stopwatch, Tally, Times
from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, Settings

Body = dict[str, Any]
Handle = Callable[[Message], Awaitable[None]]


QUEUE_HERE: Final = os.environ.get(QUEUE, "bench")
"""For the consumers that other processes import."""


class Kind(Consumer[Body]):
    """What all consumers here have in common: one retry, and so the same queues."""

    retry = RetryPolicy(delays=(timedelta(milliseconds=DELAY_MS),))


class First(Kind):
    queue = QUEUE_HERE

    async def handle(self, body: Body, message: Message) -> None:
        first_message()


class Burning(Kind):
    queue = QUEUE_HERE
    isolation = "process"

    def handle(self, body: Body, message: Message) -> None:
        burn()


def first() -> App:
    """For `rabbit-tasks work`."""
    return App("bench", [First()])


class Entry(Contender):
    distribution = "rabbit-tasks"

    def _app(self, slots: int, handle: Handle) -> App:
        class Handling(Kind):
            queue = self.queue
            concurrency = slots

            async def handle(self, body: Body, message: Message) -> None:
                await handle(message)

        return App("bench", [Handling()])

    @property
    def _settings(self) -> Settings:
        return Settings(url=self.url)

    def _work(self, app: App, until: Callable[[], Awaitable[None]]) -> None:
        """Run a worker until something is over."""
        from rabbit_tasks.worker import Worker

        async def work() -> None:
            worker = Worker(app, self._settings)
            working = asyncio.create_task(worker.run())
            over = asyncio.ensure_future(until())
            await asyncio.wait([working, over], return_when=asyncio.FIRST_COMPLETED)
            worker.stop()
            await working
            await over

        asyncio.run(work())

    def names(self) -> list[str]:
        return [queue.name for queue in self._app(1, _nothing).topology.queues]

    def exchanges(self) -> list[str]:
        from rabbit_tasks.topology import PARKING_LOT

        return [PARKING_LOT]

    def declare(self) -> None:
        from rabbit_tasks.broker import connected
        from rabbit_tasks.declare import declare

        async def make() -> None:
            async with connected(self._settings, "bench") as connection:
                await declare(connection, self._app(1, _nothing).topology)

        asyncio.run(make())

    def drain(self, tally: Tally, slots: int) -> None:
        async def handle(_: Message) -> None:
            tally.hit()

        self._work(self._app(slots, handle), tally.wait)

    def handlers(self, tally: Tally, slots: int) -> None:
        async def handle(_: Message) -> None:
            await asyncio.sleep(PAUSE)
            tally.hit()

        self._work(self._app(slots, handle), tally.wait)

    def publish_one(self, watch: Stopwatch) -> None:
        async def publish() -> None:
            async with Publisher.open(self._settings) as publisher:
                await publisher.publish(self.queue, body_of(0))
                with watch.running():
                    for number in range(watch.count):
                        await publisher.publish(self.queue, body_of(number))

        asyncio.run(publish())

    def publish_many(self, watch: Stopwatch) -> None:
        async def publish() -> None:
            async with Publisher.open(self._settings) as publisher:
                await publisher.publish(self.queue, body_of(0))
                bodies = (body_of(number) for number in range(watch.count))
                with watch.running():
                    await publisher.publish_many(self.queue, bodies, window=WINDOW)

        asyncio.run(publish())

    def retry(self, tally: Tally, slots: int) -> None:
        async def handle(message: Message) -> None:
            if message.attempt == 1:
                tally.failed(message.id)
                raise ValueError("the first attempt fails")
            tally.again(message.id)
            tally.hit()

        self._work(self._app(slots, handle), tally.wait)

    def latency(self, times: Times) -> None:
        async def handle(_: Message) -> None:
            times.now()

        async def publish() -> None:
            async with Publisher.open(self._settings) as publisher:
                for number in range(times.count):
                    with times.one():
                        await publisher.publish(self.queue, body_of(number))
                    await times.rest()

        self._work(self._app(1, handle), publish)

    def isolated(self, tally: Tally, slots: int) -> None:
        Burning.concurrency = slots
        app = App("bench", [Burning()], observers=[lambda _: tally.hit()])
        self._work(app, tally.wait)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "rabbit_tasks", "work"]

    def environment(self) -> Mapping[str, str]:
        return {
            "RABBIT_TASKS_APP": "bench.contenders.rabbit_tasks:first",
            "RABBIT_TASKS_URL": os.environ[URL],
        }


async def _nothing(_: Message) -> None:
    """For a topology alone."""
