"""What a copy says of its message: errors as text, the history, why it is parked."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rabbit_tasks import Consumer, Message, Parked, RetryAfter, fingerprint, history
from rabbit_tasks import message as names
from rabbit_tasks.errors import MalformedBody
from rabbit_tasks.history import FailedElsewhere, Failure, failure_of
from rabbit_tasks.properties import Properties
from rabbit_tasks.testing import perform
from rabbit_tasks.text import cut, one_line
from tests.support.tables import VALUES, of_table

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
FRAME = 131_072


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def headers_of(
    error: BaseException, before: Properties | None = None, *, attempt: int = 1, **more: Any
) -> dict[str, Any]:
    """The headers of a retry's copy."""
    return history.after(
        RetryAfter(attempt, timedelta(seconds=1), error),
        failure_of(error),
        before or Properties.of(),
        queue="q", attempt=attempt, when=NOW, seconds=0.5, now=LATER, worker="here:1", **more,
    )  # fmt: skip


def copy_of(before: Properties, headers: dict[str, Any]) -> Properties | None:
    """The copy, as it is when it comes back from the broker."""
    made = history.copy(before, headers, message_id="new", frame_max=FRAME)
    return None if made is None else Properties.decode(made.encode())


# --- errors as text -----------------------------------------------------------------------------


class Unspeakable(Exception):
    def __init__(self, fault: BaseException) -> None:
        self.fault = fault

    def __str__(self) -> str:
        raise self.fault

    __repr__ = __str__


UNSPEAKABLE = f"{__name__}.Unspeakable"


class Hostile(Exception):
    """Raises whatever of it is looked at."""

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise SystemExit

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise KeyboardInterrupt


class Text(str):
    """A str that is no plain one."""

    def encode(self, *_: Any) -> bytes:
        raise RuntimeError

    __getitem__ = encode  # type: ignore[assignment]


class Speaks(Exception):
    def __str__(self) -> str:
        return Text("text")


def chain(length: int, kind: str) -> BaseException:
    error: BaseException = ValueError("first")
    for i in range(length):
        after = ValueError(f"number {i}")
        setattr(after, kind, error)
        error = after
    return error


def nested(depth: int) -> Exception:
    error: Exception = ValueError("deep")
    for _ in range(depth):
        error = ExceptionGroup("group", [error])
    return error


def endless() -> BaseException:
    def call() -> None:
        call()

    try:
        call()
    except RecursionError as error:
        return error
    raise AssertionError


def ring() -> BaseException:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ValueError("no"), "ValueError", "no"),
        (lambda: ValueError(), "ValueError", ""),
        (lambda: SystemExit(3), "SystemExit", "3"),
        (lambda: asyncio.CancelledError(), "asyncio.exceptions.CancelledError", ""),
        (lambda: Unspeakable(ValueError()), UNSPEAKABLE, "<its __str__ raised ValueError>"),
        (lambda: Unspeakable(SystemExit()), UNSPEAKABLE, "<its __str__ raised SystemExit>"),
        (lambda: Unspeakable(KeyboardInterrupt()), UNSPEAKABLE,
         "<its __str__ raised KeyboardInterrupt>"),
        (lambda: Hostile("text"), f"{__name__}.Hostile", "text"),
        (lambda: Speaks(), f"{__name__}.Speaks", "text"),
        (lambda: ValueError("\udc80\0\x1b[2J"), "ValueError", "\\udc80\0\x1b[2J"),
        (lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "ExceptionGroup",
         "two (2 sub-exceptions)"),
        (lambda: nested(5_000), "ExceptionGroup", "group (1 sub-exception)"),
        (lambda: chain(5_000, "__cause__"), "ValueError", "number 4999"),
        (lambda: chain(5_000, "__context__"), "ValueError", "number 4999"),
        (lambda: ring(), "ValueError", "one"),
        (lambda: endless(), "RecursionError", "maximum recursion depth exceeded"),
        (lambda: type("Long" * 1000, (Exception,), {})("x"), None, "x"),
        (lambda: type("Odd", (Exception,), {"__module__": None})("x"), "None.Odd", "x"),
    ],
)  # fmt: skip
def test_any_error_becomes_text_that_headers_carry(
    make: Callable[[], BaseException], kind: str | None, message: str
) -> None:
    failure = failure_of(raised(make()))
    assert failure.type == kind or (kind is None and failure.type.startswith("tests.unit"))
    assert failure.message == message
    assert failure.log.isprintable()
    assert len(failure.log) <= 300
    copy = copy_of(Properties.of(), headers_of(raised(make())))
    assert copy is not None
    assert copy.header(names.ERROR_TYPE) == failure.type
    assert copy.header(names.ERROR_MESSAGE) == failure.message
    assert copy.header(names.ERROR_STACK)


def test_a_message_of_a_megabyte_keeps_its_beginning_and_its_end() -> None:
    failure = failure_of(raised(ValueError("ä" * 500_000 + "the end")))
    for text, limit in (
        (failure.message, history.MESSAGE_BYTES),
        (failure.stack, history.STACK_BYTES),
    ):
        assert len(text.encode()) <= limit
        assert text.endswith(("the end", "the end\n"))
        assert "bytes left out" in text
    assert failure.message.startswith("ää")
    assert failure.stack.startswith("Traceback (most recent call last):")


@given(st.text(), st.integers(0, 60))
def test_a_text_that_is_cut_fits_and_is_utf8(text: str, limit: int) -> None:
    shown = cut(text, 40 + limit)
    assert len(shown.encode()) <= 40 + limit
    exact = text.encode("utf-8", "backslashreplace")
    assert len(exact) > 40 + limit or shown.encode() == exact


def test_a_stack_trace_tells_the_causes_and_the_members_of_a_group() -> None:
    error = ValueError("outer")
    error.__cause__ = ExceptionGroup("several", [KeyError("inner")])
    error.add_note("a note")
    stack = failure_of(raised(error)).stack
    for part in ("direct cause", "several", "KeyError: 'inner'", "outer", "a note", "in raised"):
        assert part in stack


class Failing(Consumer[str]):
    queue = "q"

    async def handle(self, body: str, message: Message) -> None:
        raise ValueError(body)


class FailingInAThread(Failing):
    def handle(self, body: str, message: Message) -> None:  # type: ignore[override]
        raise ValueError(body)


class TooSlow(Failing):
    timeout = timedelta(milliseconds=1)

    async def handle(self, body: str, message: Message) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("consumer", [Failing(), FailingInAThread()])
async def test_a_stack_trace_begins_with_the_handler(consumer: Failing) -> None:
    outcome = await perform(consumer, "no")
    assert isinstance(outcome, RetryAfter)
    assert outcome.error is not None
    head, first, line, *_, last = failure_of(outcome.error).stack.splitlines()
    assert head == "Traceback (most recent call last):"
    assert first.startswith(f'  File "{__file__}"')
    assert first.endswith("in handle")
    assert line.strip() == "raise ValueError(body)"
    assert last == "ValueError: no"


async def test_a_stack_trace_that_is_ours_alone_is_told_as_it_is() -> None:
    outcome = await perform(TooSlow(), "")
    assert isinstance(outcome, RetryAfter)
    assert outcome.error is not None
    stack = failure_of(outcome.error).stack
    before, _, ours = stack.rpartition("direct cause")
    assert "in handle" in before
    assert "handler.py" in ours


def test_logs_get_the_codes_of_a_body_and_headers_its_text() -> None:
    malformed = failure_of(MalformedBody("at a: SECRET", "int_type"))
    assert malformed.log == "malformed body (int_type)"
    assert malformed.message == "at a: SECRET"
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("SECRET")
    invalid = failure_of(caught.value)
    assert invalid.log == "pydantic_core._pydantic_core.ValidationError: int_parsing"
    assert "SECRET" in invalid.message


def test_an_error_of_a_child_process_is_what_it_said_there() -> None:
    failure = Failure("shop.Broken", "no", "Traceback", "shop.Broken: no")
    assert failure_of(raised(FailedElsewhere(failure))) is failure
    assert str(FailedElsewhere(failure)) == "no"


def test_redact_passes_over_message_stack_and_log() -> None:
    failure = failure_of(
        raised(ValueError("card 1234")), redact=lambda text: text.replace("1234", "****")
    )
    assert failure.message == "card ****"
    assert failure.log == "ValueError: card ****"
    assert "1234" not in failure.message + failure.log + failure.stack.splitlines()[-1]


@pytest.mark.parametrize("fault", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_redact_that_fails_shows_nothing(fault: type[BaseException]) -> None:
    def redact(_: str) -> str:
        raise fault

    failure = failure_of(raised(ValueError("SECRET")), redact)
    assert failure.message == failure.log == failure.stack == f"<redact raised {fault.__name__}>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc\x1b[2J\x9b\u2028\u202e\udc80", "a\\nb\\tc\\x1b[2J\\x9b\\u2028\\u202e\\udc80"),
        ("ü☃", "ü☃"),
        ("x" * 301, "x" * 299 + "…"),
        ("\n" * 1_000_000, "\\n" * 149 + "\\…"),
    ],
)
def test_one_line_is_one_line(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert one_line(text).isprintable()


# --- the copy -----------------------------------------------------------------------------------


def test_a_retry_carries_count_origin_error_and_history() -> None:
    copy = copy_of(Properties.of({"theirs": 1}), headers_of(raised(ValueError("no")), attempt=2))
    assert copy is not None
    headers = copy.headers
    assert "Traceback" in headers.pop("x-error-stack")
    assert headers == {
        "theirs": 1,
        "x-retry-count": 2,
        "x-origin-queue": "q",
        "x-error-type": "ValueError",
        "x-error-message": "no",
        "x-attempts": [
            {"attempt": 2, "when": "2026-01-02T03:04:05.678+00:00", "seconds": 0.5,
             "error": "ValueError: no", "worker": "here:1"},
        ],
    }  # fmt: skip
    assert copy.number("delivery_mode") == 2
    assert copy.text("message_id") == "new"


def test_a_parked_message_carries_its_reason_and_when_it_was_parked() -> None:
    headers = history.after(
        Parked("no such\nimage"), None, Properties.of(),
        queue="q", attempt=1, when=NOW, seconds=3600, now=LATER, worker="w",
    )  # fmt: skip
    assert headers == {
        "x-retry-count": 1,
        "x-origin-queue": "q",
        "x-parked-reason": "no such\\nimage",
        "x-parked-at": "2026-01-02T04:04:05.678+00:00",
        "x-error-fingerprint": fingerprint.of_words("no such\\nimage"),
    }


def test_the_stack_can_be_left_out() -> None:
    assert names.ERROR_STACK not in headers_of(raised(ValueError()), stack=False)


def test_the_brokers_records_and_spent_properties_are_left_out_of_a_copy() -> None:
    brokers = ["x-death", "x-first-death-queue", "x-last-death-reason", "x-delivery-count",
               "x-acquired-count", "CC", "BCC"]  # fmt: skip
    before = Properties.of(
        {**dict.fromkeys(brokers, 1), "x-deaths": 1},
        expiration="1", user_id="u", reply_to="r", message_id="theirs", priority=3, delivery_mode=1,
    )  # fmt: skip
    retried = copy_of(before, {names.RETRY_COUNT: 1})
    assert retried is not None
    returned = history.returned(before, message_id="new", frame_max=FRAME)
    replayed = history.replayed(before, when=NOW, message_id="new", frame_max=FRAME)
    for copy in (retried, returned, replayed):
        ours = {names.RETRY_COUNT, names.REPLAYED}
        assert set(copy.headers) - ours == {"x-deaths"}
        assert copy.text("expiration") is copy.text("user_id") is None
        assert (copy.text("reply_to"), copy.text("message_id")) == ("r", "theirs")
        assert (copy.number("priority"), copy.number("delivery_mode")) == (3, 2)


def foreign_of(size: int) -> Properties:
    """Properties whose frame has this many bytes."""
    room = size - Properties.of({"x": b""}, message_id="m").frame_size()
    made = Properties.of({"x": b"x" * room}, message_id="m")
    assert made.frame_size() == size
    return made


def sizes() -> Iterator[int]:
    yield from range(FRAME - 45_000, FRAME - 200, 997)
    yield from range(FRAME - 120, FRAME + 20)


def test_a_copy_fits_its_frame_beside_foreign_headers_of_any_size() -> None:
    headers = headers_of(raised(ValueError("x" * 1_000_000)))
    for _ in range(25):
        before = Properties.of(headers)
        headers = headers_of(raised(ValueError("x" * 1_000_000)), before)
    kept: list[int] = []
    for size in sizes():
        before = foreign_of(size)
        copy = copy_of(before, headers)
        if copy is None:
            least = before.replace({names.RETRY_COUNT: 1, names.ORIGIN_QUEUE: "q"}, delivery_mode=2)
            assert least.frame_size() > FRAME
            continue
        assert copy.frame_size() <= FRAME
        assert names.retry_count(copy) == 1
        assert copy.header("x") == before.header("x")
        kept.append(len(copy.headers))
    assert kept == sorted(kept, reverse=True)  # the fuller the frame, the less of ours
    assert set(kept) == {7, 6, 5, 4, 3}


def test_room_is_left_for_the_brokers_own_headers() -> None:
    copy = copy_of(foreign_of(FRAME - history.ROOM - 1_000), headers_of(raised(ValueError())))
    assert copy is not None
    assert copy.frame_size() <= FRAME - history.ROOM


@given(st.integers(FRAME - 9_000, FRAME))
def test_a_message_can_be_put_back_and_replayed_beside_foreign_headers_of_any_size(
    size: int,
) -> None:
    before = foreign_of(size)
    for copy in (
        history.returned(before, message_id="new", frame_max=FRAME),
        history.replayed(before, when=NOW, message_id="new", frame_max=FRAME),
    ):
        assert copy.frame_size() <= FRAME
        assert copy.header("x") == before.header("x")


# --- the history --------------------------------------------------------------------------------


def test_the_history_keeps_the_latest_twenty() -> None:
    before = Properties.of()
    for attempt in range(1, 31):
        copy = copy_of(before, headers_of(ValueError(), before, attempt=attempt))
        assert copy is not None
        before = copy
    assert [entry["attempt"] for entry in history.attempts(before)] == list(range(11, 31))


def entry(name: str, value: bytes) -> bytes:
    return bytes([len(name)]) + name.encode() + value


ENTRY = st.dictionaries(st.sampled_from(["attempt", "when", "seconds", "error", "worker"]), VALUES)


@given(st.one_of(VALUES, st.lists(ENTRY, max_size=25)))
def test_a_forged_history_is_read_and_never_hinders_a_copy(forged: Any) -> None:
    if isinstance(forged, list):
        tables = [b"".join(entry(name, value) for name, value in one.items()) for one in forged]
        items = b"".join(b"F" + len(raw).to_bytes(4, "big") + raw for raw in tables)
        forged = b"A" + len(items).to_bytes(4, "big") + items
    before = of_table(entry(names.ATTEMPTS, forged))
    copy = copy_of(before, headers_of(raised(ValueError("no")), before))
    assert copy is not None
    found = history.attempts(copy)
    assert len(found) <= history.HISTORY
    assert found[-1]["error"] == "ValueError: no"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempt", b"L" + b"\xff" * 8),
        ("seconds", b"d" + struct.pack(">d", math.inf)),
        ("seconds", b"f" + struct.pack(">f", math.nan)),
        ("when", b"S\0\0\0\1\xff"),
        ("error", b"S\0\1\x86\xa0" + b"x" * 100_000),
    ],
)
def test_what_a_forged_history_holds_that_we_cannot_write_is_left_out(
    name: str, value: bytes
) -> None:
    one = entry(name, value)
    table = b"F" + len(one).to_bytes(4, "big") + one
    before = of_table(entry(names.ATTEMPTS, b"A" + len(table).to_bytes(4, "big") + table))
    copy = copy_of(before, headers_of(raised(ValueError("no")), before))
    assert copy is not None
    assert names.retry_count(copy) == 1


def test_what_is_like_ours_in_a_forged_history_is_kept() -> None:
    forged = [5, {"attempt": "x"}, {"attempt": True}, {"attempt": 1, "error": "e", "more": 2}]
    assert history.attempts(Properties.of({names.ATTEMPTS: forged})) == [
        {"attempt": 1, "error": "e"}
    ]


@pytest.mark.parametrize(
    ("before", "count"),
    [(None, 1), ({"count": 1}, 2), ({"count": -1}, 1), ({"count": 2**40}, 1), ({"count": "x"}, 1),
     ({}, 1), (5, 1), ([1], 1), ("x", 1)],
)  # fmt: skip
def test_replays_are_counted(before: Any, count: int) -> None:
    made = history.replayed(
        Properties.of({names.REPLAYED: before, names.RETRY_COUNT: 3, names.ERROR_TYPE: "E"}),
        when=NOW, message_id="new", frame_max=FRAME,
    )  # fmt: skip
    assert made.headers == {
        names.REPLAYED: {"count": count, "when": "2026-01-02T03:04:05.678+00:00"}
    }


# --- why it is parked, and whose it is ----------------------------------------------------------


def death(reason: Any, queue: Any = "q") -> dict[str, Any]:
    return {"x-death": [{"reason": reason, "queue": queue, "count": 1}]}


UNKNOWN = "unknown: put here by neither a worker nor the broker"
DIED = "its worker died with it, or lost its connection, too often (delivery limit)"
EXPIRED = "expired in its queue before a worker took it (its publisher's time limit)"
OURS = {names.PARKED_REASON: "failed 3 attempts of 3", names.ORIGIN_QUEUE: "q"}


@pytest.mark.parametrize(
    ("headers", "reason", "origin"),
    [
        (OURS, "failed 3 attempts of 3", "q"),
        (death("delivery_limit"), DIED, "q"),
        (death("rejected"), "rejected by its consumer", "q"),
        (death("expired"), EXPIRED, "q"),
        (death("maxlen"), "pushed out of its queue by a length limit", "q"),
        (death("else"), "dead-lettered by the broker: else", "q"),
        # A death record is the broker's and later than anything that a publisher forged.
        ({**OURS, **death("rejected", "other")}, "rejected by its consumer", "other"),
        ({}, UNKNOWN, None),
        ({names.PARKED_REASON: 5, names.ORIGIN_QUEUE: 5}, UNKNOWN, None),
        ({"x-death": []}, UNKNOWN, None),
        ({"x-death": "x"}, UNKNOWN, None),
        ({"x-death": [5]}, UNKNOWN, None),
        (death(None, 5), "dead-lettered by the broker: None", None),
        (death("rejected", ""), "rejected by its consumer", None),
    ],
)  # fmt: skip
def test_a_parked_message_says_why_and_whose_it_is(
    headers: dict[str, Any], reason: str, origin: str | None
) -> None:
    properties = Properties.decode(Properties.of(headers).encode())
    assert history.reason(properties) == reason
    assert history.origin(properties) == origin


@given(VALUES, VALUES)
def test_the_reason_is_text_whatever_the_headers(forged: bytes, ours: bytes) -> None:
    properties = of_table(entry("x-death", forged) + entry(names.PARKED_REASON, ours))
    assert isinstance(history.reason(properties), str)
    assert isinstance(history.origin(properties), str | None)
