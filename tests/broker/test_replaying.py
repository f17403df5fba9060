"""Replays on a real broker: of many at a time, killed anywhere, at a rate, two at once."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import pytest
from aiormq.channel import Channel

from rabbit_tasks import (
    App,
    Consumer,
    Message,
    Publisher,
    Refused,
    RetryPolicy,
    Settings,
    parking,
)
from rabbit_tasks.broker import Connection, connect, connected
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.parking import ParkedMessage, look, replaying, staging
from rabbit_tasks.parking.conveyor import Conveyor
from rabbit_tasks.properties import Properties
from rabbit_tasks.worker import Worker
from tests.conftest import eventually
from tests.support.brokers import ROOT, Broker
from tests.support.queues import consumers, depth, take_all

Declared = Callable[[App], Awaitable[None]]


class Lot(Consumer[dict[str, Any]]):
    queue = "lot"
    retry = RetryPolicy(attempts=1)
    delivery_limit = 1

    async def handle(self, body: dict[str, Any], message: Message) -> None:
        raise ValueError("always")


app = App("lot", [Lot()])
STAGING = "lot.replaying"


@pytest.fixture
async def lot(declared: Declared) -> str:
    await declared(app)
    return "lot"


@pytest.fixture(autouse=True)
def no_broker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a queue need not be two seconds old."""
    monkeypatch.setattr(staging, "AGE", 0.0)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message in a window of ten."""
    monkeypatch.setattr(replaying, "ALONE", 0)
    monkeypatch.setattr(replaying, "WINDOW", 10)


async def park(
    publisher: Publisher,
    names: list[str],
    headers: dict[str, Any] | None = None,
    body: bytes | None = None,
) -> None:
    told = {"x-origin-queue": "lot", "x-parked-reason": "told to", **(headers or {})}

    async def one(name: str) -> None:
        properties = Properties.of(told, message_id=name or None, delivery_mode=2)
        await publisher.send("parking-lot", "lot", body or name.encode(), properties)

    for at in range(0, len(names), 200):
        await asyncio.gather(*(one(name) for name in names[at : at + 200]))


def names(count: int) -> list[str]:
    return [f"{i:05}" for i in range(count)]


async def ids(connection: Connection, queue: str = "lot") -> list[str]:
    return [message.id async for message in parking.browse(connection, queue)]


async def taken_ids(connection: Connection, queue: str = "lot") -> list[str]:
    return [one.properties.text("message_id") or "" for one in await take_all(connection, queue)]


def holds(connection: Connection, queue: str, count: int) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await depth(connection, queue) >= count

    return look


def everything(_: ParkedMessage) -> bool:
    return True


# --- many at a time -----------------------------------------------------------------------------


async def test_many_go_in_order_with_all_they_had_and_a_replay_id_that_no_other_has(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    for name in names(150):  # in order
        await park(
            publisher, [name], {"x-retry-count": 4, "mine": b"\xff", "x-replaying": {"a": 1}}
        )
    told: list[str] = []
    done = await parking.replay(
        connection, publisher, "lot", everything, told=lambda m, _: told.append(m.id)
    )
    assert (done.there, done.chosen, done.to) == (150, 150, Counter({"lot": 150}))
    assert told == names(150)
    await eventually(holds(connection, "lot", 150))
    found = await take_all(connection, "lot")
    assert [one.properties.text("message_id") for one in found] == names(150)
    assert [one.body.decode() for one in found] == names(150)
    replays = [one.properties.headers["x-replayed"] for one in found]
    assert {one["count"] for one in replays} == {1}
    assert len({one["id"] for one in replays}) == 150
    ours = {name for one in found for name in one.properties.headers if "death" not in name}
    assert ours - {"x-delivery-count"} == {"mine", "x-replayed"}
    assert await depth(connection, STAGING) == 0
    assert await ids(connection) == []


async def test_the_staging_queue_is_made_once_and_stays_empty(
    lot: str, connection: Connection, publisher: Publisher, windows: None
) -> None:
    for _ in range(3):
        await park(publisher, names(25))
        await parking.replay(connection, publisher, "lot", everything)
        await eventually(holds(connection, "lot", 25))
        assert sorted(await taken_ids(connection)) == names(25)
        await eventually(lambda: _is_left(connection))
        assert await depth(connection, STAGING) == 0


async def _is_left(connection: Connection) -> bool:
    return await consumers(connection, STAGING) == 0


async def test_what_went_through_staging_can_fail_be_parked_and_be_replayed_again(
    lot: str, settings: Settings, connection: Connection, publisher: Publisher, windows: None
) -> None:
    """Parked by the worker, and by the broker: nothing takes three laps for a cycle."""
    await park(publisher, names(5))
    for lap in (1, 2, 3):
        await parking.replay(connection, publisher, "lot", everything)
        await eventually(holds(connection, "lot", 5))
        if lap == 2:  # a worker that dies with each: its limit is two deliveries
            for _ in range(2):
                died = await connect(settings, "dies")
                channel = await died.open()
                held: list[Any] = []

                async def on_message(message: Any, held: list[Any] = held) -> None:
                    held.append(message)

                await channel.basic_consume("lot", on_message)
                await _until_five(held)
                died.abort()
                await died.end()
                await eventually(lambda: _nobody(connection))
        else:
            worker = Worker(app, settings)
            task = asyncio.create_task(worker.run())
            await eventually(holds(connection, "lot.parked", 5))
            worker.stop()
            await task
        await eventually(holds(connection, "lot.parked", 5))
        parked = [message async for message in parking.browse(connection, "lot")]
        assert sorted(m.id for m in parked) == names(5)
        assert {m.replays for m in parked} == {lap}
        assert {m.origin for m in parked} == {"lot"}
        assert all(("delivery limit" in m.reason) == (lap == 2) for m in parked)


async def _until_five(held: list[Any]) -> None:
    await eventually(lambda: len(held) == 5)


async def _nobody(connection: Connection) -> bool:
    return await consumers(connection, "lot") == 0


async def test_two_replays_at_once_take_no_message_twice(
    lot: str, settings: Settings, connection: Connection, publisher: Publisher, windows: None
) -> None:
    await park(publisher, names(120))

    async def one() -> int:
        async with connected(settings, "r") as mine, Publisher.open(settings) as sender:
            return (await parking.replay(mine, sender, "lot", everything, limit=80)).chosen

    assert sorted(await asyncio.gather(one(), one())) == [40, 80]
    await eventually(holds(connection, "lot", 120))
    assert sorted(await taken_ids(connection)) == names(120)


async def test_a_replay_of_many_ends_though_workers_park_them_again_at_once(
    lot: str, settings: Settings, connection: Connection, publisher: Publisher
) -> None:
    worker = Worker(app, settings)
    task = asyncio.create_task(worker.run())
    await park(publisher, names(120))
    async with asyncio.timeout(60):
        done = await parking.replay(connection, publisher, "lot", everything)
    assert done.chosen == 120
    await eventually(holds(connection, "lot.parked", 120), within=60)
    worker.stop()
    await task
    again = [message async for message in parking.browse(connection, "lot")]
    assert sorted(m.id for m in again) == names(120)
    assert {m.replays for m in again} == {1}


async def test_other_targets_and_messages_that_go_by_themselves_are_among_many(
    lot: str, connection: Connection, publisher: Publisher, windows: None
) -> None:
    channel = await connection.open()
    await channel.queue_declare("other", durable=True)
    await park(publisher, names(12))
    await park(publisher, ["to other"], {"x-origin-queue": "other"})
    await park(publisher, ["", ""], body=b"twins")
    await park(publisher, ["large"], body=b"x" * 1_100_000)
    await park(publisher, ["many headers"], {"h": "x" * 128_000})
    await park(publisher, ["last"])
    done = await parking.replay(connection, publisher, "lot", everything)
    assert done.to == Counter({"lot": 17, "other": 1})
    assert await taken_ids(connection, "other") == ["to other"]
    await eventually(holds(connection, "lot", 17))
    found = await take_all(connection, "lot")
    assert [one.properties.text("message_id") for one in found][-3:] == [
        "large", "many headers", "last",
    ]  # fmt: skip
    assert sum(one.body == b"twins" for one in found) == 2
    await park(publisher, names(12), {"x-origin-queue": "nowhere"})
    done = await parking.replay(connection, publisher, "lot", everything, to="other")
    assert done.to == Counter({"other": 12})
    assert await taken_ids(connection, "other") == names(12)


# --- what does not go ---------------------------------------------------------------------------


async def test_a_missing_target_among_many_stops_the_replay_before_it_and_keeps_the_rest(
    lot: str, connection: Connection, publisher: Publisher, windows: None
) -> None:
    await park(publisher, names(15))
    await park(publisher, ["c", "d"], {"x-origin-queue": "gone"})
    with pytest.raises(
        ParkingError, match=r"message c .*no queue gone.*topology declare.*10 replayed"
    ):
        await parking.replay(connection, publisher, "lot", everything)
    await eventually(holds(connection, "lot", 10))
    assert await ids(connection) == [*names(15)[10:], "c", "d"]
    done = await parking.replay(connection, publisher, "lot", lambda m: m.origin == "lot")
    assert done.chosen == 5
    assert done.resumed is None
    await eventually(holds(connection, "lot", 15))
    assert await taken_ids(connection) == names(15)
    assert await ids(connection) == ["c", "d"]


@pytest.mark.parametrize("by_header", [False, True])
async def test_nothing_is_replayed_into_the_queue_that_holds_the_copies_where_it_would_be_lost(
    by_header: bool, lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, names(3), {"x-origin-queue": STAGING if by_header else "lot"})
    with pytest.raises(ParkingError, match=r"lot\.replaying is where replays keep their copies"):
        await parking.replay(
            connection, publisher, "lot", everything, to=None if by_header else STAGING
        )
    await parking.replay(connection, publisher, "lot", everything, to="lot")
    assert await taken_ids(connection) == names(3)


@pytest.mark.parametrize(
    "to_the_end",
    [False, pytest.param(True, marks=[pytest.mark.heavy, pytest.mark.timeout(600)])],
)
async def test_a_target_that_takes_no_more_ends_the_replay_and_nothing_is_lost(
    to_the_end: bool,
    lot: str,
    broker: Broker,
    vhost: str,
    connection: Connection,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broker.version.startswith("3."):
        pytest.skip("3.10 does not tell: the copies wait (staging.py)")
    full = {"pattern": "^lot$", "definition": {"max-length": 60}, "apply-to": "queues"}
    monkeypatch.setattr(replaying, "WINDOW", 50)
    monkeypatch.setattr(staging, "HOME", 2.0)
    broker.api("PUT", f"/policies/{vhost.replace('/', '%2F')}/full", full)
    await park(publisher, names(300))
    with pytest.raises(ParkingError, match="has not sent home all copies"):
        await parking.replay(connection, publisher, "lot", everything)
    left = await depth(connection, "lot.parked")
    assert left >= 150  # it noticed in time
    broker.api("DELETE", f"/policies/{vhost.replace('/', '%2F')}/full")
    if not to_the_end:
        return
    # (It tries again every three minutes, whatever happens meanwhile.)
    await eventually(holds(connection, "lot", 300 - left), within=400)
    await parking.replay(connection, publisher, "lot", everything)
    await eventually(holds(connection, "lot", 300))
    assert sorted(await taken_ids(connection)) == names(300)


async def test_a_target_that_is_full_from_the_start_takes_nothing_out_of_the_parking_queue(
    lot: str, broker: Broker, vhost: str, connection: Connection, publisher: Publisher
) -> None:
    await publisher.publish("lot", {})
    full = {"pattern": "^lot$", "definition": {"max-length": 1}, "apply-to": "queues"}
    broker.api("PUT", f"/policies/{vhost.replace('/', '%2F')}/full", full)
    await eventually(lambda: _is_full(publisher))
    before = await depth(connection, "lot")
    await park(publisher, names(100))
    with pytest.raises(ParkingError, match=r"message 00000 cannot .*refused \(full.*0 replayed"):
        await parking.replay(connection, publisher, "lot", everything)
    assert await depth(connection, "lot") == before
    assert await ids(connection) == names(100)
    assert (await parking.replay(connection, publisher, "lot", lambda _: False)).resumed is None


async def _is_full(publisher: Publisher) -> bool:
    try:
        await publisher.publish("lot", {})
    except Refused:
        return True
    return False


async def test_a_user_who_may_not_create_queues_replays_one_by_one_and_is_told_so(
    lot: str, broker: Broker, vhost: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, names(40))
    user = f"replayer {vhost[-6:]}"
    broker.create_user(user, "p")
    try:
        broker.allow(vhost, user, configure="^$", write=".*", read=".*")
        theirs = Settings(url=broker.url(vhost, user, "p"))
        async with connected(theirs, "r") as mine, Publisher.open(theirs) as sender:
            done = await parking.replay(mine, sender, "lot", everything)
            assert (done.chosen, done.alone, done.staging) == (40, True, STAGING)
        assert sorted(await taken_ids(connection)) == names(40)
        # Once it is there, they need no more rights, but for it to be whole.
        await park(publisher, names(40))
        channel = await connection.open()
        await channel.queue_declare(STAGING, durable=True, arguments=staging._ARGUMENTS)  # noqa: SLF001
        async with connected(theirs, "r") as mine, Publisher.open(theirs) as sender:
            done = await parking.replay(mine, sender, "lot", everything, limit=1)
            assert (done.chosen, done.alone) == (1, True)
        assert await taken_ids(connection) == ["00000"]
        await park(publisher, ["00000"])
        async with connected(Settings(url=broker.url(vhost)), "r") as owner:
            await parking.replay(owner, publisher, "lot", everything, limit=1)
        async with connected(theirs, "r") as mine, Publisher.open(theirs) as sender:
            done = await parking.replay(mine, sender, "lot", everything)
            assert (done.chosen, done.alone) == (39, False)
        await eventually(holds(connection, "lot", 40))
        assert sorted(await taken_ids(connection)) == names(40)
    finally:
        broker.delete_user(user)


# --- killed -------------------------------------------------------------------------------------


class Killed(BaseException):
    """What a kill is to those who were killed: from here on they do nothing to the broker."""


class Victim:
    """Runs replays whose sockets all go at a chosen moment, as a SIGKILL would take them."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self._settings = settings
        self._monkeypatch = monkeypatch

    async def replay(self, where: tuple[Any, str, int, str]) -> None:
        """Die before, after or within the call of this method with this number."""
        owner, name, number, when = where
        mine: list[Connection] = []
        calls = 0
        real = getattr(owner, name)

        def die() -> NoReturn:
            for connection in mine:
                connection.abort()
            raise Killed

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != number:
                return await real(*args, **kwargs)
            if when == "before":
                die()
            if when == "within":  # half of them are on their way
                await real(args[0], args[1][: len(args[1]) // 2])
                await args[0].arrived()
                die()
            await real(*args, **kwargs)
            for _ in range(3):
                await asyncio.sleep(0)
            die()

        another = Connection.another

        async def kept(self: Connection, purpose: str) -> Connection:
            mine.append(await another(self, purpose))
            return mine[-1]

        with self._monkeypatch.context() as patched:
            patched.setattr(Connection, "another", kept)
            patched.setattr(owner, name, wrapped)
            mine.append(await connect(self._settings, "victim"))
            sender = Publisher(self._settings)
            mine.append(await sender.connect())
            with pytest.raises(Killed):
                await parking.replay(mine[0], sender, "lot", everything)
        for connection in mine:
            await connection.end()


MOMENTS = {
    "before a copy": (Conveyor, "publish", 17, "before"),
    "after a copy": (Conveyor, "publish", 17, "after"),
    "before the confirms": (Conveyor, "stored", 3, "before"),
    "after the confirms": (Conveyor, "stored", 3, "after"),
    "before the note": (Conveyor, "publish", 22, "before"),
    "after the note": (Conveyor, "stored", 4, "after"),
    "before the acks": (look.Taken, "ack_all", 2, "before"),
    "in the middle of the acks": (look.Taken, "ack_all", 2, "within"),
    "after the acks": (look.Taken, "ack_all", 2, "after"),
    "before they are let go": (Conveyor, "let_go", 2, "before"),
    "after they are let go": (Conveyor, "let_go", 2, "after"),
    "when all is home": (Conveyor, "ack", 2, "after"),
}
RESUMING = {
    "before an ack": (look.Taken, "ack", 3, "before"),
    "after an ack": (look.Taken, "ack", 3, "after"),
    "before they are let go": (Channel, "basic_nack", 1, "before"),
    "after they are let go": (Channel, "basic_nack", 1, "after"),
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_replay_of_many_that_is_killed_and_run_again_leaves_each_message_once(
    moment: str,
    lot: str,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    windows: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await park(publisher, names(35))
    await Victim(settings, monkeypatch).replay(MOMENTS[moment])
    done = await parking.replay(connection, publisher, "lot", everything)
    assert done.resumed is None or done.resumed.maybe_twice == []
    await _each_once(connection, names(35))


@pytest.mark.parametrize("moment", RESUMING)
async def test_killed_again_while_it_resumes_it_leaves_each_message_once(
    moment: str,
    lot: str,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    windows: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await park(publisher, names(35))
    victim = Victim(settings, monkeypatch)
    await victim.replay(MOMENTS["in the middle of the acks"])
    await victim.replay(RESUMING[moment])
    await parking.replay(connection, publisher, "lot", everything)
    await _each_once(connection, names(35))


async def _each_once(connection: Connection, wanted: list[str]) -> None:
    await eventually(holds(connection, "lot", len(wanted)))
    assert sorted(await taken_ids(connection)) == wanted
    assert await ids(connection) == []
    await eventually(lambda: _is_left(connection))
    assert await depth(connection, STAGING) == 0


async def test_a_killed_replay_that_is_run_again_with_another_choice_keeps_what_that_did_not_choose(
    lot: str,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    windows: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await park(publisher, names(35))
    await Victim(settings, monkeypatch).replay(MOMENTS["after the confirms"])
    done = await parking.replay(connection, publisher, "lot", lambda m: m.id == "00034")
    assert done.chosen == 1
    await eventually(holds(connection, "lot", 11))
    assert sorted(await taken_ids(connection)) == [*names(10), "00034"]
    assert await ids(connection) == names(35)[10:34]


@pytest.mark.parametrize("named", [True, False])
async def test_one_that_was_on_its_way_by_itself_is_the_only_one_twice_and_is_named(
    named: bool,
    lot: str,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With twins that nothing tells apart: rather twice than lost."""
    wanted = names(6) if named else [""] * 6
    await park(publisher, wanted, body=None if named else b"twins")
    first = (await ids(connection))[2]
    await Victim(settings, monkeypatch).replay((Publisher, "send", 3, "after"))
    warned: list[str] = []
    done = await parking.replay(connection, publisher, "lot", everything, maybe_twice=warned.append)
    assert done.resumed is not None
    assert done.resumed.maybe_twice == warned == [first]
    assert await depth(connection, "lot") == 7
    if named:
        twice = [name for name, count in Counter(await taken_ids(connection)).items() if count > 1]
        assert twice == [first]


async def test_killed_by_the_clock_again_and_again_each_message_arrives_once_or_is_named(
    lot: str, url: str, connection: Connection, publisher: Publisher
) -> None:
    """A real process and a real SIGKILL, without a hook: wherever it happens to be."""
    await park(publisher, names(900))
    warned: list[str] = []
    kills = 0
    while await depth(connection, "lot.parked"):
        replay = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rabbit_tasks", "parked", "replay", "lot", "--limit", "300",
            cwd=ROOT, env={**os.environ, "RABBIT_TASKS_URL": url},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert replay.stderr is not None
        before = await depth(connection, "lot")
        until = time.monotonic() + 30
        moved = random.choice((1, 20, 40, 150))
        while replay.returncode is None and await depth(connection, "lot") < before + moved:
            assert time.monotonic() < until
            await asyncio.sleep(0.005)
        await asyncio.sleep(random.uniform(0, 0.05))
        if replay.returncode is None and kills < 2:
            replay.kill()
            kills += 1
        err = (await replay.stderr.read()).decode()
        await replay.wait()
        warned += [line.split()[1] for line in err.splitlines() if line.startswith("warning: ")]
        await eventually(lambda: _unheld(connection))
    await parking.replay(connection, publisher, "lot", everything)
    await eventually(holds(connection, "lot", 900))
    found = Counter(await taken_ids(connection))
    assert sorted(found) == names(900)
    assert {name for name, count in found.items() if count > 1} <= set(warned)
    assert found.total() <= 900 + kills


async def _unheld(connection: Connection) -> bool:
    return await consumers(connection, "lot.parked") == 0


# --- slowly, and not to the end -----------------------------------------------------------------


async def test_a_rate_is_kept_one_by_one_and_in_windows_and_over_several_looks(
    lot: str, connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "HELD", 0.4)
    await park(publisher, names(60))
    began = time.monotonic()
    times: list[float] = []
    done = await parking.replay(
        connection, publisher, "lot", everything, rate=40,
        told=lambda _m, _q: times.append(time.monotonic() - began),
    )  # fmt: skip
    assert time.monotonic() - began >= 59 / 40
    assert done.chosen == 60
    for at in (0.5, 1.0):
        assert sum(one < at for one in times) <= 40 * at + 2
    await eventually(holds(connection, "lot", 60))
    assert sorted(await taken_ids(connection)) == names(60)


async def test_asked_to_stop_it_ends_between_messages_and_goes_on_where_it_stopped(
    lot: str, connection: Connection, publisher: Publisher, windows: None
) -> None:
    await park(publisher, names(35))
    stop = asyncio.Event()

    def told(message: ParkedMessage, _: str) -> None:
        if message.id == "00012":
            stop.set()

    done = await parking.replay(connection, publisher, "lot", everything, stop=stop, told=told)
    assert done.stopped
    assert done.chosen == 20
    assert await ids(connection) == names(35)[20:]
    done = await parking.replay(connection, publisher, "lot", everything)
    assert (done.stopped, done.resumed, done.chosen) == (False, None, 15)
    await _each_once(connection, names(35))


async def test_asked_to_stop_it_does_not_wait_for_its_turn(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, names(3))
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, stop.set)
    async with asyncio.timeout(30):
        done = await parking.replay(
            connection, publisher, "lot", everything, stop=stop, rate=1 / 60
        )
    assert (done.stopped, done.chosen) == (True, 1)


# --- edited -------------------------------------------------------------------------------------


async def test_an_edited_message_keeps_the_body_it_had_at_first_as_far_as_a_frame_holds_it(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, ["a"], body=b"first")
    await parking.replay(connection, publisher, "lot", everything, limit=1, edited=b"second")
    (one,) = await take_all(connection, "lot")
    assert one.body == b"second"
    edit = one.properties.headers["x-edited"]
    assert (edit["size"], edit["body"]) == (5, b"first")
    await publisher.send("parking-lot", "lot", one.body, one.properties)
    await parking.replay(connection, publisher, "lot", everything, limit=1, edited=b"third")
    (one,) = await take_all(connection, "lot")
    assert one.body == b"third"
    edit = one.properties.headers["x-edited"]
    assert (edit["size"], edit["body"]) == (5, b"first")
    await park(publisher, ["large"], body=b"x" * 500_000)
    await parking.replay(connection, publisher, "lot", everything, limit=1, edited=b"small")
    (one,) = await take_all(connection, "lot")
    edit = one.properties.headers["x-edited"]
    assert edit["size"] == 500_000
    assert 100_000 < len(edit["body"]) < 131_072


# --- the broker -----------------------------------------------------------------------------------


async def test_a_broker_killed_in_the_middle_of_a_replay_loses_nothing_and_the_next_goes_on(
    lot: str,
    broker: Broker,
    settings: Settings,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not broker.can_be_hurt:
        pytest.skip("RABBIT_TASKS_TEST_BROKER is not set")
    monkeypatch.undo()  # here a queue must be two seconds old
    monkeypatch.setattr(replaying, "WINDOW", 50)
    await park(publisher, names(600))
    warned: list[str] = []
    async with connected(settings, "r") as mine, Publisher.open(settings) as sender:

        def told(message: ParkedMessage, _: str) -> None:
            if message.id == "00200":
                broker.hurt("kill")

        with pytest.raises(ParkingError, match=r"\d+ replayed"):
            await parking.replay(mine, sender, "lot", everything, told=told)
    await asyncio.to_thread(broker.hurt, "start")
    async with connected(settings, "r") as mine, Publisher.open(settings) as sender:
        await parking.replay(mine, sender, "lot", everything, maybe_twice=warned.append)
        await eventually(holds(mine, "lot", 600))
        found = Counter(await taken_ids(mine))
        assert sorted(found) == names(600)
        # What the broker itself sends home, it may send twice.
        twice = {name for name, count in found.items() if count > 1}
        assert len(twice - set(warned)) <= 50
        assert await ids(mine) == []
