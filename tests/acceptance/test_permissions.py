"""Each part of the work under a user who may do that and nothing else."""

from __future__ import annotations

import asyncio
import json
import shlex
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rabbit_tasks import Publisher, Settings
from rabbit_tasks.broker import connected
from rabbit_tasks.properties import Properties
from rabbit_tasks.topology import PARKING_LOT
from tests.support.brokers import Broker
from tests.support.commands import Result, Run
from tests.support.queues import depth
from tests.support.workers import Runs, WorkerProcess, wait_until

APP = ("--app", "tests.support.obedient:app")
QUEUE = "obey.async"


@pytest.fixture
def may(broker: Broker, vhost: str, cli: Run) -> Iterator[Callable[..., str]]:
    """A URL of a user who has the rights for one word, as the command tells them."""
    told = {line["for"]: line for line in cli(*APP, "topology", "permissions", "--json").lines}
    users: list[str] = []

    def make(word: str, **other: str) -> str:
        users.append(f"{word} {uuid.uuid4().hex[:6]}")
        broker.create_user(users[-1], "p")
        rights = {kind: told[word][kind] for kind in ("configure", "write", "read")}
        broker.allow(vhost, users[-1], **{**rights, **other})
        return broker.url(vhost, users[-1], "p")

    yield make
    for user in users:
        broker.delete_user(user)


@pytest.fixture
def ready(settings: Settings) -> Callable[..., int]:
    """How many messages wait in these queues."""

    def count(*queues: str) -> int:
        async def look() -> int:
            async with connected(settings, "test") as connection:
                return sum([await depth(connection, queue) for queue in queues])

        return asyncio.run(look())

    return count


def fine(result: Result) -> Result:
    assert result.code == 0, result.err
    return result


def test_declare_work_publish_and_parked_each_run_under_the_least_rights(
    cli: Run,
    may: Callable[..., str],
    start_worker: Callable[..., WorkerProcess],
    runs: Runs,
    ready: Callable[..., int],
    tmp_path: Path,
) -> None:
    declares, works, publishes, parks = map(may, ("declare", "work", "publish", "parked"))
    assert f"created {QUEUE}" in fine(cli(*APP, "--url", declares, "topology", "declare")).out
    assert fine(cli(*APP, "--url", declares, "topology", "declare")).out == ""
    assert fine(cli(*APP, "--url", declares, "topology", "check")).out == ""

    def start() -> WorkerProcess:
        return start_worker(QUEUE, RABBIT_TASKS_URL=works, RABBIT_TASKS_GRACE="2s")

    go = tmp_path / "go"
    orders = [{"do": "raise", "times": 2}, {"do": "park"}, {"until": str(go)}, {"seconds": 60}]
    publish = ("--url", publishes, *APP, "publish", QUEUE)
    worker = start()
    done, parked = fine(cli(*publish, *map(json.dumps, orders[:2]))).out.split()
    wait_until(lambda: runs.all("end", done) and ready(f"{QUEUE}.parked") == 1)
    assert runs.attempts(done) == [1, 2, 3]

    deadly = fine(cli(*publish, json.dumps(orders[2]))).out.strip()
    for deaths in (1, 2):
        wait_until(lambda: len(runs.all("start", deadly)) == deaths)  # noqa: B023
        worker.kill()
        worker = start()
    crashed = [f"{QUEUE}.crashed.{delay}" for delay in ("1s", "2s", "4s", "8s")]
    wait_until(lambda: ready(*crashed) == 1)
    worker.kill()
    go.touch()

    lot = ("--url", parks, "parked")
    assert [line["id"] for line in fine(cli(*lot, "list", QUEUE, "--json")).lines] == [parked]
    assert parked in fine(cli(*lot, "show", QUEUE, parked)).out
    fine(cli(*lot, "replay", QUEUE, "--all"))
    # (The deadly one may be back as well by now.)
    wait_until(lambda: ready(f"{QUEUE}.parked") == 0 and ready(QUEUE) >= 1)

    slow = fine(cli(*publish, json.dumps(orders[3]))).out.strip()
    worker = start()
    wait_until(lambda: runs.all("start", slow) and ready(f"{QUEUE}.parked") == 1)
    assert worker.terminate() == 0
    assert "ACCESS_REFUSED" not in worker.log
    assert ready(QUEUE) >= 1  # put back
    fine(cli(*lot, "discard", QUEUE, "--id", parked, "--yes"))
    assert ready(f"{QUEUE}.parked") == 0


@pytest.mark.parametrize(
    ("word", "without", "command"),
    [
        ("publish", {"write": "^$"}, ["publish", QUEUE, "{}"]),
        ("declare", {"configure": r"^obey\..*$"}, ["topology", "declare"]),
        ("declare", {"configure": "^parking-lot$"}, ["topology", "declare"]),
        ("declare", {"read": r"^obey\..*$"}, ["topology", "declare"]),
        ("declare", {"read": "^parking-lot$"}, ["topology", "declare"]),
        ("declare", {"write": r"^(parking-lot|obey.*)$"}, ["topology", "declare"]),
        ("declare", {"write": r"^(amq\.default|obey.*)$"}, ["topology", "declare"]),
        ("declare", {"write": r"^(amq\.default|parking-lot)$"}, ["topology", "declare"]),
        ("parked", {"read": "^$"}, ["parked", "list", QUEUE]),
        ("parked", {"write": "^$"}, ["parked", "replay", QUEUE, "--all"]),
    ],
)
def test_with_any_of_these_rights_gone_it_is_told_which(
    word: str,
    without: dict[str, str],
    command: list[str],
    cli: Run,
    may: Callable[..., str],
    settings: Settings,
) -> None:
    if word != "declare":
        fine(cli(*APP, "topology", "declare"))
    if word == "parked":
        asyncio.run(_park(settings))
    refused = cli("--url", may(word, **without), *APP, *command)
    assert refused.code == 1
    assert "ACCESS_REFUSED" in refused.err or "permission" in refused.err, refused.err
    assert len(refused.err.splitlines()) <= 4, refused.err


async def _park(settings: Settings) -> None:
    async with Publisher.open(settings) as publisher:
        await publisher.send(PARKING_LOT, QUEUE, b"{}", Properties.of({}, delivery_mode=2))


def test_a_worker_without_one_of_its_rights_holds_the_message_and_says_which(
    cli: Run,
    may: Callable[..., str],
    start_worker: Callable[..., WorkerProcess],
    ready: Callable[..., int],
) -> None:
    fine(cli(*APP, "topology", "declare"))
    everything = "^(obey.*|parking-lot)$"  # 4.3 lets it begin only with some permission on each
    for order, write, read in (
        ("park", r"^(amq\.default|obey\..*)$", everything),
        ("raise", r"^(parking-lot|obey\..*)$", everything),
        ("ok", r"^(amq\.default|parking-lot|obey\..*)$", "^$"),
    ):
        worker = start_worker(QUEUE, RABBIT_TASKS_URL=may("work", write=write, read=read)).ready()
        fine(cli(*APP, "publish", QUEUE, json.dumps({"do": order})))
        wait_until(lambda: "ACCESS_REFUSED" in worker.log)  # noqa: B023
        assert worker.is_running
        worker.kill()
    # (The second parks what the first has left.)
    wait_until(lambda: ready(QUEUE, f"{QUEUE}.parked") == 3)


def test_permissions_are_told_as_commands_to_paste(cli: Run, vhost: str) -> None:
    lines = fine(cli(*APP, "topology", "permissions", "--user", "it's")).out.splitlines()
    assert lines[::2] == ["# publish", "# work", "# declare", "# parked"]
    for line in lines[1::2]:
        words = shlex.split(line)
        assert words[:5] == ["rabbitmqctl", "set_permissions", "-p", vhost, "it's"]
        assert len(words) == 8
