"""How late the machine is by itself, while a test measures how late we are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rabbit_tasks.broker import Connection


class Pace:
    """What the longest of many small questions to the broker took, in seconds.

    Their way is a message's: through this event loop, a socket, the broker, and back.
    """

    worst = 0.0

    async def measure(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        channel = await connection.open()
        while True:
            began = loop.time()
            await channel.basic_qos(prefetch_count=1)
            self.worst = max(self.worst, loop.time() - began)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def pace(connection: Connection) -> AsyncIterator[Pace]:
    """Measured for as long as the block takes."""
    found = Pace()
    measuring = asyncio.create_task(found.measure(connection))
    try:
        yield found
        assert not measuring.done(), "the connection was lost"
    finally:
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
