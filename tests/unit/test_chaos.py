"""The account of a chaos run, from ledgers written by hand; and what it is made of."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rabbit_tasks.chaos import account as why
from rabbit_tasks.chaos import plot
from rabbit_tasks.chaos.account import Account, Hurt, Known, account, percentile
from rabbit_tasks.chaos.app import RETRY, app, app_of, kind_of
from rabbit_tasks.chaos.hurts import Done
from rabbit_tasks.chaos.ledger import Event, Kind, Ledger, Reading, events, parse
from rabbit_tasks.chaos.plan import Plan
from rabbit_tasks.chaos.trial import Result
from rabbit_tasks.cli import command
from rabbit_tasks.errors import ConfigurationError


class Book:
    """A ledger, written by hand; a tenth of a second passes from line to line."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._clock = count(1)

    def write(self, kind: Kind, task: int = -1, attempt: int = 1, worker: str = "a") -> Book:
        self.events.append(Event(kind, task, attempt, worker, next(self._clock) / 10))
        return self

    def run(self, task: int, *ends: Kind, attempt: int = 1, worker: str = "a") -> Book:
        for kind in ("start", *ends):
            self.write(kind, task, attempt, worker)
        return self

    def passes(self, seconds: float) -> Book:
        for _ in range(int(seconds * 10)):
            next(self._clock)
        return self

    def account(self, tasks: int = 1, *, alive: str = "ab", **known: Any) -> Account:
        """The account; these workers lived to the end."""
        for worker in alive:
            self.write("left", worker=worker)
        return account(
            Known(tasks, **{"confirmed": b"\1" * tasks, "events": lambda: self.events, **known})
        )


def reasons(made: Account) -> dict[str, int]:
    assert made.unexplained == []
    return made.again


def test_a_task_that_was_done_once_needs_no_explanation() -> None:
    made = Book().run(0, "done", "settled").account()
    assert (made.published, made.done, made.runs, made.more_than_once) == (1, 1, 1, 0)
    assert made.is_clean


def test_a_confirmed_task_that_is_neither_done_nor_anywhere_is_lost() -> None:
    made = Book().run(0, "done", "settled").run(2, "kill", worker="c").account(4, parked={3: ["x"]})
    assert [one.task for one in made.lost] == [1, 2]
    assert made.lost[0].story == "confirmed; never seen by a worker"
    assert "kill at 0.500 s (attempt 1, worker c)" in made.lost[1].story
    assert not made.is_clean


def test_an_unconfirmed_task_cannot_be_lost() -> None:
    assert Book().account(confirmed=b"\0").lost == []


def test_what_failed_and_has_no_copy_anywhere_is_lost() -> None:
    made = Book().run(0, "fail", "settled").account()
    assert [one.task for one in made.lost] == [0]


def test_a_task_that_is_still_queued_is_not_lost_but_the_run_is_not_clean() -> None:
    made = Book().account(queued={0: ["q.tasks"]})
    assert (made.lost, made.queued, made.is_clean) == ([], {"q.tasks": 1}, False)


def test_of_an_interrupted_run_nothing_is_said_to_be_lost() -> None:
    known = Known(1, b"\1", list, uncounted=1)
    made = account(known, interrupted=True)
    assert (made.lost, made.uncounted, made.is_clean) == ([], 1, True)


# --- runs, and what made them ----------------------------------------------------------------------


def test_a_second_run_while_the_first_ones_worker_lives_is_unexplained() -> None:
    made = (
        Book().run(0, "done", "settled").run(0, "done", "settled", worker="b")
        .run(1, "done", "settled").account(2)
    )  # fmt: skip
    assert [one.task for one in made.unexplained] == [0]
    assert made.unexplained[0].story.startswith("run 2; start at 0.100 s")
    assert made.again == {why.UNEXPLAINED: 1}
    assert not made.is_clean


@pytest.mark.parametrize("first", [(), ("done",)])
def test_so_is_one_while_the_first_still_runs_or_is_being_settled(first: tuple[Kind, ...]) -> None:
    made = Book().run(0, *first).run(0, "done", "settled", worker="b").account()
    assert len(made.unexplained) == 1


def test_a_kill_in_mid_work_explains_one_more_run_and_not_two() -> None:
    book = Book().run(0, "kill", worker="c").run(0, "done", "settled")
    assert reasons(book.account()) == {why.KILLED: 1}
    made = book.run(0, "done", "settled", worker="b").account()
    assert len(made.unexplained) == 1


def test_a_kill_explains_nothing_that_ran_before_it() -> None:
    made = (
        Book().write("start", 0, worker="c").run(0, "done", "settled").write("kill", 0, worker="c")
    )
    assert len(made.account().unexplained) == 1


def test_a_worker_killed_by_another_task_takes_what_it_has_in_hand_with_it() -> None:
    book = Book().write("start", 0, worker="c").run(1, "kill", worker="c")
    made = book.run(0, "done", "settled").run(1, "done", "settled").account(2)
    assert reasons(made) == {why.KILLED: 1, why.BESIDE: 1}


def test_a_worker_that_ends_without_a_word_is_dead() -> None:
    made = Book().run(0, worker="c").run(0, "done", "settled").account()
    assert reasons(made) == {why.BESIDE: 1}


def test_a_worker_killed_after_the_work_and_before_the_ack() -> None:
    book = Book().run(0, "done", worker="c").run(1, "kill", worker="c")
    made = book.run(0, "done", "settled").run(1, "done", "settled").account(2)
    assert reasons(made) == {why.KILLED: 1, why.UNACKED: 1}


def test_a_worker_killed_with_the_ack_on_its_way() -> None:
    book = Book().run(0, "done", "settled", worker="c").run(1, "kill", worker="c")
    made = book.run(0, "done", "settled").run(1, "done", "settled").account(2)
    assert reasons(made) == {why.KILLED: 1, why.ON_ITS_WAY: 1}


def test_a_worker_killed_long_after_the_ack_explains_nothing() -> None:
    book = Book().run(0, "done", "settled", worker="c").passes(2).run(1, "kill", worker="c")
    made = book.run(0, "done", "settled").run(1, "done", "settled").account(2)
    assert [one.task for one in made.unexplained] == [0]


def test_a_failure_explains_one_run_of_the_next_attempt_and_none_of_its_own() -> None:
    book = Book().run(0, "fail", "settled").run(0, "done", "settled", attempt=2, worker="b")
    assert reasons(book.account()) == {why.RETRIED: 1}
    assert len(book.run(0, "done", "settled", attempt=2).account().unexplained) == 1
    other = Book().run(0, "fail", "settled").run(0, "done", "settled", worker="b")
    assert len(other.account().unexplained) == 1


def test_a_later_attempt_without_a_failure_is_unexplained() -> None:
    made = Book().run(0, "done", "settled").run(0, "done", "settled", attempt=2).account()
    assert len(made.unexplained) == 1


def test_killed_between_the_copy_and_the_ack_the_original_runs_beside_its_copy() -> None:
    made = (
        Book().run(0, "fail", worker="c").run(1, "kill", worker="c")
        .run(0, "fail", "settled").run(0, "done", "settled", attempt=2)
        .run(0, "done", "settled", attempt=2, worker="b").run(1, "done", "settled").account(2)
    )  # fmt: skip
    assert reasons(made) == {why.RETRIED: 2, why.KILLED: 1, why.UNACKED: 1}


def test_a_stopping_worker_puts_back() -> None:
    made = Book().run(0, "cancel").run(0, "done", "settled", worker="b").account()
    assert reasons(made) == {why.PUT_BACK: 1}


def test_a_lost_connection_explains_a_run_elsewhere() -> None:
    book = Book().run(0).write("lost").run(0, "done", "settled", worker="b").write("done", 0)
    assert reasons(book.account()) == {why.LOST_CONNECTION: 1}


def test_a_lost_connection_explains_though_its_worker_is_killed_later() -> None:
    book = Book().run(0, "done", worker="c").write("lost", worker="c").run(0, "done", "settled")
    made = book.run(1, "kill", worker="c").run(1, "done", "settled").account(2)
    assert reasons(made) == {why.KILLED: 1, why.LOST_CONNECTION: 1}


def test_a_connection_that_another_worker_lost_explains_nothing() -> None:
    made = Book().run(0).write("lost", worker="b").run(0, "done", "settled", worker="b")
    assert len(made.account().unexplained) == 1


def test_a_publish_that_may_be_stored_explains_one_more_run() -> None:
    book = Book().run(0, "done", "settled").run(0, "done", "settled", worker="b")
    made = book.account(repeated={0: 1}, repeats=1)
    assert reasons(made) == {why.AGAIN: 1}
    assert (made.repeats, made.maybe_stored) == (1, 1)
    assert len(book.run(0, "done", "settled").account(repeated={0: 1}).unexplained) == 1


def test_a_retry_copy_that_was_held_and_published_again_explains_one_more_run() -> None:
    made = (
        Book().run(0, "fail").write("held", 0).write("settled", 0)
        .run(0, "done", "settled", attempt=2).run(0, "done", "settled", attempt=2, worker="b")
    )  # fmt: skip
    assert reasons(made.account()) == {why.RETRIED: 1, why.COPIED_AGAIN: 1}


def test_a_connection_lost_while_a_copy_is_made_explains_a_second_copy() -> None:
    book = Book().run(0, "fail").write("lost").write("settled", 0)
    made = book.run(0, "done", "settled", attempt=2).run(
        0, "done", "settled", attempt=2, worker="b"
    )
    assert reasons(made.account()) == {why.RETRIED: 1, why.COPIED_AGAIN: 1}


def test_a_worker_killed_while_it_lets_a_message_wait_may_leave_two() -> None:
    made = (
        Book().run(0, "kill", worker="c").write("waits", 0, worker="d").run(1, "kill", worker="d")
        .run(0, "done", "settled").run(0, "done", "settled", worker="b")
        .run(1, "done", "settled").account(2)
    )  # fmt: skip
    assert reasons(made) == {why.KILLED: 2, why.COPY_UNACKED: 1}


@pytest.mark.parametrize(("after", "explained"), [(1, True), (70, False)])
def test_a_broker_that_was_hurt_explains_for_as_long_as_its_aftermath(
    after: int, explained: bool
) -> None:
    book = Book().passes(after).run(0, "done", "settled").run(0, "done", "settled", worker="b")
    made = book.account(hurts=[Hurt(0.0, 0.5)])
    assert (made.unexplained == []) is explained


# --- parked ----------------------------------------------------------------------------------------


def test_poison_is_parked_after_its_deaths_and_nothing_is_left_to_explain() -> None:
    book = Book()
    for worker in "cdefgh":
        book.run(0, "kill", worker=worker)
    made = book.account(2, parked={0: ["its worker died 6 times"]}, poison=frozenset({0, 1}),
                        queued={1: ["q"]})  # fmt: skip
    assert reasons(made) == {why.KILLED: 5}
    assert made.parked == {"its worker died 6 times": 1}
    assert (made.poison, made.poison_parked, made.deaths, made.deaths_by_poison) == (2, 1, 6, 6)


def test_spent_attempts_are_parked_by_their_own_reason() -> None:
    book = Book().run(0, "fail", "settled").run(0, "fail", "settled", attempt=2)
    made = book.account(parked={0: ["failed 2 attempts of 2"]})
    assert reasons(made) == {why.RETRIED: 1}
    assert made.is_clean


def test_done_and_parked_without_a_reason_for_a_second_copy_is_unexplained() -> None:
    made = Book().run(0, "done", "settled").account(parked={0: ["its worker died 6 times"]})
    assert made.parked_and_done == 1
    assert made.unexplained[0].story.startswith("a copy is parked (its worker died 6 times)")


def test_done_and_parked_is_explained_where_the_ack_was_never_sent() -> None:
    book = Book().run(0, "done", worker="c").run(1, "kill", worker="c").run(1, "done", "settled")
    made = book.account(2, parked={0: ["its worker died 6 times"]})
    assert (made.parked_and_done, made.unexplained) == (1, [])


def test_parked_twice_or_queued_twice_without_a_reason_is_unexplained() -> None:
    made = Book().account(parked={0: ["x", "x"]})
    assert (len(made.unexplained), made.parked_tasks, made.parked) == (1, 1, {"x": 2})
    assert len(Book().account(queued={0: ["q", "q"]}).unexplained) == 1


# --- deaths and time -------------------------------------------------------------------------------


def test_recovery_is_from_the_death_to_the_next_run_of_that_task() -> None:
    book = Book().run(0, "kill", worker="c").passes(0.4).run(0, "kill", worker="d")
    book.write("waits", 0).passes(3).run(0, "done", "settled")
    made = book.account()
    assert made.recovery == pytest.approx([0.5])
    assert made.recovery_later == pytest.approx([3.2])  # it was made to wait, on purpose
    assert made.deaths == 2


def test_percentiles_are_values_that_were_measured() -> None:
    ordered = [float(n) for n in range(1, 101)]
    assert (percentile(ordered, 0.5), percentile(ordered, 0.99)) == (50.0, 99.0)
    assert percentile([], 0.5) is None
    assert percentile([7.0], 0.99) == 7.0


def test_two_runs_at_once_in_one_process_are_told() -> None:
    book = Book().write("start", 0).write("start", 0).write("done", 0).write("done", 0)
    assert book.account(repeated={0: 1}).at_once == 1


def simulated(seed: int, tasks: int) -> tuple[Book, dict[int, list[str]]]:
    """A broker and workers that do what they promise, killed at any step; its ledger, its parked."""
    dice, book, names = random.Random(seed), Book(), count()
    queue: list[tuple[int, int, int]] = [(task, 1, 0) for task in range(tasks)]
    parked: dict[int, list[str]] = {}
    worker = f"w{next(names)}"
    while queue:
        task, attempt, deaths = queue.pop(dice.randrange(len(queue)))
        if deaths > 5:
            parked.setdefault(task, []).append("its worker died 6 times")
            continue
        fails = dice.random() < 0.3
        steps: list[Kind] = ["start", "fail" if fails else "done", "settled"]
        for at, kind in enumerate(steps):
            if dice.random() < 0.1:
                # Between two steps; the copy may have been made, the ack may not have arrived.
                book.write("kill", task if at == 1 else -1, attempt, worker)
                worker = f"w{next(names)}"
                if fails and at == 2 and dice.random() < 0.5:
                    queue.append((task, attempt + 1, 0))
                queue.append((task, attempt, deaths + 1))
                break
            book.write(kind, task, attempt, worker)
        else:
            if fails and attempt == 4:
                parked.setdefault(task, []).append("failed 4 attempts of 4")
            elif fails:
                queue.append((task, attempt + 1, 0))
    return book, parked


@pytest.mark.parametrize("seed", range(20))
def test_a_system_that_keeps_its_promises_has_a_clean_account(seed: int) -> None:
    book, parked = simulated(seed, 60)
    made = book.account(60, alive="", parked=parked)
    assert made.lost == []
    assert made.unexplained == []
    assert made.more_than_once > 5


@pytest.mark.parametrize("seed", range(20))
def test_one_message_that_vanishes_is_always_found_missing(seed: int) -> None:
    book, parked = simulated(seed, 60)
    victim = random.Random(seed).choice([e.task for e in book.events if e.kind == "done"])
    parked.pop(victim, None)
    book.events = [e for e in book.events if e.task != victim or e.kind in ("start", "kill")]
    assert [one.task for one in book.account(60, alive="", parked=parked).lost] == [victim]


def test_a_hundred_thousand_tasks_are_accounted_for_in_seconds(tmp_path: Path) -> None:
    tasks = 100_000
    with (tmp_path / "ledger").open("wb") as file:
        for task in range(tasks):
            lines: Sequence[Kind] = ("start", "done", "settled")
            if task % 20 == 0:
                file.write(Event("start", task, 1, f"k{task}", task / 100).line())
                file.write(Event("kill", task, 1, f"k{task}", task / 100).line())
            for kind in lines:
                file.write(Event(kind, task, 1, "a", task / 100 + 0.001).line())
    began = time.process_time()
    made = account(Known(tasks, b"\1" * tasks, lambda: events(tmp_path)))
    assert (made.done, made.deaths, made.lost, made.unexplained) == (tasks, 5000, [], [])
    assert time.process_time() - began < 15


# --- the report ------------------------------------------------------------------------------------


def test_the_report_is_json_and_names_every_lost_and_unexplained_task() -> None:
    made = Book().run(0, "done", "settled").run(0, "done", "settled", worker="b").account(3)
    told = json.loads(json.dumps(made.as_json(), allow_nan=False))
    assert [one["task"] for one in told["lost_tasks"]] == [1, 2]
    assert [one["task"] for one in told["unexplained_tasks"]] == [0]
    assert (told["lost"], told["unexplained"], told["is_clean"]) == (2, 1, False)
    assert told["recovery"] == {"count": 0, "median": None, "p99": None, "max": None}


def spread(done: Sequence[int], deaths: Mapping[int, int] | None = None) -> Account:
    return Account(
        tasks=sum(done), done=sum(done), seconds=float(len(done)), bucket=1.0,
        done_over_time=list(done),
        deaths_over_time=[(deaths or {}).get(i, 0) for i in range(len(done))],
        hurts=[(5.0, 7.0)],
    )  # fmt: skip


def test_the_plot_shows_the_rate_the_deaths_and_the_hurts() -> None:
    drawn = plot.text(spread([0, 50, 100, 100, 100, 0, 0, 0, 100, 100], {2: 1}), height=2)
    assert drawn.splitlines() == [
        "100/s ┤  ███   ██",
        "      ┤ ████   ██",
        "    0 ┼──────────",
        "         ·  xxx",
        "       0 s   10 s",
    ]


@pytest.mark.parametrize("parts", [1, 7, 60, 61, 119, 121])
def test_the_plot_is_never_wider_than_it_may_be_and_counts_each_task_once(parts: int) -> None:
    columns = plot._columns([3] * parts, 60)  # noqa: SLF001
    assert len(columns) <= 60
    assert sum(columns) == pytest.approx(3 * parts)
    assert max(len(line) for line in plot.text(spread([3] * parts), 60).splitlines()) <= 72


def test_nothing_done_is_nothing_to_plot() -> None:
    assert plot.text(Account()) == ""
    ElementTree.fromstring(plot.svg(Account(), "nothing"))


def test_the_svg_is_well_formed_whatever_its_title() -> None:
    drawn = plot.svg(spread([1, 2, 3, 4, 5, 0, 0, 8], {1: 4}), 'a <b> & "c"')
    root = ElementTree.fromstring(drawn)
    kinds = [one.get("class") for one in root.iter() if one.get("class")]
    assert kinds.count("rate") == 2  # the area and its legend
    assert kinds.count("hurt") == 2
    assert kinds.count("deaths") == 2
    assert root.findtext("{http://www.w3.org/2000/svg}title") == 'a <b> & "c"'


# --- the ledger ------------------------------------------------------------------------------------


def test_what_was_written_is_there_when_its_process_is_killed_in_the_next_moment(
    tmp_path: Path,
) -> None:
    book = Ledger(tmp_path, 10)
    book.write("ready")
    pids = []
    for task in range(4):
        pid = os.fork()
        if pid == 0:
            for _ in range(200):
                book.count(task)
                book.write("start", task, 1)
            book.write("kill", task, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    reading = Reading(tmp_path)
    found = list(reading.new())
    assert reading.cut == 0
    assert sorted((e.task, e.kind) for e in found) == sorted(
        [(-1, "ready")] + [(t, "start") for t in range(4)] * 200 + [(t, "kill") for t in range(4)]
    )
    assert len({e.worker for e in found}) == 5
    assert [book.count(t) for t in range(5)] == [201, 201, 201, 201, 1]
    book.close()


def test_a_line_that_a_kill_has_cut_spoils_no_other(tmp_path: Path) -> None:
    first, second = (Event("start", task, 1, "a", 1.5) for task in (1, 22))
    for end in range(1, len(first.line())):
        (tmp_path / "ledger").write_bytes(first.line()[:end] + second.line())
        found = list(events(tmp_path))
        assert found[-1] == second
        assert found in ([second], [first, second])
        assert found == [second] or end >= len(first.line()) - 1


def test_only_whole_lines_are_read_while_they_are_written(tmp_path: Path) -> None:
    line = Event("done", 5, 2, "9-a", 12.25, True).line()
    reading = Reading(tmp_path)
    assert list(reading.new()) == []
    path = tmp_path / "ledger"
    path.write_bytes(line[:9])
    assert list(reading.new()) == []
    with path.open("ab") as file:
        file.write(line[9:])
    assert list(reading.new()) == [Event("done", 5, 2, "9-a", 12.25, True)]
    assert reading.cut == 0


@pytest.mark.parametrize(
    "line", [b"start 1 1 a 1.0 0", b"begin 1 1 a 1.0 0 .", b"start x 1 a 1 0 ."]
)
def test_what_is_no_line_of_ours_is_no_event(line: bytes) -> None:
    assert parse(line) is None


def test_what_the_log_tells_is_written_down() -> None:
    assert kind_of("q: channel lost with message 5 in hand; if it comes here again, …") == "lost"
    assert kind_of("q: not consuming (the channel was closed); again in 0.3 s") == "lost"
    assert kind_of("connection lost; next try in 0.3 s") == "lost"
    assert kind_of("q: message 5 is held, its copy was not taken (x); next try in 0.5 s") == "held"
    assert kind_of("q: message 5 is held no more: copies are taken again, after 3.0 s") == "held"
    assert kind_of("q: message 5 comes again: its worker died 2 times; run again in 2s") == "waits"
    assert kind_of("q: message 5 comes again: nobody has settled it; run again in 2s") == "waits"
    assert kind_of("q: message 5 comes again: its worker died, or lost it") is None
    assert kind_of("connected to RabbitMQ 4.3.6: 1 slots on q") == "ready"
    assert kind_of("connected to RabbitMQ 4.3.6: 1 slots on q; again, after 3.0 s") == "lost"
    assert kind_of("q: consuming again, after 3.0 s and one failure") == "lost"
    assert kind_of("q: message 5 put back") is None


# --- the plan --------------------------------------------------------------------------------------


def plan(**changed: Any) -> Plan:
    return Plan(**{"tasks": 1000, "seed": 1, "run": "abc", "kill": 0.05, "fail": 0.1, **changed})


def test_a_seed_decides_everything_and_nothing_else_does() -> None:
    def fates(one: Plan) -> list[object]:
        return [
            (one.death(t, n, poison=False), one.fails(t, n)) for t in range(1000) for n in (1, 2)
        ]

    assert fates(plan()) == fates(plan(run="other", workers=9))
    assert fates(plan()) != fates(plan(seed=2))
    assert plan(poison=20).poisoned() == plan(poison=20, run="other").poisoned()


def test_deaths_and_failures_are_as_frequent_as_they_should_be_and_some_deaths_come_late() -> None:
    one = plan(kill=0.3)
    deaths = [one.death(t, n, poison=False) for t in range(1000) for n in (1, 2)]
    dead = [death for death in deaths if death is not None]
    assert len(dead) / 2000 == pytest.approx(0.3, abs=0.04)
    assert sum(death > 0 for death in dead) / len(dead) == pytest.approx(0.2, abs=0.05)
    assert all(0 <= death <= 0.005 for death in dead)
    fails = [one.fails(t, n) for t in range(1000) for n in (1, 2)]
    assert sum(fails) / 2000 == pytest.approx(0.1, abs=0.03)
    assert plan(kill=0.0, fail=0.0).death(1, 1, poison=False) is None
    assert all(plan(kill=1.0).death(t, 1, poison=False) is not None for t in range(100))


def test_poison_is_a_number_of_tasks_or_a_probability() -> None:
    assert len(plan(poison=20).poisoned()) == 20
    assert len(plan(poison=1).poisoned()) == 1
    assert len(plan(poison=0).poisoned()) == 0
    assert 20 < len(plan(poison=0.05).poisoned()) < 90
    assert plan(kill=0).death(1, 7, poison=True) == 0.0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tasks": 0}, "--tasks is 0"),
        ({"workers": 0}, "--workers is 0"),
        ({"workers": 501}, "--workers is 501"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"delivery_limit": 0}, "--delivery-limit is 0"),
        ({"kill": 1.01}, "--kill is 1.01"),
        ({"kill": float("nan")}, "--kill is nan"),
        ({"fail": -0.1}, "--fail is -0.1"),
        ({"poison": 1.5}, "--poison is 1.5"),
        ({"poison": 1001}, "--poison is 1001"),
        ({"poison": -1}, "--poison is -1"),
        ({"poison": float("inf")}, "--poison is inf"),
    ],
)
def test_nonsense_is_refused_by_the_options_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        plan(**changed)


def test_a_plan_is_the_same_in_the_workers_process(tmp_path: Path) -> None:
    made = plan(work_time=timedelta(milliseconds=5), poison=0.25, pid=7)
    made.write(tmp_path)
    assert Plan.read(tmp_path) == made


def test_all_queues_of_a_run_begin_with_its_prefix() -> None:
    names = [queue.name for queue in app_of(plan()).topology.queues]
    assert len(names) == 1 + len(RETRY.delays or ()) + 4 + 1
    assert all(name.startswith("rabbit-tasks-chaos.abc.") for name in names)


def test_the_app_belongs_to_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RABBIT_TASKS_CHAOS", raising=False)
    with pytest.raises(ConfigurationError, match="rabbit-tasks chaos"):
        app()
    monkeypatch.setenv("RABBIT_TASKS_CHAOS", str(tmp_path / "gone"))
    with pytest.raises(ConfigurationError, match="holds no run"):
        app()


@pytest.mark.parametrize("option", ["--report", "--plot"])
def test_a_file_that_cannot_be_written_in_the_end_is_a_failure_and_the_account_is_shown(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs a file that is always full")

    def made(work: Coroutine[Any, Any, object]) -> tuple[int, Result, object]:
        work.close()
        account = Account(tasks=1, published=1, done=1, done_over_time=[1], deaths_over_time=[0])
        return 0, Result(Plan(1, 1, "r"), account, "4.3.6"), {}

    monkeypatch.setattr("rabbit_tasks.cli.chaos.run", made)
    monkeypatch.setattr("sys.argv", ["rabbit-tasks", "chaos", option, "/dev/full"])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert "every task is accounted for" in out
    assert "error: /dev/full cannot be written: No space left on device" in err


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (None, 1)])
def test_a_broker_command_that_fails_is_no_passed_test(
    code: int | None, ends: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(work: Coroutine[Any, Any, object]) -> tuple[int, Result, object]:
        work.close()
        account = Account(tasks=1, published=1, done=1, done_over_time=[1], deaths_over_time=[0])
        hurts = [Done(Hurt(0.0, 1.0), 0, ""), Done(Hurt(2.0, 3.0), code, "oops")]
        return 0, Result(Plan(1, 1, "r"), account, "4.3.6", hurts), {}

    monkeypatch.setattr("rabbit_tasks.cli.chaos.run", made)
    monkeypatch.setattr("sys.argv", ["rabbit-tasks", "chaos", "--broker-command", "false"])
    with pytest.raises(SystemExit) as ended:
        command()
    assert (ended.value.code or 0) == ends
    out, _ = capsys.readouterr()
    assert ("BUT the broker command failed 1 of 2 times" in out) is bool(ends)
    assert "oops" in out
