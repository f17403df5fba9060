"""The broker: connect to it.

What depends on how aiormq 7.2 behaves stands here and in frames.py.
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
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import aiormq.exceptions as amqp
from aiormq.channel import Channel
from aiormq.connection import Connection as Transport
from yarl import URL

from rabbit_tasks.errors import ConnectError
from rabbit_tasks.frames import Frames, Tap
from rabbit_tasks.settings import Address, Settings
from rabbit_tasks.text import numbers

B = TypeVar("B")

log = logging.getLogger("rabbit_tasks")

RPC_TIMEOUT: Final = 10.0
"""Seconds for the broker to answer a declare, a consume, an opened channel."""
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


class Connection:
    """A plain connection whose deliveries keep their properties as bytes.

    on_blocked  called with True when the broker begins to hold publishers back, with False when it
                takes messages again
    """

    def __init__(self, settings: Settings, address: Address, ip: str) -> None:
        self.settings = settings
        self.address = address
        self.on_blocked: Callable[[bool], None] = lambda _: None
        self.free_since = 0.0
        """When, by the loop's clock, the broker took messages again that it had held back."""
        self._blocked_at: float | None = None
        self._frames = Frames(ip)
        self._frames.on_blocked = self._tell_blocked
        self._transport: Transport | None = None

    async def connect(self, tls: ssl.SSLContext | None, client_properties: dict[str, Any]) -> None:
        """Connect, log in, and open the virtual host; without a limit of time."""
        address, heartbeat = self.address, int(self.settings.heartbeat.total_seconds())
        transport = Transport(
            URL.build(
                scheme="amqps" if address.tls else "amqp", host=address.host, port=address.port,
                user=address.user, password=address.password, path=f"/{address.vhost}",
                query={"heartbeat": heartbeat},
            ),
            context=tls, client_properties=client_properties, transport_factory=self._frames,
        )  # fmt: skip
        await transport.connect()
        await transport.connected.wait()
        self._transport = transport

    @property
    def close_reason(self) -> tuple[int, str] | None:
        """Code and text with which the broker closed the connection, if it said any."""
        return self._frames.close_reason

    @property
    def vhost(self) -> str:
        return self.address.vhost

    @property
    def permit(self) -> str:
        """What gives our user the permissions in our virtual host that it lacks."""
        return permit(self.vhost, self.address.user)

    @property
    def _amqp(self) -> Transport:
        if self._transport is None:
            raise amqp.ChannelInvalidStateError("connection closed")
        return self._transport

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone, or was never there."""
        return self._transport is None or self._transport.is_closed

    @property
    def frame_max(self) -> int:
        """The largest frame, in bytes, that the broker takes."""
        return self._amqp.connection_tune.frame_max or 131_072

    @property
    def channel_max(self) -> int:
        """How many channels the broker lets us open; 65,535 where it sets no limit."""
        return self._amqp.connection_tune.channel_max or 65_535

    @property
    def settles_its_own(self) -> bool:
        """Whether the broker knows, of a dead letter that it has put into the very queue it came from,
        that it is there (4.0 and 4.3; not 3.10)."""
        return (numbers(self.server_version) or (4,)) >= (4,)

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
            self.free_since = asyncio.get_running_loop().time()
            log.warning("%s takes messages again, after %.1f s", self.address, waited)
        self.on_blocked(reason is not None)

    async def open(self) -> Channel:
        """A new channel. (To publish with confirms on, see confirms.py.)"""
        try:
            async with asyncio.timeout(RPC_TIMEOUT):
                channel = await self._amqp.channel(publisher_confirms=False)
        except RuntimeError as error:  # the library's word for a connection that is closed
            raise amqp.ChannelInvalidStateError(*error.args) from None
        assert isinstance(channel, Channel)
        return channel

    async def end(self, within: float = CLOSE_TIMEOUT) -> None:
        """Close; a broker that does not answer within so many seconds loses its socket."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        # In a task of its own: the library waits for 2 s more where it is cancelled, for an answer.
        closing = asyncio.create_task(transport.close(amqp.ConnectionClosed))
        closing.add_done_callback(_seen)
        try:
            await asyncio.wait([closing], timeout=within)
        finally:
            self.abort()
            await _passes()
            closing.cancel()

    async def another(self, purpose: str) -> Connection:
        """One more connection, made as this one was: for what must not hold this one up."""
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
        """Send whole frames: at once after a pause, and in a rush together with what else is written in
        the same turn of the event loop.

        The library's own frames go beside them. Without effect where the connection is gone.
        """
        self._frames.write(frames)

    def flush(self) -> None:
        """Send now what has been written."""
        self._frames.flush()

    @property
    def is_writable(self) -> bool:
        """Whether what is written still goes out: the library knows of an end some turns later."""
        return self._frames.is_writable

    @property
    def unsent(self) -> int:
        """Bytes that were written and that the socket has not taken yet."""
        return self._frames.unsent

    async def drained(self) -> None:
        """Wait until the socket has taken most of that. OSError where the connection is lost."""
        await self._frames.drained()

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
    connection = Connection(settings, address, ip)
    properties = {**told, "connection_name": f"rabbit-tasks {purpose}", "product": "rabbit_tasks"}
    handshake = asyncio.create_task(connection.connect(tls, properties))
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
