"""A broker that hangs and closes no socket: every call ends in its time, and every worker in its own."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rabbit_tasks import App, ConnectError, Publisher, Settings, Unconfirmed
from rabbit_tasks import broker as brokers
from rabbit_tasks import declare as declaring
from rabbit_tasks.broker import Connection, connect
from rabbit_tasks.deliveries import Deliveries
from rabbit_tasks.delivery import Delivery
from rabbit_tasks.properties import Properties
from tests.conftest import eventually
from tests.support import patient, stalling, unruly
from tests.support.brokers import Broker
from tests.support.obedient import Obey, ObeyInThread, Order
from tests.support.obedient import app as obedient
from tests.support.workers import SOON, Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
PATIENT = "tests.support.patient:app"
STALLING = "tests.support.stalling"
SLACK = 4.0
"""Seconds that a busy machine may take for its own part."""


@pytest.fixture(autouse=True)
def can_be_frozen(broker: Broker) -> None:
    if not broker.can_be_hurt:
        pytest.skip("this broker must not be frozen: RABBIT_TASKS_TEST_BROKER is not set")


@asynccontextmanager
async def frozen(broker: Broker) -> AsyncIterator[None]:
    broker.hurt("freeze")
    try:
        yield
    finally:
        await asyncio.to_thread(broker.hurt, "thaw")


async def ended(worker: WorkerProcess, since: float) -> float:
    """Seconds after which it was gone, with exit code 0."""
    assert await asyncio.to_thread(worker.wait, 60) == 0, worker.log
    return time.monotonic() - since


# --- each call ----------------------------------------------------------------------------------


async def test_every_call_ends_in_its_time_limit(
    settings: Settings, declared: Declared, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1.0  # instead of 10 s, so that the test takes no longer
    for module in (brokers, declaring):
        monkeypatch.setattr(module, "RPC_TIMEOUT", limit)
    settings = settings.changed(connect_timeout=limit, publish_timeout=limit)
    await declared(obedient)
    several = [await connect(settings, "test") for _ in range(7)]
    consuming, declares, looks, opens, acks, ends, drops = several
    channel, acking, filling = await consuming.open(), await acks.open(), await acks.open()
    publisher, closing, busy = (Publisher(settings) for _ in range(3))
    for one in (publisher, closing, busy):
        await one.publish(Obey, Order())  # so that its channel is open
    got = await acking.basic_get(Obey.queue)
    delivery = Delivery(
        b"",
        Properties.of({}),
        tag=got.delivery_tag or 0,
        deliveries=Deliveries(acks, acking, lambda *_: None),
    )

    async def many_acks() -> None:
        full = asyncio.create_task(filling.basic_publish(bytes(16_000_000)))  # the socket is full
        for _ in range(1000):
            delivery.ack()
            await asyncio.sleep(0)
        full.cancel()

    async def close_a_busy_one() -> None:
        on_its_way = [asyncio.create_task(busy.publish(Obey, Order())) for _ in range(5)]
        await asyncio.sleep(0)
        await busy.close(within=limit)
        results = await asyncio.gather(*on_its_way, return_exceptions=True)
        assert {type(result) for result in results} == {Unconfirmed}

    async def ignore(message: object) -> None: ...

    async def drop() -> None:
        await drops.end(within=0)

    calls: dict[str, tuple[Awaitable[object], type[Exception] | None]] = {
        "connect": (connect(settings, "test"), ConnectError),
        "publisher's connect": (Publisher(settings).connect(), ConnectError),
        "open a channel": (opens.open(), TimeoutError),
        "declare": (declaring.declare(declares, obedient.topology), ConnectError),
        "look queues up": (declaring.missing(looks, obedient.topology), ConnectError),
        "consume": (
            channel.basic_consume(Obey.queue, ignore, timeout=limit), TimeoutError
        ),
        "publish": (publisher.publish(Obey, Order()), Unconfirmed),
        "publish what needs a channel": (
            publisher.publish(Obey, Order(pad="x" * 2_000_000)), Unconfirmed
        ),
        "ack": (many_acks(), None),
        "close": (ends.end(within=limit), None),
        "close at once": (drop(), None),
        "publisher's close": (closing.close(within=limit), None),
        "busy publisher's close": (close_a_busy_one(), None),
    }  # fmt: skip
    took: dict[str, float] = {}

    async def timed(name: str, call: Awaitable[object], error: type[Exception] | None) -> None:
        began = time.monotonic()
        if error is None:
            await call
        else:
            with pytest.raises(error):
                await call
        took[name] = time.monotonic() - began

    async with frozen(broker):
        async with asyncio.timeout(30):
            await asyncio.gather(*(timed(name, *what) for name, what in calls.items()))
        assert {name: took[name] for name in took if took[name] > limit + SLACK} == {}
        for connection in several:
            await connection.end(within=0)
        await publisher.close(within=0)


# --- stopping -----------------------------------------------------------------------------------


async def test_a_worker_is_gone_within_its_grace_time_and_at_a_second_signal_within_two_seconds(
    publisher: Publisher, connection: Connection, declared: Declared, broker: Broker,
    vhost: str, start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    """Whatever it is doing: nothing, running handlers, settling, holding a copy, connecting."""
    for app in (obedient, patient.app, unruly.app, stalling.app):
        await declared(app)
    grace = 2
    given = ("--grace", str(grace))
    workers = {
        "idle": start_worker(*given, "unruly.talks", app="tests.support.unruly:app"),
        "running": start_worker(*given, app=PATIENT),
        "told twice": start_worker("--grace", "10m", app=PATIENT),
        "settling": start_worker(*given, "obey.async"),
        "holding": start_worker(*given, "obey.thread"),
        "in a thread of asyncio's": start_worker(*given, app=f"{STALLING}:app"),
    }
    for worker in workers.values():
        worker.ready()
    broker.delete(vhost, "queues", "obey.thread.retry.1.200ms")
    await publisher.publish(ObeyInThread, Order(do="raise"))
    await eventually(lambda: "is held" in workers["holding"].log)
    for kind in (*patient.KINDS, *patient.KINDS):
        await publisher.publish(kind, Order(do="sleep", seconds=600))
    await publisher.publish(stalling.InThread, b"")
    await publisher.publish(Obey, Order(do="raise", seconds=0.5))
    await eventually(lambda: len(runs.all()) == 9)
    async with frozen(broker):
        workers["connecting"] = start_worker(
            *given, "obey.process", RABBIT_TASKS_CONNECT_TIMEOUT="1"
        )
        await eventually(lambda: "next try" in workers["connecting"].log)
        await eventually(lambda: "failed: " in workers["settling"].log)
        workers["told twice"].signal(signal.SIGTERM)
        await eventually(lambda: "stopping" in workers["told twice"].log)
        await asyncio.sleep(0.3)  # it must be waiting when the second one comes
        assert all(worker.is_running for worker in workers.values())
        since = time.monotonic()
        for worker in workers.values():
            worker.signal(signal.SIGTERM)
        took = dict(
            zip(
                workers,
                await asyncio.gather(*(ended(worker, since) for worker in workers.values())),
                strict=True,
            )
        )
    assert {name: seconds for name, seconds in took.items() if seconds > grace + SLACK} == {}
    for name, worker in workers.items():
        for word in ("Traceback", "never retrieved", "was destroyed", "please report"):
            assert word not in worker.log, (name, worker.log)


# --- with a broker that is well -----------------------------------------------------------------


async def test_what_cannot_be_cancelled_does_not_hold_a_worker_longer_than_its_grace_time(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    """A lifespan that hangs at its end, one that cannot be cancelled, a blocked event loop."""
    await declared(stalling.app)
    await declared(unruly.app)
    hangs = start_worker("--grace", "2", app=f"{STALLING}:endless")
    deaf = start_worker("--grace", "2", app=f"{STALLING}:deaf")
    blocked = start_worker("--grace", "2", "unruly.blocks", app="tests.support.unruly:app")
    await publisher.publish(unruly.Blocks, "600")
    await eventually(lambda: runs.all())
    for worker in (hangs.ready(), deaf.ready(), blocked):
        worker.signal(signal.SIGTERM)
    since = time.monotonic()
    for worker, word in (
        (hangs, "did not end within the grace time"),
        (deaf, "what still runs is left"),
        (blocked, "what still runs is left"),
    ):
        assert await ended(worker, since) < 2 + SLACK
        assert word in worker.log
        assert "Traceback" not in worker.log
    assert "lifespan: closing" in hangs.log
    assert "lifespan: no" in deaf.log


async def test_a_worker_that_fails_does_not_wait_longer_for_its_threads(
    publisher: Publisher, declared: Declared, broker: Broker, vhost: str, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    """Its user may no longer come in; a handler still runs, in a thread."""
    await declared(patient.app)
    broker.create_user("passing", "by")
    try:
        broker.allow(vhost, "passing")
        worker = start_worker(
            "--grace", "2", "patient.thread", app=PATIENT,
            RABBIT_TASKS_URL=broker.url(vhost, "passing", "by"),
        ).ready()  # fmt: skip
        await publisher.publish(patient.PatientInThread, Order(do="sleep", seconds=600))
        await eventually(lambda: runs.all())
    finally:
        broker.delete_user("passing")  # and the broker closes its connections
    assert await asyncio.to_thread(worker.wait, SOON) == 1
    assert "error: " in worker.log
    assert "refused user 'passing'" in worker.log
    assert "Traceback" not in worker.log
