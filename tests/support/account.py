"""The account of what became of every message, and of what a worker keeps on the broker."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from rabbit_tasks import Publisher, Settings
from rabbit_tasks.broker import Connection, connected
from rabbit_tasks.parking import browse
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.load import KINDS, Load
from tests.support.obedient import Order
from tests.support.obedient import app as obedient
from tests.support.queues import consumers, depth
from tests.support.workers import Runs, WorkerProcess

SLOTS = {kind.queue: 2 for kind in KINDS}
"""Of the worker whose account this is, by its environment."""
ENVIRONMENT = {
    "OBEDIENT_CONCURRENCY": "2", "OBEDIENT_PROCESSES": "2", "OBEDIENT_TIMEOUT": "600",
}  # fmt: skip


@dataclass
class Account:
    """Of one worker of the obedient app, and of what a load has published for it.

    settings    straight to the broker
    """

    broker: Broker
    vhost: str
    settings: Settings
    worker: WorkerProcess
    runs: Runs

    async def is_balanced(self, load: Load) -> int:
        """Done or parked; nothing waits, nothing is held, nothing ran twice at once.

        Returns how many copies were made twice: of those that were on their way when a connection was
        lost nobody knows whether they are stored.
        """
        async with connected(self.settings, "test") as connection:
            await self.all_is_quiet(load)
            done = self._done()
            aside = await parked(connection)
            assert load.to_be_parked() <= set(aside), "lost"
            assert not set(aside) & done
            await self._a_slot_holds_one(connection)
            await eventually(partial(self._nothing_is_left_over, connection), within=40)
        assert not runs_at_once(self.runs)
        assert most_at_once(self.runs) <= Counter(SLOTS)
        twice = sum(aside.values()) - len(aside)
        attempts_of: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for row in self.runs.all("start"):
            attempts_of[row["id"]][row["attempt"]] += 1
        for one, order in load.confirmed.items():
            attempts = attempts_of[one]
            assert set(attempts) == ({1, 2} if order.do == "raise" else {1}), one
            assert attempts[1] == 1, f"{one}: run again, with no copy made"
            twice += attempts[2] > 1
        losses = self.worker.log.count("connected to RabbitMQ") - 1
        assert twice <= losses * sum(SLOTS.values())
        assert self.worker.is_running, self.worker.log
        for word in ("Traceback", "never retrieved", "please report"):
            assert word not in self.worker.log, self.worker.log
        return twice

    async def all_is_quiet(self, load: Load) -> None:
        """What was confirmed is done or parked, and nothing waits to be tried again."""
        try:
            await eventually(lambda: load.to_be_done() <= self._done())
        except AssertionError:
            raise AssertionError(f"lost: {sorted(load.to_be_done() - self._done())}") from None
        async with connected(self.settings, "test") as connection:
            for queue in obedient.topology.queues:
                if not queue.name.endswith(".parked"):
                    await eventually(partial(_is_empty, connection, queue.name))

    def _done(self) -> set[str]:
        return {row["id"] for row in self.runs.all("end")}

    async def _a_slot_holds_one(self, connection: Connection) -> None:
        """Of more messages than slots, as many as there are slots are taken; the others wait."""
        end = self.runs.path.with_name(uuid.uuid4().hex)
        before = len(self.runs.all("start"))
        async with Publisher.open(self.settings) as publisher:
            for kind in KINDS:
                await publisher.publish_many(
                    kind, [Order(until=str(end))] * (SLOTS[kind.queue] + 3)
                )
        await eventually(lambda: len(self.runs.all("start")) >= before + sum(SLOTS.values()))
        for queue in SLOTS:
            assert await depth(connection, queue) == 3, f"{queue}: more than one for a slot"
        assert Counter(r["queue"] for r in self.runs.all("start")[before:]) == Counter(SLOTS)
        end.touch()
        for queue in SLOTS:
            await eventually(partial(_is_empty, connection, queue))

    async def _nothing_is_left_over(self, connection: Connection) -> bool:
        """One connection to consume, one to publish; no channel without a consumer, and for each slot
        one message that it may be handed."""
        vhost = quote(self.vhost, safe="")
        rows = await self._ask(f"/consumers/{vhost}")
        # (It goes on listing the consumers of a queue that was deleted, without their channels.)
        rows = [row for row in rows if row["channel_details"]]
        channels = {row["channel_details"]["name"] for row in rows}
        listed = Counter(row["queue"]["name"] for row in rows)
        slots = Counter[str]()
        for row in rows:
            slots[row["queue"]["name"]] += row["prefetch_count"]
        counted = Counter({queue: await consumers(connection, queue) for queue in SLOTS})
        connections = await self._ask(f"/vhosts/{vhost}/connections")
        names = Counter(str(row.get("user_provided_name", "? ?")).split()[1] for row in connections)
        consuming = [one for one in connections if "worker" in one.get("user_provided_name", "")]
        return (
            slots == Counter(SLOTS)
            and listed == counted
            and len(channels) == len(rows)
            and names == {"worker": 1, "publisher": 1, "test": 1}
            and consuming[0].get("channels") == len(rows)
        )

    async def _ask(self, what: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = await asyncio.to_thread(self.broker.api, "GET", what)
        return rows


async def _is_empty(connection: Connection, queue: str) -> bool:
    return await depth(connection, queue) == 0


async def parked(connection: Connection) -> Counter[str]:
    """How often each id is in the parking lots."""
    return Counter([str(one.id) for kind in KINDS async for one in browse(connection, kind.queue)])


def runs_at_once(runs: Runs) -> list[str]:
    """Messages that had two runs at one moment."""
    twice = []
    going: Counter[str] = Counter()
    for row in runs.rows():
        going[row["id"]] += 1 if row["event"] == "start" else -1
        if going[row["id"]] > 1:
            twice.append(row["id"])
    return twice


def most_at_once(runs: Runs) -> Counter[str]:
    """Per queue, how many messages were in the handlers at one moment."""
    going: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for row in runs.rows():
        going[row["queue"]] += 1 if row["event"] == "start" else -1
        most[row["queue"]] = max(most[row["queue"]], going[row["queue"]])
    return most
