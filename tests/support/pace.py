"""How late the machine is by itself, while a test measures how late we are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from rabbit_tasks.broker import Connection

_DELAY: Final = 0.1


class Pace:
    """What messages with a delay are late by at most, in seconds, without anything of ours.

    A client and two queues: the first lets them expire into the second. Their way is the one that a
    message to be retried takes, through this event loop, the sockets, and the broker's disk.
    """

    worst = 0.0

    async def measure(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        channel = await connection.open()

        async def back(message: Any) -> None:
            self.worst = max(self.worst, loop.time() - float(message.body) - _DELAY)

        quorum: dict[str, Any] = {"x-queue-type": "quorum"}
        waiting: dict[str, Any] = {
            **quorum, "x-message-ttl": int(_DELAY * 1000),
            "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "pace",
            "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
        }  # fmt: skip
        await channel.queue_declare("pace", durable=True, arguments=quorum)
        await channel.queue_declare("pace.waiting", durable=True, arguments=waiting)
        await channel.basic_consume("pace", back, no_ack=True)
        while True:
            await channel.basic_publish(str(loop.time()).encode(), routing_key="pace.waiting")
            await asyncio.sleep(0.05)


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
