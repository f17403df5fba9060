"""The benchmark runs: every measure, on a real broker, with a few messages; and it leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from bench import growth
from bench.contenders import OURS, RAW
from bench.lane import Failed
from bench.measure import MEASURES, Figure, Measure
from bench.profile import Profile
from bench.queues import Queues
from bench.race import Result, opened
from bench.table import regression, row
from rabbit_tasks import Settings
from tests.conftest import eventually
from tests.support.brokers import Broker

ROOT = Path(__file__).parents[2]
NAMES = [OURS, *RAW]


def left(broker: Broker, vhost: str) -> list[str]:
    """Queues and exchanges that somebody made there."""
    found = [
        one["name"]
        for kind in ("queues", "exchanges")
        for one in broker.api("GET", f"/{kind}/{quote(vhost, safe='')}")
    ]
    return [name for name in found if name and not name.startswith("amq.")]


async def test_every_contender_is_measured_by_every_measure_and_leaves_nothing(
    url: str, vhost: str, broker: Broker, tmp_path: Path
) -> None:
    told: list[str] = []

    def race() -> list[Result]:
        with opened(url, NAMES, told.append) as race:
            found = list(race.run(MEASURES, "tiny", 1))
            race.once(race.lanes[0], MEASURES[0], 500, tmp_path / "samples")
            return found

    results = await asyncio.to_thread(race)
    assert told == []
    assert len(results) == sum(len(measure.figures) for measure in MEASURES)
    for result in results:
        for name in NAMES:
            median = result.median(name)
            assert median is not None, (result.measure.name, name)
            # (The delay of a retry may be a little less than nominal: the broker counts milliseconds.)
            assert median > (-5 if result.measure.name == "retry-delay" else 0), result
    profile = Profile(tmp_path / "samples")
    libraries = profile.libraries()
    assert "rabbit_tasks" in [name for name, _, _ in libraries]
    assert sum(own for _, own, _ in libraries) == pytest.approx(1)
    assert sum(caused for _, _, caused in libraries) == pytest.approx(1)
    await eventually(lambda: left(broker, vhost) == [])


async def test_growth_is_measured_at_every_size_and_leaves_nothing(
    settings: Settings, vhost: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, sizes in {
        "QUEUED": (10,),
        "CLASSES": (1, 2),
        "HEADERS": (0, 3),
        "BYTES": (1, 99),
    }.items():
        monkeypatch.setattr(growth, name, sizes)
    monkeypatch.setattr(growth, "MESSAGES", 20)
    rows = [row async for row in growth.grown(settings, 30)]
    assert [list(row.cpu) for row in rows] == [[10, 30], [1, 2], [0, 3], [1, 99], [1, 99]]
    assert all(cpu > 0 for row in rows for cpu in row.cpu.values())
    assert all(growth.row(row).count("|") == growth.HEAD[0].count("|") for row in rows)
    await eventually(lambda: left(broker, vhost) == ["parking-lot"])


def bench(url: str, *words: str) -> subprocess.Popen[str]:
    """The command, running."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench", *words], cwd=ROOT, text=True,
        env={**os.environ, "RABBIT_TASKS_URL": url}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def test_after_ctrl_c_nothing_of_the_run_is_left(
    url: str, vhost: str, broker: Broker
) -> None:
    running = bench(url, "drain-1", "--against", "aiormq", "--rounds", "1000")
    try:
        await eventually(lambda: len(left(broker, vhost)) == 10)
        running.send_signal(signal.SIGINT)
        _, told = await asyncio.to_thread(running.communicate, timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130, told
    assert "interrupted" in told
    assert "Traceback" not in told
    await eventually(lambda: left(broker, vhost) == [])


def test_json_has_a_line_for_every_contender_and_figure(url: str) -> None:
    running = bench(url, "quick", "publish-one", "--rounds", "1", "--json", "--against", "aiormq")
    shown, told = running.communicate(timeout=60)
    assert running.returncode == 0, told
    assert "load" in told
    found = [json.loads(line) for line in shown.splitlines()]
    assert [(one["figure"], one["contender"]) for one in found] == [
        (figure, name) for figure in ("rate", "cpu") for name in (OURS, "aiormq")
    ]
    for one in found:
        assert one["to"] == "aiormq"
        assert one["rounds"] == [one["median"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["drain-7"], "drain-64"),
        (["--against", "sidekiq"], "dramatiq"),
        (["profile"], "profile takes one of"),
    ],
)
def test_wrong_usage_says_what_there_is(words: list[str], said: str) -> None:
    running = bench("amqp://nowhere.invalid/", *words)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 2
    assert said in told


def test_a_broker_that_lets_nobody_in_is_told_in_one_line(url: str) -> None:
    running = bench(url + "-gone", "quick")
    shown, told = running.communicate(timeout=60)
    assert running.returncode == 1
    assert shown == ""
    assert told.startswith("error: ")
    assert "has no virtual host" in told
    assert told.count("\n") == 1


class Unread(Queues):
    """A broker on which messages are left."""

    def _ask(self, question: object, name: str) -> Any:
        return 3


def test_a_contender_that_does_not_ack_is_not_fast_but_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.queues.SETTLES", 0.1)
    Unread("amqp://nowhere.invalid/").make_sure_of_acks("bench.x.aiormq", slots=3)
    with pytest.raises(Failed, match="3 messages were not acked"):
        Unread("amqp://nowhere.invalid/").make_sure_of_acks("bench.x.aiormq", slots=2)


def test_a_ratio_is_of_neighbours_and_a_failed_round_has_none() -> None:
    figure = Figure("rate", "drain", "/s", 2.0, more_is_better=True)
    measure = Measure("drain", "drain", (figure,), (1, 1, 1))
    rounds: dict[str, list[float | None]] = {
        OURS: [300, 30, None, 280],
        "aio-pika": [100, 10, 1, 100],
        "celery": [None] * 4,
    }
    shown = row(Result(measure, figure, rounds), list(rounds), "aio-pika")
    assert shown == "| drain, /s | 280 | 55 | - | 3.00 | ≥ 2 ✓ |"


@pytest.mark.parametrize(
    ("figure", "ours", "told"),
    [
        (Figure("rate", "drained", "/s", 3.0, more_is_better=True), 200.0, None),
        (
            Figure("rate", "drained", "/s", 3.0, more_is_better=True),
            199.0,
            "drain (drained): its ratio to aio-pika is 1.99; wanted ≥ 2",
        ),
        (Figure("time", "start", "ms", 2.0), 300.0, None),
        (
            Figure("time", "start", "ms", 2.0),
            301.0,
            "drain (start): its ratio to aio-pika is 3.01; wanted ≤ 3",
        ),
        (Figure("p50", "over", "ms", 5.0, is_absolute=True), 7.5, None),
        (
            Figure("p50", "over", "ms", 5.0, is_absolute=True),
            8.0,
            "drain (over): it is 8; wanted ≤ 7.5 ms",
        ),
        (
            Figure("time", "start", "ms", 2.0),
            None,
            "drain (start): its ratio to aio-pika was not measured; wanted ≤ 3",
        ),
        (Figure("cpu", "its CPU", "µs"), 9999.0, None),
    ],
)
def test_a_check_tells_of_what_is_far_from_its_goal_and_of_nothing_else(
    figure: Figure, ours: float | None, told: str | None
) -> None:
    measure = Measure("drain", "drain", (figure,), (1, 1, 1))
    result = Result(measure, figure, {OURS: [ours], "aio-pika": [100.0]})
    assert regression(result, "aio-pika", 1.5) == told
