"""Property lists and field tables as bytes: whatever a broker can send, and what none would."""

from __future__ import annotations

import math
import struct

from hypothesis import strategies as st

from rabbit_tasks.properties import Properties


def prefixed(raw: bytes) -> bytes:
    return len(raw).to_bytes(4, "big") + raw


def bits(tag: bytes, size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size).map(lambda raw: tag + raw)


INF_NAN = st.sampled_from([math.inf, -math.inf, math.nan])
LEAVES = st.one_of(
    bits(b"t", 1), bits(b"b", 1), bits(b"B", 1), bits(b"s", 2), bits(b"u", 2), bits(b"I", 4),
    bits(b"i", 4), bits(b"l", 8), bits(b"L", 8), bits(b"f", 4), bits(b"d", 8), bits(b"D", 5),
    bits(b"T", 8), st.sampled_from([b"V", b"\0"]),
    INF_NAN.map(lambda x: b"d" + struct.pack(">d", x)),
    INF_NAN.map(lambda x: b"f" + struct.pack(">f", x)),
    st.binary(max_size=40).map(lambda raw: b"S" + prefixed(raw)),
    st.binary(max_size=40).map(lambda raw: b"x" + prefixed(raw)),
)  # fmt: skip
NAMES = st.one_of(st.binary(max_size=20), st.sampled_from([b"", b"a", b"\xff", b"n" * 255]))


def table(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """A field table's payload; names may come twice."""
    entry = st.tuples(NAMES, values).map(lambda e: bytes([len(e[0])]) + e[0] + e[1])
    return st.lists(entry, max_size=5).map(b"".join)


VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        table(inner).map(lambda raw: b"F" + prefixed(raw)),
        st.lists(inner, max_size=4).map(lambda items: b"A" + prefixed(b"".join(items))),
    ),
    max_leaves=8,
)
UNMEASURED = st.sampled_from(
    [b"", b"\1a", b"\1a?what", b"\2a", b"\xc8cut", b"\1aI\0\0", b"\1aS\0\0\0\x09x"]
)
TABLES = st.tuples(table(VALUES), UNMEASURED).map(b"".join)
"""Any table, some with an end that nobody can measure: an unknown tag, a value or a name cut short."""

SHORT = st.binary(max_size=30).map(lambda raw: bytes([len(raw)]) + raw)
BYTE = st.binary(min_size=1, max_size=1)
KINDS = [SHORT, SHORT, TABLES.map(prefixed), BYTE, BYTE, SHORT, SHORT, SHORT, SHORT,
         st.binary(min_size=8, max_size=8), SHORT, SHORT, SHORT, SHORT]  # fmt: skip


@st.composite
def property_lists(draw: st.DrawFn) -> bytes:
    present = [draw(st.booleans()) for _ in KINDS]
    flags = sum(1 << (15 - i) for i, here in enumerate(present) if here)
    fields = [draw(kind) for kind, here in zip(KINDS, present, strict=True) if here]
    return struct.pack(">H", flags) + b"".join(fields)


def of_table(raw: bytes) -> Properties:
    return Properties.decode(struct.pack(">H", 1 << 13) + prefixed(raw))
