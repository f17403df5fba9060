"""Migrate on a real broker: a queue made anew under its name, every message accounted for."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rabbit_tasks import Publisher, Settings, declare, migration
from rabbit_tasks.broker import LOST, Connection, connected
from rabbit_tasks.declare import check
from rabbit_tasks.errors import PublishError, RabbitTasksError, Refused, TopologyError, Unroutable
from rabbit_tasks.frames import properties_of
from rabbit_tasks.migration import holding_queue, migrate
from rabbit_tasks.pour import WINDOW, Pour
from rabbit_tasks.properties import Properties
from rabbit_tasks.topology import Topology
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.commands import Result, Run
from tests.support.nursery import Nursery
from tests.support.post import app
from tests.support.queues import Found, consumers, depth
from tests.support.steps import Trace

TOPOLOGY: Topology = app.topology
WANTED: dict[str, dict[str, Any]] = {queue.name: queue.arguments for queue in TOPOLOGY.queues}
CLASSIC = {"x-queue-type": "classic"}


@pytest.fixture
def settings(url: str, broker: Broker) -> Settings:
    return Settings(url=url, heartbeat=10, management_url=broker.management_url)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """(Ages are for brokers that die.)"""
    monkeypatch.setattr(migration, "AGE", 0.1)
    monkeypatch.setattr(migration, "SILENCE", 0.5)


async def make(connection: Connection, name: str, arguments: dict[str, Any] = CLASSIC) -> None:
    """A queue of this name as somebody else declared it."""
    channel = await connection.open()
    await channel.queue_declare(name, durable=True, arguments=arguments)
    await channel.close()


async def exists(connection: Connection, name: str) -> bool:
    with suppress(Exception):
        await depth(connection, name)
        return True
    return False


async def assert_is_as_wanted(connection: Connection, name: str) -> None:
    queue = next(one for one in TOPOLOGY.queues if one.name == name)
    assert await check(connection, Topology((queue,), (), ())) == []
    assert not await exists(connection, f"{name}.migrating")


async def all_of(connection: Connection, queue: str) -> list[Found]:
    """Every message of a queue, in order, taken out of it."""
    wanted = await depth(connection, queue)
    found: list[Found] = []

    async def on_message(message: Any) -> None:
        found.append(Found(message.body, properties_of(message)))

    channel = await connection.open()
    await channel.basic_consume(queue, on_message, no_ack=True)
    await eventually(lambda: len(found) >= wanted)
    await channel.close()
    return found


async def numbers(connection: Connection, queue: str) -> list[int]:
    return [int(one.body) for one in await all_of(connection, queue)]


async def fill(publisher: Publisher, queue: str, count: int) -> None:
    """Numbers, in order."""
    given = Properties.of(delivery_mode=2, message_id="one")
    for i in range(count):
        given = Properties.of(delivery_mode=2, message_id=str(i))
        await publisher.send("", queue, str(i).encode(), given)


@asynccontextmanager
async def publishing(
    publisher: Publisher, exchange: str, key: str, pause: asyncio.Event | None = None
) -> AsyncIterator[set[int]]:
    """Somebody publishes numbers from 10,000 on, but not while the pause is set; what was confirmed,
    and -1 where something was not."""
    confirmed: set[int] = set()
    number = 10_000
    is_over = False

    async def go_on() -> None:
        nonlocal number
        while not is_over:
            number += 1
            one = number
            try:
                await publisher.send(exchange, key, str(one).encode(), Properties.of())
                confirmed.add(one)
            except PublishError:
                confirmed.add(-1)
            await asyncio.sleep(0.005)
            while pause is not None and pause.is_set() and not is_over:
                await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(go_on()) for _ in range(3)]
    try:
        yield confirmed
    finally:
        is_over = True
        await asyncio.gather(*tasks)


# --- nothing is lost ----------------------------------------------------------------------------


async def test_a_classic_queue_becomes_a_quorum_queue_while_publishers_publish(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    """They pause when they are asked to, and go on when the messages come back."""
    await make(connection, "letters")
    await publisher.publish_many("letters", [str(i) for i in range(2000)])
    pause = asyncio.Event()

    def told(where: str, _done: int, _total: int) -> None:
        if where == "back":
            pause.clear()

    async with publishing(publisher, "", "letters", pause) as confirmed:
        done = await migrate(
            settings, TOPOLOGY, "letters", wait=timedelta(minutes=1), told=told,
            waits=lambda _: pause.set(),
        )  # fmt: skip
    await assert_is_as_wanted(connection, "letters")
    found = Counter(await numbers(connection, "letters"))
    assert found == Counter([*range(2000), *confirmed])
    assert done.away == done.back > 2000
    assert len(confirmed) > done.away - 2000  # some went into the new one


@pytest.mark.usefixtures("hurried")
async def test_what_comes_through_a_binding_need_not_pause(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "letters")
    channel = await connection.open()
    await channel.exchange_declare("news", exchange_type="topic", durable=True)
    await channel.queue_bind("letters", "news", routing_key="a.*")
    await fill(publisher, "letters", 100)
    async with publishing(publisher, "news", "a.b") as confirmed:
        await migrate(settings, TOPOLOGY, "letters")
        seen = len(confirmed)
        await eventually(lambda: len(confirmed) > seen + 5)  # the binding is back
    await assert_is_as_wanted(connection, "letters")
    found = Counter(await numbers(connection, "letters"))
    assert set(found) == {*range(100), *confirmed}
    # What is published while both queues are bound comes twice.
    assert found.total() - len(found) < WINDOW


@pytest.mark.usefixtures("hurried")
async def test_while_somebody_publishes_without_a_pause_the_queue_is_not_deleted(
    connection: Connection,
    publisher: Publisher,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migration, "PATIENCE", 1.0)
    await make(connection, "letters")
    await fill(publisher, "letters", 100)
    async with publishing(publisher, "", "letters") as confirmed:
        with pytest.raises(TopologyError, match="somebody still publishes to it") as refused:
            await migrate(settings, TOPOLOGY, "letters")
    assert "rabbit-tasks topology migrate letters --wait 10m" in str(refused.value)
    await migrate(settings, TOPOLOGY, "letters")
    assert Counter(await numbers(connection, "letters")) == Counter([*range(100), *confirmed])


@pytest.mark.usefixtures("hurried")
async def test_a_queue_that_has_given_us_all_it_has_does_not_count_as_empty(
    connection: Connection, publisher: Publisher, settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """None is ready from the moment at which the broker gives it to us, and we may not have it yet."""
    await make(connection, "letters")
    await fill(publisher, "letters", WINDOW + 10)
    look, backs, looks = declare.look, 0, 0

    async def look_amid(by: Connection, name: str) -> tuple[int, int] | None:
        nonlocal looks
        if backs == WINDOW and name == "letters.migrating":
            looks += 1
            if looks == 1:
                return 0, 1
        return await look(by, name)

    def told(where: str, done: int, _total: int) -> None:
        nonlocal backs
        backs = done if where == "back" else 0

    monkeypatch.setattr(migration, "AGE", 0.5)  # no ack, so nothing comes, for some time
    monkeypatch.setattr(declare, "look", look_amid)
    await migrate(settings, TOPOLOGY, "letters", told=told)
    assert looks > 1
    assert await numbers(connection, "letters") == list(range(WINDOW + 10))


@pytest.mark.usefixtures("hurried")
async def test_what_somebody_has_in_hand_of_the_queue_where_messages_wait_is_waited_for(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "letters.migrating", holding_queue(TOPOLOGY, "letters").arguments)
    await fill(publisher, "letters.migrating", 20)
    channel = await connection.open()
    held: list[Any] = []

    async def on_message(message: Any) -> None:
        held.append(message)

    await channel.basic_qos(prefetch_count=5)
    await channel.basic_consume("letters.migrating", on_message)
    await eventually(lambda: len(held) == 5)
    migrating = asyncio.create_task(migrate(settings, TOPOLOGY, "letters"))
    done, _ = await asyncio.wait([migrating], timeout=1)
    assert not done
    await channel.close()
    assert (await migrating).back == 20
    assert sorted(await numbers(connection, "letters")) == list(range(20))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("limit", [3, 5000])
async def test_a_changed_delivery_limit_keeps_messages_and_their_order(
    limit: int, connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "letters", {**WANTED["letters"], "x-delivery-limit": limit})
    await fill(publisher, "letters", 3 * WINDOW)
    await migrate(settings, TOPOLOGY, "letters")
    await assert_is_as_wanted(connection, "letters")
    assert await numbers(connection, "letters") == list(range(3 * WINDOW))


@pytest.mark.usefixtures("hurried")
async def test_messages_keep_every_byte_of_their_properties(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    """But for the broker's own headers; and a time limit does not run while they wait."""
    await make(connection, "letters")
    given = [
        Properties.of(),
        Properties.of(delivery_mode=1, content_type="a/b", priority=4),
        Properties.of({"theirs": 1.5, "x": [1, {"y": None}]}, message_id="id", delivery_mode=2),
        Properties.of({"theirs": 1}, expiration="60000", user_id="guest"),
    ]
    for number, one in enumerate(given):
        await publisher.send("", "letters", str(number).encode(), one)
    done = await migrate(settings, TOPOLOGY, "letters")
    found = await all_of(connection, "letters")
    assert [one.body for one in found] == [b"0", b"1", b"2", b"3"]
    assert [one.properties.encode() for one in found] == [one.encode() for one in given]
    assert (done.restarted, done.unnamed) == (1, 0)


@pytest.mark.usefixtures("hurried")
async def test_a_parking_queue_keeps_order_and_the_broker_s_word_on_why(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "letters.parked")
    death = {"x-death": [{"queue": "letters", "reason": "rejected", "count": 1}]}
    for i in range(20):
        await publisher.send("", "letters.parked", str(i).encode(), Properties.of(death))
    await migrate(settings, TOPOLOGY, "letters.parked")
    await assert_is_as_wanted(connection, "letters.parked")
    await publisher.send("parking-lot", "letters", b"20", Properties.of())  # it is bound again
    found = await all_of(connection, "letters.parked")
    assert [int(one.body) for one in found] == list(range(21))
    assert found[0].properties.header("x-death")[0]["reason"] == "rejected"


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    "to_the_end",
    [False, pytest.param(True, marks=[pytest.mark.heavy, pytest.mark.timeout(300)])],
)
async def test_retries_that_are_due_meanwhile_arrive(
    to_the_end: bool, connection: Connection, publisher: Publisher, settings: Settings,
    broker: Broker, vhost: str,
) -> None:  # fmt: skip
    """At once, or within three minutes: until then their own queue keeps them."""
    await make(connection, "letters")
    waiting = next(one for one in TOPOLOGY.queues if one.main == "letters" and one.role == "retry")
    await make(connection, waiting.name, waiting.arguments)
    is_over = False

    async def retry() -> int:
        count = 0
        while not is_over:
            await publisher.send("", waiting.name, str(count).encode(), Properties.of())
            count += 1
            await asyncio.sleep(0.01)
        return count

    retrying = asyncio.create_task(retry())
    await migrate(settings, TOPOLOGY, "letters")
    is_over = True
    count = await retrying

    async def kept() -> int:
        path = f"/queues/{quote(vhost, safe='')}/{waiting.name}"
        row = await asyncio.to_thread(broker.api, "GET", path)
        return int(row.get("messages", 0))

    async def are_all() -> bool:
        there = await depth(connection, "letters")
        return there + (0 if to_the_end else await kept()) >= count

    await eventually(are_all, within=200)
    found = set(await numbers(connection, "letters"))
    assert len(found) + (0 if to_the_end else await kept()) >= count
    assert found <= set(range(count))


# --- what cannot be moved -----------------------------------------------------------------------


@asynccontextmanager
async def pouring(
    settings: Settings, change: Callable[[Properties], Properties] = lambda given: given
) -> AsyncIterator[tuple[Pour, Connection, Connection]]:
    """From `from` to `to`, on two connections."""
    async with (
        connected(settings, "test") as consuming,
        connected(settings, "test") as publishing,
        Pour(consuming, publishing, "from", "to", change=change, patience=5) as pour,
    ):
        yield pour, consuming, publishing


async def whole(pour: Pour, count: int, connection: Connection) -> None:
    while not pour.is_empty or await depth(connection, "to") < count:
        await pour.flow()


async def came_back(connection: Connection, count: int) -> None:
    async def is_back() -> bool:
        return await depth(connection, "from") == count

    await eventually(is_back)


async def test_what_is_refused_stays_where_it_was(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "from")
    await make(connection, "to", {"x-max-length": 5, "x-overflow": "reject-publish"})
    await fill(publisher, "from", 20)

    with pytest.raises(Refused, match="queue 'to': refused"):
        async with pouring(settings) as (pour, _, _):
            await whole(pour, 20, connection)
    moved = await numbers(connection, "to")
    assert moved == list(range(5))
    await came_back(connection, 15)
    assert await numbers(connection, "from") == list(range(5, 20))


async def test_one_that_no_frame_holds_stays_and_none_behind_it_is_there_twice(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    def change(given: Properties) -> Properties:
        return given.replace({"h": "x" * 200_000}) if given.text("message_id") == "7" else given

    await make(connection, "from")
    await make(connection, "to")
    await fill(publisher, "from", 20)
    with pytest.raises(Refused, match="queue 'to': properties and headers take 200"):
        async with pouring(settings, change) as (pour, _, _):
            await whole(pour, 20, connection)
    moved = await numbers(connection, "to")
    await came_back(connection, 20 - len(moved))
    left = await numbers(connection, "from")
    assert 7 in left
    assert set(range(7)) <= set(moved)
    assert sorted(moved + left) == list(range(20))


async def test_where_the_target_goes_what_it_had_is_not_taken_out_of_the_source(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "from")
    await make(connection, "to")
    await fill(publisher, "from", 20)

    async def lose() -> None:
        channel = await connection.open()
        async with pouring(settings) as (pour, _, _):
            pour.acks_from = asyncio.get_running_loop().time() + 1
            while await depth(connection, "to") < 20:
                await pour.flow()
            await channel.queue_delete("to")
            await publisher.send("", "from", b"20", Properties.of())
            while True:
                await pour.flow()

    with pytest.raises(Unroutable, match="there is no queue 'to' any more"):
        await lose()
    await came_back(connection, 21)
    assert await numbers(connection, "from") == list(range(21))


@pytest.mark.parametrize("which", ["consuming", "publishing"])
async def test_a_connection_that_is_lost_in_the_middle_loses_no_message(
    which: str, connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    count = 20 * WINDOW
    await make(connection, "from")
    await make(connection, "to")
    await publisher.publish_many("from", [str(i) for i in range(count)])

    async def lose() -> None:
        async with pouring(settings) as (pour, consuming, publishing):
            while await depth(connection, "to") < 3 * WINDOW:
                await pour.flow()
            {"consuming": consuming, "publishing": publishing}[which].abort()
            await whole(pour, count, connection)

    with pytest.raises(LOST):
        await lose()
    async with pouring(settings) as (pour, _, _):
        while not (pour.is_empty and pour.idle > 0.5):
            await pour.flow()
    assert await depth(connection, "from") == 0
    found = await numbers(connection, "to")
    assert set(found) == set(range(count))
    assert len(found) <= count + WINDOW


@pytest.mark.parametrize("message_id", [None, "one", "ä" * 120])
async def test_order_is_kept_whatever_the_ids_and_the_sizes(
    message_id: str | None, connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "from")
    await make(connection, "to")
    given = Properties.of(message_id=message_id)
    bodies = [
        str(i).encode().ljust(3_000_000 if i % 10 == 9 else 300_000 if i % 10 == 4 else 9)
        for i in range(2 * WINDOW)
    ]
    for body in bodies:
        await publisher.send("", "from", body, given)
    async with pouring(settings) as (pour, _, _):
        await whole(pour, len(bodies), connection)
    found = await all_of(connection, "to")
    assert [one.body for one in found] == bodies
    assert {one.properties.encode() for one in found} == {given.encode()}
    assert await depth(connection, "from") == 0


# --- what it refuses ----------------------------------------------------------------------------


@pytest.mark.usefixtures("hurried")
async def test_with_consumers_attached_it_refuses_or_waits(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "letters")
    channel = await connection.open()

    async def on_message(_: Any) -> None: ...

    await channel.basic_consume("letters", on_message)
    with pytest.raises(TopologyError, match=r"letters: 1 consumer\(s\) are attached.*--wait 10m"):
        await migrate(settings, TOPOLOGY, "letters")
    assert not await exists(connection, "letters.migrating")
    told: list[str] = []
    waiting = asyncio.create_task(
        migrate(settings, TOPOLOGY, "letters", wait=timedelta(minutes=1), waits=told.append)
    )
    await eventually(lambda: told)
    assert told == ["for 1 consumer(s) of letters to leave"]
    assert await consumers(connection, "letters") == 1
    await channel.close()
    await waiting
    await assert_is_as_wanted(connection, "letters")


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    "lacking", [{"configure": "^$"}, {"write": "^$"}, {"read": "^$"}, {"read": "^letters"}]
)
async def test_without_a_permission_nothing_is_changed(
    lacking: dict[str, str], connection: Connection, publisher: Publisher, settings: Settings,
    broker: Broker, vhost: str,
) -> None:  # fmt: skip
    await make(connection, "letters")
    channel = await connection.open()
    await channel.exchange_declare("news", exchange_type="topic", durable=True)
    await channel.queue_bind("letters", "news", routing_key="a.*")
    await fill(publisher, "letters", 3)
    broker.create_user(f"poor-{vhost}", "p")
    try:
        broker.allow(vhost, f"poor-{vhost}", **lacking)
        poor = settings.changed(url=broker.url(vhost, f"poor-{vhost}", "p"))
        monitor = settings.management_url.replace("://", "://guest:guest@")  # type: ignore[union-attr]
        with pytest.raises(TopologyError, match="rabbitmqctl set_permissions") as refused:
            await migrate(poor.changed(management_url=monitor), TOPOLOGY, "letters")
        assert len(str(refused.value).splitlines()) == 1
    finally:
        broker.delete_user(f"poor-{vhost}")
    assert not await exists(connection, "letters.migrating")
    assert await numbers(connection, "letters") == [0, 1, 2]


async def test_a_waiting_queue_that_differs_goes_first(
    connection: Connection, settings: Settings
) -> None:
    await make(connection, "letters")
    await make(connection, "letters.retry.1.100ms")
    with pytest.raises(TopologyError, match=r"first: .* migrate letters\.retry\.1\.100ms"):
        await migrate(settings, TOPOLOGY, "letters")


async def test_a_policy_under_which_messages_would_vanish_stops_it(
    connection: Connection, settings: Settings, broker: Broker, vhost: str
) -> None:
    await make(connection, "letters")
    policy = {"pattern": ".*", "definition": {"message-ttl": 1000}, "apply-to": "queues"}
    broker.api("PUT", f"/policies/{vhost.replace('/', '%2F')}/short", policy)
    with pytest.raises(TopologyError, match=r"policy 'short' \(message-ttl\) applies to"):
        await migrate(settings, TOPOLOGY, "letters")
    assert not await exists(connection, "letters.migrating")


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def command(cli: Run, monkeypatch: pytest.MonkeyPatch, settings: Settings, hurried: None) -> Run:
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", str(settings.management_url))

    def call(*arguments: str, **more: Any) -> Result:
        return cli("--app", "tests.support.post:app", "topology", "migrate", *arguments, **more)

    return call


def at_broker(settings: Settings, work: Callable[[Connection, Publisher], Any]) -> Any:
    """From a test that is not async."""

    async def do() -> Any:
        async with connected(settings, "test") as connection, Publisher.open(settings) as publisher:
            return await work(connection, publisher)

    return asyncio.run(do())


async def three(connection: Connection, publisher: Publisher) -> None:
    await make(connection, "letters")
    await fill(publisher, "letters", 3)


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(
    command: Run, settings: Settings
) -> None:
    at_broker(settings, three)
    result = command("letters", "--dry-run")
    assert result.code == 0
    swap = (
        "2. delete letters and declare it as the app wants it, after 0.5 s in which nobody published "
        "to it: for that moment publishers must pause"
    )
    assert result.out.splitlines() == [
        "1. move its messages, 3 now, to letters.migrating",
        swap,
        "3. move them back from letters.migrating, and delete that",
    ]
    assert "letters: x-queue-type is classic, wanted quorum" in result.err
    assert result.err.endswith("nothing was changed\n")

    async def look(connection: Connection, _: Publisher) -> None:
        assert not await exists(connection, "letters.migrating")
        await make(connection, "letters")  # it is the classic one still
        assert await numbers(connection, "letters") == [0, 1, 2]

    at_broker(settings, look)


def test_it_asks_first_and_then_says_what_it_did(command: Run, settings: Settings) -> None:
    at_broker(settings, three)
    asked = command("letters")
    assert (asked.code, asked.err.splitlines()[-1]) == (
        2, "error: nobody to ask; say --yes to migrate it, --dry-run to look only"
    )  # fmt: skip
    done = command("letters", "--yes")
    assert (done.code, done.out.splitlines()[-1]) == (0, "3 moved away, 3 moved back")
    assert re.search(r"letters is as the app wants it; it was not there for \d+ ms", done.err)
    again = command("letters", "--yes")
    assert (again.code, again.out) == (0, "")
    assert again.err == "letters is as the app wants it: nothing to migrate\n"


def test_a_queue_that_is_not_the_app_s_is_wrong_usage(command: Run) -> None:
    result = command("strangers", "--yes")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "error: the app has no queue 'strangers'; its queues: rabbit-tasks topology show\n"
    )
    assert command("letters", "--wait", "soon").code == 2


def test_a_queue_that_is_missing_is_to_be_declared(command: Run) -> None:
    result = command("letters", "--yes")
    assert result.code == 1
    assert result.err == "error: letters: missing; create it: rabbit-tasks topology declare\n"


def test_without_the_management_api_it_wants_to_be_told_of_bindings(
    command: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RABBIT_TASKS_MANAGEMENT_URL")
    at_broker(settings, three)
    result = command("letters", "--yes")
    assert result.code == 1
    assert "set RABBIT_TASKS_MANAGEMENT_URL, or say --forget-bindings" in result.err
    assert command("letters", "--yes", "--forget-bindings").code == 0


# --- killed -------------------------------------------------------------------------------------

STEP = re.compile(
    r"((before|half|after) (Queue\.(Declare|Delete|Bind|Unbind)|Basic\.(Publish|Ack|Cancel))|"
    r"read (Basic\.Ack|Queue\.(DeclareOk|DeleteOk|BindOk))) "
)
MESSAGES = WINDOW + 10
NURSERIES = 4


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(False, marks=pytest.mark.timeout(300)),  # (on a busy machine)
        pytest.param(True, marks=[pytest.mark.heavy, pytest.mark.timeout(3600)]),
    ],
)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_killed_at_any_step_and_run_again_no_message_is_lost(
    kind: str, every: bool, connection: Connection, publisher: Publisher, url: str, tmp_path: Path
) -> None:
    """Exactly once, or twice those that were on their way: a window's worth."""
    free: asyncio.Queue[Nursery] = asyncio.Queue()

    async def command(name: str, step: int) -> tuple[int, Path, Path]:
        nursery = await free.get()
        log, path = tmp_path / f"{name}.log", tmp_path / f"{name}.{step}.steps"
        arguments = ("--app", "tests.support.swept:app", "topology", "migrate", name, "--yes",
                     "--forget-bindings")  # fmt: skip
        steps = {"path": str(path), "begin": 0, "die_at": step, "acks": 10**9}
        try:
            code = await asyncio.to_thread(
                nursery.run, *arguments, log=log, env={"SWEPT_QUEUES": name}, steps=steps
            )
        finally:
            free.put_nowait(nursery)
        return code, log, path

    async def life(step: int) -> Path:
        name = f"swept.{step}"
        arguments = {"x-queue-type": kind}
        await make(connection, name, arguments)
        await fill(publisher, name, MESSAGES)
        code, log, path = await command(name, step)
        died = code
        if step:
            code, log, _ = await command(name, 0)
        where = f"{kind} {step}: {died} at {Trace(path).last}\n{log.read_text()}"
        assert code == 0, where
        assert died in (0, -signal.SIGKILL), where
        assert not await exists(connection, f"{name}.migrating"), where
        found = await numbers(connection, name)
        assert list(dict.fromkeys(found)) == list(range(MESSAGES)), where
        assert len(found) <= MESSAGES + WINDOW, where
        return path

    with ExitStack() as stack:
        for _ in range(NURSERIES):
            free.put_nowait(stack.enter_context(Nursery({"RABBIT_TASKS_URL": url})))
        steps = Trace(await life(0)).steps
        deaths = [number for number, what in enumerate(steps, 1) if STEP.match(what)]
        assert len(deaths) > 4 * MESSAGES
        if not every:
            # Some of the first and the last of each kind.
            kinds: dict[str, list[int]] = {}
            for number in deaths:
                kinds.setdefault(steps[number - 1].rpartition(" ")[0], []).append(number)
            deaths = sorted({at for found in kinds.values() for at in (found[0], found[-1])})
            deaths = deaths[kind == "quorum" :: 4]
        await asyncio.gather(*[life(step) for step in deaths])


@pytest.mark.usefixtures("hurried")
async def test_stopped_by_ctrl_c_nothing_is_there_twice(
    connection: Connection, publisher: Publisher, settings: Settings
) -> None:
    await make(connection, "letters")
    await fill(publisher, "letters", 4 * WINDOW)
    moved = asyncio.Event()

    def told(_where: str, done: int, _total: int) -> None:
        if done > WINDOW:
            moved.set()

    running = asyncio.create_task(migrate(settings, TOPOLOGY, "letters", told=told))
    await moved.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await exists(connection, "letters.migrating")
    await migrate(settings, TOPOLOGY, "letters")
    assert await numbers(connection, "letters") == list(range(4 * WINDOW))


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["away", "back"])
async def test_a_broker_that_dies_in_the_middle_loses_nothing(
    where: str, broker: Broker, settings: Settings
) -> None:
    if not broker.can_be_hurt:
        pytest.skip("RABBIT_TASKS_TEST_BROKER is not set")
    async with connected(settings, "test") as connection, Publisher.open(settings) as publisher:
        await make(connection, "letters")
        await fill(publisher, "letters", 10 * WINDOW)
    moved = asyncio.Event()

    def told(stage: str, done: int, _total: int) -> None:
        if stage == where and done > WINDOW:
            moved.set()

    running = asyncio.create_task(migrate(settings, TOPOLOGY, "letters", told=told))
    await moved.wait()
    await asyncio.to_thread(broker.hurt, "kill")
    with pytest.raises(RabbitTasksError, match="go on: rabbit-tasks topology migrate letters"):
        await running
    await asyncio.to_thread(broker.hurt, "start")
    await migrate(settings, TOPOLOGY, "letters")
    async with connected(settings, "test") as connection:
        await assert_is_as_wanted(connection, "letters")
        found = await numbers(connection, "letters")
    # Twice those whose ack it had not written to its disk yet: of a classic queue, hundreds.
    assert list(dict.fromkeys(found)) == list(range(10 * WINDOW))
    assert max(Counter(found).values()) <= 2
