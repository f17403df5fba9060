"""aio-pika, hand-written: one channel with a prefetch, copies of failed messages to a TTL queue."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import Any

import aio_pika
from aio_pika.abc import AbstractExchange, AbstractIncomingMessage, HeadersType

from bench.body import body_of
from bench.burning import burn
from bench.contender import Contender, first_message
from bench.measure import DELAY_MS, PAUSE, WINDOW
from bench.tally import Stopwatch, Tally, Times

Handle = Callable[[AbstractIncomingMessage], Awaitable[None]]

log = logging.getLogger("bench")


class Entry(Contender):
    distribution = "aio-pika"

    @property
    def waiting(self) -> str:
        return f"{self.queue}.retry"

    def names(self) -> list[str]:
        return [self.queue, self.waiting]

    def declare(self) -> None:
        async def make() -> None:
            async with await aio_pika.connect(self.url) as connection:
                channel = await connection.channel()
                quorum: dict[str, Any] = {"x-queue-type": "quorum"}
                await channel.declare_queue(self.queue, durable=True, arguments=quorum)
                await channel.declare_queue(
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
    async def _consuming(self, slots: int, handle: Handle) -> AsyncIterator[None]:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=slots)
            queue = await channel.get_queue(self.queue)
            await queue.consume(handle)
            yield

    @asynccontextmanager
    async def _publishing(self) -> AsyncIterator[AbstractExchange]:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            yield channel.default_exchange

    async def _publish(self, exchange: AbstractExchange, number: int) -> None:
        await exchange.publish(
            _message(json.dumps(body_of(number)).encode()), self.queue, mandatory=True
        )

    def _drain(self, tally: Tally, slots: int, pause: float | None) -> None:
        async def on_message(message: AbstractIncomingMessage) -> None:
            json.loads(message.body)
            if pause is not None:
                await asyncio.sleep(pause)
            await message.ack()
            tally.hit()

        async def consume() -> None:
            async with self._consuming(slots, on_message):
                await tally.wait()

        asyncio.run(consume())

    def drain(self, tally: Tally, slots: int) -> None:
        self._drain(tally, slots, None)

    def handlers(self, tally: Tally, slots: int) -> None:
        self._drain(tally, slots, PAUSE)

    def publish_one(self, watch: Stopwatch) -> None:
        async def publish() -> None:
            async with self._publishing() as exchange:
                await self._publish(exchange, 0)
                with watch.running():
                    for number in range(watch.count):
                        await self._publish(exchange, number)

        asyncio.run(publish())

    def publish_many(self, watch: Stopwatch) -> None:
        async def publish() -> None:
            async with self._publishing() as exchange:
                await self._publish(exchange, 0)
                numbers = iter(range(watch.count))

                async def pump() -> None:
                    for number in numbers:
                        await self._publish(exchange, number)

                with watch.running():
                    await asyncio.gather(*(pump() for _ in range(WINDOW)))

        asyncio.run(publish())

    def retry(self, tally: Tally, slots: int) -> None:
        async def consume() -> None:
            async with self._publishing() as exchange:

                async def on_message(message: AbstractIncomingMessage) -> None:
                    json.loads(message.body)
                    count = message.headers.get("x-retry-count", 0)
                    try:
                        if not count:
                            tally.failed(message.message_id)
                            raise ValueError("the first attempt fails")
                    except ValueError as error:
                        log.warning("message %s failed: %s", message.message_id, error)
                        headers = {**message.headers, "x-retry-count": 1, "x-error": str(error)}
                        copy = _message(message.body, message.message_id, headers)
                        await exchange.publish(copy, self.waiting, mandatory=True)
                        await message.ack()
                        return
                    tally.again(message.message_id)
                    await message.ack()
                    tally.hit()

                async with self._consuming(slots, on_message):
                    await tally.wait()

        asyncio.run(consume())

    def latency(self, times: Times) -> None:
        async def on_message(message: AbstractIncomingMessage) -> None:
            json.loads(message.body)
            times.now()
            await message.ack()

        async def publish() -> None:
            async with self._consuming(1, on_message), self._publishing() as exchange:
                for number in range(times.count):
                    with times.one():
                        await self._publish(exchange, number)
                    await times.rest()

        asyncio.run(publish())

    def first(self) -> None:
        async def on_message(message: AbstractIncomingMessage) -> None:
            json.loads(message.body)
            first_message()
            await message.ack()

        async def consume() -> None:
            async with self._consuming(1, on_message):
                await asyncio.Event().wait()

        asyncio.run(consume())

    def isolated(self, tally: Tally, slots: int) -> None:
        async def consume(pool: ProcessPoolExecutor) -> None:
            async def on_message(message: AbstractIncomingMessage) -> None:
                json.loads(message.body)
                await asyncio.get_running_loop().run_in_executor(pool, burn)
                await message.ack()
                tally.hit()

            async with self._consuming(slots, on_message):
                await tally.wait()

        with ProcessPoolExecutor(slots, get_context("spawn")) as pool:
            asyncio.run(consume(pool))


def _message(
    body: bytes, message_id: str | None = None, headers: HeadersType | None = None
) -> aio_pika.Message:
    return aio_pika.Message(
        body,
        headers=headers,
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        message_id=message_id or uuid.uuid4().hex,
        timestamp=datetime.now(UTC),
    )
