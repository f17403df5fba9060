"""The broker: connect to it; publish and wait for the confirm.

Everything that depends on how aio-pika and aiormq behave stands here (versions 10.2 and 7.2).
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import ssl
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from operator import length_hint
from typing import Any, Final, TypeVar, overload

import aio_pika
import aiormq.exceptions as amqp
import pydantic_core
from aio_pika.connection import make_url
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from aiormq.connection import Connection as Transport
from aiormq.connection import SSLContextProvider, TransportFactory
from pamqp.commands import Basic
from yarl import URL

from rabbit_tasks import consumer as consumers
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import ConnectError, PublishError, Refused, Unconfirmed, Unroutable
from rabbit_tasks.message import OURS, is_brokers
from rabbit_tasks.properties import FRAME_OVERHEAD, Properties
from rabbit_tasks.settings import PREFIX, Address, Settings

B = TypeVar("B")

RPC_TIMEOUT: Final = 10.0
"""Seconds for the broker to answer a declare, a consume, an opened channel."""
ALONE_FROM: Final = 1_048_576
"""Bytes of a body from which a message is published on a channel of its own."""
UNANSWERED_KEPT: Final = 100_000
CLOSE_TIMEOUT: Final = 3.0
"""Seconds for the broker to answer a close before the socket is dropped."""

LOST: Final = (ConnectionError, amqp.AMQPConnectionError, amqp.ChannelInvalidStateError,
               amqp.ChannelClosed)  # fmt: skip
"""What a broker call raises when its channel or connection is gone."""


def is_cancelled() -> bool:
    """Whether a CancelledError is meant for the running task.

    The client library raises one as well out of calls whose connection was stuck and dropped.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# --- connect ------------------------------------------------------------------------------------


class Connection(aio_pika.Connection):
    """A plain connection whose deliveries keep their properties as bytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address: Address | None = None
        self._factory = _RawProperties()
        self.kwargs["transport_factory"] = self._factory

    @property
    def close_reason(self) -> tuple[int, str] | None:
        """Code and text with which the broker closed the connection, if it said any."""
        return self._factory.close_reason

    @property
    def vhost(self) -> str:
        return self.address.vhost if self.address else "/"

    @property
    def permit(self) -> str:
        """The command that gives our user every permission in our virtual host."""
        user = self.address.user if self.address else "guest"
        return (
            f"rabbitmqctl set_permissions -p {shlex.quote(self.vhost)} {shlex.quote(user)} "
            "'.*' '.*' '.*'"
        )

    @property
    def _amqp(self) -> Transport:
        if self.transport is None:
            raise amqp.ChannelInvalidStateError("connection closed")
        assert isinstance(self.transport.connection, Transport)
        return self.transport.connection

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone (aio-pika's own `is_closed` stays False on loss)."""
        return self.transport is None or self._amqp.is_closed

    @property
    def frame_max(self) -> int:
        """The largest frame, in bytes, that the broker takes."""
        return self._amqp.connection_tune.frame_max or 131_072

    @property
    def server_version(self) -> str:
        return str(self._amqp.server_properties.get("version", "?"))

    async def unblocked(self) -> None:
        """Wait while a memory or disk alarm of the broker holds publishers back."""
        await self._amqp.ready()

    async def lost(self) -> None:
        """Wait until the connection is gone."""
        with suppress(Exception):
            await asyncio.wait([self._amqp.closing])

    async def open(self, *, confirms: bool = False) -> Channel:
        """A new channel; a returned message raises."""
        try:
            async with asyncio.timeout(RPC_TIMEOUT):
                channel = await self._amqp.channel(
                    publisher_confirms=confirms, on_return_raises=True
                )
        except RuntimeError as error:  # the library's word for a connection that is closed
            raise amqp.ChannelInvalidStateError(*error.args) from None
        assert isinstance(channel, Channel)
        return channel

    async def end(self) -> None:
        """Close; a broker that does not answer within 3 s loses its socket."""
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self.close()
        self._factory.abort()


class _RawProperties(TransportFactory):
    """Opens sockets whose reader hides the property list from the client library's decoder.

    That decoder loses types and closes the connection on text that is not UTF-8 or a timestamp
    beyond the year 9999, and then again on the redelivery.
    """

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._reader: _FrameReader | None = None

    @property
    def close_reason(self) -> tuple[int, str] | None:
        """The broker's words when it closed the connection."""
        return self._reader.close_reason if self._reader else None

    async def create(
        self, url: URL, **kwargs: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        provider: SSLContextProvider = kwargs.pop("ssl_context_provider")
        context = await provider.get_context() if url.scheme == "amqps" else None
        assert url.host is not None
        assert url.port is not None
        loop = asyncio.get_running_loop()
        reader = _FrameReader(limit=2**20, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(
            lambda: protocol, url.host, url.port, ssl=context, **kwargs
        )
        self._reader = reader
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return reader, self._writer

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()


_METHOD, _HEADER = 1, 2
_RETURN: Final = b"\x00\x3c\x00\x32"
_CLOSE: Final = b"\x00\x0a\x00\x32"
_HEADERS_ONLY: Final = (1 << 13).to_bytes(2, "big")
_HEADERS_AND_ID: Final = (1 << 13 | 1 << 7).to_bytes(2, "big")


class _FrameReader(asyncio.StreamReader):
    """Hands out frames; in a content header, the property list is one header of bytes.

    A returned message's header also carries the id by which the library finds its publish.
    """

    def __init__(self, *, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=limit, loop=loop)
        self.close_reason: tuple[int, str] | None = None
        self._frame = b""
        self._at = 0
        self._returned: set[bytes] = set()

    async def readexactly(self, n: int) -> bytes:
        if self._at == len(self._frame):
            self._frame, self._at = await self._next(), 0
        start, self._at = self._at, self._at + n
        return self._frame[start : self._at]

    async def _next(self) -> bytes:
        head = await super().readexactly(7)
        if head[0] > 8:  # not AMQP 0-9-1: the library says so by the first bytes
            return head
        rest = await super().readexactly(int.from_bytes(head[3:], "big") + 1)
        if head[0] == _METHOD and rest[:4] == _RETURN:
            self._returned.add(head[1:3])
        if head[0] == _METHOD and rest[:4] == _CLOSE:
            # The library loses this text when it waits for another frame, as for Open-Ok.
            text = rest[7 : 7 + rest[6]].decode("utf-8", "replace")
            self.close_reason = (int.from_bytes(rest[4:6], "big"), text)
        if head[0] != _HEADER:
            return head + rest
        raw = rest[12:-1]
        table = b"\0x" + len(raw).to_bytes(4, "big") + raw
        fields = len(table).to_bytes(4, "big") + table
        flags = _HEADERS_ONLY
        if head[1:3] in self._returned:
            self._returned.discard(head[1:3])
            mark = _mark(Properties.decode(raw)).encode()
            flags, fields = _HEADERS_AND_ID, fields + bytes([len(mark)]) + mark
        payload = rest[:12] + flags + fields
        return head[:3] + len(payload).to_bytes(4, "big") + payload + rest[-1:]


def properties_of(message: DeliveredMessage) -> Properties:
    """The properties that came with a delivery on one of our connections."""
    headers: Mapping[str, Any] = message.header.properties.headers or {}
    return Properties.decode(bytes(headers[""]))


class _Wire(Basic.Properties):
    """Properties that are written as the bytes they are."""

    def __init__(self, properties: Properties) -> None:
        super().__init__(message_id=_mark(properties))
        self._bytes = properties.encode()

    def marshal(self) -> bytes:
        return self._bytes


def _mark(properties: Properties) -> str:
    """The id by which the library finds a returned message's publish; never empty, short enough."""
    text = properties.text("message_id") or ""
    if text.isascii() and 0 < len(text) < 200:
        return text
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


async def connect(settings: Settings, purpose: str) -> Connection:
    """A connection to the first node that lets us in; `purpose` is seen in the broker's lists.

    Bounded by `connect_timeout`. ConnectError says for each node what was wrong and which setting
    decides it; it is permanent where every node said no for good.
    """
    failures: list[ConnectError] = []
    addresses = settings.addresses()
    context = settings.tls() if any(address.tls for address in addresses) else None
    deadline = asyncio.get_running_loop().time() + settings.connect_timeout.total_seconds()
    for i, address in enumerate(addresses):
        share = max(0.1, deadline - asyncio.get_running_loop().time()) / (len(addresses) - i)
        try:
            return await _connect(settings, address, context, purpose, share)
        except ConnectError as failure:
            failures.append(failure)
    raise ConnectError(
        "; ".join(dict.fromkeys(str(failure) for failure in failures)),
        permanent=all(failure.permanent for failure in failures),
    )


async def _connect(
    settings: Settings, address: Address, tls: ssl.SSLContext | None, purpose: str, share: float
) -> Connection:
    connection = Connection(
        make_url(
            host=address.host,
            port=address.port,
            login=address.user,
            password=address.password,
            virtualhost=address.vhost,
            ssl=address.tls,
            heartbeat=int(settings.heartbeat.total_seconds()),
        ),
        ssl_context=tls,
        client_properties={
            "connection_name": f"rabbit-tasks {purpose}", "product": "rabbit_tasks",
        },
    )  # fmt: skip
    try:
        async with asyncio.timeout(share):
            await connection.connect()
        connection.address = address
        return connection
    except TimeoutError:
        raise ConnectError(
            f"{address} did not answer within {share:.1f} s (RABBIT_TASKS_URL; is it a RabbitMQ "
            f"{'TLS ' if address.tls else ''}port? is a firewall in between?)"
        ) from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ConnectError(f"{address} closed the connection (RABBIT_TASKS_URL)") from None
    except (OSError, amqp.AMQPError, RuntimeError) as error:
        raise _why(address, error, connection.close_reason) from None


def _why(address: Address, error: Exception, close: tuple[int, str] | None) -> ConnectError:
    """A refused connection in one line, with the setting that decides it."""
    text = " ".join(str(part) for part in error.args)
    code, said = close or (0, "")
    if code == 403 or isinstance(error, amqp.ProbableAuthenticationError):
        return ConnectError(
            f"{address} refused user {address.user!r} or its password "
            f"(RABBIT_TASKS_URL, RABBIT_TASKS_USER, RABBIT_TASKS_PASSWORD)",
            permanent=True,
        )
    if code == 530 and "not found" in said:
        return ConnectError(
            f"{address} has no virtual host {address.vhost!r} (RABBIT_TASKS_URL, "
            f"RABBIT_TASKS_VHOST); create it: rabbitmqctl add_vhost {shlex.quote(address.vhost)}",
            permanent=True,
        )
    if code == 530:
        return ConnectError(
            f"{address} does not let user {address.user!r} into virtual host {address.vhost!r} "
            f"(RABBIT_TASKS_USER, RABBIT_TASKS_VHOST): {said}; "
            f"allow it: rabbitmqctl set_permissions -p {shlex.quote(address.vhost)} "
            f"{shlex.quote(address.user)} '.*' '.*' '.*'",
            permanent=True,
        )
    if code:
        return ConnectError(f"{address} closed the connection: {code} {said} (RABBIT_TASKS_URL)")
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectError(
            f"{address} has a certificate we do not trust: {error.verify_message} "
            "(RABBIT_TASKS_TLS_CA, RABBIT_TASKS_TLS_CHECK_HOST)",
            permanent=True,
        )
    if isinstance(error, ssl.SSLError):
        return ConnectError(
            f"{address}: TLS failed, {error.reason or text} (amqps or amqp in RABBIT_TASKS_URL? "
            "RABBIT_TASKS_TLS_CERT and RABBIT_TASKS_TLS_KEY, if the broker asks for a certificate?)"
        )
    if isinstance(error, amqp.ProtocolSyntaxError | amqp.IncompatibleProtocolError):
        return ConnectError(f"{address} does not speak AMQP 0-9-1 (the port in RABBIT_TASKS_URL)")
    if address.tls and isinstance(error, amqp.AMQPError):
        # With TLS 1.3 our side of the handshake is done before the broker looks at our certificate.
        return ConnectError(
            f"{address} closed the connection after the TLS handshake (RABBIT_TASKS_TLS_CERT and "
            "RABBIT_TASKS_TLS_KEY, if it asks for a certificate; else the port in RABBIT_TASKS_URL)"
        )
    return ConnectError(f"{address} cannot be reached: {text or error!r} (RABBIT_TASKS_URL)")


@asynccontextmanager
async def connected(settings: Settings, purpose: str) -> AsyncIterator[Connection]:
    """A connection for the length of a block."""
    connection = await connect(settings, purpose)
    try:
        yield connection
    finally:
        await connection.end()


# --- publish ------------------------------------------------------------------------------------


class Publisher:
    """Publishes and waits for the confirm.

    Open one per process with `Publisher.open` and keep it. It may be used from many tasks at once;
    a lost connection is opened again at the next publish.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._timeout = settings.publish_timeout.total_seconds()
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        # One channel per exchange: publishing to a missing exchange closes the channel under every
        # other publish on it, whether stored or not.
        self._channels: dict[str, Channel] = {}
        self._in_flight: dict[str, asyncio.Future[None]] = {}
        self._unanswered: set[str] = set()

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
            if self._connection is None or self._connection.is_lost:
                self._channels.clear()
                self._unanswered.clear()
                if self._connection is not None:
                    await self._connection.end()
                self._connection = await connect(self._settings, "publisher")
            return self._connection

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.end()

    @overload
    async def publish(
        self, to: type[Consumer[B]] | Consumer[B], body: B, *, message_id: str | None = ...,
        headers: Mapping[str, Any] | None = ..., **properties: Any,
    ) -> str: ...  # fmt: skip
    @overload
    async def publish(
        self, to: str, body: object, *, message_id: str | None = ...,
        headers: Mapping[str, Any] | None = ..., **properties: Any,
    ) -> str: ...  # fmt: skip
    async def publish(
        self,
        to: type[Consumer[Any]] | Consumer[Any] | str,
        body: object,
        *,
        message_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
        **properties: Any,
    ) -> str:
        """Publish to a consumer class, or to a queue by its name; returns the message's id.

        Returns when the broker has confirmed: the message is in its queue, on disk. By name, bytes
        and str go as they are, anything else as JSON.

        message_id  default: a new UUID. Give your own where you may publish the same thing twice
        headers     values of the types AMQP has; ours and the broker's (x-retry-count, x-death …)
                    are left out, so that a handler may pass on what it got
        properties  content_type, content_encoding, correlation_id, reply_to, type, app_id,
                    priority (0 to 255), user_id, expiration (milliseconds, as text)

        Raises TypeError where the body is not what the consumer takes, ValueError for a header AMQP
        cannot carry, and PublishError: Unroutable, Refused, or Unconfirmed.
        """
        queue, raw, content_type = _encode(to, body)
        message_id = message_id or uuid.uuid4().hex
        foreign = {
            name: value
            for name, value in (headers or {}).items()
            if name not in OURS and (name in ("CC", "BCC") or not is_brokers(name))
        }
        values = {"content_type": content_type, **properties}
        values |= {"message_id": message_id, "timestamp": datetime.now(UTC), "delivery_mode": 2}
        await self.send("", queue, raw, Properties.of(foreign, **values))
        return message_id

    async def publish_many(
        self,
        to: type[Consumer[B]] | Consumer[B] | str,
        bodies: Iterable[B],
        *,
        window: int = 200,
        headers: Mapping[str, Any] | None = None,
        **properties: Any,
    ) -> list[str]:
        """Publish many, `window` of them unconfirmed at a time; returns their ids in order.

        Stops at the first failure, waits for what is on its way, and raises that failure; its notes
        say how many were confirmed. `bodies` may be a generator: it is read as fast as the broker
        confirms.
        """
        remaining = enumerate(bodies)
        ids: dict[int, str] = {}
        failures: list[BaseException] = []

        async def pump() -> None:
            while not failures:
                try:
                    i, body = next(remaining)
                    ids[i] = await self.publish(to, body, headers=headers, **properties)
                except StopIteration:
                    return
                except Exception as failure:
                    failures.append(failure)

        async with asyncio.TaskGroup() as pumps:
            for _ in range(max(1, min(window, length_hint(bodies, window)))):
                pumps.create_task(pump())
        if failures:
            failures[0].add_note(f"{len(ids)} were confirmed before this one")
            raise failures[0]
        return [ids[i] for i in sorted(ids)]

    async def send(self, exchange: str, key: str, body: bytes, properties: Properties) -> None:
        """Publish with confirm and mandatory; a returned or refused message is an error.

        Returns when the broker has confirmed. Raises PublishError.
        """
        mark = _mark(properties)
        # The library finds returned messages by their id. With one id twice in flight on a channel
        # it would tell the one that no queue took that it was stored.
        while (other := self._in_flight.get(mark)) is not None:
            await asyncio.wait([other])
        done = self._in_flight[mark] = asyncio.get_running_loop().create_future()
        # Nor must the answer to one that was given up reach the next of that id on its channel.
        alone = mark in self._unanswered or _may_be_refused(body, properties)
        try:
            await self._send(exchange, key, body, properties, alone=alone)
        except (Unconfirmed, asyncio.CancelledError):
            if len(self._unanswered) < UNANSWERED_KEPT:
                self._unanswered.add(mark)
            raise
        finally:
            del self._in_flight[mark]
            done.set_result(None)

    async def _send(
        self, exchange: str, key: str, body: bytes, properties: Properties, *, alone: bool
    ) -> None:
        where = f"{exchange!r} with key {key!r}" if exchange else f"queue {key!r}"
        channel: Channel | None = None
        sent = False
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    if alone:
                        connection = await self.connect()
                        channel = await connection.open(confirms=True)
                    else:
                        connection, channel = await self._channel(exchange)
                    # The frame with the properties cannot be split; over the limit the broker
                    # closes the connection (501), with everything else that is on it.
                    if properties.frame_size() > connection.frame_max:
                        raise Refused(
                            f"{where}: properties and headers take {properties.frame_size()} bytes,"
                            f" more than the {connection.frame_max - FRAME_OVERHEAD} of a frame"
                        )
                    await connection.unblocked()
                    try:
                        sent = True
                        await channel.basic_publish(
                            body, exchange=exchange, routing_key=key, properties=_Wire(properties),
                            mandatory=True, wait=False,
                        )  # fmt: skip
                        return
                    except amqp.ChannelInvalidStateError:
                        sent = False  # closed before anything was written: open another
                        await asyncio.sleep(0)
        except TimeoutError:
            waited = f"within {self._timeout:g} s ({PREFIX}PUBLISH_TIMEOUT)"
            if sent:
                raise Unconfirmed(f"{where}: not confirmed {waited}; it may be stored") from None
            raise Unconfirmed(
                f"{where}: nothing was sent {waited}; if the broker is up, it holds publishers back: "
                "rabbitmq-diagnostics alarms",
                maybe_stored=False,
            ) from None
        except ConnectError as error:
            raise Unconfirmed(f"{where}: nothing was sent, {error}", maybe_stored=False) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise Unconfirmed(
                f"{where}: connection lost before the confirm", maybe_stored=sent
            ) from None
        except amqp.ChannelPreconditionFailed as error:
            if alone or f"size {len(body)} " in _words(error):
                raise Refused(f"{where}: {_words(error)}") from None
            raise Unconfirmed(
                f"{where}: channel closed over another message before the confirm ({_words(error)})"
            ) from None
        except (amqp.AMQPError, OSError, RuntimeError) as error:
            raise _refusal(where, exchange, error, sent=sent) from None
        finally:
            if alone and channel is not None:
                with suppress(Exception):
                    await channel.close(timeout=CLOSE_TIMEOUT)

    async def _channel(self, exchange: str) -> tuple[Connection, Channel]:
        connection, channel = self._connection, self._channels.get(exchange)
        if connection is not None and channel is not None and not channel.is_closed:
            return connection, channel
        connection = await self.connect()
        async with self._opening:
            channel = self._channels.get(exchange)
            if channel is None or channel.is_closed:
                channel = self._channels[exchange] = await connection.open(confirms=True)
        return connection, channel


def _may_be_refused(body: bytes, properties: Properties) -> bool:
    """Whether the broker may close the channel over this message (406, 3.10 to 4.3).

    Every unconfirmed publish on that channel is then told the same, stored or not: so such a message
    goes on a channel of its own. (The largest message is the broker's to configure, 16 MiB by
    default.)
    """
    return (
        len(body) > ALONE_FROM
        or properties.text("expiration") is not None
        or properties.text("user_id") is not None
        or any(key in (b"\2CC", b"\3BCC") for key, _ in properties.table)
    )


def _words(error: Exception) -> str:
    return " ".join(str(part) for part in error.args if part is not None)


def _refusal(where: str, exchange: str, error: Exception, *, sent: bool) -> PublishError:
    text = _words(error)
    declare = "rabbit-tasks topology declare"
    match error:
        case amqp.PublishError():
            missing = (
                "that binding or its queue is missing" if exchange else "there is no such queue"
            )
            return Unroutable(f"{where}: {missing}; create it: {declare}")
        case amqp.DeliveryError():
            return Refused(f"{where}: refused (full, or no majority of its nodes is up)")
        case amqp.ChannelNotFoundEntity():
            return Unroutable(f"{where}: {text}; create it: {declare}")
        case amqp.ChannelAccessRefused():
            return Refused(f"{where}: {text}; give the user write permission on it")
    lost = f"{where}: connection lost before the confirm ({text or error!r})"
    return Unconfirmed(lost, maybe_stored=sent)


def _encode(to: type[Consumer[Any]] | Consumer[Any] | str, body: object) -> tuple[str, bytes, str]:
    if isinstance(to, str):
        if isinstance(body, bytes):
            return to, body, "application/octet-stream"
        if isinstance(body, str):
            return to, body.encode(), "text/plain; charset=utf-8"
        return to, pydantic_core.to_json(body), "application/json"
    kind = to if isinstance(to, type) else type(to)
    return kind.queue, *consumers.encode(kind, body)
