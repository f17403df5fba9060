"""Kill at every step: SIGKILL between any two frames of a message's life, and the account each time.

All steps of all lives: `scripts/test -m heavy tests/acceptance/test_sweep.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from aiormq.channel import Channel

from rabbit_tasks import Publisher
from rabbit_tasks.broker import Connection
from rabbit_tasks.properties import Properties
from tests.support.nursery import Nursery
from tests.support.obedient import Order
from tests.support.queues import take_all
from tests.support.steps import Trace
from tests.support.workers import Runs

APP = "tests.support.swept:app"
NURSERIES = 3


@dataclass(frozen=True)
class Life:
    """What a message comes to while its worker is watched, and where the watch begins."""

    order: Order = field(default_factory=Order)
    headers: dict[str, Any] = field(default_factory=dict)
    returned: int = 0
    """How often it was delivered before and never settled."""
    begin: int = 1
    """At which delivery of the watched process."""
    acks: int = 1
    """After so many acks the watched worker is asked to stop."""
    command: tuple[str, ...] = ()
    """What is watched, if not a worker; then the message is parked."""


LIVES = {
    "done": Life(),
    "retry": Life(Order(do="raise", times=1), acks=2),
    "park": Life(Order(do="park")),
    "attempts-spent": Life(Order(do="raise"), headers={"x-retry-count": 1}),
    "no-room": Life(Order(do="park"), headers={"theirs": b"x" * 130_500}),
    "crash": Life(headers={"x-crashes": {"count": 1}}, returned=1, acks=2),
    "died-too-often": Life(headers={"x-crashes": {"count": 2}}, returned=1),
    "put-back": Life(Order(do="stop"), acks=9),
    "still-running": Life(Order(do="lose"), begin=2, acks=2),
    "replay": Life(command=("parked", "replay", "{}", "--all"), acks=9),
    "discard": Life(command=("parked", "discard", "{}", "--all", "--yes"), acks=9),
}
KEY = re.compile(r"(before|after) Basic\.(Publish|Ack|Reject) ")
"""Before the copy, after it, before the ack, after it: between them something changes at the broker."""


class Sweep:
    """Each life has its queue. In a round its process dies at a step of it, and then a healthy worker
    finishes what all of them left."""

    def __init__(
        self, folder: Path, nurseries: list[Nursery], publisher: Publisher,
        connection: Connection, runs: Runs,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.publisher = publisher
        self.connection = connection
        self.runs = runs
        self.codes: dict[str, int] = {}
        self._channel: Channel | None = None
        self._all = {"SWEPT_QUEUES": ",".join(LIVES)}
        self._free: asyncio.Queue[Nursery] = asyncio.Queue()
        for nursery in nurseries:
            self._free.put_nowait(nursery)

    async def declare(self) -> None:
        log = self.folder / "declare.log"
        code = await self._run("--app", APP, "topology", "declare", log=log, env=self._all)
        assert code == 0, log.read_text()

    async def die(self, name: str, step: int) -> str:
        """Let a message come to it and its process die (0: live to its end); the message's id."""
        life, one = LIVES[name], f"{name}.{step}"
        await self._prepare(name, one, life)
        arguments = [part.format(name) for part in life.command] or [
            "--app", APP, "work", "--grace", "0.2s", name
        ]  # fmt: skip
        self.codes[one] = await self._run(
            *arguments, log=self.folder / f"{one}.log", env={"SWEPT_QUEUES": name},
            steps={"path": str(self.folder / f"{one}.steps"), "begin": life.begin,
                   "die_at": step, "acks": life.acks},
        )  # fmt: skip
        return one

    async def _run(self, *arguments: str, **options: Any) -> int:
        nursery = await self._free.get()
        try:
            return await asyncio.to_thread(nursery.run, *arguments, **options)
        finally:
            self._free.put_nowait(nursery)

    async def _prepare(self, name: str, one: str, life: Life) -> None:
        headers = {"x-origin-queue": name, **life.headers}
        properties = Properties.of(headers, message_id=one, delivery_mode=2)
        to = f"{name}.parked" if life.command else name
        await self.publisher.send("", to, life.order.model_dump_json().encode(), properties)
        for _ in range(life.returned):
            channel = await self.connection.open()
            await channel.basic_get(name)
            await channel.close()

    def trace(self, one: str) -> Trace:
        return Trace(self.folder / f"{one}.steps")

    async def finish(self, ids: list[str]) -> None:
        """A healthy worker does what is left; then the account of each message."""
        nursery = await self._free.get()
        log = self.folder / f"healthy-{len(self.codes)}.log"
        healthy = nursery.begin("--app", APP, "work", log=log, env=self._all)
        is_at_rest = 0
        async with asyncio.timeout(60):
            while is_at_rest < 2:
                await asyncio.sleep(0.1)
                # (Not before it can be stopped, where there is nothing left to do.)
                there = "connected to" in log.read_text() and await self._are_there(ids, healthy)
                is_at_rest = is_at_rest + 1 if there else 0
        os.kill(healthy, signal.SIGTERM)
        assert await asyncio.to_thread(nursery.end) == 0, log.read_text()
        self._free.put_nowait(nursery)
        assert await self._waiting() == 0
        parked = Counter[str | None]()
        for name in LIVES:
            if await self._depth(f"{name}.parked"):
                found = await take_all(self.connection, f"{name}.parked")
                parked.update(one.properties.text("message_id") for one in found)
        assert set(parked) <= set(ids)
        for one in ids:
            self._account(one, healthy, parked[one])

    async def _are_there(self, ids: list[str], healthy: int) -> bool:
        """Whether the healthy worker, or the parking lot, has as many as there must be."""
        wanted = sum(self.trace(one).copies()[0] for one in ids)
        for row in self.runs.all("end"):
            wanted -= row["pid"] == healthy and row["id"] in ids
        if wanted > 0:
            wanted -= await self._depth(*(f"{name}.parked" for name in LIVES))
        return wanted <= 0 and not await self._waiting()

    async def _waiting(self) -> int:
        return await self._depth(
            *(
                f"{name}{kind}"
                for name in LIVES
                for kind in ("", ".retry.1.200ms", ".crashed.100ms")
            )
        )

    async def _depth(self, *queues: str) -> int:
        """Messages ready in all of them; on one channel, since it is asked often."""
        if self._channel is None:
            self._channel = await self.connection.open()
        answers = [await self._channel.queue_declare(name, passive=True) for name in queues]
        return sum(answer.message_count or 0 for answer in answers)

    def _account(self, one: str, healthy: int, parked: int) -> None:
        """Nothing is lost, and nothing is there twice but between a copy and the ack."""
        trace = self.trace(one)
        where = f"{one}: died at {trace.last!r} with {self.codes[one]}"
        ended = Counter(row["pid"] for row in self.runs.all("end", one))
        there = ended.pop(healthy, 0) + parked
        is_discarded = one.startswith("discard.") and trace.has("after Basic.Ack")
        assert there or ended or is_discarded, f"{where}: lost"
        least, most = trace.copies()
        assert least <= there <= most, f"{where}: {there} times, not {least} to {most}"


@pytest.fixture
async def sweep(
    tmp_path: Path, url: str, publisher: Publisher, connection: Connection, runs: Runs
) -> AsyncIterator[Sweep]:
    env = {"RABBIT_TASKS_URL": url, "RABBIT_TASKS_RECONNECT_CAP": "50ms",
           "OBEDIENT_RUNS": str(runs.path)}  # fmt: skip
    with ExitStack() as stack:
        nurseries = [stack.enter_context(Nursery(env)) for _ in range(NURSERIES)]
        yield Sweep(tmp_path, nurseries, publisher, connection, runs)


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(False, marks=pytest.mark.timeout(300)),  # (on a busy machine)
        pytest.param(True, marks=[pytest.mark.heavy, pytest.mark.timeout(1800)]),
    ],
)
async def test_killed_at_any_step_of_its_life_a_message_is_done_or_parked(
    every: bool, sweep: Sweep
) -> None:
    await sweep.declare()
    whole = await asyncio.gather(*[sweep.die(name, 0) for name in LIVES])
    await sweep.finish(whole)
    deaths = {}
    for one, name in zip(whole, LIVES, strict=True):
        assert sweep.codes[one] == 0, (sweep.folder / f"{one}.log").read_text()
        steps = enumerate(sweep.trace(one).steps, 1)
        deaths[name] = [number for number, what in steps if every or KEY.match(what)]
        assert deaths[name], one
    for round_ in zip_longest(*deaths.values()):
        dying = [
            sweep.die(name, number)
            for name, number in zip(deaths, round_, strict=True) if number is not None
        ]  # fmt: skip
        await sweep.finish(await asyncio.gather(*dying))
    killed = Counter(sweep.codes.values())[-signal.SIGKILL]
    # (The last steps of two connections may come in another order, or fewer.)
    assert killed >= 0.95 * sum(map(len, deaths.values()))
    logging.getLogger("tests").info("%d deaths", killed)
