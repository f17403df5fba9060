"""The doctor on a real broker: what is wrong there is found, and what is asked changes nothing."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aio_pika
import pytest
import trustme

from rabbit_tasks import App, Publisher, Settings
from rabbit_tasks import broker as brokers
from rabbit_tasks import declare as declaring
from rabbit_tasks.broker import Connection
from rabbit_tasks.doctor import Row, diagnose, examination, examine, has_fault
from rabbit_tasks.properties import Properties
from rabbit_tasks.topology import waiting_queue
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.inprocess import Running
from tests.support.post import Letter, Letters
from tests.support.proxy import before
from tests.support.queues import take, take_all
from tests.support.tls import tls_proxy

app = App("post", [Letters()])
Declared = Callable[[App], Awaitable[None]]
Run = Callable[[App], Awaitable[Running]]


@pytest.fixture
def seeing(settings: Settings, broker: Broker) -> Settings:
    """With the management API, which tells more."""
    return settings.changed(management_url=broker.management_url)


async def nothing(_: object) -> None: ...


async def rows_of(settings: Settings, app: App | None = app) -> list[Row]:
    return diagnose(await examine(settings, app))


def wrong(rows: list[Row]) -> list[tuple[str, str, str]]:
    """What is neither well nor unseen, and what the broker of the test may have from others."""
    others = ("deprecated features", "alarms", "feature flags")
    return [
        (row.state, row.about, row.says)
        for row in rows
        if row.state in ("warning", "fault") and row.about not in others
    ]


async def test_of_an_app_that_is_declared_nothing_is_wrong_and_all_is_looked_at(
    seeing: Settings, declared: Declared, broker: Broker
) -> None:
    await declared(app)
    rows = await rows_of(seeing)
    assert wrong(rows) == []
    assert [row for row in rows if row.state == "unseen"] == []
    assert [row.says for row in rows if row.about == "version"] == [f"RabbitMQ {broker.version}"]
    (heartbeat,) = [row for row in rows if row.about == "heartbeat"]
    assert "10s (the broker's: 60s)" in heartbeat.says
    (clock,) = [row for row in rows if row.about == "clock"]
    assert "agree" in clock.says
    seen = {row.about for row in rows}
    assert {"cluster", "alarms", "feature flags", "permissions", "topology", "parked"} <= seen
    assert ("deprecated features" in seen) == (broker.version >= "4")


async def test_without_the_management_api_it_says_what_it_could_not_see_and_that_is_no_fault(
    settings: Settings, declared: Declared
) -> None:
    await declared(app)
    rows = await rows_of(settings)
    assert wrong(rows) == []
    (row,) = [row for row in rows if row.state == "unseen"]
    assert row.about == "not looked at"
    assert row.says.startswith("cluster, ")
    assert row.says.endswith(": RABBIT_TASKS_MANAGEMENT_URL is not set")
    assert not has_fault(rows)


async def test_of_many_queues_the_questions_share_channels(
    seeing: Settings, declared: Declared, monkeypatch: pytest.MonkeyPatch
) -> None:
    await declared(app)
    opened = []
    real = Connection.open

    async def counted(self: Connection, *args: Any, **kwargs: Any) -> Any:
        opened.append(self)
        return await real(self, *args, **kwargs)

    monkeypatch.setattr(Connection, "open", counted)
    assert wrong(await rows_of(seeing)) == []
    few = len(opened)
    opened.clear()
    many = App("post", [type(f"Letters{n}", (Letters,), {"queue": f"letters{n}"})() for n in "123"])
    await declared(many)
    opened.clear()
    assert not has_fault(await rows_of(seeing, many))
    assert (
        few <= len(opened) <= few + 12
    )  # (a refusal ends one: what a worker may not, is asked so)


@pytest.mark.parametrize(
    ("path", "says"),
    [("http://guest:wr0ng@{host}", "said 401"), ("http://127.0.0.1:1", "gave no answer")],
)
async def test_a_management_api_that_does_not_answer_is_no_fault_either_and_is_told_once(
    path: str, says: str, settings: Settings, declared: Declared, broker: Broker
) -> None:
    await declared(app)
    url = path.format(host=broker.management_url.partition("://")[2])
    rows = await rows_of(settings.changed(management_url=url))
    assert wrong(rows) == []
    (row,) = [row for row in rows if row.state == "unseen"]
    assert says in row.says
    assert "wr0ng" not in str(rows)


async def test_without_an_app_the_broker_is_looked_at_alone(seeing: Settings) -> None:
    rows = await rows_of(seeing, None)
    assert wrong(rows) == []
    assert not {"topology", "permissions", "parked"} & {row.about for row in rows}
    (row,) = [row for row in rows if row.state == "unseen"]
    assert row.says == "the app's queues: no app is named"


async def test_what_is_not_declared_is_one_fault(seeing: Settings) -> None:
    rows = await rows_of(seeing)
    ((state, about, says),) = wrong(rows)
    assert (state, about) == ("fault", "topology")
    assert says.startswith("8 queues and exchanges of app post are missing: parking-lot, letters")
    assert [row.remedy for row in rows if row.state == "fault"] == ["rabbit-tasks topology declare"]


async def test_a_queue_of_the_wrong_type_is_a_fault_that_migrate_mends(
    settings: Settings, connection: Connection
) -> None:
    channel = await connection.open()
    await channel.queue_declare("letters", durable=True)
    rows = await rows_of(settings)
    (row,) = [row for row in rows if row.about == "queue type"]
    assert row.state == "fault"
    assert row.says == "letters: x-queue-type is classic, wanted quorum"
    assert row.remedy == "rabbit-tasks topology migrate letters"


async def test_parked_messages_and_those_that_nobody_takes_are_told_and_left_in_order(
    seeing: Settings, declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(app)
    ids = [await publisher.publish(Letters, Letter(to="anna")) for _ in range(3)]
    then = datetime.now(UTC) - timedelta(hours=3)
    for name in "abcd":
        told = {"x-parked-at": then.isoformat()}
        parked = Properties.of(told, message_id=name, delivery_mode=2)
        await publisher.send("parking-lot", "letters", b"x", parked)
    for _ in range(3):
        rows = await rows_of(seeing)
        assert wrong(rows) == [
            ("warning", "consumers", "letters: 3 messages wait and nobody consumes"),
            ("warning", "parked", "letters: 4 messages wait for a person, the first for 3h"),
        ]
        assert not has_fault(rows)
    waiting = await take_all(connection, "letters")
    assert [one.properties.text("message_id") for one in waiting] == ids
    assert not any(one.properties.header("x-delivery-count") for one in waiting)
    aside = await take_all(connection, "letters.parked")
    assert [one.properties.text("message_id") for one in aside] == [*"abcd"]


async def test_workers_are_told_and_whoever_else_consumes_is_told_with_its_name(
    seeing: Settings, run: Run, connection: Connection, url: str, broker: Broker, vhost: str
) -> None:
    await run(app)
    channel = await connection.open()
    await channel.basic_consume("letters.retry.1.100ms", nothing)
    other = await aio_pika.connect(url, client_properties={"product": "pika"})
    async with other:
        there = await other.channel()
        queue = await there.get_queue("letters", ensure=False)
        await queue.consume(nothing)
        wanted = {"letters": 2, "letters.retry.1.100ms": 1}
        await eventually(lambda: known_consumers(broker, vhost) == wanted)
        rows = await rows_of(seeing)
    thief, stranger = wrong(rows)
    assert thief[:2] == ("fault", "consumers")
    assert thief[2].startswith("letters.retry.1.100ms: 1 consumer(s) take what waits")
    assert stranger[:2] == ("warning", "consumers")
    assert "letters: 1 consumer(s) that are not rabbit_tasks': pika, user guest" in stranger[2]
    (row,) = [row for row in rows if (row.state, row.about) == ("ok", "consumers")]
    assert row.says == "2 on letters"


def known_consumers(broker: Broker, vhost: str) -> Counter[str]:
    """Per queue, those whose connection the management API knows: some seconds late."""
    rows = broker.api("GET", f"/consumers/{quote(vhost, safe='')}")
    return Counter(row["queue"]["name"] for row in rows if row["channel_details"])


# --- permissions --------------------------------------------------------------------------------


@pytest.fixture
def limited(broker: Broker, vhost: str, url: str) -> Iterator[Callable[..., Settings]]:
    """A user of its own with such permissions."""
    name = f"doctor-{uuid.uuid4().hex[:8]}"
    broker.create_user(name, "s3cret")

    def allowed(**permissions: str) -> Settings:
        broker.allow(vhost, name, **permissions)
        return Settings(url=broker.url(vhost, name, "s3cret"), heartbeat=10)

    yield allowed
    broker.delete_user(name)


@pytest.mark.parametrize(
    ("permissions", "lacking"),
    [
        ({"read": "^$"}, ["queue 'letters'"]),
        ({"write": "^parking-lot$"}, ["exchange 'amq.default'"]),
        ({"write": "^amq.default$"}, ["exchange 'parking-lot'"]),
        ({"read": "^$", "write": "^$"},
         ["queue 'letters'", "exchange 'amq.default'", "exchange 'parking-lot'"]),
    ],
)  # fmt: skip
async def test_a_permission_that_a_worker_lacks_is_a_fault_with_the_command_that_gives_it(
    permissions: dict[str, str],
    lacking: list[str],
    declared: Declared,
    connection: Connection,
    publisher: Publisher,
    limited: Callable[..., Settings],
    vhost: str,
) -> None:
    await declared(app)
    sent = await publisher.publish(Letters, Letter(to="anna"))
    settings = limited(**permissions)
    rows = await rows_of(settings)
    (row,) = [row for row in rows if row.about == "permissions"]
    assert row.state == "fault"
    assert row.says.startswith("work: our user may not: ")
    for what in lacking:
        assert f"access to {what} in vhost '{vhost}' refused" in row.says
    assert row.says.count(" refused ") == len(lacking)
    user = settings.addresses()[0].user
    assert f"rabbitmqctl set_permissions -p {vhost} {user} '.*' '.*' '.*'" in row.remedy
    assert "s3cret" not in str(rows)
    found = await take(connection, "letters")
    assert found is not None
    assert found.properties.text("message_id") == sent
    assert not found.properties.header("x-delivery-count")


async def test_a_user_that_may_read_and_write_alone_runs_workers_and_that_is_no_fault(
    declared: Declared, limited: Callable[..., Settings]
) -> None:
    await declared(app)
    rows = await rows_of(limited(configure="^$"))
    assert wrong(rows) == []
    (row,) = [row for row in rows if row.about == "declare"]
    assert row.state == "unseen"
    assert row.says.endswith("a worker need not")


# --- policies -----------------------------------------------------------------------------------


async def test_an_operators_policy_that_loses_messages_is_a_fault(
    seeing: Settings, declared: Declared, broker: Broker, vhost: str
) -> None:
    await declared(app)
    broker.api(
        "PUT", f"/operator-policies/{quote(vhost, safe='')}/short",
        {"pattern": "^letters", "apply-to": "queues", "definition": {"message-ttl": 60_000}},
    )  # fmt: skip
    await eventually(lambda: broker.api("GET", f"/operator-policies/{quote(vhost, safe='')}"))
    rows = await rows_of(seeing)
    found = [row for row in rows if row.about == "policies"]
    # (On the queue that replays go through it loses nothing: there may be two of a message.)
    assert {(".replaying" in row.says, row.state) for row in found} == {
        (False, "fault"), (True, "warning"),
    }  # fmt: skip
    assert any("parked messages are lost after 1m" in row.says for row in found)
    for row in found:
        assert f"rabbitmqctl clear_operator_policy -p {vhost} short" in row.remedy


async def test_a_queue_that_is_somebody_elses_own_is_told_and_no_failure(
    seeing: Settings, declared: Declared, connection: Connection
) -> None:
    """Its name is that of an older policy's; the broker refuses even a look at it."""
    await declared(app)
    channel = await connection.open()
    await channel.queue_declare("letters.retry.1.7s", exclusive=True)
    rows = await rows_of(seeing)
    assert wrong(rows) == []
    (row,) = [row for row in rows if row.state == "unseen"]
    assert row.says.startswith(
        "letters.retry.1.7s: an exclusive queue of another connection; which: "
    )


async def test_a_queue_of_an_older_policy_is_told(
    seeing: Settings, declared: Declared, connection: Connection
) -> None:
    await declared(app)
    channel = await connection.open()
    older = waiting_queue("letters.retry.1.7s")
    assert older is not None
    await channel.queue_declare(older.name, durable=True, arguments=older.arguments)
    # of that name too, but nothing that prune would touch
    await channel.queue_declare("letters.retry.1.8s", durable=True)
    ((state, about, says),) = wrong(await rows_of(seeing))
    assert (state, about) == ("warning", "stale")
    assert says.startswith("letters.retry.1.7s: of an older policy, and empty")


async def test_what_a_killed_replay_or_migration_left_is_told(
    settings: Settings, declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(app)
    channel = await connection.open()
    for name in ("letters.replaying", "letters.parked.migrating"):
        await channel.queue_declare(name, durable=True)
    await publisher.send("", "letters.replaying", b"", Properties.of(delivery_mode=2))
    found = wrong(await rows_of(settings))
    assert {(state, about) for state, about, _ in found} == {
        ("fault", "left behind"), ("warning", "left behind"),
    }  # fmt: skip
    assert {says.partition(": ")[0] for *_, says in found} == {"letters", "letters.parked"}


# --- the way there ------------------------------------------------------------------------------


async def test_a_broker_that_cannot_be_reached_is_one_fault_with_the_reason() -> None:
    rows = await rows_of(Settings(url="amqp://me:s3cret@127.0.0.1:1/"))
    (row,) = [row for row in rows if row.state == "fault"]
    assert row.about == "connection"
    assert "127.0.0.1:1 cannot be reached" in row.says
    assert "s3cret" not in str(rows)
    assert {row.about for row in rows} == {"clients", "connection"}


async def test_of_two_nodes_the_one_that_is_away_is_a_warning(url: str, declared: Declared) -> None:
    await declared(app)
    rows = await rows_of(Settings(url=f"amqp://guest:guest@127.0.0.1:1/,{url}", heartbeat=10))
    ((state, about, says),) = wrong(rows)
    assert (state, about) == ("warning", "connection")
    assert "127.0.0.1:1 cannot be reached" in says


async def test_a_broker_that_says_nothing_ends_within_the_time_to_connect(
    settings: Settings, broker: Broker, vhost: str
) -> None:
    async with before(broker.host, broker.port) as between:
        between.hold()
        since = time.monotonic()
        rows = await rows_of(at(broker, vhost, between.port).changed(connect_timeout=0.5))
        assert time.monotonic() - since < 5
        between.release()
    (row,) = [row for row in rows if row.state == "fault"]
    assert "did not answer within" in row.says


async def test_a_broker_that_falls_silent_amid_the_questions_is_asked_no_further(
    declared: Declared, broker: Broker, vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await declared(app)
    limit = 0.5
    for module in (brokers, declaring, examination):
        monkeypatch.setattr(module, "RPC_TIMEOUT", limit)
    async with before(broker.host, broker.port) as between:
        asked = examination._held  # noqa: SLF001

        async def held(*arguments: Any) -> Any:
            between.hold()
            return await asked(*arguments)

        monkeypatch.setattr(examination, "_held", held)
        since = time.monotonic()
        rows = await rows_of(at(broker, vhost, between.port))
        assert time.monotonic() - since < 10
        between.release()
    (row,) = [row for row in rows if row.state == "fault"]
    assert row.about == "connection"
    assert "asked no further" in row.says
    assert f"did not answer within {limit:g} s" in row.says
    assert {"version", "alarms"} <= {row.about for row in rows}


def at(broker: Broker, vhost: str, port: int) -> Settings:
    return Settings(url=broker.url(vhost).replace(f":{broker.port}/", f":{port}/"), heartbeat=10)


async def test_with_tls_it_reads_when_the_certificate_expires(
    broker: Broker, vhost: str, tmp_path: Path
) -> None:
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    async with tls_proxy(broker, authority) as port:
        url = at(broker, vhost, port).url.replace("amqp://", "amqps://")
        url = url.replace("127.0.0.1", "localhost")
        facts = await examine(Settings(url=url, tls_ca=ca))
    (listener,) = facts.listeners
    assert listener.failure is None
    assert listener.certificate_until is not None
    assert listener.certificate_until > facts.now
    (row,) = [row for row in diagnose(facts) if row.about == "TLS"]
    assert row.state == "ok"
    assert f"expires on {listener.certificate_until:%Y-%m-%d}" in row.says
