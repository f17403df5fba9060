"""FastStream: a subscriber with a prefetch, which acks after the handler. (It has no delayed retry.)"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from faststream import AckPolicy
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue

from bench.body import body_of
from bench.contender import Contender, first_message
from bench.measure import PAUSE, WINDOW
from bench.tally import Stopwatch, Tally, Times


class Entry(Contender):
    distribution = "faststream"

    def _broker(self, slots: int = 1) -> Any:
        # (It has a log line for every message, which nobody else has.)
        return RabbitBroker(self.url, logger=None, default_channel=Channel(prefetch_count=slots))

    @property
    def _queue(self) -> Any:
        return RabbitQueue(self.queue, queue_type=QueueType.QUORUM, durable=True)

    def declare(self) -> None:
        async def make() -> None:
            async with self._broker() as broker:
                await broker.declare_queue(self._queue)

        asyncio.run(make())

    async def _publish(self, broker: Any, number: int) -> None:
        await broker.publish(body_of(number), queue=self.queue, persist=True, mandatory=True)

    def _work(
        self,
        slots: int,
        handle: Callable[[], Awaitable[None]],
        until: Callable[[Any], Awaitable[object]],
    ) -> None:
        async def work() -> None:
            broker = self._broker(slots)

            async def on_message(body: dict[str, Any]) -> None:
                await handle()

            broker.subscriber(self._queue, ack_policy=AckPolicy.NACK_ON_ERROR)(on_message)
            await broker.start()
            await until(broker)
            await broker.stop()

        asyncio.run(work())

    def drain(self, tally: Tally, slots: int) -> None:
        async def handle() -> None:
            tally.hit()

        self._work(slots, handle, lambda _: tally.wait())

    def handlers(self, tally: Tally, slots: int) -> None:
        async def handle() -> None:
            await asyncio.sleep(PAUSE)
            tally.hit()

        self._work(slots, handle, lambda _: tally.wait())

    def first(self) -> None:
        async def handle() -> None:
            first_message()

        self._work(1, handle, lambda _: asyncio.Event().wait())

    def publish_one(self, watch: Stopwatch) -> None:
        async def publish() -> None:
            async with self._broker() as broker:
                await self._publish(broker, 0)
                with watch.running():
                    for number in range(watch.count):
                        await self._publish(broker, number)

        asyncio.run(publish())

    def publish_many(self, watch: Stopwatch) -> None:
        async def publish() -> None:
            async with self._broker() as broker:
                await self._publish(broker, 0)
                numbers = iter(range(watch.count))

                async def pump() -> None:
                    for number in numbers:
                        await self._publish(broker, number)

                with watch.running():
                    await asyncio.gather(*(pump() for _ in range(WINDOW)))

        asyncio.run(publish())

    def latency(self, times: Times) -> None:
        async def handle() -> None:
            times.now()

        async def publish(broker: Any) -> None:
            for number in range(times.count):
                with times.one():
                    await self._publish(broker, number)
                await times.rest()

        self._work(1, handle, publish)
