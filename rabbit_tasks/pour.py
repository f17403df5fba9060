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
from functools import partial
from types import TracebackType
from typing import Final, Self

import aiormq.exceptions as amqp
from aiormq.channel import Channel

from rabbit_tasks.broker import RPC_TIMEOUT, Connection, words
from rabbit_tasks.confirms import Confirms, Late, Letter, Lost, Nacked, Rejected, Returned
from rabbit_tasks.deliveries import Deliveries, unread
from rabbit_tasks.errors import Refused, Unconfirmed, Unroutable
from rabbit_tasks.frames import DELIVER, METHOD
from rabbit_tasks.properties import FRAME_OVERHEAD, Properties
from rabbit_tasks.publisher import AHEAD, ALONE_FROM

WINDOW: Final = 50
"""Messages that are copied and not yet acked, at most; so many bodies are in memory."""
_LAST: Final = 5.0
"""Seconds for what is on its way when we are stopped."""
_LOOK: Final = 0.1


@dataclass
class _Copy:
    """Of the delivery with this tag; its error, once it is answered and not stored, says why."""

    tag: int
    is_answered: bool = False
    error: Exception | None = None

    @property
    def is_stored(self) -> bool:
        return self.is_answered and self.error is None


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
        self._exchange = ""
        self._arrived: deque[tuple[int, Properties, bytes]] = deque()
        self._copies: deque[_Copy] = deque()
        self._is_alone = False
        self._is_returned = False
        self._acks = True
        self._news = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._last_noise = self._last_arrival = self._clock()
        self._tag = ""

    async def __aenter__(self) -> Self:
        self._from: Channel = await self._consuming.open()
        self._deliveries = Deliveries(self._consuming, self._from, self._on_delivery)
        self._consuming.tap(self._from, self._frame)
        self._to = await Confirms.open(self._publishing, self._patience, patient=True)
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
        await self._to.end()
        with suppress(Exception):
            await self._from.close(timeout=RPC_TIMEOUT)

    async def consume(self) -> None:
        self._tag = uuid.uuid4().hex
        await self._from.basic_qos(prefetch_count=WINDOW, timeout=RPC_TIMEOUT)
        await self._from.basic_consume(
            self.source, unread, consumer_tag=self._tag, timeout=RPC_TIMEOUT
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
        await self._consuming.drained()  # (the library does not write behind us by itself)
        await self._from.basic_qos(prefetch_count=WINDOW, timeout=RPC_TIMEOUT)

    def _frame(self, kind: int, payload: bytes) -> bool:
        if kind == METHOD and payload[:4] == DELIVER:
            at = 14 + payload[4]  # behind its consumer, its tag, and whether it was redelivered
            self._exchange = payload[at + 1 : at + 1 + payload[at]].decode("utf-8", "replace")
        return self._deliveries.frame(kind, payload)

    def _on_delivery(self, tag: int, _redelivered: bool, raw: bytes, body: bytes) -> None:
        properties = Properties.decode(raw)
        self._arrived.append((tag, properties, body))
        self._last_arrival = self._clock()
        if self._is_noise(self._exchange, properties):
            self._last_noise = self._last_arrival
        self._news.set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is in our hands."""
        return not self._arrived and not self._copies

    @property
    def idle(self) -> float:
        """Seconds since anything came."""
        return self._clock() - self._last_arrival

    @property
    def quiet(self) -> float:
        """Seconds since any noise came, or since we began."""
        return self._clock() - self._last_noise

    async def flow(self) -> None:
        """Move for a moment: until something is done, or a tenth of a second.

        PublishError where a copy is refused: it stays in its queue, those before it are moved.
        """
        self._news.clear()
        if not self._begin() and not self._finish():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._news.wait()
            if not self._copies and (self._from.is_closed or not self._to.is_open):
                raise amqp.ChannelInvalidStateError("the channel was closed")

    def _begin(self) -> bool:
        """Publish what came, in order."""
        begun = False
        while self._arrived and self._to.is_open and not (self._copies and self._is_alone):
            tag, properties, body = self._arrived[0]
            # The broker may close the channel over a large one, and so over all that are on it.
            self._is_alone = len(body) > ALONE_FROM
            if self._copies and (self._is_alone or self._publishing.unsent > AHEAD):
                break
            self._arrived.popleft()
            copy = _Copy(tag)
            self._copies.append(copy)
            self._publish(copy, self._change(properties), body)
            begun = True
        return begun

    def _publish(self, copy: _Copy, properties: Properties, body: bytes) -> None:
        # (Without ids: a queue may hold many of one. Where one is returned, all are in doubt.)
        letter = Letter("", self.target, properties.encode(), None, body)
        if (size := letter.frame_size) > (most := self._publishing.frame_max):
            too_large = f"properties and headers take {size} bytes, more than the "
            too_large += f"{most - FRAME_OVERHEAD} of a frame"
            self._learn(copy, Refused(f"queue {self.target!r}: {too_large}"))
        else:
            self._to.publish(letter, partial(self._learn, copy))

    def _learn(self, copy: _Copy, error: Exception | None) -> None:
        """What became of it."""
        copy.is_answered, copy.error = True, error
        self._is_returned |= isinstance(error, Returned)
        self._news.set()

    def _finish(self) -> bool:
        """Ack what is stored, in order."""
        if not self._copies or not self._copies[0].is_answered or self._clock() < self.acks_from:
            return False
        self._see_target()
        if (error := self._copies[0].error) is not None:
            raise self._explained(error)
        stored: list[int] = []
        while self._copies and self._copies[0].is_stored:
            stored.append(self._copies.popleft().tag)
        self._ack(stored, up_to=stored[-1])
        return True

    def _ack(self, tags: list[int], *, up_to: int = 0) -> None:
        if self._acks:
            self._deliveries.ack_all([tag for tag in tags if tag > up_to], up_to=up_to)
        for _ in tags:
            self._told()

    def _see_target(self) -> None:
        """Raise where it is gone: with it are the copies that it had."""
        if self._is_returned:
            raise Unroutable(f"there is no queue {self.target!r} any more")

    def _explained(self, error: Exception) -> Exception:
        where = f"queue {self.target!r}"
        match error:
            case Nacked():
                return Refused(f"{where}: {error}")
            case Late():
                return Unconfirmed(f"{where}: not confirmed within {self._patience:g} s")
            case Rejected(cause=cause) | Lost(cause=cause):
                if isinstance(cause, amqp.ChannelPreconditionFailed):
                    return Refused(f"{where}: {words(cause)}")
                return cause
        return error

    async def _end(self) -> None:
        """Wait for the copies that are on their way, and ack those that are stored."""
        self._arrived.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST / 2):
                await self._to.settled()
        self._see_target()
        await asyncio.sleep(self.acks_from - self._clock())
        self._ack([copy.tag for copy in self._copies if copy.is_stored])
        await self._answered()
