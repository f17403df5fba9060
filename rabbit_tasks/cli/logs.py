"""Log lines: text on a terminal, JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

from rabbit_tasks.text import escaped

Format = Literal["text", "json"]


class TextFormatter(logging.Formatter):
    """Time, level, what; one line each but for a fault's traceback. Where several processes write
    to one place, the number of theirs."""

    default_msec_format = "%s.%03d"

    def __init__(self, *, several: bool = False) -> None:
        who = "[%(process)d] " if several else ""
        super().__init__(f"%(asctime)s %(levelname)-7s {who}%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's own name)
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return escaped(super().formatException(ei), keep="\n\t")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, process, message, the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        # Readable in any language, but for what drives a terminal or ends a line (U+2028, U+0085).
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def configure(form: Format, level: str, *, several: bool = False) -> None:
    """Log to stderr, which `several` processes may share. What the client library says of lost
    connections is left out: we say it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(several=several))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level.upper() != "DEBUG":
        logging.getLogger("aiormq").setLevel(logging.CRITICAL + 1)
    # Logger `asyncio` stays as loud as ours: "Task exception was never retrieved" is how one hears of
    # a task that a handler started and forgot. (The client library's own we retrieve ourselves.)
    # And a warning, such as of a coroutine that was never awaited, is a log line like any other.
    logging.captureWarnings(True)
