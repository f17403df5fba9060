"""aiormq, hand-written: what aio-pika does, without aio-pika's objects and its task per message."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import Any

import aiormq
from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic

from bench.body import body_of
from bench.burning import burn
from bench.contender import Contender, first_message
from bench.measure import DELAY_MS, PAUSE, WINDOW
from bench.tally import Stopwatch, Tally, Times

Handle = Callable[[DeliveredMessage], Coroutine[Any, Any, None]]

log = logging.getLogger("bench")


class Entry(Contender):
    distribution = "aiormq"

    @property
    def waiting(self) -> str:
        return f"{self.queue}.retry"

    def names(self) -> list[str]:
        return [self.queue, self.waiting]

    def declare(self) -> None:
        async def make() -> None:
            async with self._channel() as channel:
                quorum: dict[str, Any] = {"x-queue-type": "quorum"}
                await channel.queue_declare(self.queue, durable=True, arguments=quorum)
                await channel.queue_declare(
                    self.waiting,
                    durable=True,
                    arguments=quorum
                    | {
                        "x-message-ttl": DELAY_MS,
                        "x-dead-letter-exchange": "",
                        "x-dead-letter-routing-key": self.queue,
                        "x-dead-letter-strategy": "at-least-once",
                        "x-overflow": "reject-publish",
                    },
                )

        asyncio.run(make())

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[AbstractChannel]:
        connection = await aiormq.connect(self.url)
        try:
            yield await connection.channel(publisher_confirms=True, on_return_raises=True)
        finally:
            await connection.close()

    @asynccontextmanager
    async def _consuming(self, slots: int, handle: Handle) -> AsyncIterator[None]:
        async with self._channel() as channel:
            await channel.basic_qos(prefetch_count=slots)
            await channel.basic_consume(self.queue, handle)
            yield

    async def _publish(self, channel: AbstractChannel, number: int) -> None:
        body = json.dumps(body_of(number)).encode()
        await channel.basic_publish(
            body, routing_key=self.queue, properties=_properties(), mandatory=True
        )

    def drain(self, tally: Tally, slots: int) -> None:
        async def on_message(message: DeliveredMessage) -> None:
            json.loads(message.body)
            await _ack(message)
            tally.hit()

        self._consume(tally, slots, on_message)

    def handlers(self, tally: Tally, slots: int) -> None:
        async def on_message(message: DeliveredMessage) -> None:
            json.loads(message.body)
            await asyncio.sleep(PAUSE)
            await _ack(message)
            tally.hit()

        self._consume(tally, slots, on_message)

    def _consume(self, tally: Tally, slots: int, handle: Handle) -> None:
        async def consume() -> None:
            async with self._consuming(slots, handle):
                await tally.wait()

        asyncio.run(consume())

    def publish_one(self, watch: Stopwatch) -> None:
        async def publish() -> None:
            async with self._channel() as channel:
                await self._publish(channel, 0)
                with watch.running():
                    for number in range(watch.count):
                        await self._publish(channel, number)

        asyncio.run(publish())

    def publish_many(self, watch: Stopwatch) -> None:
        async def publish() -> None:
            async with self._channel() as channel:
                await self._publish(channel, 0)
                numbers = iter(range(watch.count))

                async def pump() -> None:
                    for number in numbers:
                        await self._publish(channel, number)

                with watch.running():
                    await asyncio.gather(*(pump() for _ in range(WINDOW)))

        asyncio.run(publish())

    def retry(self, tally: Tally, slots: int) -> None:
        async def consume() -> None:
            async with self._channel() as publishing:

                async def on_message(message: DeliveredMessage) -> None:
                    json.loads(message.body)
                    given = message.header.properties
                    headers = given.headers or {}
                    try:
                        if not headers.get("x-retry-count", 0):
                            tally.failed(given.message_id)
                            raise ValueError("the first attempt fails")
                    except ValueError as error:
                        log.warning("message %s failed: %s", given.message_id, error)
                        told = {**headers, "x-retry-count": 1, "x-error": str(error)}
                        await publishing.basic_publish(
                            message.body, routing_key=self.waiting, mandatory=True,
                            properties=_properties(given.message_id, told),
                        )  # fmt: skip
                        await _ack(message)
                        return
                    tally.again(given.message_id)
                    await _ack(message)
                    tally.hit()

                async with self._consuming(slots, on_message):
                    await tally.wait()

        asyncio.run(consume())

    def latency(self, times: Times) -> None:
        async def on_message(message: DeliveredMessage) -> None:
            json.loads(message.body)
            times.now()
            await _ack(message)

        async def publish() -> None:
            async with self._consuming(1, on_message), self._channel() as channel:
                for number in range(times.count):
                    with times.one():
                        await self._publish(channel, number)
                    await times.rest()

        asyncio.run(publish())

    def first(self) -> None:
        async def on_message(message: DeliveredMessage) -> None:
            json.loads(message.body)
            first_message()
            await _ack(message)

        async def consume() -> None:
            async with self._consuming(1, on_message):
                await asyncio.Event().wait()

        asyncio.run(consume())

    def isolated(self, tally: Tally, slots: int) -> None:
        with ProcessPoolExecutor(slots, get_context("spawn")) as pool:

            async def on_message(message: DeliveredMessage) -> None:
                json.loads(message.body)
                await asyncio.get_running_loop().run_in_executor(pool, burn)
                await _ack(message)
                tally.hit()

            self._consume(tally, slots, on_message)


async def _ack(message: DeliveredMessage) -> None:
    assert message.delivery_tag is not None
    await message.channel.basic_ack(message.delivery_tag)


def _properties(
    message_id: str | None = None, headers: dict[str, Any] | None = None
) -> Basic.Properties:
    return Basic.Properties(
        headers=headers,
        content_type="application/json",
        delivery_mode=2,
        message_id=message_id or uuid.uuid4().hex,
        timestamp=datetime.now(UTC),
    )
