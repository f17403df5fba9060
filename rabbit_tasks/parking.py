"""The parking lot: read it, replay from it, discard.

Looking must not reorder. A quorum queue puts what is returned to it behind everything that was
returned before, and in front of what was never taken (3.10 to 4.3): so a look takes all that is
there, on one consumer, and gives it back whole by closing the channel; then the order is as it was.
(`basic.get` would not do: each get is a consumer of its own, and they come back in any order.)
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import aiormq.exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from rabbit_tasks import history
from rabbit_tasks import message as names
from rabbit_tasks.broker import LOST, RPC_TIMEOUT, Connection, Publisher, properties_of
from rabbit_tasks.errors import ParkingError, PublishError
from rabbit_tasks.properties import Properties
from rabbit_tasks.topology import parked_queue

QUIET: Final = 1.0
"""Seconds without a delivery after which we ask how many are left: somebody else may hold some."""
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
        return self.properties.text("message_id") or "~" + self._digest()

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


Choice = Callable[[ParkedMessage], bool]


@dataclass
class Moved:
    """What a replay or a discard did."""

    there: int = 0
    """Messages that were parked when it began."""
    chosen: int = 0
    to: Counter[str] = field(default_factory=Counter)
    """How many went into which queue."""
    discarded: int = 0


async def browse(connection: Connection, queue: str) -> AsyncIterator[ParkedMessage]:
    """Every message that is parked for this main queue now, in order; all stay where they are.

    `queue` may also be the parking queue itself. While it runs, the messages are held, and nobody
    else sees them. ParkingError where there is no such queue.
    """
    async with _taking(connection, queue) as taken:
        async for _, message in taken:
            yield message


async def replay(
    connection: Connection,
    publisher: Publisher,
    queue: str,
    choose: Choice,
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
        async for tag, message in taken:
            if (limit is not None and moved.chosen >= limit) or not choose(message):
                continue
            target = message.origin or _main(queue)
            if not dry_run:
                copy = history.replayed(
                    message.properties, when=datetime.now(UTC), message_id=uuid.uuid4().hex
                )
                try:
                    await publisher.send("", target, message.body, copy)
                except PublishError as error:
                    raise ParkingError(
                        f"message {message.id} cannot be replayed: {error} "
                        f"({moved.chosen} replayed before it, the others are still parked)"
                    ) from error
                await taken.ack(tag)
            moved.chosen += 1
            moved.to[target] += 1
            told(message, target)
    return moved


async def discard(
    connection: Connection,
    queue: str,
    choose: Choice,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    told: Callable[[ParkedMessage], None] = lambda _message: None,
) -> Moved:
    """Remove chosen messages for good, of those that were there at the start."""
    moved = Moved()
    async with _taking(connection, queue) as taken:
        moved.there = taken.count
        async for tag, message in taken:
            if (limit is not None and moved.chosen >= limit) or not choose(message):
                continue
            moved.chosen += 1
            if not dry_run:
                await taken.ack(tag)
                moved.discarded += 1
            told(message)
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
        self._channels: list[Channel] = []
        self._deliveries: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self._read = 0
        self._acked = 0

    def __aiter__(self) -> AsyncIterator[tuple[DeliveredMessage, ParkedMessage]]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[tuple[DeliveredMessage, ParkedMessage]]:
        while (delivery := await self._next()) is not None:
            yield delivery, ParkedMessage(self._read, delivery.body, properties_of(delivery))

    async def _next(self) -> DeliveredMessage | None:
        """The next one, or None when we have all that were there at the start."""
        while self._read < self.count:
            if self._read % _WINDOW == 0 and len(self._channels) <= self._read // _WINDOW:
                await self._consume(min(_WINDOW, self.count - self._read))
            try:
                async with asyncio.timeout(QUIET):
                    delivery = await self._deliveries.get()
            except TimeoutError:
                if self._connection.is_lost:
                    raise ParkingError(
                        f"{self._queue}: connection lost; what was not moved is still parked"
                    ) from None
                if await _ready(self._connection, self._queue) == 0:
                    return None  # somebody else took the others
                continue
            self._read += 1
            return delivery
        return None

    async def _consume(self, window: int) -> None:
        channel = await self._connection.open()
        self._channels.append(channel)
        await channel.basic_qos(prefetch_count=window, timeout=RPC_TIMEOUT)

        async def on_message(message: DeliveredMessage) -> None:
            self._deliveries.put_nowait(message)

        await channel.basic_consume(self._queue, on_message, timeout=RPC_TIMEOUT)

    async def ack(self, delivery: DeliveredMessage) -> None:
        try:
            await delivery.channel.basic_ack(delivery.delivery_tag or 0, wait=False)
        except LOST as error:
            raise ParkingError(
                f"{self._queue}: connection lost; the last message may be there twice"
            ) from error
        self._acked += 1

    async def give_back(self) -> None:
        """Return what was not acked, in its order, and see it arrive."""
        if self._acked < self._read:
            # Whatever is still behind would otherwise come before what we return.
            with suppress(ParkingError):
                while await self._next() is not None:
                    pass
        for channel in self._channels:
            with suppress(Exception):
                await channel.close(timeout=RPC_TIMEOUT)
        # The broker gives messages back a moment after it has answered the close.
        with suppress(Exception):
            async with asyncio.timeout(QUIET):
                while await _ready(self._connection, self._queue) < self._read - self._acked:
                    await asyncio.sleep(0.01)


@asynccontextmanager
async def _taking(connection: Connection, queue: str) -> AsyncIterator[_Taken]:
    lot = queue if queue.endswith(parked_queue("")) else parked_queue(queue)
    try:
        count = await _ready(connection, lot)
    except amqp.ChannelNotFoundEntity:
        raise ParkingError(
            f"there is no queue {lot}; which queues there are: rabbit-tasks topology show"
        ) from None
    except amqp.ChannelAccessRefused as error:
        raise ParkingError(f"{lot}: {error} (RABBIT_TASKS_USER)") from None
    taken = _Taken(connection, lot, count)
    try:
        yield taken
    finally:
        await taken.give_back()


async def _ready(connection: Connection, queue: str) -> int:
    channel = await connection.open()
    try:
        answer = await channel.queue_declare(queue, passive=True, timeout=RPC_TIMEOUT)
        return answer.message_count or 0
    finally:
        with suppress(Exception):
            await channel.close(timeout=RPC_TIMEOUT)
