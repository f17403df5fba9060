"""The same trouble is told once, then counted."""

from __future__ import annotations

import pytest

from rabbit_tasks.repeats import Repeats


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("rabbit_tasks.repeats.time.monotonic", lambda: now[0])
    return now


def test_three_minutes_of_one_trouble_are_seven_lines_that_count_the_others(
    clock: list[float],
) -> None:
    said = Repeats()
    lines = []
    for _ in range(181):
        if (ending := said.say("outage", "nobody listens")) is not None:
            lines.append(ending)
        clock[0] += 1
    assert len(lines) == 7
    assert lines[0] == ""
    assert lines[1] == " (29 more times since this was last said)"
    assert said.over("outage") == "after 181.0 s and 181 failures"
    assert said.over("outage") is None
    assert said.say("outage", "nobody listens") == ""  # the next one is told at once


def test_another_reason_is_told_at_once_but_not_for_another_figure(clock: list[float]) -> None:
    said = Repeats()
    assert said.say("outage", "no answer within 8.7 s") == ""
    assert said.say("outage", "no answer within 9.0 s") is None
    assert said.say("outage", "connection refused") == ""
    assert said.say("elsewhere", "connection refused") == ""


def test_the_first_few_are_told_where_that_is_asked_for(clock: list[float]) -> None:
    said = Repeats()
    assert [said.say("held", first=3) for _ in range(5)] == ["", "", "", None, None]
    assert said.over("held") == "after 0.0 s and 5 failures"
