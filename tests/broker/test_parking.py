"""The parking lot on a real broker: looked at, replayed from, killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, Settings, parking
from rabbit_tasks.broker import RPC_TIMEOUT, Connection, connect, connected
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.parking import ParkedMessage, look
from rabbit_tasks.parking.groups import grouped
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
NAMES = [str(i) for i in range(50)]


@pytest.fixture
async def lot(declared: Declared) -> str:
    await declared(app)
    return "lot"


async def park(
    publisher: Publisher, names: list[str], headers: dict[str, Any] | None = None, size: int = 0
) -> None:
    """As a worker parks: one after another, through the exchange; bodies of at least that size."""
    told = {"x-origin-queue": "lot", "x-parked-reason": "told to", **(headers or {})}
    for name in names:
        properties = Properties.of(told, message_id=name, delivery_mode=2)
        await publisher.send("parking-lot", "lot", name.encode().ljust(size), properties)


async def ids(connection: Connection, queue: str = "lot") -> list[str]:
    return [message.id async for message in parking.browse(connection, queue)]


def holds(connection: Connection, queue: str, count: int) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await depth(connection, queue) >= count

    return look


def everything(_: ParkedMessage) -> bool:
    return True


async def test_200_looks_in_a_row_lose_and_reorder_nothing(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, NAMES)
    for number in range(200):
        if number % 2:
            (group,) = await grouped(parking.browse(connection, "lot"))
            assert (group.count, group.example) == (50, "0"), number
        else:
            assert await ids(connection) == NAMES, number
        assert await depth(connection, "lot.parked") == 50, number


async def test_looks_at_once_and_from_several_processes_wait_for_each_other(
    lot: str, settings: Settings, publisher: Publisher
) -> None:
    await park(publisher, NAMES)

    async def look() -> list[list[str]]:
        async with connected(settings, "look") as mine:
            return [await ids(mine) for _ in range(5)]

    for looks in await asyncio.gather(*(look() for _ in range(4))):
        assert looks == [NAMES] * 5


async def test_looking_keeps_the_order_while_more_is_parked_and_after_a_partial_replay(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, NAMES)
    more = [f"more {i}" for i in range(40)]
    parking_more = asyncio.create_task(park(publisher, more))
    while not parking_more.done():
        seen = await ids(connection)
        assert seen == (NAMES + more)[: len(seen)]
        assert len(seen) >= 50
    await parking_more
    gone = {"3", "4", "47"}
    await parking.replay(connection, publisher, "lot", lambda m: m.id in gone)
    left = [name for name in NAMES + more if name not in gone]
    for _ in range(5):
        assert await ids(connection) == left


async def test_a_look_that_is_given_up_in_the_middle_keeps_the_order(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, NAMES)
    for stop in (1, 20, 49):
        async with aclosing(parking.browse(connection, "lot")) as messages:  # type: ignore[type-var]
            async for message in messages:
                if message.position == stop:
                    break
        assert await ids(connection) == NAMES


async def test_a_look_that_is_killed_keeps_the_order(
    lot: str, url: str, settings: Settings, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, NAMES)
    script = (
        "import asyncio, os, signal, sys\n"
        "from rabbit_tasks import Settings, parking\n"
        "from rabbit_tasks.broker import connect\n"
        "async def main():\n"
        "    c = await connect(Settings(), 'victim')\n"
        "    async for m in parking.browse(c, 'lot'):\n"
        "        if m.position == int(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    for position in (1, 25, 50):
        died = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(position), cwd=ROOT,
            env={**os.environ, "RABBIT_TASKS_URL": url},
        )  # fmt: skip
        assert await died.wait() == -signal.SIGKILL
        assert await ids(connection) == NAMES


async def test_somebody_elses_consumer_on_a_parking_queue_is_named_and_nothing_is_taken(
    lot: str,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(look, "PATIENCE", 0.2)
    await park(publisher, ["a"])
    channel = await connection.open()

    async def on_message(_: object) -> None: ...

    await channel.basic_consume("lot.parked", on_message)
    with pytest.raises(ParkingError, match=r"1 other consumer.*rabbitmqctl list_consumers -p test"):
        await ids(connection)
    await channel.close()
    assert await ids(connection) == ["a"]
    async with connected(settings, "one") as one, aclosing(parking.browse(one, "lot")) as held:  # type: ignore[type-var]
        await anext(held)
        with pytest.raises(ParkingError, match="somebody else lists, replays or discards"):
            await ids(connection)
    assert await ids(connection) == ["a"]


async def test_a_user_who_may_only_read_can_look(
    lot: str, broker: Broker, vhost: str, publisher: Publisher
) -> None:
    await park(publisher, NAMES)
    user = f"reader {uuid.uuid4().hex[:6]}"
    broker.create_user(user, "p")
    try:
        broker.allow(vhost, user, configure="^$", write="^$", read=".*")
        async with connected(Settings(url=broker.url(vhost, user, "p")), "look") as mine:
            assert await ids(mine) == NAMES
        broker.allow(vhost, user, configure="^$", write="^$", read="^other$")
        async with connected(Settings(url=broker.url(vhost, user, "p")), "look") as mine:
            with pytest.raises(ParkingError, match=rf"set_permissions -p {vhost} '{user}' '\.\*'"):
                await ids(mine)
    finally:
        broker.delete_user(user)


async def test_a_queue_without_a_parking_lot_is_an_error_with_the_next_command(
    connection: Connection,
) -> None:
    with pytest.raises(ParkingError, match=r"no queue nothing\.parked.*topology declare"):
        await ids(connection, "nothing")


async def test_the_parking_queue_deleted_in_mid_look_is_an_error_and_no_endless_wait(
    lot: str,
    broker: Broker,
    vhost: str,
    connection: Connection,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = asyncio.Event()
    on_cancel = look.Taken._on_cancel  # noqa: SLF001

    def heard(taken: look.Taken, frame: object) -> None:
        on_cancel(taken, frame)
        told.set()

    monkeypatch.setattr(look.Taken, "_on_cancel", heard)
    await park(publisher, NAMES)

    async def waiting() -> None:
        async for message in parking.browse(connection, "lot"):
            if message.position == 1:
                broker.delete(vhost, "queues", "lot.parked")
                await told.wait()

    with pytest.raises(ParkingError, match=r"no queue lot\.parked"):
        await asyncio.wait_for(waiting(), 30)


async def test_more_than_one_consumer_can_hold_is_read_and_given_back_in_order(
    lot: str, connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_WINDOW", 20)
    monkeypatch.setattr(look, "QUIET", 20.0)
    await park(publisher, NAMES)
    began = asyncio.get_running_loop().time()
    for stop in (50, 1, 25, 50):
        async with aclosing(parking.browse(connection, "lot")) as messages:  # type: ignore[type-var]
            async for message in messages:
                if message.position == stop:
                    break
        assert await ids(connection) == NAMES
    assert asyncio.get_running_loop().time() - began < look.QUIET  # saw it come back
    await parking.replay(connection, publisher, "lot", everything, limit=30)
    assert [one.body.decode() for one in await take_all(connection, "lot")] == NAMES[:30]
    assert await ids(connection) == NAMES[30:]


async def test_several_consumers_of_a_killed_look_are_given_back_in_order(
    lot: str, url: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, NAMES)
    script = (
        "import asyncio, os, signal, sys\n"
        "from rabbit_tasks import Settings, parking\n"
        "from rabbit_tasks.broker import connect\n"
        "from rabbit_tasks.parking import look\n"
        "look._WINDOW = 4\n"
        "async def main():\n"
        "    c = await connect(Settings(), 'victim')\n"
        "    async with look.taking(c, 'lot') as taken:\n"
        "        async for delivery, m in taken:\n"
        "            if m.position in (2, 7): await taken.ack(delivery)\n"
        "            if m.position == int(sys.argv[1]):\n"
        "                await taken.arrived()\n"
        "                os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    left = NAMES
    for position in (50, 1, 25):
        died = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(min(position, len(left))), cwd=ROOT,
            env={**os.environ, "RABBIT_TASKS_URL": url},
        )  # fmt: skip
        assert await died.wait() == -signal.SIGKILL
        gone = {left[1], left[6]} if position > 6 else set()
        left = [name for name in left if name not in gone]
        assert await ids(connection) == left


async def test_a_look_reads_a_little_ahead_and_no_more_whatever_waits(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    large = [str(i) for i in range(40)]
    for name in large:
        await publisher.send(
            "parking-lot", "lot", b"x" * 1_000_000,
            Properties.of({"x-parked-reason": "told to"}, message_id=name, delivery_mode=2),
        )  # fmt: skip
    async with look.taking(connection, "lot") as taken:
        found: list[str] = []
        async for _, message in taken:
            found.append(message.id)
            await asyncio.sleep(0)
            assert taken._bytes_here < 2 * look.AHEAD  # noqa: SLF001
            if message.position == 3:
                for _ in range(50):
                    # What we ask goes over the other connection, which stands not still.
                    assert await depth(connection, "lot.parked") == 0
                    assert taken._bytes_here < 2 * look.AHEAD  # noqa: SLF001
        assert found == large
    assert await depth(connection, "lot.parked") == 40


async def test_acks_are_heard_of_before_all_that_waits_has_come(
    lot: str, connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_FEW", 0)
    monkeypatch.setattr(look, "AHEAD", 20_000)  # of a megabyte, which does not come in one read
    await park(publisher, NAMES, size=20_000)
    async with look.taking(connection, "lot") as taken:
        assert taken.count == 50
        monkeypatch.setattr(look.Taken, "_is_much_on_its_way", True)
        async for delivery, message in taken:
            if message.position < 4:
                await taken.ack(delivery)
                await taken.arrived()
                assert taken._came < 50  # noqa: SLF001
        monkeypatch.undo()
    assert await ids(connection) == NAMES[3:]


@pytest.mark.parametrize("by_echo", [False, True])
async def test_acks_that_are_settled_stay_so_though_the_connection_goes_at_once(
    by_echo: bool,
    lot: str,
    connection: Connection,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a hundred in one write the broker's channel passes on 32, and keeps the others for a while."""
    monkeypatch.setattr(look, "_FEW", 0)
    monkeypatch.setattr(look.Taken, "_is_much_on_its_way", by_echo)
    names = [f"{number:03}" for number in range(120)]
    for _ in range(3):
        await asyncio.gather(*(park(publisher, [name]) for name in names))
        async with look.taking(connection, "lot") as taken:
            found = [(delivery, message.id) async for delivery, message in taken]
            await park(publisher, ["new", "newer"])
            await taken.ack_all([delivery for delivery, _ in found[::2]])
            await taken.settled()
            taken._connection.abort()  # noqa: SLF001
        await eventually(lambda: _unheld(connection))
        assert await ids(connection) == [*(name for _, name in found[1::2]), "new", "newer"]
        await _purge(connection)


async def test_a_connection_that_goes_while_acks_settle_is_an_error_at_once(
    lot: str, connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_FEW", 0)
    await park(publisher, NAMES[:3])
    async with look.taking(connection, "lot") as taken:
        delivery, *_ = [delivery async for delivery, _ in taken]
        monkeypatch.setattr(look.Taken, "_is_much_on_its_way", True)
        await taken.ack(delivery)
        taken._connection.abort()  # noqa: SLF001
        async with asyncio.timeout(RPC_TIMEOUT / 2):
            with pytest.raises(ParkingError, match="connection lost"):
                await taken.settled()
    await eventually(holds(connection, "lot.parked", 2))


async def test_a_library_that_gives_up_its_call_at_the_end_of_a_look_cancels_nobody(
    lot: str, connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where the connection goes meanwhile."""

    async def unlock(_: look.Asking) -> None:
        raise asyncio.CancelledError

    await park(publisher, NAMES[:3])
    monkeypatch.setattr(look.Asking, "unlock", unlock)
    assert await ids(connection) == NAMES[:3]


async def _purge(connection: Connection) -> None:
    channel = await connection.open()
    await channel.queue_purge("lot.parked")
    await channel.close()


async def _unheld(connection: Connection) -> bool:
    return await consumers(connection, "lot.parked") == 0


@pytest.mark.heavy
async def test_a_look_that_stands_still_for_a_minute_goes_on(
    lot: str, settings: Settings, publisher: Publisher
) -> None:
    """The broker drops a connection to which it could write nothing for 30 s."""
    many = [str(i) for i in range(10_000)]
    for first in range(0, len(many), 200):
        await asyncio.gather(
            *(
                publisher.send(
                    "parking-lot", "lot", b"x" * 2_000,
                    Properties.of({"x-parked-reason": "told to"}, message_id=name),
                )
                for name in many[first : first + 200]
            )
        )  # fmt: skip
    async with connected(settings.changed(heartbeat="5s"), "look") as mine:
        before = await ids(mine)
        found = []
        async with aclosing(parking.browse(mine, "lot")) as messages:  # type: ignore[type-var]
            async for message in messages:
                found.append(message.id)
                if message.position == 3:
                    await asyncio.sleep(60)
    assert found == before
    assert sorted(found) == sorted(many)


async def test_a_channel_closed_under_a_look_is_an_error_and_no_endless_wait(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    """As 3.10 and 4.0 do when a replay holds messages for longer than the consumer timeout."""
    await park(publisher, NAMES)

    async def waiting() -> None:
        async with look.taking(connection, "lot") as taken:
            taken.count = 60  # it waits for more
            async for _ in taken:
                channel = taken._channel  # noqa: SLF001
                if channel is not None and not channel.is_closed:
                    await channel.close()

    with pytest.raises(ParkingError, match="the channel was closed"):
        await asyncio.wait_for(waiting(), 30)
    assert await ids(connection) == NAMES


# --- replay -------------------------------------------------------------------------------------


async def test_replay_goes_in_parked_order_with_fresh_attempts_and_says_where(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, NAMES, {"x-retry-count": 4, "x-error-type": "shop.Bad", "mine": b"\xff"})
    told: list[tuple[str, str]] = []
    moved = await parking.replay(
        connection, publisher, "lot", everything, told=lambda m, q: told.append((m.id, q))
    )
    assert (moved.there, moved.chosen, moved.to) == (50, 50, Counter({"lot": 50}))
    assert told == [(name, "lot") for name in NAMES]
    found = await take_all(connection, "lot")
    assert [one.properties.text("message_id") for one in found] == NAMES
    assert [one.body.decode() for one in found] == NAMES
    headers = found[0].properties.headers
    assert headers.pop("x-replayed")["count"] == 1
    headers.pop("x-delivery-count", None)
    assert headers == {"mine": b"\xff"}
    assert await ids(connection) == []


async def test_replay_counts_its_replays(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, ["a"], {"x-replayed": {"count": 2, "when": "then"}})
    await parking.replay(connection, publisher, "lot", everything)
    (one,) = await take_all(connection, "lot")
    assert one.properties.headers["x-replayed"]["count"] == 3


async def test_replay_ends_though_a_worker_parks_them_again_at_once(
    lot: str, settings: Settings, connection: Connection, publisher: Publisher
) -> None:
    worker = Worker(app, settings)
    task = asyncio.create_task(worker.run())
    await park(publisher, NAMES)
    async with asyncio.timeout(30):
        moved = await parking.replay(connection, publisher, "lot", everything)
    assert moved.chosen == 50
    await eventually(holds(connection, "lot.parked", 50))
    worker.stop()
    await task
    again = [message async for message in parking.browse(connection, "lot")]
    assert sorted(m.id for m in again) == sorted(NAMES)
    assert {m.replays for m in again} == {1}
    assert {len(m.attempts) for m in again} == {1}


async def test_limit_takes_the_oldest_and_a_dry_run_moves_nothing(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, NAMES)
    dry = await parking.replay(connection, publisher, "lot", everything, limit=7, dry_run=True)
    assert (dry.chosen, dry.to) == (7, Counter({"lot": 7}))
    assert await ids(connection) == NAMES
    assert await depth(connection, "lot") == 0
    await parking.replay(connection, publisher, "lot", everything, limit=7)
    assert await ids(connection) == NAMES[7:]
    gone = await parking.discard(connection, "lot", everything, limit=3, dry_run=True)
    assert gone.chosen == 3
    assert await ids(connection) == NAMES[7:]
    gone = await parking.discard(connection, "lot", everything, limit=3)
    assert gone.chosen == 3
    assert await ids(connection) == NAMES[10:]


async def test_a_broker_that_has_messages_and_delivers_none_is_not_waited_for_for_ever(
    lot: str, connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deliver_nothing(taken: object) -> None: ...

    await park(publisher, NAMES[:2])
    await eventually(holds(connection, "lot.parked", 2))
    with monkeypatch.context() as broken:
        broken.setattr(look, "QUIET", 0.05)
        broken.setattr(look, "PATIENCE", 0.3)
        broken.setattr(look.Taken, "_consume", deliver_nothing)
        async with asyncio.timeout(30):
            with pytest.raises(ParkingError, match=r"2 messages are there, .* none for 0\.3 s"):
                await ids(connection)
    assert await ids(connection) == NAMES[:2]


async def test_a_message_without_an_id_has_one_that_lasts_and_can_be_replayed_by_it(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    for i in range(3):
        await publisher.send("parking-lot", "lot", b"%d" % i, Properties.of(delivery_mode=2))
    first, second, third = await ids(connection)
    assert first.startswith("~")
    assert len({first, second, third}) == 3
    assert await ids(connection) == [first, second, third]
    await parking.replay(connection, publisher, "lot", lambda m: m.is_called(second))
    (one,) = await take_all(connection, "lot")
    assert one.body == b"1"
    assert one.properties.text("message_id")  # from now on it has one


async def test_a_missing_target_stops_the_replay_and_keeps_the_rest(
    lot: str, connection: Connection, publisher: Publisher
) -> None:
    await park(publisher, ["a", "b"])
    await park(publisher, ["c", "d"], {"x-origin-queue": "gone"})
    with pytest.raises(ParkingError, match=r"message c .*'gone'.*topology declare \(2 replayed"):
        await parking.replay(connection, publisher, "lot", everything)
    assert await ids(connection) == ["c", "d"]
    assert await depth(connection, "lot") == 2


@pytest.mark.parametrize("victim", ["look", "publisher"])
async def test_a_connection_lost_in_the_middle_loses_nothing(
    victim: str,
    lot: str,
    broker: Broker,
    vhost: str,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
) -> None:
    await park(publisher, NAMES)
    async with connected(settings, "parked") as mine, Publisher.open(settings) as sender:
        looks: list[Connection] = []
        another = mine.another

        async def kept(purpose: str) -> Connection:
            looks.append(await another(purpose))
            return looks[-1]

        mine.another = kept  # type: ignore[method-assign]

        def told(message: ParkedMessage, _: str) -> None:
            if message.id == "20":
                lose = looks[0] if victim == "look" else sender._connection  # noqa: SLF001
                assert lose is not None
                lose.abort()  # as a cut cable would

        if victim == "look":
            with pytest.raises(
                ParkingError, match=r"connection lost .*21 replayed; 20 may be parked"
            ):
                await parking.replay(mine, sender, "lot", everything, told=told)
        else:  # it opens another
            await parking.replay(mine, sender, "lot", everything, told=told)
    await _once_or_in_flight_twice(connection)


async def _once_or_in_flight_twice(connection: Connection) -> list[str]:
    """Nothing lost, at most one message in both queues; which."""
    await eventually(lambda: _unheld(connection))
    replayed = [
        one.properties.text("message_id") or "" for one in await take_all(connection, "lot")
    ]
    parked = await ids(connection)
    twice = sorted(set(replayed) & set(parked))
    assert len(twice) <= 1
    assert len(replayed) == len(set(replayed))
    assert replayed + [name for name in parked if name not in twice] == NAMES
    return twice


VICTIM = """
import asyncio, os, signal, sys
from rabbit_tasks import Publisher, Settings, parking
from rabbit_tasks.broker import connect
from rabbit_tasks.parking import look

event, count = sys.argv[1], int(sys.argv[2])

def dies(what, name):
    calls = 0
    async def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count and event == "before " + name:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await what(*args, **kwargs)
        if calls == count and event == "after " + name:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    return wrapped

Publisher.send = dies(Publisher.send, "publish")
look.Taken.ack = dies(look.Taken.ack, "ack")

async def main():
    settings = Settings()
    async with Publisher.open(settings) as publisher:
        connection = await connect(settings, "victim")
        await parking.replay(connection, publisher, "lot", lambda m: True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("event", "twice"),
    [("before publish", 0), ("after publish", 1), ("before ack", 1), ("after ack", None)],
)
async def test_a_replay_killed_at_any_moment_loses_nothing_and_at_most_one_is_there_twice(
    event: str,
    twice: int | None,
    lot: str,
    url: str,
    connection: Connection,
    publisher: Publisher,
) -> None:
    for count in (1, 13, 32):  # so many go one by one
        await park(publisher, NAMES)
        died = await asyncio.create_subprocess_exec(
            sys.executable, "-c", VICTIM, event, str(count), cwd=ROOT,
            env={**os.environ, "RABBIT_TASKS_URL": url},
        )  # fmt: skip
        assert await died.wait() == -signal.SIGKILL
        found = await _once_or_in_flight_twice(connection)
        if twice is not None:
            assert len(found) == twice
        await take_all(connection, "lot.parked")


@pytest.mark.heavy  # (test_replaying.py has its like, with many)
async def test_a_replay_killed_by_the_clock_loses_nothing_and_at_most_one_is_there_twice(
    lot: str, url: str, connection: Connection, publisher: Publisher
) -> None:
    """Without a hook: wherever it happens to be."""
    for moved in (1, 13, 33):
        await park(publisher, NAMES)
        replaying = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rabbit_tasks", "parked", "replay", "lot", "--all", cwd=ROOT,
            env={**os.environ, "RABBIT_TASKS_URL": url},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            await eventually(holds(connection, "lot", moved))
        finally:
            replaying.kill()
            await replaying.wait()
        await _once_or_in_flight_twice(connection)
        await take_all(connection, "lot.parked")


# --- what the broker itself parked --------------------------------------------------------------


async def test_what_the_broker_parked_says_why_in_words_and_goes_home(
    lot: str, settings: Settings, connection: Connection, publisher: Publisher
) -> None:
    forged = {"x-origin-queue": "elsewhere", "x-parked-reason": "forged", "x-retry-count": 7}

    async def give(name: str, **more: Any) -> None:
        properties = Properties.of(forged, message_id=name, delivery_mode=2, **more)
        await publisher.send("", "lot", name.encode(), properties)

    await give("limit")
    for _ in range(2):  # limit 1: two deliveries, each to a consumer that dies
        died = await connect(settings, "dies")
        await _hold(died, "lot")
        died.abort()
        await eventually(lambda: _nobody(connection))
    await eventually(lambda: depth(connection, "lot.parked"))
    await give("rejected")
    channel = await connection.open()
    await eventually(lambda: depth(connection, "lot"))
    got = await channel.basic_get("lot")
    await channel.basic_reject(got.delivery_tag or 0, requeue=False)
    await eventually(holds(connection, "lot.parked", 2))
    await give("expired", expiration="10")
    await eventually(holds(connection, "lot.parked", 3))

    for _ in range(5):  # looking adds to x-delivery-count, which must not change the story
        found = [message async for message in parking.browse(connection, "lot")]
        assert {m.id: m.reason for m in found} == {
            "limit": "its worker died with it, or lost its connection, too often (delivery limit)",
            "rejected": "rejected by its consumer",
            "expired": "expired in its queue before a worker took it (its publisher's time limit)",
        }
    assert {m.origin for m in found} == {"lot"}
    assert all(m.parked_at for m in found)
    moved = await parking.replay(connection, publisher, "lot", everything)
    assert moved.to == Counter({"lot": 3})
    for one in await take_all(connection, "lot"):
        assert not [name for name in one.properties.headers if "death" in name]
        assert "x-retry-count" not in one.properties.headers


async def _hold(connection: Connection, queue: str) -> None:
    channel = await connection.open()
    arrived = asyncio.Event()

    async def on_message(_: object) -> None:
        arrived.set()

    await channel.basic_qos(prefetch_count=1)
    await channel.basic_consume(queue, on_message)
    async with asyncio.timeout(30):
        await arrived.wait()


async def _nobody(connection: Connection) -> bool:
    return await consumers(connection, "lot") == 0


async def test_what_a_retry_queue_dead_letters_home_is_not_taken_for_parked_by_the_broker(
    settings: Settings, connection: Connection, publisher: Publisher, declared: Declared
) -> None:
    class Twice(Consumer[dict[str, Any]]):
        queue = "twice"
        retry = RetryPolicy(attempts=2, base=timedelta(milliseconds=100), jitter=False)

        async def handle(self, body: dict[str, Any], message: Message) -> None:
            raise ValueError("always")

    twice = App("twice", [Twice()])
    await declared(twice)
    worker = Worker(twice, settings)
    task = asyncio.create_task(worker.run())
    await publisher.publish(Twice, {}, message_id="a")
    await eventually(lambda: depth(connection, "twice.parked"))
    worker.stop()
    await task
    (one,) = [message async for message in parking.browse(connection, "twice")]
    assert one.reason == "failed 2 attempts of 2"
    assert one.origin == "twice"
    assert one.error_type == "ValueError"
    assert one.has_error("ValueError")
    assert len(one.attempts) == 2
