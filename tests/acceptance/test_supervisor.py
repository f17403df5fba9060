"""`work --processes N`: workers that die are replaced, orders reach all of them, the code is true.

(What needs no broker stands in tests/unit/test_supervisor.py.)
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rabbit_tasks import App, Publisher
from rabbit_tasks.broker import Connection
from tests.conftest import eventually
from tests.support import patient, supervised, unruly
from tests.support.brokers import Broker
from tests.support.obedient import Order
from tests.support.queues import depth
from tests.support.workers import SOON, Runs, WorkerProcess, is_gone, processes

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
PATIENT = "tests.support.patient:app"
SUPERVISED = "tests.support.supervised:app"


async def consuming(fleet: WorkerProcess, workers: int) -> None:
    """Wait until so many workers have begun to consume, one after another or all at once."""
    await eventually(lambda: fleet.log.count("connected to RabbitMQ") >= workers)


async def stopped(fleet: WorkerProcess) -> int:
    return await asyncio.to_thread(fleet.wait, SOON)


async def test_a_worker_that_is_killed_is_replaced_and_its_message_is_done(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(patient.app)
    fleet = start_worker("--processes", "2", app=PATIENT, RABBIT_TASKS_WORKER_NAME="box")
    await consuming(fleet, 2)
    message_id = await publisher.publish(patient.PatientInProcess, Order(do="sleep", seconds=0.5))
    await eventually(lambda: runs.all())
    child = runs.all()[0]["pid"]
    (victim,) = [parent for pid, _, parent, _ in processes() if pid == child]
    assert victim in fleet.workers()
    os.kill(victim, signal.SIGKILL)
    await eventually(lambda: runs.all("end", message_id))
    assert runs.attempts(message_id) == [1, 1]
    await eventually(lambda: is_gone(child))
    await consuming(fleet, 3)
    (died,) = [line for line in fleet.lines() if line["level"] == "error"]
    assert died["pid"] == victim
    assert (died["code"], died["message"].count("killed by SIGKILL")) == (-signal.SIGKILL, 1)
    assert died["pause"] <= 0.1
    assert died["lived"] > 0.1
    names = [line["worker"] for line in fleet.lines() if "connected" in line["message"]]
    assert sorted(names[:2]) == ["box-1", "box-2"]
    assert names[2] == f"box-{died['number']}"
    assert await asyncio.to_thread(fleet.terminate) == 0
    assert await depth(connection, "patient.process") == 0


def handlers_of(worker: int) -> list[int]:
    return [pid for pid, _, parent, _ in processes() if parent == worker]


async def test_deaths_in_a_row_are_answered_with_growing_pauses_that_are_kept(
    declared: Declared, start_worker: Start, tmp_path: Path
) -> None:
    await declared(supervised.app)
    (fails := tmp_path / "fails").write_text("kill")
    fleet = start_worker(
        "--processes", "1", app=SUPERVISED, SUPERVISED_FAILS=str(fails),
        RABBIT_TASKS_RESTART_CAP="400ms",
    )  # fmt: skip
    await eventually(lambda: fleet.log.count("killed by SIGKILL") >= 5)
    fails.unlink()
    await consuming(fleet, 1)
    lines = [line for line in fleet.lines() if "number" in line]
    deaths = [line for line in lines if "code" in line]
    births = [line for line in lines if line["message"].endswith("started")]
    assert [line["level"] for line in deaths] == ["error"] * len(deaths)
    for death, cap in zip(deaths, [0.1, 0.2, 0.4, 0.4, 0.4], strict=False):
        assert 0 <= death["pause"] <= cap
    for death, birth in zip(deaths, births[1:], strict=True):
        assert clock(birth["time"]) - clock(death["time"]) >= death["pause"] - 0.005
    assert fleet.is_running
    assert await asyncio.to_thread(fleet.terminate) == 0


def clock(text: str) -> float:
    hours, minutes, seconds = text[11:-1].split(":")
    return float(hours) * 3600 + float(minutes) * 60 + float(seconds)


async def test_the_app_is_loaded_by_the_workers_alone(
    declared: Declared, start_worker: Start
) -> None:
    await declared(supervised.app)
    fleet = start_worker("--processes", "2", app=SUPERVISED)
    await consuming(fleet, 2)
    imports = [int(line.split()[-1]) for line in fleet.log.splitlines() if "imported in" in line]
    assert sorted(imports) == sorted(fleet.workers())
    assert fleet.pid not in imports


async def test_what_no_worker_can_begin_with_ends_the_whole_at_once_with_one_line(
    start_worker: Start,
) -> None:
    fleets = {
        2: start_worker("--processes", "3", app="tests.support.nothing:app"),
        1: start_worker("--processes", "3", "patient.async", app=PATIENT),
    }
    words = {2: "there is no module 'tests.support.nothing'", 1: "rabbit-tasks topology declare"}
    for code, fleet in fleets.items():
        assert await stopped(fleet) == code, fleet.log
        (line,) = [line for line in fleet.lines() if line["level"] != "info"]
        assert line["message"].startswith("stopping, for worker ")
        assert words[code] in line["message"]
        assert "error: " not in fleet.log


async def test_a_nonsensical_number_of_processes_is_one_line(start_worker: Start) -> None:
    fleets = {number: start_worker("--processes", number) for number in ("0", "-1", "two", "501")}
    for number, fleet in fleets.items():
        assert await stopped(fleet) == 2
        assert fleet.log == f"error: --processes is a number from 1 to 500, not '{number}'\n"


async def test_a_replacement_that_cannot_begin_ends_the_whole_in_good_order(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs, broker: Broker, vhost: str,
) -> None:  # fmt: skip
    await declared(patient.app)
    fleet = start_worker("--processes", "2", "patient.async", app=PATIENT)
    await consuming(fleet, 2)
    message_id = await publisher.publish(patient.Patient, Order(do="sleep", seconds=2))
    await eventually(lambda: runs.all())
    broker.delete(vhost, "queues", "patient.async.retry.1.600ms")
    (idle,) = set(fleet.workers()) - {runs.all()[0]["pid"]}
    os.kill(idle, signal.SIGKILL)
    assert await stopped(fleet) == 1
    assert "patient.async.retry.1.600ms" in [
        line["message"] for line in fleet.lines() if line["level"] == "error"
    ][-1]  # fmt: skip
    assert runs.all("end", message_id)
    assert await depth(connection, "patient.async") == 0


async def test_a_replacement_that_fails_otherwise_is_tried_again_while_the_others_work(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs, tmp_path: Path
) -> None:
    """A database that is away for a while does not take down workers that do well without."""
    await declared(supervised.app)
    fails = tmp_path / "fails"
    fleet = start_worker("--processes", "2", app=SUPERVISED, SUPERVISED_FAILS=str(fails))
    await consuming(fleet, 2)
    fails.touch()
    os.kill(fleet.workers()[0], signal.SIGKILL)
    await eventually(lambda: fleet.log.count("ended with exit code 1 after") >= 2)
    message_id = await publisher.publish(supervised.Leaves, "true")
    await eventually(lambda: runs.all("end", message_id))
    fails.unlink()
    await consuming(fleet, 3)
    assert await asyncio.to_thread(fleet.terminate) == 0
    fails.touch()  # … and an app that has never worked is told from one that has
    fleet = start_worker("--processes", "2", app=SUPERVISED, SUPERVISED_FAILS=str(fails))
    assert await stopped(fleet) == 1
    assert "the database is away" in fleet.log


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGTERM, "the supervisor"),  # docker stop
        (signal.SIGTERM, "all"),  # systemctl stop
        (signal.SIGINT, "all"),  # Ctrl-C in a terminal
    ],
)
async def test_handlers_that_run_are_finished_whoever_got_the_signal(
    number: int, whom: str, publisher: Publisher, connection: Connection, declared: Declared,
    start_worker: Start, runs: Runs,
) -> None:  # fmt: skip
    await declared(patient.app)
    fleet = start_worker("--processes", "2", app=PATIENT)
    await consuming(fleet, 2)
    ids = [await publisher.publish(kind, Order(do="sleep", seconds=0.5))
           for kind in patient.KINDS for _ in range(2)]  # fmt: skip
    await eventually(lambda: len(runs.all()) == 6)
    workers = fleet.workers()
    if whom == "all":
        os.killpg(fleet.pid, number)
    else:
        fleet.signal(number)
    assert await stopped(fleet) == 0, fleet.log
    assert sorted(row["id"] for row in runs.all("end")) == sorted(ids)
    for kind in patient.KINDS:
        assert await depth(connection, kind.queue) == 0
    assert all(is_gone(pid) for pid in workers)
    assert not [line for line in fleet.lines() if line["level"] != "info"]
    assert "Traceback" not in fleet.log


async def test_a_second_ctrl_c_stops_all_of_them_now(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(patient.app)
    fleet = start_worker("--processes", "2", app=PATIENT)
    await consuming(fleet, 2)
    for kind in patient.KINDS:
        await publisher.publish(kind, Order(do="sleep", seconds=600))
    await eventually(lambda: len(runs.all()) == 3)
    os.killpg(fleet.pid, signal.SIGINT)
    await eventually(lambda: fleet.log.count("stopping: finishing what is in hand") == 2)
    assert fleet.is_running
    os.killpg(fleet.pid, signal.SIGINT)
    assert await stopped(fleet) == 0, fleet.log
    for kind in patient.KINDS:
        assert await depth(connection, kind.queue) == 1
        assert await depth(connection, f"{kind.queue}.parked") == 0


async def test_signals_during_the_start_end_it_whenever_they_come(
    declared: Declared, start_worker: Start
) -> None:
    await declared(patient.app)
    fleets = [start_worker("--processes", "2", app=PATIENT) for _ in range(4)]
    for i, fleet in enumerate(fleets):
        await asyncio.to_thread(time.sleep, 0.25)  # the moments are the point
        os.killpg(fleet.pid, signal.SIGINT if i % 2 else signal.SIGTERM)
    for fleet in fleets:
        code = await stopped(fleet)
        # Before our own first line Python has its way with a signal, which does no harm.
        assert code == 0 or not fleet.lines(), fleet.log
        if fleet.lines():
            assert "Traceback" not in fleet.log


async def test_a_supervisor_that_is_killed_leaves_no_worker_behind(
    publisher: Publisher, connection: Connection, declared: Declared, start_worker: Start,
    runs: Runs,
) -> None:  # fmt: skip
    await declared(patient.app)
    fleet = start_worker("--processes", "2", app=PATIENT)
    await consuming(fleet, 2)
    for kind in patient.KINDS:
        await publisher.publish(kind, Order(do="sleep", seconds=0.5))
    await eventually(lambda: len(runs.all()) == 3)
    workers = fleet.workers()
    children = [child for worker in workers for child in handlers_of(worker)]
    assert len(workers) == 2
    fleet.kill()
    await eventually(lambda: all(is_gone(pid) for pid in (*workers, *children)))
    assert len(runs.all("end")) == 3
    for kind in patient.KINDS:
        assert await depth(connection, kind.queue) == 0


NAMESPACE = "unshare --pid --fork --mount-proc"


def can_be_process_1() -> bool:
    return shutil.which("unshare") is not None and (
        subprocess.run([*NAMESPACE.split(), "true"], capture_output=True).returncode == 0
    )


async def test_as_process_1_it_hears_signals_and_reaps_what_others_left_behind(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    """As in a container: signals without a handler mean nothing there, and orphans are ours."""
    if not can_be_process_1():
        pytest.skip("needs the right to make a process namespace")
    await declared(supervised.app)
    fleet = start_worker("--processes", "2", app=SUPERVISED, under=NAMESPACE)
    await consuming(fleet, 2)
    (supervisor,) = fleet.workers()  # (of unshare)
    assert "worker 1 (pid 2) started" in fleet.log
    for _ in range(5):
        await publisher.publish(supervised.Leaves, "exec sleep 0.2")
    await eventually(lambda: len(runs.all("end")) == 5)
    orphans = [pid for pid, _, parent, what in processes()
               if parent == supervisor and what.startswith("sleep 0.2")]  # fmt: skip
    assert orphans
    left = Path("/proc")
    await eventually(lambda: not any((left / str(pid)).exists() for pid in orphans))
    first = handlers_of(supervisor)[0]
    os.kill(first, signal.SIGKILL)
    await consuming(fleet, 3)
    assert not [pid for pid, state, parent, _ in processes()
                if parent == supervisor and state == "Z"]  # fmt: skip
    os.kill(supervisor, signal.SIGTERM)
    assert await stopped(fleet) == 0


async def test_a_worker_whose_event_loop_stands_still_is_gone_in_time_and_not_killed(
    publisher: Publisher, declared: Declared, start_worker: Start, runs: Runs
) -> None:
    await declared(unruly.app)
    fleet = start_worker(
        "--processes", "2", "--grace", "2", "unruly.blocks", app="tests.support.unruly:app"
    )
    await consuming(fleet, 2)
    await publisher.publish(unruly.Blocks, "600")
    await eventually(lambda: runs.all())
    fleet.signal(signal.SIGTERM)
    assert await stopped(fleet) == 0, fleet.log
    assert "did not stop in time" not in fleet.log
