"""Declare and check on a real broker: nothing half-done, every difference told."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from aiormq.channel import Channel

from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, Settings, lookup
from rabbit_tasks.broker import Connection, connect, connected
from rabbit_tasks.declare import check, declare, missing
from rabbit_tasks.errors import ConnectError, TopologyError
from rabbit_tasks.topology import Topology
from rabbit_tasks.worker import Worker
from tests.conftest import PASSWORD, eventually
from tests.support.brokers import Broker
from tests.support.queues import consumers


class Mail(Consumer[dict[str, Any]]):
    queue = "mail"
    retry = RetryPolicy(attempts=3, base=timedelta(seconds=1), jitter=False)

    async def handle(self, body: dict[str, Any], message: Message) -> None: ...


app = App("mail", [Mail()])
TOPOLOGY: Topology = app.topology
NAMES = sorted([*(q.name for q in TOPOLOGY.queues), *(e.name for e in TOPOLOGY.exchanges)])
MAIN: dict[str, Any] = next(q.arguments for q in TOPOLOGY.queues if q.name == "mail")


def at(vhost: str, *path: str) -> str:
    return "/".join(quote(part, safe="") for part in (vhost, *path))


def there(broker: Broker, vhost: str) -> list[str]:
    """What is in the virtual host and not the broker's own."""
    queues = broker.api("GET", f"/queues/{at(vhost)}")
    exchanges = broker.api("GET", f"/exchanges/{at(vhost)}")
    names = [one["name"] for one in queues + exchanges]
    return sorted(name for name in names if name and not name.startswith("amq."))


async def test_declare_creates_all_of_it_and_a_second_time_nothing(
    connection: Connection, broker: Broker, vhost: str
) -> None:
    assert sorted(await missing(connection, TOPOLOGY)) == NAMES
    assert str((await check(connection, TOPOLOGY))[0]) == (
        "parking-lot: missing; create it: rabbit-tasks topology declare"
    )
    assert await declare(connection, TOPOLOGY) == NAMES
    assert there(broker, vhost) == NAMES
    assert await declare(connection, TOPOLOGY) == []
    assert await check(connection, TOPOLOGY) == []
    assert await missing(connection, TOPOLOGY) == []


@pytest.mark.parametrize("most", [1, 3, 256])
async def test_what_is_missing_among_many_is_told_however_many_are_asked_for_at_a_time(
    most: int, connection: Connection, broker: Broker, vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "MOST", most)
    await declare(connection, TOPOLOGY)
    names = [part.name for part in TOPOLOGY.parts]
    gone = [names[1], names[2], names[4], names[-1]]
    for name in gone:
        broker.delete(vhost, "queues", name)
    assert await missing(connection, TOPOLOGY) == gone


async def test_answers_that_come_too_late_are_nobody_elses(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await declare(connection, TOPOLOGY)
    monkeypatch.setattr(lookup, "RPC_TIMEOUT", 0.2)
    opened = connection.open

    async def open_and_hold() -> Channel:
        channel = await opened()
        connection.hold(held=True)
        asyncio.get_running_loop().call_later(0.5, partial(connection.hold, held=False))
        return channel

    with monkeypatch.context() as patch:
        patch.setattr(connection, "open", lambda **_: open_and_hold())
        with pytest.raises(ConnectError, match="parking-lot: the broker did not answer"):
            await missing(connection, TOPOLOGY)
    monkeypatch.undo()
    assert await missing(connection, TOPOLOGY) == []


async def test_a_binding_that_is_gone_is_made_again(
    connection: Connection, broker: Broker, vhost: str
) -> None:
    await declare(connection, TOPOLOGY)
    broker.delete(vhost, "bindings", "e", "parking-lot", "q", "mail.parked", "mail")
    await declare(connection, TOPOLOGY)
    (binding,) = broker.api("GET", f"/exchanges/{at(vhost, 'parking-lot')}/bindings/source")
    assert (binding["destination"], binding["routing_key"]) == ("mail.parked", "mail")


async def test_ten_connections_declare_at_once(settings: Settings) -> None:
    async with AsyncExitStack() as stack:
        ten = [await stack.enter_async_context(connected(settings, "declare")) for _ in range(10)]
        await asyncio.gather(*(declare(one, TOPOLOGY) for one in ten))
        assert await check(ten[0], TOPOLOGY) == []


# --- differences --------------------------------------------------------------------------------


async def put(broker: Broker, vhost: str, kind: str, name: str, **definition: Any) -> None:
    broker.api("PUT", f"/{kind}/{at(vhost, name)}", {"durable": True, **definition})


@pytest.mark.parametrize(
    ("name", "definition", "told"),
    [
        ("mail", {"arguments": {"x-queue-type": "classic"}}, {"x-queue-type": ("classic", "quorum")}),
        ("mail", {"arguments": {}}, {"x-queue-type": ("classic", "quorum")}),
        ("mail", {"arguments": {}, "durable": False}, {"durable": ("false", "true")}),
        (
            "mail.retry.1.1s",
            {"arguments": {**TOPOLOGY.queues[1].arguments, "x-message-ttl": 7}},
            {"x-message-ttl": ("7", "1000")},
        ),
        ("mail", {"arguments": {**MAIN, "x-max-length": 5}}, {"x-max-length": ("5", "none")}),
        (
            "mail",
            {"arguments": {**MAIN, "x-delivery-limit": 9, "x-max-length": 5,
                           "x-dead-letter-exchange": "other"}},
            {"x-delivery-limit": ("9", "5"), "x-max-length": ("5", "none"),
             "x-dead-letter-exchange": ("other", "parking-lot")},
        ),
        (
            "mail",
            {"arguments": {"x-queue-type": "quorum"}},
            {name: ("none", str(value)) for name, value in MAIN.items() if name not in
             ("x-queue-type", "x-consumer-disconnected-timeout")},
        ),
    ],
    ids=["classic", "no type", "not durable", "ttl", "extra", "several", "none of ours"],
)  # fmt: skip
async def test_every_difference_is_told_and_nothing_is_created(
    name: str,
    definition: dict[str, Any],
    told: dict[str, tuple[str, str]],
    connection: Connection,
    broker: Broker,
    vhost: str,
) -> None:
    await put(broker, vhost, "queues", name, **definition)
    found = [one for one in await check(connection, TOPOLOGY) if not one.is_missing]
    differences = {one.what: (one.found, one.wanted) for one in found}
    differences.pop("x-consumer-disconnected-timeout", None)  # compared by 4.3 only
    if "x-queue-type" in told:  # of a classic queue, what it has not at all is told as well
        differences = {what: one for what, one in differences.items() if one[0] != "none"}
    assert differences == told
    with pytest.raises(TopologyError) as refused:
        await declare(connection, TOPOLOGY)
    lines = str(refused.value).splitlines()
    assert len(lines) == len(found)
    for line in lines:
        assert line.startswith(f"{name}: ")
        assert line.endswith(f"rabbit-tasks topology migrate {name}")
    assert there(broker, vhost) == [name]


async def test_an_exchange_of_another_type_is_a_difference(
    connection: Connection, broker: Broker, vhost: str
) -> None:
    await put(broker, vhost, "exchanges", "parking-lot", type="fanout")
    (one,) = [d for d in await check(connection, TOPOLOGY) if not d.is_missing]
    assert (one.name, one.what, one.found, one.wanted) == (
        "parking-lot",
        "type",
        "fanout",
        "direct",
    )
    assert f"/api/exchanges/{at(vhost, 'parking-lot')}" in one.remedy
    with pytest.raises(TopologyError, match="parking-lot: type is fanout, wanted direct"):
        await declare(connection, TOPOLOGY)
    assert there(broker, vhost) == ["parking-lot"]
    broker.delete(vhost, "exchanges", "parking-lot")  # the remedy's request
    await declare(connection, TOPOLOGY)


async def test_another_connections_exclusive_queue_is_a_difference(
    connection: Connection, settings: Settings, broker: Broker, vhost: str
) -> None:
    async with connected(settings, "owner") as owner:
        channel = await owner.open()
        await channel.queue_declare("mail", exclusive=True)
        assert "mail" not in await missing(connection, TOPOLOGY)
        with pytest.raises(TopologyError, match="mail: exclusive is true, of another connection"):
            await declare(connection, TOPOLOGY)
        assert there(broker, vhost) == ["mail"]


# --- permissions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configure", "write", "read"),
    [
        ("^$", ".*", ".*"),
        ("^(parking-lot|mail|mail\\.retry.*)$", ".*", ".*"),
        ("^mail.*", ".*", ".*"),
        (".*", "^(mail|mail\\.retry.*|amq\\.default|parking-lot)$", ".*"),
        (".*", "^(mail.*|amq\\.default)$", ".*"),
        (".*", "^(mail.*|parking-lot)$", ".*"),
        (".*", ".*", "^mail.*"),
        (".*", ".*", "^(parking-lot|mail\\.retry.*)$"),
    ],
    ids=["no configure", "not the parking queue", "not the exchange", "not binding the queue",
         "not the dead letters' exchange", "not the default exchange", "not binding the exchange",
         "not reading"],
)  # fmt: skip
async def test_a_missing_permission_is_named_and_nothing_is_created(
    configure: str, write: str, read: str, user: str, broker: Broker, vhost: str
) -> None:
    broker.allow(vhost, user, configure=configure, write=write, read=read)
    async with connected(Settings(url=broker.url(vhost, user, "p")), "declare") as mine:
        with pytest.raises(TopologyError) as refused:
            await declare(mine, TOPOLOGY)
    (line,) = str(refused.value).splitlines()
    assert "ACCESS_REFUSED" in line
    assert line.endswith(
        f"(RABBIT_TASKS_USER); allow it: rabbitmqctl set_permissions -p {vhost} '{user}' "
        "'.*' '.*' '.*'; or what the app needs and no more: rabbit-tasks topology permissions --user "
        f"'{user}'"
    )
    assert there(broker, vhost) == []
    broker.allow(vhost, user)  # the remedy
    async with connected(Settings(url=broker.url(vhost, user, "p")), "declare") as mine:
        assert await declare(mine, TOPOLOGY) == NAMES


async def test_a_worker_needs_no_configure_permission(
    user: str, broker: Broker, vhost: str, connection: Connection
) -> None:
    await declare(connection, TOPOLOGY)
    broker.allow(vhost, user, configure="^$")
    worker = Worker(app, Settings(url=broker.url(vhost, user, "p"), grace=1))
    task = asyncio.create_task(worker.run())

    async def consuming() -> bool:
        assert not task.done(), task.exception()
        return await consumers(connection, "mail") == 1

    await eventually(consuming)
    worker.stop()
    await task


# --- the lock file ------------------------------------------------------------------------------


async def test_exported_definitions_imported_by_the_broker_are_what_declare_makes(
    connection: Connection, broker: Broker, vhost: str, publisher: Publisher
) -> None:
    broker.api("POST", f"/definitions/{at(vhost)}", json.loads(TOPOLOGY.definitions()))
    assert await check(connection, TOPOLOGY) == []
    assert await declare(connection, TOPOLOGY) == []
    assert there(broker, vhost) == NAMES
    bindings = broker.api("GET", f"/exchanges/{at(vhost, 'parking-lot')}/bindings/source")
    assert [(b["destination"], b["routing_key"]) for b in bindings] == [("mail.parked", "mail")]


async def test_a_connection_lost_while_declaring_is_one_line(
    broker: Broker, vhost: str, user: str
) -> None:
    mine = await connect(Settings(url=broker.url(vhost, user, PASSWORD)), "declare")
    await eventually(lambda: broker.close_connections(user))
    await eventually(lambda: mine.is_lost)
    with pytest.raises(ConnectError, match="connection lost") as lost:
        await declare(mine, TOPOLOGY)
    assert len(str(lost.value).splitlines()) == 1
    await mine.end()
