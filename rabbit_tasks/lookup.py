"""Which of many queues and exchanges are there: asked many at a time.

An app of 200 consumers has some 4,000 of them, for which its workers look before they begin. With one
question after another that is as many round trips, and half a millisecond of the client library each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import aiormq.exceptions as amqp
import pamqp.frame
from aiormq.channel import Channel
from pamqp import commands

from rabbit_tasks.broker import RPC_TIMEOUT, Connection
from rabbit_tasks.topology import Exchange, Queue

MOST: Final = 256
"""Questions that are written before the first of them is answered."""
_THERE: Final = (b"\x00\x32\x00\x0b", b"\x00\x28\x00\x0b")
"""How queue.declare-ok and exchange.declare-ok begin."""


class Lookup:
    """Passive declares, on one channel after another: what is missing costs the one it was asked for
    on, and the broker forgets what was asked behind it. So behind a "no" the next question goes alone,
    and then more and more together.

    absent      names of what is not there, as far as is known
    """

    def __init__(self, connection: Connection, parts: Sequence[Exchange | Queue]) -> None:
        self.absent: list[str] = []
        self._connection = connection
        self._parts = parts
        self._known = 0
        self._together = MOST

    @property
    def is_over(self) -> bool:
        return self._known == len(self._parts)

    def __str__(self) -> str:
        """The name that the broker's next answer is about."""
        return self._parts[self._known].name

    async def go_on(self, channel: Channel) -> None:
        """Ask for the rest, as far as this channel lives. TimeoutError where the broker gives no answer
        for RPC_TIMEOUT, and what the client library raises for any other "no"."""
        try:
            while not self.is_over:
                await self._ask(channel)
                self._together = min(MOST, 2 * self._together)
        except amqp.ChannelNotFoundEntity:
            self.absent.append(str(self))
        except amqp.ChannelLockedResource:
            pass  # it is there: exclusive, and another connection's
        else:
            return
        self._known, self._together = self._known + 1, 1

    async def _ask(self, channel: Channel) -> None:
        until = min(self._known + self._together, len(self._parts))
        loop, closing = asyncio.get_running_loop(), channel.closing
        answered = loop.create_future()

        def frame(kind: int, payload: bytes) -> bool:
            if not payload.startswith(_THERE):
                return False
            if answered.done() or limit.expired():
                return True  # nobody waits for it any more
            self._known += 1
            limit.reschedule(loop.time() + RPC_TIMEOUT)
            if self._known == until:
                answered.set_result(None)
            return True

        async with asyncio.timeout(RPC_TIMEOUT) as limit:
            self._connection.tap(channel, frame)
            self._connection.write(
                b"".join(
                    pamqp.frame.marshal(_question(part), channel.number)
                    for part in self._parts[self._known : until]
                )
            )
            try:
                await asyncio.wait([answered, closing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                answered.cancel()
        if answered.cancelled():
            error = None if closing.cancelled() else closing.exception()
            raise error or amqp.ChannelInvalidStateError("the channel was closed")


def _question(part: Exchange | Queue) -> commands.Queue.Declare | commands.Exchange.Declare:
    if isinstance(part, Queue):
        return commands.Queue.Declare(queue=part.name, passive=True)
    return commands.Exchange.Declare(exchange=part.name, passive=True)
