"""A channel to publish on, and what the broker says became of each message.

Through the client library a publish is a task, futures, a lock and an object for each of its frames.
Here it is its frames, written beside others in one go, and an entry in a table until its answer comes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from struct import Struct
from typing import Final, Self

import aiormq.exceptions as amqp
from aiormq.channel import Channel
from pamqp import commands

from rabbit_tasks.broker import CLOSE_TIMEOUT, RPC_TIMEOUT, Connection, words
from rabbit_tasks.frames import (
    ACK,
    BASIC,
    BODY,
    CHANNEL_CLOSE,
    HEADER,
    METHOD,
    NACK,
    PUBLISH,
    RETURN,
)
from rabbit_tasks.properties import FRAME_OVERHEAD, Properties

_CONTENT: Final = BASIC + b"\0\0"
_REFUSALS: Final = (
    amqp.ChannelNotFoundEntity, amqp.ChannelAccessRefused, amqp.ChannelPreconditionFailed,
)  # fmt: skip
"""What the broker closes a channel with over one message."""
_END: Final = b"\xce"
_frame: Final = Struct(">BHI").pack
"""A frame's head: its type, its channel, the size of its payload."""
_header: Final = Struct(">BHI4sQ").pack
"""The same of a content header, with what stands in there before the properties."""


UNANSWERED_KEPT: Final = 100_000
"""Messages that were given up, with which a channel is: of a queue without a majority, for days."""


class NotConfirmed(Exception):
    """What became of a message that the broker has not confirmed; its text is for a person."""


Told = Callable[[NotConfirmed | None], None]
"""Called once with what became of a message; None: it is stored."""


class Returned(NotConfirmed):
    """No queue took the message."""

    def __init__(self) -> None:
        super().__init__("there is no such queue, or its binding is gone")


class Nacked(NotConfirmed):
    """Its queue did not."""

    def __init__(self) -> None:
        super().__init__("refused (full, or no majority of its nodes is up)")


class Late(NotConfirmed):
    """No answer came in time."""

    def __init__(self) -> None:
        super().__init__("not confirmed in time")


class Rejected(NotConfirmed):
    """The broker closed the channel over this message, for this cause."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class Lost(NotConfirmed):
    """No answer can come any more: the channel was closed over another message, or is gone."""

    def __init__(self, cause: Exception, *, over_another: bool) -> None:
        super().__init__(cause)
        self.cause = cause
        self.over_another = over_another


class Letter:
    """A message to be published.

    properties  its property list, message_id that one of them, with its length, or nothing; None: where
                one of many is returned, it need not be told which
    alone       it must have a channel of its own
    since       when its time began, by the loop's clock
    mark        by what it is known when it is returned: where it was to go, and its id
    """

    __slots__ = ("alone", "body", "exchange", "head", "key", "mark", "properties", "since")

    def __init__(
        self, exchange: str, key: str, properties: bytes, message_id: bytes | None, body: bytes,
        *, alone: bool = False,
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.key = key
        self.properties = properties
        self.body = body
        self.alone = alone
        self.since = asyncio.get_running_loop().time()
        self.head = _head(exchange, key)
        self.mark = b"" if message_id is None else self.head[6:-1] + message_id

    @property
    def where(self) -> str:
        """For a person."""
        if self.exchange:
            return f"{self.exchange!r} with key {self.key!r}"
        return f"queue {self.key!r}"

    @property
    def frame_size(self) -> int:
        """Bytes of the frame with its properties, which cannot be split."""
        return 20 + len(self.properties)


@lru_cache(1024)
def _head(exchange: str, key: str) -> bytes:
    """ValueError for a name that AMQP, or the client library, cannot carry."""
    if len(key.encode()) > 255:
        raise ValueError(f"a routing key of {len(key.encode())} bytes, AMQP takes 255")
    publish = commands.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
    return PUBLISH + publish.marshal()


class Sent:
    """A message that has no answer yet.

    told    None when it was given up
    error   what its ack will mean
    """

    __slots__ = ("error", "followers", "letter", "told")

    def __init__(self, letter: Letter, told: Told) -> None:
        self.letter = letter
        self.told: Told | None = told
        self.error: NotConfirmed | None = None
        self.followers: list[asyncio.Future[None]] | None = None

    def answer(self, error: NotConfirmed | None) -> None:
        told, self.told = self.told, None
        if told is not None:
            told(error)
        if self.followers is not None:
            for follower in self.followers:
                if not follower.done():
                    follower.set_result(None)
            self.followers = None

    def give_up(self) -> None:
        """Nobody waits for its answer any more."""
        self.told = None
        self.answer(None)


class Confirms:
    """The messages on one channel that the broker has not answered yet.

    timeout     seconds for it to answer one
    patient     the time for which it holds publishers back does not count
    """

    def __init__(
        self, connection: Connection, channel: Channel, timeout: float, *, patient: bool
    ) -> None:
        self.channel = channel
        self.has_stored = False
        """Whether it ever took one."""
        self._connection = connection
        self._timeout = timeout
        self._patient = patient
        self._loop = asyncio.get_running_loop()
        self._number = channel.number
        self._largest = connection.frame_max - FRAME_OVERHEAD
        self._is_open = True
        self._tag = 0
        self._sent: dict[int, Sent] = {}
        self._marks: dict[bytes, Sent] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._ending: asyncio.Task[None] | None = None
        self._returning: bytes | None = None
        self._left = 0

    @classmethod
    async def open(cls, connection: Connection, timeout: float, *, patient: bool = False) -> Self:
        """On a channel of its own. What `Connection.open` raises."""
        channel = await connection.open()
        confirms = cls(connection, channel, timeout, patient=patient)
        connection.tap(channel, confirms.frame)
        channel.closing.add_done_callback(confirms._closed)
        # (Had we asked the library for confirms, it would wonder about each.)
        try:
            await channel.rpc(commands.Confirm.Select(), timeout=RPC_TIMEOUT)
        except BaseException:
            await confirms.end()
            raise
        return confirms

    @property
    def is_open(self) -> bool:
        """Whether the broker takes anything on it."""
        return self._is_open

    @property
    def unanswered(self) -> int:
        return len(self._sent)

    async def end(self) -> None:
        """Close the channel; what has no answer is told that it is lost."""
        with suppress(Exception):
            await self.channel.close(timeout=CLOSE_TIMEOUT)

    def of(self, mark: bytes) -> Sent | None:
        """The message of this mark that has no answer yet."""
        return self._marks.get(mark)

    def publish(self, letter: Letter, told: Told) -> Sent:
        """Write a message, whole; `told` is called with what became of it.

        No other of its mark may be without an answer: a returned message is known by nothing else.
        """
        number, body, properties = self._number, letter.body, letter.properties
        parts = [
            _frame(METHOD, number, len(letter.head)), letter.head, _END,
            _header(HEADER, number, 12 + len(properties), _CONTENT, len(body)), properties, _END,
        ]  # fmt: skip
        if 0 < len(body) <= self._largest:
            parts += [_frame(BODY, number, len(body)), body, _END]
        self._connection.write(b"".join(parts))
        if len(body) > self._largest:
            view = memoryview(body)
            for at in range(0, len(body), self._largest):
                piece = view[at : at + self._largest]
                self._connection.write(b"".join((_frame(BODY, number, len(piece)), piece, _END)))
        self._tag += 1
        self._sent[self._tag] = sent = Sent(letter, told)
        if letter.mark:
            self._marks[letter.mark] = sent
        due = letter.since + self._timeout
        if self._timer is None or due < self._due:
            self._look_at(due)
        return sent

    async def send(self, letter: Letter) -> None:
        """Publish a message, and wait until it is stored; NotConfirmed tells what else became of it."""
        answer = self._loop.create_future()
        sent = self.publish(letter, partial(_settle, answer))
        try:
            await answer
        except asyncio.CancelledError:
            sent.give_up()
            raise

    def forget(self, told: Told) -> None:
        """Give up all that would be told there."""
        for sent in self._sent.values():
            if sent.told == told:
                sent.give_up()

    async def answered(self, sent: Sent) -> None:
        """Wait until it has its answer, or is given up."""
        if sent.told is not None:
            follower = self._loop.create_future()
            sent.followers = [*(sent.followers or ()), follower]
            await follower

    async def settled(self) -> None:
        """Wait until nobody waits for an answer."""
        for sent in tuple(self._sent.values()):
            await self.answered(sent)

    # --- time -----------------------------------------------------------------------------------

    def _look_at(self, due: float) -> None:
        """One timer for all: most of them are answered long before it comes."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        since = self._connection.free_since if self._patient else 0.0
        if self._patient and self._connection.is_blocked:
            since = now
        waiting: list[float] = []
        for sent in tuple(self._sent.values()):
            if sent.told is None:
                continue
            if (due := max(sent.letter.since, since) + self._timeout) <= now:
                sent.answer(Late())
            else:
                waiting.append(due)
        if len(self._sent) - len(waiting) > UNANSWERED_KEPT:
            self._is_open = False
        if waiting:
            self._look_at(min(waiting))
        elif not self._is_open:
            self._ending = asyncio.create_task(self.end())

    # --- what comes in --------------------------------------------------------------------------

    def frame(self, kind: int, rest: bytes) -> bool:
        """A frame of the channel; whether it was for us."""
        if kind != METHOD:
            return self._returning is not None and self._content(kind, rest)
        what = rest[:4]
        if what == ACK:
            self._confirm(int.from_bytes(rest[4:12], "big"), rest[12] & 1, None)
        elif what == NACK:
            self._confirm(int.from_bytes(rest[4:12], "big"), rest[12] & 1, Nacked())
        elif what == RETURN:
            self._returning = rest[7 + rest[6] : -1]
        else:
            if what == CHANNEL_CLOSE:
                self._is_open = False
            return False
        return True

    def _confirm(self, tag: int, multiple: int, error: NotConfirmed | None) -> None:
        if error is None:
            self.has_stored = True
        if not multiple:
            self._answer(tag, error)
            return
        for one in range(next(iter(self._sent), tag + 1), tag + 1):
            self._answer(one, error)

    def _answer(self, tag: int, error: NotConfirmed | None) -> None:
        sent = self._sent.pop(tag, None)
        if sent is not None:
            if sent.letter.mark:
                del self._marks[sent.letter.mark]
            sent.answer(sent.error or error)

    def _content(self, kind: int, rest: bytes) -> bool:
        """Of a returned message. Its ack comes behind it, and no sooner may its mark be used again."""
        if kind == HEADER:
            self._left = int.from_bytes(rest[4:12], "big")
            assert self._returning is not None
            found = self._marks.get(
                self._returning + Properties.decode(rest[12:-1]).raw("message_id")
            )
            if found is None:
                self._doubt()
            else:
                found.error = Returned()
        else:
            self._left -= len(rest) - 1
        if self._left <= 0:
            self._returning = None
        return True

    def _doubt(self) -> None:
        """One was returned, and it cannot be told which: so of none may be told that it is stored."""
        cause = amqp.ChannelInvalidStateError("a message was returned that nobody knows")
        for sent in self._sent.values():
            doubt = Lost(cause, over_another=False) if sent.letter.mark else Returned()
            sent.error = sent.error or doubt

    def _closed(self, closing: asyncio.Future[object]) -> None:
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        cause = None if closing.cancelled() else closing.exception()
        if not isinstance(cause, Exception):
            cause = amqp.ChannelInvalidStateError("the broker did not answer")
        left, self._sent, self._marks = list(self._sent.values()), {}, {}
        is_refusal = isinstance(cause, _REFUSALS)
        for sent in left:
            is_its_own = is_refusal and (
                len(left) == 1
                # Nothing ever went to this exchange.
                or (not self.has_stored and not isinstance(cause, amqp.ChannelPreconditionFailed))
                or f"size {len(sent.letter.body)} " in words(cause)
            )
            error = Rejected(cause) if is_its_own else Lost(cause, over_another=is_refusal)
            sent.answer(sent.error or error)


async def may_publish(connection: Connection) -> None:
    """Have the broker check that we may publish to its queues, and publish to none; what aiormq raises
    where we may not."""
    confirms = await Confirms.open(connection, RPC_TIMEOUT)
    try:
        await confirms.send(Letter("", f"nobody.{os.urandom(16).hex()}", b"\0\0", None, b""))
    except Returned:
        pass  # no queue has that name, and the exchange was asked
    except (Rejected, Lost) as error:
        raise error.cause from None
    except Late:
        raise TimeoutError from None
    finally:
        await confirms.end()


def _settle(answer: asyncio.Future[None], error: NotConfirmed | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
