"""The properties of a message, kept as the bytes that the broker sent.

A message travels through retry and parking queues as a copy, and a copy must not change what a
publisher wrote. Client libraries decode properties into Python values and encode those again, on
which way a double becomes 32 bits wide, a byte a word, and text that is not UTF-8 an error. Here a
value is decoded only for a reader; what is copied is its bytes.

The format is AMQP 0-9-1's property list and field table, with RabbitMQ's type tags
(https://www.rabbitmq.com/amqp-0-9-1-errata): one letter, then the value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from typing import Any, Final

FRAME_OVERHEAD: Final = 8
"""Bytes of a frame that are not its payload: type, channel, length, end mark."""

_CONTENT_HEADER: Final = 12
"""Bytes before the property list in a content header frame: class, weight, body size."""

# In wire order; the first has the highest of the flag word's bits. The last of the sixteen says
# that another flag word follows, which the basic class never needs.
_FIELDS: Final = (
    ("content_type", "s"),
    ("content_encoding", "s"),
    ("headers", "F"),
    ("delivery_mode", "B"),
    ("priority", "B"),
    ("correlation_id", "s"),
    ("reply_to", "s"),
    ("expiration", "s"),
    ("message_id", "s"),
    ("timestamp", "T"),
    ("type", "s"),
    ("user_id", "s"),
    ("app_id", "s"),
    ("cluster_id", "s"),
)
_FLAGS: Final = tuple((name, kind, 1 << (15 - i)) for i, (name, kind) in enumerate(_FIELDS))
_FIXED: Final = {
    b"t"[0]: 1, b"b"[0]: 1, b"B"[0]: 1, b"s"[0]: 2, b"u"[0]: 2, b"I"[0]: 4, b"i"[0]: 4, b"f"[0]: 4,
    b"D"[0]: 5, b"l"[0]: 8, b"L"[0]: 8, b"d"[0]: 8, b"T"[0]: 8, b"V"[0]: 0, 0: 0,
}  # fmt: skip
_PREFIXED: Final = frozenset(b"SxAF")
_NUMBERS: Final = {"b": ">b", "B": ">B", "s": ">h", "u": ">H", "I": ">i", "i": ">I", "l": ">q",
                   "L": ">Q", "f": ">f", "d": ">d"}  # fmt: skip

_tagged: Final = struct.Struct(">cI").pack
_LENGTHS: Final = tuple(bytes([size]) for size in range(256))

Table = list[tuple[bytes, bytes]]
"""A field table's entries: a name with its length and a value with its type tag, as they came."""


class Properties:
    """One message's property list.

    Immutable. Made from bytes by `decode` or from Python values by `of`; `encode` gives the bytes
    back unchanged. Reading never raises, whatever the bytes: a message that cannot be read could
    be neither parked nor acked, and would take one worker after another down.
    """

    __slots__ = ("_known", "_raw", "_table")

    def __init__(self, fields: Mapping[str, bytes] | None, raw: bytes | None = None) -> None:
        self._known = fields
        self._raw = raw
        self._table: Table | None = None

    @classmethod
    def decode(cls, raw: bytes) -> Properties:
        """Of a property list as it came: the flag word and what follows it, as far as it goes."""
        return cls(None, raw)

    @property
    def _fields(self) -> Mapping[str, bytes]:
        """Read when somebody asks: most messages are through before anybody does."""
        if self._known is None:
            assert self._raw is not None
            self._known = _fields_of(self._raw)
        return self._known

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None = None, **values: Any) -> Properties:
        """Make a property list from Python values; a value of None leaves its property out.

        Raises ValueError for what AMQP cannot carry, naming the property or header.
        """
        fields = {
            name: _field(name, kind, values.pop(name))
            for name, kind in _FIELDS
            if values.get(name) is not None
        }
        unknown = [name for name, value in values.items() if value is not None]
        if unknown:
            raise ValueError(f"no such property: {', '.join(unknown)}")
        if headers:
            fields["headers"] = _pack_table(_entries(headers))
        return cls(fields)

    def encode(self) -> bytes:
        """The property list as it goes on the wire."""
        if self._raw is None:
            flags = sum(flag for name, _, flag in _FLAGS if name in self._fields)
            parts = (self._fields[name] for name, _ in _FIELDS if name in self._fields)
            self._raw = struct.pack(">H", flags) + b"".join(parts)
        return self._raw

    def raw(self, name: str) -> bytes:
        """A property as it goes on the wire; nothing where it is absent."""
        return self._fields.get(name, b"")

    def frame_size(self) -> int:
        """Bytes of the content header frame that carries these properties."""
        return FRAME_OVERHEAD + _CONTENT_HEADER + len(self.encode())

    @property
    def table(self) -> Table:
        """The headers' entries, undecoded, in their order."""
        if self._table is None:
            raw = self._fields.get("headers")
            self._table = _unpack_table(raw[4:]) if raw else []
        return self._table

    @property
    def headers(self) -> dict[str, Any]:
        """The headers as Python values; text that is not UTF-8 is bytes, names are escaped."""
        return {_name(key): _read(value) for key, value in self.table}

    def header(self, name: str) -> Any:
        """One header's value, or None where it is absent (or null)."""
        wanted = _key(name, "header name")
        # Most messages have none of ours, and foreign ones are not to cost anything.
        if wanted not in self.encode():
            return None
        for key, value in self.table:
            if key == wanted:
                return _read(value)
        return None

    def text(self, name: str) -> str | None:
        """A text property; None where absent. Bytes that are not UTF-8 are shown as \\xNN."""
        raw = self._fields.get(name)
        return None if raw is None else raw[1:].decode("utf-8", "backslashreplace")

    def number(self, name: str) -> int | None:
        """`delivery_mode`, `priority`, or `timestamp` in seconds since 1970; None where absent."""
        raw = self._fields.get(name)
        return None if raw is None else int.from_bytes(raw, "big")

    @property
    def timestamp(self) -> datetime | None:
        """When the publisher says it published; None where absent or out of datetime's range."""
        seconds = self.number("timestamp")
        when = None if seconds is None else _when(seconds)
        return when if isinstance(when, datetime) else None

    def replace(
        self,
        headers: Mapping[str, Any],
        *,
        without: Callable[[str], bool] = lambda _: False,
        drop: tuple[str, ...] = (),
        **values: Any,
    ) -> Properties:
        """A copy with these headers set, the headers that `without` names and `drop`ped properties
        left out, these properties set, and every other byte as it was."""
        fields = {name: raw for name, raw in self._fields.items() if name not in drop}
        for name, kind in _FIELDS:
            if values.get(name) is not None:
                fields[name] = _field(name, kind, values[name])
        ours = _entries(headers)
        taken = {key for key, _ in ours}
        kept = [e for e in self.table if e[0] not in taken and not without(_name(e[0]))]
        # Ours first: what follows a value of unknown length is never found again.
        fields["headers"] = _pack_table(ours + kept)
        copy = Properties(fields)
        copy._table = ours + kept
        return copy

    def without(self, *headers: str) -> Properties:
        """A copy without these headers, and without a table where that leaves none in it."""
        gone = {_key(name, "header name") for name in headers}
        kept = [entry for entry in self.table if entry[0] not in gone]
        fields = {name: raw for name, raw in self._fields.items() if name != "headers"}
        if kept:
            fields["headers"] = _pack_table(kept)
        copy = Properties(fields)
        copy._table = kept
        return copy

    def by_name(self) -> Properties:
        """A copy with its headers sorted, as 3.10 sorts them when it adds one of its own."""
        fields = dict(self._fields)
        if self.table:
            fields["headers"] = _pack_table(sorted(self.table))
        return Properties(fields)

    @property
    def is_whole(self) -> bool:
        """Whether it is a property list to its last byte, whatever stands in its headers.

        (A broker closes the connection on one that is not.)
        """
        return Properties(self._fields).encode() == self.encode()


class Stencil:
    """What the properties of many messages share; the id and the time of each are left open.

    properties  what they share
    """

    __slots__ = ("_after", "_before", "properties")

    def __init__(self, properties: Properties) -> None:
        self.properties = properties
        # Between other fields on the wire; the flag word says that they are there.
        made = properties.encode()
        open_ = sum(flag for name, _, flag in _FLAGS if name in ("message_id", "timestamp"))
        behind = sum(len(properties.raw(name)) for name, _ in _FIELDS[-4:])
        flags = int.from_bytes(made[:2], "big") | open_
        self._before = flags.to_bytes(2, "big") + made[2 : len(made) - behind]
        self._after = made[len(made) - behind :]

    def fill(self, message_id: str, seconds: int) -> tuple[bytes, bytes]:
        """The property list of one message, published so many seconds after 1970; and its id alone, as
        it goes on the wire. ValueError for an id that AMQP cannot carry."""
        field = _short(message_id, "property message_id")
        return b"".join((self._before, field, seconds.to_bytes(8, "big"), self._after)), field


@lru_cache(4096)
def _name(key: bytes) -> str:
    return key[1:].decode("utf-8", "backslashreplace")


class Seconds(int):
    """A time beyond the year 9999, which a datetime cannot hold, in seconds since 1970."""


def _when(seconds: int) -> datetime | Seconds:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):  # beyond the year 9999
        return Seconds(seconds)


# --- reading ------------------------------------------------------------------------------------


def _unpack_table(raw: bytes) -> Table:
    entries: Table = []
    at = 0
    while at < len(raw):
        start = at + 1 + raw[at]
        end = _end(raw, start)
        if end is None:
            # A tag we do not know has no known length. What is left travels as one entry.
            entries.append((raw[at:start], raw[start:]))
            break
        entries.append((raw[at:start], raw[start:end]))
        at = end
    return entries


def _end(raw: bytes, at: int) -> int | None:
    """Where the tagged value at `at` ends; None for an unknown tag or a value cut short."""
    if at >= len(raw):
        return None
    tag = raw[at]
    if tag in _PREFIXED:
        end = at + 5 + int.from_bytes(raw[at + 1 : at + 5], "big")
    elif tag in _FIXED:
        end = at + 1 + _FIXED[tag]
    else:
        return None
    return end if end <= len(raw) else None


def _read(value: bytes, depth: int = 0) -> Any:
    """A tagged value as a Python value; what cannot be read is its bytes."""
    if _end(value, 0) != len(value):
        return value
    tag, body = chr(value[0]), value[1:]
    if tag == "S":
        try:
            return body[4:].decode()
        except UnicodeDecodeError:
            return body[4:]
    if tag in _NUMBERS:
        return struct.unpack(_NUMBERS[tag], body)[0]
    if tag == "t":
        return body != b"\0"
    if tag == "x":
        return body[4:]
    if tag == "T":
        return _when(int.from_bytes(body, "big"))
    if tag == "D":
        return Decimal(int.from_bytes(body[1:], "big", signed=True)).scaleb(-body[0])
    if tag in "V\0":
        return None
    if depth > 100:  # nesting is the publisher's to choose, our stack is not
        return value
    if tag == "F":
        return {_name(key): _read(item, depth + 1) for key, item in _unpack_table(body[4:])}
    items, at, raw = [], 0, body[4:]
    while at < len(raw):
        end = _end(raw, at) or len(raw)
        items.append(_read(raw[at:end], depth + 1))
        at = end
    return items


def _fields_of(raw: bytes) -> dict[str, bytes]:
    fields: dict[str, bytes] = {}
    flags, at = int.from_bytes(raw[:2], "big"), 2
    for name, kind, flag in _FLAGS:
        if not flags & flag:
            continue
        if kind == "s":
            end = at + 1 + int.from_bytes(raw[at : at + 1], "big")
        elif kind == "F":
            end = at + 4 + int.from_bytes(raw[at : at + 4], "big")
        else:
            end = at + (8 if kind == "T" else 1)
        if end > len(raw):
            break
        fields[name] = raw[at:end]
        at = end
    return fields


# --- writing ------------------------------------------------------------------------------------


def _field(name: str, kind: str, value: Any) -> bytes:
    if kind == "s":
        return _short(value, f"property {name}")
    if kind == "T":
        return _timestamp(value, f"property {name}")
    if not isinstance(value, int) or not 0 <= value <= 255:
        raise ValueError(f"property {name} must be from 0 to 255, not {value!r}")
    return bytes([value])


def _short(value: str, what: str) -> bytes:
    raw = _utf8(value, what)
    if (size := len(raw)) > 255:
        raise ValueError(f"{what} has {size} bytes, AMQP takes 255")
    return _LENGTHS[size] + raw


@lru_cache(4096)
def _key(name: str, what: str) -> bytes:
    return _short(name, what)


def _utf8(value: str, what: str) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}, not text")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} has a lone surrogate, which UTF-8 cannot carry") from None


def _timestamp(value: datetime, what: str) -> bytes:
    if not isinstance(value, datetime):
        raise ValueError(f"{what} is {value!r}, not a datetime")
    seconds = value.replace(tzinfo=value.tzinfo or UTC).timestamp()
    if seconds < 0:
        raise ValueError(f"{what} is before 1970, which AMQP cannot carry")
    return int(seconds).to_bytes(8, "big")


def _entries(headers: Mapping[str, Any], what: str = "header") -> Table:
    named = f"{what} name"
    return [
        (
            _key(key, named),
            # What most are, at a third of the price.
            _tagged(b"S", len(value)) + value.encode()
            if type(value) is str and value.isascii()
            else _write(value, f"{what} {key}"),
        )
        for key, value in headers.items()
    ]


def _pack_table(entries: Table) -> bytes:
    body = b"".join(chain.from_iterable(entries))
    return len(body).to_bytes(4, "big") + body


def _write(value: Any, what: str) -> bytes:
    """A Python value, tagged. Integers take 32 or 64 bits, floats 64, naive times are UTC."""
    match value:
        case None:
            return b"V"
        case bool():
            return b"t\1" if value else b"t\0"
        case int() if -(2**31) <= value < 2**31:
            return b"I" + value.to_bytes(4, "big", signed=True)
        case int() if -(2**63) <= value < 2**63:
            return b"l" + value.to_bytes(8, "big", signed=True)
        case int():
            raise ValueError(f"{what} is {value}, beyond 64 bits")
        case float() if math.isfinite(value):
            return b"d" + struct.pack(">d", value)
        case float():
            # The broker answers inf and nan by closing the connection (541, 3.10 to 4.3).
            raise ValueError(f"{what} is {value}, which AMQP cannot carry")
        case str():
            return _long(b"S", _utf8(value, what))
        case bytes() | bytearray():
            return _long(b"x", bytes(value))
        case datetime():
            return b"T" + _timestamp(value, what)
        case Decimal():
            return b"D" + _decimal(value, what)
        case Mapping():
            return b"F" + _pack_table(_entries(value, what))
        case list() | tuple():
            return _long(b"A", b"".join(_write(item, f"{what}[{i}]")
                                        for i, item in enumerate(value)))  # fmt: skip
    raise ValueError(f"{what} is a {type(value).__name__}, which AMQP cannot carry")


def _long(tag: bytes, raw: bytes) -> bytes:
    return _tagged(tag, len(raw)) + raw


def _decimal(value: Decimal, what: str) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"{what} is {value}, which AMQP cannot carry")
    scale, zeros = max(0, -exponent), max(0, exponent)
    # (1E+999999999 is a short Decimal and an integer of 400 MB.)
    unscaled = int("".join(map(str, digits))) * 10**zeros if len(digits) + zeros < 12 else 2**31
    unscaled *= -1 if sign else 1
    if scale > 255 or not -(2**31) <= unscaled < 2**31:
        raise ValueError(f"{what} is {value}; AMQP decimals have 32 bits and 255 places")
    return bytes([scale]) + unscaled.to_bytes(4, "big", signed=True)
