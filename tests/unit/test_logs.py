"""Log lines: one line each, whatever a message puts into them."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbit_tasks.cli.logs import JsonFormatter, TextFormatter, configure

HOSTILE = "a\nb\r\x1b[2J\x9b1m\u2028\u2029\x85\x0b\0\u202e\udc80\U000e0001ü☃"


def record(message: str, *arguments: Any, **values: Any) -> logging.LogRecord:
    made = logging.LogRecord(
        "rabbit_tasks", logging.WARNING, "x.py", 1, message, arguments, values.pop("exc_info", None)
    )
    vars(made).update(values)
    return made


@given(st.text(), st.text())
def test_a_json_line_is_one_line_and_is_json(message: str, error: str) -> None:
    text = JsonFormatter().format(record("%s", message, fields={"error": error}))
    assert text.splitlines() == [text]
    assert text.isprintable()
    line = json.loads(text)
    assert (line["message"], line["error"]) == (message, error)


def test_a_json_line_keeps_what_a_terminal_can_show() -> None:
    text = JsonFormatter().format(record(HOSTILE))
    assert "ü☃" in text
    assert "\\u001b[2J\\u009b1m\\u2028" in text
    assert json.loads(text)["message"] == HOSTILE


def test_a_json_line_has_time_level_logger_message_and_the_fields() -> None:
    made = record("%s failed", "q", fields={"queue": "q", "attempt": 1, "odd": {1}})
    made.created, made.msecs = 1_767_323_045.9996, 999.6
    assert json.loads(JsonFormatter().format(made)) == {
        "time": "2026-01-02T03:04:05.999Z",
        "level": "warning",
        "logger": "rabbit_tasks",
        "process": os.getpid(),
        "message": "q failed",
        "queue": "q",
        "attempt": 1,
        "odd": "{1}",
    }


def test_a_line_of_several_processes_says_whose_it_is() -> None:
    line = TextFormatter(several=True).format(record("done"))
    assert line.endswith(f" WARNING [{os.getpid()}] done")
    assert TextFormatter().format(record("done")).endswith(" WARNING done")


def test_a_json_line_carries_a_traceback_inside() -> None:
    line = json.loads(JsonFormatter().format(record("broken", exc_info=fault())))
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert HOSTILE in line["traceback"]


def fault() -> Any:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        return sys.exc_info()


@given(st.text())
def test_a_text_line_is_one_line(message: str) -> None:
    text = TextFormatter().format(record("%s", message))
    assert text.splitlines() == [text]
    assert text.isprintable()


def test_a_text_line_has_time_level_and_message() -> None:
    text = TextFormatter().format(record(HOSTILE))
    assert text.split(" ", 2)[2] == (
        "WARNING a\\nb\\r\\x1b[2J\\x9b1m\\u2028\\u2029\\x85\\x0b\\x00\\u202e\\udc80\\U000e0001ü☃"
    )


def test_a_traceback_in_text_keeps_its_lines_and_drives_no_terminal() -> None:
    lines = TextFormatter().format(record("broken", exc_info=fault())).split("\n")
    assert lines[0].endswith("WARNING broken")
    assert lines[1] == "Traceback (most recent call last):"
    assert all(line.isprintable() for line in lines)


@pytest.fixture
def _logging_as_it_was() -> Iterator[None]:
    root, loud = logging.getLogger(), logging.getLogger("aiormq")
    before = root.handlers[:], root.level, loud.level
    root.handlers = []
    yield
    logging.captureWarnings(False)
    root.handlers, root.level, _ = before
    loud.setLevel(before[2])


@pytest.mark.usefixtures("_logging_as_it_was")
def test_log_lines_go_to_stderr_and_the_client_library_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("json", "info")
    logging.getLogger("aiormq.connection").error("lost")
    logging.getLogger("rabbit_tasks").info("connected")
    logging.getLogger("rabbit_tasks").debug("not now")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "connected"


@pytest.mark.usefixtures("_logging_as_it_was")
def test_what_handlers_forgot_and_python_warns_of_is_a_line_like_any_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("json", "info")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: x")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("coroutine 'x' was never awaited", RuntimeWarning, stacklevel=1)
    asyncios, pythons = map(json.loads, capsys.readouterr().err.splitlines())
    assert (asyncios["logger"], asyncios["level"]) == ("asyncio", "error")
    assert (pythons["logger"], pythons["level"]) == ("py.warnings", "warning")
    assert "was never awaited" in pythons["message"]
