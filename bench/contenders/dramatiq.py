"""Dramatiq: a worker with a thread per slot; its publisher waits for each confirm."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from bench.body import body_of
from bench.contender import Contender
from bench.measure import PAUSE
from bench.tally import Stopwatch, Tally


class Quorum(RabbitmqBroker):  # type: ignore[misc]
    """Its queues are classic ones, and there is no setting."""

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_queue_arguments(queue_name)
        return {**arguments, "x-queue-type": "quorum"}


class Entry(Contender):
    distribution = "dramatiq"

    def names(self) -> list[str]:
        return [self.queue, f"{self.queue}.DQ", f"{self.queue}.XQ"]

    def _actor(self, work: Callable[[], None]) -> tuple[Any, Any]:
        broker = Quorum(url=self.url, confirm_delivery=True)

        def on_message(body: dict[str, Any]) -> None:
            work()

        return broker, dramatiq.actor(
            on_message, broker=broker, queue_name=self.queue, actor_name="bench"
        )

    def _publishing(self, publish: Callable[[Any], None]) -> None:
        broker, actor = self._actor(lambda: None)
        publish(actor.send)
        broker.close()

    def declare(self) -> None:
        broker, _ = self._actor(lambda: None)
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

    def _work(self, tally: Tally, slots: int, work: Callable[[], None]) -> None:
        broker, _ = self._actor(work)
        worker = dramatiq.Worker(broker, worker_threads=slots, worker_timeout=100)
        worker.start()
        tally.done.wait()
        worker.stop()
        broker.close()

    def drain(self, tally: Tally, slots: int) -> None:
        self._work(tally, slots, tally.hit)

    def handlers(self, tally: Tally, slots: int) -> None:
        def work() -> None:
            time.sleep(PAUSE)
            tally.hit()

        self._work(tally, slots, work)


def _many(send: Callable[[dict[str, Any]], Any], count: int) -> None:
    for number in range(count):
        send(body_of(number))
