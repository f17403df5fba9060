"""Properties travel as the bytes they came as, and reading them never fails."""

from __future__ import annotations

import math
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic
from pamqp.decode import field_table

from rabbit_tasks.message import RETRY_COUNT, Message, is_brokers, retry_count
from rabbit_tasks.properties import Properties, Seconds
from tests.support.tables import TABLES, of_table, prefixed, property_lists


def read_everything(properties: Properties) -> None:
    message = Message("q", b"", properties)
    for name in dir(message):
        if not name.startswith("_"):
            getattr(message, name)
    repr(message)
    for name in properties.headers:
        properties.header(name[:80])
    for name in ("cluster_id", "user_id", "expiration"):
        properties.text(name)
    properties.frame_size()


# --- what must hold -----------------------------------------------------------------------------


@given(property_lists())
def test_a_property_list_is_encoded_as_it_came(raw: bytes) -> None:
    assert Properties.decode(raw).encode() == raw


@given(property_lists())
def test_a_copy_leaves_every_foreign_byte_as_it_was(raw: bytes) -> None:
    before = Properties.decode(raw)
    again = Properties.decode(before.replace({}).encode())
    assert again.table == before.table
    for name in ("content_type", "correlation_id", "reply_to", "message_id", "type", "user_id"):
        assert again.text(name) == before.text(name)
    for name in ("delivery_mode", "priority", "timestamp"):
        assert again.number(name) == before.number(name)
    had_headers = raw[0] & (1 << 5)
    expected = raw if had_headers else again.encode()
    assert before.replace({}).encode() == expected


@given(TABLES)
def test_our_headers_are_found_again_beside_any_foreign_table(raw: bytes) -> None:
    before = of_table(raw)
    copy = before.replace({RETRY_COUNT: 3}, without=is_brokers)
    after = Properties.decode(copy.encode())
    assert retry_count(after) == 3
    foreign = [entry for entry in after.table if entry[0][1:] != RETRY_COUNT.encode()]
    assert foreign == before.table
    # … and nothing piles up from one retry to the next.
    twice = after.replace({RETRY_COUNT: 4}, without=is_brokers)
    assert len(twice.encode()) == len(copy.encode())


@given(st.one_of(property_lists(), st.binary(max_size=200)), st.integers(0, 200))
def test_reading_never_raises_whatever_the_bytes(raw: bytes, length: int) -> None:
    for cut in (raw, raw[:length]):
        properties = Properties.decode(cut)
        assert properties.encode() == cut
        read_everything(properties)
        copy = properties.replace({RETRY_COUNT: 1}, delivery_mode=2, message_id="m")
        assert retry_count(Properties.decode(copy.encode())) == 1


@given(st.binary(max_size=200))
def test_reading_a_table_of_any_bytes_never_raises(raw: bytes) -> None:
    properties = of_table(raw)
    read_everything(properties)
    assert properties.replace({}).encode() == properties.encode()


@pytest.mark.parametrize("kind", [b"A", b"F"])
def test_nesting_deeper_than_our_stack_is_read_as_bytes(kind: bytes) -> None:
    raw = b"I\0\0\0\1"
    for _ in range(5_000):
        raw = b"A" + prefixed(raw) if kind == b"A" else b"F" + prefixed(b"\1a" + raw)
    properties = of_table(b"\1a" + raw)
    read_everything(properties)
    assert properties.replace({}).encode() == properties.encode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"t\1", True), (b"t\0", False), (b"b\xff", -1), (b"B\xff", 255), (b"s\xff\xff", -1),
        (b"u\xff\xff", 65535), (b"I\xff\xff\xff\xff", -1), (b"i\xff\xff\xff\xff", 2**32 - 1),
        (b"l" + b"\xff" * 8, -1), (b"L" + b"\xff" * 8, 2**64 - 1),
        (b"f" + struct.pack(">f", 0.5), 0.5), (b"d" + struct.pack(">d", 0.1), 0.1),
        (b"D\2\0\0\0\xfa", Decimal("2.50")), (b"D\xff\0\0\0\1", Decimal("1E-255")),
        (b"S\0\0\0\2\xc3\xbc", "ü"), (b"S\0\0\0\1\xff", b"\xff"), (b"x\0\0\0\1a", b"a"),
        (b"A\0\0\0\4t\1t\0", [True, False]), (b"F\0\0\0\4\1at\1", {"a": True}),
        (b"T" + (0).to_bytes(8, "big"), datetime(1970, 1, 1, tzinfo=UTC)),
        (b"T" + b"\xff" * 8, Seconds(2**64 - 1)), (b"V", None), (b"\0", None), (b"?12", b"?12"),
        (b"I\0", b"I\0"),
    ],
)  # fmt: skip
def test_every_type_tag_is_read(value: bytes, expected: Any) -> None:
    properties = of_table(b"\1k" + value)
    found = properties.header("k")
    assert found == expected
    assert type(found) is type(expected)
    assert properties.headers == {"k": expected}


@pytest.mark.parametrize(
    "value",
    [b"S\0\0\0\x012", b"t\1", b"I\xff\xff\xff\xff", b"d" + struct.pack(">d", 2.0), b"x\0\0\0\x012",
     b"A\0\0\0\0", b"F\0\0\0\0", b"V", b"T" + b"\0" * 8, b"D\0\0\0\0\2", b"?"],
)  # fmt: skip
def test_a_forged_retry_count_reads_as_none(value: bytes) -> None:
    properties = of_table(bytes([len(RETRY_COUNT)]) + RETRY_COUNT.encode() + value)
    assert retry_count(properties) == 0
    assert Message("q", b"", properties).attempt == 1


@pytest.mark.parametrize("value", [10**12, 2**64 - 1])
def test_a_huge_retry_count_reads_as_a_million(value: int) -> None:
    raw = bytes([len(RETRY_COUNT)]) + RETRY_COUNT.encode() + b"L" + value.to_bytes(8, "big")
    assert retry_count(of_table(raw)) == 1_000_000


# --- what we write, read by another library -----------------------------------------------------

WRITABLE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False), st.text(), st.binary(),
        # (pamqp takes more than 32 bits of seconds for milliseconds)
        st.datetimes(datetime(1970, 1, 1), datetime(2106, 1, 1), timezones=st.just(UTC)).map(
            lambda when: when.replace(microsecond=0)
        ),
        # (pamqp takes the 32 bits of a decimal for unsigned)
        st.decimals(0, 1_000, places=3),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(max_size=20), inner)),
    max_leaves=10,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=20), WRITABLE))
def test_what_we_write_is_what_pamqp_and_we_ourselves_read(headers: dict[str, Any]) -> None:
    properties = Properties.of(headers)
    raw = properties.encode()[2:] or b"\0\0\0\0"
    consumed, theirs = field_table(raw)
    assert consumed == len(raw)
    # pamqp has no binary value that it would not try to read as text, so ours is the stricter.
    assert as_text(theirs) == as_text(headers)
    assert Properties.decode(properties.encode()).headers == headers


def as_text(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, list):
        return [as_text(item) for item in value]
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    return value


def test_properties_are_what_pamqp_reads() -> None:
    values: dict[str, Any] = {
        "content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2,
        "priority": 7, "correlation_id": "c", "reply_to": "r", "expiration": "5", "message_id": "ü",
        "timestamp": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "type": "t", "user_id": "u",
        "app_id": "a", "cluster_id": "",
    }  # fmt: skip
    raw = Properties.of({"a": 1}, **values).encode()
    theirs = Basic.Properties()
    theirs.unmarshal(struct.unpack(">H", raw[:2])[0], raw[2:])
    values["message_type"] = values.pop("type")
    assert {name: getattr(theirs, name) for name in values} == values
    assert theirs.headers == {"a": 1}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.inf, "header k is inf"), (math.nan, "header k is nan"),
        (2**63, "beyond 64 bits"), (-(2**63) - 1, "beyond 64 bits"),
        (datetime(1969, 12, 31, 23, 59, 59, 500_000, tzinfo=UTC), "header k is before 1970"),
        (Decimal(2**31), "32 bits and 255 places"), (Decimal("1E-256"), "255 places"),
        (Decimal("1E+999999999"), "32 bits"), (Decimal("NaN"), "header k is NaN"),
        (Decimal("Infinity"), "header k is Infinity"), (Decimal("1." + "1" * 50), "32 bits"),
        (object(), "header k is a object"), ({1, 2}, "header k is a set"),
        ("\udc80", "header k has a lone surrogate"),
        ([1, {"in": math.nan}], r"header k\[1\] in is nan"),
        ({"n" * 256: 1}, "header k name has 256 bytes"), ({1: 1}, "header k name is 1, not text"),
    ],
)  # fmt: skip
def test_what_amqp_cannot_carry_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Properties.of({"k": value})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"priority": 256}, "property priority must be from 0 to 255"),
        ({"priority": "high"}, "property priority must be from 0 to 255, not 'high'"),
        ({"type": "x" * 256}, "property type has 256 bytes"),
        ({"reply_to": 5}, "property reply_to is 5, not text"),
        ({"timestamp": 5}, "property timestamp is 5, not a datetime"),
        ({"prioritty": 5}, "no such property: prioritty"),
    ],
)
def test_a_wrong_property_is_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Properties.of(**values)


def test_integers_take_32_or_64_bits_and_floats_64() -> None:
    values = {"a": 2**31 - 1, "b": 2**31, "c": -(2**63), "d": 0.1}
    assert [value[:1] for _, value in Properties.of(values).table] == [b"I", b"l", b"l", b"d"]
    assert Properties.of(values).headers == values
