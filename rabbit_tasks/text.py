"""Text that others wrote, made fit for a header, a log line or a terminal.

Pure: text in, text out.
"""

from __future__ import annotations


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
