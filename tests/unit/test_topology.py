"""Names and arguments of the topology, to the letter."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import Any

import pytest

from rabbit_tasks import App, ConfigurationError, Consumer, Message, RetryPolicy
from rabbit_tasks.durations import duration_of, duration_text
from rabbit_tasks.topology import topology_of, waiting_for, waiting_queue


def consumer(
    queue: str, name: str = "Made", retry: RetryPolicy | None = None, delivery_limit: int = 5
) -> type[Consumer[Any]]:
    async def handle(self: Any, body: Any, message: Message) -> None: ...

    body = {"queue": queue, "handle": handle, "delivery_limit": delivery_limit}
    return type(name, (Consumer,), {**body, "retry": retry or RetryPolicy(attempts=1)})


RESIZE = consumer(
    "images.resize",
    "Resize",
    RetryPolicy(attempts=3, base=timedelta(seconds=1), spread=2),
    delivery_limit=7,
)
WAITS_THEN_HOME = {
    "x-queue-type": "quorum",
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": "images.resize",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
GOLDEN: dict[str, dict[str, Any]] = {
    "images.resize": {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "parking-lot",
        "x-dead-letter-routing-key": "images.resize",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-delivery-limit": 7,
        "x-consumer-disconnected-timeout": 2000,
    },
    "images.resize.crashed.1s": {**WAITS_THEN_HOME, "x-message-ttl": 1000},
    "images.resize.crashed.2s": {**WAITS_THEN_HOME, "x-message-ttl": 2000},
    "images.resize.crashed.4s": {**WAITS_THEN_HOME, "x-message-ttl": 4000},
    "images.resize.crashed.8s": {**WAITS_THEN_HOME, "x-message-ttl": 8000},
    "images.resize.parked": {"x-queue-type": "quorum", "x-delivery-limit": 2147483647},
    "images.resize.retry.1.500ms": {**WAITS_THEN_HOME, "x-message-ttl": 500},
    "images.resize.retry.1.1s": {**WAITS_THEN_HOME, "x-message-ttl": 1000},
    "images.resize.retry.2.1s": {**WAITS_THEN_HOME, "x-message-ttl": 1000},
    "images.resize.retry.2.2s": {**WAITS_THEN_HOME, "x-message-ttl": 2000},
}
"""Any change here is a migration for whoever runs an older version: CHANGELOG, heading Topology."""


def test_names_and_arguments_are_these() -> None:
    topology = topology_of([RESIZE])
    assert {queue.name: queue.arguments for queue in topology.queues} == GOLDEN
    assert {queue.name: queue.role for queue in topology.queues} == {
        name: name.split(".")[2] if name != "images.resize" else "main" for name in GOLDEN
    }


def test_an_ack_timeout_is_an_argument_of_the_main_queue_alone() -> None:
    class Long(RESIZE):  # type: ignore[misc, valid-type]
        ack_timeout = timedelta(hours=2)

    found = {queue.name: queue.arguments for queue in topology_of([Long]).queues}
    assert found == {
        **GOLDEN,
        "images.resize": {**GOLDEN["images.resize"], "x-consumer-timeout": 7_200_000},
    }


def test_definitions_are_what_the_management_api_takes() -> None:
    definitions = json.loads(topology_of([RESIZE]).definitions())
    assert definitions == {
        "exchanges": [
            {"name": "parking-lot", "type": "direct", "durable": True, "auto_delete": False,
             "internal": False, "arguments": {}},
        ],
        "queues": [
            {"name": name, "durable": True, "auto_delete": False, "arguments": GOLDEN[name]}
            for name in sorted(GOLDEN)
        ],
        "bindings": [
            {"source": "parking-lot", "destination": "images.resize.parked",
             "destination_type": "queue", "routing_key": "images.resize", "arguments": {}},
        ],
    }  # fmt: skip


def test_the_same_consumers_make_the_same_text_in_any_order() -> None:
    kinds = [RESIZE, consumer("b"), consumer("a")]
    texts = {topology_of(order).definitions() for order in itertools.permutations(kinds)}
    assert len(texts) == 1
    assert texts.pop().endswith("}\n")


def test_an_app_without_consumers_needs_nothing() -> None:
    topology = App("empty", []).topology
    assert (topology.queues, topology.exchanges, topology.bindings) == ((), (), ())


# --- collisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ([consumer("q", "A"), consumer("q", "B")],
         "A and B both take queue 'q'; give each its own"),
        ([RESIZE, RESIZE], "Resize and Resize both take queue 'images.resize'"),
    ],
)  # fmt: skip
def test_two_consumers_cannot_take_one_queue(kinds: list[type[Consumer[Any]]], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        App("app", [kind() for kind in kinds])


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("x.parked", "x-parked"), (".parked", "-parked"), ("a.parked.parked", "a-parked-parked"),
        ("x.retry.1.500ms", "x-retry.1.500ms"), ("x.retry.12.3d", "x-retry.12.3d"),
        ("x.retry.1.1s.parked", "x-retry.1.1s-parked"), ("x.crashed.4s", "x-crashed.4s"),
        ("x.replaying", "x-replaying"),
    ],
)  # fmt: skip
def test_no_main_queue_can_be_taken_for_one_that_serves_another(name: str, instead: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        topology_of([consumer(name)])
    assert str(refused.value).endswith(f"take another ending, such as {instead!r}")
    topology_of([consumer(instead)])


@pytest.mark.parametrize(
    "name",
    ["parked", "x.parked.y", "x.retry", "x.retry.1", "x.retry.1.1w", "x.crashed", "x.crashed.1w"],
)
def test_names_that_only_look_like_theirs_are_taken(name: str) -> None:
    topology_of([consumer(name)])


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry", "suffix"),
    [
        (RetryPolicy(attempts=1), ".crashed.1s"),
        (RetryPolicy(attempts=2), ".retry.1.250ms"),
        (RetryPolicy(delays=(timedelta(1), timedelta(milliseconds=86_400_001))),
         ".retry.2.86400001ms"),
    ],
)  # fmt: skip
def test_the_longest_derived_name_may_have_255_bytes_and_no_more(
    retry: RetryPolicy, suffix: str
) -> None:
    longest = "q" * (255 - len(suffix))
    names = [queue.name for queue in topology_of([consumer(longest, retry=retry)]).queues]
    assert max(len(name) for name in names) == 255
    assert longest + suffix in names
    with pytest.raises(ConfigurationError, match=r"has 256 bytes, AMQP takes 255; .* 1 shorter"):
        topology_of([consumer(longest + "q", retry=retry)])


def test_a_name_that_is_too_long_is_told_once_how_much_shorter() -> None:
    with pytest.raises(ConfigurationError) as refused:
        topology_of([consumer("q" * 300)])
    assert "its crashed queue's name" in str(refused.value)
    topology_of([consumer("q" * (300 - int(str(refused.value).split()[-2])))])


@pytest.mark.parametrize("character", ["ü", "\n", "\0", "*", "?", "'", "\\", "\u202e", "\udc80"])
def test_a_name_that_the_client_cannot_declare_is_refused(character: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Made.queue .* has .*; take ASCII letters"):
        topology_of([consumer(f"a{character}b")])


def test_the_brokers_own_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'amq\.x': names in amq\. are the broker's own"):
        topology_of([consumer("amq.x")])


def test_names_may_have_spaces_and_slashes() -> None:
    topology_of([consumer("A-z_0/9 .:@#,+")])


@pytest.mark.parametrize("queue", ["images.resize", "A-z_0/9 .:@#,+", "a.retry.1", "a.crashed"])
def test_the_main_queue_is_read_from_the_name_of_each_queue_where_messages_wait(queue: str) -> None:
    retry = RetryPolicy(attempts=12, base=timedelta(milliseconds=300), cap=timedelta(days=3))
    for one in topology_of([consumer(queue, retry=retry)]).queues:
        waits = one.role in ("retry", "crashed")
        assert waiting_for(one.name) == (queue if waits else None), one.name
        made = waiting_queue(one.name)
        assert made == (one if waits else None)
        assert made is None or made.arguments == one.arguments


@pytest.mark.parametrize(
    "name",
    ["a.retry.1.5", "a.retry.x.5s", "a.retry.1.5s.parked", "a.crashed.s", ".crashed.1s", "a"],
)
def test_other_names_are_of_no_main_queue(name: str) -> None:
    assert waiting_for(name) is None


@pytest.mark.parametrize(
    "name",
    ["a.retry.1.60s", "a.retry.01.1s", "a.crashed.0s", "a.retry.1." + "9" * 30 + "d", "a.parked"],
)
def test_a_name_that_no_policy_gives_is_of_no_queue_where_messages_wait(name: str) -> None:
    assert waiting_queue(name) is None


def test_the_digest_is_that_of_the_definitions() -> None:
    assert topology_of([RESIZE]).digest == topology_of([RESIZE]).digest
    assert len(topology_of([RESIZE]).digest) == 12
    others = [consumer("images.resize"), consumer("images.resize", delivery_limit=6), consumer("b")]
    digests = {topology_of([one]).digest for one in (RESIZE, *others)}
    assert len(digests) == 4


# --- durations in names -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(milliseconds=1), "1ms"),
        (timedelta(milliseconds=1500), "1500ms"),
        (timedelta(seconds=90), "90s"),
        (timedelta(minutes=5), "5m"),
        (timedelta(hours=36), "36h"),
        (timedelta(days=3650), "3650d"),
        (timedelta(), "0ms"),
    ],
)
def test_a_duration_is_written_in_one_unit_and_read_back(duration: timedelta, text: str) -> None:
    assert duration_text(duration) == text
    assert duration_of(text) == duration
