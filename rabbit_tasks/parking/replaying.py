"""Replay: copies of parked messages go back to their main queues, with fresh attempts."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime

from rabbit_tasks import history
from rabbit_tasks.broker import Connection, Publisher
from rabbit_tasks.errors import ConnectError, ParkingError, PublishError
from rabbit_tasks.parking.look import Moved, main_of, taking
from rabbit_tasks.parking.parked import Choose, ParkedMessage


async def replay(
    connection: Connection,
    publisher: Publisher,
    queue: str,
    choose: Choose,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    told: Callable[[ParkedMessage, str], None] = lambda _message, _queue: None,
) -> Moved:
    """Copy chosen messages back to their main queues with fresh attempts.

    In the order in which they were parked, and only those that were there at the start. Copy,
    confirm, ack, one by one: killed at any moment, nothing is lost and at most one message is there
    twice. `told` is called after each.

    ParkingError where a message cannot go; those before it have gone, the others stay parked.
    """
    moved = Moved()
    async with taking(connection, queue) as taken:
        moved.there = taken.count
        async for delivery, message in taken:
            if (limit is not None and moved.chosen >= limit) or not choose(message):
                continue
            target = message.origin or main_of(queue)
            if not dry_run:
                copy = history.replayed(
                    message.properties,
                    when=datetime.now(UTC),
                    message_id=uuid.uuid4().hex,
                    frame_max=connection.frame_max,
                )
                try:
                    await publisher.send("", target, message.body, copy)
                except (PublishError, ConnectError) as error:
                    maybe = isinstance(error, PublishError) and error.maybe_stored
                    raise ParkingError(
                        f"message {message.id} cannot be replayed: {error} "
                        f"({moved.chosen} replayed before it, the others are still parked"
                        f"{', and this one may be there twice' if maybe else ''})"
                    ) from error
            moved.chosen += 1
            moved.to[target] += 1
            told(message, target)
            if not dry_run:
                # And only then the next one: acks that are still on their way when we are killed
                # would leave several messages twice.
                try:
                    await taken.ack(delivery)
                    await taken.arrived()
                except ParkingError as error:
                    raise ParkingError(
                        f"{error} ({moved.chosen} replayed; {message.id} may be parked as well)"
                    ) from error
    return moved
