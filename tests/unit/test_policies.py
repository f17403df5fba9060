"""What a policy makes of queues of ours, decided without a broker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from rabbit_tasks import Consumer, Message, RetryPolicy
from rabbit_tasks.policies import Policy, applying, changes, changes_of_copies
from rabbit_tasks.topology import Queue, topology_of


class Mail(Consumer[Any]):
    queue = "mail"
    retry = RetryPolicy(attempts=2, base=timedelta(seconds=1), jitter=False)

    async def handle(self, body: Any, message: Message) -> None: ...


class Slow(Mail):
    queue = "slow"
    timeout = timedelta(minutes=50)
    ack_timeout = timedelta(hours=1)


QUEUES = {queue.name: queue for queue in topology_of([Mail, Slow]).queues}
MAIN, RETRY, CRASHED, PARKED = (
    QUEUES[name] for name in ("mail", "mail.retry.1.1s", "mail.crashed.4s", "mail.parked")
)
SLOW = QUEUES["slow"]


def says(queue: Queue, definition: dict[str, Any]) -> list[str]:
    return [change.says for change in changes(queue, definition)]


@pytest.mark.parametrize(
    ("queue", "definition", "told"),
    [
        (MAIN, {"message-ttl": 60_000}, ("messages that wait there for 1m (message-ttl: 60000) are "
         "parked without being handled")),
        (PARKED, {"message-ttl": 0}, "parked messages are lost after 0ms (message-ttl: 0)"),
        (RETRY, {"message-ttl": 999}, ("messages wait there for 999ms (message-ttl: 999), less than it "
         "was declared with")),
        (CRASHED, {"message-ttl": 3000}, ("messages wait there for 3s (message-ttl: 3000), less than "
         "it was declared with")),
        (RETRY, {"expires": 60_000}, ("it is deleted with its messages when nobody uses it for 1m "
         "(expires: 60000)")),
        (MAIN, {"max-length": 5}, ("beyond 5 messages (max-length) it refuses what is published, "
         "retries and replays as well")),
        (RETRY, {"max-length-bytes": 9}, ("beyond 9 bytes (max-length-bytes) it refuses what is "
         "published, retries and replays as well")),
        (PARKED, {"max-length": 5}, ("beyond 5 messages (max-length) the oldest parked messages are "
         "lost")),
        (PARKED, {"max-length": 5, "overflow": "drop-head"}, ("beyond 5 messages (max-length) the "
         "oldest parked messages are lost")),
        (PARKED, {"max-length": 5, "overflow": "reject-publish"}, ("beyond 5 messages (max-length) "
         "nothing more can be parked: workers keep it in their hands")),
        (
            PARKED,
            {"max-length": 5, "overflow": "reject-publish-dlx"},  # (a quorum queue knows no such)
            "beyond 5 messages (max-length) the oldest parked messages are lost",
        ),
        (RETRY, {"overflow": "drop-head"}, ("its dead letters are moved at most once and may be lost "
         "(overflow: drop-head)")),
        (MAIN, {"delivery-limit": 4}, ("a message is parked after 5 deliveries instead of 6 "
         "(delivery-limit: 4)")),
        (PARKED, {"delivery-limit": 20}, ("a parked message is lost after 21 looks at it "
         "(delivery-limit: 20)")),
        (MAIN, {"consumer-timeout": 60_000}, ("what a handler has not done within 1m instead of 30m is "
         "delivered again (consumer-timeout: 60000)")),
        (SLOW, {"consumer-timeout": 2_400_000}, ("what a handler has not done within 40m instead of 1h "
         "is delivered again (consumer-timeout: 2400000)")),
        (MAIN, {"delayed-retry-type": "all", "delayed-retry-min": 2000}, ("what is put back into it is "
         "hidden for 2s and more (delayed-retry-min: 2000)")),
    ],
)  # fmt: skip
def test_a_policy_that_changes_what_a_queue_means_is_told(
    queue: Queue, definition: dict[str, Any], told: str
) -> None:
    assert says(queue, definition) == [told]


def test_with_another_overflow_a_length_limit_drops_into_the_dead_letters() -> None:
    definition = {"max-length": 5, "overflow": "drop-head"}
    lost = "its dead letters are moved at most once and may be lost (overflow: drop-head)"
    most = "beyond 5 messages (max-length) the oldest"
    assert says(MAIN, definition) == [f"{most} are parked without being handled", lost]
    assert says(RETRY, definition) == [f"{most} go home before their time", lost]
    known = {**definition, "overflow": "reject-publish-dlx"}  # (not to a quorum queue)
    assert says(PARKED, known) == [f"{most} parked messages are lost"]


@pytest.mark.parametrize(
    ("queue", "definition"),
    [
        (RETRY, {"message-ttl": 1000}),
        (RETRY, {"message-ttl": 5000}),
        (MAIN, {"dead-letter-exchange": "x", "dead-letter-routing-key": "y"}),
        (RETRY, {"dead-letter-exchange": "x", "dead-letter-strategy": "at-most-once"}),
        (PARKED, {"dead-letter-exchange": "x"}),
        (PARKED, {"overflow": "drop-head"}),
        (MAIN, {"overflow": "reject-publish"}),
        (MAIN, {"delivery-limit": 5}),
        (MAIN, {"delivery-limit": -1}),
        (RETRY, {"delivery-limit": 1}),
        (MAIN, {"consumer-timeout": 1_800_000}),
        (SLOW, {"consumer-timeout": 3_600_000}),
        (PARKED, {"consumer-timeout": 1}),
        (MAIN, {"delayed-retry-type": "disabled", "delayed-retry-min": 2000}),
        (MAIN, {"delayed-retry-type": "all"}),
        (MAIN, {"queue-leader-locator": "balanced", "federation-upstream-set": "all"}),
        (
            MAIN,
            {"message-ttl": "60000", "max-length": None, "delivery-limit": True, "expires": [1]},
        ),
        (MAIN, {}),
    ],
)
def test_a_policy_that_changes_nothing_for_a_queue_is_not(
    queue: Queue, definition: dict[str, Any]
) -> None:
    assert says(queue, definition) == []


def policy(
    name: str,
    pattern: str = "^mail",
    apply_to: str = "queues",
    priority: float = 0,
    definition: dict[str, Any] | None = None,
) -> Policy:
    return Policy(name, pattern, apply_to, priority, definition or {"expires": 1})


def test_the_policy_of_the_highest_priority_applies_alone() -> None:
    low, high, other = (
        policy("low"),
        policy("high", priority=2.5),
        policy("other", "^post", priority=9),
    )
    assert applying([low, high, other], "mail", "quorum queue") == high
    assert applying([other], "mail", "quorum queue") is None
    assert applying([], "mail", "quorum queue") is None


@pytest.mark.parametrize(
    ("apply_to", "queue", "exchange"),
    [
        ("all", True, True),
        ("queues", True, False),
        ("quorum_queues", True, False),
        ("classic_queues", False, False),
        ("streams", False, False),
        ("exchanges", False, True),
    ],
)
def test_a_policy_applies_to_kinds(apply_to: str, queue: bool, exchange: bool) -> None:
    one = policy("p", apply_to=apply_to)
    assert one.applies_to("mail", "quorum queue") == queue
    assert one.applies_to("mail", "exchange") == exchange


def test_one_key_that_is_not_for_quorum_queues_and_the_policy_does_not_apply() -> None:
    one = policy("p", apply_to="all", definition={"ha-mode": "all", "expires": 5})
    assert not one.applies_to("mail", "quorum queue")
    assert one.applies_to("mail", "exchange")


@pytest.mark.parametrize(
    ("pattern", "applies"),
    [
        ("ai", True),
        ("^ai", False),
        ("mail$", True),
        ("MAIL", False),
        ("", True),
        (r"\Qmail\E", True),
    ],
)
def test_a_pattern_is_searched_and_one_that_cannot_be_read_may_apply(
    pattern: str, applies: bool
) -> None:
    assert policy("p", pattern).applies_to("mail", "quorum queue") == applies


def test_a_policy_is_read_from_what_the_management_api_tells_and_from_nonsense() -> None:
    row = {"vhost": "/", "name": "p", "pattern": "^a", "apply-to": "queues", "priority": 3,
           "definition": {"expires": 5}}  # fmt: skip
    assert Policy.of(row) == Policy("p", "^a", "queues", 3, {"expires": 5})
    assert Policy.of({"definition": [], "priority": "x"}) == Policy("", "", "all", 0, {})


@pytest.mark.parametrize(
    ("definition", "told", "loses"),
    [
        ({"message-ttl": 5}, ["go home early (message-ttl)"], False),
        ({"max-length": 5, "overflow": "drop-head"}, ["go home early (max-length)"], False),
        ({"max-length": 5}, [], False),  # (the argument refuses what is too much)
        ({"expires": 5}, ["it is deleted when nobody uses it"], True),
        ({"dead-letter-exchange": "x", "queue-leader-locator": "balanced"}, [], False),
    ],
)
def test_a_policy_under_which_a_killed_replay_doubles_or_loses_copies_is_told(
    definition: dict[str, Any], told: list[str], loses: bool
) -> None:
    found = changes_of_copies(definition)
    assert len(found) == len(told)
    assert all(words in one.says for words, one in zip(told, found, strict=True))
    assert any(one.loses for one in found) == loses
