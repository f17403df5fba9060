"""`parked replay` as an operator types it: a canary, an editor, a rate, Ctrl-C; and how fast it is."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from rabbit_tasks import Message, Publisher, Settings, parking
from rabbit_tasks.app import App
from rabbit_tasks.broker import connected
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.declare import declare
from rabbit_tasks.parking import canary, look, staging
from rabbit_tasks.properties import Properties
from rabbit_tasks.retry import RetryPolicy
from tests.acceptance.conftest import Figures
from tests.support.brokers import ROOT
from tests.support.commands import Run
from tests.support.inprocess import Running
from tests.support.queues import Found, depth, take_all


class Letters(Consumer[dict[str, int]]):
    queue = "letters"
    retry = RetryPolicy(attempts=1)
    fails = True

    async def handle(self, body: dict[str, int], message: Message) -> None:
        if self.fails:
            raise ValueError("no stamp")


app = App("letters", [Letters()])
APP = ("--app", f"{__name__}:app")


class Lot:
    """The queues of the app, from a test that is not async."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._run(lambda connection: declare(connection, app.topology))

    def _run(self, work: Callable[[Any], Any]) -> Any:
        async def do() -> Any:
            async with connected(self.settings, "test") as connection:
                return await work(connection)

        return asyncio.run(do())

    def park(self, *names: str, body: bytes = b'{"n": 1}', **headers: Any) -> None:
        told = {
            "x-origin-queue": "letters",
            "x-parked-reason": "told to",
            **{key.replace("_", "-"): value for key, value in headers.items()},
        }

        async def send() -> None:
            async with Publisher.open(self.settings) as publisher:
                for name in names:
                    properties = Properties.of(told, message_id=name, delivery_mode=2)
                    await publisher.send("parking-lot", "letters", body, properties)

        asyncio.run(send())

    def depth(self, queue: str) -> int:
        count: int = self._run(lambda connection: depth(connection, queue))
        return count

    def take_all(self, queue: str) -> list[Found]:
        found: list[Found] = self._run(lambda connection: take_all(connection, queue))
        return found


@pytest.fixture
def lot(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Lot:
    monkeypatch.setattr(staging, "AGE", 0.0)  # no broker dies here
    return Lot(settings)


@pytest.fixture
def worker(lot: Lot, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Letters]]:
    """A worker of the app, in a thread of its own."""
    from threading import Thread

    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Running:
        return Running(app, lot.settings)

    running = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    monkeypatch.setattr(Letters, "fails", True)
    yield Letters
    asyncio.run_coroutine_threadsafe(running.drop(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def process(url: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rabbit_tasks", *arguments],
        cwd=ROOT,
        env={**os.environ, "RABBIT_TASKS_URL": url, "COLUMNS": "200"},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--all", "--rate", "fast"], "'fast' is no rate, such as 50/s"),
        (["--all", "--rate", "0/s"], "is no rate"),
        (["--all", "--canary", "0"], "--canary"),
        (["--all", "--canary", "1", "--canary-wait", "soon"], "no duration"),
        (["--all", "--edit"], "exactly one --id"),
        (["--id", "a", "--id", "b", "--edit"], "exactly one --id"),
        (["--id", "a", "--edit", "--dry-run"], "exactly one --id"),
        (["--rate", "50/s"], "which? Say --id"),
        (["--all", "--to", ""], "its value is empty"),
        (["--all", "--into", "a\nb"], "in a name"),
    ],
)
def test_wrong_usage_is_exit_2_and_says_what(options: list[str], told: str, cli: Run) -> None:
    result = cli("parked", "replay", "letters", *options)
    assert result.code == 2, result.err
    assert told in " ".join(result.err.replace("│", " ").split())


def test_a_filter_that_matches_nothing_is_exit_0_with_words(cli: Run, lot: Lot) -> None:
    lot.park("a")
    for choice in (["--error", "Nothing"], ["--match", "n=2"], ["--older-than", "2h"]):
        result = cli("parked", "replay", "letters", *choice)
        assert (result.code, result.out) == (0, "")
        assert "0 of 1 parked for letters replayed" in result.err
        assert "nothing to replay" in result.err
    assert lot.depth("letters.parked") == 1


def test_filters_targets_and_a_dry_run(cli: Run, lot: Lot) -> None:
    lot.park("a", "b", body=b'{"n": 2}')
    lot.park("c", "d")
    lot.park("e", x_origin_queue="elsewhere")
    dry = cli(
        "parked", "replay", "letters", "--match", "n=2", "--to", "letters.parked", "--dry-run"
    )
    assert (dry.code, dry.out) == (0, "2 would be replayed to letters.parked\n")
    assert cli("parked", "replay", "letters", "--match", "n=2", "--rate", "100/s").code == 0
    found = lot.take_all("letters")
    assert [one.properties.text("message_id") for one in found] == ["a", "b"]
    assert cli("parked", "replay", "letters", "--id", "e", "--to", "letters").code == 0
    assert lot.depth("letters") == 1


def test_a_canary_that_fails_again_stops_the_rest_and_says_how(
    cli: Run, lot: Lot, worker: type[Letters]
) -> None:
    lot.park(*"abcdefgh")
    result = cli("parked", "replay", "letters", "--all", "--canary", "3", "--canary-wait", "40s")
    assert result.code == 1
    assert result.out == "3 replayed to letters\n"
    assert "3 of 3 failed again" in result.err
    assert "3 ValueError" in result.err
    assert "rabbit-tasks parked groups letters" in result.err
    parked = cli("parked", "list", "letters", "--json").lines
    assert [one["id"] for one in parked] == [*"defgh", *"abc"]
    again = cli("parked", "replay", "letters", "--id", "a", "--canary", "1")
    assert again.code == 1
    assert "1 of 1 failed again, the same way as before: 1 ValueError" in again.err


def test_a_canary_that_does_not_fail_is_followed_by_the_rest(
    cli: Run, lot: Lot, worker: type[Letters], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.fails = False
    lot.park(*"abcdefgh")
    result = cli(*APP, "parked", "replay", "letters", "--all", "--canary", "2",
                 "--canary-wait", "1s")  # fmt: skip
    assert (result.code, result.out) == (0, "8 replayed to letters\n"), result.err
    assert "8 of 8 parked for letters replayed" in result.err
    assert lot.depth("letters.parked") == 0
    lot.park("one")
    result = cli("parked", "replay", "letters", "--limit", "1", "--canary", "5",
                 "--canary-wait", "1s")  # fmt: skip
    assert (result.code, result.out) == (0, "1 replayed to letters\n")


def test_a_canary_that_nobody_takes_is_not_taken_for_done(cli: Run, lot: Lot) -> None:
    lot.park(*"abc")
    result = cli("parked", "replay", "letters", "--all", "--canary", "1", "--canary-wait", "300ms")
    assert result.code == 1
    assert "not known what became of 1: messages still wait, 1 in letters" in result.err
    assert "is a worker running?" in result.err
    assert lot.depth("letters.parked") == 2


def test_the_management_api_tells_early_that_a_canary_is_done(
    cli: Run,
    lot: Lot,
    worker: type[Letters],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def held(*_: object) -> bool:
        return False

    monkeypatch.setattr(canary, "_held", held)
    monkeypatch.setattr(canary, "_LAG", 0.3)
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", "http://127.0.0.1:1")
    worker.fails = False
    lot.park(*"abc")
    began = time.monotonic()
    result = cli("parked", "replay", "letters", "--all", "--canary", "1", "--canary-wait", "300s")
    assert result.code == 0, result.err
    assert time.monotonic() - began < 60


# --- edit ---------------------------------------------------------------------------------------


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have $EDITOR run this Python on the file's bytes, as `body`."""

    def use(code: str) -> None:
        script = tmp_path / "an editor.py"
        script.write_text(
            "import pathlib, sys\nfile = pathlib.Path(sys.argv[-1])\nbody = file.read_bytes()\n"
            f"{code}\nfile.write_bytes(body)\n"
        )
        monkeypatch.delenv("VISUAL", raising=False)
        monkeypatch.setenv("EDITOR", f"{sys.executable} '{script}' --wait")

    return use


def test_edit_replays_the_edited_body_and_keeps_the_first(
    cli: Run, lot: Lot, editor: Callable[[str], None]
) -> None:
    lot.park("a", "b")
    editor("body = body.replace(b'1', b'2') + b'\\n'")
    result = cli(*APP, "parked", "replay", "letters", "--id", "b", "--edit")
    assert (result.code, result.out) == (0, "1 replayed to letters\n"), result.err
    (one,) = lot.take_all("letters")
    assert one.body == b'{"n": 2}'
    assert one.properties.text("message_id") == "b"
    assert one.properties.headers["x-edited"]["body"] == b'{"n": 1}'
    assert lot.depth("letters.parked") == 1


@pytest.mark.parametrize(
    ("code", "command", "told", "kept"),
    [
        ("pass", APP, "the body is as it was; nothing was replayed", False),
        ('body = b\'{"n": "x"}\'', APP, "is not what Letters takes", True),
        ("body = b'{'", (), "is no JSON, which it was", True),
        ("sys.exit(3)", APP, "ended with 3; nothing was replayed", False),
    ],
)
def test_an_edit_that_comes_to_nothing_replays_nothing_and_says_why(
    code: str,
    command: tuple[str, ...],
    told: str,
    kept: bool,
    cli: Run,
    lot: Lot,
    editor: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lot.park("a")
    editor(code)
    result = cli(*command, "parked", "replay", "letters", "--id", "a", "--edit")
    assert (result.code, result.out) == (1, "")
    assert told in result.err
    assert lot.depth("letters.parked") == 1
    assert len(list(tmp_path.glob("rabbit-tasks-*"))) == kept


def test_edit_without_an_editor_or_a_message_says_so(
    cli: Run, lot: Lot, monkeypatch: pytest.MonkeyPatch
) -> None:
    lot.park("a")
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)
    none = cli("parked", "replay", "letters", "--id", "nobody", "--edit")
    assert none.code == 1
    assert "not parked: nobody" in none.err
    result = cli("parked", "replay", "letters", "--id", "a", "--edit")
    assert result.code == 2
    assert "Set VISUAL or EDITOR" in result.err


# --- ended --------------------------------------------------------------------------------------


def test_ctrl_c_ends_it_between_messages_says_what_was_done_and_the_same_goes_on(
    url: str, cli: Run, lot: Lot
) -> None:
    lot.park(*(f"{i:02}" for i in range(40)))
    command = process(url, "parked", "replay", "letters", "--all", "--rate", "20/s")
    until = time.monotonic() + 30
    while lot.depth("letters") < 3:
        assert time.monotonic() < until
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 130, err
    done = lot.depth("letters")
    assert out == f"{done} replayed to letters\n"
    assert f"stopped: {done} of 40 parked for letters replayed; the rest is parked" in err
    assert "Traceback" not in err
    rest = cli("parked", "replay", "letters", "--all")
    assert rest.out == f"{40 - done} replayed to letters\n"
    assert "killed" not in rest.err
    found = [one.properties.text("message_id") for one in lot.take_all("letters")]
    assert found == [f"{i:02}" for i in range(40)]


@pytest.mark.parametrize(
    ("arguments", "interrupted"),
    [
        (["list", "letters"], False),
        (["groups", "letters"], False),
        (["replay", "letters", "--all"], False),
        (["replay", "letters", "--all"], True),
    ],
)
def test_a_connection_lost_in_a_way_that_looks_like_a_cancel_is_an_error_and_exit_1(
    arguments: list[str],
    interrupted: bool,
    cli: Run,
    lot: Lot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client library cancels what waits for an answer that cannot come any more."""

    async def terms_of(*_: Any) -> None:
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        raise asyncio.CancelledError

    monkeypatch.setattr(look, "terms_of", terms_of)
    found = cli("parked", *arguments)
    assert found.code == 1
    assert found.err == (
        "error: letters.parked: connection lost (the broker did not answer); what was not moved is "
        "still parked\n"
    )


def test_a_replay_that_was_killed_is_ended_by_the_next_which_says_what_it_found(
    url: str, cli: Run, lot: Lot
) -> None:
    lot.park(*(f"{i:02}" for i in range(40)))
    command = process(url, "parked", "replay", "letters", "--all", "--rate", "20/s")
    until = time.monotonic() + 30
    while lot.depth("letters") < 3:
        assert time.monotonic() < until
    command.kill()
    command.communicate(timeout=60)
    rest = cli("parked", "replay", "letters", "--all")
    assert rest.code == 0
    found = [one.properties.text("message_id") or "" for one in lot.take_all("letters")]
    assert sorted(set(found)) == [f"{i:02}" for i in range(40)]
    for name in {name for name in found if found.count(name) > 1}:
        assert f"warning: {name} may have been replayed already" in rest.err
    assert len(found) <= 41


def test_a_replay_that_did_not_come_to_its_end_is_told_and_ended_before_anything_is_discarded(
    cli: Run, lot: Lot
) -> None:
    lot.park("a")
    assert "no replay" in cli("parked", "replay", "letters", "--resume").err
    assert cli("parked", "replay", "letters", "--resume", "--limit", "1").code == 2
    assert cli("parked", "replay", "letters", "--all").code == 0
    assert "ended in the middle" not in cli("parked", "list", "letters").err

    async def leave() -> None:
        async with Publisher.open(lot.settings) as publisher:
            left = Properties.of(message_id="b", delivery_mode=2)
            await publisher.send("letters.replaying", "letters", b"{}", left)

    asyncio.run(leave())
    lot.park("b")
    for verb in ("list", "export"):
        assert "parked replay letters --resume" in cli("parked", verb, "letters").err
    refused = cli("parked", "discard", "letters", "--all", "--yes")
    assert (refused.code, lot.depth("letters.parked")) == (1, 1)
    assert "end it first: rabbit-tasks parked replay letters --resume" in refused.err
    ended = cli("parked", "replay", "letters", "--resume")
    assert (ended.code, ended.out) == (0, "")
    assert "a replay before this was killed" in ended.err
    for verb in ("list", "export"):
        assert "ended in the middle" not in cli("parked", verb, "letters").err
    assert cli("parked", "discard", "letters", "--all", "--yes").out == "1 discarded\n"


# --- speed --------------------------------------------------------------------------------------


async def _plain(url: str, queue: str, count: int) -> float:
    """Messages a second of the plain client, with confirms, 200 outstanding: 1 KB each."""
    client = await aio_pika.connect(url)
    channel = await client.channel()
    await channel.declare_queue(
        queue, durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 2147483647}
    )
    numbers = iter(range(count))
    headers: dict[str, Any] = {
        "x-origin-queue": "letters", "x-parked-reason": "failed 5 attempts of 5",
        "x-error-type": "shop.Refused", "x-parked-at": "2026-01-01T00:00:00.000+00:00",
    }  # fmt: skip
    body = bytes(1024)

    async def pump() -> None:
        for number in numbers:
            message = aio_pika.Message(
                body, headers=headers, message_id=f"{number:036}",
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            )  # fmt: skip
            await channel.default_exchange.publish(message, queue)

    began = time.monotonic()
    await asyncio.gather(*(pump() for _ in range(200)))
    rate = count / (time.monotonic() - began)
    await client.close()
    return rate


@pytest.mark.parametrize(
    ("count", "rounds", "least"),
    [
        # On a busy machine a small run says little; a replay one by one would reach a tenth.
        pytest.param(4_000, 1, 0.25, marks=pytest.mark.timeout(180)),
        pytest.param(100_000, 3, 0.5, marks=[pytest.mark.heavy, pytest.mark.timeout(3600)]),
    ],
)
def test_replaying_many_reaches_half_of_what_the_plain_client_publishes(
    count: int, rounds: int, least: float, url: str, lot: Lot, figures: Figures
) -> None:
    async def once(number: int) -> float:
        before = await _plain(url, "letters.parked", count)
        async with connected(lot.settings, "r") as mine, Publisher.open(lot.settings) as sender:
            began = time.monotonic()
            done = await parking.replay(mine, sender, "letters", lambda _: True)
            rate = count / (time.monotonic() - began)
            assert done.chosen == count
            after = await _plain(url, f"plain {number}", count)
            channel = await mine.open()
            until = time.monotonic() + 60
            while (await channel.queue_declare("letters", passive=True)).message_count != count:
                assert time.monotonic() < until
                await asyncio.sleep(0.1)
            for queue in ("letters", f"plain {number}"):
                await channel.queue_purge(queue)
        figures.add(
            f"replay of {count}: {rate:.0f}/s, the plain client before {before:.0f}/s, "
            f"after {after:.0f}/s"
        )
        return rate / ((before + after) / 2)

    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ratios = [asyncio.run(once(number)) for number in range(rounds)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    figures.add(f"ratios: {', '.join(f'{one:.2f}' for one in ratios)}; {grown / 1024:.0f} MiB more")
    assert statistics.median(ratios) >= least
    assert grown < 150 * 1024  # the messages are more
