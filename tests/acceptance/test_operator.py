"""What holds for every command of an operator: strange names, filters that match nothing, pipes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest

from rabbit_tasks import Consumer, Message, Publisher, RetryPolicy, Settings
from rabbit_tasks.broker import connected
from rabbit_tasks.cli.parked.options import parked
from rabbit_tasks.declare import declare
from rabbit_tasks.properties import Properties
from rabbit_tasks.text import quoted
from rabbit_tasks.topology import topology_of
from tests.support.brokers import ROOT, Broker
from tests.support.commands import Result, Run
from tests.support.post import app as post
from tests.support.queues import take_all

POST: Final = ("--app", "tests.support.post:app")
Park = Callable[[str, Sequence[str]], None]


@pytest.fixture
def park(settings: Settings) -> Park:
    """Park messages with these ids for a main queue."""

    def call(queue: str, ids: Sequence[str]) -> None:
        async def send() -> None:
            async with Publisher.open(settings) as publisher:
                for name in ids:
                    told = {"x-origin-queue": queue, "x-parked-reason": "told to"}
                    properties = Properties.of(told, message_id=name, delivery_mode=2)
                    await publisher.send("parking-lot", queue, b'{"to": "anna"}', properties)

        asyncio.run(send())

    return call


@pytest.fixture
def declared(settings: Settings) -> None:
    """The app of the tests."""

    async def make() -> None:
        async with connected(settings, "test") as connection:
            await declare(connection, post.topology)

    asyncio.run(make())


def ids_in(settings: Settings, queue: str) -> list[str | None]:
    """What is in a queue, taken out of it for good."""

    async def look() -> list[str | None]:
        async with connected(settings, "test") as connection:
            return [one.properties.text("message_id") for one in await take_all(connection, queue)]

    return asyncio.run(look())


# --- a filter that matches nothing --------------------------------------------------------------

NOTHING: Final = [
    ("--error", "shop.Nope"), ("--reason", "nope"), ("--older-than", "1000d"),
    ("--match", "to=nobody"), ("--match", "header.x=nothing"), ("--group", "0" * 12),
]  # fmt: skip
VERBS: Final = {
    "list": (), "groups": (), "replay": (), "discard": ("--yes",), "export": (),
}  # fmt: skip
NO_CHOICE: Final = {"show", "import"}
"""They take no filter."""


def test_no_command_of_the_parking_lot_is_forgotten_here() -> None:
    assert {one.name for one in parked.registered_commands} == {*VERBS, *NO_CHOICE}


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize("verb", VERBS)
def test_a_filter_that_matches_nothing_is_exit_0_with_words(
    verb: str, cli: Run, park: Park, settings: Settings
) -> None:
    ids = ["m0", "m1"]
    park("letters", ids)
    for choice in NOTHING:
        done = cli("parked", verb, "letters", *VERBS[verb], *choice)
        assert done.code == 0, (choice, done)
        assert done.err.strip(), choice
        assert "error" not in done.err
        assert "m0" not in done.out
    if verb in ("list", "groups"):
        done = cli("parked", verb, "letters", "--json", *NOTHING[0])
        assert (done.code, done.lines) == (0, [])
    assert ids_in(settings, "letters.parked") == ids
    assert ids_in(settings, "letters") == []


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize("verb", VERBS)
def test_an_empty_parking_queue_is_exit_0_with_words(verb: str, cli: Run) -> None:
    everything = ("--all",) if verb in ("replay", "discard") else ()
    done = cli("parked", verb, "letters", *VERBS[verb], *everything)
    assert done.code == 0
    assert done.err.strip()


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("option", ["--id", "--error", "--reason", "--group", "--match"])
def test_an_empty_filter_is_wrong_usage_and_takes_nothing(
    verb: str, option: str, cli: Run, settings: Settings, declared: None, park: Park
) -> None:
    """As a script has it whose variable was not set; also beside a limit that would do."""
    park("letters", ["a"])
    for beside in ((), ("--limit", "5")):
        refused = cli("parked", verb, "letters", *VERBS[verb], option, "", *beside)
        assert (refused.code, refused.out) == (2, "")
        assert option in refused.err
        assert "empty" in refused.err
    assert ids_in(settings, "letters.parked") == ["a"]


@pytest.mark.parametrize(
    "arguments",
    [("--app", "", "topology", "show"), ("--url", "", "topology", "check"),
     ("parked", "list", ""), ("parked", "discard", "", "--all"), ("topology", "migrate", ""),
     ("topology", "export", "--file", ""), ("parked", "show", "letters", ""),
     ("parked", "replay", "letters", "--all", "--to", ""), ("parked", "list", ".parked")],
)  # fmt: skip
def test_an_empty_value_is_wrong_usage(arguments: tuple[str, ...], cli: Run) -> None:
    refused = cli(*arguments)
    assert (refused.code, refused.out) == (2, "")
    assert "empty" in refused.err


def test_importing_nothing_is_exit_0_with_words(cli: Run, declared: None) -> None:
    done = cli("parked", "import", "letters", stdin=b"")
    assert done.code == 0
    assert done.err.strip()


# --- names --------------------------------------------------------------------------------------

APP: Final = """
from datetime import timedelta
from typing import Any
from rabbit_tasks import App, Consumer, Message, RetryPolicy

class Only(Consumer[dict[str, Any]]):
    queue = {queue!r}
    retry = RetryPolicy(attempts=2, base=timedelta(milliseconds=100), jitter=False)

    async def handle(self, body: dict[str, Any], message: Message) -> None: ...

app = App("only", [Only()])
"""


class Only(Consumer[bytes]):
    """To see how long the names of the queues get that serve a main queue."""

    queue = "q"
    retry = RetryPolicy(attempts=2, base=timedelta(milliseconds=100), jitter=False)

    async def handle(self, body: bytes, message: Message) -> None: ...


LONGEST: Final = 255 - max(len(one.name) - 1 for one in topology_of([Only]).queues)
NAMES: Final = {
    "dots, spaces and slashes": " /a.b..c  d//.",
    "an option": "--all",
    "all that may be": "A-z_0/9 .:@#,+",
    "the longest": "a b/." * (LONGEST // 5) + "x" * (LONGEST % 5),
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_queues_name_goes_through_every_command(
    name: str, cli: Run, tmp_path: Path, park: Park, settings: Settings, broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", broker.management_url)
    module = f"only_{uuid.uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(APP.format(queue=name))
    monkeypatch.syspath_prepend(tmp_path)

    def well(*arguments: str, stdin: bytes = b"", code: int = 0) -> Result:
        done = cli("--app", f"{module}:app", *arguments, stdin=stdin)
        assert done.code == code, (arguments, done)
        return done

    assert well("topology", "plan", code=1).out
    assert name in well("topology", "declare").out
    assert well("topology", "check").out == ""
    assert well("topology", "plan").code == 0
    for form in ("tree", "mermaid", "dot", "svg"):
        assert well("topology", "show", "--format", form).out
    well("topology", "export")
    well("topology", "export", "--check")
    well("topology", "export", "--format", "k8s", "--cluster", "mq")
    if not set("@/") & set(name):  # (Terraform's provider has no way to write these)
        well("topology", "export", "--format", "terraform")
    well("topology", "migrate", "--dry-run", "--", name)
    well("publish", "--", name, "{}")
    assert ids_in(settings, name) != []
    ids = ["m 1", "m '2'", "m3"]
    park(name, ids)
    # A name that looks like an option stands behind --.
    listed = well("parked", "list", "--json", "--", name).lines
    assert [one["id"] for one in listed] == ids
    assert [one["origin"] for one in listed] == [name] * 3
    assert well("parked", "groups", "--json", "--", name).lines[0]["count"] == 3
    (row,) = well("parked", "--json").lines
    assert (row["queue"], row["parked"]) == (f"{name}.parked", 3)
    assert "m 1" in well("parked", "show", "--", name, "m 1").out
    exported = well("parked", "export", "--", name).out
    assert well("parked", "discard", "--all", "--yes", "--", name).out.startswith("3 ")
    well("parked", "import", "--", name, stdin=exported.encode())
    assert [one["id"] for one in well("parked", "list", "--json", "--", name).lines] == ids
    done = well("doctor", "--json")
    parked_row = next(row for row in done.lines if row["about"] == "parked")
    assert parked_row["says"].startswith(f"{quoted(name)}: 3 messages")
    well("parked", "replay", "--all", "--dry-run", "--", name)
    well("parked", "replay", "--all", "--", name)
    assert len(ids_in(settings, name)) == 3


def test_a_foreign_queue_of_255_bytes_goes_through_every_command(
    cli: Run, settings: Settings
) -> None:
    name = "a b/." * 51

    async def make() -> None:
        async with connected(settings, "test") as connection, Publisher.open(settings) as publisher:
            channel = await connection.open()
            await channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
            await publisher.send("", name, b"x", Properties.of(message_id="m", delivery_mode=2))

    asyncio.run(make())
    assert len(name) == 255
    listed = cli("parked", "list", name, "--foreign", "--json")
    assert (listed.code, [one["id"] for one in listed.lines]) == (0, ["m"])
    exported = cli("parked", "export", name, "--foreign")
    assert exported.code == 0
    assert cli("parked", "discard", name, "--foreign", "--all", "--yes").code == 0
    imported = cli("parked", "import", name, "--foreign", stdin=exported.out.encode())
    assert imported.code == 0, imported
    assert ids_in(settings, name) == ["m"]


@pytest.mark.parametrize("name", ["grüße", "a\nb", "quo'te", "\u202eabc", "\udc80", "a\x1b[31m"])
def test_a_name_that_the_client_cannot_carry_is_refused_in_one_line_when_the_class_is_built(
    name: str, cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"only_{uuid.uuid4().hex}"
    source = APP.format(queue=name)
    (tmp_path / f"{module}.py").write_bytes(source.encode("utf-8", "backslashreplace"))
    monkeypatch.syspath_prepend(tmp_path)
    done = cli("--app", f"{module}:app", "topology", "show")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith("error: Only.queue ")
    assert "take ASCII letters, digits, spaces and -_.:@#,/+" in line
    assert line.isprintable()


@pytest.mark.parametrize("verb", [*VERBS, "import"])
@pytest.mark.parametrize("name", ["grüße \x1b[31m", "q" * 256])
def test_such_a_name_on_the_command_line_is_wrong_usage_in_one_line(
    name: str, verb: str, cli: Run
) -> None:
    more = ("--all", *VERBS[verb]) if verb in ("replay", "discard") else ()
    done = cli("parked", verb, name, *more)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.isprintable()


# --- pipes --------------------------------------------------------------------------------------

LISTINGS: Final = {
    "parked list": ("parked", "list", "letters"),
    "parked list --json": ("parked", "list", "letters", "--json"),
    "parked groups": ("parked", "groups", "letters"),
    "parked": ("parked",),
    "parked export": ("parked", "export", "letters"),
    "topology plan": ("topology", "plan"),
    "doctor": ("doctor",),
}
OTHERS: Final = {
    "parked show": ("parked", "show", "letters", "m1"),
    "topology show": ("topology", "show"),
    "topology show --format svg": ("topology", "show", "--format", "svg"),
    "topology export": ("topology", "export", "--format", "terraform", "--file", "-"),
    "topology permissions": ("topology", "permissions"),
    "topology check": ("topology", "check"),
    "doctor --json": ("doctor", "--json"),
}
LONG: Final = {"parked list --json", "parked export"}
"""Longer than a pipe takes at once: whoever writes them is told that nobody reads on."""


@pytest.fixture
def full(settings: Settings, declared: None) -> list[str]:
    """More messages than a pipe takes the list of; their ids."""
    ids = [f"m{i}" for i in range(1200)]

    async def fill() -> None:
        async with Publisher.open(settings) as publisher:
            told = {"x-origin-queue": "letters", "x-parked-reason": "told to"}
            for start in range(0, len(ids), 200):
                await asyncio.gather(
                    *(
                        publisher.send(
                            "parking-lot", "letters", b'{"to": "anna"}' + b" " * 100,
                            Properties.of(told, message_id=name, delivery_mode=2),
                        )
                        for name in ids[start : start + 200]
                    )
                )  # fmt: skip

    asyncio.run(fill())
    return ids


def piped(url: str, *arguments: str) -> tuple[int, str, str]:
    """Into `head -1`: the command's exit code, what came through, and its stderr."""
    first = subprocess.Popen(
        [sys.executable, "-m", "rabbit_tasks", *POST, *arguments],
        cwd=ROOT,
        env={**os.environ, "RABBIT_TASKS_URL": url, "PYTHONUNBUFFERED": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert first.stdout is not None
    assert first.stderr is not None
    head = subprocess.run(
        ["head", "-1"], stdin=first.stdout, capture_output=True, timeout=60, check=True
    )
    first.stdout.close()  # ours; else the pipe would still have a reader
    err = first.stderr.read().decode()
    first.stderr.close()
    return first.wait(60), head.stdout.decode(), err


@pytest.mark.parametrize("listings", [LISTINGS, pytest.param(OTHERS, marks=pytest.mark.heavy)])
def test_every_listing_goes_into_head_without_a_traceback_and_leaves_the_queue_as_it_was(
    listings: dict[str, tuple[str, ...]], url: str, full: list[str], settings: Settings
) -> None:
    for name, arguments in listings.items():
        code, out, err = piped(url, *arguments)
        for word in ("Traceback", "Exception", "Error", "never retrieved"):
            assert word not in err, (name, err)
        # Written in full, it is as if there were no pipe; what was not is told by a 1.
        assert code in ({1} if name in LONG else {0, 1}), (name, code, err)
        assert len(out.splitlines()) == (0 if name == "topology check" else 1), (name, out, err)
    closed = subprocess.run(
        ["bash", "-c", '"$@" | true; exit "${PIPESTATUS[0]}"', "-", sys.executable, "-m",
         "rabbit_tasks", *POST, *LISTINGS["parked list --json"]],
        cwd=ROOT, env={**os.environ, "RABBIT_TASKS_URL": url}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert closed.returncode == 1
    assert "Traceback" not in closed.stderr
    assert "Exception" not in closed.stderr
    assert ids_in(settings, "letters.parked") == full


@pytest.mark.parametrize("command", [("topology", "plan"), ("doctor",)])
@pytest.mark.parametrize("is_fine", [True, False])
def test_a_reader_who_has_enough_changes_no_verdict(
    command: tuple[str, ...], is_fine: bool, url: str, declared: None, broker: Broker, vhost: str
) -> None:
    if not is_fine:
        broker.delete(vhost, "queues", "letters.parked")
    closed = subprocess.run(
        ["bash", "-c", '"$@" | true; exit "${PIPESTATUS[0]}"', "-", sys.executable, "-m",
         "rabbit_tasks", *POST, *command],
        cwd=ROOT, env={**os.environ, "RABBIT_TASKS_URL": url}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert closed.returncode == (0 if is_fine else 1)
    assert "Traceback" not in closed.stderr
    assert closed.stderr  # and the sum of it is told
