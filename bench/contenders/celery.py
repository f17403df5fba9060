"""Celery: a worker with the pool of threads, or with one slot none, late acks, a prefetch of one per
slot. (Its delays on quorum queues are whole seconds, by 28 queues of its own: no retry here.)"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.worker import state
from celery.worker.consumer.delayed_delivery import DelayedDelivery
from kombu import Exchange, Queue

from bench.body import body_of
from bench.contender import Contender, first_message
from bench.measure import PAUSE
from bench.tally import REST, Stopwatch, Tally, Times

logging.getLogger("celery").setLevel(logging.WARNING)  # two lines for every message

# With quorum queues it makes 28 queues and as many exchanges, whose names are not the run's own.
DelayedDelivery.include_if = lambda *_: False


class Entry(Contender):
    distribution = "celery"

    def exchanges(self) -> list[str]:
        return [f"{self.queue}.exchange", "celeryev", "celery.pidbox", "reply.celery.pidbox"]

    def _task(self, work: Callable[[], None]) -> tuple[Any, Any]:
        app = Celery("bench", broker=self.url)
        app.set_default()  # or else the pool's threads look for the task in an app of their own
        exchange = Exchange(f"{self.queue}.exchange", type="direct")
        app.conf.update(
            task_queues=[
                Queue(
                    self.queue,
                    exchange,
                    routing_key=self.queue,
                    queue_arguments={"x-queue-type": "quorum"},
                )
            ],
            task_default_queue=self.queue,
            task_default_exchange=exchange.name,
            task_default_routing_key=self.queue,
            task_acks_late=True,
            task_ignore_result=True,
            worker_prefetch_multiplier=1,
            worker_enable_remote_control=False,
            worker_hijack_root_logger=False,
            broker_connection_retry_on_startup=True,
            broker_transport_options={"confirm_publish": True},
        )

        def on_message(body: dict[str, Any]) -> None:
            work()

        return app, app.task(on_message, name="bench", shared=False)

    def _publishing(self, publish: Callable[[Any], None]) -> None:
        app, task = self._task(lambda: None)
        publish(task.delay)
        app.close()

    def declare(self) -> None:
        app, _ = self._task(lambda: None)
        with app.connection() as connection:
            for queue in app.conf.task_queues:
                queue(connection.default_channel).declare()
        app.close()

    def fill(self, count: int) -> None:
        self._publishing(lambda delay: _many(delay, count))

    def publish_one(self, watch: Stopwatch) -> None:
        def publish(delay: Any) -> None:
            delay(body_of(0))
            with watch.running():
                _many(delay, watch.count)

        self._publishing(publish)

    def _work(self, slots: int, work: Callable[[], None], until: Callable[[Any], object]) -> None:
        app, task = self._task(work)
        worker = app.WorkController(
            pool="threads" if slots > 1 else "solo",
            concurrency=slots,
            loglevel="WARNING",
        )
        working = threading.Thread(target=worker.start, daemon=True)
        working.start()
        until(task.delay)
        time.sleep(0.5)  # nothing tells when its last acks are through
        # As its signal handler does: stopped by another thread, it would wait for an answer for ever
        # that its own has read.
        state.should_stop = 0
        working.join(30)
        state.should_stop = None
        app.close()

    def drain(self, tally: Tally, slots: int) -> None:
        self._work(slots, tally.hit, lambda _: tally.done.wait())

    def handlers(self, tally: Tally, slots: int) -> None:
        def work() -> None:
            time.sleep(PAUSE)
            tally.hit()

        self._work(slots, work, lambda _: tally.done.wait())

    def latency(self, times: Times) -> None:
        seen = threading.Event()

        def work() -> None:
            times.now()
            seen.set()

        def publish(delay: Any) -> None:
            for number in range(times.count):
                with times.one():
                    delay(body_of(number))
                seen.wait()
                seen.clear()
                time.sleep(REST)

        self._work(1, work, publish)

    def first(self) -> None:
        self._work(1, first_message, lambda _: threading.Event().wait())


def _many(delay: Callable[[dict[str, Any]], Any], count: int) -> None:
    for number in range(count):
        delay(body_of(number))
