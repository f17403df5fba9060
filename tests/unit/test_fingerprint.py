"""The fingerprint of a failure: what two of them have in common when they are one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from rabbit_tasks import Park, Parked, fingerprint, history
from rabbit_tasks.errors import MalformedBody
from rabbit_tasks.fingerprint import is_fingerprint, of_error, of_words
from rabbit_tasks.history import FailedElsewhere, failure_of
from rabbit_tasks.properties import Properties

NOW = datetime(2026, 1, 2, tzinfo=UTC)
CODE = """
class Bad(Exception): pass

def load(n):
    raise Bad(f"order {n}")

def save(n):
    raise Bad(f"order {n}")

def deep(n, left):
    return deep(n, left - 1) if left else load(n)

def wrapped(do, n):
    try:
        do(n)
    except Bad as error:
        raise RuntimeError("no") from error

def many(n, times):
    try:
        load(n)
    except Bad:
        if times:
            many(n, times - 1)
        raise
"""


def module(code: str) -> dict[str, Any]:
    """As a module that is imported would be."""
    made: dict[str, Any] = {"__name__": "shop.orders"}
    exec(compile(code, "/srv/shop/orders.py", "exec"), made)
    return made


def failed(do: Callable[..., object], *arguments: object) -> BaseException:
    try:
        do(*arguments)
    except BaseException as error:
        return error
    raise AssertionError


def test_the_same_failure_of_other_messages_and_after_edits_elsewhere_is_one() -> None:
    shop, edited = module(CODE), module("# a line more\n\n" + CODE)
    one = of_error(failed(shop["load"], 1))
    assert is_fingerprint(one)
    assert one == of_error(failed(shop["load"], 2)) == of_error(failed(edited["load"], 3))
    assert one != of_error(failed(shop["save"], 1))


def test_depth_of_recursion_makes_no_difference() -> None:
    shop = module(CODE)
    assert len({of_error(failed(shop["deep"], 1, depth)) for depth in (2, 3, 50)}) == 1


def test_a_cause_makes_a_difference() -> None:
    shop = module(CODE)
    loading = of_error(failed(shop["wrapped"], shop["load"], 1))
    assert loading == of_error(failed(shop["wrapped"], shop["load"], 2))
    assert loading != of_error(failed(shop["wrapped"], shop["save"], 1))


def through(name: str, do: Callable[..., object]) -> Callable[..., object]:
    """As that module of ours calls a handler."""
    around: dict[str, Any] = {"__name__": name}
    exec("def run(do, n):\n    return do(n)", around)
    return lambda n: around["run"](do, n)


def test_where_a_handler_runs_makes_no_difference() -> None:
    load = module(CODE)["load"]
    here = failure_of(failed(through("rabbit_tasks.handler", load), 1))
    child = failure_of(failed(through("rabbit_tasks.isolation", load), 2))
    assert here.fingerprint == child.fingerprint
    crossed = pickle.loads(pickle.dumps(FailedElsewhere(child)))
    assert failure_of(crossed).fingerprint == here.fingerprint


def test_a_group_of_errors_is_what_is_in_it() -> None:
    shop = module(CODE)
    loads = [failed(shop["load"], n) for n in range(3)]
    save = failed(shop["save"], 1)
    groups = [BaseExceptionGroup("", one) for one in (loads[:1], loads, [*loads, save])]
    one, same, other = map(of_error, groups)
    assert one == same != other


def test_malformed_bodies_are_told_by_the_codes_of_their_faults() -> None:
    first, second = MalformedBody("a: not 7", "int_type"), MalformedBody("b: not 8", "int_type")
    assert of_error(first) == of_error(second) != of_error(MalformedBody("a: not 7", "missing"))


def test_a_park_is_told_by_the_words_of_its_reason() -> None:
    assert of_error(Park("order 17 has no address")) == of_error(Park("order 18 has no address"))
    assert of_error(Park("order 17 has no address")) != of_error(Park("order 17 is too old"))
    assert of_words("no such user 'bob' (a1b2-99)") == of_words("no such user 'eve' (77ff)")
    assert of_words("it can't, and won't") != of_words("it can't, but won't")


class Hostile(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise SystemExit

    __traceback__ = property(lambda _: 1 / 0)


def test_an_errors_own_class_cannot_break_it() -> None:
    assert is_fingerprint(of_error(Hostile()))
    circle = ValueError()
    circle.__context__ = KeyError()
    circle.__context__.__context__ = circle
    assert is_fingerprint(of_error(circle))


def parked(
    error: BaseException | None, reason: str, before: Properties | None = None
) -> Properties:
    headers = history.after(
        Parked(reason), failure_of(error) if error else None, before or Properties.of(),
        queue="q", attempt=1, when=NOW, seconds=0, now=NOW, worker="w",
    )  # fmt: skip
    made = history.copy(before or Properties.of(), headers, message_id="new", frame_max=131_072)
    assert made is not None
    return made


def test_it_is_written_when_a_message_is_parked_whatever_its_publisher_wrote() -> None:
    error = failed(module(CODE)["load"], 1)
    forged = Properties.of({"x-error-fingerprint": "0" * 12})
    found = parked(error, "failed 5 attempts of 5", forged)
    assert history.fingerprint(found) == of_error(error)
    assert found.header("x-error-fingerprint") == of_error(error)
    assert history.fingerprint(parked(None, "told to")) == of_words("told to")


@pytest.mark.parametrize(
    ("headers", "error", "same"),
    [
        ({"x-error-type": "shop.Bad", "x-parked-reason": "failed 5 attempts of 5"},
         "shop.Bad", "shop.Bad"),
        ({"x-error-type": "shop.Bad", "x-parked-reason": "its worker died 6 times",
          "x-crashes": {"count": 6}}, None, "its worker died 7 times"),
        ({"x-error-type": "rabbit_tasks.errors.Park", "x-parked-reason": "order 7 is old"},
         None, "order 8 is old"),
        ({"x-error-fingerprint": "nonsense", "x-parked-reason": "told to"}, None, "told to"),
        ({"x-error-fingerprint": "0" * 12, "x-error-type": "shop.Bad",
          "x-death": [{"reason": "delivery_limit", "queue": "q"}]},
         None, "its worker died with it, or lost its connection, too often (delivery limit)"),
        ({}, None, "unknown: put here by neither a worker nor the broker"),
    ],
)  # fmt: skip
def test_a_message_without_one_is_told_by_its_error_or_by_the_kind_of_its_reason(
    headers: dict[str, Any], error: str | None, same: str
) -> None:
    properties = Properties.of(headers)
    assert history.failed_with(properties) == error
    assert history.fingerprint(properties) == fingerprint.of_words(same)
