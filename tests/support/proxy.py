"""A TCP proxy that a test puts before the broker: it swallows answers, or cuts the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Passes bytes both ways until it is told otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = True
        self._held = asyncio.Event()
        self._held.set()
        self._refusing = False
        self.port = 0
        self.sent = 0
        """Bytes that went to the broker."""

    def swallow(self) -> None:
        """From now on the broker's answers are dropped; what is sent still reaches it."""
        self._flowing = False

    def hold(self) -> None:
        """From now on the broker's answers wait."""
        self._held.clear()

    def release(self) -> None:
        """What waits goes on its way."""
        self._held.set()

    def flow(self) -> None:
        """Pass answers on again. Connections that missed some are of no more use."""
        self.cut()
        self._flowing = True

    def cut(self) -> None:
        """Drop every connection, as a network does."""
        for writer in self._writers:
            writer.transport.abort()

    def refuse(self) -> None:
        """The network is gone: every connection is dropped, old and new."""
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        """It is there again."""
        self._refusing = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(*self._to)
        self._writers |= {writer, there_writer}
        with suppress(ConnectionError):
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, there_writer, answers=False))
                both.create_task(self._pass(there_reader, writer, answers=True))
        self._writers -= {writer, there_writer}

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                if answers:
                    await self._held.wait()
                else:
                    self.sent += len(data)
                if not answers or self._flowing:
                    writer.write(data)
                    await writer.drain()
        with suppress(ConnectionError):
            writer.close()


@asynccontextmanager
async def before(host: str, port: int) -> AsyncIterator[Proxy]:
    """A proxy before this address, for the length of a block."""
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)  # noqa: SLF001
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await asyncio.sleep(0)
