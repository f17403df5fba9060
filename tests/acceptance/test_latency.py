"""How soon the message of a killed worker runs on one that waits for work."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rabbit_tasks import App, Publisher
from tests.acceptance.conftest import Figures
from tests.conftest import eventually
from tests.support import patient
from tests.support.brokers import Broker
from tests.support.obedient import Order
from tests.support.workers import Runs, WorkerProcess, processes

Declared = Callable[[App], Awaitable[None]]
Start = Callable[..., WorkerProcess]
AT_A_TIME = 8
"""Workers are started together and waited for: their start is not what is measured."""


class Waiting:
    """Workers that wait for messages; the killed ones are replaced, several at a time."""

    def __init__(self, start: Callable[[], WorkerProcess]) -> None:
        self._start = start
        self._workers: list[WorkerProcess] = []

    def at_least(self, number: int, at_a_time: int) -> None:
        self._workers = [worker for worker in self._workers if worker.is_running]
        if len(self._workers) < number:
            new = [self._start() for _ in range(at_a_time)]
            self._workers += [worker.ready(60) for worker in new]

    def kill(self, pid: int) -> float:
        """SIGKILL the worker with this process, its own or its child's; when."""
        (parent,) = [parent for one, _, parent, _ in processes() if one == pid]
        (worker,) = [worker for worker in self._workers if worker.pid in (pid, parent)]
        killed = time.time()
        worker.signal(signal.SIGKILL)
        worker.wait(10)
        return killed


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (patient.Patient, 8),
        *(
            pytest.param(kind, 50, marks=[pytest.mark.heavy, pytest.mark.timeout(600)])
            for kind in patient.KINDS
        ),
    ],
)
async def test_the_message_of_a_killed_worker_runs_on_a_waiting_one_within_50_ms(
    kind: type[patient.Patient], times: int, publisher: Publisher, broker: Broker,
    declared: Declared, start_worker: Start, runs: Runs, tmp_path: Path, figures: Figures,
) -> None:  # fmt: skip
    """At the median, from the kill to the first line of its second run."""
    await declared(patient.app)
    waiting = Waiting(lambda: start_worker(kind.queue, app="tests.support.patient:app"))
    took: list[float] = []
    for number in range(times):
        waiting.at_least(2, min(AT_A_TIME, times + 1 - number))
        end = tmp_path / f"end-{number}"
        message_id = await publisher.publish(kind, Order(until=str(end)))
        await eventually(lambda m=message_id: runs.all("start", m))  # type: ignore[misc]
        killed = waiting.kill(runs.all("start", message_id)[0]["pid"])
        await eventually(lambda m=message_id: len(runs.all("start", m)) == 2)  # type: ignore[misc]
        took.append(runs.all("start", message_id)[1]["time"] - killed)
        end.touch()
        # (The child of the one that was killed may be there to end its run too.)
        await eventually(lambda m=message_id: runs.all("end", m))  # type: ignore[misc]
    took.sort()
    median, p99 = statistics.median(took), took[math.ceil(0.99 * len(took)) - 1]
    figures.add(
        f"SIGKILL to running elsewhere, {kind.__doc__}, RabbitMQ {broker.version}, n={times}: "
        f"median {median * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms"
    )
    assert median < 0.050, [f"{one * 1000:.1f} ms" for one in took]
    assert all(runs.attempts(row["id"]) == [1, 1] for row in runs.all("end"))
