"""A line to the broker that can be cut and come back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.support.brokers import Broker


class Line:
    """A port of its own that forwards to the broker while it is up."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]

    def url(self, vhost: str) -> str:
        return self._broker.url(vhost).replace(f":{self._broker.port}/", f":{self.port}/")

    async def up(self) -> None:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", self.port)

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
        there, forth = await asyncio.open_connection(self._broker.host, self._broker.port)
        self._writers |= {back, forth}
        await asyncio.gather(_pipe(here, forth), _pipe(there, back))
        self._writers -= {back, forth}


async def _pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await source.read(65_536):
            target.write(piece)
            await target.drain()
    target.close()


@asynccontextmanager
async def line(broker: Broker) -> AsyncIterator[Line]:
    """A line that is up."""
    made = Line(broker)
    await made.up()
    try:
        yield made
    finally:
        made.down()
