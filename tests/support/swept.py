"""Consumers of the queues that SWEPT_QUEUES names, with commas; in one that counts its steps, the
handler also does to its process what its message says."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta

from rabbit_tasks import App, Consumer, Message, RetryPolicy
from tests.support.obedient import Order, obey, record
from tests.support.steps import Steps

steps: Steps | None = None
"""Of this process."""


def consumer(name: str) -> Consumer[Order]:
    class Swept(Consumer[Order]):
        queue = name
        retry = RetryPolicy(delays=(timedelta(milliseconds=200),))
        delivery_limit = 2

        async def handle(self, order: Order, message: Message) -> None:
            record("start", message)
            if steps is not None and order.do == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)
            if steps is not None and order.do == "lose":
                assert steps.consuming is not None
                steps.consuming.transport.abort()
                # Until its redelivery is acked, for a copy that waits for the end of this run.
                while steps.acks_left > 1:
                    await asyncio.sleep(0.02)
            obey(order, message)
            record("end", message)

    return Swept()


def app() -> App:
    queues = os.environ.get("SWEPT_QUEUES", "swept").split(",")
    return App("swept", [consumer(queue) for queue in queues])
