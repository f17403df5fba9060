"""A channel whose messages pass as bytes: published many at a time, delivered without being read.

Moving a hundred thousand messages through the client library costs it a task, three futures and two
decoders for each. Here a publish is its frames, a confirm is a number, and a delivery is counted and
its body forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

import aiormq.exceptions as amqp
from aiormq.channel import Channel
from pamqp import commands

from rabbit_tasks.broker import RPC_TIMEOUT, Connection
from rabbit_tasks.confirms import Confirms, Letter, Lost, NotConfirmed, Rejected
from rabbit_tasks.deliveries import Deliveries
from rabbit_tasks.properties import Properties

_TOGETHER: Final = 65_536
"""Bytes of bodies that are written at once. (What a replay that ends has not written, nobody need
remove.)"""


class Conveyor:
    """Publishes to one exchange and waits for the confirms; takes deliveries of one queue.

    on_delivery     called with each delivery's tag and property list
    refusal         why the broker did not store one of what was published; None as long as it stored all
    """

    def __init__(
        self,
        connection: Connection,
        confirms: Confirms,
        patience: float,
        on_delivery: Callable[[int, bytes], None],
    ) -> None:
        self.channel: Channel = confirms.channel
        self._is_lost = False
        """Of something that was published nobody knows whether it is stored."""
        self.refusal: str | None = None
        self._connection = connection
        self._confirms = confirms
        self._patience = patience
        self._on_delivery = on_delivery
        self._waiting: list[Letter] = []
        self._bytes = 0
        self._news = asyncio.Event()
        # (It taps the channel, as the confirms do: ours is the last, for both.)
        self._deliveries = Deliveries(connection, self.channel, self._delivered)
        connection.tap(self.channel, self._frame)

    @classmethod
    async def open(cls, connection: Connection, on_delivery: Callable[[int, bytes], None]) -> Self:
        """On a channel of its own."""
        settings = connection.settings
        patience = settings.publish_timeout.total_seconds() if settings else RPC_TIMEOUT
        confirms = await Confirms.open(connection, patience, patient=True)
        return cls(connection, confirms, patience, on_delivery)

    async def consume(self, queue: str, prefetch: int) -> None:
        await self.channel.basic_qos(prefetch_count=prefetch, timeout=RPC_TIMEOUT)
        await self.channel.rpc(
            commands.Basic.Consume(queue=queue, consumer_tag="conveyor"), timeout=RPC_TIMEOUT
        )

    async def publish(self, exchange: str, key: str, properties: Properties, body: bytes) -> None:
        """Write it, sooner or later; `stored` tells what became of it."""
        self._waiting.append(Letter(exchange, key, properties.encode(), None, body))
        self._bytes += len(body)
        if self._bytes >= _TOGETHER:
            await self._write()

    async def _write(self) -> None:
        letters, self._waiting, self._bytes = self._waiting, [], 0
        for letter in letters:
            if not self._confirms.is_open:
                raise amqp.ChannelInvalidStateError("the channel was closed")
            letter.since = asyncio.get_running_loop().time()
            self._confirms.publish(letter, self._told)
        await self._connection.drained()

    async def stored(self) -> bool:
        """Wait until the broker has stored all that was published; False where it did not.

        What aiormq raises where the channel was closed before it said so.
        """
        await self._write()
        await self.until(lambda: not self._confirms.unanswered or self.refusal is not None)
        if self._is_lost:
            raise amqp.ChannelInvalidStateError("the channel was closed before the confirm")
        return self.refusal is None

    async def until(self, condition: Callable[[], bool], within: float | None = None) -> None:
        """Wait for what deliveries and confirms bring about.

        TimeoutError after `within` seconds, by default the time limit of a publish; it does not count
        while a broker holds publishers back. And what aiormq raises when the channel is gone.
        """
        limit = self._patience if within is None else within
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit
        while not condition():
            if self.channel.is_closed:
                raise amqp.ChannelInvalidStateError("the channel was closed")
            if self._connection.is_blocked:
                deadline = loop.time() + limit
            if (left := deadline - loop.time()) <= 0:
                raise TimeoutError
            self._news.clear()
            try:
                async with asyncio.timeout(min(0.5, left)):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def ack(self, tag: int) -> None:
        await self.channel.basic_ack(tag, wait=False)

    async def let_go(self, up_to: int) -> None:
        """Have the broker dead-letter every delivery up to this one that was not acked: one command,
        of which it does all or nothing."""
        await self.channel.basic_nack(up_to, multiple=True, requeue=False, wait=True)

    # --- what comes in --------------------------------------------------------------------------

    def _told(self, error: NotConfirmed | None) -> None:
        if isinstance(error, Rejected | Lost):
            self._is_lost = True
        elif error is not None:
            self.refusal = str(error)
        self._news.set()

    def _delivered(self, tag: int, _redelivered: bool, properties: bytes, _body: bytes) -> None:
        self._on_delivery(tag, properties)
        self._news.set()

    def _frame(self, kind: int, payload: bytes) -> bool:
        return self._deliveries.frame(kind, payload) or self._confirms.frame(kind, payload)
