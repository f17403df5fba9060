"""A look at the parking lot: take all that is there, let some go, give the others back.

Looking must not reorder. A quorum queue puts what is returned to it behind everything that was
returned before, and in front of what was never taken (3.10 to 4.3): so a look takes all that is
there, on one consumer, and gives it back whole by closing the channel; then the order is as it was.
(`basic.get` would not do: each get is a consumer of its own, and they come back in any order.)
The broker hands all of it to the consumer in one step, so a look that is killed gives it back whole
as well. Two looks at once would each get a part and mix them up for good: the second one waits.

Honest limits: one consumer holds at most 65,535 messages. What is behind them takes another one, and
if the process is killed then, the two parts may come back in the other order. And a consumer that is
not ours, on a parking queue, reorders as it likes.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import aiormq.exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from rabbit_tasks.broker import LOST, RPC_TIMEOUT, Connection, is_cancelled, words
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.frames import properties_of
from rabbit_tasks.parking.parked import ParkedMessage
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.topology import parked_queue

QUIET: Final = 1.0
"""Seconds without a delivery after which we ask how many are left: somebody else may hold some."""
PATIENCE: Final = 10.0
"""Seconds to wait for somebody else who looks at the same parking queue, and for a delivery of what
is there."""
_WINDOW: Final = 65_535
"""The most that one consumer can hold: a prefetch count has 16 bits."""


@dataclass
class Moved:
    """What a replay or a discard did."""

    there: int = 0
    """Messages that were parked when it began."""
    chosen: int = 0
    to: Counter[str] = field(default_factory=Counter)
    """How many went into which queue."""


async def browse(connection: Connection, queue: str | ParkingQueue) -> AsyncIterator[ParkedMessage]:
    """Every message that is parked for this main queue now, in order; all stay where they are.

    `queue` may also be the parking queue itself. While it runs, the messages are held, and whoever
    else wants to look waits. ParkingError where there is no such queue, or it is in use too long.
    """
    async with taking(connection, queue) as taken:
        async for _, message in taken:
            yield message


def main_of(queue: str) -> str:
    """The main queue's name, of it or of its parking queue."""
    return queue.removesuffix(parked_queue(""))


class Taken:
    """The messages of a parking queue, in our hands: iterate, ack some, give the others back."""

    def __init__(self, connection: Connection, queue: str, count: int) -> None:
        self.count = count
        self._connection = connection
        self._queue = queue
        self._channels: dict[Channel, str] = {}
        """With their consumers' tags, in the order in which messages came."""
        self._held: Counter[Channel] = Counter()
        self._deliveries: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self._read = 0
        self._acked: set[Channel] = set()

    def __aiter__(self) -> AsyncIterator[tuple[DeliveredMessage, ParkedMessage]]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[tuple[DeliveredMessage, ParkedMessage]]:
        while (delivery := await self._next()) is not None:
            yield delivery, ParkedMessage(self._read, delivery.body, properties_of(delivery))

    async def _next(self) -> DeliveredMessage | None:
        """The next one, or None when we have all that were there at the start."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        with _explained(self._connection, self._queue):
            while self._read < self.count:
                if self._read % _WINDOW == 0 and len(self._channels) <= self._read // _WINDOW:
                    await self._consume(min(_WINDOW, self.count - self._read))
                try:
                    async with asyncio.timeout(QUIET):
                        delivery = await self._deliveries.get()
                except TimeoutError:
                    if any(channel.is_closed for channel in self._channels):
                        raise amqp.ChannelInvalidStateError("the channel was closed") from None
                    if asyncio.get_running_loop().time() < deadline:
                        continue  # a large body may be on its way
                    ready, _ = await _state(self._connection, self._queue)
                    if ready == 0:
                        return None  # somebody else took the others
                    raise ParkingError(
                        f"{self._queue}: {ready} messages are there, and the broker has delivered "
                        f"none for {PATIENCE:g} s; who else consumes: rabbitmqctl list_consumers "
                        f"-p {shlex.quote(self._connection.vhost)}"
                    ) from None
                self._read += 1
                return delivery
        return None

    async def _consume(self, window: int) -> None:
        channel = await self._connection.open()
        self._channels[channel] = tag = uuid.uuid4().hex
        await channel.basic_qos(prefetch_count=window, timeout=RPC_TIMEOUT)

        async def on_message(message: DeliveredMessage) -> None:
            self._held[channel] += 1
            self._deliveries.put_nowait(message)

        await channel.basic_consume(self._queue, on_message, consumer_tag=tag, timeout=RPC_TIMEOUT)

    async def ack(self, delivery: DeliveredMessage) -> None:
        channel = delivery.channel
        assert isinstance(channel, Channel)
        with _explained(self._connection, self._queue):
            await channel.basic_ack(delivery.delivery_tag or 0, wait=False)
        self._acked.add(channel)
        self._held[channel] -= 1

    async def arrived(self) -> None:
        """Wait until the broker has the acks. It answers none, but it reads a channel in order."""
        with _explained(self._connection, self._queue):
            for channel in self._acked:
                await channel.basic_qos(prefetch_count=1, timeout=RPC_TIMEOUT)
        self._acked.clear()

    async def give_back(self) -> None:
        """Return what was not acked, in its order, and see it arrive."""
        if self.count > _WINDOW:
            # Whatever is still behind would otherwise come before what we return. One consumer was
            # given all of it at once.
            with suppress(ParkingError):
                while await self._next() is not None:
                    pass
        if len(self._channels) > 1:
            # Else what the first gives back goes to the next that has room, and behind its own.
            for channel, tag in self._channels.items():
                with suppress(Exception):
                    await channel.basic_cancel(tag, timeout=RPC_TIMEOUT)
        left = len(self._channels)
        for channel in self._channels:
            left -= 1
            with suppress(Exception):
                held = self._held[channel]
                wanted = (await _state(self._connection, self._queue))[0] + held
                await channel.close(timeout=RPC_TIMEOUT)
                await self._see_back(wanted, left)

    async def _see_back(self, wanted: int, left: int) -> None:
        """The broker gives messages back a moment after it has answered the close, and takes the
        consumer off its list in the same step."""
        # A deadline, not a timeout: a question that is cancelled costs the connection (aiormq closes
        # its channel a second time, and the broker answers 504).
        deadline = asyncio.get_running_loop().time() + QUIET
        while asyncio.get_running_loop().time() < deadline:
            messages, consumers = await _state(self._connection, self._queue)
            if consumers <= left and messages >= wanted:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def taking(connection: Connection, queue: str | ParkingQueue) -> AsyncIterator[Taken]:
    lot = ParkingQueue.of(queue).name
    with _explained(connection, lot):
        await _state(connection, lot)
        lock = await _lock(connection, lot)
    try:
        with _explained(connection, lot):
            taken = Taken(connection, lot, await _undisturbed(connection, lot))
        try:
            yield taken
        finally:
            await taken.give_back()
    finally:
        with suppress(Exception):
            await _unlock(connection, lock)


def lock_of(lot: str) -> str:
    """The name of the queue that says that somebody looks at this one; no other has it."""
    name = f"{lot}.look"
    if len(name) <= 255:
        return name
    digest = hashlib.blake2b(lot.encode(), digest_size=8).hexdigest()
    return f"{lot[:200]}.{digest}.look"


async def _lock(connection: Connection, lot: str) -> str | None:
    """Make sure that nobody else looks: an exclusive queue, which goes with our connection.

    (Quorum queues ignore `exclusive` on a consumer, 3.10 to 4.3.) None where we may not create one;
    then there is only the count of consumers to go by.
    """
    name = lock_of(lot)
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        channel = await connection.open()
        try:
            await channel.queue_declare(name, exclusive=True, timeout=RPC_TIMEOUT)
            return name
        except (amqp.ChannelAccessRefused, amqp.ChannelPreconditionFailed):
            return None
        except amqp.ChannelLockedResource:
            if asyncio.get_running_loop().time() > deadline:
                raise ParkingError(
                    f"{lot}: somebody else lists, replays or discards; try again when they are done"
                ) from None
        finally:
            with suppress(Exception):
                await channel.close(timeout=RPC_TIMEOUT)
        await asyncio.sleep(0.05)


async def _unlock(connection: Connection, lock: str | None) -> None:
    if lock is not None:
        channel = await connection.open()
        await channel.queue_delete(lock, timeout=RPC_TIMEOUT)
        await channel.close(timeout=RPC_TIMEOUT)


async def _undisturbed(connection: Connection, lot: str) -> int:
    """How many are there, when nobody holds any: one who was killed is noticed a moment later."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        messages, consumers = await _state(connection, lot)
        if consumers == 0:
            return messages
        if asyncio.get_running_loop().time() > deadline:
            raise ParkingError(
                f"{lot}: {consumers} other consumer(s) hold its messages; who: "
                f"rabbitmqctl list_consumers -p {shlex.quote(connection.vhost)}"
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
        raise ParkingError(
            f"there is no queue {lot}; the app's queues: rabbit-tasks topology show; "
            "create them: rabbit-tasks topology declare"
        ) from None
    except amqp.ChannelAccessRefused as error:
        raise ParkingError(
            f"{lot}: {words(error)} (RABBIT_TASKS_USER); allow it: {connection.permit}"
        ) from None
    except TimeoutError:
        raise ParkingError(f"{lot}: the broker did not answer within {RPC_TIMEOUT:g} s") from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise _lost(lot, "the broker did not answer") from None
    except LOST as error:
        raise _lost(lot, words(error)) from None
    except amqp.AMQPError as error:
        raise ParkingError(f"{lot}: {words(error)}") from None


def _lost(lot: str, why: str) -> ParkingError:
    return ParkingError(f"{lot}: connection lost ({why}); what was not moved is still parked")
