"""The doctor's judgements: facts in, rows out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rabbit_tasks.doctor.diagnosis import diagnose, has_fault
from rabbit_tasks.doctor.examination import is_loopback
from rabbit_tasks.doctor.facts import Clients, Facts, Held, Left, Listener, Node, Quorum, Reader
from rabbit_tasks.doctor.of_us import fits, of_clients
from rabbit_tasks.doctor.row import Row
from rabbit_tasks.plan import Step
from rabbit_tasks.policies import changes
from tests.support.post import app

NOW = datetime(2026, 12, 1, tzinfo=UTC)
ABC = frozenset({"rabbit@a", "rabbit@b", "rabbit@c"})
AB = frozenset({"rabbit@a", "rabbit@b"})
CLIENTS = Clients(
    asked=("aiormq<8,>=7.2", "pamqp<5,>=4"),
    installed={"aiormq": "7.2.4", "pamqp": "4.0.1"},
    made_for="7.2",
)
HERE = Listener(
    where="127.0.0.1:5672", is_loopback=True, tls=False, version="4.3.6", asked_heartbeat=60
)
AWAY = Listener(where="mq.example:5672", is_loopback=False, tls=False, version="4.3.6")
TLS = Listener(where="mq.example:5671", is_loopback=False, tls=True, version="4.3.6")
KEPT = Step("keep", "mail", "main queue as it should be")
UP = tuple(Node(name=name) for name in sorted(ABC))


def facts(**changed: Any) -> Facts:
    """Of a broker on which nothing is wrong, but for what is changed."""
    well: dict[str, Any] = {
        "clients": CLIENTS, "user": "shop", "vhost": "/", "has_default_login": False,
        "heartbeat": timedelta(seconds=15), "now": NOW, "listeners": (HERE,), "is_blocked": False,
        "app": "shop", "channels": 12, "steps": (KEPT,), "held": (main(), lot()), "nodes": UP,
        "quorums": (Quorum("mail", ABC, ABC, "rabbit@a"),), "readers": (), "deprecated": (),
        "disabled_flags": (), "ahead": timedelta(),
    }  # fmt: skip
    return Facts(**{**well, **changed})


def main(messages: int = 0, consumers: int = 2, queue: str = "mail") -> Held:
    return Held(queue=queue, role="main", main=queue, messages=messages, consumers=consumers)


def lot(messages: int = 0, since: datetime | None = None) -> Held:
    return Held(
        queue="mail.parked", role="parked", main="mail", messages=messages, consumers=0, since=since
    )


def retry(consumers: int) -> Held:
    return Held(queue="mail.retry.1.1s", role="retry", main="mail", messages=0, consumers=consumers)


def node(**changed: Any) -> tuple[Node, ...]:
    """Three, of which the second is changed."""
    return (UP[0], Node(name="rabbit@b", **changed), UP[2])


def quorums(count: int, **changed: Any) -> tuple[Quorum, ...]:
    with_all: dict[str, Any] = {"members": ABC, "online": ABC, "leader": "rabbit@a", **changed}
    return tuple(Quorum(f"mail{i}", **with_all) for i in range(count))


def mails(count: int) -> tuple[Held, ...]:
    return tuple(main(queue=f"mail{i}") for i in range(count))


def not_well(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.state != "ok"]


def test_of_a_broker_that_is_well_every_row_is_ok_and_asks_for_nothing() -> None:
    rows = diagnose(facts())
    assert not_well(rows) == []
    assert [row for row in rows if row.remedy] == []
    assert not has_fault(rows)
    assert {row.about for row in rows} == {
        "clients", "connection", "TLS", "heartbeat", "version", "delivery limit",
        "consumer timeout", "priorities", "deprecated features", "feature flags", "cluster",
        "alarms", "clock", "quorum", "permissions", "topology", "consumers", "parked",
    }  # fmt: skip


GIB = 2**30
WRONG: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "a library out of its range": (
        {"clients": Clients(("aiormq<8,>=7.2",), {"aiormq": "6.9.4"}, "6.9")},
        "fault", "clients", "aiormq 6.9.4; rabbit-tasks asks for aiormq<8,>=7.2",
        "pip install 'aiormq<8,>=7.2'",
    ),
    "a library that is missing": (
        {"clients": Clients(("yarl>=1.9",), {}, "7.2")},
        "fault", "clients", "yarl is not installed", "pip install 'yarl>=1.9'",
    ),
    "frames read as by another aiormq": (
        {"clients": Clients(("aiormq<8,>=7.2",), {"aiormq": "7.3.0"}, "7.2")},
        "warning", "clients", "aiormq 7.3.0", "pip install 'aiormq==7.2.*'",
    ),
    "nobody lets us in": (
        {"listeners": (Listener(where="x:1", is_loopback=True, tls=False, failure="x:1 refused"),)},
        "fault", "connection", "x:1 refused", "rabbitmq-diagnostics",
    ),
    "one of two does not let us in": (
        {"listeners": (HERE, Listener(where="x:1", is_loopback=True, tls=False, failure="x:1 no"))},
        "warning", "connection", "x:1 no", "rabbitmq-diagnostics",
    ),
    "small frames": (
        {"listeners": (Listener(where="x:1", is_loopback=True, tls=False, version="4.3.6",
                                frame_max=8192),)},
        "warning", "connection", "frames of 8192 bytes", "frame_max = 131072",
    ),
    "more slots than channels": (
        {"channels": 68, "listeners": (Listener(where="x:1", is_loopback=True, tls=False,
                                             version="4.3.6", channel_max=64),)},
        "fault", "connection", "allows 64 channels", "channel_max",
    ),
    "no TLS to another machine": (
        {"listeners": (AWAY,)}, "warning", "TLS", "mq.example:5672: without", "amqps://",
    ),
    "another server can pass for it": (
        {"listeners": (TLS,), "checks_host": False},
        "warning", "TLS", "not compared", "unset RABBIT_TASKS_TLS_CHECK_HOST",
    ),
    "a certificate that expires soon": (
        {"listeners": (Listener(where="x:1", is_loopback=False, tls=True, version="4.3.6",
                                certificate_until=NOW + timedelta(days=7)),)},
        "warning", "TLS", "expires on 2026-12-08, in 7 days", "give the broker a new one",
    ),
    "the login that everybody knows": (
        {"listeners": (TLS,), "has_default_login": True},
        "warning", "login", "mq.example:5671: guest", "rabbitmqctl delete_user guest",
    ),
    "a slow heartbeat": (
        {"heartbeat": timedelta(minutes=5),
         "listeners": (Listener(where="x:1", is_loopback=True, tls=False, version="4.3.6",
                                asked_heartbeat=0),)},
        "warning", "heartbeat", "5m (the broker's: none)", "RABBIT_TASKS_HEARTBEAT=15s",
    ),
    "a broker that loses dead letters": (
        {"listeners": (Listener(where="x:1", is_loopback=True, tls=False, version="3.9.2"),)},
        "fault", "version", "RabbitMQ 3.9.2 loses dead letters", "upgrade it",
    ),
    "versions mixed": (
        {"listeners": (HERE, Listener(where="x:1", is_loopback=True, tls=False, version="4.0.5"))},
        "warning", "version", "4.0.5, 4.3.6", "cluster_status",
    ),
    "a deprecated feature in use": (
        {"deprecated": ("transient_nonexcl_queues",)},
        "warning", "deprecated features", "transient_nonexcl_queues", "--used",
    ),
    "flags left off": (
        {"disabled_flags": ("khepri_db",)},
        "warning", "feature flags", "khepri_db", "rabbitmqctl enable_feature_flag all",
    ),
    "a node down": (
        {"nodes": node(is_running=False)},
        "fault", "cluster", "1 of 3 nodes down: rabbit@b", "cluster_status",
    ),
    "nodes apart": (
        {"nodes": node(partitions=("rabbit@c",))},
        "fault", "cluster", "rabbit@b is cut off from rabbit@c", "rabbitmq-diagnostics",
    ),
    "a node in maintenance": (
        {"nodes": node(is_draining=True)},
        "warning", "cluster", "rabbit@b is in maintenance", "rabbitmq-upgrade -n rabbit@b revive",
    ),
    "an even number of nodes": (
        {"nodes": UP[:2], "quorums": (Quorum("mail", AB, AB, "rabbit@a"),)},
        "warning", "cluster", "2 nodes: an even number", "rabbitmqctl join_cluster rabbit@a",
    ),
    "a memory alarm": (
        {"nodes": node(memory_alarm=True), "is_blocked": True},
        "fault", "alarms", "rabbit@b: memory alarm", "memory_breakdown",
    ),
    "a disk alarm": (
        {"nodes": node(disk_alarm=True)}, "fault", "alarms", "rabbit@b: disk alarm", "free space",
    ),
    "an alarm that only a publisher is told of": (
        {"nodes": None, "quorums": None, "is_blocked": True},
        "fault", "alarms", "holds publishers back", "rabbitmq-diagnostics alarms",
    ),
    "nearly out of memory": (
        {"nodes": node(memory=(9 * GIB, 10 * GIB))},
        "warning", "alarms", "uses 9 GiB of the 10 GiB", "memory_breakdown",
    ),
    "nearly out of disk": (
        {"nodes": node(disk=(52_000_000, 50_000_000))},
        "warning", "alarms", "49 MiB of disk left", "free space",
    ),
    "the broker's clock ahead": (
        {"ahead": timedelta(seconds=90)}, "warning", "clock", "90 s ahead of ours", "timedatectl",
    ),
    "the broker's clock behind": (
        {"ahead": timedelta(seconds=-90)}, "warning", "clock", "90 s behind ours", "timedatectl",
    ),
    "no majority": (
        {"quorums": (Quorum("mail", ABC, frozenset({"rabbit@a"}), None),)},
        "fault", "quorum", "1 queues without a majority", "start rabbit@b, rabbit@c",
    ),
    "half is no majority": (
        {"quorums": (Quorum("mail", AB, frozenset({"rabbit@a"}), None),)},
        "fault", "quorum", "without a majority", "start rabbit@b",
    ),
    "a member that is away": (
        {"quorums": (Quorum("mail", ABC, AB, "rabbit@a"),)},
        "warning", "quorum", "1 queues lack nodes (rabbit@c)", "quorum_status --vhost / mail",
    ),
    "a queue from before the cluster grew": (
        {"quorums": (Quorum("mail", AB, AB, "rabbit@a"),), "vhost": "a b"},
        "warning", "quorum", "on fewer nodes than there are",
        r"rabbitmq-queues grow rabbit@c all --vhost-pattern '^a\ b$'",
    ),
    "one node leads all": (
        {"quorums": quorums(4), "held": mails(4)},
        "warning", "quorum", "rabbit@a leads all 4 queues", "rabbitmq-queues rebalance quorum",
    ),
    "a permission that a worker needs": (
        {"steps": (KEPT, Step("permission", "work", "our user may not: read access", "allow it"))},
        "fault", "permissions", "work: our user may not: read access", "allow it",
    ),
    "a permission that only declare needs": (
        {"steps": (KEPT, Step("permission", "declare", "our user may not: configure", "allow it"))},
        "unseen", "declare", "our user may not: configure; a worker need not", "allow it",
    ),
    "a handler that takes too long": (
        {"handlers": ("mail: its handler may take 1h; write ack_timeout = timedelta(minutes=65)",)},
        "warning", "handlers", "mail: its handler may take 1h", "write ack_timeout",
    ),
    "queues that are missing": (
        {"steps": tuple(Step("create", name, "is missing") for name in "abcde")},
        "fault", "topology", "5 queues and exchanges of app shop are missing: a, b, c and 2 more",
        "rabbit-tasks topology declare",
    ),
    "a binding that is missing": (
        {"steps": (KEPT, Step("bind", "mail.parked", "is not bound", "bind it"))},
        "fault", "topology", "mail.parked: is not bound", "bind it",
    ),
    "another argument": (
        {"steps": (Step("differs", "mail", "x-delivery-limit is 9, wanted 5", "delete it"),)},
        "fault", "topology", "mail: x-delivery-limit is 9, wanted 5", "delete it",
    ),
    "another queue type": (
        {"steps": (Step("differs", "m x", "x-queue-type is classic, wanted quorum", "delete it",
                        argument="x-queue-type"),)},
        "fault", "queue type", "'m x': x-queue-type is classic", "rabbit-tasks topology migrate 'm x'",
    ),
    "too many queues": (
        {"steps": (KEPT, Step("limit", "/", "may have 3 queues", "rabbitmqctl set_vhost_limits"))},
        "fault", "topology", "/: may have 3 queues", "rabbitmqctl set_vhost_limits",
    ),
    "a queue of an older policy": (
        {"steps": (KEPT, Step("stale", "mail.retry.9.9s", "with 3 messages", "once it is empty"))},
        "warning", "stale", "mail.retry.9.9s: with 3 messages", "once it is empty",
    ),
    "a queue of nobody": (
        {"steps": (KEPT, Step("removed", "old", "is of no consumer", "rabbitmqctl delete_queue"))},
        "warning", "removed", "old: is of no consumer", "rabbitmqctl delete_queue",
    ),
    "a second parking lot": (
        {"steps": (KEPT, Step("extra", "copy", "is bound as well", "curl -X DELETE"))},
        "warning", "extra", "copy: is bound as well", "curl -X DELETE",
    ),
    "a policy that changes something": (
        {"steps": (KEPT, Step("policy", "p", "policy on mail: is parked after 3", "clear_policy p"))},
        "warning", "policies", "p: policy on mail", "clear_policy p",
    ),
    "a policy that loses messages": (
        {"steps": (KEPT, Step("policy", "p", "policy on mail: parked messages are lost", "clear p",
                              loses=True))},
        "fault", "policies", "p: policy on mail", "clear p",
    ),
    "messages that nobody takes": (
        {"held": (main(7, 0, "my mail"), lot())},
        "warning", "consumers", "'my mail': 7 messages wait and nobody consumes",
        "rabbit-tasks work 'my mail'",
    ),
    "messages for a person": (
        {"held": (main(), lot(3))},
        "warning", "parked", "mail: 3 messages wait for a person", "rabbit-tasks parked list mail",
    ),
    "messages for a person, for long": (
        {"held": (main(), lot(3, NOW - timedelta(days=2, hours=3)))},
        "warning", "parked", "mail: 3 messages wait for a person, the first for 2d", "parked list mail",
    ),
    "a thief among the retries": (
        {"held": (main(), lot(), retry(1))},
        "fault", "consumers", "mail.retry.1.1s: 1 consumer(s)", "rabbitmqctl list_consumers -p /",
    ),
    "a stranger on a main queue": (
        {"readers": (Reader("mail", "pika", "10.0.0.9:1 -> 10.0.0.1:5672", "bob"),)},
        "warning", "consumers", "mail: 1 consumer(s) that are not rabbit_tasks': pika, user bob",
        "rabbitmqctl list_consumers -p /",
    ),
    "dead letters that nobody takes": (
        {"dead_letters": {"mail.retry.1.1s": 5}},
        "warning", "dead letters", "mail.retry.1.1s holds 5", "rabbit-tasks topology declare",
    ),
    "what a migration left": (
        {"left": (Left("migrate", "m y.migrating", "m y", 4),)},
        "fault", "left behind", "'m y': 4 of its messages wait in 'm y.migrating'",
        "rabbit-tasks topology migrate 'm y'",
    ),
    "what a replay left": (
        {"left": (Left("replay", "mail.replaying", "mail", 4),)},
        "warning", "left behind", "mail: 4 copies in mail.replaying", "rabbit-tasks parked replay mail",
    ),
    "a broker that falls silent": (
        {"silence": "127.0.0.1:5672 did not answer within 10 s", "held": None, "steps": None},
        "fault", "connection", "asked no further: 127.0.0.1:5672 did not answer", "check_running",
    ),
    "no app": (
        {"app": None, "held": None, "steps": None},
        "unseen", "not looked at", "the app's queues: no app is named",
        "rabbit-tasks --app module:attribute doctor",
    ),
    "no management API": (
        {"nodes": None, "quorums": None, "readers": None, "deprecated": None,
         "disabled_flags": None, "ahead": None,
         "unseen": [("cluster, clock", "RABBIT_TASKS_MANAGEMENT_URL is not set")]},
        "unseen", "not looked at", "cluster, clock: RABBIT_TASKS_MANAGEMENT_URL is not set",
        "set RABBIT_TASKS_MANAGEMENT_URL=",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "state", "about", "says", "remedy"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_row_that_ends_with_what_to_type(
    changed: dict[str, Any], state: str, about: str, says: str, remedy: str
) -> None:
    rows = diagnose(facts(**changed))
    (row,) = not_well(rows)
    assert (row.state, row.about) == (state, about)
    assert says in row.says
    assert remedy in row.remedy
    assert has_fault(rows) == (state == "fault")


@pytest.mark.parametrize(
    ("version", "about", "says"),
    [
        ("3.10.8", "delivery limit", "nacks counts as well; queues of others without a limit have none"),
        ("4.0.5", "delivery limit", "nacks counts as well; queues of others without a limit have 20"),
        ("4.3.6", "delivery limit", "does not count; queues of others without a limit have 20"),
        ("3.10.8", "consumer timeout", "ack_timeout is not heard"),
        ("4.0.5", "consumer timeout", "a queue's own counts (ack_timeout), else 30 minutes"),
        ("4.0.5", "consumer timeout", "the broker closes the channel"),
        ("4.3.6", "consumer timeout", "the broker cancels the consumer"),
        ("3.10.8", "priorities", "none in a quorum queue"),
        ("4.0.5", "priorities", "two levels"),
        ("4.3.6", "priorities", "32 levels"),
        ("4.3.6", "version", "RabbitMQ 4.3.6"),
        ("5.0.0-beta.1", "version", "newer than those we are tested with: 3.10, 4.0, 4.3"),
        ("?", "version", "RabbitMQ ?"),
    ],
)  # fmt: skip
def test_a_version_is_told_with_what_it_means(version: str, about: str, says: str) -> None:
    listener = Listener(where="x:1", is_loopback=True, tls=False, version=version)
    rows = diagnose(facts(listeners=(listener,)))
    (row,) = [row for row in rows if row.about == about]
    assert says in row.says
    assert row.state == "ok"


@pytest.mark.parametrize(
    ("version", "requirement", "is_in"),
    [
        ("7.2.4", "aiormq<8,>=7.2", True),
        ("7.2", "aiormq>=7.2.0", True),
        ("8.0", "aiormq<8,>=7.2", False),
        ("7.10", "aiormq>=7.2", True),
        ("7.1.9", "aiormq (>=7.2)", False),
        ("4.0.1rc2", "pamqp>=4,<5", True),
        ("1.0", "anything", True),
        ("2.0", "x!=2.0", False),
    ],
)
def test_a_version_is_in_a_range_by_its_numbers(
    version: str, requirement: str, is_in: bool
) -> None:
    assert fits(version, requirement) is is_in


def test_without_metadata_of_our_own_the_versions_are_told_all_the_same() -> None:
    (row,) = of_clients(Clients((), {"aiormq": "7.2.4", "pamqp": "4.0.1"}, "7.2"))
    assert (row.state, row.says) == ("ok", "aiormq 7.2.4, pamqp 4.0.1")


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True),
        ("mq.localhost", True), ("10.0.0.1", False), ("rabbit", False), ("localhost.evil.org", False),
        ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_a_loopback_address_is_on_this_machine(host: str, near: bool) -> None:
    assert is_loopback(host) is near


def test_our_own_readers_and_a_look_at_the_lot_are_no_strangers() -> None:
    ours = tuple(
        Reader(queue, "rabbit_tasks", "rabbit-tasks worker", "shop")
        for queue in ("mail", "mail.parked")
    )
    elsewhere = Reader("other", "pika", "x", "bob")
    assert not_well(diagnose(facts(readers=(*ours, elsewhere)))) == []


def test_of_many_strangers_one_row_per_client_and_queue() -> None:
    many = tuple(Reader("mail", "pika", f"10.0.0.9:{i}", "bob") for i in range(50))
    (row,) = not_well(diagnose(facts(readers=many)))
    assert "mail: 50 consumer(s)" in row.says


def test_queues_of_other_apps_do_not_count_for_the_health_of_ours() -> None:
    theirs = Quorum("theirs", ABC, frozenset({"rabbit@a"}), None)
    ours = Quorum("mail", ABC, ABC, "rabbit@a")
    assert not_well(diagnose(facts(quorums=(ours, theirs)))) == []
    rows = diagnose(facts(quorums=(ours, theirs), app=None, held=None))
    assert [row.about for row in rows if row.state == "fault"] == ["quorum"]


def test_without_what_is_missing_a_user_that_may_not_declare_is_a_fault() -> None:
    steps = (
        Step("create", "mail", "is missing"),
        Step("permission", "declare", "may not", "allow"),
    )
    rows = diagnose(facts(steps=steps))
    assert [(row.state, row.about) for row in not_well(rows)] == [
        ("fault", "topology"), ("fault", "permissions"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("definition", "state"),
    [
        ({"message-ttl": 1000}, "fault"),
        ({"expires": 1000}, "fault"),
        ({"max-length": 10}, "fault"),
        ({"max-length": 10, "overflow": "drop-head"}, "fault"),
        ({"overflow": "drop-head"}, "fault"),
        ({"delivery-limit": 1}, "fault"),
        ({"consumer-timeout": 1000}, "warning"),
        ({"max-length": 10, "overflow": "reject-publish"}, "warning"),
    ],
)
def test_a_policy_is_a_fault_where_messages_of_a_main_or_a_parking_queue_may_be_lost(
    definition: dict[str, object], state: str
) -> None:
    told = [change for queue in app.topology.queues if queue.role in ("main", "parked")
            for change in changes(queue, definition)]  # fmt: skip
    steps = (KEPT, *(Step("policy", "p", one.says, "clear it", loses=one.loses) for one in told))
    states = {row.state for row in not_well(diagnose(facts(steps=steps)))}
    assert state in states
    assert ("fault" in states) == (state == "fault")


def test_the_empty_queue_that_a_replay_keeps_for_the_next_one_is_nothing_to_tell() -> None:
    rows = diagnose(facts(left=(Left("replay", "mail.replaying", "mail", 0),)))
    assert not_well(rows) == []


def test_what_was_not_looked_at_is_told_once_per_reason() -> None:
    unset = "RABBIT_TASKS_MANAGEMENT_URL is not set"
    steps = (KEPT, Step("unseen", "bindings", unset), Step("unseen", "limits", "said 403"))
    unseen = [("cluster, bindings", unset), ("nodes", "said 403")]
    rows = diagnose(facts(steps=steps, unseen=unseen))
    assert [(row.about, row.says) for row in rows if row.state == "unseen"] == [
        ("not looked at", f"cluster, bindings: {unset}"),
        ("not looked at", "nodes, limits: said 403"),
    ]


def test_the_login_that_everybody_knows_is_nothing_to_tell_on_this_machine() -> None:
    assert not_well(diagnose(facts(has_default_login=True))) == []
