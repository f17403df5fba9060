"""`rabbit-tasks chaos`: its account is true, and it leaves the broker as it found it.

The large runs are the command itself:

    rabbit-tasks chaos --tasks 100000 --kill 0.05 --workers 4
    rabbit-tasks chaos --tasks 100000 --kill 0.05 --workers 4 --fail 0.1 --poison 20
    rabbit-tasks chaos --tasks 20000 --hurts 5 --broker-command 'kill it && sleep 2 && start it'
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
from pamqp.commands import Basic

from rabbit_tasks.broker import Connection
from rabbit_tasks.cli import command
from tests.conftest import eventually
from tests.support.brokers import ROOT, Broker
from tests.support.line import line
from tests.support.workers import processes

NO_TASK_DIES_TWICE = "330"
"""A seed: of 2,000 tasks 120 kill their worker, and none a second time, which takes seconds."""


class Run:
    """The command in a process of its own."""

    def __init__(self, url: str, folder: Path, *arguments: str) -> None:
        self.report_path = folder / "report.json"
        self._log = folder / "chaos.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rabbit_tasks", "chaos", *arguments,
                 "--report", str(self.report_path), "--ledger", str(folder / "ledger")],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "RABBIT_TASKS_URL": url},
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def written(self) -> bytes:
        """The ledger."""
        path = self.report_path.parent / "ledger" / "ledger"
        return path.read_bytes() if path.exists() else b""

    async def end(self, within: float = 100) -> int:
        return await asyncio.to_thread(self.process.wait, within)

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.report_path.read_text())
        return found

    @property
    def account(self) -> dict[str, Any]:
        found: dict[str, Any] = self.report["account"]
        return found


Start = Callable[..., Run]


@pytest.fixture
def chaos(url: str, tmp_path: Path) -> Iterator[Start]:
    started: list[Run] = []

    def start(*arguments: str, through: str = url) -> Run:
        started.append(Run(through, tmp_path, *arguments))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)


@pytest.fixture
def left(broker: Broker, vhost: str) -> Callable[[], list[str]]:
    """What is on the broker: queues and exchanges of this test's virtual host."""

    def names() -> list[str]:
        place = quote(vhost, safe="")
        found = [one["name"] for one in broker.api("GET", f"/queues/{place}")]
        exchanges = [one["name"] for one in broker.api("GET", f"/exchanges/{place}")]
        return found + [one for one in exchanges if one and not one.startswith("amq.")]

    return names


Left = Callable[[], list[str]]


async def test_of_two_thousand_tasks_a_twentieth_of_which_kill_their_worker_none_is_lost(
    chaos: Start, left: Left, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.svg"
    run = chaos("--tasks", "2000", "--kill", "0.05", "--workers", "3", "--seed", NO_TASK_DIES_TWICE,
                "--plot", str(plot))  # fmt: skip
    assert await run.end() == 0, run.log
    account = run.account
    assert (account["published"], account["done"], account["parked"]) == (2000, 2000, {})
    assert (account["lost"], account["unexplained"], account["queued"]) == (0, 0, {})
    assert account["deaths"] == run.report["supervised_deaths"] > 80
    in_mid_work = account["again"]["its worker was killed in mid-work"]
    assert 60 < in_mid_work < account["deaths"]  # the others died later: settling, or with the next
    assert account["recovery"]["count"] > 60
    assert account["runs"] == 2000 + sum(account["again"].values())
    assert "every task is accounted for, every run explained" in run.log
    ElementTree.parse(plot)
    assert left() == []


async def test_failures_are_retried_poison_is_parked_and_an_exchange_that_was_there_stays(
    chaos: Start, left: Left, connection: Connection
) -> None:
    channel = await connection.open()
    await channel.exchange_declare("parking-lot", exchange_type="direct", durable=True)
    run = chaos("--tasks", "300", "--kill", "0.01", "--fail", "0.1", "--poison", "2", "--seed", "6",
                "--workers", "2", "--delivery-limit", "2")  # fmt: skip
    assert await run.end() == 0, run.log
    account = run.account
    # (One more where the death of the task before it came late.)
    assert all(re.fullmatch(r"its worker died [3-5] times", one) for one in account["parked"])
    assert (account["done"], sum(account["parked"].values())) == (298, 2)
    assert (account["poison"], account["poison_parked"]) == (2, 2)
    assert (account["lost"], account["unexplained"]) == (0, 0)
    assert account["again"]["retried after a failure"] > 10
    assert left() == ["parking-lot"]


async def steal(connection: Connection, left: Left) -> str:
    """Take a message out of the run's main queue and ack it, as a stray consumer would."""
    channel = await connection.open()
    while True:
        for name in [name for name in left() if name.endswith(".tasks")]:
            message = await channel.basic_get(name)
            if not isinstance(message.delivery, Basic.GetEmpty):
                await channel.basic_ack(message.delivery_tag or 0)
                return str(json.loads(message.body)["task"])
        await asyncio.sleep(0.02)


async def test_a_message_removed_behind_its_back_is_reported_as_lost(
    chaos: Start, left: Left, connection: Connection
) -> None:
    run = chaos("--tasks", "80", "--kill", "0", "--workers", "1", "--work-time", "10ms")
    async with asyncio.timeout(30):
        stolen = await steal(connection, left)
    assert await run.end() == 1, run.log
    assert [str(one["task"]) for one in run.account["lost_tasks"]] == [stolen]
    assert (run.account["done"], run.account["unexplained"]) == (79, 0)
    assert f"lost: task {stolen}: confirmed; never seen by a worker" in run.log
    assert left() == []


async def test_connections_that_are_cut_again_and_again_explain_what_runs_twice(
    chaos: Start, left: Left, broker: Broker, vhost: str
) -> None:
    async with line(broker) as network:
        run = chaos("--tasks", "150", "--kill", "0.02", "--workers", "2", "--concurrency", "3",
                    "--poison", "1", "--delivery-limit", "3", "--seed", "1",
                    "--work-time", "100ms", through=network.url(vhost))  # fmt: skip
        for part in (20, 60, 100):
            await eventually(lambda part=part: run.written.count(b"\ndone") > part, within=40)  # type: ignore[misc]
            assert network.cut() >= 4
        assert await run.end() == 0, run.log
    assert run.account["done"] + run.account["parked_tasks"] == 150
    assert (run.account["poison_parked"], run.account["lost"], run.account["unexplained"]) == (
        1,
        0,
        0,
    )
    assert run.account["again"]["the connection was lost before the ack was through"] > 0
    assert left() == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
async def test_interrupted_it_leaves_no_queue_and_tells_the_account_so_far(
    chaos: Start, left: Left, number: int, code: int
) -> None:
    run = chaos("--tasks", "1000000", "--kill", "0.05", "--workers", "2", "--work-time", "5ms")
    await eventually(lambda: len(left()) > 5)
    await eventually(lambda: "fleet" in str(fleet_of(run)))
    if number == signal.SIGINT:
        await eventually(lambda: b"\ndone" in run.written)
    run.process.send_signal(number)
    assert await run.end() == code, run.log
    assert "interrupted: what is lost is not told" in run.log
    assert run.account["interrupted"] is True
    assert (run.account["done"] > 0) or number == signal.SIGTERM
    assert left() == []
    assert fleet_of(run) == []


def fleet_of(run: Run) -> list[str]:
    """The processes of the run's fleet."""
    return [
        f"fleet {pid}" for pid, _, parent, what in processes()
        if "rabbit_tasks.chaos.app:app" in what and (parent == run.process.pid or parent == 1)
    ]  # fmt: skip


async def test_killed_it_takes_its_fleet_with_it(chaos: Start, left: Left) -> None:
    run = chaos("--tasks", "1000000", "--kill", "0", "--workers", "1")
    await eventually(lambda: fleet_of(run))
    await eventually(lambda: b"\ndone" in run.written)
    run.process.kill()
    await run.end()
    await eventually(lambda: not fleet_of(run))
    assert f"rabbit-tasks-chaos.{left()[0].split('.')[1]}.*" in run.log  # what is left has a name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "0"], "--tasks is 0"),
        (["--tasks", "many"], "--tasks is 'many'; it takes a whole number"),
        (["--seed", "1.5"], "--seed is '1.5'; it takes a whole number"),
        (["--kill", "often"], "--kill is 'often'; it takes a number"),
        (["--kill", "1.5"], "--kill is 1.5"),
        (["--fail", "-1"], "--fail is -1"),
        (["--poison", "2.5"], "--poison is 2.5"),
        (["--workers", "0"], "--workers is 0"),
        (["--hurts", "0"], "--hurts is 0"),
        (["--work-time", "soon"], "--work-time: 'soon' is no duration"),
        (["--patience", "-3"], "--patience: '-3' is no duration"),
        (["--report", "/nowhere/at/all.json"], "--report: /nowhere/at/all.json cannot be written"),
        (["--plot", "/"], "--plot: / cannot be written"),
        (["--ledger", "/proc"], "--ledger: /proc is not empty"),
    ],
)
def test_nonsense_ends_with_2_and_one_line(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rabbit-tasks", "chaos", *arguments])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {words}")
    assert len(err.splitlines()) == 1


def test_a_broker_that_is_not_there_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RABBIT_TASKS_URL", "amqp://127.0.0.1:1/")
    monkeypatch.setattr(sys, "argv", ["rabbit-tasks", "chaos", "--tasks", "5"])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert "error: 127.0.0.1:1 cannot be reached" in err
    assert "left on the broker" not in err
