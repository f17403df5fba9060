"""Consumer classes: which bodies they take, and which classes are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Generic, TypeVar

import pytest
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict

from rabbit_tasks import App, ConfigurationError, Consumer, Message
from rabbit_tasks.consumer import Consumer as ConsumerClass
from rabbit_tasks.consumer import body_of, decode, encode, is_async
from rabbit_tasks.errors import MalformedBody

T = TypeVar("T")


class Image(BaseModel):
    path: str
    width: int = 320


@dataclass
class Point:
    x: int
    y: int


class Row(TypedDict):
    id: int


class Envelope(BaseModel, Generic[T]):
    of: T


class Handles(Consumer[T]):
    """An abstract class in between: no queue, so nothing is asked of it yet."""

    async def handle(self, body: T, message: Message) -> None: ...


class HandlesLists(Handles[list[T]], Generic[T]):
    """… and one more, with a type of its own around the type."""


class HandlesEnvelopes(Handles[Envelope[T]], Generic[T]):
    """… and a generic model."""


def taking(kind: Any) -> type[Consumer[Any]]:
    """A consumer class of bodies of this type."""

    class Takes(Handles[kind]):
        queue = "q"

    return Takes


class TakesBare(Consumer):  # type: ignore[type-arg]
    queue = "q"

    async def handle(self, body: Any, message: Message) -> None: ...


class TakesInts(HandlesLists[int]):
    queue = "q"


class TakesEnvelope(HandlesEnvelopes[Point]):
    queue = "q"


class TakesForward(Consumer["Later"]):
    queue = "q"

    async def handle(self, body: Later, message: Message) -> None: ...


class TakesForwardList(Consumer[list["Later"]]):
    queue = "q"

    async def handle(self, body: list[Later], message: Message) -> None: ...


class Later(BaseModel):
    a: int


class Concrete(TakesInts):
    """Inherits everything, its body type too."""


# --- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (taking(Image), b'{"path":"a.jpg","width":320}', Image(path="a.jpg")),
        (taking(Point), b'{"x":1,"y":2}', Point(1, 2)),
        (taking(dict), b'{"a":[1,null]}', {"a": [1, None]}),
        (taking(dict[str, Any]), b'{"a":[1,null]}', {"a": [1, None]}),
        (taking(Row), b'{"id":1}', {"id": 1}),
        (taking(list[int]), b"[1,2]", [1, 2]),
        (taking(Annotated[int, Field(gt=0)]), b"5", 5),
        (taking(Image | Point), b'{"x":1,"y":2}', Point(1, 2)),
        (taking(datetime), b'"2026-01-02T03:04:05"', datetime(2026, 1, 2, 3, 4, 5)),
        (taking(None), b"null", None),
        (taking(Any), b'{"a":1}', {"a": 1}),
        (taking(bytes), b"\xff\0", b"\xff\0"),
        (taking(bytes), b"", b""),
        (taking(str), "grün".encode(), "grün"),
        (taking(str), b"", ""),
        (TakesBare, b"[1]", [1]),
        (TakesInts, b"[1,2]", [1, 2]),
        (Concrete, b"[1,2]", [1, 2]),
        (TakesEnvelope, b'{"of":{"x":1,"y":2}}', Envelope[Point](of=Point(1, 2))),
        (TakesForward, b'{"a":1}', Later(a=1)),
        (TakesForwardList, b'[{"a":1}]', [Later(a=1)]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_body_goes_out_and_comes_in(kind: type[Consumer[Any]], raw: bytes, value: Any) -> None:
    assert decode(kind, raw) == value
    assert type(decode(kind, raw)) is type(value)
    assert encode(kind, value)[0] == raw


def test_each_kind_of_body_has_its_content_type() -> None:
    assert encode(taking(dict), {}) == (b"{}", "application/json")
    assert encode(taking(str), "ü") == ("ü".encode(), "text/plain; charset=utf-8")
    assert encode(taking(bytes), b"\0") == (b"\0", "application/octet-stream")


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'\r\n\t {"a":1} ', {"a": 1}),
        (b"[" * 100 + b"]" * 100, None),
        (b'"' + "ü\u2028".encode() + b'"', "ü\u2028"),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        (json.dumps({"pad": "x" * 10_000_000}).encode(), None),
    ],
    ids=["duplicate keys", "white space", "100 levels", "line separator", "big integer", "10 MB"],
)
def test_any_json_is_a_body(raw: bytes, value: Any) -> None:
    found = decode(taking(Any), raw)
    assert found == (json.loads(raw) if value is None else value)


def test_nan_is_a_number_where_the_type_allows_it() -> None:
    found = decode(taking(dict[str, float]), b'{"a":NaN}')["a"]
    assert found != found
    with pytest.raises(MalformedBody):
        decode(taking(dict[str, int]), b'{"a":NaN}')


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"not JSON", b'{"a":1}{', b"\xef\xbb\xbf{}", b"\xff", b'{"a":"\xc3', b'"\\ud800"',
        '{"a":1}'.encode("utf-16"), b"[" * 100_000, b"1" * 10_000, b"\0", b"'a'",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Any, dict, Image, Point, Row, list[int]])
def test_what_is_not_json_is_malformed(kind: Any, raw: bytes) -> None:
    with pytest.raises(MalformedBody) as refused:
        decode(taking(kind), raw)
    assert refused.value.codes == "json_invalid"


@pytest.mark.parametrize("raw", [b"\xff", b"\xc3", "ü".encode("utf-16")])
def test_text_that_is_not_utf8_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedBody, match="not UTF-8 at byte 0"):
        decode(taking(str), raw)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Image, {"path": ["SECRET"], "width": "SECRET"}),
        (Image, "SECRET"),
        (dict[str, int], {"SECRET": "SECRET"}),
        (list[int], ["SECRET"]),
        (Point, {"SECRET": 1}),
        (datetime, "SECRET"),
        (Image, {"path": "a", "width": 1.5}),
    ],
)
def test_the_codes_of_a_malformed_body_never_quote_it(kind: Any, body: Any) -> None:
    with pytest.raises(MalformedBody) as refused:
        decode(taking(kind), json.dumps(body).encode())
    assert "SECRET" not in refused.value.codes
    assert all(code.replace("_", "").isalpha() for code in refused.value.codes.split(", "))


def test_a_malformed_body_says_where_in_its_text() -> None:
    with pytest.raises(MalformedBody) as refused:
        decode(taking(list[Image]), b'[{"width":"x"}]')
    assert str(refused.value).startswith("0.path: Field required; 0.width: Input should be a valid")
    assert refused.value.codes == "int_parsing, missing"
    with pytest.raises(MalformedBody, match="and 15 more"):
        decode(taking(list[int]), json.dumps(["x"] * 20).encode())


class Unspeakable(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class Fussy(BaseModel):
    a: int

    @field_validator("a")
    @classmethod
    def _refuse(cls, value: int) -> int:
        raise (Unspeakable, SystemExit, KeyboardInterrupt)[value]


@pytest.mark.parametrize("fault", [0, 1, 2])
def test_a_validator_may_raise_anything_and_it_is_an_error_of_that_message(fault: int) -> None:
    with pytest.raises((MalformedBody, RuntimeError, SystemExit, KeyboardInterrupt)):
        decode(taking(Fussy), b'{"a":%d}' % fault)


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (Image, {"path": "a"}, "Takes takes Image, not this dict"),
        (Image, None, "Takes takes Image, not this NoneType"),
        (dict[str, int], {"a": "x"}, r"Takes takes dict\[str, int\], not this dict"),
        (Any, object(), "Takes takes Any, not this object"),
        (Any, "\udc80", "Takes takes Any, not this str"),
        (bytes, "text", "Takes takes bytes, not this str"),
        (str, b"bytes", "Takes takes str, not this bytes"),
    ],
)
def test_a_body_of_another_type_is_not_encoded(kind: Any, body: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        encode(taking(kind), body)


# --- classes ------------------------------------------------------------------------------------


def test_a_handler_is_async_or_a_thread() -> None:
    class InThread(Consumer[str]):
        queue = "q"

        def handle(self, body: str, message: Message) -> None: ...

    assert is_async(taking(str))
    assert not is_async(InThread)


async def plain(self: Any, body: Any, message: Message) -> None: ...


def in_thread(self: Any, body: Any, message: Message) -> None: ...


def yields(self: Any, body: Any, message: Message) -> Iterator[None]:
    yield


async def yields_async(self: Any, body: Any, message: Message) -> AsyncIterator[None]:
    yield


def takes_one(self: Any, body: Any) -> None: ...


def takes_four(self: Any, body: Any, message: Message, more: Any) -> None: ...


def takes_defaults(self: Any, body: Any, message: Message | None = None, more: int = 1) -> None: ...


@pytest.mark.parametrize("handler", [plain, in_thread, takes_defaults])
def test_these_handlers_will_do(handler: Any) -> None:
    type("Made", (Consumer,), {"queue": "q", "handle": handler})


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"queue": ""}, "Made.queue is ''; it takes a queue's name"),
        ({"queue": 5}, "Made.queue is 5; it takes a queue's name"),
        ({"queue": "gruß"}, r"Made.queue 'gruß' has 'ß'; take ASCII letters, digits, spaces and"),
        ({"queue": "a\nb"}, r"Made.queue 'a\\nb' has '\\n'; take ASCII letters"),
        ({"queue": "amq.x"}, r"Made.queue 'amq\.x': names in amq\. are the broker's own"),
        ({"queue": None}, r'Made has no queue; write queue = "images.resize"'),
        ({"handle": Consumer.handle}, "Made has no handler; write async def handle"),
        ({"handle": yields}, "Made.handle is a generator, which would never run"),
        ({"handle": yields_async}, "Made.handle is a generator"),
        ({"handle": takes_one}, r"Made.handle does not take \(self, body, message\): too many"),
        ({"handle": takes_four}, "does not take .*: missing a required argument: 'more'"),
        ({"handle": 5}, r"does not take \(self, body, message\)"),
        ({"retry": 5}, r"Made.retry is 5; write RetryPolicy\(attempts=5\)"),
        ({"concurrency": 0}, "Made.concurrency is 0; it takes a whole number from 1 to 1000"),
        ({"concurrency": 1001}, "concurrency is 1001"),
        ({"prefetch": 0}, "Made.prefetch is 0; it takes a whole number from 1 to 1000"),
        ({"prefetch": 1001}, "prefetch is 1001"),
        ({"prefetch": 656, "concurrency": 100}, "Made would hold 65600 messages"),
        ({"concurrency": True}, "concurrency is True"),
        ({"concurrency": 2.0}, "concurrency is 2.0"),
        ({"delivery_limit": 0}, "Made.delivery_limit is 0; it takes a whole number from 1"),
        ({"delivery_limit": -1}, "delivery_limit is -1"),
        ({"isolation": "thread"}, "Made.isolation is 'thread'; it takes \"process\" or None"),
        ({"isolation": True}, "Made.isolation is True"),
        ({"timeout": 5}, r"Made.timeout is 5; write timedelta\(seconds=30\)"),
        ({"timeout": timedelta()}, "Made.timeout is .*; write timedelta"),
        ({"timeout": timedelta(seconds=-1)}, "Made.timeout is"),
        ({"timeout": timedelta(seconds=1), "handle": in_thread},
         'Made has a timeout, but its handler runs in a thread, .*; write isolation = "process"'),
        ({"recycle_after": 5}, 'Made has recycle_after, but no child .*; write isolation = "process"'),
        ({"recycle_above": 5}, "Made has recycle_above, but no child process to recycle"),
        ({"recycle_after": 0, "isolation": "process"},
         "Made.recycle_after is 0; it takes a whole number of messages from 1"),
        ({"recycle_after": True, "isolation": "process"}, "Made.recycle_after is True"),
        ({"recycle_above": 1.5, "isolation": "process"},
         "Made.recycle_above is 1.5; it takes a whole number of MiB from 1"),
        ({"ack_timeout": 60}, r"Made.ack_timeout is 60; write timedelta\(hours=1\)"),
        ({"ack_timeout": timedelta(seconds=59)}, r"Made.ack_timeout is 0:00:59; it takes 0:01:00 \("),
        ({"ack_timeout": timedelta(days=50)}, "Made.ack_timeout is 50 days.* to 49 days"),
        ({"ack_timeout": timedelta(hours=1), "timeout": timedelta(hours=1)},
         "Made.ack_timeout, 1:00:00, must be longer than its timeout, 1:00:00, or the broker"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_work_is_refused(attributes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        type("Made", (Consumer,), {"queue": "q", "handle": plain, **attributes})


@pytest.mark.parametrize("handler", [plain, in_thread])
def test_process_isolation_takes_a_timeout_with_any_handler(handler: Any) -> None:
    limits = {"timeout": timedelta(seconds=1), "isolation": "process"}
    type("Made", (Consumer,), {"queue": "q", "handle": handler, **limits})


def test_these_limits_will_do() -> None:
    limits = {"timeout": timedelta(minutes=59), "ack_timeout": timedelta(hours=1)}
    recycled = {"isolation": "process", "recycle_after": 1, "recycle_above": 1}
    type("Made", (Consumer,), {"queue": "q", "handle": plain, **limits, **recycled})
    for edge in (timedelta(minutes=1), timedelta(days=49)):
        type("Made", (Consumer,), {"queue": "q", "handle": in_thread, "ack_timeout": edge})


class Opaque:
    """Nothing that pydantic knows."""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Opaque, "Takes takes Opaque, which has no JSON form; take a pydantic model, a dataclass"),
        (list[Opaque], r"Takes takes list\[.*Opaque\], which has no JSON form"),
        (Callable[[], None], "Takes takes .*Callable.*, which has no JSON form"),
        (type[int], r"Takes takes type\[int\], which has no JSON form"),
        (Annotated[str, Field(pattern="(")], "Takes takes Annotated"),
    ],
)
def test_a_body_type_that_cannot_be_decoded_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        taking(kind)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="typing.TypedDict will do")
def test_a_typed_dict_that_pydantic_cannot_read_is_refused_with_its_advice() -> None:
    import typing

    kind = typing.TypedDict("kind", {"id": int})  # noqa: UP013
    with pytest.raises(ConfigurationError, match=r"typing_extensions\.TypedDict"):
        taking(kind)


def test_a_type_that_is_never_defined_is_refused_when_the_app_is_built() -> None:
    class Missing(Consumer["Nowhere"]):  # type: ignore[name-defined]
        queue = "q"

        async def handle(self, body: Any, message: Message) -> None: ...

    class Half(BaseModel):
        missing: Nowhere  # type: ignore[name-defined]  # noqa: F821

    class HalfMissing(Consumer[Half]):
        queue = "q"

        async def handle(self, body: Half, message: Message) -> None: ...

    with pytest.raises(
        ConfigurationError, match="Missing takes Nowhere, which its module does not"
    ):
        App("app", [Missing()])
    with pytest.raises(ConfigurationError, match="HalfMissing takes Half, which names a type"):
        App("app", [HalfMissing()])


def test_a_subclass_without_a_queue_of_its_own_is_checked_when_the_app_is_built() -> None:
    class Worse(TakesInts):
        concurrency = 0

    with pytest.raises(ConfigurationError, match=r"Worse\.concurrency is 0"):
        App("app", [Worse()])


@pytest.mark.parametrize(
    ("consumers", "text"),
    [
        ([TakesInts], r"got the class TakesInts; pass an instance, TakesInts\(…\)"),
        ([5], "got 5, which is not a rabbit_tasks.Consumer"),
        ([Handles()], 'Handles has no queue; write queue = "images.resize"'),
    ],
)
def test_what_is_no_consumer_is_refused_by_the_app(consumers: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        App("app", consumers)


def test_a_body_type_is_worked_out_once_for_each_class() -> None:
    assert body_of(TakesInts) is body_of(TakesInts)
    assert body_of(TakesInts) is not body_of(TakesForward)
    assert ConsumerClass is Consumer


def test_a_body_with_a_hundred_thousand_faults_is_malformed_like_one_with_a_single_one() -> None:
    class Numbers(Consumer[list[int]]):
        queue = "numbers"

        async def handle(self, body: list[int], message: Message) -> None: ...

    body = b"[" + b",".join([b'"x"'] * 100_000) + b"]"
    with pytest.raises(MalformedBody, match=r"^100000 faults$") as caught:
        decode(Numbers, body)
    assert caught.value.codes == "100000 faults"


def test_a_validator_whose_text_cannot_be_encoded_makes_the_body_malformed() -> None:
    class Fussy(BaseModel):
        name: str

        @field_validator("name")
        @classmethod
        def refuse(cls, name: str) -> str:
            raise ValueError("\ud800")

    class Takes(Consumer[Fussy]):
        queue = "fussy"

        async def handle(self, body: Fussy, message: Message) -> None: ...

    with pytest.raises(MalformedBody) as caught:
        decode(Takes, b'{"name": "a"}')
    assert caught.value.codes == "value_error"


def test_another_model_or_dataclass_is_no_body_though_it_could_be_written_as_one() -> None:
    class Lenient(BaseModel):
        width: int = 320

    class Takes(Consumer[Lenient]):
        queue = "lenient"

        async def handle(self, body: Lenient, message: Message) -> None: ...

    for wrong in (Image(path="a"), Point(1, 2), {"width": 1}):
        with pytest.raises(TypeError, match="takes Lenient, not this"):
            encode(Takes, wrong)  # type: ignore[misc]
    assert encode(Takes, Lenient(width=1))[0] == b'{"width":1}'
