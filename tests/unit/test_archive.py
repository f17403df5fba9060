"""The archive's lines: what goes out comes back, and what does not is said."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbit_tasks.errors import ParkingError
from rabbit_tasks.parking import ParkedMessage, archive
from rabbit_tasks.parking.discarding import Asked
from rabbit_tasks.parking.parked import identity, kept
from rabbit_tasks.properties import Properties
from tests.support.tables import property_lists

TYPES = {
    "text": "grün", "int": -(2**40), "float": 0.1, "yes": True, "nothing": None, "raw": b"\xff\0",
    "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "price": Decimal("1.10"),
    "list": [1, "two", {"three": 3.5}], "table": {"in": {"side": False}},
}  # fmt: skip


def line(body: bytes = b"body", properties: Properties | None = None) -> bytes:
    given = properties or Properties.of(TYPES, message_id="m", delivery_mode=2, priority=3)
    return archive.line_of("q.parked", ParkedMessage(1, body, given))


def changed(**values: Any) -> bytes:
    """A line with other values; those of None are taken out."""
    found = {**json.loads(line()), **values}
    return json.dumps({k: v for k, v in found.items() if v is not None}).encode() + b"\n"


def wrong(*lines: bytes) -> str:
    with pytest.raises(ParkingError) as raised:
        list(archive.read(io.BytesIO(b"".join(lines))))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@given(body=st.one_of(st.binary(), st.text().map(str.encode)), raw=property_lists())
def test_what_goes_out_comes_back_byte_for_byte(body: bytes, raw: bytes) -> None:
    properties = Properties.decode(raw)
    found = archive.archived(line(body, properties))
    assert found.body == body
    assert found.properties.encode() == kept(properties).encode()


@given(raw=property_lists())
def test_a_line_is_one_line_of_ascii_that_no_terminal_obeys(raw: bytes) -> None:
    told = line("\x1b[2J\u202e\r\n\x9b".encode(), Properties.decode(raw))
    assert told.endswith(b"\n")
    assert told[:-1].isascii()
    assert told[:-1].decode().isprintable()


def test_a_body_is_text_where_it_is_utf8_and_base64_where_it_is_not() -> None:
    assert json.loads(line("grün\n".encode()))["body"] == {"text": "grün\n"}
    assert json.loads(line(b"\xff"))["body"] == {"base64": "/w=="}
    assert json.loads(line(b""))["body"] == {"text": ""}


def test_what_the_broker_counts_of_looks_stays_out_and_what_others_wrote_does_not() -> None:
    parked = Properties.of({"a": 1, "x-death": [{"count": 1}]}, message_id="m")
    looked_at = Properties.of(
        {"a": 1, "x-death": [{"count": 1}], "x-delivery-count": 3, "x-acquired-count": 4},
        message_id="m",
    )
    assert archive.archived(line(b"", looked_at)).properties.encode() == parked.encode()
    # Without any header before the looks: without any afterwards.
    bare = Properties.of({"x-delivery-count": 3}, message_id="m")
    assert kept(bare).encode() == Properties.of(message_id="m").encode()


def test_a_body_may_be_edited_and_properties_are_refused_unless_raw_is_taken_out() -> None:
    assert archive.archived(changed(body={"text": "mended"})).body == b"mended"
    readable = json.loads(line())["properties"]
    edited = {**readable, "headers": {**readable["headers"], "text": "other"}}
    said = wrong(line(), changed(properties=edited))
    assert said.startswith("line 2: its properties were edited")
    assert "take raw out" in said
    found = archive.archived(changed(properties=edited, raw=None)).properties
    assert found.header("text") == "other"
    assert found.header("int") == -(2**40)
    assert found.header("float") == 0.1
    assert found.header("yes") is True
    assert found.header("nothing") is None
    assert found.header("list") == [1, "two", {"three": 3.5}]
    assert found.header("when") == "2026-01-02T03:04:05+00:00"  # a text from now on
    assert found.number("priority") == 3
    timed = {**readable, "timestamp": "2026-01-02T03:04:05+00:00"}
    when = archive.archived(changed(properties=timed, raw=None)).properties.timestamp
    assert when == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_blank_lines_are_none_and_numbers_are_those_of_an_editor() -> None:
    file = io.BytesIO(b"\n" + line(b"a") + b"  \n" + line(b"b").rstrip(b"\n"))
    assert [(number, one.body) for number, one in archive.read(file)] == [(2, b"a"), (4, b"b")]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (line()[:100], "cut short: the file ends in the middle of it"),
        (line()[:100] + b"\n", "not JSON"),
        (b"\x00\x01PNG\xff\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON: nested too deep"),
        (b"{}\n", "not of an archive: `rabbit-tasks parked export` writes those"),
        (b"[1]\n", "not of an archive"),
        (b'{"rabbit_tasks": true}\n', "not of an archive"),
        (changed(rabbit_tasks=2), "an archive of version 2, by another release"),
        (changed(body="text"), "its body is neither"),
        (changed(body={"text": "a", "base64": ""}), "its body is neither"),
        (changed(body={"text": "\ud800"}), "lone surrogate"),
        (changed(body={"base64": "%"}), "its body is not base64"),
        (changed(raw="%"), "its raw is not base64"),
        (changed(raw=b64encode(b"\xff\xff\x01").decode()), "its raw is no property list"),
        (changed(raw=7), "its raw is no property list"),
        (changed(properties=None), "it has no properties"),
        (changed(properties=[1]), "it has no properties"),
        (changed(raw=None, properties={"headers": 1}), "its headers are no object"),
        (changed(raw=None, properties={"colour": "x"}), "no such property: colour"),
        (changed(raw=None, properties={"priority": 256}), "must be from 0 to 255"),
        (changed(raw=None, properties={"message_id": 5}), "property message_id is 5, not text"),
        (changed(raw=None, properties={"timestamp": "soon"}), "soon"),
        (changed(raw=None, properties={"headers": {"n": 2**64}}), "beyond 64 bits"),
    ],
)  # fmt: skip
def test_a_bad_line_is_told_by_its_number_in_one_line(bad: bytes, said: str) -> None:
    told = wrong(line(), line(), bad)
    assert told.startswith("line 3: ")
    assert said in told
    assert len(told) < 400


def test_a_line_that_never_ends_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LONGEST", 1000)
    assert wrong(b'"' + b"x" * 5000) == "line 1: longer than 1000 bytes, as no message is"


def test_an_import_says_what_went_by_line() -> None:
    assert str(archive.Imported(count=5, through=7)) == "5 imported, all to line 7"
    partly = archive.Imported(count=8, through=4, beyond=[6, 7, 8, 10], maybe=[5, 9])
    assert str(partly) == (
        "8 imported, all to line 4; line 6-8, 10 as well; nobody knows of line 5, 9"
    )
    assert str(archive.Imported()) == "0 imported"


def parked(body: bytes, **headers: Any) -> ParkedMessage:
    return ParkedMessage(1, body, Properties.of(headers, message_id="m"))


def test_a_message_is_itself_after_a_look_and_no_other() -> None:
    one = parked(b"a", kind=1)
    again = ParkedMessage(
        7, b"a", Properties.of({"kind": 1, "x-delivery-count": 2}, message_id="m")
    )
    assert identity(one) == identity(again)
    others = [parked(b"b", kind=1), parked(b"a", kind="1"), parked(b"a"), parked(b"", kind=1)]
    assert len({identity(other) for other in (one, *others)}) == 5


def test_those_that_were_asked_about_are_met_as_often_as_they_were_there() -> None:
    asked = Asked()
    twin = parked(b"twin", **{"x-error-type": "app.Broken"})
    for message in (twin, twin, parked(b"one", **{"x-parked-reason": "told to"})):
        asked.add(message)
    assert asked.kinds == {"app.Broken": 2, "told to": 1}
    assert asked.count == 3
    assert [asked(twin) for _ in range(4)] == [True, True, False, False]
    assert not asked(parked(b"parked meanwhile", **{"x-error-type": "app.Broken"}))
    assert asked.count == 3
