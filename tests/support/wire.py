"""Property lists as no client library would write them: every value given with its bytes.

AMQP 0-9-1's field table with RabbitMQ's type tags; independent of rabbit_tasks.properties.
"""

from __future__ import annotations

import struct

from rabbit_tasks.properties import Properties


def text(value: str | bytes) -> bytes:
    """A long string, tag S."""
    return long(b"S", value.encode() if isinstance(value, str) else value)


def long(tag: bytes, raw: bytes) -> bytes:
    """A tag, a length in 32 bits, and so many bytes."""
    return tag + struct.pack(">I", len(raw)) + raw


def short(value: str | bytes) -> bytes:
    """A short string, as properties have it."""
    raw = value.encode() if isinstance(value, str) else value
    return bytes([len(raw)]) + raw


def table(*entries: tuple[str | bytes, bytes]) -> bytes:
    """A field table's value: its length, then its entries."""
    body = b"".join(short(name) + value for name, value in entries)
    return struct.pack(">I", len(body)) + body


def nested(depth: int, inner: bytes) -> bytes:
    """The value in so many tables, each in the one before."""
    for _ in range(depth):
        inner = b"F" + table(("n", inner))
    return inner


def properties(*headers: tuple[str | bytes, bytes], **fields: bytes) -> Properties:
    """A property list of these headers and these fields, both as bytes."""
    return Properties({**({"headers": table(*headers)} if headers else {}), **fields})


FIELDS = {
    "content_type": "s", "content_encoding": "s", "headers": "F", "delivery_mode": "B",
    "priority": "B", "correlation_id": "s", "reply_to": "s", "expiration": "s", "message_id": "s",
    "timestamp": "T", "type": "s", "user_id": "s", "app_id": "s", "cluster_id": "s",
}  # fmt: skip
SIZES = {"t": 1, "b": 1, "B": 1, "s": 2, "u": 2, "I": 4, "i": 4, "f": 4, "D": 5, "l": 8, "L": 8,
         "d": 8, "T": 8, "V": 0}  # fmt: skip


def fields(raw: bytes) -> dict[str, bytes]:
    """A property list taken apart: each property with its bytes, the headers as one of them."""
    found, at = {}, 2
    for i, (name, kind) in enumerate(FIELDS.items()):
        if not int.from_bytes(raw[:2], "big") >> (15 - i) & 1:
            continue
        if kind == "s":
            end = at + 1 + raw[at]
        elif kind == "F":
            end = at + 4 + int.from_bytes(raw[at : at + 4], "big")
        else:
            end = at + {"B": 1, "T": 8}[kind]
        found[name], at = raw[at:end], end
    assert at == len(raw)
    return found


def entries(headers: bytes) -> list[tuple[bytes, bytes]]:
    """A field table taken apart: each name and its tagged value, as they are."""
    found, at = [], 4
    while at < len(headers):
        start = at + 1 + headers[at]
        tag = chr(headers[start])
        if tag in SIZES:
            end = start + 1 + SIZES[tag]
        else:
            assert tag in "SxAF", tag
            end = start + 5 + int.from_bytes(headers[start + 1 : start + 5], "big")
        found.append((headers[at + 1 : start], headers[start:end]))
        at = end
    assert at == len(headers)
    return found
