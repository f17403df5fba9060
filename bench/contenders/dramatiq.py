"""Dramatiq: a worker with a thread per slot, which fetches two messages for each; its publisher waits
for each confirm. Its retries wait in the worker's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from bench.body import body_of
from bench.contender import Contender, first_message
from bench.measure import DELAY_MS, PAUSE
from bench.tally import REST, Stopwatch, Tally, Times

Work = Callable[[dict[str, Any]], None]


class Quorum(RabbitmqBroker):  # type: ignore[misc]
    """Its queues are classic ones, and there is no setting."""

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_queue_arguments(queue_name)
        return {**arguments, "x-queue-type": "quorum"}


class Entry(Contender):
    distribution = "dramatiq"

    def names(self) -> list[str]:
        return [self.queue, f"{self.queue}.DQ", f"{self.queue}.XQ"]

    def _actor(self, work: Work) -> tuple[Any, Any]:
        broker = Quorum(url=self.url, confirm_delivery=True)

        def on_message(body: dict[str, Any]) -> None:
            work(body)

        return broker, dramatiq.actor(
            on_message, broker=broker, queue_name=self.queue, actor_name="bench",
            # (It draws from half of this to the whole.)
            min_backoff=DELAY_MS, max_backoff=DELAY_MS * 4 // 3,
        )  # fmt: skip

    def _publishing(self, publish: Callable[[Any], None]) -> None:
        broker, actor = self._actor(lambda _: None)
        publish(actor.send)
        broker.close()

    def declare(self) -> None:
        broker, _ = self._actor(lambda _: None)
        broker.declare_queue(self.queue, ensure=True)
        broker.close()

    def fill(self, count: int) -> None:
        self._publishing(lambda send: _many(send, count))

    def publish_one(self, watch: Stopwatch) -> None:
        def publish(send: Any) -> None:
            send(body_of(0))
            with watch.running():
                _many(send, watch.count)

        self._publishing(publish)

    def _work(self, slots: int, work: Work, until: Callable[[Any], object]) -> None:
        broker, actor = self._actor(work)
        worker = dramatiq.Worker(broker, worker_threads=slots, worker_timeout=100)
        worker.start()
        until(actor.send)
        worker.stop()
        broker.close()

    def drain(self, tally: Tally, slots: int) -> None:
        self._work(slots, lambda _: tally.hit(), lambda _: tally.done.wait())

    def handlers(self, tally: Tally, slots: int) -> None:
        def work(_: dict[str, Any]) -> None:
            time.sleep(PAUSE)
            tally.hit()

        self._work(slots, work, lambda _: tally.done.wait())

    def retry(self, tally: Tally, slots: int) -> None:
        self._work(slots, lambda body: tally.fail_once(body["id"]), lambda _: tally.done.wait())

    def latency(self, times: Times) -> None:
        seen = threading.Event()

        def work(_: dict[str, Any]) -> None:
            times.now()
            seen.set()

        def publish(send: Any) -> None:
            for number in range(times.count):
                with times.one():
                    send(body_of(number))
                seen.wait()
                seen.clear()
                time.sleep(REST)

        self._work(1, work, publish)

    def first(self) -> None:
        self._work(1, lambda _: first_message(), lambda _: threading.Event().wait())


def _many(send: Callable[[dict[str, Any]], Any], count: int) -> None:
    for number in range(count):
        send(body_of(number))
