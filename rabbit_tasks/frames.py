"""Frames on their way in and out: message properties pass the client library as bytes.

aiormq 7.2 takes a transport factory, and so a stream reader of ours: public API. What the reader
hands out are whole frames, in three reads each, as the library asks for them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from aiormq.abc import DeliveredMessage
from aiormq.connection import SSLContextProvider, TransportFactory
from pamqp.commands import Basic
from yarl import URL

from rabbit_tasks.properties import Properties

MADE_FOR: Final = "7.2"
"""The version of aiormq whose way of reading frames this is."""


class RawProperties(TransportFactory):
    """Opens sockets whose reader hides the property list from the client library's decoder.

    That decoder loses types and closes the connection on text that is not UTF-8 or a timestamp
    beyond the year 9999, and then again on the redelivery. The reader also sees what the library
    keeps to itself: why the broker closed the connection, and whether it holds publishers back.

    ip          connect to this address of the host, and not to the first that its name has
    """

    def __init__(self, ip: str | None = None) -> None:
        self._ip = ip
        self._writer: asyncio.StreamWriter | None = None
        self._reader: _FrameReader | None = None
        self.on_blocked: Callable[[str | None], None] = lambda _: None
        """Called with the broker's reason when it holds publishers back, with None when it ends."""
        self.taps: dict[bytes, Tap] = {}
        """Who takes the frames of a channel, by its number's two bytes."""

    @property
    def close_reason(self) -> tuple[int, str] | None:
        """The broker's words when it closed the connection."""
        return self._reader.close_reason if self._reader else None

    @property
    def asked_heartbeat(self) -> int | None:
        """Seconds that the broker asked for in the handshake; ours are what counts."""
        return self._reader.asked_heartbeat if self._reader else None

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The broker's, as Python's ssl decodes it; empty without TLS."""
        found = self._writer.get_extra_info("peercert") if self._writer else None
        return found or {}

    async def create(
        self, url: URL, **kwargs: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        provider: SSLContextProvider = kwargs.pop("ssl_context_provider")
        context = await provider.get_context() if url.scheme == "amqps" else None
        assert url.host is not None
        assert url.port is not None
        loop = asyncio.get_running_loop()
        reader = _FrameReader(self, limit=_AHEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(
            lambda: protocol,
            self._ip or url.host,
            url.port,
            ssl=context,
            server_hostname=url.host if context else None,
            **kwargs,
        )
        self._reader = reader
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return reader, self._writer

    def hold(self, *, held: bool) -> None:
        """Read nothing more from the socket, or go on: what the broker sends waits there meanwhile,
        answers to questions as well. Neither side takes the other for dead."""
        if self._reader is not None:
            self._reader.hold(held=held)

    def abort(self) -> None:
        """Drop the socket: whoever waits for something on it is told so at once."""
        if self._writer is not None:
            self._writer.transport.abort()


METHOD, HEADER, BODY = 1, 2, 3
Tap = Callable[[int, bytes], bool]
"""Called with a frame's type and payload (and its end mark); whether the library is to miss it."""

_HEARTBEAT: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_STILL: Final = 1.0
"""Seconds. The library drops a connection on which it has read nothing for three heartbeats, and the
shortest is a second."""
_AHEAD: Final = 2**20
"""Bytes in our buffer down to which the socket is not read again, once it has twice as many."""
_SIP: Final = 8.0
"""Seconds after which a reader that holds still takes a little: a broker that could write nothing for
30 s drops the connection (3.10 to 4.3; ranch's send_timeout)."""
_SIP_BYTES: Final = _AHEAD + _AHEAD // 4
"""Enough for our buffer to take more from the socket, and for its writer to be told (Linux waits until
a third of its side's buffer is free)."""
_RETURN: Final = b"\x00\x3c\x00\x32"
_TUNE: Final = b"\x00\x0a\x00\x1e"
_CLOSE: Final = b"\x00\x0a\x00\x32"
_BLOCKED: Final = b"\x00\x0a\x00\x3c"
_UNBLOCKED: Final = b"\x00\x0a\x00\x3d"
_HEADERS_ONLY: Final = (1 << 13).to_bytes(2, "big")
_HEADERS_AND_ID: Final = (1 << 13 | 1 << 7).to_bytes(2, "big")


class _FrameReader(asyncio.StreamReader):
    """Hands out frames; in a content header, the property list is one header of bytes.

    A returned message's header also carries the id by which the library finds its publish.
    """

    def __init__(
        self, factory: RawProperties, *, limit: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(limit=limit, loop=loop)
        self._factory = factory
        self.close_reason: tuple[int, str] | None = None
        self.asked_heartbeat: int | None = None
        self._frame = b""
        self._at = 0
        self._returned: set[bytes] = set()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._sip = 0
        self._sipped = 0.0
        self._largest = _SIP_BYTES

    def hold(self, *, held: bool) -> None:
        if not held:
            self._goes_on.set()
        elif self._goes_on.is_set():
            self._goes_on.clear()
            self._sip, self._sipped = 0, asyncio.get_running_loop().time()

    async def readexactly(self, n: int) -> bytes:
        if self._at == len(self._frame):
            self._frame, self._at = await self._next(), 0
        start, self._at = self._at, self._at + n
        if self._at > len(self._frame):
            raise RuntimeError(f"aiormq reads frames in another way than version {MADE_FOR} did")
        return self._frame[start : self._at]

    async def _next(self) -> bytes:
        if not self._goes_on.is_set() and self._sip <= 0:
            try:
                async with asyncio.timeout(_STILL):
                    await self._goes_on.wait()
            except TimeoutError:
                now = asyncio.get_running_loop().time()
                if now - self._sipped > _SIP:
                    self._sip, self._sipped = self._largest, now
                return _HEARTBEAT  # as if the broker had sent one: it may have, behind the rest
        head, rest = await self._frame_of_theirs()
        if not rest:
            return head
        self._sip -= len(rest)
        if head[0] == METHOD and rest[:4] == _RETURN:
            self._returned.add(head[1:3])
        if head[0] == METHOD and rest[:4] == _TUNE:
            # The library writes our own figure over it.
            self.asked_heartbeat = int.from_bytes(rest[10:12], "big")
        if head[0] == METHOD and rest[:4] == _CLOSE:
            # The library loses this text when it waits for another frame, as for Open-Ok.
            self.close_reason = (int.from_bytes(rest[4:6], "big"), _short_text(rest[6:]))
        if head[0] == METHOD and rest[:4] in (_BLOCKED, _UNBLOCKED):
            blocked = rest[:4] == _BLOCKED
            self._factory.on_blocked(_short_text(rest[4:]) if blocked else None)
        if head[0] != HEADER:
            return head + rest
        self._largest = max(self._largest, _SIP_BYTES + int.from_bytes(rest[4:12], "big"))
        raw = rest[12:-1]
        table = b"\0x" + len(raw).to_bytes(4, "big") + raw
        fields = len(table).to_bytes(4, "big") + table
        flags = _HEADERS_ONLY
        if head[1:3] in self._returned:
            self._returned.discard(head[1:3])
            found = mark(Properties.decode(raw)).encode()
            flags, fields = _HEADERS_AND_ID, fields + bytes([len(found)]) + found
        payload = rest[:12] + flags + fields
        return head[:3] + len(payload).to_bytes(4, "big") + payload + rest[-1:]

    async def _frame_of_theirs(self) -> tuple[bytes, bytes]:
        """The next frame that nobody else takes: its head, and its payload with the end mark."""
        since = asyncio.get_running_loop().time()
        while True:
            head = await super().readexactly(7)
            if head[0] > 8:  # not AMQP 0-9-1: the library says so by the first bytes
                return head, b""
            rest = await super().readexactly(int.from_bytes(head[3:], "big") + 1)
            tap = self._factory.taps.get(head[1:3])
            if tap is None or not tap(head[0], rest):
                return head, rest
            # The broker sends no heartbeats beside what it sends otherwise.
            if asyncio.get_running_loop().time() - since > _STILL:
                return _HEARTBEAT, b""


def _short_text(raw: bytes) -> str:
    return raw[1 : 1 + raw[0]].decode("utf-8", "replace")


def properties_of(message: DeliveredMessage) -> Properties:
    """The properties that came with a delivery on one of our connections."""
    headers: Mapping[str, Any] = message.header.properties.headers or {}
    return Properties.decode(bytes(headers[""]))


class Wire(Basic.Properties):
    """Properties that are written as the bytes they are."""

    def __init__(self, properties: Properties) -> None:
        super().__init__(message_id=mark(properties))
        self._bytes = properties.encode()

    def marshal(self) -> bytes:
        return self._bytes


def mark(properties: Properties) -> str:
    """The id by which the library finds a returned message's publish; never empty, short enough."""
    text = properties.text("message_id") or ""
    if text.isascii() and 0 < len(text) < 200:
        return text
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()
