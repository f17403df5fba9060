"""Dead letter queues that are not ours: looked at, emptied, and never taken for a main queue."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import aiormq.exceptions as amqp
import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, Settings, parking
from rabbit_tasks.broker import Connection, connected
from rabbit_tasks.errors import ConfigurationError, ParkingError
from rabbit_tasks.parking import ParkingQueue, foreign
from rabbit_tasks.parking.look import lock_of
from rabbit_tasks.properties import Properties
from tests.support.brokers import Broker
from tests.support.queues import depth

Declared = Callable[[App], Awaitable[None]]
Arguments = dict[str, Any]

QUORUM: Arguments = {"x-queue-type": "quorum"}
NAMES = [str(i) for i in range(30)]


class Work(Consumer[dict[str, Any]]):
    queue = "work"

    async def handle(self, body: dict[str, Any], message: Message) -> None: ...


app = App("foreign", [Work()])


async def make(connection: Connection, queue: str, arguments: Arguments) -> ParkingQueue:
    channel = await connection.open()
    await channel.queue_declare(queue, durable=True, arguments=arguments)
    await channel.close()
    return ParkingQueue.foreign(queue)


async def put(publisher: Publisher, queue: str, names: list[str], **properties: Any) -> None:
    for name in names:
        given = Properties.of({"h": name}, message_id=name, delivery_mode=2, **properties)
        await publisher.send("", queue, name.encode(), given)


async def bodies(connection: Connection, queue: ParkingQueue) -> list[str]:
    return [message.body.decode() async for message in parking.browse(connection, queue)]


def counts(connection: Connection) -> bool:
    """Whether a quorum queue of this broker counts what comes back, however it does."""
    return not connection.server_version.startswith("4.3")


# --- looking ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "looks"),
    [
        (QUORUM, 23),
        pytest.param(QUORUM, 90, marks=pytest.mark.heavy),
        ({**QUORUM, "x-delivery-limit": 3}, 6),
        ({**QUORUM, "x-delivery-limit": 1}, 4),
        ({**QUORUM, "x-single-active-consumer": True}, 3),
        ({"x-queue-type": "classic"}, 3),
        ({"x-queue-type": "classic", "x-max-priority": 5}, 3),
        ({**QUORUM, "x-max-length": 1000, "x-message-ttl": 86_400_000}, 3),
    ],
)
async def test_a_look_loses_and_reorders_nothing_however_few_looks_the_queue_allows(
    connection: Connection, publisher: Publisher, arguments: Arguments, looks: int
) -> None:
    queue = await make(connection, "dead.letters", arguments)
    await put(publisher, queue.name, NAMES)
    for number in range(looks):
        assert await bodies(connection, queue) == NAMES, number
        assert await depth(connection, queue.name) == len(NAMES), number


async def test_copies_for_the_last_time_are_the_same_messages(
    connection: Connection, publisher: Publisher
) -> None:
    queue = await make(connection, "dead.letters", {**QUORUM, "x-delivery-limit": 1})
    await put(publisher, queue.name, NAMES, correlation_id="c", content_type="text/plain")
    lines: list[bytes] = []

    async def write(line: bytes) -> None:
        lines.append(line)

    for _ in range(4):
        await parking.export_to(connection, queue, lambda _: True, write)
    assert lines[:30] == lines[30:60] == lines[60:90] == lines[90:]


async def test_a_look_that_ends_early_for_the_last_time_loses_and_reorders_nothing(
    connection: Connection, publisher: Publisher
) -> None:
    queue = await make(connection, "dead.letters", {**QUORUM, "x-delivery-limit": 2})
    await put(publisher, queue.name, NAMES)
    for number in range(6):
        async with aclosing(parking.browse(connection, queue)) as messages:  # type: ignore[type-var]
            async for message in messages:
                if message.position == 1 + number:
                    break
        assert await depth(connection, queue.name) == len(NAMES), number
    assert await bodies(connection, queue) == NAMES


async def test_what_is_discarded_for_the_last_time_does_not_come_back_as_a_copy(
    connection: Connection, publisher: Publisher
) -> None:
    queue = await make(connection, "dead.letters", {**QUORUM, "x-delivery-limit": 2})
    await put(publisher, queue.name, NAMES)
    left = NAMES
    for number in range(4):
        gone = {str(number), str(10 + number)}
        assert (await parking.discard(connection, queue, lambda m: m.id in gone)).chosen == 2  # noqa: B023
        left = [name for name in left if name not in gone]
        assert await bodies(connection, queue) == left


async def test_looks_are_counted_aloud_before_they_are_used_up(
    connection: Connection, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make(connection, "dead.letters", QUORUM)
    await put(publisher, queue.name, NAMES[:3])
    said = []
    for _ in range(21):
        await bodies(connection, queue)
        said.append("; ".join(record.getMessage() for record in caplog.records))
        caplog.clear()
    if connection.server_version.startswith("4.0"):
        assert not any(said[:15])
        assert all("takes a message back 20 times" in one for one in said[15:])
        assert "has done so 20 times, so 3 were published to its end" in said[20]
        assert "delivery-limit" in said[20]
    else:
        assert not any(said)


@pytest.mark.parametrize("rights", [("", "", ".*"), (".*", "^$", ".*"), ("", ".*", ".*")])
async def test_a_user_with_few_rights_looks_without_a_loss_or_is_told_before_anything_is_taken(
    broker: Broker, vhost: str, connection: Connection, publisher: Publisher,
    rights: tuple[str, str, str],
) -> None:  # fmt: skip
    queue = await make(connection, "dead.letters", QUORUM)
    await put(publisher, queue.name, NAMES)
    user = f"few-{uuid.uuid4().hex[:8]}"
    broker.create_user(user, "secret")
    try:
        broker.allow(vhost, user, *rights)
        settings = Settings(url=broker.url(vhost, user, "secret"), heartbeat=10)
        async with connected(settings, "few") as theirs:
            may_not = rights[1] != ".*" and connection.server_version.startswith("4.0")
            for _ in range(3):
                if may_not:
                    with pytest.raises(ParkingError, match="must be published to it again"):
                        await bodies(theirs, queue)
                else:
                    assert await bodies(theirs, queue) == NAMES
    finally:
        broker.delete_user(user)
    assert await bodies(connection, queue) == NAMES


@pytest.mark.parametrize(
    "error", [TimeoutError(), amqp.ChannelInvalidStateError("gone"), amqp.DuplicateConsumerTag("a")]
)
async def test_what_goes_wrong_while_it_is_asked_how_to_look_is_told_in_one_line(
    error: Exception, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: Connection) -> None:
        raise error

    monkeypatch.setattr(foreign, "may_publish", fails)
    monkeypatch.setattr(foreign, "_judged", lambda *_: foreign.Terms(limit=1))
    await make(connection, "dead.letters", QUORUM)
    assert "dead.letters" in await refused(connection, "dead.letters")


# --- what is none -------------------------------------------------------------------------------


async def refused(connection: Connection, queue: str) -> str:
    with pytest.raises(ParkingError) as raised:
        await bodies(connection, ParkingQueue.foreign(queue))
    assert "\n" not in str(raised.value)
    return str(raised.value)


async def test_a_main_queue_is_not_taken_for_a_dead_letter_queue(
    declared: Declared, connection: Connection, publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await declared(app)
    await put(publisher, "work", ["live"])
    assert "work is a main queue, work.parked is beside it" in await refused(connection, "work")
    with pytest.raises(ParkingError, match="main queue"):
        await parking.discard(connection, ParkingQueue.foreign("work"), lambda _: True)
    waits = next(q.name for q in app.topology.queues if q.role == "retry")
    assert "is a retry queue: its messages go to work" in await refused(connection, waits)
    channel = await connection.open()
    await channel.queue_delete("work.parked")
    assert "its dead letters go to parking-lot" in await refused(connection, "work")
    assert await depth(connection, "work") == 1

    other = await make(connection, "busy", {"x-queue-type": "classic"})
    monkeypatch.setattr("rabbit_tasks.parking.look.PATIENCE", 0.2)
    await channel.basic_consume(other.name, lambda _: None)  # type: ignore[arg-type,return-value]
    assert "other consumer(s) hold its messages" in await refused(connection, other.name)


async def test_what_cannot_be_looked_at_says_so_in_one_line(
    connection: Connection, settings: Settings
) -> None:
    assert "there is no queue none; which there are: " in await refused(connection, "none")
    await make(connection, "a stream", {"x-queue-type": "stream"})
    assert "a stream is a stream" in await refused(connection, "a stream")
    async with connected(settings, "other") as other:
        channel = await other.open()
        await channel.queue_declare("theirs", exclusive=True)
        assert "only the connection that declared it" in await refused(connection, "theirs")
    if counts(connection):
        await make(connection, "no way back", {**QUORUM, "x-delivery-limit": 0})
        assert "takes nothing back" in await refused(connection, "no way back")
    if connection.server_version.startswith("3.10"):
        await make(connection, "none at all", {**QUORUM, "x-delivery-limit": -1})
        assert "takes nothing back" in await refused(connection, "none at all")


async def test_an_import_into_a_foreign_queue_goes_into_no_main_queue(
    declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(app)
    queue = await make(connection, "dead.letters", QUORUM)
    messages = [(1, parking.Archived(b"a", Properties.of(message_id="a")))]
    await parking.import_from(publisher, queue, messages, parking.Imported())
    assert await bodies(connection, queue) == ["a"]
    with pytest.raises(ParkingError, match="work is a main queue"):
        await parking.import_from(
            publisher, ParkingQueue.foreign("work"), messages, parking.Imported()
        )
    assert await depth(connection, "work") == 0


# --- names --------------------------------------------------------------------------------------


async def test_names_as_long_as_amqp_has_them_are_told_apart(
    connection: Connection, publisher: Publisher
) -> None:
    names = [
        "a" + "x" * 254,
        "b" + "x" * 254,
        "a" + "x" * 253 + "y",
        "a b/c.d: +e@#,_-" + "x" * 239,
    ]
    assert len({lock_of(name) for name in names}) == 4
    assert max(len(lock_of(name)) for name in names) <= 255
    for name in names:
        assert len(name) == 255
        queue = await make(connection, name, QUORUM)
        await put(publisher, name, ["a", "b"])
        for _ in range(2):
            assert await bodies(connection, queue) == ["a", "b"]
    longest = "w" * 248
    await make(connection, f"{longest}.parked", {**QUORUM, "x-delivery-limit": 2_147_483_647})
    await put(publisher, f"{longest}.parked", ["a"])
    assert await bodies(connection, ParkingQueue.of(longest)) == ["a"]


@pytest.mark.parametrize("name", ["grün", "it's", 'a "b"', "a\nb", "\x1b[2J", "a<b", "", "x" * 256])
def test_names_that_the_client_library_does_not_take_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        ParkingQueue.foreign(name)
    assert str(raised.value).isprintable()


def test_how_a_parking_queue_is_called() -> None:
    assert (
        ParkingQueue.of("a b") == ParkingQueue.of("a b.parked") == ParkingQueue("a b.parked", "a b")
    )
    assert ParkingQueue.of("a b").to_type("list") == "rabbit-tasks parked list 'a b'"
    dead = ParkingQueue.foreign("celery.dead")
    assert (dead.name, dead.main, dead.is_foreign) == ("celery.dead", None, True)
    assert dead.to_type("list") == "rabbit-tasks parked list --foreign celery.dead"
    assert (
        ParkingQueue.of("--all").to_type("list", "--id", "7")
        == "rabbit-tasks parked list --id 7 -- --all"
    )
    assert ParkingQueue.foreign("theirs.parked").name == "theirs.parked"
