"""The supervisor without a broker: real processes and real signals, workers that are a few lines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbit_tasks.supervisor import FIRST_PAUSE, restart_pause
from tests.support.workers import is_gone, wait_until

SUPERVISOR = """
import asyncio, logging, os, signal, sys, time
from rabbit_tasks import supervisor
from rabbit_tasks.settings import Settings

logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
signals = supervisor.Signals()
{before}
fleet = supervisor.Supervisor({workers}, signals, Settings(grace={grace}))
place = fleet.run()
if isinstance(place, int):
    sys.exit(place)

stops, asked = [], []

async def until_stopped(times=1, linger=0.0):
    stop = asyncio.Event()
    def heard():
        stops.append(1)
        print(f"{{os.getpid()}} stop {{len(stops)}}", flush=True)
        if len(stops) >= times:
            stop.set()
    def be_asked():
        asked.append(1)
        print(f"{{os.getpid()}} asked {{len(asked)}}", flush=True)
    place.attach(heard, be_asked)
    place.consumes()
    print(f"{{os.getpid()}} works", flush=True)
    await stop.wait()
    await asyncio.sleep(linger)

{work}
"""


class Run:
    """A supervisor that runs, in a process group of its own, and what it and its workers said."""

    def __init__(self, said: Path, work: str, workers: int, before: str, grace: float) -> None:
        code = SUPERVISOR.format(work=work, workers=workers, before=before, grace=grace)
        self._said = said
        with said.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._said.read_text()

    def says(self, pattern: str, times: int = 1) -> list[str]:
        """Wait until it said that so many times; all of them."""
        try:
            wait_until(lambda: len(re.findall(pattern, self.said)) >= times)
        except AssertionError:
            raise AssertionError(f"{pattern!r} is not {times} times in:\n{self.said}") from None
        return re.findall(pattern, self.said)

    def working(self, times: int) -> list[int]:
        return [int(pid) for pid in self.says(r"(\d+) works", times)]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def code(self, within: float = 30) -> int:
        return self.process.wait(within)

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)


Start = Callable[..., Run]
OBEDIENT = "asyncio.run(until_stopped())"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Run] = []

    def make(work: str = OBEDIENT, workers: int = 2, before: str = "", grace: float = 30) -> Run:
        started.append(Run(tmp_path / f"said-{len(started)}", work, workers, before, grace))
        return started[-1]

    yield make
    for run in started:
        run.end()


# --- stopping -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGTERM, "the supervisor"),
        (signal.SIGTERM, "all"),
        (signal.SIGINT, "all"),
        (signal.SIGHUP, "all"),
    ],
)
def test_one_signal_is_one_order_to_each_worker_whoever_gets_it(
    start: Start, number: int, whom: str
) -> None:
    """A terminal sends it to its whole group, systemd to all of the service; the supervisor too."""
    run = start("asyncio.run(until_stopped(linger=0.1))")
    run.working(2)
    (run.signal if whom == "the supervisor" else run.signal_all)(number)
    assert run.code() == 0
    assert sorted(run.says("stop .")) == ["stop 1", "stop 1"]
    assert sorted(run.says("asked .")) == ["asked 1", "asked 1"]


@pytest.mark.parametrize("whom", ["the supervisor", "all"])
def test_a_second_signal_is_passed_on_as_the_second(start: Start, whom: str) -> None:
    run = start("asyncio.run(until_stopped(times=2))")
    run.working(2)
    send = run.signal if whom == "the supervisor" else run.signal_all
    send(signal.SIGINT)
    run.says("stop 1", 2)
    assert run.process.poll() is None
    send(signal.SIGINT)
    assert run.code() == 0
    assert sorted(run.says("stop .")) == ["stop 1"] * 2 + ["stop 2"] * 2


def test_a_worker_whose_event_loop_stands_still_is_asked_all_the_same(start: Start) -> None:
    """Its own time to be gone begins then."""
    run = start(
        "async def stand_still():\n    asyncio.ensure_future(until_stopped())\n"
        "    await asyncio.sleep(0)\n    time.sleep(1)\n    os._exit(0)\n"
        "asyncio.run(stand_still())"
    )
    run.working(2)
    run.signal(signal.SIGTERM)
    assert sorted(run.says("asked .", 2)) == ["asked 1", "asked 1"]
    assert run.process.poll() is None
    run.signal_all(signal.SIGTERM)
    assert sorted(run.says("asked 2", 2)) == ["asked 2", "asked 2"]


def test_sigquit_is_both_at_once(start: Start) -> None:
    run = start("asyncio.run(until_stopped(times=2))")
    run.working(2)
    run.signal_all(signal.SIGQUIT)
    assert run.code() == 0
    assert len(run.says("stop 2")) == 2


def test_sighup_right_behind_sigterm_is_no_second_order(start: Start) -> None:
    """As systemd sends it, with SendSIGHUP=yes."""
    run = start("asyncio.run(until_stopped(linger=0.1))")
    run.working(2)
    run.signal(signal.SIGTERM)
    run.signal(signal.SIGHUP)
    assert run.code() == 0
    assert "stop 2" not in run.said


def test_nohup_is_respected(start: Start) -> None:
    run = start(
        before="signal.signal(signal.SIGHUP, signal.SIG_IGN); signals = supervisor.Signals()"
    )
    run.working(2)
    run.signal_all(signal.SIGHUP)
    run.signal_all(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.code(within=0.3)
    run.signal(signal.SIGTERM)
    assert run.code() == 0


def test_a_worker_that_does_not_stop_is_killed_and_named_and_the_code_is_1(start: Start) -> None:
    run = start(
        "asyncio.run(until_stopped(linger=600 if place.number == 1 else 0.0))\nprint('ended')",
        before="supervisor.OVERTIME = 0.5", grace=0.5,
    )  # fmt: skip
    run.working(2)
    run.signal(signal.SIGTERM)
    began = time.monotonic()
    assert run.code() == 1
    assert time.monotonic() - began >= 0.9
    (killed,) = run.says(r"worker . \(pid \d+\) did not stop in time: killed")
    assert killed.startswith("worker 1")
    assert run.said.count("ended") == 1


def test_a_worker_that_ends_badly_while_it_stops_makes_the_code_1(start: Start) -> None:
    run = start("asyncio.run(until_stopped())\nsys.exit(3 if place.number == 2 else 0)")
    run.working(2)
    run.signal(signal.SIGTERM)
    assert run.code() == 1
    assert len(run.says(r"worker 2 .* ended with exit code 3")) == 1


def test_workers_that_are_still_loading_are_stopped_at_once(start: Start) -> None:
    run = start("print('loads', flush=True)\ntime.sleep(600)")
    run.says("loads", 2)
    run.signal_all(signal.SIGINT)
    assert run.code() == 0


def test_a_signal_before_the_first_fork_is_not_lost(start: Start) -> None:
    run = start(before="os.kill(os.getpid(), signal.SIGTERM)")
    assert run.code() == 0
    assert "started" not in run.said


def test_a_signal_to_a_worker_that_is_just_forked_is_not_taken_for_the_supervisors(
    start: Start,
) -> None:
    run = start(
        workers=1,
        before="fork, calls = os.fork, []\n"
        "def slow():\n"
        "    calls.append(1)\n"
        "    pid = fork()\n"
        "    if pid and len(calls) == 1: os.kill(pid, signal.SIGTERM)\n"
        "    if pid == 0: time.sleep(0.1)\n"
        "    return pid\n"
        "os.fork = slow",
    )
    run.working(1)
    assert len(run.says("was killed by SIGTERM after")) == 1
    assert "stopping" not in run.said
    assert run.process.poll() is None


def test_a_signal_in_a_pause_is_not_lost(start: Start) -> None:
    run = start("os._exit(0)", before="supervisor.restart_pause = lambda *_: 600.0")
    run.says("the next one in 600.00 s", 2)
    run.signal(signal.SIGTERM)
    assert run.code() == 0


def test_a_storm_of_deaths_and_signals_never_hangs(start: Start) -> None:
    """Workers die while others are forked, and the order comes somewhere in between."""
    for _ in range(3):
        run = start("os.kill(os.getpid(), signal.SIGKILL)", workers=3,
                    before="supervisor.restart_pause = lambda *_: 0.0")  # fmt: skip
        run.says("killed by SIGKILL", 5)
        run.signal(signal.SIGTERM)
        # One that dies after the order, of itself, is a bad end; between two lives there is none.
        assert run.code() in (0, 1)


# --- dying --------------------------------------------------------------------------------------


def test_one_that_died_is_replaced_and_the_line_says_why(start: Start) -> None:
    run = start()
    first, second = run.working(2)
    os.kill(first, signal.SIGKILL)
    third = run.working(3)[2]
    (line,) = run.says(rf"worker . \(pid {first}\) was killed .*")
    assert re.search(
        r"by SIGKILL \(by the kernel, if memory ran out\) after \d+\.\d s; the next one in 0\.\d+ s",
        line,
    )
    os.kill(third, signal.SIGTERM)  # an order from elsewhere, which it follows
    run.working(4)
    assert f"(pid {third}) ended with exit code 0 after" in run.said
    assert not is_gone(second)
    run.signal(signal.SIGTERM)
    assert run.code() == 0


def test_the_pauses_grow_and_begin_anew_with_one_that_lived_a_while(start: Start) -> None:
    run = start(
        "place.consumes()\nif len(counts) == 4:\n    time.sleep(3.1)\nos._exit(1)",
        workers=1,
        before="supervisor.HEALTHY = 3; supervisor.FIRST_PAUSE = 0.001\n"
        "counts = []\n"
        "pause = supervisor.restart_pause\n"
        "def noted(failures, cap, draw):\n"
        "    counts.append(failures)\n"
        "    print('failures', failures, flush=True)\n"
        "    return pause(failures, cap, draw)\n"
        "supervisor.restart_pause = noted",
    )
    counts = [int(n) for n in run.says(r"failures (\d+)", 8)]
    assert counts[:8] == [1, 2, 3, 4, 1, 2, 3, 4]


@given(st.integers(1, 10_000), st.floats(0.001, 3600), st.floats(0, 1))
def test_a_pause_is_full_jitter_up_to_its_cap(failures: int, cap: float, draw: float) -> None:
    pause = restart_pause(failures, cap, draw)
    assert 0 <= pause <= cap
    assert pause == draw * restart_pause(failures, cap, 1)
    assert restart_pause(failures, cap, 1) <= restart_pause(failures + 1, cap, 1)


def test_the_first_pause_is_short_and_doubles() -> None:
    assert [restart_pause(n, 10, 1) for n in range(1, 9)] == [
        FIRST_PAUSE * factor for factor in (1, 2, 4, 8, 16, 32, 64, 100)
    ]


def test_one_that_gives_up_before_it_consumed_ends_the_whole_with_its_code(start: Start) -> None:
    run = start(
        "if place.number == 2:\n    place.gives_up('first line\\nsecond line')\n    sys.exit(2)\n"
        "asyncio.run(until_stopped())"
    )
    assert run.code() == 2
    (line,) = run.says("stopping, for .*")
    assert "worker 2" in line
    assert line.endswith("first line; second line")


def test_the_first_signal_is_the_first_though_it_stops_already_by_itself(start: Start) -> None:
    run = start(
        "if place.number == 2:\n"
        "    time.sleep(0.2)\n    place.gives_up('no such thing')\n    sys.exit(1)\n"
        "asyncio.run(until_stopped(linger=0.5))"
    )
    run.says("stop 1")
    run.signal(signal.SIGTERM)
    assert run.code() == 1
    assert "stop 2" not in run.said


def test_one_that_gives_up_after_it_consumed_is_replaced(start: Start) -> None:
    run = start("place.consumes()\nplace.gives_up('not now')\nsys.exit(1)")
    run.says("exit code 1 after .*: not now; the next one in", 3)
    assert run.process.poll() is None


def test_a_failed_fork_is_a_death_like_any_other(start: Start) -> None:
    run = start(
        before="fork, calls = os.fork, []\n"
        "def refuse():\n"
        "    calls.append(1)\n"
        "    if len(calls) < 3: raise OSError(11, 'Resource temporarily unavailable')\n"
        "    return fork()\n"
        "os.fork = refuse"
    )
    run.working(2)
    assert (
        run.said.count("cannot be started (Resource temporarily unavailable); the next one in") == 2
    )


def test_when_the_supervisor_is_killed_the_workers_stop_in_good_order(start: Start) -> None:
    run = start("asyncio.run(until_stopped(linger=0.1))\nprint('ended well', flush=True)")
    workers = run.working(2)
    run.signal(signal.SIGKILL)
    run.says("ended well", 2)
    assert "stop 2" not in run.said
    wait_until(lambda: all(is_gone(pid) for pid in workers))


def test_the_workers_see_its_end_without_the_kernels_help_too(start: Start) -> None:
    run = start(before="supervisor._end_with = lambda _: None")
    workers = run.working(2)
    os.kill(workers[1], signal.SIGKILL)  # and one made later holds no end of the other's line
    workers = run.working(3)
    run.signal(signal.SIGKILL)
    wait_until(lambda: all(is_gone(pid) for pid in workers))


def test_workers_that_are_still_loading_end_with_it(start: Start) -> None:
    run = start("print(os.getpid(), 'works', flush=True)\ntime.sleep(600)")
    workers = run.working(2)
    run.signal(signal.SIGKILL)
    wait_until(lambda: all(is_gone(pid) for pid in workers))


def test_it_leaves_no_descriptor_with_its_workers(start: Start) -> None:
    """The tenth replacement has as many as the first: none of the others' lines, none of its own."""
    run = start(
        "print('open', len(os.listdir('/dev/fd')), flush=True)\nos._exit(0)",
        before="supervisor.restart_pause = lambda *_: 0.01",
    )
    counts = run.says(r"open \d+", 20)
    assert len(set(counts)) == 1, counts
