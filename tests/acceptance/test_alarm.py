"""A memory alarm of the broker: publishers are held back, acks go on, and it ends by itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rabbit_tasks import App, Publisher, Settings, Unconfirmed
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.obedient import Obey, ObeyInThread, Order
from tests.support.obedient import app as obedient
from tests.support.workers import SOON, Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
USUAL = "0.6"


@asynccontextmanager
async def alarm(broker: Broker) -> AsyncIterator[None]:
    """Every connection that publishes is blocked, once it does."""
    try:
        if not await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.00001"):
            pytest.skip("no alarm can be raised: RABBIT_TASKS_TEST_BROKER does not take `ctl`")
        yield
    finally:
        await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", USUAL)


async def test_an_alarm_holds_copies_back_with_one_line_while_acks_go_on_and_ends_by_itself(
    settings: Settings, declared: Declared, broker: Broker, start_worker: Start, runs: Runs,
    tmp_path: Path,
) -> None:  # fmt: skip
    await declared(obedient)
    alarmed = tmp_path / "alarmed"
    patience = {"RABBIT_TASKS_PUBLISH_TIMEOUT": "0.5"}
    works = start_worker("obey.async", OBEDIENT_CONCURRENCY="4", **patience).ready()
    leaves = start_worker("obey.thread", "--grace", "2", **patience).ready()
    async with Publisher.open(settings.changed(publish_timeout=0.5)) as publisher:
        # Ahead of the alarm: handlers that end amid it, some with a copy to publish.
        fails = [
            await publisher.publish(kind, Order(do="raise", times=1, until=str(alarmed)))
            for kind in (Obey, Obey, ObeyInThread)
        ]
        succeeds = {await publisher.publish(Obey, Order(until=str(alarmed))) for _ in range(50)}
        await eventually(lambda: {r["id"] for r in runs.all()} >= set(fails))
        async with alarm(broker):
            alarmed.touch()
            for worker in (works, leaves):
                await eventually(lambda worker=worker: "holds publishers back" in worker.log)  # type: ignore[misc]
            with pytest.raises(Unconfirmed, match="rabbitmq-diagnostics alarms"):
                await publisher.publish(Obey, Order())
            leaves.signal(signal.SIGTERM)
            assert await asyncio.to_thread(leaves.wait, SOON) == 0
            await asyncio.sleep(1.2)  # more than two time limits of a publish
            # A slot has one message at a time: it gets the next one for the ack of the last.
            await eventually(lambda: {r["id"] for r in runs.all("end")} >= succeeds)
            assert "is held" not in works.log
            assert not runs.all("end", fails[0])
        await eventually(lambda: {r["id"] for r in runs.all("end")} >= set(fails[:2]))
    assert runs.attempts(fails[0]) == [1, 2]
    works.signal(signal.SIGTERM)
    assert await asyncio.to_thread(works.wait, SOON) == 0
    said = [line["message"] for line in works.lines()]
    (begins,) = [text for text in said if "holds publishers back" in text]
    assert "memory" in begins
    assert "rabbitmq-diagnostics alarms" in begins
    assert len([text for text in said if "takes messages again" in text]) == 1
    for worker in (works, leaves):
        for word in ("Traceback", "never retrieved", "was destroyed", "please report"):
            assert word not in worker.log, worker.log
