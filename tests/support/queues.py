"""Look into queues as a test may: how many, and every byte of what is there."""

from __future__ import annotations

from dataclasses import dataclass

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from rabbit_tasks.broker import Connection
from rabbit_tasks.frames import properties_of
from rabbit_tasks.properties import Properties


@dataclass(frozen=True)
class Found:
    """A message that was taken out of a queue."""

    body: bytes
    properties: Properties


async def depth(connection: Connection, queue: str) -> int:
    """Messages ready in the queue."""
    channel = await connection.open()
    answer = await channel.queue_declare(queue, passive=True)
    await channel.close()
    return answer.message_count or 0


async def consumers(connection: Connection, queue: str) -> int:
    channel = await connection.open()
    answer = await channel.queue_declare(queue, passive=True)
    await channel.close()
    return answer.consumer_count or 0


async def take(connection: Connection, queue: str) -> Found | None:
    """Take the first message out of the queue for good."""
    channel = await connection.open()
    message: DeliveredMessage = await channel.basic_get(queue, no_ack=True)
    await channel.close()
    if isinstance(message.delivery, Basic.GetEmpty):
        return None
    return Found(message.body, properties_of(message))


async def take_all(connection: Connection, queue: str) -> list[Found]:
    found = []
    while (one := await take(connection, queue)) is not None:
        found.append(one)
    return found
