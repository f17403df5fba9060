"""A look at the parking lot: take all that is there, let some go, give the others back.

Looking must not reorder. A quorum queue puts what is returned to it behind everything that was
returned before, and in front of what was never taken (3.10 to 4.3): so a look takes all that is
there, and gives it back whole; then the order is as it was. (`basic.get` would not do: each get is a
consumer of its own, and they come back in any order.) The broker hands all of it to the consumer in
one step, so a look that is given up or killed gives it back whole as well: by its connection's end.
Two looks at once would each get a part and mix them up for good: the second one waits.

A consumer can hold 65,535 messages, a prefetch count has 16 bits: a longer queue takes several of
them, one behind the other in one channel. When a channel goes, the broker returns what its consumers
hold in the order in which they came: of up to 32 on 3.10 and 4.0 (whose table of consumers has no
order beyond), of any number on 4.3. So there are no more than 30, and a look at a queue of more than
1,966,050 messages sees the first of them.

What is ahead of the reader waits in the socket and on the broker: beyond a few MiB we do not read.
The broker has it in memory until then, so whoever takes his time should have it on disk. A reader
that takes longer than the broker's consumer timeout (30 minutes by default) loses what it holds: back
to the queue, in order, and with a ParkingError. And a consumer that is not ours, on a parking queue,
reorders as it likes.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import aiormq.exceptions as amqp
from aiormq.channel import Channel
from pamqp.commands import Basic
from pamqp.frame import marshal

from rabbit_tasks.broker import (
    CLOSE_TIMEOUT,
    LOST,
    RPC_TIMEOUT,
    Connection,
    is_cancelled,
    words,
)
from rabbit_tasks.deliveries import Deliveries, unread
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.message import DELIVERY_COUNT
from rabbit_tasks.parking.foreign import LastTime, Terms, no_queue, terms_of
from rabbit_tasks.parking.parked import ParkedMessage
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.properties import Properties
from rabbit_tasks.text import quoted

QUIET: Final = 1.0
"""Seconds without a delivery after which we ask how many are left: somebody else may hold some."""
PATIENCE: Final = 10.0
"""Seconds to wait for somebody else who looks at the same parking queue, and for a delivery of what
is there."""
AHEAD: Final = 4 * 2**20
"""Bytes that are read ahead, with what each message takes beside its body."""
_APIECE: Final = 4_096
_FEW: Final = 500
"""Messages up to which an answer may come behind all of them."""
_LATER: Final = b"99."
"""How the tags begin of consumers that come behind those who take all."""
_WINDOW: Final = 65_535
_WINDOWS: Final = 30


@dataclass
class Moved:
    """What a replay or a discard did."""

    there: int = 0
    """Messages that were parked when it began."""
    chosen: int = 0
    to: Counter[str] = field(default_factory=Counter)
    """How many went into which queue."""


async def browse(
    connection: Connection,
    queue: str | ParkingQueue,
    *,
    began: Callable[[int], None] = lambda _count: None,
) -> AsyncIterator[ParkedMessage]:
    """Every message that is parked for this main queue now, in order; all stay where they are.

    `queue` may also be the parking queue itself. `began` is told how many will come. While it runs,
    the messages are held, and whoever else wants to look waits. ParkingError where there is no such
    queue, or it is in use too long.
    """
    async with taking(connection, queue) as taken:
        began(taken.count)
        async for _, message in taken:
            yield message


class Taken:
    """The messages of a parking queue, in our hands: iterate, ack some, give the others back.

    count           messages that it gives: those that were there at the start. Whoever wants fewer,
                    the first ones, may say so here
    behind          that were there as well, and are more than one look can take
    delivery_count  the highest count of deliveries that the broker has told of one of them so far:
                    how often it was looked at. Where the queue has a delivery limit, which a foreign
                    one may, each look is one step towards it
    """

    def __init__(
        self, connection: Connection, queue: str, there: int, *, asking: Asking, terms: Terms
    ) -> None:
        self._all = min(there, _WINDOWS * _WINDOW)
        self.count = self._all
        self.behind = there - self._all
        self.delivery_count = 0
        self._connection = connection
        """Of this look alone: it may stand still, and its end gives everything back."""
        self._queue = queue
        self._asking = asking
        self._terms = terms
        self._last = LastTime(queue, terms.limit) if terms.limit else None
        self._channel: Channel | None = None
        self._wire: Deliveries | None = None
        self._tags: list[str] = []
        self._arrived: deque[tuple[int, bytes, bytes]] = deque()
        """Delivery tag, properties and body of what is not read yet."""
        self._news = asyncio.Event()
        self._came = 0
        self._bytes_came = 0
        self._bytes_here = 0
        self._read = 0
        self._acks = 0
        self._acked_up_to = 0
        """Every delivery up to this tag was."""
        self._asked_acks = 0
        self._settled_acks = 0
        self._is_reading_on = False
        self._is_ended = False
        self._is_cancelled = False

    def __aiter__(self) -> AsyncIterator[tuple[int, ParkedMessage]]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[tuple[int, ParkedMessage]]:
        """What was taken, by its delivery tag."""
        while self._read < self.count:
            if not self._arrived or self._is_gone:
                if not await self._more():
                    return
                continue
            tag, raw, body = self._take()
            message = ParkedMessage(self._read, body, Properties.decode(raw))
            count = message.properties.header(DELIVERY_COUNT)
            if isinstance(count, int):
                self.delivery_count = max(self.delivery_count, count)
            if self._last is not None:
                self._last.keep(tag, message)
            yield tag, message

    async def _more(self) -> bool:
        """Wait for what is to be read next; False when somebody else took it."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        with _explained(self._connection, self._queue):
            while True:
                if self._channel is None:
                    await self._consume()
                await self._see_held()
                if self._arrived or await self._told(QUIET):
                    return True
                if asyncio.get_running_loop().time() < deadline:
                    continue  # a large body may be on its way
                ready, _ = await self._asking.state()
                if ready == 0:
                    return False
                raise ParkingError(
                    f"{self._queue}: {ready} messages are there, and the broker has delivered "
                    f"none for {PATIENCE:g} s; who else consumes: rabbitmqctl list_consumers "
                    f"-p {shlex.quote(self._connection.vhost)}"
                )

    async def _consume(self) -> None:
        """Take all of it at once, before a look that is killed could leave a part untaken."""
        self._channel = channel = await self._connection.open()
        channel.on_consumer_cancel_callbacks.add(self._on_cancel)
        self._wire = Deliveries(self._connection, channel, self._on_delivery)
        window = min(self._all, _WINDOW)
        await channel.basic_qos(prefetch_count=window, timeout=RPC_TIMEOUT)
        count = -(-self._all // window)
        # (3.10 returns them in the order of their tags.)
        self._tags = [f"{number:02}.{uuid.uuid4().hex}" for number in range(count)]
        if count == 1:
            await channel.basic_consume(
                self._queue, unread, consumer_tag=self._tags[0], timeout=RPC_TIMEOUT
            )
            return
        # In one write, and without an answer to wait for: or the broker would come to the second one
        # when it is through with what it gives to the first.
        frames = b""
        for tag in self._tags:
            channel.consumers[tag] = unread
            consume = Basic.Consume(queue=self._queue, consumer_tag=tag, nowait=True)
            frames += marshal(consume, channel.number)
        self._connection.write(frames)

    def _on_delivery(self, tag: int, _: bool, properties: bytes, body: bytes) -> None:
        assert self._wire is not None
        if self._wire.consumer.startswith(_LATER):
            return  # goes back with the others
        self._came += 1
        if self._is_ended or self._came > self._all:
            return  # so does it
        self._arrived.append((tag, properties, body))
        self._bytes_here += len(body) + _APIECE
        self._bytes_came += len(body) + _APIECE
        self._hold()
        self._news.set()
        done, rest = divmod(self._came, _WINDOW)
        if rest == 0 and done < len(self._tags):
            # It has had its window, and must not get more for what is acked of it: that would come
            # back before what the later ones hold. What it holds, it keeps. (The last one stays, so
            # that others see that somebody is here.)
            self._cancel(self._tags[done - 1])

    def _cancel(self, tag: str) -> None:
        if self._channel is not None:
            self._channel.consumers.pop(tag, None)
            cancel = Basic.Cancel(consumer_tag=tag, nowait=True)
            self._connection.write(marshal(cancel, self._channel.number))

    def _on_cancel(self, _: object) -> None:
        self._is_cancelled = True
        self._news.set()

    @property
    def _is_gone(self) -> bool:
        return (
            self._is_cancelled
            or self._asking.connection.is_lost
            or (self._channel is not None and self._channel.is_closed)
        )

    async def _see_held(self) -> None:
        """Raise where the broker has taken back what we hold: its consumer timeout, a deleted queue.

        (4.3 cancels the consumer, or closes the channel where we have cancelled it before; 3.10 and
        4.0 close the channel.) An ack would then have no effect, and not say so.
        """
        if self._is_cancelled:
            await self._asking.state()
            raise amqp.ChannelInvalidStateError("the consumer was cancelled: its time was up")
        if self._channel is not None and self._channel.is_closed:
            why = self._channel.closing.exception() if self._channel.closing.done() else None
            if isinstance(why, amqp.ChannelAccessRefused | amqp.ChannelPreconditionFailed):
                raise why
            raise amqp.ChannelInvalidStateError("the channel was closed")
        if self._asking.connection.is_lost:  # and with it what says that we are looking
            raise amqp.ChannelInvalidStateError("connection closed")

    async def _told(self, within: float) -> bool:
        """Wait for news."""
        self._news.clear()
        try:
            async with asyncio.timeout(within):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _take(self) -> tuple[int, bytes, bytes]:
        tag, properties, body = self._arrived.popleft()
        self._bytes_here -= len(body) + _APIECE
        self._read += 1
        self._hold()
        return tag, properties, body

    def _hold(self) -> None:
        """Stop reading from the socket while enough is here; go on when half of it is taken."""
        if self._is_reading_on or self._is_ended or self._bytes_here <= AHEAD // 2:
            self._connection.hold(held=False)
        elif self._bytes_here >= AHEAD:
            self._connection.hold(held=True)

    async def ack(self, tag: int) -> None:
        """Let it go; ParkingError where it is no longer ours."""
        await self.ack_all([tag])

    async def ack_all(self, tags: Sequence[int]) -> None:
        """Let these go, in one write; they are in their order."""
        with _explained(self._connection, self._queue):
            await self._see_held()
            assert self._wire is not None
            # One ack for all from the first on, as far as nothing in between is to stay: it is one
            # command of a quorum queue then.
            run = 0
            while run < len(tags) and tags[run] == self._acked_up_to + 1:
                self._acked_up_to += 1
                run += 1
            self._wire.ack_all(tags[run:], up_to=self._acked_up_to if run else 0)
            if self._last is not None:
                self._last.drop(tags)
        self._acks += len(tags)

    async def arrived(self) -> None:
        """Wait until the broker has the acks. It answers none, but it reads a channel in order.

        Of up to 32 they are then in the queue, when nothing but we can die.
        """
        if self._acks == self._asked_acks or self._channel is None:
            return
        asked = self._acks
        await self._come_to(self._channel)
        self._asked_acks = max(self._asked_acks, asked)

    async def settled(self) -> None:
        """Wait until the acks are in the queue, however many, and whoever dies from here on.

        A channel sends a quorum queue 32 commands and keeps what it has more until the queue has
        answered: acks among them are lost with the channel, however long ago it has read them (3.10
        to 4.3). A consumer that begins waits for the queue, behind what was sent before it; the channel
        then goes on and sends what it kept; and the consumer's end waits for that.
        """
        if self._acks == self._settled_acks or self._channel is None:
            return
        acks, tag = self._acks, f"{_LATER.decode()}{uuid.uuid4().hex}"
        self._channel.consumers[tag] = unread
        with _explained(self._connection, self._queue):
            # What is parked meanwhile goes to the consumers that are there.
            consume = Basic.Consume(
                queue=self._queue, consumer_tag=tag, nowait=True, arguments={"x-priority": -1}
            )
            self._connection.write(marshal(consume, self._channel.number))
            await self._come_to(self._channel)
            self._cancel(tag)
        await self._come_to(self._channel)
        self._settled_acks = self._asked_acks = acks

    async def _come_to(self, channel: Channel) -> None:
        """Wait until the broker has come to this point of the channel."""
        with _explained(self._connection, self._queue):
            await self._connection.drained()  # (the library does not write behind us by itself)
            if self._is_much_on_its_way and self._asking.has_echo:
                # A question's answer would come behind all of them.
                await self._asking.hear(channel)
            else:
                self._is_reading_on = True
                try:
                    self._hold()
                    await channel.basic_qos(prefetch_count=1, timeout=RPC_TIMEOUT)
                finally:
                    self._is_reading_on = False
                    self._hold()

    @property
    def _is_much_on_its_way(self) -> bool:
        return (self._all - self._came) * self._bytes_came > AHEAD * self._came

    async def give_back(self) -> None:
        """Return what was not acked, when the broker has the acks, and see it arrive."""
        try:
            if self._last is not None and self._tags:
                await self._put_back(self._last)
        finally:
            await self._give_back()

    async def _put_back(self, last: LastTime) -> None:
        """What the broker would not take back, as copies. Which those are, the reading tells."""
        with suppress(ParkingError):
            self.count = self._all
            async for _ in self:
                pass

        async def ack(tag: int) -> None:
            if self._wire is not None:
                self._wire.ack_all([tag])
            self._acks += 1

        await last.put_back(self._asking.connection, ack)

    async def _give_back(self) -> None:
        with suppress(ParkingError):
            await self.settled()
        self._is_ended = True
        self._arrived.clear()
        self._hold()
        if self._terms.by_nack and self._channel is not None:
            with suppress(Exception):
                for tag in self._tags:
                    await self._channel.basic_cancel(tag, timeout=RPC_TIMEOUT)
                await self._channel.basic_nack(0, multiple=True, requeue=True)
                await self._channel.basic_qos(prefetch_count=1, timeout=RPC_TIMEOUT)
        # Much that is on its way to us need not come first.
        await self._connection.end(within=0 if self._is_much_on_its_way else CLOSE_TIMEOUT)
        with suppress(Exception):
            await self._see_back()

    async def _see_back(self) -> None:
        """The broker gives messages back a moment after it has answered the close, and takes the
        consumer off its list in the same step."""
        # A deadline, not a timeout: a question that is cancelled costs the connection (aiormq closes
        # its channel a second time, and the broker answers 504).
        wanted = self._all + self.behind - self._acks
        deadline = asyncio.get_running_loop().time() + QUIET
        while asyncio.get_running_loop().time() < deadline:
            messages, consumers = await self._asking.state()
            if consumers == 0 and messages >= wanted:
                return
            await asyncio.sleep(0.01)


class Asking:
    """Where a look asks while its own connection may stand still; and who else looks.

    An exclusive queue, which goes with this connection, says that somebody does. (Quorum queues
    ignore `exclusive` on a consumer, 3.10 to 4.3.) It is also where a channel is heard that has come
    to a point: by a message through the default exchange, where we may write there.
    """

    def __init__(self, connection: Connection, lot: str) -> None:
        self.connection = connection
        self.has_echo = False
        self._lot = lot
        self._channel: Channel | None = None
        self._heard = asyncio.Event()
        self._listening: str | None = None

    async def lock(self) -> None:
        """Make sure that nobody else looks; where we may not create a queue there is only the count
        of consumers to go by."""
        name = lock_of(self._lot)
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            channel = await self.connection.open()
            try:
                await channel.queue_declare(name, exclusive=True, timeout=RPC_TIMEOUT)
                self._channel = channel
                return
            except (amqp.ChannelAccessRefused, amqp.ChannelPreconditionFailed):
                return
            except amqp.ChannelLockedResource:
                if asyncio.get_running_loop().time() > deadline:
                    raise ParkingError(
                        f"{quoted(self._lot)}: somebody else lists, replays or discards; try again when "
                        "they are done"
                    ) from None
            finally:
                if self._channel is None:
                    with suppress(Exception):
                        await channel.close(timeout=RPC_TIMEOUT)
            await asyncio.sleep(0.05)

    async def state(self) -> tuple[int, int]:
        """Messages ready, and consumers."""
        if self._channel is None or self._channel.is_closed:
            return await _state(self.connection, self._lot)
        answer = await self._channel.queue_declare(self._lot, passive=True, timeout=RPC_TIMEOUT)
        return answer.message_count or 0, answer.consumer_count or 0

    async def try_echo(self) -> None:
        """See whether a message comes through."""
        if self._channel is None:
            return

        async def on_message(_: object) -> None:
            self._heard.set()

        self._listening = uuid.uuid4().hex
        await self._channel.basic_consume(
            lock_of(self._lot),
            on_message,
            no_ack=True,
            consumer_tag=self._listening,
            timeout=RPC_TIMEOUT,
        )
        channel = await self.connection.open()
        try:
            await self.hear(channel, within=QUIET)
            self.has_echo = True
        except (TimeoutError, amqp.AMQPError):
            pass  # we may not, or an alarm holds publishers back
        finally:
            with suppress(Exception):
                await channel.close(timeout=RPC_TIMEOUT)

    async def hear(self, channel: Channel, within: float = RPC_TIMEOUT) -> None:
        """Wait until the broker has come to this point of the channel."""
        self._heard.clear()
        await channel.basic_publish(b"", exchange="", routing_key=lock_of(self._lot), wait=False)
        deadline = asyncio.get_running_loop().time() + within
        while not self._heard.is_set():
            if channel.is_closed or self.connection.is_lost:
                raise amqp.ChannelInvalidStateError("connection closed")
            if (left := deadline - asyncio.get_running_loop().time()) <= 0:
                raise TimeoutError
            with suppress(TimeoutError):
                async with asyncio.timeout(min(0.5, left)):
                    await self._heard.wait()

    async def unlock(self) -> None:
        if self._channel is not None:
            if self._listening is not None:
                await self._channel.basic_cancel(self._listening, timeout=RPC_TIMEOUT)
            await self._channel.queue_delete(lock_of(self._lot), timeout=RPC_TIMEOUT)
            await self._channel.close(timeout=RPC_TIMEOUT)


@asynccontextmanager
async def taking(connection: Connection, queue: str | ParkingQueue) -> AsyncIterator[Taken]:
    """All that is parked in this queue, held for as long as the block runs."""
    parking = ParkingQueue.of(queue)
    lot = parking.name
    asking = Asking(connection, lot)
    with _explained(connection, lot):
        terms = await terms_of(connection, parking)
        await _state(connection, lot)
        await asking.lock()
    try:
        with _explained(connection, lot):
            there = await _undisturbed(asking, lot)
            if there > _FEW:
                await asking.try_echo()
        taken = Taken(await connection.another("look"), lot, there, asking=asking, terms=terms)
        try:
            yield taken
        finally:
            await taken.give_back()
    finally:
        with suppress(ParkingError), _explained(connection, lot):
            await asking.unlock()


def lock_of(lot: str) -> str:
    """The name of the queue that says that somebody looks at this one; no other has it."""
    name = f"{lot}.look"
    if len(name) <= 255:
        return name
    digest = hashlib.blake2b(lot.encode(), digest_size=8).hexdigest()
    return f"{lot[:200]}.{digest}.look"


async def _undisturbed(asking: Asking, lot: str) -> int:
    """How many are there, when nobody holds any: one who was killed is noticed a moment later."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        messages, consumers = await asking.state()
        if consumers == 0:
            return messages
        if asyncio.get_running_loop().time() > deadline:
            raise ParkingError(
                f"{quoted(lot)}: {consumers} other consumer(s) hold its messages; who: "
                f"rabbitmqctl list_consumers -p {shlex.quote(asking.connection.vhost)}"
            )
        await asyncio.sleep(0.05)


async def _state(connection: Connection, queue: str) -> tuple[int, int]:
    """Messages ready, and consumers."""
    channel = await connection.open()
    try:
        answer = await channel.queue_declare(queue, passive=True, timeout=RPC_TIMEOUT)
        return answer.message_count or 0, answer.consumer_count or 0
    finally:
        with suppress(Exception):
            await channel.close(timeout=RPC_TIMEOUT)


@contextmanager
def _explained(connection: Connection, lot: str) -> Iterator[None]:
    """What the broker says no with, or its silence, as a ParkingError."""
    try:
        yield
    except amqp.ChannelNotFoundEntity:
        raise no_queue(lot) from None
    except amqp.ChannelAccessRefused as error:
        raise ParkingError(
            f"{quoted(lot)}: {words(error)} (RABBIT_TASKS_USER); allow it: {connection.permit}"
        ) from None
    except TimeoutError:
        raise ParkingError(
            f"{quoted(lot)}: the broker did not answer within {RPC_TIMEOUT:g} s"
        ) from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise _lost(lot, "the broker did not answer") from None
    except LOST as error:
        raise _lost(lot, words(error)) from None
    except amqp.AMQPError as error:
        raise ParkingError(f"{quoted(lot)}: {words(error)}") from None


def _lost(lot: str, why: str) -> ParkingError:
    return ParkingError(
        f"{quoted(lot)}: connection lost ({why}); what was not moved is still parked"
    )
