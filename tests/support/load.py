"""Load on the obedient consumers, and the account of what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count, cycle

from rabbit_tasks import Consumer, Publisher, PublishError, Settings
from tests.support.obedient import Obey, ObeyInProcess, ObeyInThread, Order

SOME_FAIL = (
    Order(do="sleep", seconds=0.05), Order(), Order(do="raise", times=1), Order(do="park"),
)  # fmt: skip
_NUMBERS = count(1)
KINDS: tuple[type[Consumer[Order]], ...] = (Obey, ObeyInThread, ObeyInProcess)


class Load:
    """Publishes to every consumer, on and on; knows what the broker has confirmed.

    every   seconds between two messages
    """

    def __init__(
        self, settings: Settings, orders: Sequence[Order] = SOME_FAIL, every: float = 0.03
    ) -> None:
        self.confirmed: dict[str, Order] = {}
        self.unsure: list[str] = []
        self._settings = settings
        self._orders = cycle(orders)
        self._every = every

    @asynccontextmanager
    async def goes_on(self) -> AsyncIterator[None]:
        """For the length of a block."""
        async with Publisher.open(self._settings) as publisher:
            task = asyncio.create_task(self._go_on(publisher))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled(), task.exception()

    async def _go_on(self, publisher: Publisher) -> None:
        for kind in cycle((Obey, ObeyInThread, Obey, ObeyInThread, ObeyInProcess)):
            message_id, order = f"load-{next(_NUMBERS)}", next(self._orders)
            try:
                await publisher.publish(kind, order, message_id=message_id)
            except PublishError:
                self.unsure.append(message_id)
                await asyncio.sleep(0.1)
            else:
                self.confirmed[message_id] = order
            await asyncio.sleep(self._every)

    def forget(self) -> None:
        """Somebody has deleted what was published until now."""
        self.confirmed.clear()

    def to_be_done(self) -> set[str]:
        return {one for one, order in self.confirmed.items() if order.do != "park"}

    def to_be_parked(self) -> set[str]:
        return {one for one, order in self.confirmed.items() if order.do == "park"}
