"""The command line: discard, export, import; what is on stdout, what is on stderr, what is done."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, Settings
from rabbit_tasks.broker import connected
from rabbit_tasks.declare import declare
from rabbit_tasks.properties import Properties
from tests.support.brokers import ROOT
from tests.support.commands import Run
from tests.support.queues import depth

QUEUE = "a lot/of.letters"


class Letters(Consumer[dict[str, Any]]):
    queue = QUEUE

    async def handle(self, body: dict[str, Any], message: Message) -> None: ...


class Lot:
    """What is parked for QUEUE."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def make(self) -> None:
        async def work() -> None:
            async with connected(self._settings, "test") as connection:
                await declare(connection, App("letters", [Letters()]).topology)

        asyncio.run(work())

    def park(self, *names: str, body: bytes | None = None, error: str = "app.Broken") -> None:
        async def work() -> None:
            async with Publisher.open(self._settings) as publisher:
                for name in names:
                    headers = {"x-origin-queue": QUEUE, "x-error-type": error}
                    properties = Properties.of(headers, message_id=name, delivery_mode=2)
                    told = name.encode() if body is None else body
                    await publisher.send("parking-lot", QUEUE, told, properties)

        asyncio.run(work())

    def count(self, queue: str = f"{QUEUE}.parked") -> int:
        async def work() -> int:
            async with connected(self._settings, "test") as connection:
                return await depth(connection, queue)

        return asyncio.run(work())


@pytest.fixture
def lot(settings: Settings) -> Lot:
    made = Lot(settings)
    made.make()
    return made


def ids(cli: Run) -> list[str]:
    return [one["id"] for one in cli("parked", "list", QUEUE, "--json").lines]


def started(url: str, *arguments: str, script: str = "", **more: Any) -> subprocess.Popen[bytes]:
    """The command in a process of its own; `script` runs in it first."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{script}\nfrom rabbit_tasks.cli import main\nmain()", *arguments],
        cwd=ROOT, env={**os.environ, "RABBIT_TASKS_URL": url}, **more,
    )  # fmt: skip


# --- discard ------------------------------------------------------------------------------------


@contextmanager
def asked(url: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A discard that asks, on a terminal of its own, at the moment at which it waits."""
    ours, theirs = pty.openpty()
    command = started(
        url, "parked", "discard", QUEUE, *arguments,
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    assert command.stderr is not None
    told = b""
    while b"[y/N]" not in told:
        piece = os.read(command.stderr.fileno(), 4096)
        assert piece, told.decode()
        told += piece
    sys.stderr.write(told.decode())
    try:
        yield command, ours
    finally:
        command.kill()
        command.communicate()
        os.close(ours)


def test_a_discard_tells_count_and_kinds_and_takes_nothing_that_came_after_the_question(
    cli: Run, url: str, lot: Lot, capfd: pytest.CaptureFixture[str]
) -> None:
    lot.park("a", "b")
    lot.park("c", error="app.\x1b[2JOther")
    with asked(url, "--all") as (command, terminal):
        said = capfd.readouterr().err
        assert "     2 app.Broken\n" in said
        assert "     1 app.\\x1b[2JOther\n" in said
        assert "Discard these 3 for good?" in said
        lot.park("d", "a")
        os.write(terminal, b"y\n")
        out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (0, b"3 discarded\n")
    assert b"3 of 5 parked for 'a lot/of.letters' discarded" in err
    assert ids(cli) == ["d", "a"]


@pytest.mark.parametrize("answer", [b"n\n", b"\x04", None])
def test_a_discard_that_is_not_allowed_takes_nothing(
    cli: Run, url: str, lot: Lot, answer: bytes | None
) -> None:
    lot.park("a", "b")
    with asked(url, "--error", "Broken") as (command, terminal):
        if answer is None:
            command.send_signal(signal.SIGINT)
        else:
            os.write(terminal, answer)
        out, err = command.communicate(timeout=60)
    assert command.returncode == (1 if answer == b"n\n" else 130)
    assert (out, b"nothing discarded" in err, b"Traceback" in err) == (b"", True, False)
    assert ids(cli) == ["a", "b"]


def test_ctrl_c_in_the_middle_of_a_discard_says_what_was_done(cli: Run, url: str, lot: Lot) -> None:
    lot.park(*map(str, range(400)))
    script = (
        "import os, signal, rabbit_tasks.parking as p\n"
        "def add(f):\n"
        "    async def g(*a, told, **k):\n"
        "        seen = []\n"
        "        def each(m):\n"
        "            told(m); seen.append(m)\n"
        "            if len(seen) == 40: os.kill(os.getpid(), signal.SIGINT)\n"
        "        return await f(*a, told=each, **k)\n"
        "    return g\n"
        "p.discard = add(p.discard)\n"
    )
    command = started(
        url, "parked", "discard", QUEUE, "--all", "--yes", script=script,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = command.communicate(timeout=60)
    assert command.returncode == 130
    assert b"interrupted; what is still there: rabbit-tasks parked list" in err
    assert b"Traceback" not in err
    count = int(out.split()[0])
    assert out == f"{count} discarded\n".encode()
    assert 100 <= count < 400
    assert ids(cli) == [str(i) for i in range(count, 400)]


# --- export and import --------------------------------------------------------------------------


def test_export_discard_import_on_the_command_line(cli: Run, lot: Lot, tmp_path: Path) -> None:
    names = ['an "id" with\nquotes', "it's", "\x1b[2J", *map(str, range(20))]
    lot.park(*names)
    lot.park("binary", body=b"\xff\xfe")
    before = cli("parked", "list", QUEUE, "--json").lines
    out = cli("parked", "export", QUEUE, "kept.jsonl")
    assert (out.code, out.out) == (0, "")
    assert "24 of 24 parked for 'a lot/of.letters' exported" in out.err
    assert ids(cli) == [*names, "binary"]
    assert (tmp_path / "kept.jsonl").stat().st_mode & 0o077 == 0
    assert [one.name for one in tmp_path.iterdir()] == ["kept.jsonl"]

    again = cli("parked", "export", QUEUE, "kept.jsonl")
    assert (again.code, "kept.jsonl is there; name a new file" in again.err) == (2, True)

    assert cli("parked", "discard", QUEUE, "--all", "--yes").out == "24 discarded\n"
    tried = cli("parked", "import", QUEUE, "kept.jsonl", "--dry-run")
    assert (tried.code, tried.out) == (0, "24 would be imported\n")
    assert lot.count() == 0
    back = cli("parked", "import", QUEUE, "kept.jsonl")
    assert (back.code, back.out) == (0, "24 imported\n")
    assert "parked list 'a lot/of.letters'" in back.err
    assert cli("parked", "list", QUEUE, "--json").lines == before


def test_export_writes_what_is_chosen_and_import_reads_from_a_pipe(cli: Run, lot: Lot) -> None:
    lot.park("a", "b")
    lot.park("c", error="app.Other")
    chosen = cli("parked", "export", QUEUE, "--error", "Other")
    assert [one["body"] for one in chosen.lines] == [{"text": "c"}]
    assert len(cli("parked", "export", QUEUE, "-", "--limit", "2").lines) == 2
    absent = cli("parked", "export", QUEUE, "--id", "z")
    assert (absent.code, absent.out, "not parked: z" in absent.err) == (1, "", True)
    nothing = cli("parked", "export", QUEUE, "--error", "None")
    assert (nothing.code, nothing.out, "0 of 3" in nothing.err) == (0, "", True)
    back = cli("parked", "import", QUEUE, stdin=chosen.out.encode())
    assert (back.code, back.out) == (0, "1 imported\n")
    assert ids(cli) == ["a", "b", "c", "c"]


def test_a_file_that_cannot_be_imported_is_one_line_and_changes_nothing(
    cli: Run, lot: Lot, tmp_path: Path
) -> None:
    lot.park("a", "b")
    good = cli("parked", "export", QUEUE).out.encode()
    large = b'{"rabbit_tasks": 1, "body": "' + b"x" * 10_000_000 + b'"}\n'
    for bad, said in [
        (good[:-20], "line 2: cut short"),
        (good + b"\x89PNG\r\n\x1a\n\0\0", "line 3: not JSON"),
        (good + b"{}\n", "line 3: not of an archive"),
        (good + large, "line 3: its body is neither"),
    ]:
        for named in (True, False):
            (tmp_path / "bad").write_bytes(bad)
            found = cli("parked", "import", QUEUE, *(["bad"] if named else []), stdin=bad)
            assert (found.code, found.out) == (1, "")
            assert found.err.startswith(f"error: {said}")
            assert (found.err.count("\n"), len(found.err) < 300) == (1, True)
    assert lot.count() == 2
    none = cli("parked", "import", QUEUE, "nowhere")
    assert (none.code, "nowhere: No such file or directory" in none.err) == (2, True)
    assert cli("parked", "import", QUEUE, ".").code == 2
    assert cli("parked", "import", QUEUE).out == "0 imported\n"
    nowhere = cli("parked", "export", QUEUE, "no/such/folder")
    assert (nowhere.code, "No such file or directory" in nowhere.err) == (2, True)
    full = cli("parked", "export", QUEUE, "/dev/full")
    assert (full.code, full.err) == (1, "error: /dev/full: No space left on device\n")


def test_an_import_creates_no_queue_and_takes_no_body_that_the_broker_does_not(
    cli: Run, lot: Lot
) -> None:
    lot.park("a")
    line = cli("parked", "export", QUEUE).lines[0]
    none = cli("parked", "import", "nothing", stdin=json.dumps(line).encode())
    assert (none.code, none.out) == (1, "0 imported\n")
    assert "there is no queue nothing.parked" in none.err
    assert "rabbit-tasks topology declare" in none.err
    ready = json.dumps(line).encode() + b"\n"
    # 17 MB are too large for 4.0 and 4.3; 3.10 takes 128.
    large = json.dumps({**line, "body": {"text": "x" * 17_000_000}}).encode() + b"\n"
    found = cli("parked", "import", QUEUE, stdin=ready + large + ready)
    if found.code == 0:
        assert lot.count() == 4
    else:
        assert found.out == "1 imported\n"
        assert "error: line 2: queue 'a lot/of.letters.parked': " in found.err
        assert "larger than configured max size" in found.err
        assert "1 imported, all to line 1" in found.err
        assert lot.count() == 2


def test_an_export_of_which_nobody_reads_the_rest_ends_without_a_traceback(
    cli: Run, url: str, lot: Lot
) -> None:
    lot.park(*map(str, range(300)), body=b"x" * 5000)
    with started(
        url, "parked", "export", QUEUE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert json.loads(command.stdout.readline())["rabbit_tasks"] == 1
        command.stdout.close()
        err = command.stderr.read()
        assert (command.wait(60), b"Traceback" in err) == (1, False)
    assert ids(cli) == list(map(str, range(300)))


def test_a_reader_who_takes_his_time_costs_an_export_neither_its_connection_nor_ctrl_c(
    cli: Run, url: str, lot: Lot
) -> None:
    lot.park(*map(str, range(400)), body=b"x" * 5000)
    env = "import os; os.environ['RABBIT_TASKS_HEARTBEAT'] = '1'"

    def export() -> subprocess.Popen[bytes]:
        return started(url, "parked", "export", QUEUE, script=env, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE)  # fmt: skip

    with export() as command:
        assert command.stdout is not None
        lines = [command.stdout.readline()]
        threading.Event().wait(5)  # five heartbeats: the broker gives up after two
        lines += command.stdout.readlines()
        assert (command.wait(60), len(lines)) == (0, 400)
    with export() as command:
        assert command.stdout is not None
        command.stdout.readline()
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 130
    assert ids(cli) == list(map(str, range(400)))


@pytest.mark.parametrize("name", ["grün", "a'b", "a\nb", "x" * 256, "x" * 249])
def test_a_queue_that_no_client_can_ask_for_is_refused_in_one_line(cli: Run, name: str) -> None:
    found = cli("parked", "export", name)
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert found.err.startswith("error: queue ")
