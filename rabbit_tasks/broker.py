"""The broker: connect to it; publish and wait for the confirm.

What depends on how aio-pika 10.2 and aiormq 7.2 behave stands here and in frames.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import shlex
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from operator import length_hint
from typing import Any, Final, TypedDict, TypeVar, Unpack, overload

import aio_pika
import aiormq.exceptions as amqp
import pydantic_core
from aio_pika.connection import make_url
from aiormq.channel import Channel
from aiormq.connection import Connection as Transport

from rabbit_tasks import consumer as consumers
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import ConnectError, PublishError, Refused, Unconfirmed, Unroutable
from rabbit_tasks.frames import Frames, Tap, Wire, mark
from rabbit_tasks.message import OURS, is_brokers
from rabbit_tasks.properties import FRAME_OVERHEAD, Properties
from rabbit_tasks.settings import PREFIX, Address, Settings

B = TypeVar("B")

log = logging.getLogger("rabbit_tasks")

RPC_TIMEOUT: Final = 10.0
"""Seconds for the broker to answer a declare, a consume, an opened channel."""
ALONE_FROM: Final = 1_048_576
"""Bytes of a body from which a message is published on a channel of its own."""
UNANSWERED_KEPT: Final = 100_000
CLOSE_TIMEOUT: Final = 3.0
"""Seconds for the broker to answer a close before the socket is dropped.

(A channel's close that is not answered costs its connection: aiormq 7.2 sends it a second time when
it gives up, and a broker that comes to itself answers that with 504. Nothing public prevents it.)
"""
_PASSES: Final = 20
"""Of the event loop, for the client library's tasks to end after their socket is gone. It takes 5."""

LOST: Final = (ConnectionError, amqp.AMQPConnectionError, amqp.ChannelInvalidStateError,
               amqp.ChannelClosed)  # fmt: skip
"""What a broker call raises when its channel or connection is gone."""
_OBJECT: Final = re.compile(r"<(Connection|Channel)\b.* at 0x[0-9a-f]+>")
"""How the client library calls one in its errors, URL and all."""


def is_cancelled() -> bool:
    """Whether a CancelledError is meant for the running task.

    The client library raises one as well out of calls whose connection was stuck and dropped.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def words(error: BaseException) -> str:
    """What the broker or the client library says, without the exception's own ceremony."""
    text = " ".join(str(part) for part in error.args if part) or repr(error)
    return _OBJECT.sub(lambda found: found[1].lower(), text)


# --- connect ------------------------------------------------------------------------------------


def permit(vhost: str, user: str) -> str:
    """The command that gives a user every permission; and the one that tells the least of them. (That
    would take others away which the user has, so it is not the one to paste.)"""
    name = shlex.quote(user)
    return (
        f"rabbitmqctl set_permissions -p {shlex.quote(vhost)} {name} '.*' '.*' '.*'; or what the app "
        f"needs and no more: rabbit-tasks topology permissions --user {name}"
    )


class Connection(aio_pika.Connection):
    """A plain connection whose deliveries keep their properties as bytes.

    on_blocked  called with True when the broker begins to hold publishers back, with False when it
                takes messages again
    """

    def __init__(self, *args: Any, ip: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address: Address | None = None
        self.settings: Settings | None = None
        self.on_blocked: Callable[[bool], None] = lambda _: None
        self._blocked_at: float | None = None
        self._frames = Frames(ip)
        self._frames.on_blocked = self._tell_blocked
        self.kwargs["transport_factory"] = self._frames

    @property
    def close_reason(self) -> tuple[int, str] | None:
        """Code and text with which the broker closed the connection, if it said any."""
        return self._frames.close_reason

    @property
    def vhost(self) -> str:
        return self.address.vhost if self.address else "/"

    @property
    def permit(self) -> str:
        """What gives our user the permissions in our virtual host that it lacks."""
        return permit(self.vhost, self.address.user if self.address else "guest")

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
    def channel_max(self) -> int:
        """How many channels the broker lets us open; 65,535 where it sets no limit."""
        return self._amqp.connection_tune.channel_max or 65_535

    @property
    def server_version(self) -> str:
        return str(self._amqp.server_properties.get("version", "?"))

    @property
    def asked_heartbeat(self) -> int | None:
        """Seconds that the broker asked for; our setting is what counts. 0: it would do without."""
        return self._frames.asked_heartbeat

    @property
    def certificate_until(self) -> datetime | None:
        """When the broker's certificate expires; None without TLS."""
        until = self._frames.certificate.get("notAfter")
        return datetime.fromtimestamp(ssl.cert_time_to_seconds(until), UTC) if until else None

    @property
    def is_blocked(self) -> bool:
        """Whether a memory or disk alarm of the broker holds publishers back, as far as it said so."""
        return self._blocked_at is not None and not self.is_lost

    async def unblocked(self) -> None:
        """Wait while the broker holds publishers back; returns also when the connection is lost."""
        if self.is_blocked:
            lost, ready = self._amqp.closing, asyncio.create_task(self._amqp.ready())
            try:
                await asyncio.wait([lost, ready], return_when=asyncio.FIRST_COMPLETED)
            finally:
                lost.cancel()
                ready.cancel()

    def _tell_blocked(self, reason: str | None) -> None:
        if reason is not None and self._blocked_at is None:
            self._blocked_at = time.monotonic()
            log.warning(
                "%s holds publishers back (%s): what is published here waits, acks go on; look at: "
                "rabbitmq-diagnostics alarms", self.address, reason,
            )  # fmt: skip
        elif reason is None and self._blocked_at is not None:
            waited = time.monotonic() - self._blocked_at
            self._blocked_at = None
            log.warning("%s takes messages again, after %.1f s", self.address, waited)
        self.on_blocked(reason is not None)

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

    async def end(self, within: float = CLOSE_TIMEOUT) -> None:
        """Close; a broker that does not answer within so many seconds loses its socket."""
        # In a task of its own: the library waits for 2 s more where it is cancelled, for an answer.
        closing = asyncio.create_task(self.close())
        closing.add_done_callback(_seen)
        try:
            await asyncio.wait([closing], timeout=within)
        finally:
            self.abort()
            await _passes()
            closing.cancel()

    async def another(self, purpose: str) -> Connection:
        """One more connection, made as this one was: for what must not hold this one up."""
        assert self.settings is not None
        return await connect(self.settings, purpose)

    def hold(self, *, held: bool) -> None:
        """Read nothing more, or go on. Deliveries then wait in the socket and on the broker; so does
        every answer of it, but heartbeats go on."""
        self._frames.hold(held=held)

    def tap(self, channel: Channel, tap: Tap) -> None:
        """Have the frames of a channel, until it is closed, offered to somebody else before the
        client library."""
        number, taps = channel.number.to_bytes(2, "big"), self._frames.taps
        taps[number] = tap

        def end(_: object) -> None:
            if taps.get(number) is tap:  # (and not that of a later channel)
                del taps[number]

        channel.closing.add_done_callback(end)

    def write(self, frames: bytes) -> None:
        """Send whole frames, together with all that is written in this turn of the event loop.

        The library's own frames go beside them. Without effect where the connection is gone.
        """
        self._frames.write(frames)

    @property
    def unsent(self) -> int:
        """Bytes that were written and that the socket has not taken yet."""
        return self._frames.unsent

    def abort(self) -> None:
        """Drop the socket: whoever waits for the broker is told at once that it is gone."""
        self._frames.abort()


def _seen(task: asyncio.Task[None]) -> None:
    """However it ended, asyncio need not complain that nobody asked."""
    if not task.cancelled():
        task.exception()


async def _passes() -> None:
    """Let the client library's tasks end: of one that is left, asyncio would complain at the exit."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)


async def connect(
    settings: Settings, purpose: str, told: Mapping[str, str] | None = None
) -> Connection:
    """A connection to the first node that lets us in; `purpose` is seen in the broker's lists.

    `told` is as well, among the client's properties. (A few short texts: with all else that opens a
    connection, they go into one frame of 4,096 bytes.)

    The nodes are tried in an order drawn by lot, with every address that their names have at this
    moment: of many workers that lost one node, not all come to the same other one, and a node that
    hangs is not the first one each time.

    Bounded by `connect_timeout`. ConnectError says for each node what was wrong and which setting
    decides it; it is permanent where every node said no for good.
    """
    failures: list[ConnectError] = []
    addresses = settings.addresses()
    context = settings.tls() if any(address.tls for address in addresses) else None
    deadline = asyncio.get_running_loop().time() + settings.connect_timeout.total_seconds()
    nodes = random.sample(addresses, len(addresses))
    for i, address in enumerate(nodes):
        try:
            ips = await _resolve(address, _share(deadline, len(nodes) - i))
        except ConnectError as failure:
            failures.append(failure)
            continue
        for j, ip in enumerate(ips):
            share = _share(deadline, len(nodes) - i + len(ips) - j - 1)
            try:
                return await _connect(settings, address, ip, context, purpose, share, told or {})
            except ConnectError as failure:
                failures.append(failure)
    raise ConnectError(
        "; ".join(sorted({str(failure) for failure in failures})),
        permanent=all(failure.permanent for failure in failures),
    )


def _share(deadline: float, parts: int) -> float:
    return max(0.1, deadline - asyncio.get_running_loop().time()) / parts


async def _resolve(address: Address, within: float) -> list[str]:
    """The addresses of a node's name, asked for anew each time, in an order drawn by lot."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within):
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise ConnectError(
            f"{address} cannot be reached: no address for its name within {within:.1f} s "
            "(RABBIT_TASKS_URL; is the name server well?)"
        ) from None
    except (OSError, UnicodeError) as error:
        raise _why(address, error, None) from None
    ips = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
    return random.sample(ips, len(ips))


async def _connect(
    settings: Settings,
    address: Address,
    ip: str,
    tls: ssl.SSLContext | None,
    purpose: str,
    share: float,
    told: Mapping[str, str],
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
            **told, "connection_name": f"rabbit-tasks {purpose}", "product": "rabbit_tasks",
        },
        ip=ip,
    )  # fmt: skip
    connection.address = address
    connection.settings = settings
    handshake = asyncio.create_task(connection.connect())
    handshake.add_done_callback(_seen)
    is_in = False
    try:
        done, _ = await asyncio.wait([handshake], timeout=share)
        if not done:
            raise ConnectError(
                f"{address} did not answer within {share:.1f} s (RABBIT_TASKS_URL; is it a RabbitMQ "
                f"{'TLS ' if address.tls else ''}port? is a firewall in between?)"
            )
        if handshake.cancelled():
            raise ConnectError(f"{address} closed the connection (RABBIT_TASKS_URL)")
        handshake.result()
        is_in = True
        return connection
    except (OSError, amqp.AMQPError, RuntimeError) as error:
        raise _why(address, error, connection.close_reason) from None
    finally:
        if not is_in:
            # Its socket goes first: then whatever the library waits for ends by itself.
            connection.abort()
            handshake.cancel()
            await _passes()
            await connection.end(within=0)


def _why(address: Address, error: Exception, close: tuple[int, str] | None) -> ConnectError:
    """A refused connection in one line, with the setting that decides it."""
    text = words(error)
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
    if code == 530 and re.search(r"\b(limit|down)\b", said):
        # As many connections as are allowed, of which some may be those that we have just lost; or
        # a virtual host that is not up yet after the broker's start.
        return ConnectError(f"{address} lets nobody in for now (RABBIT_TASKS_URL): {said}")
    if code == 530:
        return ConnectError(
            f"{address} does not let user {address.user!r} into virtual host {address.vhost!r} "
            f"(RABBIT_TASKS_USER, RABBIT_TASKS_VHOST): {said}; "
            f"allow it: {permit(address.vhost, address.user)}",
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
    return ConnectError(f"{address} cannot be reached: {text} (RABBIT_TASKS_URL)")


@asynccontextmanager
async def connected(settings: Settings, purpose: str) -> AsyncIterator[Connection]:
    """A connection for the length of a block."""
    connection = await connect(settings, purpose)
    try:
        yield connection
    finally:
        await connection.end()


# --- publish ------------------------------------------------------------------------------------


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
        self._limits: set[asyncio.Timeout] = set()
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        # One channel per exchange: publishing to a missing exchange closes the channel under every
        # other publish on it, whether stored or not.
        self._channels: dict[str, Channel] = {}
        self._in_flight: dict[str, asyncio.Future[None]] = {}
        self._unanswered: set[str] = set()
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
                self._unanswered.clear()
                if self._connection is not None:
                    await self._connection.end()
                self._connection = await connect(self._settings, "publisher", self._told)
                self._connection.on_blocked = self._set_limits
                self._set_limits(False)
            return self._connection

    async def close(self, within: float = 2 * CLOSE_TIMEOUT) -> None:
        """Wait for what is on its way, and close for good."""
        self._closed = True
        if self._in_flight:
            await asyncio.wait(self._in_flight.values(), timeout=within / 2)
        if self._connection is not None:
            await self._connection.end(within / 2)

    def abort(self) -> None:
        """Close for good, at once: what is on its way is told that the connection is lost."""
        self._closed = True
        if self._connection is not None:
            self._connection.abort()

    def _set_limits(self, blocked: bool) -> None:
        if self._patient:
            now = asyncio.get_running_loop().time()
            for limit in self._limits:
                with suppress(RuntimeError):  # it has just expired
                    limit.reschedule(None if blocked else now + self._timeout)

    @property
    def _is_blocked(self) -> bool:
        return self._connection is not None and self._connection.is_blocked

    @property
    def _user(self) -> str | None:
        address = self._connection.address if self._connection else None
        return address.user if address else None

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

        message_id  default: a new UUID. Give your own where you may publish the same thing twice
        headers     values of the types AMQP has; ours and the broker's (x-retry-count, x-death …)
                    are left out, so that a handler may pass on what it got
        properties  see PublishProperties

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
        given = Properties.of(
            foreign,
            **{"content_type": content_type, **properties},
            message_id=message_id,
            timestamp=datetime.now(UTC),
            delivery_mode=2,
        )
        await self.send("", queue, raw, given)
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
        token = mark(properties)
        # The library finds returned messages by their id. With one id twice in flight on a channel
        # it would tell the one that no queue took that it was stored.
        while (other := self._in_flight.get(token)) is not None:
            await asyncio.wait([other])
        done = self._in_flight[token] = asyncio.get_running_loop().create_future()
        # Nor must the answer to one that was given up reach the next of that id on its channel.
        alone = token in self._unanswered or _may_be_refused(body, properties, self._user)
        try:
            await self._send(exchange, key, body, properties, alone=alone)
        except (Unconfirmed, asyncio.CancelledError):
            if len(self._unanswered) >= UNANSWERED_KEPT:
                # What answers still come belong to these channels, so that others need not know.
                self._channels.clear()
                self._unanswered.clear()
            self._unanswered.add(token)
            raise
        finally:
            del self._in_flight[token]
            done.set_result(None)

    async def _send(
        self, exchange: str, key: str, body: bytes, properties: Properties, *, alone: bool
    ) -> None:
        where = f"{exchange!r} with key {key!r}" if exchange else f"queue {key!r}"
        channel: Channel | None = None
        sent = False
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                self._limits.add(limit)
                if self._patient and self._is_blocked:
                    limit.reschedule(None)
                while True:
                    if self._connection is not None and self._is_blocked:
                        # (Nor would opening a channel on it be answered.)
                        await self._connection.unblocked()
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
                    try:
                        sent = True
                        await channel.basic_publish(
                            body, exchange=exchange, routing_key=key, properties=Wire(properties),
                            mandatory=True, wait=False,
                        )  # fmt: skip
                        return
                    except amqp.ChannelInvalidStateError:
                        sent = False  # closed before anything was written: open another
                        await asyncio.sleep(0)
        except TimeoutError:
            if not limit.expired():
                raise Unconfirmed(
                    f"{where}: nothing was sent, the broker opened no channel within "
                    f"{RPC_TIMEOUT:g} s", maybe_stored=False,
                ) from None  # fmt: skip
            waited = f"within {self._timeout:g} s ({PREFIX}PUBLISH_TIMEOUT)"
            if self._is_blocked:
                waited += "; the broker holds publishers back: rabbitmq-diagnostics alarms"
            if sent:
                raise Unconfirmed(f"{where}: not confirmed {waited}; it may be stored") from None
            raise Unconfirmed(f"{where}: nothing was sent {waited}", maybe_stored=False) from None
        except ConnectError as error:
            raise Unconfirmed(f"{where}: nothing was sent, {error}", maybe_stored=False) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise Unconfirmed(
                f"{where}: connection lost before the confirm", maybe_stored=sent
            ) from None
        except amqp.ChannelPreconditionFailed as error:
            if alone or f"size {len(body)} " in words(error):
                raise Refused(f"{where}: {words(error)}") from None
            raise Unconfirmed(
                f"{where}: channel closed over another message before the confirm ({words(error)})"
            ) from None
        except (amqp.AMQPError, OSError, RuntimeError) as error:
            raise _refusal(where, exchange, error, sent=sent) from None
        finally:
            self._limits.discard(limit)
            if alone and channel is not None:
                with suppress(Exception):
                    await channel.close(timeout=CLOSE_TIMEOUT)

    async def _channel(self, exchange: str) -> tuple[Connection, Channel]:
        connection, channel = self._connection, self._channels.get(exchange)
        if connection and channel and not channel.is_closed and not self._closed:
            return connection, channel
        connection = await self.connect()
        async with self._opening:
            channel = self._channels.get(exchange)
            if channel is None or channel.is_closed:
                channel = self._channels[exchange] = await connection.open(confirms=True)
        return connection, channel


def _may_be_refused(body: bytes, properties: Properties, user: str | None) -> bool:
    """Whether the broker may close the channel over this message (406, 3.10 to 4.3).

    Every unconfirmed publish on that channel is then told the same, stored or not: so such a message
    goes on a channel of its own. (The largest message is the broker's to configure, 16 MiB by
    default.)
    """
    return (
        len(body) > ALONE_FROM
        or not re.fullmatch(r"\d{1,11}", properties.text("expiration") or "0")
        or properties.text("user_id") not in (None, user)
        or any(key in (b"\2CC", b"\3BCC") for key, _ in properties.table)
    )


def _refusal(where: str, exchange: str, error: Exception, *, sent: bool) -> PublishError:
    text = words(error)
    declare = "rabbit-tasks topology declare"
    match error:
        case amqp.PublishError():
            missing = (
                "that binding or its queue is missing" if exchange else "there is no such queue"
            )
            return Unroutable(f"{where}: {missing}; mend its name, or create it: {declare}")
        case amqp.DeliveryError():
            return Refused(f"{where}: refused (full, or no majority of its nodes is up)")
        case amqp.ChannelNotFoundEntity():
            return Unroutable(f"{where}: {text}; create it: {declare}")
        case amqp.ChannelAccessRefused():
            return Refused(f"{where}: {text}; give the user write permission on it")
    lost = f"{where}: connection lost before the confirm ({text})"
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
