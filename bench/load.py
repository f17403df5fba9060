"""Messages put into a queue, which nobody times."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import aiormq
from aiormq.abc import AbstractChannel
from pamqp.commands import Basic

from bench.body import bytes_of


def fill(url: str, queue: str, count: int) -> None:
    """Publish so many; they are in the queue when it returns."""
    asyncio.run(_with_channel(url, lambda channel: _fill(channel, queue, count)))


async def _with_channel(url: str, use: Callable[[AbstractChannel], Awaitable[Any]]) -> None:
    connection = await aiormq.connect(url)
    try:
        # Without confirms: nobody times it, and it would take as long as what is timed.
        await use(await connection.channel(publisher_confirms=False))
    finally:
        await connection.close()


async def _fill(channel: AbstractChannel, queue: str, count: int) -> None:
    for number in range(count):
        await _publish(channel, queue, number)
    while (await channel.queue_declare(queue, passive=True)).message_count != count:
        await asyncio.sleep(0.02)


async def _publish(channel: AbstractChannel, queue: str, number: int) -> None:
    await channel.basic_publish(
        bytes_of(number),
        routing_key=queue,
        properties=Basic.Properties(
            content_type="application/json",
            delivery_mode=2,
            message_id=uuid.uuid4().hex,
            timestamp=datetime.now(UTC),
        ),
    )


class Feeder:
    """Publishes one more message whenever it is asked, from a thread of its own."""

    def __init__(self, url: str, queue: str, count: int) -> None:
        self._url = url
        self._queue = queue
        self._left = count
        self._wanted = threading.Semaphore()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def another(self) -> None:
        self._wanted.release()

    def _run(self) -> None:
        asyncio.run(_with_channel(self._url, self._feed))

    async def _feed(self, channel: AbstractChannel) -> None:
        while self._left:
            await asyncio.to_thread(self._wanted.acquire)
            self._left -= 1
            await _publish(channel, self._queue, self._left)
