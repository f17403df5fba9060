"""`rabbit-tasks doctor`: exit codes, what is on stdout, and brokers that are hurt."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rabbit_tasks import Publisher, Settings
from rabbit_tasks.broker import connected
from rabbit_tasks.declare import declare
from rabbit_tasks.doctor import Row, diagnose, examine
from rabbit_tasks.properties import Properties
from tests.conftest import eventually
from tests.support.brokers import ROOT, Broker
from tests.support.cluster import the_cluster, why_there_is_none
from tests.support.commands import Result, Run
from tests.support.obedient import app as obedient
from tests.support.post import app
from tests.support.workers import wait_until

APP = ("--app", "tests.support.post:app")
SECRET = "s3cret"


@pytest.fixture
def declared(settings: Settings) -> None:
    """The app of the tests, with a message that is parked."""

    async def make() -> None:
        async with (
            connected(settings, "test") as connection,
            Publisher.open(settings) as publisher,
        ):
            await declare(connection, app.topology)
            await publisher.send("parking-lot", "letters", b"{}", Properties.of(delivery_mode=2))

    asyncio.run(make())


def states(result: Result) -> set[str]:
    return {row["state"] for row in result.lines}


@pytest.mark.usefixtures("declared")
def test_warnings_are_no_failure_and_words_are_on_stderr(cli: Run) -> None:
    done = cli(*APP, "doctor")
    assert done.code == 0
    assert "letters: 1 messages wait for a person; rabbit-tasks parked list letters" in done.out
    assert done.err.endswith("1 warning, 0 fault, 1 unseen\n")


@pytest.mark.usefixtures("declared")
def test_in_a_pipe_every_row_is_one_aligned_line(cli: Run) -> None:
    lines = cli(*APP, "doctor").out.splitlines()
    assert {line.split()[0] for line in lines} == {"ok", "warning", "unseen"}
    assert all(line == line.rstrip() for line in lines)
    where = {line.index(word) for line, word in (
        (next(x for x in lines if " version " in x), "RabbitMQ"),
        (next(x for x in lines if " parked " in x), "letters"),
    )}  # fmt: skip
    assert len(where) == 1


@pytest.mark.usefixtures("declared")
def test_as_json_every_row_is_one_object_with_its_remedy(cli: Run) -> None:
    done = cli(*APP, "doctor", "--json")
    assert done.code == 0
    assert all(set(row) == {"state", "about", "says", "remedy"} for row in done.lines)
    assert states(done) == {"ok", "warning", "unseen"}
    (parked,) = [row for row in done.lines if row["about"] == "parked"]
    assert parked["remedy"] == "rabbit-tasks parked list letters"


def test_a_fault_is_exit_1(cli: Run) -> None:
    done = cli(*APP, "doctor", "--json")
    assert done.code == 1
    (fault,) = [row for row in done.lines if row["state"] == "fault"]
    assert fault["remedy"] == "rabbit-tasks topology declare"


def test_it_needs_no_app(cli: Run, monkeypatch: pytest.MonkeyPatch, broker: Broker) -> None:
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", broker.management_url)
    done = cli("doctor", "--json")
    assert done.code == 0
    assert "no app is named" in done.out


def test_a_broker_that_cannot_be_reached_is_one_fault_and_shows_no_password(cli: Run) -> None:
    done = cli("--url", f"amqp://me:{SECRET}@127.0.0.1:1/", *APP, "doctor", "--json")
    assert done.code == 1
    assert [row["about"] for row in done.lines if row["state"] == "fault"] == ["connection"]
    assert SECRET not in done.out + done.err


def test_a_password_is_shown_nowhere(cli: Run, broker: Broker, vhost: str) -> None:
    broker.create_user("doctor-me", SECRET)
    broker.allow(vhost, "doctor-me", read="^$")
    try:
        url = broker.url(vhost, "doctor-me", SECRET)
        done = cli("--url", url, *APP, "doctor")
        assert done.code == 1
        assert "doctor-me" in done.out
        assert SECRET not in done.out + done.err
    finally:
        broker.delete_user("doctor-me")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--url", "nonsense", "doctor"], "RABBIT_TASKS_URL"),
        (["--app", "nowhere:app", "doctor"], "nowhere"),
        (["doctor", "--nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_is_exit_2(cli: Run, given: list[str], says: str) -> None:
    done = cli(*given)
    assert done.code == 2
    assert says in done.err


# --- brokers that are hurt ----------------------------------------------------------------------


@contextmanager
def alarm(broker: Broker) -> Iterator[None]:
    try:
        if not broker.ctl("set_vm_memory_high_watermark", "0.00001"):
            pytest.skip("no alarm can be raised: RABBIT_TASKS_TEST_BROKER does not take `ctl`")
        yield
    finally:
        broker.ctl("set_vm_memory_high_watermark", "0.6")
        # The management API tells of it for some seconds more: to the next test, it would be a fault.
        wait_until(lambda: not broker.api("GET", "/nodes")[0]["mem_alarm"], within=60, every=0.2)


@pytest.mark.usefixtures("declared")
def test_a_memory_alarm_is_a_fault_with_and_without_the_management_api(
    cli: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alarm(broker):
        blind = cli(*APP, "doctor", "--json")
        monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", broker.management_url)
        # (It knows some seconds later.)
        asyncio.run(eventually(lambda: broker.api("GET", "/nodes")[0]["mem_alarm"]))
        seeing = cli(*APP, "doctor", "--json")
    for done, says in ((blind, "holds publishers back"), (seeing, "memory alarm")):
        assert done.code == 1
        (fault,) = [row for row in done.lines if row["state"] == "fault"]
        assert fault["about"] == "alarms"
        assert says in fault["says"]
        assert "rabbitmq-diagnostics" in fault["remedy"]
        # and what needs no publishing is told all the same
        assert {"topology", "permissions", "parked"} <= {row["about"] for row in done.lines}
    monkeypatch.delenv("RABBIT_TASKS_MANAGEMENT_URL")
    assert cli(*APP, "doctor").code == 0


@pytest.mark.usefixtures("declared")
def test_a_frozen_broker_is_a_fault_within_the_time_limits(url: str, broker: Broker) -> None:
    if not broker.can_be_hurt:
        pytest.skip("this broker must not be frozen: RABBIT_TASKS_TEST_BROKER is not set")
    broker.hurt("freeze")
    try:
        since = time.monotonic()
        done = doctor(url, RABBIT_TASKS_CONNECT_TIMEOUT="2")
        took = time.monotonic() - since
    finally:
        broker.hurt("thaw")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "did not answer within 2.0 s" in done.stdout
    assert took < 15


def doctor(url: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rabbit_tasks", *APP, "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, "RABBIT_TASKS_URL": url, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(why_there_is_none()), reason=why_there_is_none())
async def test_nodes_that_were_killed_are_told_with_the_queues_that_lack_them() -> None:
    with the_cluster() as cluster:
        first, *others = cluster.nodes
        names = {node: name for name, node in cluster.name_of.items()}
        settings = Settings(
            url=first.url(cluster.vhost), management_url=first.management_url, heartbeat=2
        )
        async with connected(settings, "test") as connection:
            await declare(connection, obedient.topology)
        await eventually(lambda: set(cluster.members().values()) == {3})
        found = await told(settings)
        assert "fault" not in {row.state for row in found}
        assert "3 nodes, all up: it survives the loss of 1" in {row.says for row in found}
        try:
            for down, dying in enumerate(others, 1):
                await asyncio.to_thread(dying.hurt, "kill")
                says = f"{down} of 3 nodes down"
                state, lacks = [
                    ("warning", f"lack nodes ({names[dying]})"),
                    ("fault", "without a majority"),
                ][down - 1]

                async def is_told(state: str = state, lacks: str = lacks, says: str = says) -> bool:
                    """Some seconds late: the management API has to notice."""
                    found = await told(settings)
                    return any(says in row.says and row.state == "fault" for row in found) and any(
                        lacks in row.says and row.state == state for row in found
                    )

                await eventually(is_told, within=90)
        finally:
            for node in others:
                await asyncio.to_thread(node.hurt, "start")


async def told(settings: Settings) -> list[Row]:
    return diagnose(await examine(settings, obedient))
