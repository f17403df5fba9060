"""Deaths of workers, counted: what follows, how they are read, and what a copy says of them."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbit_tasks import Parked, history
from rabbit_tasks import message as names
from rabbit_tasks.cli.parked.page import full, text_of
from rabbit_tasks.parking import ParkedMessage
from rabbit_tasks.properties import Properties
from rabbit_tasks.retry import CRASH_DELAYS, Crashed, after_crash
from tests.support.tables import VALUES, of_table

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
WHEN = "2026-01-02T03:04:05.678+00:00"
FRAME = 131_072
JUST_UNDER_ONE = 1 - 2**-53
RUN, WAIT = "run", "wait"


# --- what follows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deaths", "deliveries", "limit", "then"),
    [
        (0, 1, 5, RUN),  # a lost connection, which says nothing
        (1, 1, 5, RUN),  # at once after a first death
        (0, 2, 5, WAIT),  # nobody died, and yet the broker's count must not grow
        (1, 2, 5, WAIT),
        (2, 1, 5, WAIT),
        (2, 2, 5, WAIT),
        (5, 1, 5, WAIT),
        (6, 1, 5, 6),
        (6, 6, 5, 6),
        (1_000_000, 1, 5, 1_000_000),
        (0, 1, 1, WAIT),  # one more, and the broker would park it
        (1, 1, 1, WAIT),
        (2, 1, 1, 2),
        (0, 1, 2, RUN),
        (1, 1, 2, RUN),
        (2, 1, 2, WAIT),
        (3, 1, 2, 3),
    ],
)
def test_it_is_run_at_once_or_after_a_pause_or_parked(
    deaths: int, deliveries: int, limit: int, then: str | int
) -> None:
    outcome = after_crash(deaths, deliveries, limit=limit, draw=0)
    match then:
        case "run":
            assert outcome is None
        case "wait":
            assert outcome == Crashed(CRASH_DELAYS[0])
        case _:
            assert outcome == Parked(f"its worker died {then} times")


def test_the_draw_chooses_among_all_pauses() -> None:
    draws = [0.0, 0.25, 0.5, JUST_UNDER_ONE]
    outcomes = [after_crash(2, 1, limit=5, draw=draw) for draw in draws]
    assert outcomes == [Crashed(delay) for delay in CRASH_DELAYS]
    assert min(CRASH_DELAYS) >= timedelta(seconds=1)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 20), st.floats(0, JUST_UNDER_ONE))
def test_it_is_parked_after_more_deaths_than_the_limit_and_never_earlier(
    deaths: int, deliveries: int, limit: int, draw: float
) -> None:
    outcome = after_crash(deaths, deliveries, limit=limit, draw=draw)
    assert isinstance(outcome, Parked) == (deaths > limit)
    if outcome is None:
        assert deaths < 2
        assert deliveries < min(2, limit)  # the broker's count stays under its limit


@pytest.mark.parametrize("limit", range(1, 12))
def test_workers_that_die_each_time_are_one_more_than_the_limit(limit: int) -> None:
    """By the broker's count between two copies, and by ours over all."""
    known, count, died = 0, 0, 0
    while True:
        if count:
            outcome = after_crash(known + count, count, limit=limit, draw=0.5)
            if isinstance(outcome, Parked):
                break
            if outcome is not None:
                known, count = known + count, 0
        died += 1  # it is run, and its worker dies
        count += 1
        assert count <= limit, "the broker would park it itself"
    assert died == limit + 1


# --- how they are read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "known"),
    [
        (None, 0), ({"count": 0}, 0), ({"count": 3}, 3), ({"count": 3, "worker": 5}, 3),
        ({}, 0), ({"count": -1}, 0), ({"count": True}, 0), ({"count": "3"}, 0), ({"count": 3.0}, 0),
        ({"count": None}, 0), ({"count": 2**62}, names.MAX_COUNT), ({"count": [3]}, 0),
        (3, 0), ("3", 0), ([{"count": 3}], 0), (b"3", 0),
    ],
)  # fmt: skip
def test_known_deaths_are_read_from_our_own_header_alone(header: Any, known: int) -> None:
    properties = Properties.decode(Properties.of({names.CRASHES: header}).encode())
    assert names.crashes(properties) == known


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 1),  # 4.3, where a consumer's time was over; and a redelivery without a count
        ({"x-delivery-count": 1}, 1),
        ({"x-delivery-count": 4}, 4),
        ({"x-delivery-count": 0}, 1),
        ({"x-delivery-count": -3}, 1),
        ({"x-delivery-count": "4"}, 1),
        ({"x-delivery-count": True}, 1),
        ({"x-delivery-count": 2**62}, names.MAX_COUNT),
        ({"x-acquired-count": 3}, 3),
        ({"x-delivery-count": 2, "x-acquired-count": 9}, 2),  # 3.10 and 4.0 leave it as it was sent
        ({"x-delivery-count": "x", "x-acquired-count": 9}, 1),
        ({"x-acquired-count": "9"}, 1),
    ],
)
def test_deliveries_are_the_brokers_count_from_one(headers: dict[str, Any], expected: int) -> None:
    assert names.deliveries(Properties.of(headers)) == expected


@given(VALUES, VALUES, VALUES)
def test_forged_counts_are_read_as_numbers_within_bounds(
    forged: bytes, count: bytes, acquired: bytes
) -> None:
    entries = [(names.CRASHES, forged), ("x-delivery-count", count), ("x-acquired-count", acquired)]
    properties = of_table(
        b"".join(bytes([len(name)]) + name.encode() + value for name, value in entries)
    )
    assert 0 <= names.crashes(properties) <= names.MAX_COUNT
    assert 1 <= names.deliveries(properties) <= names.MAX_COUNT


# --- what a copy says of them ---------------------------------------------------------------------


def copy_of(
    outcome: Crashed | Parked, deaths: int, before: Properties, frame_max: int = FRAME
) -> Properties | None:
    headers = history.after_crash(outcome, deaths, before, queue="q", now=NOW, worker="here:1")
    made = history.copy(before, headers, message_id="new", frame_max=frame_max)
    return None if made is None else Properties.decode(made.encode())


WAITS = Crashed(CRASH_DELAYS[0])
DIED = Parked("its worker died 6 times")
FAILED = {
    names.RETRY_COUNT: 2, names.ORIGIN_QUEUE: "q", names.ERROR_TYPE: "E", names.ERROR_MESSAGE: "m",
    names.ERROR_STACK: "s", names.ATTEMPTS: [{"attempt": 1, "error": "E: m"}],
}  # fmt: skip


def test_a_copy_that_waits_says_how_many_died_and_who_had_it_last() -> None:
    copy = copy_of(WAITS, 2, Properties.of({"theirs": 1}, message_id="m", reply_to="r"))
    assert copy is not None
    assert copy.headers == {
        "theirs": 1,
        "x-origin-queue": "q",
        "x-crashes": {"count": 2, "worker": "here:1", "when": WHEN},
    }
    assert (copy.text("message_id"), copy.text("reply_to")) == ("m", "r")
    assert names.crashes(copy) == 2
    assert names.retry_count(copy) == 0  # a death is no attempt


def test_a_copy_keeps_the_failures_before_and_their_number() -> None:
    for outcome in (WAITS, DIED):
        copy = copy_of(outcome, 2, Properties.of(FAILED))
        assert copy is not None
        assert {name: copy.header(name) for name in FAILED} == FAILED


def test_a_parked_one_says_why_and_since_when() -> None:
    copy = copy_of(DIED, 6, Properties.of({names.CRASHES: {"count": 5, "worker": "there:9"}}))
    assert copy is not None
    assert history.reason(copy) == "its worker died 6 times"
    assert copy.header("x-parked-at") == WHEN
    assert copy.header("x-crashes") == {"count": 6, "worker": "here:1", "when": WHEN}
    assert history.origin(copy) == "q"


def test_a_pause_that_is_nobodys_death_is_marked_all_the_same() -> None:
    """By the mark it finds the run that goes on in this process."""
    copy = copy_of(WAITS, 0, Properties.of())
    assert copy is not None
    assert copy.header("x-crashes")["count"] == 0


def test_an_outcome_ends_the_count() -> None:
    before = copy_of(WAITS, 2, Properties.of())
    assert before is not None
    failed = history.copy(before, {names.RETRY_COUNT: 1}, message_id="new", frame_max=FRAME)
    replayed = history.replayed(before, when=NOW, message_id="new", frame_max=FRAME)
    returned = history.returned(before, message_id="new", frame_max=FRAME)
    assert failed is not None
    assert failed.header(names.CRASHES) is replayed.header(names.CRASHES) is None
    assert names.crashes(returned) == 2  # put back at a stop: no outcome, nothing is forgotten


@given(*[VALUES] * 5)
def test_forged_headers_never_hinder_a_copy(
    count: bytes, kind: bytes, text: bytes, stack: bytes, attempts: bytes
) -> None:
    forged = {
        names.RETRY_COUNT: count, names.ERROR_TYPE: kind, names.ERROR_MESSAGE: text,
        names.ERROR_STACK: stack, names.ATTEMPTS: attempts,
    }  # fmt: skip
    before = of_table(
        b"".join(bytes([len(name)]) + name.encode() + value for name, value in forged.items())
    )
    for outcome in (WAITS, DIED):
        copy = copy_of(outcome, 3, before)
        assert copy is not None
        assert names.crashes(copy) == 3
        assert names.retry_count(copy) == names.retry_count(before)
        for name in (names.ERROR_TYPE, names.ERROR_MESSAGE, names.ERROR_STACK):
            assert isinstance(copy.header(name), str | None)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (b"S\0\0\0\1\xff", False),  # not UTF-8
        (b"d" + struct.pack(">d", float("nan")), False),  # which would cost the connection
        (b"S\0\0\0\1x", True),
    ],
)
def test_of_forged_errors_only_text_is_kept(value: bytes, kept: bool) -> None:
    name = names.ERROR_TYPE.encode()
    copy = copy_of(WAITS, 2, of_table(bytes([len(name)]) + name + value))
    assert copy is not None
    assert (names.ERROR_TYPE in copy.headers) == kept


def test_where_room_is_short_errors_go_first_and_the_count_last() -> None:
    tried = [{"attempt": number, "error": "e" * 250} for number in range(20)]
    before = {
        **FAILED, names.ERROR_STACK: "s" * 16_000, names.ERROR_MESSAGE: "m" * 2_000,
        names.ATTEMPTS: tried,
    }  # fmt: skip
    seen = set()
    for size in [*range(FRAME - 40_000, FRAME - 1_000, 997), *range(FRAME - 1_000, FRAME, 7)]:
        room = size - Properties.of({"theirs": b""}).frame_size()
        copy = copy_of(WAITS, 2, Properties.of({**before, "theirs": b"x" * room}))
        if copy is None:
            seen.add(0)
            continue
        assert copy.frame_size() <= FRAME
        assert (names.crashes(copy), names.retry_count(copy)) == (2, 2)
        assert len(copy.header("theirs")) == room
        seen.add(len(copy.headers))
    assert seen == {8, 7, 6, 5, 4, 0}


# --- what a person is shown -----------------------------------------------------------------------


def test_a_parked_message_tells_its_deaths_and_not_how_often_it_was_looked_at() -> None:
    told = {"count": 6, "worker": "host:7", "when": "2026-01-01T00:00:00.000+00:00"}
    headers = {names.CRASHES: told, "x-delivery-count": 3, "x-acquired-count": 3, "theirs": 1}
    message = ParkedMessage(1, b"{}", Properties.of(headers, message_id="m"))
    text = text_of(message)
    assert "deaths    6; last known in the hands of host:7, 2026-01-01T00:00:00.000+00:00" in text
    assert "theirs: 1" in text
    assert "x-delivery-count" not in text
    assert "x-acquired-count" not in text
    machine = full(message)
    assert machine["deaths"] == 6
    assert machine["headers"] == {names.CRASHES: told, "theirs": 1}


@pytest.mark.parametrize("forged", [5, [], {"count": 6}, {"count": 6, "worker": 5, "when": "x"}])
def test_deaths_that_somebody_forged_are_shown_all_the_same(forged: Any) -> None:
    message = ParkedMessage(1, b"{}", Properties.of({names.CRASHES: forged}))
    assert ("deaths    6; last known in the hands of -, -" in text_of(message)) is (
        isinstance(forged, dict)
    )


def test_of_a_message_that_nobody_died_of_no_deaths_are_told() -> None:
    assert "deaths" not in text_of(ParkedMessage(1, b"{}", Properties.of({})))
