"""A line to the broker that can be cut, or fall silent, and come back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.support.brokers import Broker


class Line:
    """A port of its own that forwards to the broker while it is up.

    host    the address of ours where it is
    """

    def __init__(self, broker: Broker, host: str = "127.0.0.1") -> None:
        self._broker = broker
        self._host = host
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        with socket.socket() as found:
            found.bind((host, 0))
            self.port: int = found.getsockname()[1]

    def url(self, vhost: str, user: str | None = None, password: str | None = None) -> str:
        broker = f"@{self._broker.host}:{self._broker.port}/"
        return self._broker.url(vhost, user, password).replace(
            broker, f"@{self._host}:{self.port}/"
        )

    async def up(self) -> None:
        self._server = await asyncio.start_server(self._forward, self._host, self.port)

    def silence(self) -> None:
        """From now on nothing passes, either way, and nobody is told: nothing is closed."""
        self._flows.clear()

    def speak(self) -> None:
        """What was held back goes on its way, as the packets of a network that is mended do."""
        self._flows.set()

    def cut(self) -> int:
        """End every connection that is up, without a word; how many. New ones are taken."""
        cut = len(self._writers) // 2
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        return cut

    def down(self) -> None:
        """Take no more connections, and cut those there are."""
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _forward(self, here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            there, forth = await asyncio.open_connection(self._broker.host, self._broker.port)
        except OSError:
            back.transport.abort()
            return
        self._writers |= {back, forth}
        await asyncio.gather(self._pipe(here, forth), self._pipe(there, back))
        self._writers -= {back, forth}

    async def _pipe(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await source.read(65_536):
                await self._flows.wait()
                target.write(piece)
                await target.drain()
        await self._flows.wait()
        target.close()


@asynccontextmanager
async def line(broker: Broker, host: str = "127.0.0.1") -> AsyncIterator[Line]:
    """A line that is up."""
    made = Line(broker, host)
    await made.up()
    try:
        yield made
    finally:
        made.speak()
        made.down()
