"""`parked`, `parked list`, `parked groups`: what an operator reads."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rabbit_tasks import Settings
from rabbit_tasks.properties import Properties
from rabbit_tasks.publisher import Publisher
from tests.acceptance.test_cli import Lot as FewLot
from tests.acceptance.test_cli import process
from tests.support.brokers import ROOT, Broker
from tests.support.commands import Run

APP = ("--app", "tests.support.post:app")


class Lot(FewLot):
    def park_many(self, count: int) -> None:
        async def send() -> None:
            async with Publisher.open(self._settings) as publisher:
                for first in range(0, count, 100):
                    await asyncio.gather(
                        *(
                            publisher.send(
                                "parking-lot", "letters", b"{}",
                                Properties.of({"x-parked-reason": "why " * 60}, message_id=str(i)),
                            )
                            for i in range(first, min(first + 100, count))
                        )
                    )  # fmt: skip

        asyncio.run(send())


@pytest.fixture
def lot(settings: Settings) -> Lot:
    return Lot(settings)


def ago(**parts: float) -> str:
    return (datetime.now(UTC) - timedelta(**parts)).isoformat(timespec="milliseconds")


def names(cli: Run, *options: str) -> list[str]:
    found = cli("parked", "list", "letters", "--json", *options)
    assert found.code == 0, found.err
    return [one["id"] for one in found.lines]


def test_list_takes_every_filter_and_sorts(cli: Run, lot: Lot) -> None:
    lot.park("a", b'{"user": {"id": 7}}', x_error_type="shop.Bad", x_parked_at=ago(hours=3))
    lot.park("b c", b'{"user": {"id": 8}, "more": "text"}', x_parked_at=ago(minutes=1))
    lot.park("it's", b"no JSON", x_error_type="shop.Worse", tenant="acme")
    for options, wanted in [
        ((), ["a", "b c", "it's"]),
        (("--error", "Bad"), ["a"]),
        (("--reason", "TOLD"), ["a", "b c", "it's"]),
        (("--match", "user.id=8"), ["b c"]),
        (("--match", "header.tenant=acme"), ["it's"]),
        (("--older-than", "2h"), ["a"]),
        (("--newer-than", "2h"), ["b c"]),
        (("--limit", "2"), ["a", "b c"]),
        (("--sort=-bytes",), ["b c", "a", "it's"]),
        (("--sort=-bytes", "--limit", "1"), ["b c"]),
        (("--sort", "error"), ["b c", "a", "it's"]),
        (("--sort=-parked",), ["it's", "b c", "a"]),
        (("--id", "it's", "--id", "b c"), ["b c", "it's"]),
    ]:
        assert names(cli, *options) == wanted, options
    assert (
        "1 do not tell when they were parked"
        in cli("parked", "list", "letters", "--older-than", "2h").err
    )
    nothing = cli("parked", "list", "letters", "--error", "None")
    assert (nothing.code, nothing.out) == (0, "")
    assert "none of the 3 parked for letters is meant" in nothing.err
    absent = cli("parked", "list", "letters", "--id", "a", "--id", "z")
    assert absent.code == 1
    assert "error: not parked: z" in absent.err
    assert names(cli) == ["a", "b c", "it's"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--older-than", "2x"), "is no duration"),
        (("--newer-than", "soon"), "is no duration"),
        (("--match", "x"), "is not FIELD=VALUE"),
        (("--group", "x"), "is no fingerprint"),
        (("--sort", "colour"), "it takes parked, id"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_a_wrong_value_is_wrong_usage(cli: Run, options: tuple[str, ...], said: str) -> None:
    for verb in ("list", "groups"):
        if verb == "list" or "--sort" not in options:
            wrong = cli("parked", verb, "letters", *options)
            assert wrong.code == 2
            assert said in wrong.err


def test_groups_have_a_row_each_with_an_example_and_their_messages_are_listed(
    cli: Run, lot: Lot
) -> None:
    old, new = ago(hours=3), ago(minutes=1)
    lot.park("a", x_error_type="shop.Bad", x_error_message="order 7\x1b[2J", x_parked_at=new)
    lot.park("b", x_error_type="shop.Bad", x_error_message="order 8", x_parked_at=old)
    lot.park("c", x_error_fingerprint="0123456789ab", x_error_type="shop.Bad")
    lot.park("d e'f", x_parked_reason="no address 17")
    lot.park("g", x_parked_reason="no address 18")
    lot.park("h", x_parked_reason="no address 19")
    told = cli("parked", "groups", "letters", "--json").lines
    assert [(one["count"], one["error"], one["example"]) for one in told] == [
        (3, None, "d e'f"), (2, "shop.Bad", "a"), (1, "shop.Bad", "c"),
    ]  # fmt: skip
    assert told[1]["message"] == "order 7\\x1b[2J"
    assert (told[1]["first"][:19], told[1]["last"][:19]) == (old[:19], new[:19])
    assert told[0]["first"] is None
    assert told[2]["fingerprint"] == "0123456789ab"
    shown = cli("parked", "groups", "letters")
    assert shown.out.count("\n") == 4
    assert "\x1b" not in shown.out
    assert "6 messages in 3 groups" in shown.err
    command = shlex.split(shown.err.split("rabbit-tasks ")[1])
    assert [one["id"] for one in cli(*command, "--json").lines] == ["d e'f", "g", "h"]
    assert [one["count"] for one in cli("parked", "groups", "letters", "--error", "Bad",
                                        "--json").lines] == [2, 1]  # fmt: skip
    nothing = cli("parked", "groups", "letters", "--error", "None")
    assert (nothing.code, nothing.out) == (0, "")
    assert "none of the 6 parked for letters is meant" in nothing.err
    assert names(cli) == ["a", "b", "c", "d e'f", "g", "h"]


def test_alone_it_shows_every_parking_queue(
    cli: Run, lot: Lot, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lot.park("a", x_error_type="shop.Bad", x_parked_at=ago(hours=3))
    lot.park("b", x_error_type="shop.Bad")
    lot.park("c", queue="texts")
    neither = cli("parked")
    assert neither.code == 2
    assert "RABBIT_TASKS_MANAGEMENT_URL" in neither.err
    assert "--app" in neither.err
    of_app = cli(*APP, "parked", "--json")
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", broker.management_url)
    of_api = cli("parked", "--json")
    assert of_app.lines == of_api.lines
    found = {one["queue"]: one for one in of_api.lines}
    assert {name: one["parked"] for name, one in found.items()} == {
        "blobs.parked": 0, "letters.parked": 2, "texts.parked": 1,
    }  # fmt: skip
    assert found["letters.parked"]["top"]["error"] == "shop.Bad"
    table = cli("parked")
    assert "letters.parked" in table.out
    assert "3h" in table.out
    assert "2 of shop.Bad" in table.out
    assert "blobs" not in table.out
    assert "3 parked in 3 parking queues" in table.err
    assert names(cli) == ["a", "b"]


@pytest.mark.parametrize("options", [("list", "letters"), ("list", "letters", "--json")])
def test_a_reader_that_has_enough_ends_it_without_a_word(
    lot: Lot, url: str, options: tuple[str, ...]
) -> None:
    for name in "abc":
        lot.park(name, x_parked_reason="why " * 60)
    lot.park_many(1500)
    with process(url, "parked", *options) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.readline()
        command.stdout.close()
        assert command.wait(60) == 1
        assert command.stderr.read() == ""
    assert lot.depth("letters.parked") == 1503


def test_a_reader_that_waits_does_not_keep_the_queue(lot: Lot, url: str, cli: Run) -> None:
    lot.park_many(1500)
    with process(url, "parked", "list", "letters", "--json") as slow:
        assert slow.stdout is not None
        slow.stdout.readline()  # and then it goes for a coffee, with more to come than a pipe holds
        assert len(names(cli, "--limit", "3")) == 3
        assert slow.poll() is None
        assert len(slow.stdout.read().splitlines()) == 1499
        assert slow.wait(60) == 0


@pytest.mark.parametrize("verb", ["list", "groups"])
def test_a_full_disk_is_one_line_and_exit_1(verb: str, lot: Lot, url: str, cli: Run) -> None:
    lot.park_many(40)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rabbit_tasks", "parked", verb, "letters"],
            cwd=ROOT, env={**os.environ, "RABBIT_TASKS_URL": url}, text=True,
            stdout=full, stderr=subprocess.PIPE, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device: where stdout goes")
    assert len(done.stderr.splitlines()) == 1
    assert names(cli) == [str(number) for number in range(40)]


def test_no_room_for_what_nobody_has_read_yet_is_one_line_and_exit_1(
    lot: Lot, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lot.park_many(3)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "r+b", 0))  # noqa: SIM115
    found = cli("parked", "list", "letters")
    assert found.code == 1
    assert found.err.startswith("error: No space left on device")


def test_interrupted_it_leaves_the_queue_whole_and_in_order(lot: Lot, url: str, cli: Run) -> None:
    lot.park_many(1500)
    before = names(cli)
    script = (
        "import os, signal, sys\nfrom rabbit_tasks.cli import main\n"
        "from rabbit_tasks.cli.lines import Lines\nwrite = Lines.write\n"
        "def once(out, text):\n    Lines.write = write\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "Lines.write = once\n"
        "sys.argv = ['rabbit-tasks', 'parked', 'list', 'letters', '--json']\nmain()\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "RABBIT_TASKS_URL": url},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _, err = done.communicate(timeout=60)
    assert done.returncode == 130
    assert "Traceback" not in err
    assert names(cli) == before
