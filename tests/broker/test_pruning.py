"""Removing retry queues of older policies on a real broker: no message is lost by it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from aiormq.channel import Channel

from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, Settings, pruning
from rabbit_tasks.broker import Connection, connected
from rabbit_tasks.declare import look
from rabbit_tasks.errors import (
    ConfigurationError,
    ConnectError,
    ManagementError,
    TopologyError,
    Unconfirmed,
)
from rabbit_tasks.management import Management
from rabbit_tasks.properties import Properties
from rabbit_tasks.pruning import Pruned, prune
from rabbit_tasks.topology import waiting_queue
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.inprocess import Running
from tests.support.line import line
from tests.support.queues import consumers, depth, take_all


class Mail(Consumer[dict[str, Any]]):
    queue = "mail"
    retry = RetryPolicy(attempts=2, base=timedelta(seconds=1), jitter=False)

    async def handle(self, body: dict[str, Any], message: Message) -> None: ...


class MailBefore(Mail):
    retry = RetryPolicy(attempts=2, base=timedelta(minutes=1), jitter=False)


class Other(Mail):
    queue = "other"


app = App("mail", [Mail()])
before = App("mail", [MailBefore()])
STALE = "mail.retry.1.1m"

Declared = Callable[[App], Awaitable[None]]
Run = Callable[[App], Awaitable[Running]]


@pytest.fixture
def settings(settings: Settings, broker: Broker) -> Settings:
    return settings.changed(management_url=broker.management_url)


@pytest.fixture
async def both(declared: Declared) -> None:
    """The topology of the app, and of the one before it."""
    await declared(before)
    await declared(app)


async def put(connection: Connection, name: str, **other: Any) -> None:
    """A retry queue of this name; with arguments that differ, None for those that are not given."""
    queue = waiting_queue(name)
    assert queue is not None
    arguments = {k: v for k, v in {**queue.arguments, **other}.items() if v is not None}
    channel = await connection.open()
    await channel.queue_declare(name, durable=True, arguments=arguments)
    await channel.close()


async def there(connection: Connection, name: str) -> bool:
    return await look(connection, name) is not None


async def send(publisher: Publisher, queue: str, body: bytes = b"{}", **headers: Any) -> None:
    await publisher.send("", queue, body, Properties.of(headers, delivery_mode=2))


async def nothing(_: object) -> None: ...


async def test_what_is_empty_goes_and_whatever_holds_or_gets_a_message_stays(
    both: None,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    broker: Broker,
    vhost: str,
) -> None:
    names = {
        "empty": "mail.retry.1.10m", "crashed": "mail.crashed.7m", "holds": "mail.retry.1.11m",
        "dead": "mail.retry.1.1ms", "gets": "mail.retry.1.12m", "read": "mail.retry.1.13m",
    }  # fmt: skip
    for name in names.values():
        await put(connection, name)
    broker.delete(vhost, "queues", "mail")  # so that nobody takes dead letters
    await send(publisher, names["holds"])
    # From now on the management API says of it that nothing is on the way out.
    await eventually(lambda: none_dead(settings, names["dead"]))
    await send(publisher, names["dead"])  # gone from ready at once
    await eventually(lambda: empty(connection, names["dead"]))
    reader = await connection.open()
    await reader.basic_consume(names["read"], nothing)
    sent: list[asyncio.Task[None]] = []
    second: list[asyncio.Task[list[Pruned]]] = []

    def meanwhile(asked: list[str]) -> None:
        assert set(asked) == {STALE, *(names[k] for k in ("empty", "crashed", "dead", "gets"))}
        sent.append(asyncio.create_task(send(publisher, names["gets"], b'"late"', a="b")))
        second.append(asyncio.create_task(prune(settings, app)))  # at the same time

    told: list[Pruned] = []
    pruned = await prune(settings, app, told=meanwhile, done=told.append)
    assert sorted(map(str, told)) == sorted(map(str, pruned))
    found = {one.name: one.kept for one in pruned}
    kept = {key: found.pop(name) for key, name in names.items() if found.get(name)}
    assert found == {STALE: None, names["empty"]: None, names["crashed"]: None}
    assert kept == {
        "holds": "1 message in it, to go home to mail",
        "dead": "1 dead letter on the way out of it: does mail take them? rabbit-tasks topology check",
        "gets": "a message was published to it just now: who does that?",
        "read": "somebody consumes from it, or did so a moment ago: is another prune at work?",
    }
    for key, name in names.items():
        assert await there(connection, name) == (key not in ("empty", "crashed")), key
    assert await depth(connection, names["holds"]) == 1
    await eventually(lambda: depth(connection, names["gets"]))
    (late,) = await take_all(connection, names["gets"])
    assert (late.body, late.properties.header("a")) == (b'"late"', "b")
    also = {one.name: one.kept for one in await second[0]}
    assert set(also) >= {names[key] for key in kept}
    assert all(why is not None for why in also.values())


async def test_a_queue_that_is_not_surely_ours_stays_whatever_its_name(
    both: None,
    settings: Settings,
    connection: Connection,
    deleting: Deleting,
    broker: Broker,
    vhost: str,
) -> None:
    deleting(delete)
    whose = "declared as none of ours ever was ({}): whose is it?"
    home = {"x-dead-letter-routing-key": "elsewhere"}
    other: dict[str, tuple[dict[str, Any], str]] = {
        "mail.retry.1.2m": (home, whose.format("x-dead-letter-routing-key")),
        "mail.retry.1.3m": ({"x-message-ttl": 1}, whose.format("x-message-ttl")),
        "mail.retry.1.4m": ({"x-overflow": None}, whose.format("x-overflow")),
        "mail.retry.1.5m": ({"x-max-length": 9}, whose.format("x-max-length")),
        "mail.retry.1.6m": ({}, "bound to amq.direct, as none of ours ever was: whose is it?"),
    }
    for name, (arguments, _) in other.items():
        await put(connection, name, **arguments)
    channel = await connection.open()
    await channel.queue_bind("mail.retry.1.6m", "amq.direct", "theirs")
    # and names that are none of a retry queue of ours
    for name in ("mail.retry.x", "mail2.retry.1.1m", "mail.retry.1.1m.x", "mail.retry.1.60s"):
        await channel.queue_declare(name, durable=True)
    there_before = set(await names_of(settings))
    found = {one.name: one.kept for one in await prune(settings, app)}
    assert (found.pop("mail.retry.1.60s") or "").startswith("declared as none of ours ever was (")
    assert found == {STALE: None} | {name: why for name, (_, why) in other.items()}
    assert set(await names_of(settings)) == there_before - {STALE}


async def names_of(settings: Settings) -> list[str]:
    management = Management.of(settings)
    assert management is not None
    return [row["name"] for row in await management.rows("queues", management.vhost)]


# --- in the gap -----------------------------------------------------------------------------------

Deleting = Callable[[Callable[[Channel, str], Awaitable[None]]], None]


@pytest.fixture
def deleting(monkeypatch: pytest.MonkeyPatch) -> Deleting:
    """Puts something in the place of the one call that deletes, and leaves out the wait before it."""

    async def all_settled(_: object, __: object) -> dict[str, str]:
        return {}

    monkeypatch.setattr(pruning, "_settled", all_settled)
    return lambda instead: monkeypatch.setattr(pruning, "_delete", instead)


delete, nobody_else = pruning._delete, pruning._nobody_else  # noqa: SLF001
PUT_BACK = (
    "{} published to it as it was removed: it was made again, with them in it; who does that?"
)


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.heavy)])
async def test_what_is_published_between_the_last_look_and_the_deletion_is_not_lost(
    rounds: int,
    both: None,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    deleting: Deleting,
) -> None:
    confirmed: list[bytes] = []

    async def publish_and_delete(channel: Channel, name: str) -> None:
        for _ in range(3):
            body = b"%d" % len(confirmed)
            await send(publisher, name, body, **{"x-retry-count": 1, "n": "é"})
            confirmed.append(body)
        await delete(channel, name)

    deleting(publish_and_delete)
    for _ in range(rounds):
        assert await prune(settings, app) == [Pruned(STALE, PUT_BACK.format("3 messages"))]
        found = await take_all(connection, STALE)
        assert [message.body for message in found] == confirmed[-3:]
        for message in found:
            headers = message.properties.headers
            headers.pop("x-delivery-count", None)  # (3.10 adds it to whatever is got)
            assert headers == {"x-retry-count": 1, "n": "é"}
        assert all(m.properties.number("delivery_mode") == 2 for m in found)
        # Made again as it was: with other arguments this would be refused.
        await put(connection, STALE)


async def test_the_last_message_is_not_given_up_while_the_broker_does_not_take_it(
    both: None,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    deleting: Deleting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def publish_and_delete(channel: Channel, name: str) -> None:
        await send(publisher, name, b'"the only copy"')
        await delete(channel, name)

    tries = []
    real = Publisher.send

    async def third_time(self: Publisher, exchange: str, key: str, *rest: Any) -> None:
        if self is not publisher:
            tries.append(key)
            if len(tries) < 3:
                raise Unconfirmed("not now")
        await real(self, exchange, key, *rest)

    deleting(publish_and_delete)
    monkeypatch.setattr(Publisher, "send", third_time)
    monkeypatch.setattr(pruning, "_PAUSE", 0.05)
    assert await prune(settings, app) == [Pruned(STALE, PUT_BACK.format("1 message"))]
    assert tries == [STALE] * 3
    assert [message.body for message in await take_all(connection, STALE)] == [b'"the only copy"']


async def test_a_cancelled_prune_puts_back_what_it_holds_before_it_ends(
    both: None,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    deleting: Deleting,
) -> None:
    async def publish_delete_and_be_cancelled(channel: Channel, name: str) -> None:
        await send(publisher, name, b'"the only copy"')
        await delete(channel, name)
        running.cancel()

    deleting(publish_delete_and_be_cancelled)
    running = asyncio.create_task(prune(settings, app))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [message.body for message in await take_all(connection, STALE)] == [b'"the only copy"']


async def test_a_message_in_our_hands_whose_queue_somebody_else_removes_is_put_back(
    both: None,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    broker: Broker,
    vhost: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As another prune at the same time does, to whom it did not come."""

    async def comes_to_us_and_is_deleted(_: object, watches: dict[str, Any]) -> dict[str, str]:
        await send(publisher, STALE, b'"the only copy"')
        await eventually(lambda: bool(watches[STALE].arrived))
        broker.delete(vhost, "queues", STALE)
        await watches[STALE].ended.wait()
        return {STALE: "a message came"}

    monkeypatch.setattr(pruning, "_settled", comes_to_us_and_is_deleted)
    assert await prune(settings, app) == [Pruned(STALE, "a message came")]
    assert [message.body for message in await take_all(connection, STALE)] == [b'"the only copy"']


async def test_a_queue_from_which_somebody_else_consumes_by_now_stays(
    both: None, settings: Settings, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def comes_meanwhile(_: object, __: object) -> dict[str, str]:
        channel = await connection.open()
        await channel.basic_consume(STALE, nothing)
        return {}

    monkeypatch.setattr(pruning, "_settled", comes_meanwhile)
    ((name, why),) = [(one.name, one.kept) for one in await prune(settings, app)]
    assert name == STALE
    assert why == "somebody else consumes from it by now: is another prune at work?"
    assert await there(connection, STALE)


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_a_connection_lost_in_the_deletion_loses_no_message(
    is_deleted: bool,
    both: None,
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    deleting: Deleting,
    broker: Broker,
    vhost: str,
) -> None:
    async with line(broker) as cable:

        async def publish_and_be_cut_off(channel: Channel, name: str) -> None:
            await send(publisher, name, b'"the only copy"')
            await eventually(lambda: empty(connection, STALE))
            if is_deleted:
                await delete(channel, name)
            cable.cut()
            await delete(channel, name)  # (of which no answer comes)

        deleting(publish_and_be_cut_off)
        mine = settings.changed(url=cable.url(vhost))
        if is_deleted:
            assert await prune(mine, app) == [Pruned(STALE, PUT_BACK.format("1 message"))]
        else:
            told = "connection lost; removed before: nothing; again: .* --prune"
            with pytest.raises(ConnectError, match=told):
                await prune(mine, app)
    await eventually(lambda: depth(connection, STALE))
    assert [message.body for message in await take_all(connection, STALE)] == [b'"the only copy"']


async def none_dead(settings: Settings, name: str) -> bool:
    management = Management.of(settings)
    assert management is not None
    row = await management.get("queues", management.vhost, name)
    return bool(row.get("messages_dlx") == 0)


async def empty(connection: Connection, name: str) -> bool:
    """(Or else: it has come to a consumer, in the same step in which the broker took it.)"""
    return await depth(connection, name) == 0


# --- who publishes there --------------------------------------------------------------------------


async def test_while_a_worker_of_the_older_policy_is_connected_nothing_is_removed(
    both: None,
    settings: Settings,
    connection: Connection,
    run: Run,
    declared: Declared,
    deleting: Deleting,
) -> None:
    deleting(delete)
    old = await run(before)
    await eventually(lambda: consumers(connection, "mail"))
    await eventually(lambda: refuses(settings, f"its topology is {before.topology.digest}"))
    assert await there(connection, STALE)
    await old.end()
    # Workers of this topology, and of other apps, are in nobody's way.
    await run(app)
    await run(App("other", [Other()]))
    await eventually(lambda: consumers(connection, "other"))

    async def removes() -> bool:
        try:
            return await prune(settings, app) == [Pruned(STALE)]
        except TopologyError:
            return False  # (the API shows a connection for a while after its end)

    await eventually(removes)
    assert not await there(connection, STALE)


async def refuses(settings: Settings, why: str) -> bool:
    """(The API shows a connection a moment after its beginning.)"""
    management = Management.of(settings)
    assert management is not None
    try:
        await nobody_else(management, app)
    except TopologyError as error:
        return why in str(error) and "\n" not in str(error)
    return False


async def test_a_worker_that_does_not_tell_its_topology_may_publish_anywhere(
    both: None, settings: Settings, connection: Connection, deleting: Deleting
) -> None:
    deleting(delete)
    async with connected(settings, "worker of yore"):
        why = "rabbit-tasks worker of yore (of a version that does not tell its topology)"
        await eventually(lambda: refuses(settings, why))
        with pytest.raises(TopologyError, match="stop them or start them anew with this version"):
            await prune(settings, app)
    assert await there(connection, STALE)


@pytest.mark.heavy  # (its small version is the refusal above: the same look, once more)
async def test_a_worker_that_comes_while_we_wait_is_seen(
    both: None,
    settings: Settings,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncExitStack() as stack:

        async def comes_meanwhile(_: object, __: object) -> dict[str, str]:
            await stack.enter_async_context(connected(settings, "worker of yore"))
            await eventually(lambda: refuses(settings, "of yore"))
            return {}

        monkeypatch.setattr(pruning, "_settled", comes_meanwhile)
        with pytest.raises(TopologyError, match="worker of yore"):
            await prune(settings, app)
    assert await there(connection, STALE)


# --- what it cannot know --------------------------------------------------------------------------


async def test_without_the_management_api_it_says_what_it_needs(
    both: None, settings: Settings, connection: Connection, url: str
) -> None:
    with pytest.raises(ConfigurationError, match="set RABBIT_TASKS_MANAGEMENT_URL"):
        await prune(Settings(url=url), app)
    assert await there(connection, STALE)


async def test_figures_that_are_older_than_our_own_consumer_do_not_count(
    both: None, settings: Settings, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "PATIENCE", 0.0)
    with pytest.raises(ManagementError, match="newer than our own consumer") as refused:
        await prune(settings, app)
    assert str(refused.value).endswith("nothing was removed")
    assert await there(connection, STALE)


@pytest.fixture
def viewer(broker: Broker, vhost: str) -> Iterator[str]:
    """A user who may see the virtual host, but no connections of others."""
    name = f"viewer-{uuid.uuid4().hex[:6]}"
    broker.api("PUT", f"/users/{name}", {"password": "p", "tags": "management"})
    broker.allow(vhost, name)
    yield name
    broker.delete_user(name)


async def test_a_user_who_sees_no_connections_of_others_cannot_know_who_publishes(
    both: None, settings: Settings, connection: Connection, viewer: str, broker: Broker
) -> None:
    where = broker.management_url.replace("://", f"://{viewer}:p@")
    with pytest.raises(ManagementError, match=f"rabbitmqctl set_user_tags {viewer} monitoring"):
        await prune(settings.changed(management_url=where), app)
    assert await there(connection, STALE)


async def test_where_a_permission_is_missing_it_is_named_and_nothing_is_removed(
    both: None,
    settings: Settings,
    connection: Connection,
    viewer: str,
    broker: Broker,
    vhost: str,
    deleting: Deleting,
) -> None:
    deleting(delete)
    login = settings.addresses()[0]
    where = broker.management_url.replace("://", f"://{login.user}:{login.password}@")
    mine = settings.changed(user=viewer, password="p", management_url=where)
    for permissions in ({"read": "^$"}, {"configure": "^$"}):
        broker.allow(vhost, viewer, **permissions)
        with pytest.raises(TopologyError, match="rabbitmqctl set_permissions"):
            await prune(mine, app)
        assert await there(connection, STALE)
    broker.allow(vhost, viewer)
    await eventually(lambda: consumers_are_gone(connection))
    assert await prune(mine, app) == [Pruned(STALE)]


async def consumers_are_gone(connection: Connection) -> bool:
    return await consumers(connection, STALE) == 0
