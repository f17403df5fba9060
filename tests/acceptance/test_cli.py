"""The command line: exit codes, what is on stdout, what is on stderr."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rabbit_tasks import Publisher, Settings
from rabbit_tasks.broker import connected
from rabbit_tasks.cli.parked.page import as_line
from rabbit_tasks.declare import declare
from rabbit_tasks.properties import Properties
from tests.support.brokers import ROOT, Broker
from tests.support.commands import Run, no_constant
from tests.support.post import app
from tests.support.queues import Found, depth, take_all

APP = ("--app", "tests.support.post:app")


def process(url: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rabbit_tasks", *arguments],
        cwd=ROOT,
        # Unbuffered, Python takes half a write into a closed pipe for a whole one.
        env={**os.environ, "RABBIT_TASKS_URL": url, "COLUMNS": "200", "PYTHONUNBUFFERED": ""},
        text=True,
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **more,
        },
    )


class Lot:
    """Fills the queues of the app, from a test that is not async."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

        async def make() -> None:
            async with connected(settings, "test") as connection:
                await declare(connection, app.topology)

        asyncio.run(make())

    def park(
        self,
        name: str | None = None,
        body: bytes = b"{}",
        *,
        queue: str = "letters",
        **headers: Any,
    ) -> None:
        told = {
            "x-origin-queue": queue, "x-parked-reason": "told to",
            **{key.replace("_", "-"): value for key, value in headers.items()},
        }  # fmt: skip
        properties = Properties.of(told, message_id=name, delivery_mode=2)

        async def send() -> None:
            async with Publisher.open(self._settings) as publisher:
                await publisher.send("parking-lot", queue, body, properties)

        asyncio.run(send())

    def depth(self, queue: str) -> int:
        async def look() -> int:
            async with connected(self._settings, "test") as connection:
                return await depth(connection, queue)

        return asyncio.run(look())

    def take_all(self, queue: str) -> list[Found]:
        async def take() -> list[Found]:
            async with connected(self._settings, "test") as connection:
                return await take_all(connection, queue)

        return asyncio.run(take())


@pytest.fixture
def lot(settings: Settings) -> Lot:
    return Lot(settings)


# --- wrong usage, and what cannot work -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nonsense"], "No such command"),
        (["parked", "nonsense"], "No such command"),
        (["parked", "list"], "Missing argument"),
        (["parked", "replay", "letters"], "--id, --error, --limit, or --all"),
        (["parked", "discard", "letters"], "--id, --error, --limit, or --all"),
        (["parked", "replay", "letters", "--all", "--limit", "2"], "--all goes with no other"),
        (["parked", "replay", "letters", "--limit", "0"], "--limit"),
        (["work"], "which app?"),
        (["topology", "show"], "which app?"),
        (["topology", "declare"], "which app?"),
        (["--app", "nonsense", "topology", "show"], "module:attribute"),
        (["--app", "no_such:app", "topology", "show"], "no module 'no_such'"),
        (["--app", "json:dumps", "topology", "show"], "json:dumps"),
        ([*APP, "work", "nowhere"], "no consumer of queue 'nowhere'"),
        ([*APP, "work", "--grace", "soon"], "RABBIT_TASKS_GRACE"),
        ([*APP, "work", "--grace", "-1"], "RABBIT_TASKS_GRACE"),
        ([*APP, "work", "--log-level", "loud"], "loud"),
        ([*APP, "work", "--log-format", "xml"], "xml"),
        (["--url", "http://localhost", "parked", "list", "letters"], "RABBIT_TASKS_URL"),
        (["--url", "amqp://u:p/@s3cret@localhost", "parked", "list", "letters"], "%40"),
        (["publish"], "Missing argument"),
        (["publish", "letters", "{"], "body 1 is not JSON"),
        (["publish", "letters", "{}", "NaN"], "body 2 is not JSON"),
        ([*APP, "publish", "letters", '{"to": "a"}', '{"from": 1}'], "body 2 is not what Letters"),
        (["publish", "letters", "{}", "{}", "--id", "a"], "--id goes with exactly one body"),
        (["publish", "letters", "{}", "--header", "a"], "NAME=VALUE"),
        (["publish", "letters", "{}", "--header", f"{'n' * 300}=v"], "AMQP takes 255"),
        (["publish", "letters", "{}", "--id", "i" * 300], "AMQP takes 255"),
        (["publish", "letters", "[" * 100_000], "body 1 is not JSON"),
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_2_and_says_what(arguments: list[str], told: str, cli: Run) -> None:
    result = cli(*arguments)
    assert result.code == 2, result.err
    assert told in " ".join(result.err.split())
    assert "s3cret" not in result.err
    assert result.out == ""


def test_help_names_every_command_and_option(cli: Run) -> None:
    top = cli("--help")
    assert top.code == 0
    told = " ".join(top.out.split())
    for word in ("topology", "work", "publish", "parked", "--app", "--url", "RABBIT_TASKS_APP",
                 "tool.rabbit_tasks", "Usage: rabbit-tasks"):  # fmt: skip
        assert word in told
    for noun in ([], ["parked"], ["topology"], ["parked", "replay"], ["publish"], ["work"]):
        shown = cli(*noun, "--help")
        assert shown.code == 0
        assert "..." not in shown.out.replace("]...", "")  # no first sentence is cut off
    assert cli("--version").out.strip()


@pytest.mark.parametrize("command", [["parked", "list", "q"], ["parked", "replay", "q", "--all"]])
def test_a_broker_that_cannot_be_used_is_one_line_and_exit_1(command: list[str], cli: Run) -> None:
    result = cli("--url", "amqp://u:s3cret@127.0.0.1:1/", *command)
    assert result.code == 1
    (line,) = result.err.splitlines()
    assert line.startswith("error: 127.0.0.1:1 cannot be reached")
    assert "RABBIT_TASKS_URL" in line
    assert "s3cret" not in line


def test_a_port_that_never_answers_is_given_up_within_10_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        command = process(f"amqp://u:s3cret@127.0.0.1:{port}/", *APP, "topology", "check")
        silent.settimeout(60)
        talk, _ = silent.accept()
        began = time.monotonic()  # the interpreter's own start is not the broker's business
        out, err = command.communicate(timeout=60)
        assert time.monotonic() - began < 11.5
        talk.close()
    assert (command.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert "did not answer within 9.0 s (RABBIT_TASKS_URL" in line
    assert "s3cret" not in line


# --- topology -----------------------------------------------------------------------------------


def test_topology_from_missing_to_declared(cli: Run, broker: Broker, vhost: str) -> None:
    before = cli(*APP, "topology", "check")
    assert before.code == 1
    assert "letters.parked: missing; create it: rabbit-tasks topology declare" in before.out
    assert {line["what"] for line in cli(*APP, "topology", "check", "--json").lines} == {"missing"}
    made = cli(*APP, "topology", "declare")
    assert made.code == 0
    assert "created letters.retry.1.100ms" in made.out.splitlines()
    assert "created" in made.err
    again = cli(*APP, "topology", "declare")
    assert (again.code, again.out) == (0, "")
    assert "all there already" in again.err
    after = cli(*APP, "topology", "check")
    assert (after.code, after.out) == (0, "")
    assert cli(*APP, "topology", "check", "--json").lines == []

    broker.delete(vhost, "queues", "letters.retry.1.100ms")
    broker.api(
        "PUT", f"/queues/{quote(vhost, safe='')}/letters.retry.1.100ms",
        {"durable": True, "arguments": {"x-queue-type": "classic"}},
    )  # fmt: skip
    refused = cli(*APP, "topology", "declare")
    assert refused.code == 1
    assert refused.out == ""
    assert "error: letters.retry.1.100ms: x-queue-type is classic, wanted quorum;" in refused.err
    (line,) = [
        line
        for line in cli(*APP, "topology", "check", "--json").lines
        if line["what"] == "x-queue-type"
    ]
    assert (line["found"], line["wanted"]) == ("classic", "quorum")
    assert "rabbit-tasks topology migrate" in line["remedy"]


def test_check_warns_of_a_handler_that_may_take_too_long_which_is_no_difference(cli: Run) -> None:
    long = ("--app", "tests.support.unruly:long")
    assert cli(*long, "topology", "declare").code == 0
    for how in ((), ("--json",)):
        found = cli(*long, "topology", "check", *how)
        assert (found.code, found.out) == (0, "")
        assert found.err.startswith("warning: unruly.long: its handler may take 45m (timeout), but")
        assert "as they should be" in found.err


def test_export_writes_the_lock_file_and_check_compares_it(
    cli: Run, broker: Broker, vhost: str, tmp_path: Path
) -> None:
    assert cli(*APP, "topology", "export", "--check").code == 1
    assert cli(*APP, "topology", "export").code == 0
    lock = tmp_path / "topology" / "post.json"
    assert cli(*APP, "topology", "export", "--check").code == 0
    assert cli(*APP, "topology", "show", "--json").out == lock.read_text()
    broker.api("POST", f"/definitions/{quote(vhost, safe='')}", json.loads(lock.read_text()))
    assert cli(*APP, "topology", "check").code == 0
    lock.write_text(lock.read_text().replace("100", "200"))
    differs = cli(*APP, "topology", "export", "--check")
    assert differs.code == 1
    assert '-        "x-message-ttl": 200' in differs.out
    assert "rabbit-tasks topology export" in differs.err
    lock.write_bytes(b"\xff")
    assert cli(*APP, "topology", "export", "--check").code == 1


def test_a_lock_file_that_cannot_be_written_is_one_line(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = cli(*APP, "topology", "export", "--file", "file/lock.json")
    assert result.code == 1
    assert "error: file/lock.json cannot be written" in result.err


def test_show_draws_every_queue(cli: Run) -> None:
    out = cli(*APP, "topology", "show").out
    for queue in app.topology.queues:
        assert queue.name in out


# --- publish ------------------------------------------------------------------------------------


def test_publish_prints_ids_and_sends_bodies_as_given(cli: Run, lot: Lot) -> None:
    result = cli(*APP, "publish", "letters", '{ "to":"a"}', '{"to": "b"}', "--header", "k=v=w")
    assert result.code == 0
    found = lot.take_all("letters")
    assert [one.body for one in found] == [b'{ "to":"a"}', b'{"to": "b"}']
    assert [one.properties.text("message_id") for one in found] == result.out.split()
    assert {one.properties.text("content_type") for one in found} == {"application/json"}
    assert {one.properties.header("k") for one in found} == {"v=w"}
    assert {one.properties.number("delivery_mode") for one in found} == {2}
    assert "2 published to letters" in result.err
    one = cli("publish", "letters", "{}", "--id", "mine")
    assert (one.code, one.out) == (0, "mine\n")


def test_publish_takes_text_and_bytes_literally(cli: Run, lot: Lot) -> None:
    assert cli(*APP, "publish", "texts", "not json", "-5").code == 2  # -5 looks like an option
    assert cli(*APP, "publish", "texts", "--", "not json", "-5").code == 0
    assert cli(*APP, "publish", "texts", stdin=b"one\n\n two \r\nlast").code == 0
    found = lot.take_all("texts")
    assert [one.body for one in found] == [b"not json", b"-5", b"one", b"", b" two ", b"last"]
    assert found[0].properties.text("content_type") == "text/plain; charset=utf-8"
    assert cli(*APP, "publish", "blobs", stdin=b"\xff\x00\n").code == 0
    (blob,) = lot.take_all("blobs")
    assert blob.body == b"\xff\x00"
    assert blob.properties.text("content_type") == "application/octet-stream"
    bad = cli(*APP, "publish", "texts", stdin=b"good\n\xff\n")
    assert bad.code == 1
    assert "error: line 2 is not what Texts takes: not UTF-8" in bad.err


def test_a_bad_line_is_named_and_those_before_it_are_published(cli: Run, lot: Lot) -> None:
    good = b"".join(b'{"to": "%d"}\n' % i for i in range(300))
    result = cli(*APP, "publish", "letters", stdin=b"\n" + good + b'{"from": 1}\n{"to": "z"}\n')
    assert result.code == 1
    assert "error: line 302 is not what Letters takes: to: Field required" in result.err
    assert "300 published before the fault" in result.err
    assert len(result.out.split()) == 300
    assert lot.depth("letters") == 300


def test_unroutable_is_exit_1_with_the_next_command(cli: Run) -> None:
    result = cli("publish", "nowhere", "1", "2")
    assert (result.code, result.out) == (1, "")
    assert "0 published before the fault" in result.err
    assert "body 1: queue 'nowhere': there is no such queue" in result.err
    assert "rabbit-tasks topology declare" in result.err


def test_what_the_broker_refuses_is_told_with_its_line(cli: Run, lot: Lot) -> None:
    result = cli(*APP, "publish", "texts", "--header", f"big={'x' * 140_000}", stdin=b"a\nb\n")
    assert (result.code, result.out) == (1, "")
    assert "error: line 1: queue 'texts': properties and headers take" in result.err
    assert "and so for 1 more, to line 2" in result.err
    assert lot.depth("texts") == 0


def test_what_cannot_be_json_is_text_in_a_json_line() -> None:
    found = json.loads(
        as_line({"nan": float("nan"), "inf": [-float("inf")], "raw": b"\xff", "text": "\ud800"}),
        parse_constant=no_constant,
    )
    assert found == {"nan": "nan", "inf": ["-inf"], "raw": "ff", "text": "\ud800"}


# --- parked: show and list ----------------------------------------------------------------------


def test_an_empty_lot_is_fine_and_a_missing_one_is_not(cli: Run, lot: Lot) -> None:
    empty = cli("parked", "list", "letters")
    assert (empty.code, empty.out) == (0, "")
    assert "nothing is parked for letters" in empty.err
    assert cli("parked", "list", "letters", "--json").lines == []
    assert cli("parked", "replay", "letters", "--all").code == 0
    absent = cli("parked", "list", "nothing")
    assert absent.code == 1
    assert "error: there is no queue nothing.parked" in absent.err
    unknown = cli("parked", "show", "letters", "nobody")
    assert unknown.code == 1
    assert "rabbit-tasks parked list letters" in unknown.err


NASTY = {
    "control": b"\x1b]0;owned\x07\x1b[2J\x9b31m",
    "bidi": "‮evil⁦\u2028\x85".encode(),
    "not utf-8": b"\xff\xfe\x00binary",
    "nan": b'{"a": NaN, "b": 1e999}',
    "surrogate": rb'{"a": "\ud800"}',
    "twice": b'{"a": 1.10, "a": 2}',
    "deep": b"[" * 5000 + b"]" * 5000,
    "deepish": b"[" * 300 + b"]" * 300,
    "empty": b"",
    "text": "plain ä".encode(),
}


def test_nothing_that_is_parked_can_drive_the_terminal_or_break_json(cli: Run, lot: Lot) -> None:
    headers: dict[str, Any] = {
        "n\x1b[2J\nreason    forged": "v\x1b]0;x\x07\nstack",
        "nan": 1.5, "bytes": b"\xff\x1b", "when": datetime(2020, 1, 1, tzinfo=UTC),
        "decimal": Decimal("1.5"), "nested": {"a": [{"b": b"\0"}, None, True]},
        "x-error-message": "bad\x1b[2J\nreason    forged", "x-error-type": "a.B\x1b",
        "x-error-stack": "Traceback\x1b[2J\n  line\nbody (json)",
    }  # fmt: skip
    for name, body in NASTY.items():
        lot.park(f"{name}\x1b[2J\n", body, **headers)

    listed = cli("parked", "list", "letters", "--json").lines
    assert len(listed) == len(NASTY)
    table = cli("parked", "list", "letters")
    for output in (table.out, table.err):
        assert _harmless(output)
    assert len(table.out.splitlines()) == len(NASTY) + 1  # with the heading
    for one in listed:
        shown = cli("parked", "show", "letters", one["id"])
        assert shown.code == 0
        assert _harmless(shown.out)
        assert sum(line.startswith("reason  ") for line in shown.out.splitlines()) == 1
        assert sum(line.startswith("body (") for line in shown.out.splitlines()) == 1
        (full,) = cli("parked", "show", "letters", one["id"], "--json").lines
        assert full["bytes"] == one["bytes"]
        assert list(full["body"]) in (["json"], ["text"], ["base64"])
    # The id as the table shows it is good as well.
    assert cli("parked", "show", "letters", "text\\x1b[2J\\n").code == 0


def _harmless(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_show_keeps_every_token_of_json_and_shows_bytes_as_hex(cli: Run, lot: Lot) -> None:
    lot.park("twice", b'{"a":1.10,"a":[],"b":{"c":[1,"x,{}\\""]}}')
    lot.park("bytes", bytes(range(256)) * 8)
    shown = cli("parked", "show", "letters", "twice").out
    assert '  {\n    "a": 1.10,\n    "a": [],\n    "b": {\n      "c": [\n        1,\n' in shown
    assert '"x,{}\\""' in shown
    shown = cli("parked", "show", "letters", "bytes").out
    assert "body (hex, 2048 bytes)" in shown
    assert "  000010  10 11 12" in shown
    assert "… 1024 bytes more" in shown


def test_a_message_of_10_mb_is_listed_shown_and_replayed(cli: Run, lot: Lot) -> None:
    lot.park("large", b'{"to": "%s"}' % (b"x" * 10_000_000))
    assert cli("parked", "list", "letters", "--json").lines[0]["bytes"] == 10_000_010
    assert len(cli("parked", "show", "letters", "large").out) > 10_000_000
    assert cli("parked", "replay", "letters", "--id", "large").code == 0
    assert len(lot.take_all("letters")[0].body) == 10_000_010


def test_show_tells_the_whole_story(cli: Run, lot: Lot) -> None:
    lot.park(
        "a", b'{"to": "b"}', x_retry_count=2, x_error_type="shop.OutOfPaper",
        x_error_message="tray 2", x_error_stack="Traceback …\n  File …", mine="kept",
        x_parked_at="2026-01-01T00:00:00+00:00",
        x_attempts=[{"attempt": 1, "when": "then", "seconds": 0.25, "error": "E: x", "worker": "w"}],
    )  # fmt: skip
    shown = cli("parked", "show", "letters", "a").out
    for text in ("message   a", "reason    told to", "shop.OutOfPaper", "tray 2", "Traceback …",
                 "  1  then  0.250 s  E: x  (w)", "origin    letters", "mine: 'kept'",
                 '    "to": "b"', "2026-01-01T00:00:00+00:00"):  # fmt: skip
        assert text in shown
    (full,) = cli("parked", "show", "letters", "a", "--json").lines
    assert full["body"] == {"json": {"to": "b"}}
    assert full["error_message"] == "tray 2"
    assert full["attempts"][0]["seconds"] == 0.25


def test_output_into_a_pipe_that_closes_is_no_traceback(url: str, lot: Lot) -> None:
    lot.park("large", b'"%s"' % (b"x" * 1_000_000))
    command = process(url, "parked", "show", "letters", "large")
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.readline()
    command.stdout.close()
    err = command.stderr.read()
    command.stderr.close()
    assert command.wait(60) == 1
    assert "Traceback" not in err
    assert "Exception" not in err


# --- parked: replay and discard -----------------------------------------------------------------


def test_replay_by_id_takes_several_and_says_which_are_not_there(cli: Run, lot: Lot) -> None:
    strange = """it's "an" id"""
    for name in ("a", strange, "c", "d"):
        lot.park(name)
    result = cli("parked", "replay", "letters", "--id", "c", "--id", strange, "--id", "nobody")
    assert result.code == 1
    assert result.out == "2 replayed to letters\n"
    assert "2 of 4 parked for letters replayed" in result.err
    assert "error: not parked: nobody; what is: rabbit-tasks parked list letters" in result.err
    ids = [one.properties.text("message_id") for one in lot.take_all("letters")]
    assert ids == [strange, "c"]
    assert cli("parked", "replay", "letters", "--id", "a", "--id", "d", "--limit", "1").code == 0
    assert [one["id"] for one in cli("parked", "list", "letters", "--json").lines] == ["d"]


def test_replay_by_error_limit_and_dry_run(cli: Run, lot: Lot) -> None:
    for i, kind in enumerate(["shop.Bad", "Bad", "other.Worse", "shop.Bad"]):
        lot.park(str(i), x_error_type=kind)
    dry = cli("parked", "replay", "letters", "--error", "Bad", "--dry-run")
    assert (dry.code, dry.out) == (0, "3 would be replayed to letters\n")
    assert lot.depth("letters.parked") == 4
    full = cli("parked", "replay", "letters", "--error", "shop.Bad", "--limit", "1")
    assert full.out == "1 replayed to letters\n"
    assert lot.take_all("letters")[0].properties.text("message_id") == "0"
    assert cli("parked", "replay", "letters.parked", "--all").out == "3 replayed to letters\n"
    assert lot.depth("letters.parked") == 0


def test_a_replay_that_stops_says_what_was_done(cli: Run, lot: Lot) -> None:
    for name, home in (("a", "letters"), ("b", "texts"), ("c", "gone"), ("d", "letters")):
        lot.park(name, x_origin_queue=home)
    result = cli("parked", "replay", "letters", "--all")
    assert result.code == 1
    assert result.out == "1 replayed to letters\n1 replayed to texts\n"
    (line,) = result.err.splitlines()
    assert line.startswith("error: message c cannot be replayed: queue 'gone'")
    assert lot.depth("letters.parked") == 2


def test_discard_asks_a_terminal_and_nobody_else(cli: Run, url: str, lot: Lot) -> None:
    for name in ("a", "b", "c"):
        lot.park(name, x_error_type="shop.Bad")
    alone = cli("parked", "discard", "letters", "--all")
    assert alone.code == 2
    assert "     3 shop.Bad" in alone.err
    assert "--yes" in alone.err
    assert cli("parked", "discard", "letters", "--all", "--dry-run").out == "3 would be discarded\n"
    assert lot.depth("letters.parked") == 3
    for answer, code, left in ((b"n\n", 1, 3), (b"y\n", 0, 1)):
        ours, theirs = pty.openpty()
        command = process(
            url, "parked", "discard", "letters", "--id", "a", "--id", "b", stdin=theirs
        )
        os.close(theirs)
        os.write(ours, answer)
        _, err = command.communicate(timeout=60)
        os.close(ours)
        assert command.returncode == code, err
        assert "Discard these 2 for good?" in err
        assert lot.depth("letters.parked") == left
    assert cli("parked", "discard", "letters", "--all", "--yes").out == "1 discarded\n"
    assert lot.depth("letters.parked") == 0
    assert lot.depth("letters") == 0


def test_ctrl_c_in_a_replay_is_no_traceback_and_loses_nothing(url: str, lot: Lot) -> None:
    for i in range(3):
        lot.park(str(i))
    command = process(url, "parked", "replay", "letters", "--all")
    command.send_signal(signal.SIGINT)  # wherever it is by now
    command.communicate(timeout=60)
    assert lot.depth("letters") + lot.depth("letters.parked") == 3
    assert command.returncode in (1, 130, -signal.SIGINT)


def test_long_work_shows_its_progress_on_a_terminal_only(url: str, lot: Lot) -> None:
    for i in range(3):
        lot.park(str(i))
    ours, theirs = pty.openpty()
    command = process(url, "parked", "replay", "letters", "--all", stderr=theirs)
    os.close(theirs)
    out = command.stdout.read() if command.stdout else ""
    assert command.wait(60) == 0
    assert out == "3 replayed to letters\n"
    seen = b""
    while b"replayed" not in seen:
        seen += os.read(ours, 65_536)
    os.close(ours)
    assert command.stdout is not None
    command.stdout.close()
    assert b"replaying" in seen
    quiet = process(url, "parked", "replay", "letters", "--all")
    _, err = quiet.communicate(timeout=60)
    assert "replaying" not in err
