"""Headers and properties that nobody should send: none is lost, none is changed.

Each message fails, waits in a retry queue, fails again, is parked, replayed and done. What its
publisher wrote is compared in every byte with what a plain get of the same message brings, because
brokers normalise a little when a message is published: 3.10 to 4.3 write any true as 1 and the tag
L as l, and sort the headers; 4.x keeps one of several headers of one name.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, parking
from rabbit_tasks.broker import Connection
from rabbit_tasks.errors import Refused, Unconfirmed
from rabbit_tasks.message import OURS, is_brokers
from rabbit_tasks.properties import Properties
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.inprocess import Running
from tests.support.queues import depth, take
from tests.support.wire import entries, fields, long, nested, properties, short, table, text

Run = Callable[[App], Awaitable[Running]]
Declared = Callable[[App], Awaitable[None]]
Cases = dict[str, Properties]

VALUES = {
    "bool": b"t\1",
    "bool 2": b"t\2",
    "byte": b"b\x80",
    "unsigned byte": b"B\xff",
    "short": b"s\x80\0",
    "unsigned short": b"u\xff\xff",
    "int": b"I\x80\0\0\0",
    "unsigned int": b"i\xff\xff\xff\xff",
    "long": b"l\x80" + bytes(7),
    "unsigned long": b"L" + b"\xff" * 8,
    "10**12": b"l" + (10**12).to_bytes(8, "big"),
    "-1": b"I\xff\xff\xff\xff",
    "float": b"f" + struct.pack(">f", 1.1),
    "double": b"d" + struct.pack(">d", 3.14159265358979),
    "double -0.0": b"d" + struct.pack(">d", -0.0),
    "double, smallest": b"d" + struct.pack(">d", 5e-324),
    "decimal": b"D\2" + struct.pack(">i", 31415),
    "decimal, negative": b"D\2" + struct.pack(">i", -31415),
    "decimal, 255 places": b"D\xff" + struct.pack(">i", 2**31 - 1),
    "timestamp": b"T" + struct.pack(">Q", 1_700_000_000),
    "timestamp after 9999": b"T" + struct.pack(">Q", 253_402_300_800),
    "timestamp, largest": b"T" + b"\xff" * 8,
    "null": b"V",
    "bytes": long(b"x", b"\0\xff"),
    "text": text("grüß Gott"),
    "text of digits": text("2"),
    "text, empty": text(""),
    "text, not UTF-8": text(b"\xff\xfe\x80"),
    "text with controls": text("a\0b\r\n\x1b[31m"),
    "list": long(b"A", b"t\1" + text("x") + b"V" + long(b"A", b"I\0\0\0\1")),
    "list, empty": long(b"A", b""),
    "list of tables": long(b"A", (b"F" + table(("attempt", b"L" + b"\xff" * 8))) * 3),
    "table": b"F" + table((b"\xff\xfe", text(b"\xff")), ("a", b"V"), ("", b"t\0")),
    "table, empty": b"F" + table(),
    "table, 50 deep": nested(50, text("deep")),
    "table, 300 deep": nested(300, text("deep")),
}


def of_each_type(name: str | bytes) -> Cases:
    """One message for each type of value that a broker takes, in the header of this name."""
    return {f"{name!r}: {kind}": properties((name, value)) for kind, value in VALUES.items()}


DEATH = b"F" + table(
    ("count", b"l" + (10**12).to_bytes(8, "big")),
    ("reason", text("expired")),
    ("queue", text("hostile")),
    ("time", b"T" + struct.pack(">Q", 1)),
    ("exchange", text("")),
    ("routing-keys", long(b"A", text("hostile"))),
)
"""A death in the main queue. 3.10 believes it, and would drop the message as a cycle later."""

FORGED: Cases = {
    "death": properties(("x-death", long(b"A", DEATH))),
    "many deaths": properties(("x-death", long(b"A", DEATH * 50))),
    "a death in the retry queue": properties(
        ("x-death", long(b"A", b"F" + table(
            ("count", b"l" + (10**12).to_bytes(8, "big")), ("reason", text("expired")),
            ("queue", text("hostile.retry.1.100ms")), ("exchange", text("")),
        ))),
        ("x-first-death-queue", text("hostile.retry.1.100ms")),
        ("x-last-death-reason", text("delivery_limit")),
    ),
    "everything of ours": properties(*((name, text("forged")) for name in sorted(OURS))),
    "everything of ours twice": properties(
        *((name, text("forged")) for name in sorted(OURS)),
        *((name, b"I\0\0\0\7") for name in sorted(OURS)),
    ),
    "counts": properties(
        ("x-delivery-count", b"l" + (10**12).to_bytes(8, "big")),
        ("x-acquired-count", b"l" + (10**12).to_bytes(8, "big")),
    ),
    "history of another": properties(
        ("x-attempts", long(b"A", (b"F" + table(
            ("attempt", b"L" + b"\x7f" + b"\xff" * 7), ("when", text(b"\xff")),
            ("seconds", b"d" + struct.pack(">d", 1e308)), ("error", text("e" * 900)),
        )) * 40)),
    ),
    "another origin": properties(("x-origin-queue", text("elsewhere"))),
    "replayed for ever": properties(
        ("x-replayed", b"F" + table(("count", b"l\x7f" + b"\xff" * 7), ("when", b"V")))
    ),
}  # fmt: skip

PROPERTIES: Cases = {
    "none at all": Properties({}),
    "an empty table": Properties({"headers": table()}),
    "every one": properties(
        content_type=short("application/json"), content_encoding=short("gzip"),
        delivery_mode=b"\2", priority=b"\7", correlation_id=short("c"), reply_to=short("answers"),
        message_id=short("every one"), timestamp=struct.pack(">Q", 1_700_000_000),
        type=short("t"), app_id=short("a"), cluster_id=short("k"),
    ),
    "transient": properties(delivery_mode=b"\1", message_id=short("transient")),
    "priority 255": properties(priority=b"\xff"),
    "published after 9999": properties(timestamp=b"\xff" * 8),
    "an empty message id": properties(message_id=short("")),
    "a message id of 255 bytes": properties(message_id=short("i" * 255)),
    "a message id with controls": properties(message_id=short("a\n\x1b[31mb\0")),
    "own user": properties(user_id=short("guest"), message_id=short("own user")),
    "a time limit": properties(expiration=short("60000"), message_id=short("a time limit")),
    **{
        f"{name}, not UTF-8": properties(**{name: short(b"\xff\xfe")})
        for name in ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id",
                     "type", "app_id", "cluster_id")
    },
}  # fmt: skip

NAMES: Cases = {
    "100 headers": properties(*((f"h{i}", text(f"value {i}")) for i in range(100))),
    "one name twice": properties(("same", b"t\1"), ("same", b"t\0")),
    "names": properties(
        (b"\xff\xfe", b"t\1"), ("", b"t\0"), ("a" * 255, b"V"), ("a b\n\x1b[31m", b"V"),
        ("cc", b"V"), ("X-Death", b"V"), ("x-retry-count ", b"V"), ("x-match", text("all")),
        ("x-opt-delivery-time", b"l" + bytes(8)), ("x-delay", b"I\0\0\0\1"),
    ),
}  # fmt: skip


SPENT = {"headers", "delivery_mode", "expiration", "user_id"}
"""What a copy need not keep: it is persistent, its publisher's time limit is over, and it is ours."""


def foreign(properties: Properties) -> tuple[dict[str, bytes], list[tuple[bytes, bytes]]]:
    """What a publisher wrote and a copy must keep, as bytes."""
    found = fields(properties.encode())
    headers = [
        (name, value)
        for name, value in entries(found.get("headers", bytes(4)))
        if (text := name.decode("latin-1")) not in OURS and not is_brokers(text)
    ]
    return {name: raw for name, raw in found.items() if name not in SPENT}, sorted(headers)


class Hostile(Consumer[bytes]):
    """Fails until told otherwise, and keeps what it saw."""

    queue = "hostile"
    retry = RetryPolicy(attempts=2, base=timedelta(milliseconds=100), jitter=False)
    concurrency = 8

    def __init__(self) -> None:
        self.mended = False
        self.seen: dict[str, list[Message]] = {}
        self.done: dict[str, Message] = {}

    async def handle(self, body: bytes, message: Message) -> None:
        # All that a handler may look at can be looked at.
        repr((message, message.headers, message.timestamp, message.content_type, message.priority))
        if not self.mended and body != b"good":
            self.seen.setdefault(body.decode(), []).append(message)
            raise ValueError("not yet")
        self.done[body.decode()] = message


async def endure(
    cases: Cases, run: Run, declared: Declared, connection: Connection, publisher: Publisher
) -> Hostile:
    """The whole way: fail, retry, fail, parked, replayed, done; nothing foreign is changed."""
    hostile = Hostile()
    app = App("hostile", [hostile])
    await declared(app)
    first: dict[str, Properties] = {}
    for name, given in cases.items():
        await publisher.send("", "hostile", name.encode(), given)
        found = await take(connection, "hostile")
        assert found is not None
        first[name] = found.properties
    assert await depth(connection, "hostile") == 0
    for name, given in cases.items():
        await publisher.send("", "hostile", name.encode(), given)
    running = await run(app)

    async def all_parked() -> bool:
        assert running.is_running
        return await depth(connection, "hostile.parked") == len(cases)

    await eventually(all_parked, 30)
    await publisher.publish(Hostile, b"good")
    await eventually(lambda: "good" in hostile.done)
    assert set(hostile.seen) == set(cases)

    parked = {one.body.decode(): one async for one in parking.browse(connection, "hostile")}
    assert set(parked) == set(cases)
    hostile.mended = True
    moved = await parking.replay(connection, publisher, "hostile", lambda _: True)
    assert moved.to == {"hostile": len(cases)}
    await eventually(lambda: set(hostile.done) == {"good", *cases}, 30)
    await running.end()
    assert await depth(connection, "hostile.parked") == 0
    assert await depth(connection, "hostile") == 0
    for name, before in first.items():
        expected = foreign(before)
        stages = [
            *(message.properties for message in hostile.seen[name]),
            parked[name].properties,
            hostile.done[name].properties,
        ]
        for stage in stages:
            kept = foreign(stage)
            if "message_id" not in expected[0]:
                kept[0].pop("message_id", None)  # a copy is given one
            assert kept == expected, name
        assert hostile.done[name].attempt == 1, name
        for message in hostile.seen[name][1:]:
            assert message.attempt == hostile.seen[name][0].attempt + 1, name
        if len(hostile.seen[name]) == 2:  # else there may be no room even for this
            assert [copy.number("delivery_mode") for copy in stages[1:]] == [2, 2, 2], name
        for copy in stages[1:]:
            assert copy.text("expiration") is None, name
            assert copy.text("user_id") is None, name
    return hostile


@pytest.mark.parametrize(
    "cases",
    [
        of_each_type("foreign"), of_each_type("x-foreign"), of_each_type("x-delivery-count"),
        of_each_type("x-death"), of_each_type("x-attempts"), of_each_type("x-replayed"),
        of_each_type(b"\xff"), FORGED, PROPERTIES, NAMES,
    ],
    ids=["foreign", "x-foreign", "x-delivery-count", "x-death", "x-attempts", "x-replayed",
         "not UTF-8", "forged", "properties", "names"],
)  # fmt: skip
async def test_a_hostile_message_is_retried_parked_and_replayed_with_every_byte_as_it_was(
    cases: Cases, run: Run, declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    hostile = await endure(cases, run, declared, connection, publisher)
    attempts = {name: [message.attempt for message in seen] for name, seen in hostile.seen.items()}
    if cases is FORGED:
        # The second of two headers of one name is what 4.x keeps: an integer, so attempt 8.
        attempts.pop("everything of ours twice")
    assert set(map(tuple, attempts.values())) == {(1, 2)}


async def test_a_forged_retry_count_is_read_as_a_finite_number(
    run: Run, declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    cases = of_each_type("x-retry-count")
    hostile = await endure(cases, run, declared, connection, publisher)
    beyond = {"unsigned byte": 256, "unsigned short": 65_536, "unsigned int": 1_000_001,
              "10**12": 1_000_001}  # fmt: skip
    for name, seen in hostile.seen.items():
        kind = name.partition(": ")[2]
        expected = [beyond[kind]] if kind in beyond else [1, 2]
        assert [message.attempt for message in seen] == expected, name


async def test_copies_go_to_no_queue_of_the_publishers_cc_once_more(
    run: Run, declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    channel = await connection.open()
    await channel.queue_declare("elsewhere", durable=True, arguments={"x-queue-type": "quorum"})
    to = long(b"A", text("elsewhere"))
    await endure(
        {"cc": properties(("CC", to)), "bcc": properties(("BCC", to))},
        run, declared, connection, publisher,
    )  # fmt: skip
    # Twice each by publishing: once to see it, once to go the whole way.
    assert await depth(connection, "elsewhere") == 4


async def test_the_longest_headers_a_frame_takes_go_the_whole_way(
    run: Run, declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    """With room for all of ours, for some, for none; then the broker itself parks the message."""
    cases = {
        f"{size} bytes": properties(("foreign", text(b"\xff" * size)), message_id=short(f"i{size}"))
        for size in (60_000, 100_000, 115_000, 122_000, 128_000, *range(130_650, 131_001, 25))
    }
    room = 131_072 - 8 - 12 - 2 - 4 - 1 - len("foreign") - 5
    cases["a full frame"] = properties(("foreign", text(b"\xff" * (room - 8))))
    hostile = await endure(cases, run, declared, connection, publisher)
    attempts = {name: [message.attempt for message in seen] for name, seen in hostile.seen.items()}
    assert attempts.pop("a full frame") == [1]
    assert attempts.pop("131000 bytes") == [1]
    assert attempts["130650 bytes"] == [1, 2]


async def test_another_users_name_is_refused_at_once_and_ones_own_survives_a_retry(
    broker: Broker, vhost: str, run: Run, publisher: Publisher, connection: Connection
) -> None:
    hostile = Hostile()
    await run(App("hostile", [hostile]))
    with pytest.raises(Refused, match="user_id") as refused:
        await publisher.publish(Hostile, b"forged", user_id="somebody")
    assert not refused.value.maybe_stored
    await publisher.publish(Hostile, b"own", user_id=broker.user)
    await eventually(lambda: depth(connection, "hostile.parked"))
    assert [message.attempt for message in hostile.seen["own"]] == [1, 2]
    assert "forged" not in hostile.seen


@pytest.mark.parametrize(
    "value",
    [b"d\x7f\xf8" + bytes(6), b"d\x7f\xf0" + bytes(6), b"f\x7f\xc0\0\0", b"U\0\0", b"Z\0"],
    ids=["nan", "infinity", "nan in 32 bits", "unknown tag U", "unknown tag Z"],
)
async def test_a_value_that_no_broker_takes_costs_one_publish(
    value: bytes, declared: Declared, connection: Connection, publisher: Publisher
) -> None:
    """3.10 to 4.3 close the connection over it (541): so none can come to a worker."""
    await declared(App("hostile", [Hostile()]))
    with pytest.raises(Unconfirmed):
        await publisher.send("", "hostile", b"x", properties(("foreign", value)))
    assert await depth(connection, "hostile") == 0
    await publisher.publish(Hostile, b"good")
    assert await depth(connection, "hostile") == 1


async def test_numbers_that_no_broker_takes_are_refused_before_they_are_sent(
    publisher: Publisher,
) -> None:
    for value in (float("nan"), float("inf"), -float("inf"), 2**63, object()):
        with pytest.raises(ValueError, match="header foreign"):
            await publisher.publish("hostile", b"x", headers={"foreign": value})
