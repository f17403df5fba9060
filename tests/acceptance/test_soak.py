"""A worker that loses its connection again and again keeps nothing of those that are gone."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from rabbit_tasks import App, Publisher, Settings
from tests.acceptance.conftest import Figures
from tests.conftest import PASSWORD, eventually
from tests.support.account import ENVIRONMENT, SLOTS, Account
from tests.support.brokers import Broker
from tests.support.faults import Closed, Fault, Gone, Scene, Silence
from tests.support.line import line
from tests.support.load import KINDS, Load
from tests.support.obedient import ObeyInProcess, Order
from tests.support.obedient import app as obedient
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]


POOLS = 2 * 2 + 2 + 6
"""Threads at most: for the children, for the handlers in threads, and asyncio's own on two cores."""


class Cut(Fault):
    """The connections end without a word."""

    name = "connections cut"

    async def strike(self, scene: Scene) -> None:
        await eventually(scene.line.cut)


QUICK: tuple[Fault, ...] = (Cut(),)
ALL: tuple[Fault, ...] = (
    Cut(), Closed(), Cut(), Silence(), Cut(), Closed(), Cut(), Gone("freeze", "thaw"),
)  # fmt: skip


class Asked:
    """What a worker says of itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    async def numbers(self) -> dict[str, Any]:
        self._number += 1
        answer = self._folder / f"answer-{self._number}"
        (self._folder / f"ask-{self._number}").touch()
        await eventually(answer.exists)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


async def _quiet(scene: Scene, account: Account) -> None:
    """Every slot has just worked, some have failed and parked a message, and nothing is in hand."""
    orders = (
        *[Order(seconds=0.3)] * max(SLOTS.values()), Order(do="raise", times=1), Order(do="park"),
    )  # fmt: skip
    async with Publisher.open(scene.settings) as publisher:
        for kind in KINDS:
            scene.load.confirmed |= {await publisher.publish(kind, one): one for one in orders}
    await account.all_is_quiet(scene.load)


async def _share(asked: Asked) -> bool:
    """Whether all slots of each consumer share a channel."""
    tasks: dict[str, int] = (await asked.numbers())["tasks"]
    return sum(tasks.get(name, 0) for name in ("Worker._slots", "Worker._together")) == len(SLOTS)


def _kept(numbers: dict[str, Any]) -> dict[str, Any]:
    """What is to be the same as before, one by one."""
    threads = {**numbers["threads"], "pool": 0}
    tasks = dict(numbers["tasks"])
    # (Slots that shared no channel for a while go on in the other one.)
    tasks["Worker._slots"] = tasks.get("Worker._slots", 0) + tasks.pop("Worker._together", 0)
    return {**numbers, "memory": 0, "threads": threads, "tasks": tasks}


async def _suffer(scene: Scene, faults: tuple[Fault, ...], every: float, until: float) -> int:
    """One fault after the other, and a child process that dies; how many there were."""
    times = 0
    for fault in cycle(faults):
        if time.monotonic() > until:
            break
        if fault.why_not(scene.broker, None):
            continue
        times += 1
        next_one = time.monotonic() + every
        before = scene.worker.log.count("connected to RabbitMQ")
        await fault.strike(scene)
        await fault.mend(scene)
        await eventually(
            lambda before=before: scene.worker.log.count("connected to RabbitMQ") > before,  # type: ignore[misc]
            within=60,
        )
        await scene.in_hand(Order(do="vanish", times=1), kinds=(ObeyInProcess,))
        await asyncio.sleep(max(0.0, next_one - time.monotonic()))
    return times


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("seconds", "every", "faults", "growth"),
    [
        (12, 0.0, QUICK, 0.05),
        pytest.param(600, 20.0, ALL, 0.05, marks=[pytest.mark.heavy, pytest.mark.timeout(900)]),
    ],
    ids=["12 s", "10 min"],
)
async def test_nothing_is_left_of_lost_connections(
    seconds: float, every: float, faults: tuple[Fault, ...], growth: float,
    settings: Settings, broker: Broker, vhost: str, user: str, declared: Declared,
    start_worker: Start, runs: Runs, tmp_path: Path, figures: Figures,
) -> None:  # fmt: skip
    """No memory, no file, no task, no thread, no child process, no channel, no consumer."""
    await declared(obedient)
    settings = settings.changed(heartbeat=2, publish_timeout=3, connect_timeout=3)
    (tmp_path / "soaked").mkdir()
    async with line(broker) as cable:
        worker = start_worker(
            app="tests.support.soaked:app",
            SOAKED=str(tmp_path / "soaked"),
            RABBIT_TASKS_URL=cable.url(vhost, user, PASSWORD),
            RABBIT_TASKS_HEARTBEAT="1",
            RABBIT_TASKS_CONNECT_TIMEOUT="2",
            RABBIT_TASKS_RECONNECT_CAP="0.3",
            **ENVIRONMENT,
        )
        await eventually(lambda: "connected to RabbitMQ" in worker.log)
        scene = Scene(broker, vhost, user, settings, cable, None, worker, Load(settings), runs)
        account = Account(broker, vhost, settings, worker, runs)
        asked = Asked(tmp_path / "soaked")
        began = time.monotonic()
        async with scene.load.goes_on():
            times = await _suffer(scene, faults, every, began + seconds / 4)
        await _quiet(scene, account)
        await eventually(partial(_share, asked))
        warm = await asked.numbers()
        async with scene.load.goes_on():
            times += await _suffer(scene, faults, every, began + seconds)
        await _quiet(scene, account)
        now: dict[str, Any] = {}

        async def as_before() -> bool:
            now.update(await asked.numbers())
            return _kept(now) == _kept(warm)

        try:
            await eventually(as_before)
        except AssertionError:
            assert _kept(now) == _kept(warm)
        memory = now["memory"]
        figures.add(
            f"{times} lost connections in {seconds:g} s, {len(scene.load.confirmed)} messages: "
            f"memory from {warm['memory'] / 2**20:.1f} to {memory / 2**20:.1f} MiB, "
            f"{warm['files']} files, {sum(warm['tasks'].values())} tasks, "
            f"{warm['children']} children as before, {now['threads']['pool']} threads in pools"
        )
        assert now["threads"]["pool"] <= POOLS
        assert memory < warm["memory"] * (1 + growth)
        await account.is_balanced(scene.load)
