"""Publish, and wait for the confirm."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, Final, TypedDict, TypeVar, Unpack, overload

import aiormq.exceptions as amqp
import pydantic_core

from rabbit_tasks import consumer as consumers
from rabbit_tasks.broker import (
    CLOSE_TIMEOUT,
    RPC_TIMEOUT,
    Connection,
    connect,
    is_cancelled,
    words,
)
from rabbit_tasks.confirms import Confirms, Late, Letter, Lost, Nacked, Rejected, Returned
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import ConnectError, Refused, Unconfirmed, Unroutable
from rabbit_tasks.message import OURS, is_brokers
from rabbit_tasks.properties import FRAME_OVERHEAD, Properties, Stencil
from rabbit_tasks.settings import PREFIX, Settings

B = TypeVar("B")

ALONE_FROM: Final = 1_048_576
"""Bytes of a body from which a message is published on a channel of its own."""
AHEAD: Final = 2**20
"""Bytes that the socket has not taken yet, with which a publish waits until it has."""


class PublishProperties(TypedDict, total=False):
    """What a publisher may say of a message beside its headers; text of at most 255 bytes.

    priority is from 0 to 255, expiration in milliseconds as text, user_id one's own login.
    """

    content_type: str
    content_encoding: str
    correlation_id: str
    reply_to: str
    type: str
    app_id: str
    user_id: str
    expiration: str
    priority: int


class Publisher:
    """Publishes and waits for the confirm.

    Open one per process with `Publisher.open` and keep it. It may be used from many tasks at once;
    a lost connection is opened again at the next publish.

    patient     the time for which the broker holds publishers back (a memory or disk alarm) does not
                count against `publish_timeout`: such a publish waits until the alarm is over
    told        what the broker's lists tell of its connection, beside its name
    """

    def __init__(
        self,
        settings: Settings,
        *,
        patient: bool = False,
        told: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._told = told
        self._timeout = settings.publish_timeout.total_seconds()
        self._patient = patient
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        # One channel per exchange: publishing to a missing exchange closes the channel under every
        # other publish on it, whether stored or not.
        self._channels: dict[str, Confirms] = {}
        self._alone: set[Confirms] = set()
        self._next_alone = asyncio.Lock()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings | None = None) -> AsyncIterator[Publisher]:
        """Connect, and close in the end. ConnectError where the broker does not let us in."""
        publisher = cls(settings or Settings())
        await publisher.connect()
        try:
            yield publisher
        finally:
            await publisher.close()

    async def connect(self) -> Connection:
        """The connection, opened again if it was lost."""
        async with self._opening:
            if self._closed:
                raise ConnectError("the publisher is closed: publish inside of its async with")
            if self._connection is None or self._connection.is_lost:
                self._channels.clear()
                if self._connection is not None:
                    await self._connection.end()
                self._connection = await connect(self._settings, "publisher", self._told)
            return self._connection

    async def close(self, within: float = 2 * CLOSE_TIMEOUT) -> None:
        """Wait for what is on its way, and close for good."""
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(within / 2):
                for confirms in (*self._channels.values(), *self._alone):
                    await confirms.settled()
        if self._connection is not None:
            await self._connection.end(within / 2)

    def abort(self) -> None:
        """Close for good, at once: what is on its way is told that the connection is lost."""
        self._closed = True
        if self._connection is not None:
            self._connection.abort()

    @overload
    async def publish(
        self, to: type[Consumer[B]] | Consumer[B], body: B, *, message_id: str | None = ...,
        headers: Mapping[str, Any] | None = ..., **properties: Unpack[PublishProperties],
    ) -> str: ...  # fmt: skip
    @overload
    async def publish(
        self, to: str, body: object, *, message_id: str | None = ...,
        headers: Mapping[str, Any] | None = ..., **properties: Unpack[PublishProperties],
    ) -> str: ...  # fmt: skip
    async def publish(
        self,
        to: type[Consumer[Any]] | Consumer[Any] | str,
        body: object,
        *,
        message_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        **properties: Unpack[PublishProperties],
    ) -> str:
        """Publish to a consumer class, or to a queue by its name; returns the message's id.

        Returns when the broker has confirmed: the message is in its queue, on disk. By name, bytes
        and str go as they are, anything else as JSON.

        message_id  default: 128 random bits in hex. Give your own where you may publish the same
                    thing twice
        headers     values of the types AMQP has; ours and the broker's (x-retry-count, x-death …)
                    are left out, so that a handler may pass on what it got
        properties  see PublishProperties

        Raises TypeError where the body is not what the consumer takes, ValueError for a header AMQP
        cannot carry, and PublishError: Unroutable, Refused, or Unconfirmed.
        """
        message_id = message_id or new_id()
        await self._send(self._letters(to, headers, properties)(body, message_id))
        return message_id

    async def publish_many(
        self,
        to: type[Consumer[B]] | Consumer[B] | str,
        bodies: Iterable[B],
        *,
        window: int = 200,
        headers: Mapping[str, Any] | None = None,
        **properties: Unpack[PublishProperties],
    ) -> list[str]:
        """Publish many, `window` of them unconfirmed at a time; returns their ids in order.

        Stops at the first failure, waits for what is on its way, and raises that failure; its notes
        say how many were confirmed. `bodies` may be a generator: it is read as fast as the broker
        confirms.
        """
        letter_of = self._letters(to, headers, properties)
        batch = _Batch(max(1, window))
        ids: list[str] = []
        where = ""
        try:
            try:
                for body in bodies:
                    ids.append(new_id())
                    letter = letter_of(body, ids[-1])
                    where = letter.where
                    if letter.alone:
                        batch.begin(self._send(letter))
                    else:
                        confirms = self._at_once(letter) or await self._ready(letter)
                        confirms.publish(letter, batch.told)
                        batch.on_their_way += 1
                    if batch.is_full:
                        await batch.fewer_than(batch.window)
                    if batch.error is not None:
                        break
            except Exception as error:
                batch.error = batch.error or error
            await batch.fewer_than(1)
        finally:
            batch.end()
            for confirms in self._channels.values():
                confirms.forget(batch.told)
        if batch.error is None:
            return ids
        failure = self._explained(where, batch.error)
        failure.add_note(f"{batch.confirmed} were confirmed before this one")
        raise failure

    async def send(self, exchange: str, key: str, body: bytes, properties: Properties) -> None:
        """Publish with confirm and mandatory; a returned or refused message is an error.

        Returns when the broker has confirmed. Raises PublishError.
        """
        alone = len(body) > ALONE_FROM or self._may_be_refused(properties)
        given = properties.encode(), properties.raw("message_id")
        await self._send(Letter(exchange, key, *given, body, alone=alone))

    # --- one message ----------------------------------------------------------------------------

    def _letters(
        self,
        to: type[Consumer[Any]] | Consumer[Any] | str,
        headers: Mapping[str, Any] | None,
        properties: PublishProperties,
    ) -> Callable[[object, str], Letter]:
        """What makes a message of a body and an id. What all of them share is encoded once."""
        stencils: dict[str, tuple[Stencil, bool]] = {}

        def letter(body: object, message_id: str) -> Letter:
            queue, raw, content_type = _encode(to, body)
            if content_type not in stencils:
                stencil = _stencil(content_type, headers, properties)
                stencils[content_type] = stencil, self._may_be_refused(stencil.properties)
            stencil, alone = stencils[content_type]
            given = stencil.fill(message_id, int(time.time()))
            return Letter("", queue, *given, raw, alone=alone or len(raw) > ALONE_FROM)

        return letter

    async def _send(self, letter: Letter) -> None:
        confirms = None if letter.alone else self._at_once(letter)
        if confirms is None:
            confirms = await self._ready(letter)
        try:
            await confirms.send(letter)
        except Exception as error:
            raise self._explained(letter.where, error) from None
        finally:
            if confirms in self._alone:
                self._alone.discard(confirms)
                await confirms.end()

    def _may_be_refused(self, properties: Properties) -> bool:
        """Whether the broker may close the channel over such a message (406, 3.10 to 4.3).

        Every unconfirmed publish on that channel is then told the same, stored or not: so it goes on a
        channel of its own; and so do large ones. (The largest message is the broker's to configure,
        16 MiB by default.)
        """
        address = self._connection.address if self._connection else None
        return (
            not re.fullmatch(r"\d{1,11}", properties.text("expiration") or "0")
            or properties.text("user_id") not in (None, address.user if address else None)
            or (
                b"CC" in properties.raw("headers")
                and any(key in (b"\2CC", b"\3BCC") for key, _ in properties.table)
            )
        )

    def _at_once(self, letter: Letter) -> Confirms | None:
        """The channel that takes it now; None where something must be waited for first."""
        confirms, connection = self._channels.get(letter.exchange), self._connection
        if (
            connection is None
            or confirms is None
            or self._closed
            or not confirms.is_open
            or connection.is_blocked
            or connection.unsent > AHEAD
            or confirms.of(letter.mark) is not None
            or letter.frame_size > connection.frame_max
        ):
            return None
        return confirms

    async def _ready(self, letter: Letter) -> Confirms:
        """A channel that takes it, once there is one. PublishError: nothing was sent."""
        where = letter.where
        limit = asyncio.timeout(None)
        try:
            while True:
                limit = asyncio.timeout_at(letter.since + self._timeout)
                try:
                    async with limit:
                        return await self._channel(letter)
                except TimeoutError:
                    if not limit.expired() or not await self._was_blocked(letter.since):
                        raise
                    letter.since = asyncio.get_running_loop().time()
        except TimeoutError:
            waited = self._waited
            if not limit.expired():
                waited = f", the broker opened no channel within {RPC_TIMEOUT:g} s"
            text = f"{where}: nothing was sent{waited}"
        except ConnectError as error:
            text = f"{where}: nothing was sent, {error}"
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            text = f"{where}: connection lost before the confirm"
        except (amqp.AMQPError, OSError, RuntimeError) as error:
            text = f"{where}: connection lost before the confirm ({words(error)})"
        raise Unconfirmed(text, maybe_stored=False)

    async def _was_blocked(self, since: float) -> bool:
        """Whether the broker held publishers back in this time, which does not count; wait while it
        does."""
        if not self._patient or self._connection is None:
            return False
        if self._connection.is_blocked:
            await self._connection.unblocked()
            return True
        return self._connection.free_since > since

    async def _channel(self, letter: Letter) -> Confirms:
        alone = letter.alone
        while True:
            connection = await self._connected(letter)
            if alone:
                # One after the other: of large bodies no more than one waits for the socket.
                async with self._next_alone:
                    while connection.unsent > AHEAD:
                        await connection.drained()
                    own = await Confirms.open(connection, self._timeout, patient=self._patient)
                if not own.is_open:
                    continue
                self._alone.add(own)
                return own
            confirms = await self._shared(connection, letter.exchange)
            if (sent := confirms.of(letter.mark)) is not None:
                # With one id twice in flight on a channel, nothing tells which of them is returned.
                # Nor must the answer to one that was given up reach the next of that id.
                alone = sent.told is None
                await confirms.answered(sent)
            elif connection.unsent > AHEAD:
                await connection.drained()
            elif confirms.is_open and not connection.is_blocked:
                return confirms

    async def _connected(self, letter: Letter) -> Connection:
        if self._connection is not None and self._is_blocked:
            # (Nor would opening a channel on it be answered.)
            await self._connection.unblocked()
        connection = await self.connect()
        # The frame with the properties cannot be split; over the limit the broker closes the
        # connection (501), with everything else that is on it.
        if letter.frame_size > connection.frame_max:
            raise Refused(
                f"{letter.where}: properties and headers take {letter.frame_size} bytes, more than the "
                f"{connection.frame_max - FRAME_OVERHEAD} of a frame"
            )
        return connection

    async def _shared(self, connection: Connection, exchange: str) -> Confirms:
        """The channel of all messages to this exchange."""
        async with self._opening:
            confirms = self._channels.get(exchange)
            if confirms is None or not confirms.is_open:
                confirms = await Confirms.open(connection, self._timeout, patient=self._patient)
                self._channels[exchange] = confirms
        return confirms

    @property
    def _is_blocked(self) -> bool:
        return self._connection is not None and self._connection.is_blocked

    @property
    def _waited(self) -> str:
        waited = f" within {self._timeout:g} s ({PREFIX}PUBLISH_TIMEOUT)"
        if self._is_blocked:
            waited += "; the broker holds publishers back: rabbitmq-diagnostics alarms"
        return waited

    def _explained(self, where: str, error: BaseException) -> BaseException:
        """What became of a message, as a PublishError; any other error as it is."""
        declare = "rabbit-tasks topology declare"
        match error:
            case Returned():
                missing = "that binding or its queue is missing"
                if where.startswith("queue "):
                    missing = "there is no such queue"
                return Unroutable(f"{where}: {missing}; mend its name, or create it: {declare}")
            case Nacked():
                return Refused(f"{where}: {error}")
            case Late():
                return Unconfirmed(f"{where}: not confirmed{self._waited}; it may be stored")
            case Rejected(cause=amqp.ChannelNotFoundEntity() as cause):
                return Unroutable(f"{where}: {words(cause)}; create it: {declare}")
            case Rejected(cause=amqp.ChannelAccessRefused() as cause):
                return Refused(f"{where}: {words(cause)}; give the user write permission on it")
            case Rejected(cause=cause):
                return Refused(f"{where}: {words(cause)}")
            case Lost(cause=cause, over_another=True):
                why = f"channel closed over another message before the confirm ({words(cause)})"
                return Unconfirmed(f"{where}: {why}")
            case Lost(cause=cause):
                return Unconfirmed(f"{where}: connection lost before the confirm ({words(cause)})")
        return error


class _Batch:
    """The messages of one `publish_many` that are on their way."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.on_their_way = 0
        self.confirmed = 0
        self.error: BaseException | None = None
        """The first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        return self.on_their_way >= self.window

    def begin(self, sending: Coroutine[Any, Any, None]) -> None:
        """One that needs a channel of its own, and so a task."""
        task = asyncio.create_task(sending)
        self._tasks.add(task)
        self.on_their_way += 1
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.told(asyncio.CancelledError() if task.cancelled() else task.exception())

    def told(self, error: BaseException | None) -> None:
        """What became of one."""
        self.on_their_way -= 1
        if error is None:
            self.confirmed += 1
        elif self.error is None:
            self.error = error
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def fewer_than(self, count: int) -> None:
        """Wait until no more are on their way."""
        while self.on_their_way >= count:
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


def _stencil(
    content_type: str, headers: Mapping[str, Any] | None, properties: PublishProperties
) -> Stencil:
    if not headers and not properties:
        return _plain(content_type)
    foreign = {name: value for name, value in (headers or {}).items() if not _is_left_out(name)}
    given = {"content_type": content_type, **properties}
    return Stencil(Properties.of(foreign, **given, delivery_mode=2))


@lru_cache(4096)
def _is_left_out(name: str) -> bool:
    return str(name).startswith("x-") and (name in OURS or is_brokers(name))


@lru_cache(16)
def _plain(content_type: str) -> Stencil:
    return Stencil(Properties.of(content_type=content_type, delivery_mode=2))


def new_id() -> str:
    """128 random bits, in hex: `uuid.UUID` reads them, and makes its own for six times the price."""
    return os.urandom(16).hex()


def _encode(to: type[Consumer[Any]] | Consumer[Any] | str, body: object) -> tuple[str, bytes, str]:
    if isinstance(to, str):
        if isinstance(body, bytes):
            return to, body, "application/octet-stream"
        if isinstance(body, str):
            return to, body.encode(), "text/plain; charset=utf-8"
        return to, pydantic_core.to_json(body), "application/json"
    kind = to if isinstance(to, type) else type(to)
    return kind.queue, *consumers.encode(kind, body)
