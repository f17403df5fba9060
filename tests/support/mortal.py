"""The obedient handler with a low delivery limit: a message may kill its workers three times."""

from __future__ import annotations

from rabbit_tasks import App, Consumer, Message, RetryPolicy
from tests.support.obedient import Order, run_async


class Mortal(Consumer[Order]):
    queue = "mortal"
    retry = RetryPolicy(attempts=2)
    delivery_limit = 2

    async def handle(self, order: Order, message: Message) -> None:
        await run_async(order, message)


class Common(Mortal):
    """With the limit that a consumer has of itself."""

    queue = "common"
    delivery_limit = Consumer.delivery_limit


app = App("mortal", [Mortal()])
common = App("common", [Common()])
