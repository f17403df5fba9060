"""Bodies that nobody should send: done or parked, byte-identical, whatever takes them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, parking
from rabbit_tasks.broker import Connection
from tests.conftest import eventually
from tests.support.inprocess import Running
from tests.support.queues import depth
from tests.support.wire import properties, short

Run = Callable[[App], Awaitable[Running]]

BODIES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"hello {",
    "half of JSON": b'{"a": 1, "b": [1, 2',
    "two of JSON": b'{"a": 1}{"a": 2}',
    "truncated UTF-8": '{"a": "grün"}'.encode()[:10],
    "not UTF-8": b"\xff\xfe\x80",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "UTF-32": '{"a": 1}'.encode("utf-32"),
    "Latin-1": '{"a": "grün"}'.encode("latin-1"),
    "a BOM": b'\xef\xbb\xbf{"a": 1}',
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity, "b": 1e999}',
    "duplicate keys": b'{"a": 1, "a": 2}',
    "100 levels deep": b'{"a":' + b"[" * 99 + b"]" * 99 + b"}",
    "10,000 levels deep": b'{"a":' + b"[" * 9_999 + b"]" * 9_999 + b"}",
    "a lone surrogate": b'{"a": "\\ud800"}',
    "a surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
    "a number of 10,000 digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "zero bytes": bytes(1000),
    "null": b"null",
    "a list": b"[1, 2, 3]",
    "a wrong type": b'{"a": {"b": "c"}}',
    "a key that drives the terminal": b'{"\\u001b[2J": "\\u001b]0;x\\u0007"}',
    "a key of 1 MB": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "100,000 faults": b'{"a": [' + b"null, " * 99_999 + b"null]}",
    "10 MB": json.dumps({"a": [1], "pad": "x" * 10_000_000}).encode(),
    "10 MB, not JSON": bytes(range(256)) * 40_960,
    "good": b'{"a": [1, 2, 3]}',
}


class Strict(BaseModel):
    a: list[int]


@dataclass
class Plain:
    a: list[int]


QUICK = RetryPolicy(attempts=2, base=timedelta(milliseconds=100), jitter=False)


class Keeps:
    """What came through."""

    queue: ClassVar[str] = "bodies"
    retry: ClassVar[RetryPolicy] = QUICK
    concurrency: ClassVar[int] = 4

    def __init__(self) -> None:
        self.done: dict[str, bytes] = {}

    def keep(self, message: Message) -> None:
        assert message.type is not None
        self.done[message.type] = message.body


class TakesBytes(Keeps, Consumer[bytes]):
    async def handle(self, body: bytes, message: Message) -> None:
        assert body == message.body
        self.keep(message)


class TakesText(Keeps, Consumer[str]):
    def handle(self, body: str, message: Message) -> None:
        assert body.encode() == message.body
        self.keep(message)


class TakesDict(Keeps, Consumer[dict[str, Any]]):
    async def handle(self, body: dict[str, Any], message: Message) -> None:
        assert isinstance(body, dict)
        self.keep(message)


class TakesModel(Keeps, Consumer[Strict]):
    def handle(self, body: Strict, message: Message) -> None:
        assert isinstance(body, Strict)
        self.keep(message)


class TakesPlain(Keeps, Consumer[Plain]):
    async def handle(self, body: Plain, message: Message) -> None:
        assert isinstance(body, Plain)
        self.keep(message)


class TakesAnything(Keeps, Consumer[Any]):
    async def handle(self, body: Any, message: Message) -> None:
        self.keep(message)


JSON_OBJECTS = {
    "NaN", "infinity", "duplicate keys", "100 levels deep", "a wrong type",
    "a key that drives the terminal", "a key of 1 MB", "100,000 faults", "10 MB", "good",
}  # fmt: skip
UTF_8 = set(BODIES) - {
    "truncated UTF-8", "not UTF-8", "UTF-16", "UTF-32", "Latin-1", "a surrogate in UTF-8",
    "10 MB, not JSON",
}  # fmt: skip
MODELS = {"10 MB", "good"}
EITHER = {"a number of 10,000 digits"}
"""What the JSON parser takes differs by its version."""


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        (TakesBytes, set(BODIES)),
        (TakesText, UTF_8),
        (TakesDict, JSON_OBJECTS),
        (TakesModel, MODELS),
        (TakesPlain, MODELS),
        (TakesAnything, JSON_OBJECTS | {"null", "a list"}),
    ],
)
async def test_a_hostile_body_is_done_or_parked_as_it_is(
    kind: type[TakesBytes | TakesText | TakesDict | TakesModel | TakesPlain | TakesAnything],
    taken: set[str],
    run: Run,
    connection: Connection,
    publisher: Publisher,
) -> None:
    consumer = kind()
    running = await run(App("bodies", [consumer]))
    for name, body in BODIES.items():
        await publisher.send(
            "", "bodies", body, properties(type=short(name), message_id=short(name))
        )

    async def all_there() -> bool:
        assert running.is_running
        return len(consumer.done) + await depth(connection, "bodies.parked") == len(BODIES)

    await eventually(all_there, 30)
    parked = {one.id: one async for one in parking.browse(connection, "bodies")}
    bodies = {**consumer.done, **{name: one.body for name, one in parked.items()}}
    assert {name for name in BODIES if bodies[name] != BODIES[name]} == set()
    assert set(consumer.done) - EITHER == taken - EITHER
    for one in parked.values():
        assert one.reason == "malformed body"
        assert len(one.attempts) == 1, "never retried"
    assert not set(parked) & set(consumer.done)
    await running.end()


@pytest.mark.parametrize(
    ("content_type", "content_encoding"),
    [("text/plain", ""), ("application/xml", "gzip"), ("", "utf-16"), ("\n", "\0")],
)
async def test_a_wrong_content_type_or_encoding_does_not_matter(
    content_type: str,
    content_encoding: str,
    run: Run,
    publisher: Publisher,
) -> None:
    consumer = TakesModel()
    await run(App("bodies", [consumer]))
    wrong = {"content_type": short(content_type), "content_encoding": short(content_encoding)}
    await publisher.send("", "bodies", b'{"a": [1]}', properties(type=short("wrong"), **wrong))
    await eventually(lambda: consumer.done == {"wrong": b'{"a": [1]}'})


async def test_ten_megabytes_are_retried_parked_and_replayed_byte_for_byte(
    run: Run, connection: Connection, publisher: Publisher
) -> None:
    body = BODIES["10 MB, not JSON"]
    seen: list[bool] = []

    class Fails(Consumer[bytes]):
        queue = "bodies"
        retry = QUICK

        async def handle(self, body: bytes, message: Message) -> None:
            seen.append(body == BODIES["10 MB, not JSON"])
            if len(seen) < 3:
                raise ValueError(body)  # a text of 30 MB

    await run(App("bodies", [Fails()]))
    await publisher.publish(Fails, body)
    await eventually(lambda: depth(connection, "bodies.parked"), 20)
    await parking.replay(connection, publisher, "bodies", lambda _: True)
    await eventually(lambda: len(seen) == 3, 20)
    assert seen == [True, True, True]
