"""What a message costs beside more of everything: queued messages, consumer classes, headers, bytes.

In this process and of rabbit_tasks alone: what counts is that the figures of a row are alike, or, for
bytes, that they grow no faster than the bytes do.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from bench.body import body_of
from bench.tally import Tally
from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, Settings
from rabbit_tasks.broker import RPC_TIMEOUT, connected
from rabbit_tasks.declare import declare
from rabbit_tasks.worker import Worker

MESSAGES: Final = 1000
"""That are timed, at most, whatever else is there."""
SLOTS: Final = 64
QUEUED: Final = (1_000, 10_000, 100_000)
CLASSES: Final = (1, 20, 200)
HEADERS: Final = (0, 10, 100)
BYTES: Final = (1_000, 100_000, 10_000_000)
COLUMNS: Final = 4
HEAD: Final = (
    f"| CPU per message, µs |{' |' * COLUMNS} last to first |", "|---|" + "---|" * (COLUMNS + 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What grows, and microseconds of CPU per message at each size."""

    text: str
    cpu: dict[int, float]


async def grown(settings: Settings, most: int) -> AsyncIterator[Row]:
    """One row after another; `most` messages are queued in the end."""
    many = sorted({*(size for size in QUEUED if size < most), most})
    yield Row("drain, of so many that are queued", {n: await _queued(settings, n) for n in many})
    yield Row(
        "drain, of so many consumer classes", {n: await _classes(settings, n) for n in CLASSES}
    )
    yield Row("drain, with so many headers", {n: await _headers(settings, n) for n in HEADERS})
    yield Row("publish, of so many bytes", {n: await _published(settings, n) for n in BYTES})
    yield Row("drain, of so many bytes", {n: await _bytes(settings, n) for n in BYTES})


async def _queued(settings: Settings, count: int) -> float:
    async with _app(settings, 1, dict[str, Any]) as (app, tally, publisher):
        await publisher.publish_many(app.consumers[0], (body_of(i) for i in range(count)))
        return await _drained(settings, app, tally(min(count, MESSAGES)))


async def _classes(settings: Settings, classes: int) -> float:
    async with _app(settings, classes, dict[str, Any]) as (app, tally, publisher):
        each = max(20, MESSAGES // classes)
        for consumer in app.consumers:
            await publisher.publish_many(consumer, map(body_of, range(each)))
        # Until half of them are handled, consumers still start, which costs 0.3 ms each.
        return await _drained(settings, app, tally(each * classes, each * classes // 2))


async def _headers(settings: Settings, headers: int) -> float:
    async with _app(settings, 1, dict[str, Any]) as (app, tally, publisher):
        given = {f"header-{i}": f"value {i}" for i in range(headers)}
        await publisher.publish_many(app.consumers[0], map(body_of, range(MESSAGES)), headers=given)
        return await _drained(settings, app, tally(MESSAGES))


async def _published(settings: Settings, size: int) -> float:
    async with _app(settings, 1, bytes) as (app, _, publisher):
        count = _of(size)
        await publisher.publish(app.consumers[0], b"")
        began = time.process_time()
        await publisher.publish_many(app.consumers[0], _same(size, count), window=20)
        return (time.process_time() - began) / count * 1e6


async def _bytes(settings: Settings, size: int) -> float:
    async with _app(settings, 1, bytes) as (app, tally, publisher):
        await publisher.publish_many(app.consumers[0], _same(size, _of(size)), window=20)
        return await _drained(settings, app, tally(_of(size)))


def _of(size: int) -> int:
    """Messages of this size: 200 MB of them at most."""
    return max(10, min(MESSAGES, 200_000_000 // size))


def _same(size: int, count: int) -> Iterator[bytes]:
    body = b"x" * size
    return (body for _ in range(count))


@asynccontextmanager
async def _app(
    settings: Settings, classes: int, kind: Any
) -> AsyncIterator[tuple[App, Callable[..., Tally], Publisher]]:
    """An app whose queues are there until the end; what makes a count of its messages, and how many
    of them are not timed; a publisher."""
    tallies: list[Tally] = []
    run = uuid.uuid4().hex[:6]

    def tally(count: int, untimed: int = SLOTS) -> Tally:
        tallies.append(Tally(count, min(untimed, count // 2)))
        return tallies[-1]

    def consumer(number: int) -> Consumer[Any]:
        class Handling(Consumer[kind]):
            queue = f"bench.{run}.growth.{number}"
            retry = RetryPolicy(attempts=1)
            concurrency = max(1, SLOTS // classes)

            async def handle(self, body: Any, message: Message) -> None:
                tallies[-1].hit()

        return Handling()

    app = App("bench", [consumer(number) for number in range(classes)])
    async with connected(settings, "bench") as connection:
        await declare(connection, app.topology)
        try:
            async with Publisher.open(settings) as publisher:
                yield app, tally, publisher
        finally:
            channel = await connection.open()
            for queue in app.topology.queues:
                await channel.queue_delete(queue.name, timeout=RPC_TIMEOUT)


async def _drained(settings: Settings, app: App, tally: Tally) -> float:
    worker = Worker(app, settings)
    working = asyncio.create_task(worker.run())
    over = asyncio.create_task(tally.wait())
    await asyncio.wait([working, over], return_when=asyncio.FIRST_COMPLETED)
    worker.stop()
    await working
    await over
    return tally.figures()["cpu"]


def row(one: Row) -> str:
    """In Markdown: sizes and figures beside each other, and the last to the first."""
    first, *_, last = one.cpu.values()
    cells = [f"{size:,}: {cpu:,.0f}" for size, cpu in one.cpu.items()]
    cells += [""] * (COLUMNS - len(cells))
    return f"| {one.text} | {' | '.join(cells)} | {last / first:.2f} |"
