"""Out of a parking queue and back: the same messages, in the same order, byte for byte."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, Settings, parking
from rabbit_tasks.broker import Connection
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.parking import Imported, ParkedMessage, ParkingQueue, archive
from rabbit_tasks.parking.look import Taken, taking
from rabbit_tasks.parking.parked import kept
from rabbit_tasks.properties import Properties
from tests.conftest import eventually
from tests.support import wire
from tests.support.queues import depth

Declared = Callable[[App], Awaitable[None]]
PARKED = "a lot.parked"


class Kept(Consumer[dict[str, Any]]):
    queue = "a lot"
    delivery_limit = 1

    async def handle(self, body: dict[str, Any], message: Message) -> None: ...


app = App("archive", [Kept()])


def everything(_: ParkedMessage) -> bool:
    return True


async def exported(connection: Connection, queue: str | ParkingQueue = "a lot") -> bytes:
    lines: list[bytes] = []

    async def write(line: bytes) -> None:
        lines.append(line)

    await parking.export_to(connection, queue, everything, write)
    return b"".join(lines)


async def imported(
    publisher: Publisher, lines: bytes, queue: str | ParkingQueue = "a lot"
) -> Imported:
    done = Imported()
    await parking.import_from(publisher, queue, archive.read(io.BytesIO(lines)), done)
    return done


async def there(connection: Connection, queue: str = "a lot") -> list[tuple[bytes, bytes]]:
    """Every byte of what is parked, but the broker's counts of looks."""
    return [
        (message.body, kept(message.properties).encode())
        async for message in parking.browse(connection, queue)
    ]


async def fill(connection: Connection, publisher: Publisher) -> None:
    """One of everything."""
    user = connection.address.user if connection.address else ""
    tagged = [
        ("t", b"t\1"), ("b", b"b\xff"), ("B", b"B\xff"), ("s", b"s\xff\xfe"), ("u", b"u\xff\xfe"),
        ("I", b"I\xff\xff\xff\xfe"), ("i", b"i\xff\xff\xff\xfe"), ("l", b"l" + b"\xff" * 8),
        ("f", b"f\x40\x49\x0f\xdb"), ("d", b"d\x40\x09\x21\xfb\x54\x44\x2d\x18"),
        ("D", b"D\2\0\0\0\x6e"), ("T", b"T" + b"\0" * 4 + b"\xff" * 4), ("V", b"V"),
        ("S", wire.text(b"not \xff utf-8")), ("x", wire.long(b"x", b"\0\xff")),
        ("F", b"F" + wire.table(("deep", b"F" + wire.table(("n", b"I\0\0\0\1"))))),
        ("A", wire.long(b"A", b"I\0\0\0\1" + wire.text("two"))),
        ('a "name"\n\x1b[2J', wire.text("\x1b[2J")), ("", b"V"),
    ]  # fmt: skip
    texts = {
        name: wire.short(f"{name} '\"\n")
        for name in ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id",
                     "type", "app_id", "cluster_id")
    }  # fmt: skip
    numbers = {"delivery_mode": b"\1", "priority": b"\7", "timestamp": b"\0\0\0\0\x65\0\0\0"}
    ours = {
        "x-origin-queue": "a lot", "x-retry-count": 2, "x-error-type": "app.Broken",
        "x-attempts": [{"attempt": 1, "seconds": 0.1, "when": "2026-01-01T00:00:00+00:00"}],
        "when": datetime(2026, 1, 2, tzinfo=UTC), "price": Decimal("1.10"),
    }  # fmt: skip
    each = [
        (b"all types", wire.properties(*tagged, **texts, **numbers)),
        (b'{"a": 1}', Properties.of(ours, message_id="ours", delivery_mode=2)),
        (b"", Properties.of()),
        (b"the same", Properties.of(message_id="twice")),
        (b"the same", Properties.of(message_id="twice")),
        (b"another", Properties.of(message_id="twice")),
        (b"\xff\xfe\0", Properties.of(message_id="no text")),
        ("grün \u2028 \U0001f40d \x00 \x1b[2J\r\n".encode(), Properties.of(message_id="text")),
        (b"l" * 1_200_000, Properties.of(message_id="large")),
        (b"by us", Properties.of(message_id="user", user_id=user)),
        (b"for a day", Properties.of(message_id="expires", expiration="86400000")),
        (b"headers as large as a frame", Properties.of({"h": "x" * 129_000}, message_id="frame")),
        (b"forged", Properties.of({"x-origin-queue": "a lot.parked", "x-death": "no list"})),
        *((str(i).encode(), Properties.of(message_id=str(i))) for i in range(300)),
        (b"last", Properties.of()),
    ]  # fmt: skip
    for body, properties in each:
        await publisher.send("", PARKED, body, properties)


async def reject(connection: Connection, publisher: Publisher) -> None:
    """Have the broker park one: it gets the broker's death record."""
    before = await depth(connection, PARKED)
    await publisher.send("", "a lot", b"moved by the broker", Properties.of({"h": 1.5}))
    channel = await connection.open()
    message = await channel.basic_get("a lot")
    await channel.basic_reject(message.delivery_tag or 0, requeue=False)
    await channel.close()

    async def arrived() -> bool:
        return await depth(connection, PARKED) > before

    await eventually(arrived)


async def test_export_discard_import_gives_the_same_messages_back(
    declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(app)
    await reject(connection, publisher)
    await fill(connection, publisher)
    await there(connection)  # 3.10 sorts a message's headers when it first counts a look at it
    before = await there(connection)
    assert len(before) == 315
    lines = await exported(connection)
    assert await there(connection) == before  # and stay as they are
    assert (await parking.discard(connection, "a lot", everything)).chosen == len(before)
    assert await depth(connection, PARKED) == 0
    done = await imported(publisher, lines)
    assert (done.count, done.through, done.altered) == (315, 315, 0)
    assert await there(connection) == before
    # The counts of looks are as new, and what people and replay go by is as it was.
    assert await exported(connection) == lines
    [moved] = [m async for m in parking.browse(connection, "a lot") if m.body.startswith(b"moved")]
    assert (moved.reason, moved.origin) == ("rejected by its consumer", "a lot")
    # Home again, it dies once more and is parked once more: no broker takes its past for a cycle.
    await parking.replay(connection, publisher, "a lot", lambda m: m.id == moved.id)
    await parking.discard(connection, "a lot", everything)
    channel = await connection.open()
    message = await channel.basic_get("a lot")
    await channel.basic_reject(message.delivery_tag or 0, requeue=False)
    await channel.close()

    async def parked_again() -> bool:
        return [body for body, _ in await there(connection)] == [b"moved by the broker"]

    await eventually(parked_again)


async def test_what_would_be_delivered_elsewhere_or_refused_comes_back_without_that_alone(
    declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(app)
    copied = Properties.of({"CC": ["a lot"], "BCC": ["a lot"], "h": 1}, message_id="copied")
    theirs = Properties.of({"h": 2}, message_id="theirs", user_id="somebody else")
    lines = b"".join(
        archive.line_of(PARKED, ParkedMessage(1, b"", properties))
        for properties in (copied, theirs)
    )
    done = await imported(publisher, lines)
    assert (done.count, done.altered) == (2, 2)
    assert await depth(connection, "a lot") == 0
    left = [
        Properties.of({"h": 1}, message_id="copied"),
        Properties.of({"h": 2}, message_id="theirs"),
    ]
    assert [raw for _, raw in await there(connection)] == [one.encode() for one in left]


async def test_an_import_that_fails_in_the_middle_says_what_went_and_goes_on_behind_it(
    declared: Declared, settings: Settings, connection: Connection
) -> None:
    await declared(app)
    messages = [
        ParkedMessage(i, str(i).encode(), Properties.of(message_id=str(i))) for i in range(1, 501)
    ]
    messages[299] = ParkedMessage(300, b"", Properties.of({"h": "x" * 131_072}, message_id="300"))
    lines = b"".join(archive.line_of(PARKED, message) for message in messages)
    done = Imported()
    async with Publisher.open(settings) as publisher:
        with pytest.raises(ParkingError, match=r"^line 300: .*more than the 131064 of a frame"):
            await parking.import_from(publisher, "a lot", archive.read(io.BytesIO(lines)), done)
        # Those that were on their way with it, and none beyond.
        went = [int(body) for body, _ in await there(connection)]
        assert went == [*range(1, 300), *range(301, went[-1] + 1)]
        assert (done.count, done.through, done.beyond) == (len(went), 299, went[299:])
        assert not done.maybe
        assert went[-1] < 500
        rest = b"".join(lines.splitlines(keepends=True)[went[-1] :])
        await parking.import_from(publisher, "a lot", archive.read(io.BytesIO(rest)), done)
    assert [int(b) for b, _ in await there(connection)] == [n for n in range(1, 501) if n != 300]


async def test_an_import_creates_no_queue(publisher: Publisher, connection: Connection) -> None:
    lines = archive.line_of("none.parked", ParkedMessage(1, b"", Properties.of()))
    done = Imported()
    with pytest.raises(ParkingError, match=r"no queue none\.parked; .*topology declare"):
        await parking.import_from(publisher, "none", archive.read(io.BytesIO(lines)), done)
    assert done.count == 0
    with pytest.raises(ParkingError, match=r"no queue none\.parked"):
        await there(connection, "none")


async def test_what_is_parked_between_the_question_and_the_answer_is_not_discarded(
    declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(app)
    for name in ("a", "b", "c"):
        unsorted = Properties.of({"z": 1, "a": 2}, message_id=name)
        await publisher.send("", PARKED, name.encode(), unsorted)
    asked = parking.Asked()
    await parking.discard(connection, "a lot", everything, told=asked.add, dry_run=True)
    # Gone meanwhile, come meanwhile, and one of the same id that says something else.
    await parking.discard(connection, "a lot", lambda m: m.id == "a")
    for name, body in (("d", b"d"), ("c", b"other"), ("b", b"b")):
        await publisher.send("", PARKED, body, Properties.of(message_id=name))
    moved = await parking.discard(connection, "a lot", asked)
    assert (asked.count, moved.chosen) == (3, 2)
    assert [body for body, _ in await there(connection)] == [b"d", b"other", b"b"]


async def test_a_discard_ended_in_an_ack_has_told_of_all_that_are_gone(
    declared: Declared, connection: Connection, publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await declared(app)
    for i in range(250):
        await publisher.send("", PARKED, b"", Properties.of(message_id=str(i)))
    told: list[str] = []
    acked = asyncio.Event()
    really = Taken.ack_all

    async def ack_all(self: Taken, tags: Sequence[int]) -> None:
        await really(self, tags)
        if told:  # it is the second write
            acked.set()
            await asyncio.sleep(0.1)

    monkeypatch.setattr(Taken, "ack_all", ack_all)
    discarding = asyncio.create_task(
        parking.discard(connection, "a lot", everything, told=lambda m: told.append(m.id))
    )
    await acked.wait()
    discarding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await discarding
    left = [m.id async for m in parking.browse(connection, "a lot")]
    assert told + left == [str(i) for i in range(250)]
    assert len(told) == 200


async def test_a_message_without_an_id_keeps_the_one_it_is_called_by_when_it_is_looked_at(
    declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(app)
    unsorted = Properties.of({"z": 1, "a": 2, "m": {"z": 1, "a": 2}})
    await publisher.send("", PARKED, b"nameless", unsorted)
    names = {m.id for _ in range(3) async for m in parking.browse(connection, "a lot")}
    assert len(names) == 1


async def test_what_was_let_go_is_gone_though_its_queue_is_slow_to_hear_of_it(
    declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    await declared(app)
    for _ in range(25):
        await publisher.publish_many(PARKED, (b"" for _ in range(100)))
        async with taking(connection, "a lot") as taken:
            await taken.ack_all([delivery async for delivery, _ in taken])
        # (Never mind how long ago they were sent: what the channel had kept for its queue is lost.)
        assert await depth(connection, PARKED) == 0
