"""Pour: the messages of one queue into another, in order, and none lost on the way.

Copy, confirm, ack, as everywhere, but a window of them at a time. Killed at any moment, what was
copied and not yet acked is in both queues: a window's worth at most. (A broker that is killed forgets
acks that it had not written to its disk.)
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import aiormq.exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from rabbit_tasks.broker import RPC_TIMEOUT, Connection, words
from rabbit_tasks.errors import Refused, Unconfirmed, Unroutable
from rabbit_tasks.frames import Wire, properties_of
from rabbit_tasks.properties import FRAME_OVERHEAD, Properties
from rabbit_tasks.publisher import ALONE_FROM

WINDOW: Final = 50
"""Messages that are copied and not yet acked, at most; so many bodies are in memory."""
_LAST: Final = 5.0
"""Seconds for what is on its way when we are stopped."""
_LOOK: Final = 0.1


@dataclass
class _Copy:
    tag: int
    stored: asyncio.Task[None]
    since: float


class Pour:
    """Opens a consumer on `source`; `flow` then moves what comes.

    change      makes a copy's properties of a delivery's
    is_noise    whether a delivery, by its exchange and properties, counts against `quiet`
    told        called after each message that was moved
    """

    def __init__(
        self,
        consuming: Connection,
        publishing: Connection,
        source: str,
        target: str,
        *,
        change: Callable[[Properties], Properties],
        is_noise: Callable[[str, Properties], bool] = lambda _exchange, _properties: True,
        told: Callable[[], None] = lambda: None,
        patience: float = RPC_TIMEOUT,
    ) -> None:
        self.source = source
        self.target = target
        self.acks_from = 0.0
        """By the loop's clock; copies are confirmed before, but not acked."""
        self._consuming = consuming
        self._publishing = publishing
        self._change = change
        self._is_noise = is_noise
        self._told = told
        self._patience = patience
        self._arrived: deque[DeliveredMessage] = deque()
        self._copies: deque[_Copy] = deque()
        self._is_alone = False
        self._acks = True
        self._news = asyncio.Event()
        now = asyncio.get_running_loop().time()
        self._last_noise = self._last_arrival = now
        self._tag = ""

    async def __aenter__(self) -> Self:
        self._from: Channel = await self._consuming.open()
        self._to: Channel = await self._publishing.open(confirms=True)
        await self.consume()
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # Ctrl-C, or a copy that was refused: those before it need not be there twice.
            with suppress(Exception):
                async with asyncio.timeout(_LAST):
                    await self._end()
        for copy in self._copies:
            copy.stored.cancel()
            _error_of(copy.stored)
        for channel in (self._from, self._to):
            with suppress(Exception):
                await channel.close(timeout=RPC_TIMEOUT)

    async def consume(self) -> None:
        self._tag = uuid.uuid4().hex
        await self._from.basic_qos(prefetch_count=WINDOW, timeout=RPC_TIMEOUT)
        await self._from.basic_consume(
            self.source, self._on_message, consumer_tag=self._tag, timeout=RPC_TIMEOUT
        )

    async def cancel(self) -> None:
        """Take no more, and move what we have."""
        await self._from.basic_cancel(self._tag, timeout=RPC_TIMEOUT)
        await self.rest()

    async def rest(self, *, acks: bool = True) -> None:
        """Move all that the broker has sent us so far, and see the acks arrive; none are sent for a
        queue that is gone."""
        self._acks = acks
        await self._answered()
        while not self.is_empty:
            await self.flow()
        await self._answered()

    async def _answered(self) -> None:
        """The broker reads a channel in order, and we do."""
        await self._from.basic_qos(prefetch_count=WINDOW, timeout=RPC_TIMEOUT)

    async def _on_message(self, message: DeliveredMessage) -> None:
        self._arrived.append(message)
        self._last_arrival = asyncio.get_running_loop().time()
        if self._is_noise(message.exchange or "", properties_of(message)):
            self._last_noise = self._last_arrival
        self._news.set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is in our hands."""
        return not self._arrived and not self._copies

    @property
    def idle(self) -> float:
        """Seconds since anything came."""
        return asyncio.get_running_loop().time() - self._last_arrival

    @property
    def quiet(self) -> float:
        """Seconds since any noise came, or since we began."""
        return asyncio.get_running_loop().time() - self._last_noise

    async def flow(self) -> None:
        """Move for a moment: until something is done, or a tenth of a second.

        PublishError where a copy is refused: it stays in its queue, those before it are moved.
        """
        self._news.clear()
        if not self._begin() and not await self._finish():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._news.wait()
            for channel in (self._from, self._to):
                if channel.is_closed and not self._copies:
                    raise amqp.ChannelInvalidStateError("the channel was closed")

    def _begin(self) -> bool:
        """Publish what came, in order."""
        begun = False
        while self._arrived and not (self._copies and self._is_alone):
            message = self._arrived[0]
            # The broker may close the channel over a large one, and so over all that are on it.
            self._is_alone = len(message.body) > ALONE_FROM
            if self._is_alone and self._copies:
                break
            self._arrived.popleft()
            self._copies.append(self._copy(message))
            begun = True
        return begun

    def _copy(self, message: DeliveredMessage) -> _Copy:
        properties = self._change(properties_of(message))
        stored = asyncio.create_task(self._publish(message.body, properties))
        stored.add_done_callback(lambda _: self._news.set())
        return _Copy(message.delivery_tag or 0, stored, asyncio.get_running_loop().time())

    async def _publish(self, body: bytes, properties: Properties) -> None:
        if properties.frame_size() > (most := self._publishing.frame_max):
            raise Refused(
                f"queue {self.target!r}: properties and headers take {properties.frame_size()} "
                f"bytes, more than the {most - FRAME_OVERHEAD} of a frame"
            )
        await self._to.basic_publish(
            body, routing_key=self.target, properties=Wire(properties), mandatory=True, wait=False
        )

    async def _finish(self) -> bool:
        """Ack what is stored, in order."""
        now = asyncio.get_running_loop().time()
        finished = False
        if self._copies and not self._copies[0].stored.done():
            if self._publishing.is_blocked:
                for copy in self._copies:
                    copy.since = now
            if now - self._copies[0].since > self._patience:
                raise Unconfirmed(
                    f"queue {self.target!r}: not confirmed within {self._patience:g} s"
                )
        while self._copies and self._copies[0].stored.done() and now >= self.acks_from:
            self._check_returns()
            copy = self._copies[0]
            if (error := _error_of(copy.stored)) is not None:
                raise self._refusal(error)
            self._copies.popleft()
            # Whole, also where we are stopped in it: neither twice nor not at all.
            await asyncio.shield(asyncio.create_task(self._ack(copy)))
            finished = True
        return finished

    async def _ack(self, copy: _Copy) -> None:
        if self._acks:
            await self._from.basic_ack(copy.tag, wait=False)
        self._told()

    def _check_returns(self) -> None:
        # The library finds returned messages by their id, and a queue may hold many of one id, or of
        # none: then it tells the last one that it was returned, and the first that it was stored.
        # But one that is returned is so before any behind it is stored. (aiormq 7.2)
        for copy in self._copies:
            if isinstance(_error_of(copy.stored), amqp.PublishError):
                raise Unroutable(f"there is no queue {self.target!r} any more")

    def _refusal(self, error: BaseException) -> BaseException:
        match error:
            case amqp.DeliveryError():
                return Refused(
                    f"queue {self.target!r}: refused (full, or no majority of its nodes is up)"
                )
            case amqp.ChannelPreconditionFailed():
                return Refused(f"queue {self.target!r}: {words(error)}")
        return error

    async def _end(self) -> None:
        """Wait for the copies that are on their way, and ack those that are stored."""
        self._arrived.clear()
        if self._copies:
            await asyncio.wait([copy.stored for copy in self._copies], timeout=_LAST / 2)
        self._check_returns()
        await asyncio.sleep(self.acks_from - asyncio.get_running_loop().time())
        for copy in self._copies:
            if copy.stored.done() and _error_of(copy.stored) is None:
                await self._ack(copy)
        await self._answered()


def _error_of(stored: asyncio.Task[None]) -> BaseException | None:
    """Why a copy was not stored; None where it was, or where that is not known yet."""
    if not stored.done():
        return None
    # The library's way to say that a connection which no longer answered was dropped.
    return asyncio.CancelledError() if stored.cancelled() else stored.exception()
