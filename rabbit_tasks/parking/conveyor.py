"""A channel whose messages pass as bytes: published many at a time, delivered without being read.

Moving a hundred thousand messages through the client library costs it a task, three futures and two
decoders for each. Here a publish is its frames, written many together, a confirm is a number, and a
delivery is counted and its body forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Self

import aiormq.exceptions as amqp
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from pamqp import commands

from rabbit_tasks.broker import RPC_TIMEOUT, Connection
from rabbit_tasks.frames import BODY, HEADER, METHOD
from rabbit_tasks.properties import FRAME_OVERHEAD, Properties

_BASIC: Final = (60).to_bytes(2, "big")
_RETURN: Final = _BASIC + (50).to_bytes(2, "big")
_DELIVER: Final = _BASIC + (60).to_bytes(2, "big")
_ACK: Final = _BASIC + (80).to_bytes(2, "big")
_NACK: Final = _BASIC + (120).to_bytes(2, "big")
_MANDATORY: Final = b"\x01"
_END: Final = b"\xce"
_TOGETHER: Final = 65_536
"""Bytes that are written at once."""


class Conveyor:
    """Publishes to one exchange and waits for the confirms; takes deliveries of one queue.

    refusal     why the broker did not store one of what was published; None as long as it stored all
    """

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        on_delivery: Callable[[int, bytes], None],
    ) -> None:
        self.channel = channel
        self.refusal: str | None = None
        self._connection = connection
        self._on_delivery = on_delivery
        settings = connection.settings
        self._patience = settings.publish_timeout.total_seconds() if settings else RPC_TIMEOUT
        self._head: dict[tuple[str, str], bytes] = {}
        self._parts: list[bytes] = []
        self._bytes = 0
        self._sent = 0
        self._stored = 0
        """Everything up to this number is."""
        self._stored_beyond: set[int] = set()
        self._tag = 0
        self._is_delivery = False
        self._header = b""
        self._left = 0
        self._news = asyncio.Event()

    @classmethod
    async def open(cls, connection: Connection, on_delivery: Callable[[int, bytes], None]) -> Self:
        """On a channel of its own; `on_delivery` is called with each one's tag and property list."""
        channel = await connection.open()
        conveyor = cls(connection, channel, on_delivery)
        connection.tap(channel, conveyor._frame)
        # (Had we asked the library for confirms, it would wonder about each.)
        await channel.rpc(commands.Confirm.Select(), timeout=RPC_TIMEOUT)
        return conveyor

    async def consume(self, queue: str, prefetch: int) -> None:
        await self.channel.basic_qos(prefetch_count=prefetch, timeout=RPC_TIMEOUT)
        await self.channel.rpc(
            commands.Basic.Consume(queue=queue, consumer_tag="conveyor"), timeout=RPC_TIMEOUT
        )

    async def publish(self, exchange: str, key: str, properties: Properties, body: bytes) -> None:
        """Write it, sooner or later; `stored` tells what became of it."""
        head = self._head.get((exchange, key))
        if head is None:
            to = commands.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
            method = _BASIC + (40).to_bytes(2, "big") + to.marshal()
            head = self._head[exchange, key] = self._framed(METHOD, method)
        header = _BASIC + b"\0\0" + len(body).to_bytes(8, "big") + properties.encode()
        self._parts += (head, self._framed(HEADER, header))
        size = self._connection.frame_max - FRAME_OVERHEAD
        self._parts += [
            self._framed(BODY, body[at : at + size]) for at in range(0, len(body), size)
        ]
        self._sent += 1
        self._bytes += len(head) + len(header) + len(body)
        if self._bytes >= _TOGETHER:
            await self._write()

    async def stored(self) -> bool:
        """Wait until the broker has stored all that was published; False where it did not."""
        await self._write()
        await self.until(lambda: self._stored == self._sent or self.refusal is not None)
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

    def _framed(self, kind: int, payload: bytes) -> bytes:
        number = self.channel.number.to_bytes(2, "big")
        return b"".join((bytes([kind]), number, len(payload).to_bytes(4, "big"), payload, _END))

    async def _write(self) -> None:
        if not self._parts:
            return
        payload = b"".join(self._parts)
        self._parts.clear()
        self._bytes = 0
        await written(self.channel, payload)

    # --- what comes in --------------------------------------------------------------------------

    def _frame(self, kind: int, rest: bytes) -> bool:
        if kind == METHOD:
            return self._method(rest)
        if kind == HEADER:
            self._header, self._left = rest[12:-1], int.from_bytes(rest[4:12], "big")
        else:
            self._left -= len(rest) - 1
        if self._left <= 0 and self._is_delivery:
            self._is_delivery = False
            self._on_delivery(self._tag, self._header)
            self._news.set()
        return True

    def _method(self, rest: bytes) -> bool:
        what = rest[:4]
        if what == _DELIVER:
            at = 5 + rest[4]
            self._tag, self._is_delivery = int.from_bytes(rest[at : at + 8], "big"), True
            return True
        if what == _ACK:
            self._confirm(int.from_bytes(rest[4:12], "big"), bool(rest[12] & 1))
        elif what == _NACK:
            self.refusal = "refused (full, or no majority of its nodes is up)"
        elif what == _RETURN:
            self.refusal, self._is_delivery = (
                "there is no such queue, or its binding is gone",
                False,
            )
        else:
            return False
        self._news.set()
        return True

    def _confirm(self, tag: int, is_multiple: bool) -> None:
        if is_multiple:
            self._stored = max(self._stored, tag)
            self._stored_beyond = {one for one in self._stored_beyond if one > self._stored}
        else:
            self._stored_beyond.add(tag)
        while self._stored + 1 in self._stored_beyond:
            self._stored += 1
            self._stored_beyond.discard(self._stored)


def acks_of(channel: Channel, tags: Iterable[int]) -> bytes:
    """The frames that ack these deliveries."""
    head = b"\x01" + channel.number.to_bytes(2, "big") + (13).to_bytes(4, "big") + _ACK
    return b"".join(head + tag.to_bytes(8, "big") + b"\0" + _END for tag in tags)


async def written(channel: Channel, payload: bytes) -> None:
    """Write frames of a channel, behind those that wait, and wait until the socket took them."""
    if channel.is_closed:
        raise amqp.ChannelInvalidStateError("the channel was closed")
    drained = asyncio.get_running_loop().create_future()
    await channel.write_queue.put(ChannelFrame(payload, should_close=False, drain_future=drained))
    await asyncio.wait([drained, channel.closing], return_when=asyncio.FIRST_COMPLETED)
