"""Which parked messages are meant: the filters, as a value."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from rabbit_tasks.parking import Choice, ParkedMessage
from rabbit_tasks.parking.choice import Match
from rabbit_tasks.properties import Properties

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)


def message(body: Any = None, name: str = "a", **headers: Any) -> ParkedMessage:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = {key.replace("_", "-"): value for key, value in headers.items()}
    return ParkedMessage(1, raw, Properties.of(told, message_id=name))


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("id=7", {"id": 7}), ("id=7", {"id": 7.0}), ("id=7.0", {"id": 7}), ("id=7", {"id": "7"}),
        ('id="7"', {"id": "7"}), ("ok=true", {"ok": True}), ("no=null", {"no": None}),
        ("name=Zoë B", {"name": "Zoë B"}), ("name=", {"name": ""}), ("a=b=c", {"a": "b=c"}),
        ("user.id=7", {"user": {"id": 7}}), ("items.1.sku=B", {"items": [{}, {"sku": "B"}]}),
        ("a.b=1", {"a.b": 1}), ("a.b.c=1", {"a": {"b.c": 1}}), ("0=1", [1]), ("0=1", {"0": 1}),
        ('tags=["x", 1]', {"tags": ["x", 1]}), ('at={"x":1}', {"at": {"x": 1}}),
        (".header.x=1", {"header": {"x": 1}}), ("=x".join(["a", ""]), {"a": "x"}),
    ],
)  # fmt: skip
def test_a_field_of_the_body_has_its_value(field: str, body: Any) -> None:
    assert Choice(match=(Match.of(field),))(message(body))


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("id=7", {"id": 8}), ("id=7", {}), ("id=7", [7]), ("id=7", 7), ('id="7"', {"id": 7}),
        ("ok=1", {"ok": True}), ("ok=true", {"ok": 1}), ("no=null", {}), ("id=7", b"\xff not JSON"),
        ("id=7", b""), ("a.b=1", {"a": 1}), ("0=1", []), ("1=x", ["x"]), ("-1=x", ["x"]),
        ("a=1", b'{"a": ' + b"[" * 100_000), ("header.x=1", {"header": {"x": 1}}),
        ("99999999999999999999=1", [1]), ('tags=["x"]', {"tags": ["x", 1]}),
    ],
)  # fmt: skip
def test_another_body_has_not(field: str, body: Any) -> None:
    assert not Choice(match=(Match.of(field),))(message(body))


@pytest.mark.parametrize(
    ("field", "matches"),
    [
        ("header.tenant=acme", True), ("header.tenant=other", False), ("header.n=3", True),
        ("header.raw=ab", True), ("header.price=1.5", True), ("header.t.x=1", True),
        ("header.dotted.name=1", True), ("header.missing=", False),
        ("header.at=2026-01-02T12:00:00+00:00", True),
    ],
)  # fmt: skip
def test_a_header_has_its_value(field: str, matches: bool) -> None:
    headers: dict[str, Any] = {
        "tenant": "acme", "n": 3, "raw": b"ab", "price": Decimal("1.5"), "t": {"x": 1},
        "dotted.name": 1, "at": NOW,
    }  # fmt: skip
    assert Choice(match=(Match.of(field),))(message(b"no JSON", **headers)) == matches


@pytest.mark.parametrize("text", ["", "x", "=1", "header.=1", ".=1", "\x1b[2J"])
def test_what_is_no_field_and_value_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="is not FIELD=VALUE") as refused:
        Match.of(text)
    assert str(refused.value).isprintable()


def test_all_fields_must_match() -> None:
    both = Choice(match=(Match.of("a=1"), Match.of("header.b=2")))
    assert both(message({"a": 1}, b=2))
    assert not both(message({"a": 1}, b=3))
    assert not both(message({"a": 2}, b=2))


def test_every_message_of_known_time_is_either_older_or_newer_and_of_unknown_time_neither() -> None:
    two = timedelta(hours=2)
    older, newer = Choice(older_than=two, now=NOW), Choice(newer_than=two, now=NOW)
    for at, is_older in [
        ("2026-01-02T09:59:59+00:00", True), ("2026-01-02T10:00:00+00:00", True),
        ("2026-01-02T10:00:00.001+00:00", False), ("2026-01-02T13:30:00+02:00", False),
        ("2026-01-02T09:00:00", True), ("2027-01-01T00:00:00+00:00", False),
    ]:  # fmt: skip
        one = message(x_parked_at=at)
        assert (older(one), newer(one)) == (is_older, not is_older), at
    unknown: list[dict[str, Any]] = [{}, {"x_parked_at": "yesterday"}, {"x_parked_at": 7}]
    for headers in unknown:
        one = message(**headers)
        assert not older(one)
        assert not newer(one)
    with pytest.raises(ValueError, match="now"):
        Choice(older_than=two)


def test_a_reason_has_the_text_in_capitals_or_not() -> None:
    one = message(x_parked_reason="Failed 5 attempts\x1b of 5")
    assert Choice(reason="failed 5")(one)
    assert Choice(reason="attempts\\x1b")(one)
    assert not Choice(reason="worker died")(one)


def test_a_group_is_its_fingerprint_and_filters_go_together() -> None:
    one = message({"a": 1}, name="x\x1b", x_error_type="shop.Bad", x_parked_reason="r")
    assert Choice(group=one.fingerprint, error="Bad", ids=("x\\x1b",), reason="r")(one)
    assert not Choice(group="0" * 12)(one)
    assert not Choice(group=one.fingerprint, error="Worse")(one)


def test_it_remembers_the_ids_it_met_and_a_replaced_one_has_met_none() -> None:
    choice = Choice(ids=("a", "b"))
    assert choice(message())
    assert choice.absent(1) == ["b"]
    assert replace(choice).absent(0) == ["a", "b"]
    assert choice == replace(choice)
