"""The run's own queues on the broker: made, looked into, removed. Over AMQP alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

import aiormq.exceptions as amqp
from aiormq.abc import DeliveredMessage

from rabbit_tasks import parking
from rabbit_tasks.broker import LOST, RPC_TIMEOUT, Connection, connect, words
from rabbit_tasks.chaos.app import app_of
from rabbit_tasks.chaos.plan import Plan
from rabbit_tasks.declare import declare
from rabbit_tasks.errors import RabbitTasksError
from rabbit_tasks.frames import properties_of
from rabbit_tasks.settings import Settings
from rabbit_tasks.topology import PARKING_LOT

T = TypeVar("T")

PATIENCE: Final = 60.0
"""Seconds for the broker to answer again before we give up on a question."""
PAUSE: Final = 0.5
QUIET: Final = 1.0
"""Seconds without a delivery after which what a queue holds is taken to be seen."""


class NotRemoved(RabbitTasksError):
    """Queues of the run are left on the broker."""


class Queues:
    """The queues of one run, and a connection to look at them that is opened again when lost."""

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self._settings = settings
        self._plan = plan
        self._topology = app_of(plan).topology
        self._connection: Connection | None = None
        self._made_exchange = False
        self._is_there = False
        self._made_at = 0.0
        self.waiting = tuple(q.name for q in self._topology.queues if q.role != "parked")
        self.parked = next(q.name for q in self._topology.queues if q.role == "parked")
        self.server_version = "?"

    async def make(self) -> int:
        """Create the queues; how many."""
        connection = await self.connection()
        self._is_there = True  # from here on there may be something to remove
        created = await declare(connection, self._topology)
        self._made_at = time.monotonic()
        self._made_exchange = PARKING_LOT in created
        self.server_version = connection.server_version
        return len(created) - self._made_exchange

    @property
    def age(self) -> float:
        """Seconds since they were made."""
        return time.monotonic() - self._made_at

    async def connection(self) -> Connection:
        """The connection, opened again if it was lost."""
        if self._connection is None or self._connection.is_lost:
            await self.close()
            self._connection = await connect(self._settings, f"chaos {self._plan.run}")
        return self._connection

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.end()
            self._connection = None

    async def depths(self) -> dict[str, int]:
        """Messages that lie ready in each queue. (Those in a worker's hands do not.)"""
        connection = await self.connection()
        channel = await connection.open()
        try:
            found = {}
            for name in (*self.waiting, self.parked):
                answer = await channel.queue_declare(name, passive=True, timeout=RPC_TIMEOUT)
                found[name] = answer.message_count or 0
            return found
        finally:
            with suppress(Exception):
                await channel.close(timeout=RPC_TIMEOUT)

    async def parked_reasons(self) -> list[tuple[str, str]]:
        """Id and reason of every message that is parked."""
        connection = await self.connection()
        return [(one.id, one.reason) async for one in parking.browse(connection, self._plan.queue)]

    async def look(self) -> list[tuple[str, str]]:
        """Id and queue of every message in the queues that a worker takes from, or will.

        The messages are held until all is seen, or else one whose wait is over would be seen again
        in the main queue; closing the channel gives them back.
        """
        connection = await self.connection()
        channel = await connection.open()
        seen: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        found: list[tuple[str, str]] = []
        try:
            # The main queue is the first of them and comes last: what waits goes there.
            for name in reversed(self.waiting):

                async def on_message(message: DeliveredMessage, name: str = name) -> None:
                    seen.put_nowait((properties_of(message).text("message_id") or "", name))

                answer = await channel.queue_declare(name, passive=True, timeout=RPC_TIMEOUT)
                wanted = len(found) + (answer.message_count or 0)
                await channel.basic_consume(name, on_message, timeout=RPC_TIMEOUT)
                # What is there comes at once. (Never believe in less than the broker said; and of
                # what has expired in the meantime the next queue tells.)
                with suppress(TimeoutError):
                    while len(found) < wanted:
                        async with asyncio.timeout(QUIET):
                            found.append(await seen.get())
            with suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(QUIET):
                        found.append(await seen.get())
        finally:
            with suppress(Exception):
                await channel.close(timeout=RPC_TIMEOUT)
        return found

    async def remove(self) -> None:
        """Delete what `make` created. NotRemoved where we may not."""
        if not self._is_there:
            return
        refused: list[str] = []
        channel = await (await self.connection()).open()
        for queue in self._topology.queues:
            if not queue.name.startswith(self._plan.prefix):
                continue
            try:
                await channel.queue_delete(queue.name, timeout=RPC_TIMEOUT)
            except amqp.ChannelAccessRefused as error:
                refused.append(words(error))
                channel = await (await self.connection()).open()
        if self._made_exchange:
            # Somebody else's app may use it by now: the broker keeps it then (406).
            with suppress(amqp.AMQPError):
                await channel.exchange_delete(PARKING_LOT, if_unused=True, timeout=RPC_TIMEOUT)
        self._is_there = False
        with suppress(Exception):
            await channel.close(timeout=RPC_TIMEOUT)
        # (Who may not delete may not create either: then there is nothing of ours.)
        if refused and self._made_at:
            raise NotRemoved(refused[0])

    async def surely(self, ask: Callable[[], Awaitable[T]], patience: float = PATIENCE) -> T:
        """The answer, asked again and again while the broker is away."""
        deadline = asyncio.get_running_loop().time() + patience
        while True:
            try:
                async with asyncio.timeout(patience):
                    return await ask()
            except (*LOST, amqp.AMQPError, RabbitTasksError, TimeoutError, OSError) as error:
                if isinstance(error, NotRemoved) or getattr(error, "permanent", False):
                    raise
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await self.close()
                await asyncio.sleep(PAUSE)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                await self.close()  # the library's word for a connection that was stuck
