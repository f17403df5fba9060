"""The plan's decisions, from what a broker told."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rabbit_tasks import ConfigurationError, Consumer, Message, RetryPolicy
from rabbit_tasks.declare import Difference
from rabbit_tasks.plan import Facts, Step, decide, exported_queues
from rabbit_tasks.policies import Policy
from rabbit_tasks.stale import removed_names, stale_names
from rabbit_tasks.topology import topology_of, waiting_queue


class Mail(Consumer[Any]):
    queue = "mail"
    retry = RetryPolicy(attempts=2, base=timedelta(seconds=1), jitter=False)

    async def handle(self, body: Any, message: Message) -> None: ...


TOPOLOGY = topology_of([Mail])
NAMES = [part.name for part in TOPOLOGY.parts]
BINDING = {
    "source": "parking-lot", "destination": "mail.parked", "routing_key": "mail",
    "destination_type": "queue", "properties_key": "mail",
}  # fmt: skip


def facts(**more: Any) -> Facts:
    return Facts(**{"vhost": "my vhost", "permit": "PERMIT", **more})


def due(found: Facts) -> list[Step]:
    return [step for step in decide(TOPOLOGY, found) if step.is_due]


def test_where_all_is_as_it_should_be_everything_is_kept_and_nothing_is_due() -> None:
    steps = decide(TOPOLOGY, facts(queues={}, bindings=[BINDING], policies=[], most_queues=0))
    assert [(step.what, step.name) for step in steps] == [("keep", name) for name in NAMES]
    assert not any(step.is_due for step in steps)


def test_what_is_missing_and_what_differs_ends_with_its_command() -> None:
    missing = [
        Difference(n, "missing", "", "", "create it: COMMAND") for n in ("parking-lot", "mail")
    ]
    differs = [
        Difference("mail.parked", what, "1", "2", "REMEDY")
        for what in ("x-delivery-limit", "x-expires")
    ]
    assert due(facts(differences=[*missing, *differs], bindings=[])) == [
        Step("create", "parking-lot", "exchange is missing", "create it: COMMAND"),
        Step("create", "mail", "main queue is missing", "create it: COMMAND"),
        Step("differs", "mail.parked", "x-delivery-limit is 2, wanted 1", "REMEDY",
             argument="x-delivery-limit"),
        Step("differs", "mail.parked", "x-expires is 2, wanted 1", "REMEDY",
             argument="x-expires"),
    ]  # fmt: skip


def test_what_could_not_be_compared_is_neither_kept_nor_different() -> None:
    steps = decide(TOPOLOGY, facts(uncompared={"mail"}))
    assert "mail" not in [step.name for step in steps]


def test_a_binding_that_is_missing_is_made_and_one_too_many_is_told() -> None:
    theirs = {**BINDING, "routing_key": "post", "destination": "post.parked"}
    copies = {**BINDING, "destination": "every/where", "properties_key": "mail"}
    to_exchange = {**BINDING, "destination": "audit", "destination_type": "exchange",
                   "properties_key": ""}  # fmt: skip
    steps = due(facts(bindings=[theirs, copies, to_exchange], api="http://h:15672/api"))
    assert [(step.what, step.name) for step in steps] == [
        ("bind", "mail.parked"), ("extra", "every/where"), ("extra", "audit"),
    ]  # fmt: skip
    assert steps[0].remedy == "bind it: rabbit-tasks topology declare"
    assert steps[1].remedy == (
        "if nobody needs it: curl -u USER -X DELETE "
        "http://h:15672/api/bindings/my%20vhost/e/parking-lot/q/every%2Fwhere/mail"
    )
    assert steps[2].remedy.endswith("/e/parking-lot/e/audit/~'")
    assert due(facts(bindings=[BINDING, theirs])) == []


def test_stale_queues_tell_what_they_hold_dead_letters_on_their_way_as_well() -> None:
    older = waiting_queue("mail.retry.1.9s")
    assert older is not None
    row = {"messages_unacknowledged": 1, "messages_dlx": 2, "arguments": older.arguments}
    rows = {"mail.retry.1.9s": row}
    steps = due(facts(others={"mail.retry.1.9s": 4, "mail.crashed.16s": 0}, queues=rows))
    assert steps == [
        Step("stale", "mail.crashed.16s", "of an older policy, and empty",
             "remove it: rabbit-tasks topology declare --prune", 0),
        Step("stale", "mail.retry.1.9s", "of an older policy, with 7 messages that will go home to "
             "mail", "once it is empty: rabbit-tasks topology declare --prune", 7),
    ]  # fmt: skip
    (one,) = due(facts(others={"mail.retry.1.9s": 1}))
    assert "with 1 message that" in one.says


def test_a_queue_that_has_but_the_name_of_a_retry_queue_is_a_note_and_not_to_be_removed() -> None:
    rows = {"mail.retry.1.9s": {"arguments": {"x-queue-type": "quorum"}}}
    found = facts(others={"mail.retry.1.9s": 0}, queues=rows)
    assert due(found) == []
    (note,) = [step for step in decide(TOPOLOGY, found) if step.what == "note"]
    assert note.name == "mail.retry.1.9s"
    assert note.says.startswith("has the name of a retry queue of ours, but is declared as none of")


def test_stale_is_what_serves_a_main_queue_of_ours_and_is_not_ours() -> None:
    names = [*NAMES, "mail.retry.1.9s", "mail.crashed.9s", "mail.x.retry.1.9s", "post.retry.1.9s",
             "mail.retry.9s", "mailretry.1.9s", "mail.parked", "x.mail.retry.1.9s"]  # fmt: skip
    assert stale_names(TOPOLOGY, names) == ["mail.crashed.9s", "mail.retry.1.9s"]


def test_queues_of_a_consumer_that_is_gone_are_told_with_what_they_hold_and_never_pruned() -> None:
    names = ["post", "post.parked", "post.retry.1.1s"]
    exported = frozenset([*(q.name for q in TOPOLOGY.queues), *names, "gone"])
    assert removed_names(TOPOLOGY, exported) == ["gone", *names]
    others = {"post": 3, "post.parked": 0, "post.retry.1.1s": 0}
    steps = due(facts(exported=exported, others=others))
    assert [(step.what, step.name, step.messages) for step in steps] == [
        ("removed", "post", 3), ("removed", "post.parked", 0), ("removed", "post.retry.1.1s", 0),
    ]  # fmt: skip
    assert steps[0].says.endswith("of no consumer of the app any more; it holds 3 messages")
    assert steps[1].remedy == (
        "when it is empty and nobody else's: rabbitmqctl delete_queue -p 'my vhost' post.parked"
    )


def test_a_lock_file_that_is_none_is_told() -> None:
    assert exported_queues(None) == frozenset()
    assert exported_queues(TOPOLOGY.definitions()) == {queue.name for queue in TOPOLOGY.queues}
    for text in ("", "[]", "{}", '{"queues": [1]}', "nonsense", '{"queues": 5}'):
        with pytest.raises(ConfigurationError, match="rabbit-tasks topology export"):
            exported_queues(text)


def test_policies_are_told_once_for_the_queues_that_they_change_alike() -> None:
    ttl = Policy("too short", "^mail", "queues", 1, {"message-ttl": 500})
    operators = Policy("op", "parked$", "queues", 1, {"max-length": 9}, is_operators=True)
    steps = due(facts(policies=[ttl, operators]))
    assert [(step.what, step.name) for step in steps] == [
        *[("policy", "too short")] * 4, ("policy", "op"),
    ]  # fmt: skip
    assert steps[0].says == (
        "policy on mail: messages that wait there for 500ms (message-ttl: 500) are parked without "
        "being handled"
    )
    assert steps[1].says.startswith(
        "policy on mail.retry.1.1s, mail.crashed.1s, mail.crashed.2s and 2 more: messages wait there"
    )
    assert steps[1].remedy == (
        "narrow its pattern '^mail', or: rabbitmqctl clear_policy -p 'my vhost' 'too short'"
    )
    assert steps[3].says.startswith("policy on mail.replaying: copies")
    assert steps[4].says.startswith("operator policy on mail.parked: beyond 9 messages")
    assert "rabbitmqctl clear_operator_policy -p 'my vhost' op" in steps[4].remedy


def test_policies_on_the_queue_that_replays_go_through_are_told_as_well() -> None:
    ttl = Policy("p", "replaying$", "queues", 1, {"message-ttl": 500})
    (step,) = due(facts(policies=[ttl]))
    assert step.says.startswith("policy on mail.replaying: copies of a replay go home early")


def test_of_policies_the_rules_count_and_the_brokers_late_answer_where_they_leave_it_open() -> None:
    def told(*policies: Policy, **row: Any) -> list[str]:
        steps = due(facts(policies=[*policies], queues={"mail": row}))
        return [step.name for step in steps if "parked without being handled" in step.says]

    high = Policy("high", "^mail$", "queues", 9, {"message-ttl": 1})
    low = Policy("low", "^mail$", "queues", 1, {"message-ttl": 2})
    operators = Policy("op", "^mail$", "queues", 9, {"message-ttl": 3}, is_operators=True)
    for row in ({}, {"policy": "low", "operator_policy": None}, {"policy": None}):
        assert told(high, low, operators, **row) == ["high", "op"]
    assert told(replace(high, apply_to="exchanges"), policy="high") == []
    # of two with the same priority
    same = replace(low, name="same")
    assert told(low, same, policy="same") == ["same"]
    assert told(low, same) == ["low"]
    # and of a pattern that is the broker's alone
    theirs = replace(high, name="theirs", pattern="^[[:alpha:]]+$")
    assert told(theirs, low, policy="low") == ["low"]
    assert told(theirs, low, policy="theirs") == ["theirs"]
    assert told(theirs, low, policy=None) == []
    assert told(replace(theirs, priority=0), low, policy="low") == ["low"]


def test_an_alternate_exchange_of_the_parking_lot_hides_what_cannot_be_parked() -> None:
    policy = Policy("p", "^parking", "all", 0, {"alternate-exchange": "bin"})
    (step,) = due(facts(policies=[policy]))
    assert step.says == (
        "policy on parking-lot: what has no parking queue goes to exchange 'bin', as if it were parked"
    )


@pytest.mark.parametrize(("most", "is_due"), [(None, False), (-1, False), (4, False), (3, True)])
def test_a_limit_of_queues_that_is_too_low_is_told_before_declare_fails(
    most: int | None, is_due: bool
) -> None:
    missing = [Difference(n, "missing", "", "", "") for n in ("mail", "mail.parked", "parking-lot")]
    found = facts(differences=missing, queues={"a": {}, "b": {}}, most_queues=most)
    steps = [step for step in due(found) if step.what == "limit"]
    assert bool(steps) == is_due
    for step in steps:
        assert step.says == "may have 3 queues, has 2, and 2 are to be created"
        assert step.remedy == ("""rabbitmqctl set_vhost_limits -p 'my vhost' '{"max-queues": 4}'""")
    assert due(facts(queues={"a": {}}, most_queues=0)) == []


def test_missing_permissions_are_one_row_for_declare_and_one_for_a_worker() -> None:
    refused = {"declare": [f"no {i}" for i in range(9)], "work": ["no read"]}
    assert due(facts(refused=refused)) == [
        Step("permission", "declare", "our user may not: no 0; no 1; no 2; and 6 more",
             "allow it: PERMIT"),
        Step("permission", "work", "our user may not: no read", "allow it: PERMIT"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("default", "told"), [(None, 0), ("undefined", 0), ("classic", 0), ("quorum", 0), ("stream", 1)]
)
def test_a_default_queue_type_is_a_note_since_ours_say_theirs(
    default: str | None, told: int
) -> None:
    steps = decide(TOPOLOGY, facts(default_type=default))
    assert [step.what for step in steps].count("note") == told
    assert not any(step.is_due for step in steps)


def test_what_was_not_looked_at_is_told_with_the_reason() -> None:
    steps = decide(TOPOLOGY, facts(unseen=[("bindings", "why")]))
    assert steps[-1] == Step("unseen", "bindings", "why")
    assert not steps[-1].is_due
    json.dumps([vars(step) for step in steps])
