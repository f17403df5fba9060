"""Where the copies of a replay wait until their originals are acked: then the broker sends them home.

Copies that go straight to the main queue cannot go many at a time: of a replay that is killed with
200 of them unconfirmed, or confirmed and their originals not acked yet, workers may have taken any,
and nobody could tell which. So a window of them goes another way, through a queue of the parking
queue's own, NAME.replaying:

    1. publish the copies into it, many at a time, and wait for all confirms
    2. publish a note behind them that says which originals they are of, and wait for its confirm
    3. ack the originals, and see the acks arrive
    4. nack the copies, and the note, with one command: dead-lettered, at least once, by their own
       routing keys to the queues they are for

Nobody consumes NAME.replaying but the replay. Killed in 1, there are copies without a note: all of
their originals are still parked, the next replay removes the copies. Killed in 2 to 4, there is a note
behind them: the next replay acks what is still parked of the originals, and lets the copies go. So
nothing is lost and nothing is there twice, whenever it is killed, and killed again while it resumes.

The note is dead-lettered into the queue it came from, and arrives behind the copies that the broker has
sent before it. Where it does not, their queue takes no more, and the replay ends: the broker tries no
more than 32 at a time, every three minutes.

The queue stays, empty, for the next replay. (What the broker is about to dead-letter is counted by no
question of AMQP's: a queue that looks empty may not be deleted.)
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any, Final, Self

import aiormq.exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from rabbit_tasks import history
from rabbit_tasks import message as names
from rabbit_tasks.broker import LOST, RPC_TIMEOUT, Connection, is_cancelled, words
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.frames import properties_of
from rabbit_tasks.parking.conveyor import Conveyor
from rabbit_tasks.parking.look import PATIENCE, Taken
from rabbit_tasks.parking.parked import identity
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.properties import Properties
from rabbit_tasks.text import quoted
from rabbit_tasks.topology import Arguments, replaying_queue

AGE: Final = 2.0
"""Seconds that the queue must be old before an original is acked for a copy in it: of a younger one, a
broker that is killed may have forgotten what it has confirmed (3.10 to 4.3)."""
HOME: Final = 30.0
"""Seconds for the broker to send a window home."""
_PREFETCH: Final = 20_000
_LONGEST: Final = 127
"""Bytes of an exchange's name that the client library takes (pamqp 4); AMQP would take 255."""
_ARGUMENTS: Final[Arguments] = {
    "x-queue-type": "quorum",
    # By the messages' own routing keys: there is no x-dead-letter-routing-key.
    "x-dead-letter-exchange": "",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
    "x-delivery-limit": 2_147_483_647,
}


def staging_queue(lot: ParkingQueue) -> str:
    """The name of the queue, and of the exchange in front of it, for what is parked in this one."""
    of = lot.main or lot.name
    if len(name := replaying_queue(of)) <= _LONGEST:
        return name
    digest = hashlib.blake2b(of.encode(), digest_size=8).hexdigest()
    return replaying_queue(f"{of[:90]}.{digest}")


@contextmanager
def explained(name: str) -> Iterator[None]:
    """What the broker says no with, or its silence, as a ParkingError."""
    name = quoted(name)
    try:
        yield
    except TimeoutError:
        raise ParkingError(f"{name}: the broker did not answer in time") from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ParkingError(f"{name}: connection lost") from None
    except LOST as error:
        raise ParkingError(f"{name}: connection lost: {words(error)}") from None
    except amqp.AMQPError as error:
        raise ParkingError(f"{name}: {words(error)}") from None


@dataclass(frozen=True)
class Note:
    """What a replay wrote down before it did it.

    digests     the identities of the originals: of the copies that lie before the note, or of the one
                message that is on its way by itself
    """

    run: str
    copies: int
    digests: tuple[bytes, ...]

    def properties(self, token: str) -> Properties:
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        told = {"run": self.run, "copies": self.copies, "when": when}
        return Properties.of({names.REPLAYING: told}, message_id=token, delivery_mode=2)

    @property
    def body(self) -> bytes:
        return b"".join(self.digests)

    @classmethod
    def read(cls, properties: Properties, body: bytes) -> Self | None:
        """The note that a message is; None for a copy, which never has that header."""
        told = properties.header(names.REPLAYING)
        if not isinstance(told, dict):
            return None
        run, copies = told.get("run"), told.get("copies")
        digests = tuple(body[at : at + 16] for at in range(0, len(body), 16))
        if not isinstance(run, str) or not isinstance(copies, int):
            return cls("", 0, ())
        return cls(run, copies, digests)


class Staging:
    """The queue, in the hands of one replay."""

    def __init__(self, connection: Connection, name: str, run: str, ready_at: float) -> None:
        self.name = name
        self._connection = connection
        """Of its own: confirms must not wait behind a look."""
        self._run = run
        self._ready_at = ready_at
        self._conveyor: Conveyor | None = None
        self._tags: dict[str, int] = {}
        """Of the notes that were delivered, by their tokens."""
        self._round: set[str] = set()
        """Tokens of those that came round."""
        self._under_way: str | None = None

    @classmethod
    async def open(cls, connection: Connection, lot: ParkingQueue, run: str) -> Self | None:
        """Create the queue where it is not there. None where our user may not.

        The lock of the parking queue must be ours, and nothing in there of anybody else.
        """
        name = staging_queue(lot)
        found = await _create(connection, name)
        if found is _Found.NONE:
            return None
        own = await connection.another("replay")
        now = asyncio.get_running_loop().time()
        staging = cls(own, name, run, now + AGE if found is _Found.NEW else now)
        try:
            staging._conveyor = await Conveyor.open(own, staging._on_delivery)
            try:
                await staging._conveyor.consume(name, _PREFETCH)
                if found is _Found.UNSURE:
                    await staging.done(await staging._write(Note(run, 0, ())))
            except (ParkingError, amqp.AMQPError, amqp.ChannelInvalidStateError):
                if found is not _Found.UNSURE or own.is_lost:
                    raise
                await own.end()
                return None
        except BaseException:
            await own.end(within=0)
            raise
        return staging

    @property
    def frame_max(self) -> int:
        return self._connection.frame_max

    async def close(self) -> None:
        await self._connection.end()

    async def add(self, target: str, properties: Properties, body: bytes) -> None:
        """One more copy for the window; it need not be there when this returns."""
        await self._belt.publish(self.name, target, properties, body)

    async def send_home(
        self, digests: Iterable[bytes], copies: int, ack: Callable[[], Any]
    ) -> None:
        """The window is complete: have its originals acked, and the broker send the copies home.

        ParkingError where the broker did not store one, or the window before this is not home yet.
        """
        await self._stored()
        await self.all_home()
        await self._age()
        token = await self._write(Note(self._run, copies, tuple(digests)))
        await ack()
        await self._belt.until(lambda: token in self._tags)
        tag = self._tags.pop(token)
        if self._connection.settles_its_own:
            self._under_way = token
            await self._belt.let_go(tag)
        else:
            # (Killed between the two, a note is left without copies: the next replay removes it.)
            await self._belt.let_go(tag - 1)
            await self._belt.ack(tag)

    async def all_home(self) -> None:
        """Wait until the broker has sent the last window. ParkingError where it does not."""
        token = self._under_way
        if token is None:
            return
        try:
            await self._belt.until(lambda: token in self._round, HOME)
        except TimeoutError:
            raise ParkingError(
                f"{quoted(self.name)}: the broker has not sent home all copies within {HOME:g} s; "
                "does their queue take no more (a length limit)? They wait, and go by themselves when "
                "it does, the broker tries every three minutes"
            ) from None
        self._under_way = None
        self._round.discard(token)
        await self._belt.ack(self._tags.pop(token))

    async def note(self, digest: bytes) -> str:
        """Write down that this message is on its way by itself; what `done` needs."""
        return await self._write(Note(self._run, 0, (digest,)))

    async def done(self, token: str) -> None:
        """It has arrived, and its original is acked."""
        await self._belt.until(lambda: token in self._tags)
        await self._belt.ack(self._tags.pop(token))

    @property
    def _belt(self) -> Conveyor:
        assert self._conveyor is not None
        return self._conveyor

    async def _write(self, note: Note) -> str:
        token = uuid.uuid4().hex
        await self._belt.publish(self.name, self.name, note.properties(token), note.body)
        await self._stored()
        return token

    async def _stored(self) -> None:
        if not await self._belt.stored():
            raise ParkingError(f"{quoted(self.name)}: {self._belt.refusal}")

    async def _age(self) -> None:
        while (left := self._ready_at - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)

    def _on_delivery(self, tag: int, raw: bytes) -> None:
        if names.REPLAYING.encode() not in raw:
            return
        properties = Properties.decode(raw)
        if properties.header(names.REPLAYING) is None:
            return
        token = properties.text("message_id") or ""
        self._tags[token] = tag
        if properties.header(names.DEATH) is not None:
            self._round.add(token)


class _Found(Enum):
    """What is there of a staging queue."""

    NONE = auto()
    """Nothing, or nothing that our user may use."""
    NEW = auto()
    OLD = auto()
    UNSURE = auto()
    """A queue; our user may not see to the exchange and the binding."""


async def _create(connection: Connection, name: str) -> _Found:
    was_there = await left(connection, name) is not None
    channel = await connection.open()
    try:
        await channel.exchange_declare(
            name, exchange_type="fanout", durable=True, timeout=RPC_TIMEOUT
        )
        await channel.queue_declare(name, durable=True, arguments=_ARGUMENTS, timeout=RPC_TIMEOUT)
        await channel.queue_bind(name, name, timeout=RPC_TIMEOUT)
    except amqp.ChannelAccessRefused:
        return _Found.UNSURE if was_there else _Found.NONE
    except amqp.ChannelPreconditionFailed as error:
        raise ParkingError(
            f"{quoted(name)}: {words(error)}; a replay needs this name. Whoever made it may delete "
            "it when it "
            "is empty"
        ) from None
    finally:
        with suppress(Exception):
            await channel.close(timeout=RPC_TIMEOUT)
    return _Found.OLD if was_there else _Found.NEW


async def left(connection: Connection, name: str) -> int | None:
    """How many messages lie in a staging queue, copies and notes; None where there is no queue."""
    channel = await connection.open()
    try:
        found = await channel.queue_declare(name, passive=True, timeout=RPC_TIMEOUT)
        return found.message_count or 0
    except (amqp.ChannelNotFoundEntity, amqp.ChannelAccessRefused):
        return None
    finally:
        with suppress(Exception):
            await channel.close(timeout=RPC_TIMEOUT)


async def is_unfinished(connection: Connection, lot: ParkingQueue) -> bool:
    """Whether a replay of this queue did not come to its end: the next one ends it."""
    name = staging_queue(lot)
    with explained(name):
        return bool(await left(connection, name))


# --- what a replay left that was killed ------------------------------------------------------------


@dataclass
class Resumed:
    """What became of that."""

    sent_home: int = 0
    """Copies whose originals are gone."""
    removed: int = 0
    """Copies whose originals are still parked, all of them."""
    maybe_twice: list[str] = field(default_factory=list)
    """Ids of messages that are parked and may have been replayed: one was on its way by itself."""


async def resume(
    connection: Connection,
    lot: ParkingQueue,
    taken: Taken,
    maybe_twice: Callable[[str], None] = lambda _id: None,
) -> Resumed | None:
    """End what a replay began that was killed. None where there is nothing.

    `taken` is a look at the parking queue that nothing was read from yet; read on after this, it would
    miss messages. `maybe_twice` is told of each such id before what tells of it is gone.
    """
    name = staging_queue(lot)
    if not await left(connection, name) and not await _consumers(connection, name):
        return None
    channel = await connection.open()
    try:
        found = await _all(connection, channel, name)
        return await _resume(channel, found, taken, maybe_twice)
    finally:
        with suppress(Exception):
            await channel.close(timeout=RPC_TIMEOUT)


async def _resume(
    channel: Channel,
    found: list[DeliveredMessage],
    taken: Taken,
    maybe_twice: Callable[[str], None],
) -> Resumed:
    resumed = Resumed()
    copies: list[DeliveredMessage] = []
    window: Note | None = None
    last = 0
    alone: set[bytes] = set()
    notes: list[int] = []
    for one in found:
        tag, properties = one.delivery_tag or 0, properties_of(one)
        note = Note.read(properties, one.body)
        if note is None:
            copies.append(one)
        elif properties.header(names.DEATH) is not None:
            notes.append(tag)  # it came round: its window is home
        elif note.copies == 0:
            alone.update(note.digests)
            notes.append(tag)
        elif _is_of(note, copies):
            window, last = note, tag
        else:
            notes.append(tag)
    parked = Counter(window.digests if window else ())
    if parked or alone:
        async for tag, message in taken:
            digest = identity(message)
            if parked[digest]:
                parked[digest] -= 1
                await taken.ack(tag)
            elif digest in alone:
                alone.discard(digest)
                resumed.maybe_twice.append(message.id)
                maybe_twice(message.id)
            if not alone and not parked.total():
                break
        await taken.settled()
    for tag in notes:
        await channel.basic_ack(tag, wait=False)
    if window:
        resumed.sent_home = len(copies)
        # (Not the note with them: nobody waits for it, and 3.10 would never settle it.)
        await channel.basic_nack(
            copies[-1].delivery_tag or 0, multiple=True, requeue=False, wait=True
        )
        await channel.basic_ack(last, wait=False)
    else:
        resumed.removed = len(copies)
        for one in copies:
            await channel.basic_ack(one.delivery_tag or 0, wait=False)
    await channel.basic_qos(prefetch_count=1, timeout=RPC_TIMEOUT)  # now the broker has them
    return resumed


def _is_of(note: Note, copies: list[DeliveredMessage]) -> bool:
    """Whether all copies are there that the note speaks of, and no others."""
    return note.copies == len(note.digests) == len(copies) and all(
        (history.replay_id(properties_of(one)) or "").startswith(f"{note.run}-") for one in copies
    )


async def _all(connection: Connection, channel: Channel, name: str) -> list[DeliveredMessage]:
    """Every message in the queue, once nobody else holds any: one who was killed is noticed later."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while await _consumers(connection, name):
        if loop.time() > deadline:
            raise ParkingError(
                f"{quoted(name)}: somebody else replays; try again when they are done"
            )
        await asyncio.sleep(0.05)
    there = await left(connection, name) or 0
    found: list[DeliveredMessage] = []
    news = asyncio.Event()

    async def on_message(message: DeliveredMessage) -> None:
        found.append(message)
        news.set()

    await channel.basic_qos(prefetch_count=_PREFETCH, timeout=RPC_TIMEOUT)
    await channel.basic_consume(name, on_message, timeout=RPC_TIMEOUT)
    while len(found) < there:
        news.clear()
        try:
            async with asyncio.timeout(PATIENCE):
                await news.wait()
        except TimeoutError:
            raise ParkingError(
                f"{quoted(name)}: the broker delivers none of {there} messages"
            ) from None
    return found


async def _consumers(connection: Connection, name: str) -> int:
    channel = await connection.open()
    try:
        found = await channel.queue_declare(name, passive=True, timeout=RPC_TIMEOUT)
        return found.consumer_count or 0
    except (amqp.ChannelNotFoundEntity, amqp.ChannelAccessRefused):
        return 0
    finally:
        with suppress(Exception):
            await channel.close(timeout=RPC_TIMEOUT)
