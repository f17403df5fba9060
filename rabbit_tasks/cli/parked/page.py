"""How one parked message is shown: a page for people, a line of JSON for machines."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from typing import Any, Final

from rabbit_tasks import message as names
from rabbit_tasks.cli import no_constant
from rabbit_tasks.parking import ParkedMessage
from rabbit_tasks.text import escaped

_LONG: Final = 1_000_000
"""Characters over which JSON is shown as it was sent: nobody reads it, and lines cost memory."""
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]\s*[\]}]|[\[{\]},:]|[^\s\[{\]},:"]+')


def summary(message: ParkedMessage) -> dict[str, Any]:
    """For a list: who it is and why it is parked."""
    return {
        "id": message.id,
        "parked_at": message.parked_at,
        "attempts": len(message.attempts),
        "error": message.error_type,
        "reason": message.reason,
        "origin": message.origin,
        "replays": message.replays,
        "bytes": len(message.body),
    }


def full(message: ParkedMessage) -> dict[str, Any]:
    """For machines: all of it."""
    return {
        **summary(message),
        "error_message": message.error_message,
        "stack": message.stack,
        "attempts": message.attempts,
        "deaths": message.deaths,
        "headers": message.headers,
        "body": _body(message.body),
    }


def _body(body: bytes) -> dict[str, Any]:
    """For machines: the value where it is JSON and comes out the same, else all of its text or bytes."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(body).decode()}
    try:
        value = json.loads(text, parse_constant=no_constant, object_pairs_hook=_no_duplicates)
        as_line([[[[value]]]])  # it will stand some levels deep
    except (ValueError, RecursionError):
        return {"text": text}
    return {"json": value}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def as_line(value: object) -> str:
    """One line of JSON, in ASCII: nothing in it can drive a terminal or break a line."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: object) -> Any:
    match value:
        case dict():
            return {str(name): _plain(one) for name, one in value.items()}
        case list():
            return [_plain(one) for one in value]
        case float() if not math.isfinite(value):
            return str(value)
        case bytes():
            return value.hex()
        case str() | int() | float() | None:
            return value
    return str(value)  # a time, a Decimal


def body_text(body: bytes) -> tuple[str, str]:
    """How a body is shown, and as what: json, text or hex. Nothing in it can drive a terminal."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return "hex", _hex(body)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "text", escaped(text, "\n\t")
    return "json", escaped(text if len(text) > _LONG else _indented(text), "\n\t")


def _indented(text: str) -> str:
    """JSON on lines of its own, every token as it was sent: keys twice, 1.10, 1e999."""
    parts: list[str] = []
    depth = 0
    for token in _TOKEN.findall(text):
        match token[0]:
            case "[" | "{" if len(token) > 1:  # empty
                parts.append(token[0] + token[-1])
            case "[" | "{":
                depth += 1
                parts.append(f"{token}\n{'  ' * depth}")
            case "]" | "}":
                depth -= 1
                parts.append(f"\n{'  ' * depth}{token}")
            case ",":
                parts.append(f",\n{'  ' * depth}")
            case ":":
                parts.append(": ")
            case _:
                parts.append(token)
    return "".join(parts)


def _hex(body: bytes, shown: int = 1024) -> str:
    rows = [
        f"{at:06x}  {body[at : at + 16].hex(' ')}" for at in range(0, min(len(body), shown), 16)
    ]
    more = [f"… {len(body) - shown} bytes more"] if len(body) > shown else []
    return "\n".join([f"{len(body)} bytes", *rows, *more])


def text_of(message: ParkedMessage) -> str:
    """For people: all of it but our own headers, which are told in words."""
    form, body = body_text(message.body)
    lines = [
        f"message   {escaped(message.id)}",
        f"reason    {escaped(message.reason)}",
        f"error     {escaped(message.error_type or '-')}",
        *_block(message.error_message or ""),
        f"parked    {escaped(message.parked_at or '-')}",
        f"origin    {escaped(message.origin or '-')}",
        f"replayed  {message.replays} times",
        "",
        "attempts",
    ]
    lines += [
        f"  {one.get('attempt', '-')}  {escaped(one.get('when', '-'))}  "
        f"{one.get('seconds', 0.0):.3f} s  {escaped(one.get('error', '-'))}  "
        f"({escaped(one.get('worker', '-'))})"
        for one in message.attempts
    ] or ["  none recorded"]
    if message.deaths:
        worker, when = message.last_seen or ("-", "-")
        known = f"last known in the hands of {escaped(worker)}, {escaped(when)}"
        lines += ["", f"deaths    {message.deaths}; {known}"]
    if message.stack:
        lines += ["", "stack", *_block(message.stack)]
    lines += ["", "headers"]
    lines += [
        f"  {escaped(name)}: {escaped(repr(value))}"
        for name, value in message.headers.items()
        if name not in names.OURS
    ]
    lines += ["", f"body ({form}, {len(message.body)} bytes)", *_block(body)]
    return "\n".join(lines)


def _block(text: str) -> list[str]:
    """Indented, so that no line of it can be taken for one of ours."""
    return [f"  {line}" for line in escaped(text, "\n\t").rstrip("\n").split("\n") if text]
