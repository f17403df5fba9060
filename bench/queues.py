"""The run's own queues on the broker: looked into, emptied, removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import aiormq
import aiormq.exceptions as amqp
from aiormq.abc import AbstractChannel

from bench.lane import Failed

T = TypeVar("T")
SETTLES = 2.0
"""Seconds after the end of a contender's connection in which its last acks are counted."""


class Queues:
    """Those that the contenders of this run make."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._queues: list[str] = []
        self._exchanges: list[str] = []

    def note(self, queues: Iterable[str], exchanges: Iterable[str]) -> None:
        """To be removed in the end; before they are made. Not exchanges that are there already."""
        self._queues += queues
        self._exchanges += [name for name in exchanges if not self._ask(_is_exchange, name)]

    def purge(self, queue: str) -> None:
        self._ask(lambda channel, name: channel.queue_purge(name), queue)

    def make_sure_of_acks(self, queue: str, slots: int) -> None:
        """Failed where more are left than were in hand: whoever does not ack would be fast.

        (A busy broker forgets some of the last acks of a connection that is closed right after them:
        8 of 8000 for aio-pika, on 4.3.)
        """
        deadline = time.monotonic() + SETTLES
        while (left := self._ask(_depth, queue)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left > slots:
            raise Failed(f"{queue}: {left} messages were not acked")

    def remove(self) -> None:
        for name in self._queues:
            self._ask(lambda channel, name: channel.queue_delete(name), name)
        for name in self._exchanges:
            # Somebody else may use it by now: the broker keeps it then.
            try:
                self._ask(lambda channel, name: channel.exchange_delete(name, if_unused=True), name)
            except amqp.ChannelPreconditionFailed:
                pass

    def _ask(self, question: Callable[[AbstractChannel, str], Awaitable[T]], name: str) -> T:
        async def ask() -> T:
            connection = await aiormq.connect(self._url)
            try:
                return await question(await connection.channel(), name)
            finally:
                await connection.close()

        return asyncio.run(ask())


async def _is_exchange(channel: AbstractChannel, name: str) -> bool:
    try:
        await channel.exchange_declare(name, passive=True)
    except amqp.ChannelNotFoundEntity:
        return False
    return True


async def _depth(channel: AbstractChannel, queue: str) -> int:
    return (await channel.queue_declare(queue, passive=True)).message_count or 0
