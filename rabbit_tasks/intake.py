"""A channel that consumes, the slots that share it, and the messages in their hands.

    Intake.run      consume until the channel is of no more use, or we must stop
    Intake._take    a free slot takes a delivery, and another when that is settled

As long as messages are quick, the slots of a consumer share a channel: that is half of what a message
costs the broker. But where the broker gives a consumer up, over a handler that outlasts its patience,
it takes back whatever the channel holds. So messages that take their time are left behind on a channel
that delivers nothing more, and the other slots go on with a new one.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from aiormq.channel import Channel

from rabbit_tasks import declare
from rabbit_tasks.broker import CLOSE_TIMEOUT, LOST, RPC_TIMEOUT, Connection, words
from rabbit_tasks.deliveries import Deliveries, unread
from rabbit_tasks.delivery import IN_DOUBT, Delivery, DeliveryLost, Handling, Stopping
from rabbit_tasks.properties import Properties
from rabbit_tasks.repeats import Repeats
from rabbit_tasks.walk import Walk

log = logging.getLogger("rabbit_tasks")

FAULT: Final = "%s: fault in rabbit_tasks, please report it"

LULL: Final = 0.2
"""Seconds without a delivery, after which a queue is taken for an empty one when we cancel."""
NO_LULL: Final = 5.0
"""Seconds after which we cancel all the same."""
SETTLED_AT_ONCE: Final = 32
"""Acks of a channel that are on their way to a quorum queue at once. What a channel still holds of more
than these when it is closed is lost, though it came before: 28 of 60 with 4.3.6."""
OFTEN: Final = 0.01
"""Seconds between two looks at what others are about to do."""
LONG: Final = 1.0
"""Seconds, up to twice as many, after which a message is one that takes its time. The broker's patience
is a minute at least, and half an hour by default (3.10 to 4.3)."""
CALM: Final = 60.0
"""Seconds without such a message, after which slots that parted may share a channel again."""


class Intake:
    """The messages that come on one channel, for so many slots.

    stop        set when the worker takes no more
    left        seconds until it must be gone, at most so many
    is_ending   whether the event loop is about to end
    on_ready    called when it consumes
    on_free     called with the number of slots that need another channel, when it delivers no more and
                again whenever a message is settled that was left behind
    on_gone     called with it when its channel is of no more use and nothing is in hand
    """

    def __init__(
        self,
        connection: Connection,
        handling: Handling,
        slots: int,
        *,
        stop: asyncio.Event,
        repeats: Repeats,
        left: Callable[[float], float],
        is_ending: Callable[[], bool],
        on_ready: Callable[[], None],
        on_free: Callable[[int], None],
        on_gone: Callable[[Intake], None],
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.connection = connection
        self.handling = handling
        self.slots = slots
        self._most = slots * handling.kind.prefetch
        self._stop = stop
        self._repeats = repeats
        self._left = left
        self._is_ending = is_ending
        self._on_ready = on_ready
        self._on_free = on_free
        self._on_gone = on_gone
        self._free = slots
        self._waiting: deque[Delivery] = deque()
        self._in_hand: dict[Walk, Delivery] = {}
        self._answered: deque[Delivery] = deque(maxlen=self._most)
        """The last ones are kept: an ack that was lost on its way makes the broker deliver a message
        again whose run has just ended."""
        self._ended: asyncio.Future[str] = loop.create_future()
        """Why the channel is of no more use."""
        self._parting: asyncio.Future[None] = loop.create_future()
        """It is to deliver no more, for the slots to go on with another."""
        self.has_parted = False
        """Its slots go on with other channels."""
        self._given = 0
        self._is_lost = False
        self._seen: set[Walk] = set()
        self._slow_at = loop.time()
        self._through = asyncio.Event()
        self._through.set()
        # What a handler finds, and not what happened to run when the connection was opened.
        self._context = contextvars.copy_context()

    @property
    def in_hand(self) -> Mapping[Walk, Delivery]:
        """What is not settled, in the order in which it came."""
        return self._in_hand

    @property
    def is_parting(self) -> bool:
        """Whether its slots are about to be free."""
        return self._parting.done() and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether it delivers no more."""
        return self.has_parted or self._ended.done()

    @property
    def is_calm(self) -> bool:
        """Whether all its messages have been quick for a while."""
        return self._loop.time() - self._slow_at > CALM

    async def through(self) -> None:
        """Wait until nothing is in hand."""
        await self._through.wait()

    def part(self) -> None:
        """Deliver no more, for the slots to go on with another channel."""
        if not self._parting.done():
            self._parting.set_result(None)

    async def run(self) -> str:
        """Consume; returns why the channel is of no more use. A handler that still runs goes on.

        Raises what the library does where it cannot consume, and a fault of ours.
        """
        try:
            channel = await self.connection.open()
        except BaseException:
            self._ended.cancel()
            self._on_gone(self)
            raise
        kind = self.handling.kind
        arriving = self._arriving = Deliveries(
            self.connection, channel, self._on_delivery, together=self._most > 1
        )
        channel.on_consumer_cancel_callbacks.add(
            lambda _: self._end(
                "consumer cancelled by the broker: its queue is gone "
                f"({declare.COMMAND}), or a handler takes longer than its ack_timeout"
            )
        )
        channel.closing.add_done_callback(lambda future: self._end(_why_closed(future)))
        queue, tag = kind.queue, f"rabbit-tasks.{uuid.uuid4().hex}"
        watching: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.wait())]
        if kind.concurrency > 1 and kind.prefetch == 1:
            watching.append(asyncio.create_task(self._look()))
        try:
            await channel.basic_qos(prefetch_count=self._most, timeout=RPC_TIMEOUT)
            await channel.basic_consume(queue, unread, consumer_tag=tag, timeout=RPC_TIMEOUT)
            if how_often := self._repeats.over(f"{queue}: not consuming"):
                log.info(
                    "%s: consuming again, %s", queue, how_often, extra={"fields": {"queue": queue}}
                )
            self._on_ready()
            news: list[asyncio.Future[Any]] = [self._ended, self._parting, watching[0]]
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                arriving.keep()
                await self._fill()
                await self._leave(channel, tag)
            return self._ended.result() if self._ended.done() else ""
        finally:
            for task in watching:
                task.cancel()
            arriving.go_on()
            await self._close(channel)

    # --- messages -------------------------------------------------------------------------------

    def _on_delivery(self, tag: int, redelivered: bool, properties: bytes, body: bytes) -> None:
        delivery = Delivery(
            body, Properties.decode(properties), redelivered=redelivered, tag=tag,
            deliveries=self._arriving,
        )  # fmt: skip
        if self._free > 0:
            self._free -= 1
            self._take(delivery)
        else:
            self._waiting.append(delivery)

    def _take(self, delivery: Delivery) -> None:
        """A slot takes a delivery."""
        context = self._context.copy()
        walk = Walk(self.handling.process(delivery), context, self._settled, self._is_ending)
        self._in_hand[walk] = delivery
        self._through.clear()
        # (Of an eager task the handler would run, and perhaps fail, before there is any.)
        is_plain = self.handling.is_plain(delivery) and self._loop.get_task_factory() is None
        walk.begin(in_a_task=not is_plain)

    def _settled(self, walk: Walk, error: BaseException | None) -> None:
        """What a slot had in hand is settled; or it is not ours any more."""
        delivery = self._in_hand.pop(walk)
        if error is None:
            self._answered.append(delivery)
            if self._waiting:
                self._take(self._waiting.popleft())
            elif self.has_parted:
                if self._in_hand:  # (the last slot waits until the channel is closed)
                    self._give(1)
            else:
                self._free += 1
        elif isinstance(error, DeliveryLost):
            self._tell_lost(delivery)
            self._end("an ack was not taken")
        elif isinstance(error, Stopping | asyncio.CancelledError):
            if not self._stop.is_set():
                self._end("the channel was closed")
        elif self._ended.done():
            log.error(FAULT, self.handling.kind.queue, exc_info=error)
        else:
            self._arriving.end()
            self._ended.set_exception(error)
        if not self._in_hand:
            self._through.set()
            if self._is_lost:
                self._on_gone(self)

    def _tell_lost(self, delivery: Delivery) -> None:
        queue, message_id = self.handling.kind.queue, delivery.properties.text("message_id")
        ending = self._repeats.say(f"{queue}: in hand", first=5)
        if ending is not None:
            log.info(
                "%s: channel lost with message %s in hand; if it comes here again, it goes on%s",
                queue, message_id, ending, extra={"fields": {"queue": queue, "id": message_id}},
            )  # fmt: skip

    # --- the end of its channel -----------------------------------------------------------------

    def _end(self, why: str) -> None:
        self._arriving.end()
        if not self._ended.done():
            self._ended.set_result(why)

    @property
    def _slow(self) -> list[Walk]:
        """What was in hand at the last look already."""
        return [walk for walk in self._in_hand if walk in self._seen]

    async def _look(self) -> None:
        """Part from messages that take their time.

        (Not where a consumer wants more than one message for each slot, whatever that costs.)
        """
        while not self._parting.done():
            self._seen = set(self._in_hand)
            await asyncio.sleep(LONG)
            if self._slow:
                self._slow_at = self._loop.time()
                if self.slots > 1:
                    self.part()

    def _give(self, slots: int) -> None:
        slots = min(slots, self.slots - self._given)
        self._given += slots
        if slots:
            self._context.run(self._on_free, slots)

    async def _fill(self) -> None:
        """Hold as much as the broker hands out, before it is told that we take no more.

        What is on its way to a consumer when that is cancelled, the broker takes back, and counts as a
        delivery that failed (seen with 4.3.6). Where all that may be held is here, nothing is on its
        way. Where slots part, those with quick messages come along.
        """
        time, stop = self._loop.time, self._stop
        began = news_at = time()
        here = 0
        while not self._ended.done():
            now, before, here = time(), here, self._arriving.unanswered
            news_at = news_at if here == before else now
            is_still = here >= self._most or now - news_at >= LULL
            is_alone = stop.is_set() or len(self._slow) == len(self._in_hand)
            if is_still and (is_alone or now - began >= LONG):
                return
            if now - began >= (LONG if stop.is_set() else NO_LULL):
                return
            await asyncio.sleep(OFTEN)

    async def _leave(self, channel: Channel, tag: str) -> None:
        """Stop consuming, and keep the channel for what is in hand until it is settled, or not ours.

        The channel's own close comes last and is answered last: so the acks before it are through.
        """
        try:
            await channel.basic_cancel(tag, timeout=self._left(CLOSE_TIMEOUT))
        except (TimeoutError, *LOST) as error:
            if not self._stop.is_set():  # (or else it is left in any case, and in time)
                is_mute = isinstance(error, TimeoutError)
                self._end("no answer to a cancel" if is_mute else words(error))
        self._arriving.go_on()
        if self._stop.is_set():
            waiting, self._waiting = self._waiting, deque()
            await asyncio.gather(*map(self.handling.put_back, waiting))
        elif not self._ended.done():
            self.has_parted = True
            self._give(self._free)
            # For as long as an ack may have been lost, and not as long as a handler takes.
            self._loop.call_later(IN_DOUBT, self._answered.clear)
        through = asyncio.create_task(self.through())
        either: list[asyncio.Future[Any]] = [through, self._ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        through.cancel()

    async def _close(self, channel: Channel) -> None:
        """Close the channel; first of all let go of what is still in hand."""
        try:
            if self._in_hand or self._ended.done():
                self._lose()
            elif self._most >= SETTLED_AT_ONCE:
                await asyncio.sleep(self._left(LULL))
            if not channel.is_closed:
                await channel.close(timeout=self._left(CLOSE_TIMEOUT))
        except Exception as error:
            log.debug("a channel did not close: %s", words(error))
        finally:
            self._lose()

    def _lose(self) -> None:
        """The channel is of no more use: what it brought belongs to the broker again."""
        self._end("left")
        for waiting in self._waiting:
            waiting.lost = True
        self._waiting.clear()
        self.handling.runs.orphan_all([*self._answered, *self._in_hand.values()])
        self._answered.clear()
        if self.has_parted:
            self._give(self.slots)
        self._is_lost = True
        if not self._in_hand:
            self._on_gone(self)


def _why_closed(closing: asyncio.Future[Any]) -> str:
    error = None if closing.cancelled() else closing.exception()
    return words(error) if error else "the channel was closed"
