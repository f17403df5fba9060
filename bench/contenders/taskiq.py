"""taskiq with taskiq-aio-pika: a receiver in this process, which acks after the task. Retries wait in
a queue of the broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from taskiq import SmartRetryMiddleware
from taskiq.acks import AcknowledgeType
from taskiq.api import run_receiver_task
from taskiq_aio_pika import AioPikaBroker
from taskiq_aio_pika.exchange import Exchange
from taskiq_aio_pika.queue import Queue, QueueType

from bench.body import body_of
from bench.contender import Contender, first_message
from bench.measure import DELAY_MS, PAUSE, WINDOW
from bench.tally import Stopwatch, Tally, Times

Body = dict[str, Any]

logging.getLogger("taskiq").setLevel(logging.WARNING)  # a line for every message


class Entry(Contender):
    distribution = "taskiq-aio-pika"

    def names(self) -> list[str]:
        return [self.queue, f"{self.queue}.dead", f"{self.queue}.delay"]

    def exchanges(self) -> list[str]:
        return [f"{self.queue}.exchange"]

    def _broker(self, slots: int = 1) -> Any:
        return AioPikaBroker(
            self.url,
            qos=slots,
            exchange=Exchange(name=f"{self.queue}.exchange"),
            task_queues=[Queue(name=self.queue, type=QueueType.QUORUM)],
            dead_letter_queue=Queue(name=f"{self.queue}.dead", type=QueueType.QUORUM),
            delay_queue=Queue(name=f"{self.queue}.delay", type=QueueType.QUORUM),
        ).with_middlewares(
            SmartRetryMiddleware(default_delay=DELAY_MS / 1000, default_retry_label=True)
        )

    def _publishing(self, publish: Callable[[Any], Awaitable[None]]) -> None:
        """Call with what takes a body and returns when it is confirmed."""

        async def open_and_publish() -> None:
            broker = self._broker()
            await broker.startup()

            async def work(body: Body) -> None: ...

            await publish(broker.task(task_name="bench")(work).kiq)
            await broker.shutdown()

        asyncio.run(open_and_publish())

    def declare(self) -> None:
        async def nothing(_: Any) -> None: ...

        self._publishing(nothing)

    def fill(self, count: int) -> None:
        self._publishing(lambda kiq: _many(kiq, count))

    def publish_one(self, watch: Stopwatch) -> None:
        async def publish(kiq: Any) -> None:
            await kiq(body_of(0))
            with watch.running():
                for number in range(watch.count):
                    await kiq(body_of(number))

        self._publishing(publish)

    def publish_many(self, watch: Stopwatch) -> None:
        async def publish(kiq: Any) -> None:
            await kiq(body_of(0))
            with watch.running():
                await _many(kiq, watch.count)

        self._publishing(publish)

    def _work(
        self,
        slots: int,
        handle: Callable[[Body], Awaitable[None]],
        until: Callable[[Any], Awaitable[object]],
    ) -> None:
        async def work() -> None:
            broker = self._broker(slots)
            broker.is_worker_process = True

            async def on_message(body: Body) -> None:
                await handle(body)

            task = broker.task(task_name="bench")(on_message)
            await broker.startup()
            receiving = asyncio.create_task(
                run_receiver_task(
                    broker, max_async_tasks=slots, ack_time=AcknowledgeType.WHEN_EXECUTED
                )
            )
            await until(task.kiq)
            await asyncio.sleep(0.2)  # nothing tells when its last acks are through
            receiving.cancel()
            await asyncio.wait([receiving])
            await broker.shutdown()

        asyncio.run(work())

    def drain(self, tally: Tally, slots: int) -> None:
        async def handle(_: Body) -> None:
            tally.hit()

        self._work(slots, handle, lambda _: tally.wait())

    def handlers(self, tally: Tally, slots: int) -> None:
        async def handle(_: Body) -> None:
            await asyncio.sleep(PAUSE)
            tally.hit()

        self._work(slots, handle, lambda _: tally.wait())

    def retry(self, tally: Tally, slots: int) -> None:
        async def handle(body: Body) -> None:
            tally.fail_once(body["id"])

        self._work(slots, handle, lambda _: tally.wait())

    def first(self) -> None:
        async def handle(_: Body) -> None:
            first_message()

        self._work(1, handle, lambda _: asyncio.Event().wait())

    def latency(self, times: Times) -> None:
        async def handle(_: Body) -> None:
            times.now()

        async def publish(kiq: Any) -> None:
            for number in range(times.count):
                with times.one():
                    await kiq(body_of(number))
                await times.rest()

        self._work(1, handle, publish)


async def _many(kiq: Callable[[Body], Awaitable[Any]], count: int) -> None:
    numbers = iter(range(count))

    async def pump() -> None:
        for number in numbers:
            await kiq(body_of(number))

    await asyncio.gather(*(pump() for _ in range(WINDOW)))
