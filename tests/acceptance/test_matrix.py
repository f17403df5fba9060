"""Every fault that the way to a broker has, one after the other and two in a row, under load."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from rabbit_tasks import App, Consumer, Publisher, PublishError, Settings
from tests.acceptance.conftest import Figures
from tests.conftest import PASSWORD, eventually
from tests.support.account import ENVIRONMENT, Account
from tests.support.brokers import Broker
from tests.support.faults import FAULTS, Fault, Scene, is_quick
from tests.support.line import line
from tests.support.load import KINDS, Load
from tests.support.namespace import Namespace, a_namespace
from tests.support.obedient import Order
from tests.support.obedient import app as obedient
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
AGAIN = 60.0
"""Seconds after a fault in which a worker is to work again."""


@pytest.fixture
def namespace() -> Iterator[Namespace | None]:
    with a_namespace() as made:
        yield made


@asynccontextmanager
async def _scene(
    broker: Broker, vhost: str, user: str, settings: Settings, start: Start, runs: Runs,
    namespace: Namespace | None,
) -> AsyncIterator[Scene]:  # fmt: skip
    async with line(broker, namespace.host if namespace else "127.0.0.1") as cable:
        worker = start(
            under=namespace.under if namespace else "",
            RABBIT_TASKS_URL=cable.url(vhost, user, PASSWORD),
            RABBIT_TASKS_HEARTBEAT="1",
            RABBIT_TASKS_CONNECT_TIMEOUT="2",
            RABBIT_TASKS_RECONNECT_CAP="1",
            **ENVIRONMENT,
        )
        await eventually(lambda: "connected to RabbitMQ" in worker.log)
        settings = settings.changed(heartbeat=2, publish_timeout=3, connect_timeout=3)
        load = Load(settings)
        yield Scene(broker, vhost, user, settings, cable, namespace, worker, load, runs)


async def _works_again(scene: Scene) -> float:
    """Seconds until every kind of handler has done what is published now, without help."""
    began = time.monotonic()
    async with Publisher.open(scene.settings) as publisher:
        async with asyncio.timeout(AGAIN):
            probes = {await _published(publisher, kind) for kind in KINDS}
    await eventually(lambda: probes <= {row["id"] for row in scene.runs.all("end")}, within=AGAIN)
    return time.monotonic() - began


async def _published(publisher: Publisher, kind: type[Consumer[Order]]) -> str:
    """The id of a message that the broker has confirmed, be it not the first one."""
    while True:
        try:
            return await publisher.publish(kind, Order())
        except PublishError:
            await asyncio.sleep(0.1)


async def _suffer(scene: Scene, *faults: Fault) -> float:
    """One fault after the other while messages are in hand: they run once. Seconds to recover."""
    connected_before = scene.worker.log.count("connected to RabbitMQ")
    end = scene.runs.path.with_name(uuid.uuid4().hex)
    scene.long.clear()
    await scene.in_hand(Order(until=str(end)))
    long = set(scene.long)
    for fault in faults:
        await fault.strike(scene)
        await fault.mend(scene)
    took = await _works_again(scene)
    assert not {row["id"] for row in scene.runs.all("end")} & long
    end.touch()
    await eventually(
        lambda: set(scene.long) <= {row["id"] for row in scene.runs.all("end")}, within=30
    )
    assert all(scene.runs.attempts(one) == [1] for one in scene.long)
    sessions = scene.worker.log.count("connected to RabbitMQ") - connected_before
    assert sessions >= max(fault.loses_connection for fault in faults)
    return took


# --- the matrix -----------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.heavy)])
async def test_a_worker_works_again_after_each_fault_and_every_message_is_accounted_for(
    quick: bool, settings: Settings, broker: Broker, vhost: str, user: str, declared: Declared,
    start_worker: Start, runs: Runs, namespace: Namespace | None, figures: Figures,
) -> None:  # fmt: skip
    await declared(obedient)
    async with _scene(broker, vhost, user, settings, start_worker, runs, namespace) as scene:
        async with scene.load.goes_on():
            for fault in FAULTS:
                if why := fault.why_not(broker, namespace):
                    figures.add(f"{fault.name}: not tried, {why}")
                elif is_quick(fault, broker, namespace) or not quick:
                    took = await _suffer(scene, fault)
                    figures.add(f"{fault.name}: working again {took:.1f} s after it was over")
        account = Account(broker, vhost, scene.settings, scene.worker, runs)
        twice = await account.is_balanced(scene.load)
        figures.add(f"{len(scene.load.confirmed)} messages, {twice} copies made twice")


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", FAULTS, ids=lambda fault: fault.name)
async def test_two_faults_in_a_row(
    first: Fault, settings: Settings, broker: Broker, vhost: str, user: str, declared: Declared,
    start_worker: Start, runs: Runs, namespace: Namespace | None, figures: Figures,
) -> None:  # fmt: skip
    """The second one strikes as soon as the first is over, before the worker has come to itself."""
    if why := first.why_not(broker, namespace):
        pytest.skip(why)
    await declared(obedient)
    async with _scene(broker, vhost, user, settings, start_worker, runs, namespace) as scene:
        async with scene.load.goes_on():
            for second in FAULTS:
                if not second.why_not(broker, namespace):
                    took = await _suffer(scene, first, second)
                    figures.add(f"{first.name}, {second.name}: working again after {took:.1f} s")
        account = Account(broker, vhost, scene.settings, scene.worker, runs)
        twice = await account.is_balanced(scene.load)
        figures.add(f"{len(scene.load.confirmed)} messages, {twice} copies made twice")
