"""The parking lot: read it, replay from it, discard.

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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

import aiormq.exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from rabbit_tasks import history
from rabbit_tasks import message as names
from rabbit_tasks.broker import (
    LOST,
    RPC_TIMEOUT,
    Connection,
    Publisher,
    is_cancelled,
    words,
)
from rabbit_tasks.errors import ConnectError, ParkingError, PublishError
from rabbit_tasks.frames import properties_of
from rabbit_tasks.properties import Properties
from rabbit_tasks.text import escaped
from rabbit_tasks.topology import parked_queue

QUIET: Final = 1.0
"""Seconds without a delivery after which we ask how many are left: somebody else may hold some."""
PATIENCE: Final = 10.0
"""Seconds to wait for somebody else who looks at the same parking queue, and for a delivery of what
is there."""
_WINDOW: Final = 65_535
"""The most that one consumer can hold: a prefetch count has 16 bits."""


@dataclass(frozen=True)
class ParkedMessage:
    """A message in the parking lot, as it lies there."""

    position: int
    """From 1, in the order in which messages were parked."""
    body: bytes = field(repr=False)
    properties: Properties = field(repr=False)

    @property
    def id(self) -> str:
        """The message id; for a message without one, ~ and a digest of what it is."""
        return self.properties.text("message_id") or "~" + self._digest

    def is_called(self, name: str) -> bool:
        """Whether this is its id, as it is or as a terminal shows it, control characters escaped."""
        return name in (self.id, escaped(self.id))

    @cached_property
    def _digest(self) -> str:
        kept = self.properties.replace({}, without=names.is_brokers).encode()
        return hashlib.blake2b(kept + self.body, digest_size=6).hexdigest()

    @property
    def reason(self) -> str:
        """Why it is parked, in words."""
        return history.reason(self.properties)

    @property
    def error_type(self) -> str | None:
        found = self.properties.header(names.ERROR_TYPE)
        return found if isinstance(found, str) else None

    @property
    def error_message(self) -> str | None:
        found = self.properties.header(names.ERROR_MESSAGE)
        return found if isinstance(found, str) else None

    @property
    def stack(self) -> str | None:
        found = self.properties.header(names.ERROR_STACK)
        return found if isinstance(found, str) else None

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The history: attempt, when, seconds, error, worker; oldest first."""
        return history.attempts(self.properties)

    @property
    def deaths(self) -> int:
        """Workers that died with it in their hands, by its own header."""
        return names.crashes(self.properties)

    @property
    def last_seen(self) -> tuple[str, str] | None:
        """Of those deaths: the last worker that is known to have had it, and when."""
        table = self.properties.header(names.CRASHES)
        if not isinstance(table, dict):
            return None
        worker, when = table.get("worker"), table.get("when")
        return (worker, when) if isinstance(worker, str) and isinstance(when, str) else None

    @property
    def headers(self) -> dict[str, Any]:
        """All headers, but for the broker's count of looks at it."""
        return {
            name: value
            for name, value in self.properties.headers.items()
            if name not in (names.DELIVERY_COUNT, names.ACQUIRED_COUNT)
        }

    @property
    def parked_at(self) -> str | None:
        """When, as ISO 8601; of a message that the broker parked, to the second."""
        ours = self.properties.header(names.PARKED_AT)
        if isinstance(ours, str):
            return ours
        death = history.last_death(self.properties)
        when = death.get("time") if death else None
        return when.isoformat() if isinstance(when, datetime) else None

    @property
    def origin(self) -> str | None:
        """The main queue it came from; None where nothing tells."""
        return history.origin(self.properties)

    @property
    def replays(self) -> int:
        """How often it was replayed before."""
        last = self.properties.header(names.REPLAYED)
        count = last.get("count") if isinstance(last, dict) else 0
        return count if isinstance(count, int) else 0

    def has_error(self, kind: str) -> bool:
        """Whether it failed with this type of error, by its full or its short name."""
        return self.error_type is not None and kind in (
            self.error_type, self.error_type.rpartition(".")[2]
        )  # fmt: skip


Choose = Callable[[ParkedMessage], bool]


@dataclass
class Moved:
    """What a replay or a discard did."""

    there: int = 0
    """Messages that were parked when it began."""
    chosen: int = 0
    to: Counter[str] = field(default_factory=Counter)
    """How many went into which queue."""


async def browse(connection: Connection, queue: str) -> AsyncIterator[ParkedMessage]:
    """Every message that is parked for this main queue now, in order; all stay where they are.

    `queue` may also be the parking queue itself. While it runs, the messages are held, and whoever
    else wants to look waits. ParkingError where there is no such queue, or it is in use too long.
    """
    async with _taking(connection, queue) as taken:
        async for _, message in taken:
            yield message


async def replay(
    connection: Connection,
    publisher: Publisher,
    queue: str,
    choose: Choose,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    told: Callable[[ParkedMessage, str], None] = lambda _message, _queue: None,
) -> Moved:
    """Copy chosen messages back to their main queues with fresh attempts.

    In the order in which they were parked, and only those that were there at the start. Copy,
    confirm, ack, one by one: killed at any moment, nothing is lost and at most one message is there
    twice. `told` is called after each.

    ParkingError where a message cannot go; those before it have gone, the others stay parked.
    """
    moved = Moved()
    async with _taking(connection, queue) as taken:
        moved.there = taken.count
        async for delivery, message in taken:
            if (limit is not None and moved.chosen >= limit) or not choose(message):
                continue
            target = message.origin or _main(queue)
            if not dry_run:
                copy = history.replayed(
                    message.properties,
                    when=datetime.now(UTC),
                    message_id=uuid.uuid4().hex,
                    frame_max=connection.frame_max,
                )
                try:
                    await publisher.send("", target, message.body, copy)
                except (PublishError, ConnectError) as error:
                    maybe = isinstance(error, PublishError) and error.maybe_stored
                    raise ParkingError(
                        f"message {message.id} cannot be replayed: {error} "
                        f"({moved.chosen} replayed before it, the others are still parked"
                        f"{', and this one may be there twice' if maybe else ''})"
                    ) from error
            moved.chosen += 1
            moved.to[target] += 1
            told(message, target)
            if not dry_run:
                # And only then the next one: acks that are still on their way when we are killed
                # would leave several messages twice.
                try:
                    await taken.ack(delivery)
                    await taken.arrived()
                except ParkingError as error:
                    raise ParkingError(
                        f"{error} ({moved.chosen} replayed; {message.id} may be parked as well)"
                    ) from error
    return moved


async def discard(
    connection: Connection,
    queue: str,
    choose: Choose,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    told: Callable[[ParkedMessage], None] = lambda _message: None,
) -> Moved:
    """Remove chosen messages for good, of those that were there at the start."""
    moved = Moved()
    async with _taking(connection, queue) as taken:
        moved.there = taken.count
        async for delivery, message in taken:
            if (limit is not None and moved.chosen >= limit) or not choose(message):
                continue
            moved.chosen += 1
            if not dry_run:
                await taken.ack(delivery)
            told(message)
        await taken.arrived()
    return moved


# --- taking and giving back ---------------------------------------------------------------------


def _main(queue: str) -> str:
    return queue.removesuffix(parked_queue(""))


class _Taken:
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
async def _taking(connection: Connection, queue: str) -> AsyncIterator[_Taken]:
    lot = queue if queue.endswith(parked_queue("")) else parked_queue(queue)
    with _explained(connection, lot):
        await _state(connection, lot)
        lock = await _lock(connection, lot)
    try:
        with _explained(connection, lot):
            taken = _Taken(connection, lot, await _undisturbed(connection, lot))
        try:
            yield taken
        finally:
            await taken.give_back()
    finally:
        with suppress(Exception):
            await _unlock(connection, lock)


async def _lock(connection: Connection, lot: str) -> str | None:
    """Make sure that nobody else looks: an exclusive queue, which goes with our connection.

    (Quorum queues ignore `exclusive` on a consumer, 3.10 to 4.3.) None where we may not create one;
    then there is only the count of consumers to go by.
    """
    name = f"{lot}.look"[-255:]
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
