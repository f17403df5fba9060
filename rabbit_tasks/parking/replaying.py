"""Replay: copies of parked messages go back to their main queues, with fresh attempts."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import aiormq.exceptions as amqp

from rabbit_tasks import history
from rabbit_tasks.broker import RPC_TIMEOUT, Connection
from rabbit_tasks.errors import ConnectError, ParkingError, PublishError
from rabbit_tasks.parking import staging
from rabbit_tasks.parking.look import Moved, Taken, taking
from rabbit_tasks.parking.parked import Choose, ParkedMessage, identity
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.parking.staging import Resumed, Staging, explained, staging_queue
from rabbit_tasks.properties import Properties
from rabbit_tasks.publisher import ALONE_FROM, Publisher, new_id
from rabbit_tasks.text import quoted
from rabbit_tasks.topology import replaying_queue

ALONE: Final = 32
"""So many of a replay go by themselves, before windows of them: what is wrong with their queue is then
known before more are on their way to it."""
WINDOW: Final = 1_000
"""Messages that go together."""
WINDOW_BYTES: Final = 4 * 2**20
WINDOW_SECONDS: Final = 0.5
"""For which the first of a window waits for others, where a rate is asked for."""
HELD: Final = 600.0
"""Seconds after which a slow replay gives back what it holds, and takes it again: the broker takes it
away after 30 minutes."""


@dataclass
class Replayed(Moved):
    """What a replay did.

    run         its own id: those of its copies, in their x-replayed, are this, a dash and a number
    copies      those ids, of up to 1,000, and the fingerprints of the failures they were parked with
    stopped     somebody asked it to stop before it was through
    alone       all went one by one, without a note, because our user may not create the queue that
                others go through: had it been killed, the first message of the next replay might be
                twice, and nothing would tell
    resumed     what became of a replay before this one that was killed
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    copies: dict[str, str | None] = field(default_factory=dict)
    staging: str = ""
    """The queue that they go through."""
    stopped: bool = False
    alone: bool = False
    resumed: Resumed | None = None


async def replay(
    connection: Connection,
    publisher: Publisher,
    queue: str | ParkingQueue,
    choose: Choose,
    *,
    limit: int | None = None,
    among: int | None = None,
    to: str | None = None,
    into: str | None = None,
    rate: float | None = None,
    edited: bytes | None = None,
    dry_run: bool = False,
    stop: asyncio.Event | None = None,
    began: Callable[[int], None] = lambda _count: None,
    told: Callable[[ParkedMessage, str], None] = lambda _message, _queue: None,
    maybe_twice: Callable[[str], None] = lambda _id: None,
) -> Replayed:
    """Copy chosen messages back to their main queues with fresh attempts.

    In the order in which they were parked, and only those that were there at the start. Killed at any
    moment, nothing is lost, and the next replay of this queue ends what this one began: at most one
    message is then there twice, and `maybe_twice` is told its id. (How: see staging.py. One by one go
    the first few, messages without an id, very large ones, and all where our user may not create
    that queue: copy, confirm, ack.)

    among       of the first so many that are parked
    to          to this queue, wherever they came from
    into        to this queue where nothing tells where they came from
    rate        at most so many a second
    edited      goes in place of the body; give a limit of 1
    stop        when it is set, ends between two messages
    began       is told how many are parked
    told        is called after each, or after a window of them, with the queue it went to

    ParkingError where a message cannot go; those before it have gone, the others stay parked.
    """
    lot = ParkingQueue.of(queue)
    work = _Replay(connection, publisher, lot, choose, limit, to, into, edited, told,
                   Pace(rate), stop or asyncio.Event())  # fmt: skip
    done = work.done
    done.staging = staging_queue(lot)
    left = among
    while True:
        async with taking(connection, lot) as taken:
            if not dry_run and (
                resumed := await staging.resume(connection, lot, taken, maybe_twice)
            ):
                if resumed != Resumed():  # (the last note of one that failed is nothing to tell of)
                    done.resumed = _sum(done.resumed, resumed)
                continue
            if left is not None:
                taken.count = min(taken.count, left)
            if not done.there:
                done.there = taken.count
                began(taken.count)
            if dry_run:
                await work.only_look(taken)
                return done
            is_through = await work.go(taken)
            left = taken.count - work.acked
        if is_through or done.stopped:
            return done


def _sum(one: Resumed | None, other: Resumed) -> Resumed:
    if one is None:
        return other
    return Resumed(
        one.sent_home + other.sent_home,
        one.removed + other.removed,
        one.maybe_twice + other.maybe_twice,
    )


class Pace:
    """Not more than so many a second, evenly."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._next = 0.0

    @property
    def wait(self) -> float:
        """Seconds until the next one may go."""
        return max(0.0, self._next - time.monotonic()) if self.rate else 0.0

    def went(self) -> None:
        if self.rate:
            now = time.monotonic()
            # What was waited for meanwhile is caught up with, but for no more than a moment.
            self._next = max(self._next or now, now - 0.25) + 1 / self.rate


@dataclass(frozen=True)
class _Copy:
    """A message on its way."""

    tag: int
    message: ParkedMessage
    target: str
    digest: bytes


class _Replay:
    """One replay: over one look, or several where it takes long."""

    def __init__(
        self,
        connection: Connection,
        publisher: Publisher,
        lot: ParkingQueue,
        choose: Choose,
        limit: int | None,
        to: str | None,
        into: str | None,
        edited: bytes | None,
        told: Callable[[ParkedMessage, str], None],
        pace: Pace,
        stop: asyncio.Event,
    ) -> None:
        self.done = Replayed()
        self.acked = 0
        """Of this look."""
        self._connection = connection
        self._publisher = publisher
        self._lot = lot
        self._choose = choose
        self._limit = limit
        self._to = to
        self._into = into
        self._edited = edited
        self._told = told
        self._pace = pace
        self._stop = stop
        self._staging: Staging | None = None
        self._number = 0
        self._window: list[_Copy] = []
        self._bytes = 0
        self._since = 0.0
        self._there: set[str] = set()

    async def only_look(self, taken: Taken) -> None:
        async for _, message in taken:
            if self._is_enough:
                return
            if self._choose(message):
                self._number += 1
                self._count(message, self._target(message))

    async def go(self, taken: Taken) -> bool:
        """Replay from this look; False where it was held long enough, and another must follow."""
        self.acked = 0
        until = time.monotonic() + HELD
        try:
            async for tag, message in taken:
                if self._is_enough:
                    break
                if self._stop.is_set():
                    self.done.stopped = True
                    break
                if not self._choose(message) or self._is_ours(message):
                    continue
                if not await self._may_go(taken):
                    self.done.stopped = True
                    break
                if time.monotonic() > until:
                    await self._send_window(taken)
                    return False
                await self._one(taken, tag, message)
            await self._send_window(taken)
            await self._all_home()
        finally:
            await self._close()
        return True

    async def _close(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            await staging.close()

    @property
    def _is_enough(self) -> bool:
        return self._limit is not None and self._number >= self._limit

    def _is_ours(self, message: ParkedMessage) -> bool:
        """Whether it is back from this very replay, and would go round."""
        return (history.replay_id(message.properties) or "").startswith(f"{self.done.run}-")

    async def _may_go(self, taken: Taken) -> bool:
        """Wait for the turn of the next one; False where we are to stop."""
        while (wait := self._pace.wait) > 0:
            if self._window and time.monotonic() + wait > self._since + WINDOW_SECONDS:
                await self._send_window(taken)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.wait):
                    await self._stop.wait()
                    return False
        return True

    def _target(self, message: ParkedMessage) -> str:
        target = self._to or message.origin or self._into or self._lot.main
        if target is None:
            raise ParkingError(
                f"message {message.id}: nothing tells which queue it came from; say --into QUEUE "
                f"({self.done.chosen} replayed before it)"
            )
        if target.endswith(replaying_queue("")):
            # What lies there without a note is taken for a copy whose original is parked.
            raise ParkingError(
                f"message {message.id}: {quoted(target)} is where replays keep their copies, and no "
                f"main queue; say --to QUEUE ({self.done.chosen} replayed before it)"
            )
        return target

    def _count(self, message: ParkedMessage, target: str) -> None:
        self.done.chosen += 1
        self.done.to[target] += 1
        self._told(message, target)

    async def _one(self, taken: Taken, tag: int, message: ParkedMessage) -> None:
        if self._staging is None and not self.done.alone:
            await self._open()
        target = self._target(message)
        self._number += 1
        self._pace.went()
        replay = f"{self.done.run}-{self._number}"
        copy = history.replayed(
            message.properties,
            when=datetime.now(UTC),
            message_id=new_id(),
            replay=replay,
            frame_max=self._connection.frame_max,
            edited=None if self._edited is None else message.body,
        )
        if self._limit is not None and len(self.done.copies) < 1_000:
            self.done.copies[replay] = message.fingerprint
        one = _Copy(tag, message, target, identity(message))
        if self._staging is None or self._goes_alone(message, copy):
            await self._send_window(taken)
            await self._all_home()
            await self._send_alone(taken, one, copy)
        else:
            await self._stage(self._staging, taken, one, copy)

    async def _open(self) -> None:
        with self.explained():
            self._staging = await Staging.open(self._connection, self._lot, self.done.run)
        self.done.alone = self._staging is None

    def _goes_alone(self, message: ParkedMessage, copy: Properties) -> bool:
        return (
            self._number <= ALONE
            # Two that are the same to the last byte cannot be told apart after a kill.
            or message.properties.text("message_id") is None
            or len(message.body) >= ALONE_FROM
            # The broker adds its own headers when it sends it home.
            or copy.frame_size() > self._connection.frame_max - history.ROOM
        )

    async def _send_alone(self, taken: Taken, one: _Copy, copy: Properties) -> None:
        """Copy, confirm, ack; and the next one when the ack has arrived: acks that are still on their
        way when we are killed would leave several messages twice."""
        note = None
        body = one.message.body if self._edited is None else self._edited
        if self._staging is not None:
            with self.explained():
                note = await self._staging.note(one.digest)
        try:
            await self._publisher.send("", one.target, body, copy)
        except (PublishError, ConnectError) as error:
            maybe = isinstance(error, PublishError) and error.maybe_stored
            if note and self._staging and not maybe:
                with suppress(Exception):
                    await self._staging.done(note)
            raise ParkingError(
                f"message {one.message.id} cannot be replayed: {error} "
                f"({self.done.chosen} replayed before it, the others are still parked"
                f"{', and this one may be there twice' if maybe else ''})"
            ) from error
        self._there.add(one.target)
        self._count(one.message, one.target)
        try:
            await taken.ack(one.tag)
            await taken.arrived()
        except ParkingError as error:
            raise ParkingError(
                f"{error} ({self.done.chosen} replayed; {one.message.id} may be parked as well)"
            ) from error
        self.acked += 1
        if note and self._staging:
            with self.explained():
                await self._staging.done(note)

    async def _stage(self, staging: Staging, taken: Taken, one: _Copy, copy: Properties) -> None:
        with self.explained():
            if one.target not in self._there:
                await self._find(one)
            if not self._window:
                self._since = time.monotonic()
            self._window.append(one)
            self._bytes += len(one.message.body) + copy.frame_size()
            await staging.add(one.target, copy, one.message.body)
        if len(self._window) >= WINDOW or self._bytes >= WINDOW_BYTES:
            await self._send_window(taken)

    async def _send_window(self, taken: Taken) -> None:
        window, self._window, self._bytes = self._window, [], 0
        self._there.clear()
        if not window or self._staging is None:
            return

        async def ack() -> None:
            await taken.ack_all([one.tag for one in window])
            await taken.settled()

        with self.explained():
            await self._staging.send_home([one.digest for one in window], len(window), ack)
        self.acked += len(window)
        for one in window:
            self._count(one.message, one.target)

    async def _all_home(self) -> None:
        if self._staging is not None:
            with self.explained():
                await self._staging.all_home()

    async def _find(self, one: _Copy) -> None:
        """See that its queue is there: the broker would hold the copies for as long as it is not."""
        channel = await self._connection.open()
        try:
            await channel.queue_declare(one.target, passive=True, timeout=RPC_TIMEOUT)
        except amqp.ChannelNotFoundEntity:
            raise ParkingError(
                f"message {one.message.id} cannot be replayed: there is no queue "
                f"{quoted(one.target)}; mend "
                "its name with --to, or create it: rabbit-tasks topology declare"
            ) from None
        except amqp.ChannelAccessRefused:
            pass  # 4.3 lets nobody ask who has no right on it; the broker's own are another matter
        finally:
            with suppress(Exception):
                await channel.close(timeout=RPC_TIMEOUT)
        self._there.add(one.target)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What goes wrong on the way, as a ParkingError that says what was done."""
        try:
            with explained(self.done.staging):
                yield
        except ParkingError as error:
            raise ParkingError(
                f"{error} ({self.done.chosen} replayed; a replay goes on where this one stopped: "
                f"{self._lot.to_type('replay')})"
            ) from error
