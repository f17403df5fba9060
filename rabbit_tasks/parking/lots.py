"""Every parking queue of the broker: how much is in it, since when, and mostly why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rabbit_tasks.app import App
from rabbit_tasks.broker import Connection
from rabbit_tasks.errors import ConfigurationError, ParkingError
from rabbit_tasks.management import Management
from rabbit_tasks.parking.groups import Group, Groups
from rabbit_tasks.parking.look import browse
from rabbit_tasks.parking.parked import ParkedMessage
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.topology import parked_queue


@dataclass
class Lot:
    """One parking queue."""

    queue: ParkingQueue
    depth: int = 0
    """Messages that were parked when we looked."""
    oldest: datetime | None = None
    """When the one that was parked first was; None where none of them tells."""
    top: Group | None = None
    """The largest group of them; None where there are none, or nobody looked."""
    fault: str | None = None
    """Why it could not be looked at."""


async def parking_queues(management: Management | None, app: App | None) -> list[ParkingQueue]:
    """Every parking queue of the virtual host, by name: of the management API, which knows all, else
    of the app, which knows its own. ConfigurationError where there is neither."""
    if management is not None:
        rows = await management.rows("queues", management.vhost)
        names = [str(row.get("name")) for row in rows]
        ending = parked_queue("")
        return [
            ParkingQueue.of(name)
            for name in sorted(names)
            if name.endswith(ending) and name != ending
        ]
    if app is not None:
        return [ParkingQueue.of(name) for name in sorted(app.queues)]
    raise ConfigurationError(
        "which parking queues? AMQP does not tell names of queues: set RABBIT_TASKS_MANAGEMENT_URL "
        "(http://host:15672) for all of the broker's, or name the app for its own (--app "
        "module:attribute or RABBIT_TASKS_APP)"
    )


async def looked_at(
    connection: Connection,
    queues: Sequence[ParkingQueue],
    *,
    began: Callable[[ParkingQueue, int], None] = lambda _queue, _count: None,
    told: Callable[[ParkedMessage], None] = lambda _message: None,
) -> AsyncIterator[Lot]:
    """One after another, each of them whole: what is oldest and what is most is known at its end.

    `began` is told of each queue and how many are in it, `told` of each message.
    """
    for queue in queues:
        yield await _look(connection, queue, began, told)


async def _look(
    connection: Connection,
    queue: ParkingQueue,
    began: Callable[[ParkingQueue, int], None],
    told: Callable[[ParkedMessage], None],
) -> Lot:
    lot = Lot(queue)

    def start(count: int) -> None:
        lot.depth = count
        began(queue, count)

    groups = Groups()
    messages: Any = browse(connection, queue, began=start)
    try:
        async with aclosing(messages):
            async for message in messages:
                groups.add(message)
                if (when := message.parked_time) is not None:
                    lot.oldest = min(lot.oldest or when, when)
                told(message)
    except ParkingError as error:
        if connection.is_lost:
            raise
        lot.fault = str(error)
    lot.top = groups.rows[0] if groups.rows else None
    return lot
