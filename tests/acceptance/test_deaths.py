"""SIGKILL: whatever dies at whatever moment, nothing is lost and nothing loops."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

from rabbit_tasks import App, Publisher
from rabbit_tasks.broker import Connection
from rabbit_tasks.parking import browse
from tests.conftest import eventually
from tests.support import mortal, patient
from tests.support.mortal import Mortal
from tests.support.obedient import Obey, ObeyInProcess, ObeyInThread, Order
from tests.support.obedient import app as obedient
from tests.support.queues import depth, take_all
from tests.support.workers import Runs, WorkerProcess

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
PATIENT = "tests.support.patient:app"


async def test_killed_while_the_message_waits_in_each_retry_queue_it_is_tried_three_times(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(patient.app)
    failing = await publisher.publish(patient.Patient, Order(do="raise"))
    for attempt, retry_queue in (
        (1, "patient.async.retry.1.600ms"),
        (2, "patient.async.retry.2.700ms"),
    ):
        # One slot: the broker hands out the next message when it has the ack of the one before.
        behind = await publisher.publish(patient.Patient, Order(do="sleep", seconds=600))
        worker = start_worker("patient.async", app=PATIENT)
        await eventually(lambda behind=behind: runs.all("start", behind))  # type: ignore[misc]
        assert runs.attempts(failing) == list(range(1, attempt + 1))
        assert await depth(connection, retry_queue) == 1
        worker.kill()
        await eventually(lambda: depth(connection, "patient.async"))
        (found,) = [
            one for one in await take_all(connection, "patient.async")
            if one.properties.text("message_id") == behind
        ]  # fmt: skip
        assert found.properties.headers.get("x-retry-count") is None
        await eventually(lambda: depth(connection, "patient.async"))  # back by the broker alone
    start_worker("patient.async", app=PATIENT)
    await eventually(lambda: depth(connection, "patient.async.parked"))
    assert runs.attempts(failing) == [1, 2, 3]
    (parked,) = [one async for one in browse(connection, "patient.async")]
    assert parked.id == failing
    assert parked.reason == "failed 3 attempts of 3"
    assert [one["attempt"] for one in parked.attempts] == [1, 2, 3]
    assert len({one["worker"] for one in parked.attempts}) == 3


async def start_again_and_again(
    start: Callable[[], WorkerProcess], until: Callable[[], Awaitable[bool]], lives: int
) -> int:
    """As a service manager does; how often it died."""
    deaths = 0
    while True:
        worker = start()
        while worker.is_running:
            if await until():
                await asyncio.to_thread(worker.terminate)
                return deaths
            await asyncio.sleep(0.02)
        deaths += 1
        assert deaths <= lives, "it goes on for ever"


async def test_handlers_that_always_kill_their_worker_end_in_the_parking_lot(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(mortal.app)
    others = [await publisher.publish(Mortal, Order()) for _ in range(5)]
    deadly = [await publisher.publish(Mortal, Order(do=deed)) for deed in ("kill", "segv")]
    others += [await publisher.publish(Mortal, Order()) for _ in range(5)]

    async def all_settled() -> bool:
        done = {row["id"] for row in runs.all("end")} >= set(others)
        return done and await depth(connection, "mortal.parked") == len(deadly)

    deaths = await start_again_and_again(
        lambda: start_worker(app="tests.support.mortal:app"), all_settled, 6
    )
    assert deaths == 6  # for each, the limit of 2 and the first delivery
    for _ in range(4):
        found = {one.id: one async for one in browse(connection, "mortal")}
    assert set(found) == set(deadly)
    for one in found.values():
        assert one.reason == "its worker died 3 times"
        assert one.origin == "mortal"
        assert runs.attempts(one.id) == [1] * 3  # a death is no attempt


async def test_what_is_in_hand_beside_a_deadly_message_is_never_lost(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    """It is counted too, each time: seldom, it may be parked along with the culprit."""
    await declared(obedient)
    await publisher.publish(Obey, Order(do="kill"))
    others = {await publisher.publish(Obey, Order()) for _ in range(20)}

    async def all_accounted_for() -> bool:
        parked = await depth(connection, "obey.async.parked")
        return parked > 0 and parked + len({row["id"] for row in runs.all("end")}) >= 21

    await start_again_and_again(lambda: start_worker("obey.async"), all_accounted_for, 12)
    done = {row["id"] for row in runs.all("end")}
    parked_too = {one.id async for one in browse(connection, "obey.async")} & others
    assert done | parked_too == others
    assert len(parked_too) <= 1  # of two slots, the other one
    assert await depth(connection, "obey.async") == 0


async def test_workers_killed_under_load_lose_nothing(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(obedient)
    orders = [
        Order(do="raise", times=n % 3, pad=str(n)) if n % 4 else Order(do="sleep", seconds=0.05)
        for n in range(240)
    ]
    ids = []
    for kind in (Obey, ObeyInThread, ObeyInProcess):
        ids += await publisher.publish_many(kind, orders[:40] if kind is ObeyInProcess else orders)
    dice = random.Random(3)
    pair = [start_worker(), start_worker()]
    await asyncio.to_thread(pair[0].ready)
    for _ in range(4):
        killed = pair.pop(0)
        pair.append(start_worker())
        await asyncio.to_thread(pair[0].ready)
        await asyncio.sleep(dice.uniform(0, 0.3))  # any moment will do
        killed.signal(signal.SIGKILL)
    await eventually(lambda: len({row["id"] for row in runs.all("end")}) == len(ids), within=40)
    assert {row["id"] for row in runs.all("end")} == set(ids)
    for worker in pair:
        await asyncio.to_thread(worker.ready)
        assert await asyncio.to_thread(worker.terminate) == 0
        assert "Traceback" not in worker.log
        assert "never retrieved" not in worker.log
    for queue in obedient.topology.queues:
        assert await depth(connection, queue.name) == 0, queue.name
    again = len(runs.all("end")) - len(ids)
    assert again <= 4 * 5, "more ran twice than were in hand at four deaths of five slots"
