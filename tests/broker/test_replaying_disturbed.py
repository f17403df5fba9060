"""Replays whose queues are deleted and made again in the middle: every message is accounted for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest

from rabbit_tasks import App, Publisher, parking
from rabbit_tasks.broker import Connection
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.parking import replaying, staging
from rabbit_tasks.parking.conveyor import Conveyor
from tests.broker.test_replaying import STAGING, app, everything, names, park
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.queues import depth, take_all

Declared = Callable[[App], Awaitable[None]]


@pytest.fixture
async def lot(declared: Declared, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(staging, "AGE", 0.0)
    monkeypatch.setattr(staging, "HOME", 2.0)
    monkeypatch.setattr(replaying, "ALONE", 2)
    monkeypatch.setattr(replaying, "WINDOW", 100)
    await declared(app)
    return "lot"


async def delete(connection: Connection, queue: str) -> None:
    channel = await connection.open()
    await channel.queue_delete(queue)
    await channel.close()


async def ids_in(connection: Connection, queue: str) -> list[str]:
    return [one.properties.text("message_id") or "" for one in await take_all(connection, queue)]


def held(broker: Broker, vhost: str) -> int:
    """What the broker has in the queue of the copies, dead letters that go nowhere included."""
    row = broker.api("GET", f"/queues/{quote(vhost, safe='')}/{STAGING}")
    return sum(row.get(key) or 0 for key in ("messages_ready", "messages_unacknowledged")) + (
        row.get("messages_dlx") or 0
    )


async def try_at_once(broker: Broker, vhost: str) -> None:
    """Have the broker try its dead letters again, which it would do after three minutes: any change of
    the queue's policy does that."""
    path = f"/policies/{quote(vhost, safe='')}/nudge"
    given = {"pattern": f"^{STAGING}$", "definition": {"max-length": 10**6}, "apply-to": "queues"}
    await asyncio.to_thread(broker.api, "PUT", path, given)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(broker.api, "DELETE", path)


@pytest.mark.parametrize("window", [1, pytest.param(3, marks=pytest.mark.heavy)])
async def test_a_target_deleted_and_made_again_in_the_middle_costs_no_message(
    window: int,
    lot: str,
    declared: Declared,
    broker: Broker,
    vhost: str,
    connection: Connection,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Empty when it is deleted, so that nothing goes with it; the copies are on their way to it."""
    await park(publisher, names(500))
    seen: list[str] = []
    number = 0
    let_go = Conveyor.let_go

    async def after_the_deletion(self: Conveyor, up_to: int) -> None:
        nonlocal number
        number += 1
        if number == window:
            seen.extend(await ids_in(connection, lot))
            await delete(connection, lot)
        await let_go(self, up_to)

    monkeypatch.setattr(Conveyor, "let_go", after_the_deletion)
    with pytest.raises(ParkingError, match=r"has not sent home all|there is no queue lot"):
        await parking.replay(connection, publisher, lot, everything)
    monkeypatch.setattr(Conveyor, "let_go", let_go)
    await declared(app)
    await try_at_once(broker, vhost)

    async def is_through() -> bool:
        try:
            await parking.replay(connection, publisher, lot, everything)
        except ParkingError:
            await try_at_once(broker, vhost)
            return False
        return True

    await eventually(is_through, within=60)
    seen += await ids_in(connection, lot)
    assert Counter(seen) == Counter(names(500))
    assert await depth(connection, "lot.parked") == 0
    await eventually(lambda: held(broker, vhost) == 0, within=15)


async def test_the_parking_queue_deleted_in_the_middle_is_one_line_and_what_went_has_gone(
    lot: str,
    declared: Declared,
    connection: Connection,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await park(publisher, names(500))
    gone: list[str] = []

    def told(message: parking.ParkedMessage, _target: str) -> None:
        gone.append(message.id)

    number = 0
    send_home = staging.Staging.send_home

    async def third(self: Any, *given: Any) -> None:
        nonlocal number
        number += 1
        if number == 3:
            await delete(connection, "lot.parked")
        await send_home(self, *given)

    monkeypatch.setattr(staging.Staging, "send_home", third)
    async with asyncio.timeout(30):
        with pytest.raises(ParkingError) as raised:
            await parking.replay(connection, publisher, lot, everything, told=told)
    monkeypatch.setattr(staging.Staging, "send_home", send_home)
    assert str(raised.value).startswith("there is no queue lot.parked; ")
    assert "(202 replayed; " in str(raised.value)
    found = await ids_in(connection, lot)
    assert found[: len(gone)] == gone
    await declared(app)
    await park(publisher, ["new"])
    done = await parking.replay(connection, publisher, lot, everything)
    assert done.chosen == 1
    found += await ids_in(connection, lot)
    assert max(Counter(found).values()) == 1
    assert "new" in found


async def test_more_windows_than_the_broker_tries_dead_letters_at_a_time_all_come_home(
    lot: str, connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(3.10 never settles a note that goes to its own queue: 32 of them would stop all copies.)"""
    monkeypatch.setattr(replaying, "WINDOW", 5)
    await park(publisher, names(200))
    await parking.replay(connection, publisher, lot, everything)
    found: list[str] = []

    async def all_home() -> bool:
        found.extend(await ids_in(connection, lot))
        return len(found) >= 200

    await eventually(all_home, within=20)
    assert sorted(found) == names(200)
