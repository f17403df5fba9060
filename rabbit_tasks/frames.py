"""Frames on their way in and out of a connection.

aiormq takes a transport factory: public API. The protocol that ours opens a socket with cuts what the
broker sends into frames, and offers each to whoever has tapped its channel. The client library reads
the others, in which a message's properties are hidden from its decoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from aiormq.abc import DeliveredMessage
from aiormq.connection import SSLContextProvider, TransportFactory
from yarl import URL

from rabbit_tasks.properties import Properties

MADE_FOR: Final = "7.2"
"""The version of aiormq that this was made for: it reads and writes whole frames, and no parts."""
METHOD, HEADER, BODY = 1, 2, 3
BASIC: Final = b"\x00\x3c"
"""The class of the methods about messages: a method begins with its class and its number."""
CANCEL: Final = BASIC + b"\x00\x1e"
PUBLISH: Final = BASIC + b"\x00\x28"
RETURN: Final = BASIC + b"\x00\x32"
DELIVER: Final = BASIC + b"\x00\x3c"
ACK: Final = BASIC + b"\x00\x50"
REJECT: Final = BASIC + b"\x00\x5a"
NACK: Final = BASIC + b"\x00\x78"
CHANNEL_CLOSE: Final = b"\x00\x14\x00\x28"
"""Behind it the broker takes nothing more on the channel; and when the library has answered, what comes
on its number costs the connection."""
Tap = Callable[[int, bytes], bool]
"""Called with a frame's type and payload (and its end mark); whether the library is to miss it."""

_MOMENT: Final = 0.0003
"""Seconds: less than it takes the broker to answer, more than to write the next of many."""
_HEARTBEAT: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_STILL: Final = 1.0
"""Seconds. The library drops a connection on which it has read nothing for three heartbeats, and the
shortest is a second."""
_SIP: Final = 8.0
"""Seconds after which a connection that is held takes a little: a broker that could write nothing for
30 s drops it (3.10 to 4.3; ranch's send_timeout)."""
_SIP_BYTES: Final = 5 * 2**18
"""Enough for the broker's writer to be told of room (Linux waits until a third of its buffer is free),
beside the largest message so far."""
_ENOUGH: Final = 2**16
"""Bytes that go out at once: a large message is not to be in memory twice, beside its own frames."""
_TUNE: Final = b"\x00\x0a\x00\x1e"
_CLOSE: Final = b"\x00\x0a\x00\x32"
_BLOCKED: Final = b"\x00\x0a\x00\x3c"
_UNBLOCKED: Final = b"\x00\x0a\x00\x3d"
_HEADERS_ONLY: Final = (1 << 13).to_bytes(2, "big")


class Frames(TransportFactory):
    """The frames of one connection.

    The library's decoder loses types and closes the connection on text that is not UTF-8 or a
    timestamp beyond the year 9999, and then again on the redelivery; so it is given the property list
    as the bytes it is. What it keeps to itself is seen here as well: why the broker closed the
    connection, and whether it holds publishers back.

    ip          connect to this address of the host, and not to the first that its name has
    """

    def __init__(self, ip: str | None = None) -> None:
        self._ip = ip
        self._cutter: _Cutter | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._call_soon: Callable[[Callable[[], None]], object]
        self._time: Callable[[], float]
        self._written_at = 0.0
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self.on_blocked: Callable[[str | None], None] = lambda _: None
        """Called with the broker's reason when it holds publishers back, with None when it ends."""
        self.taps: dict[bytes, Tap] = {}
        """Who takes the frames of a channel, by its number's two bytes."""
        self.close_reason: tuple[int, str] | None = None
        """The broker's words when it closed the connection."""
        self.asked_heartbeat: int | None = None
        """Seconds that the broker asked for in the handshake; ours are what counts."""

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The broker's, as Python's ssl decodes it; empty without TLS."""
        found = self._cutter.transport.get_extra_info("peercert") if self._cutter else None
        return found or {}

    async def create(
        self, url: URL, **kwargs: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        provider: SSLContextProvider = kwargs.pop("ssl_context_provider")
        context = await provider.get_context() if url.scheme == "amqps" else None
        assert url.host is not None
        assert url.port is not None
        loop = asyncio.get_running_loop()
        # (The library reads as fast as it is given, into queues without a bound: a limit of the reader
        # would bound nothing, and would go on reading where we hold.)
        reader = asyncio.StreamReader(limit=2**62, loop=loop)
        cutter = _Cutter(self, reader, loop)
        transport, _ = await loop.create_connection(
            lambda: cutter,
            self._ip or url.host,
            url.port,
            ssl=context,
            server_hostname=url.host if context else None,
            **kwargs,
        )
        self._cutter, self._writer = cutter, asyncio.StreamWriter(transport, cutter, reader, loop)
        self._call_soon, self._time = loop.call_soon, loop.time
        return reader, self._writer

    def write(self, frames: bytes) -> None:
        """Send whole frames: at once after a pause, and in a rush together with what else is written in
        the same turn of the event loop.

        The library's own frames go beside them. Without effect where the connection is gone.
        """
        self._unwritten.append(frames)
        self._unwritten_bytes += len(frames)
        if self._is_quiet or self._unwritten_bytes > _ENOUGH:
            self.flush()
        elif len(self._unwritten) == 1 and self._writer is not None:
            self._call_soon(self.flush)

    def flush(self) -> None:
        """Send now what has been written."""
        parts, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
        if parts and self._writer is not None and self.is_writable:
            self._writer.write(parts[0] if len(parts) == 1 else b"".join(parts))
            self._written_at = self._time()

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing has been written for a moment, and so nothing will be that could go along."""
        return self._time() - self._written_at > _MOMENT

    @property
    def is_writable(self) -> bool:
        """Whether what is written still goes out: the library knows of an end some turns later."""
        return self._writer is not None and not self._writer.transport.is_closing()

    @property
    def unsent(self) -> int:
        """Bytes that were written and that the socket has not taken yet."""
        if self._writer is None:
            return 0
        return self._writer.transport.get_write_buffer_size() + self._unwritten_bytes

    async def drained(self) -> None:
        """Wait until the socket has taken most of that. OSError where the connection is lost."""
        await asyncio.sleep(0)  # now it is written
        if self._writer is not None:
            await self._writer.drain()

    def hold(self, *, held: bool) -> None:
        """Read nothing more from the socket, or go on: what the broker sends waits there meanwhile,
        answers to questions as well. Neither side takes the other for dead."""
        if self._cutter is not None:
            self._cutter.hold(held=held)

    def abort(self) -> None:
        """Drop the socket: whoever waits for something on it is told so at once."""
        if self._cutter is not None:
            self._cutter.transport.abort()


class _Cutter(asyncio.StreamReaderProtocol):
    """Cuts what arrives into frames, and feeds the library's reader with those that nobody takes.

    In a content header that it is fed with, the property list is one header of bytes.
    """

    transport: asyncio.Transport

    def __init__(
        self, frames: Frames, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(reader, loop=loop)
        self._frames = frames
        self._taps = frames.taps
        self._reader = reader
        self._time = loop.time
        self._call_soon, self._call_later = loop.call_soon, loop.call_later
        self._rest: list[bytes] = []
        """What is here of a frame that is not."""
        self._missing = 0
        """Bytes of it, as far as is known."""
        self._fed_at = 0.0
        self._held: asyncio.TimerHandle | None = None
        self._held_since = 0.0
        self._sip = 0
        self._largest = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, transport)  # (uvloop's is one but by class)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._held is not None:
            self._held.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest.append(data)
            self._missing -= len(data)
            # (A large frame comes in as many reads as the network likes, and is joined once.)
            data = b"".join(self._rest) if self._missing <= 0 else b""
        at, end, size, taps, fed = 0, 0, len(data), self._taps, False
        while size - at >= 8 and (self._held is None or self._sip > 0):
            if data[at] > 8:  # not AMQP 0-9-1: the library says so by the first bytes
                self._reader.feed_data(data[at:])
                at, fed = size, True
                break
            end = at + 8 + int.from_bytes(data[at + 3 : at + 7], "big")
            if end > size:
                break
            tap = taps.get(data[at + 1 : at + 3])
            if tap is None or not tap(data[at], data[at + 7 : end]):
                self._feed(data[at : at + 7], data[at + 7 : end])
                fed = True
            if self._held is not None:
                self._sip -= end - at
                if self._sip <= 0:
                    self.transport.pause_reading()
            at = end
        if at < size:
            self._rest, self._missing = [data[at:]], end - size
        elif self._rest and self._missing <= 0:
            self._rest = []
        if fed:
            self._fed_at = self._time()
        elif self._taps and self._time() - self._fed_at > _STILL:
            # The broker sends no heartbeats beside what it sends otherwise.
            self._beat()

    def _beat(self) -> None:
        self._fed_at = self._time()
        self._reader.feed_data(_HEARTBEAT)

    def _feed(self, head: bytes, rest: bytes) -> None:
        """Let the library have a frame, given by its head and its payload with the end mark."""
        if head[0] == METHOD:
            self._look_at(rest)
        elif head[0] == HEADER:
            self._largest = max(self._largest, int.from_bytes(rest[4:12], "big"))
            raw = rest[12:-1]
            table = b"\0x" + len(raw).to_bytes(4, "big") + raw
            fields = len(table).to_bytes(4, "big") + table
            payload = rest[:12] + _HEADERS_ONLY + fields
            head, rest = head[:3] + len(payload).to_bytes(4, "big"), payload + rest[-1:]
        self._reader.feed_data(head + rest)

    def _look_at(self, method: bytes) -> None:
        kind = method[:4]
        if kind == _TUNE:
            # The library writes our own figure over it.
            self._frames.asked_heartbeat = int.from_bytes(method[10:12], "big")
        elif kind == _CLOSE:
            # The library loses this text when it waits for another frame, as for Open-Ok.
            code = int.from_bytes(method[4:6], "big")
            self._frames.close_reason = (code, _short_text(method[6:]))
        elif kind == _BLOCKED:
            self._frames.on_blocked(_short_text(method[4:]))
        elif kind == _UNBLOCKED:
            self._frames.on_blocked(None)

    def hold(self, *, held: bool) -> None:
        if held == (self._held is not None):
            return
        if self._held is not None:
            self._held.cancel()
            self._held = None
            self._go_on()
        elif not self.transport.is_closing():
            self.transport.pause_reading()
            self._held_since, self._sip = self._time(), 0
            self._held = self._call_later(_STILL, self._still_held)

    def _still_held(self) -> None:
        """As if the broker had sent a heartbeat: it may have, behind the rest."""
        self._beat()
        now = self._time()
        if self._sip <= 0 and now - self._held_since > _SIP:
            self._held_since, self._sip = now, _SIP_BYTES + self._largest
            self._go_on()
        self._held = self._call_later(_STILL, self._still_held)

    def _go_on(self) -> None:
        self.transport.resume_reading()
        if self._rest:
            self._call_soon(self.data_received, b"")


def _short_text(raw: bytes) -> str:
    return raw[1 : 1 + raw[0]].decode("utf-8", "replace")


def properties_of(message: DeliveredMessage) -> Properties:
    """The properties that came with a delivery on one of our connections."""
    headers: Mapping[str, Any] = message.header.properties.headers or {}
    return Properties.decode(bytes(headers[""]))
