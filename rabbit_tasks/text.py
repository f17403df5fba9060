"""Text that others wrote, made fit for a header, a log line or a terminal.

Pure: text in, text out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable


def cut(text: str, limit: int) -> str:
    """The text in at most `limit` bytes of UTF-8: its beginning and its end."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) <= limit:
        return raw.decode()
    half = max(0, limit - 40) // 2
    head, tail = (
        raw[:half].decode("utf-8", "ignore"),
        raw[len(raw) - half :].decode("utf-8", "ignore"),
    )
    return f"{head}\n… {len(raw) - 2 * half} bytes left out …\n{tail}"


def one_line(text: str, limit: int = 300) -> str:
    """For logs and terminals: control characters escaped, at most `limit` characters."""
    shown = escaped(text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def escaped(text: str, keep: str = "") -> str:
    """The text with control and formatting characters as escapes, but for those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def quoted(name: str) -> str:
    """A name inside a sentence or a command: in quotes where it is empty or has anything in it that
    would be taken for the sentence's own, such as a space."""
    return shlex.quote(escaped(name))


def some(names: Iterable[str]) -> str:
    """Three names for a person, and how many more."""
    found = list(names)
    more = len(found) - 3
    return ", ".join(found[:3]) + (f" and {more} more" if more > 0 else "")


def numbers(version: str) -> tuple[int, ...]:
    """`4.3.6-rc.1` as 4, 3, 6; empty where it tells none."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-z+-]", version)[0]))


def to_type(command: str, name: str, *options: str) -> str:
    """A command of ours about a queue. A name may begin with a dash: then it comes last.

    >>> to_type("parked replay", "lot", "--resume"), to_type("parked replay", "-lot", "--resume")
    ('rabbit-tasks parked replay lot --resume', 'rabbit-tasks parked replay --resume -- -lot')
    """
    words = (
        [*options, "--", shlex.quote(name)] if name[:1] == "-" else [shlex.quote(name), *options]
    )
    return " ".join(["rabbit-tasks", command, *words])
