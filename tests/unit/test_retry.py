"""The retry policy: how many attempts, which delays, and what is parked instead."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbit_tasks import ConfigurationError, Park, Parked, RetryAfter, RetryPolicy
from rabbit_tasks.errors import MalformedBody
from rabbit_tasks.retry import MAX_DELAY, MAX_RETRY_QUEUES, MILLISECOND

JUST_UNDER_ONE = 1 - 2**-53


def ms(*numbers: float) -> tuple[timedelta, ...]:
    return tuple(timedelta(milliseconds=number) for number in numbers)


SECOND = timedelta(seconds=1)


# --- delays -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RetryPolicy(attempts=1), []),
        (RetryPolicy(attempts=2), [ms(250, 500, 750, 1000)]),
        (RetryPolicy(attempts=4, jitter=False), [ms(1000), ms(2000), ms(4000)]),
        (RetryPolicy(attempts=5, base=SECOND, cap=3 * SECOND, jitter=False),
         [ms(1000), ms(2000), ms(3000), ms(3000)]),
        (RetryPolicy(attempts=3, base=SECOND, cap=SECOND, spread=2), [ms(500, 1000)] * 2),
        (RetryPolicy(attempts=2, base=SECOND, spread=3), [ms(334, 667, 1000)]),
        (RetryPolicy(attempts=4, base=MILLISECOND, spread=4), [ms(1), ms(1, 2), ms(1, 2, 3, 4)]),
        (RetryPolicy(attempts=3, base=ms(1.5)[0], jitter=False), [ms(1), ms(3)]),
        (RetryPolicy(delays=ms(100, 50.2, 100)), [ms(100), ms(51), ms(100)]),
        (RetryPolicy(delays=()), []),
        (RetryPolicy(delays=(MAX_DELAY,)), [(MAX_DELAY,)]),
    ],
)  # fmt: skip
def test_each_attempt_but_the_last_has_its_delays(
    policy: RetryPolicy, expected: list[tuple[timedelta, ...]]
) -> None:
    assert policy.attempts == len(expected) + 1
    assert [policy.delays_after(n) for n in range(1, policy.attempts)] == expected
    for beyond in (-1, 0, policy.attempts, policy.attempts + 1, 10**9):
        assert policy.delays_after(beyond) == ()


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    """Any legal policy with base and cap: ten years, one attempt, two hundred queues."""
    jitter = draw(st.booleans())
    attempts = draw(st.one_of(st.integers(1, MAX_RETRY_QUEUES + 1), st.just(MAX_RETRY_QUEUES + 1)))
    most = MAX_RETRY_QUEUES if attempts == 1 or not jitter else MAX_RETRY_QUEUES // (attempts - 1)
    base = draw(st.timedeltas(MILLISECOND, MAX_DELAY))
    cap = draw(st.one_of(st.just(MAX_DELAY), st.timedeltas(base, MAX_DELAY)))
    return RetryPolicy(attempts, base, cap, jitter, spread=draw(st.integers(1, most)))


@given(policies())
def test_every_delay_is_within_the_bound_of_full_jitter(policy: RetryPolicy) -> None:
    for attempt in range(1, policy.attempts):
        # (in whole numbers: a timedelta ends after 2.7 million years)
        bound = min(policy.cap // MILLISECOND, policy.base / MILLISECOND * 2 ** (attempt - 1))
        delays = policy.delays_after(attempt)
        assert list(delays) == sorted(set(delays))
        assert 1 <= len(delays) <= (policy.spread if policy.jitter else 1)
        for delay in delays:
            assert timedelta() < delay <= MAX_DELAY
            assert delay // MILLISECOND <= bound
            assert delay % MILLISECOND == timedelta()
        assert delays[-1] // MILLISECOND > bound - 1


@given(policies(), st.floats(0, JUST_UNDER_ONE), st.integers(1, 2_000_000))
def test_a_failure_is_always_answered(policy: RetryPolicy, draw: float, attempt: int) -> None:
    outcome = policy.after_failure(attempt, ValueError(), draw=draw)
    if attempt < policy.attempts:
        assert isinstance(outcome, RetryAfter)
        assert outcome.attempt == attempt
        assert outcome.delay in policy.delays_after(attempt)
    else:
        assert isinstance(outcome, Parked)


def test_the_draw_goes_from_the_shortest_delay_to_the_longest() -> None:
    policy = RetryPolicy(attempts=2)

    def delay(draw: float) -> timedelta:
        outcome = policy.after_failure(1, ValueError(), draw=draw)
        assert isinstance(outcome, RetryAfter)
        return outcome.delay

    draws = [delay(d) for d in (0.0, 0.2499, 0.25, 0.5, 0.75, JUST_UNDER_ONE)]
    assert draws == list(ms(250, 250, 500, 750, 1000, 1000))


def test_attempts_count_the_first_try() -> None:
    policy, error = RetryPolicy(attempts=3, jitter=False), ValueError("no")
    outcomes = [policy.after_failure(n, error, draw=0) for n in (1, 2, 3)]
    assert outcomes == [
        RetryAfter(1, SECOND, error),
        RetryAfter(2, 2 * SECOND, error),
        Parked("failed 3 attempts of 3", error),
    ]


@pytest.mark.parametrize(
    ("attempts", "attempt", "reason"),
    [(1, 1, "failed 1 attempt of 1"), (3, 1_000_001, "failed 1000001 attempts of 3")],
)
def test_spent_attempts_are_the_reason(attempts: int, attempt: int, reason: str) -> None:
    outcome = RetryPolicy(attempts=attempts).after_failure(attempt, ValueError(), draw=0)
    assert isinstance(outcome, Parked)
    assert outcome.reason == reason


# --- parked at once -----------------------------------------------------------------------------


class OwnPark(Park):
    def __init__(self) -> None:
        """(Does not call ours: there is no reason, and no text.)"""


class Mute(Park):
    def __init__(self) -> None:
        """(Says nothing, and fails when asked.)"""

    def __str__(self) -> str:
        raise RuntimeError


HOPELESS = RetryPolicy(park_on=(FileNotFoundError, KeyboardInterrupt))
NEVER_FILE = "FileNotFoundError is never retried (park_on)"


def nested(error: Exception, depth: int = 50_000) -> Exception:
    for _ in range(depth):
        error = ExceptionGroup("deeper", [error])
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Park("no such image"), "no such image"),
        (OwnPark(), ""),
        (Mute(), "Park, whose reason raised RuntimeError"),
        (MalformedBody("x", "y"), "malformed body"),
        (FileNotFoundError("a"), NEVER_FILE),
        (KeyboardInterrupt(), "KeyboardInterrupt is never retried (park_on)"),
        (ExceptionGroup("two", [ValueError(), Park("inner")]), "inner"),
        (ExceptionGroup("two", [ValueError(), FileNotFoundError()]), NEVER_FILE),
        (BaseExceptionGroup("b", [KeyboardInterrupt()]),
         "KeyboardInterrupt is never retried (park_on)"),
        (ExceptionGroup("first", [FileNotFoundError(), Park("first of all")]), "first of all"),
        (nested(Park("deep down")), "deep down"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_what_no_retry_can_mend_is_parked_at_once(error: BaseException, reason: str) -> None:
    assert HOPELESS.after_failure(1, error, draw=0) == Parked(reason, error)


@pytest.mark.parametrize(
    "error",
    [ValueError(), SystemExit(1), GeneratorExit(), OSError(), ExceptionGroup("g", [OSError()]),
     BaseExceptionGroup("g", [SystemExit()]), nested(OSError())],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_every_other_error_is_retried(error: BaseException) -> None:
    assert isinstance(HOPELESS.after_failure(1, error, draw=0), RetryAfter)


def test_attempts_may_be_said_beside_the_delays_that_make_them() -> None:
    said = RetryPolicy(attempts=3, delays=(SECOND, SECOND))
    assert said == RetryPolicy(delays=(SECOND, SECOND))
    assert said == replace(said, park_on=())


def test_lists_are_taken_as_tuples() -> None:
    policy = RetryPolicy(delays=[SECOND], park_on=[OSError])  # type: ignore[arg-type]
    assert policy == RetryPolicy(delays=(SECOND,), park_on=(OSError,))
    assert isinstance(policy.after_failure(1, OSError(), draw=0), Parked)


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"attempts": 0}, r"RetryPolicy\(attempts=0\): must be a whole number from 1; "),
        ({"attempts": -1}, "attempts=-1"),
        ({"attempts": True}, "attempts=True"),
        ({"attempts": 2.0}, "attempts=2.0"),
        ({"spread": 0}, "spread=0"),
        ({"base": timedelta()}, "base is 0:00:00; the broker takes 1 ms to 3650 days"),
        ({"base": timedelta(seconds=-1)}, "the broker takes 1 ms"),
        ({"base": timedelta(microseconds=999)}, "the broker takes 1 ms"),
        ({"cap": MAX_DELAY + timedelta(microseconds=1)}, "cap is 3650 days"),
        ({"cap": timedelta.max}, "to 3650 days"),
        ({"base": 2 * SECOND, "cap": SECOND}, "cap 0:00:01 is shorter than base 0:00:02"),
        ({"base": 1}, r"base is 1; write a timedelta, such as timedelta\(seconds=10\)"),
        ({"delays": (SECOND, timedelta())}, r"delays\[1\] is 0:00:00"),
        ({"delays": (SECOND, 5)}, r"delays\[1\] is 5; write a timedelta"),
        ({"delays": SECOND}, "delays is .*; it takes a tuple of timedeltas"),
        (
            {"attempts": 9, "delays": (SECOND,)},
            "1 delays make 2 attempts, the first try included, not 9; leave attempts out",
        ),
        ({"attempts": 5, "delays": (SECOND,)}, "not 5; leave attempts out"),
        ({"base": 2 * SECOND, "delays": (SECOND,)}, "leave out base, or delays"),
        ({"cap": SECOND, "delays": (SECOND,)}, "leave out cap, or delays"),
        ({"jitter": False, "delays": (SECOND,)}, "leave out jitter, or delays"),
        ({"spread": 1, "delays": ()}, "leave out spread, or delays"),
        ({"attempts": 52}, "52 attempts need 204 retry queues, more than 200; take fewer attempts"),
        ({"attempts": 10**30, "jitter": False}, "more than 200"),
        ({"delays": (SECOND,) * 201}, "202 attempts need 201 retry queues"),
        ({"park_on": ValueError}, "park_on is .*; it takes a tuple of exception types"),
        ({"park_on": ("ValueError",)}, "park_on has 'ValueError'; it takes exception types"),
        ({"park_on": (int,)}, "park_on has <class 'int'>"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        RetryPolicy(**values)
