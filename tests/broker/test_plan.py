"""The plan on a real broker: what it says is so, and saying it changes nothing."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, Settings
from rabbit_tasks.broker import Connection, connected
from rabbit_tasks.declare import declare
from rabbit_tasks.errors import ManagementError, Refused
from rabbit_tasks.management import Management
from rabbit_tasks.plan import Step, plan
from rabbit_tasks.policies import Policy, applying
from rabbit_tasks.properties import Properties
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.queues import depth, take_all


class Mail(Consumer[dict[str, Any]]):
    queue = "mail"
    retry = RetryPolicy(attempts=2, base=timedelta(milliseconds=300), jitter=False)

    async def handle(self, body: dict[str, Any], message: Message) -> None: ...


class MailBefore(Mail):
    retry = RetryPolicy(attempts=2, base=timedelta(minutes=1), jitter=False)


class Post(Mail):
    queue = "post"


app = App("mail", [Mail()])
before = App("mail", [MailBefore(), Post()])
NAMES = [part.name for part in app.topology.parts]
STALE = "mail.retry.1.1m"

Declared = Callable[[App], Awaitable[None]]


@pytest.fixture
def management(settings: Settings, broker: Broker) -> Management:
    return Management(settings, broker.management_url)


def at(vhost: str, *path: str) -> str:
    return "/".join(quote(part, safe="") for part in (vhost, *path))


def due(steps: list[Step]) -> list[tuple[str, str]]:
    return [(step.what, step.name) for step in steps if step.is_due]


def everything(broker: Broker, vhost: str) -> Any:
    """What an export of the virtual host has, which is all that a plan could change."""
    return broker.api("GET", f"/definitions/{at(vhost)}")


async def test_before_declare_all_is_to_be_created_and_afterwards_kept(
    connection: Connection, management: Management, broker: Broker, vhost: str
) -> None:
    empty = everything(broker, vhost)
    assert due(await plan(connection, app.topology, management)) == [("create", n) for n in NAMES]
    assert everything(broker, vhost) == empty
    await declare(connection, app.topology)
    declared = everything(broker, vhost)
    steps = await plan(connection, app.topology, management)
    assert [(step.what, step.name) for step in steps] == [("keep", name) for name in NAMES]
    assert everything(broker, vhost) == declared


async def test_without_the_management_api_it_says_what_it_did_not_look_at(
    connection: Connection, declared: Declared
) -> None:
    await declared(app)
    *kept, last = await plan(connection, app.topology)
    assert {step.what for step in kept} == {"keep"}
    assert last == Step(
        "unseen", "bindings, policies, limits, queues that no lock file names",
        "RABBIT_TASKS_MANAGEMENT_URL is not set",
    )  # fmt: skip


async def test_a_management_api_that_does_not_answer_is_one_row_and_the_rest_is_planned(
    connection: Connection, settings: Settings
) -> None:
    steps = await plan(connection, app.topology, Management(settings, "http://127.0.0.1:1"))
    assert due(steps) == [("create", name) for name in NAMES]
    (unseen,) = [step for step in steps if step.what == "unseen"]
    assert "Connection refused" in unseen.says


async def test_stale_queues_are_found_by_their_names_or_by_the_lock_file(
    connection: Connection, management: Management, publisher: Publisher, declared: Declared
) -> None:
    await declared(before)
    await declared(app)
    for _ in range(3):
        await publisher.send("", STALE, b"{}", Properties.of({}, delivery_mode=2))
    expected = Step(
        "stale", STALE, "of an older policy, with 3 messages that will go home to mail",
        "once it is empty: rabbit-tasks topology declare --prune", 3,
    )  # fmt: skip
    by_name = await plan(connection, app.topology, management)
    assert [step for step in by_name if step.is_due] == [expected]
    assert due(await plan(connection, app.topology)) == []  # AMQP lists nothing
    by_file = await plan(connection, app.topology, exported=before.topology.definitions())
    assert by_file[len(NAMES)] == expected
    removed = sorted(q.name for q in before.topology.queues if q.main == "post")
    assert [s.name for s in by_file if s.what == "removed"] == removed
    both = await plan(connection, app.topology, management, exported=before.topology.definitions())
    assert [step for step in both if step.is_due] == [step for step in by_file if step.is_due]


async def test_an_argument_that_differs_a_binding_that_is_gone_and_one_too_many_are_rows(
    connection: Connection, management: Management, declared: Declared, broker: Broker, vhost: str
) -> None:
    await declared(app)
    broker.delete(vhost, "queues", "mail")
    arguments = {**app.topology.queues[0].arguments, "x-delivery-limit": 9}
    broker.api("PUT", f"/queues/{at(vhost, 'mail')}", {"durable": True, "arguments": arguments})
    path = ("bindings", "e", "parking-lot", "q", "mail.parked", "mail")
    broker.delete(vhost, *path)
    broker.api("PUT", f"/queues/{at(vhost, 'a copy')}", {"durable": True})
    broker.api("POST", f"/bindings/{at(vhost)}/e/parking-lot/q/a%20copy", {"routing_key": "mail"})
    steps = await plan(connection, app.topology, management)
    assert due(steps) == [("differs", "mail"), ("bind", "mail.parked"), ("extra", "a copy")]
    extra = steps[-1].remedy.split()[-1].strip("'")
    broker.api("DELETE", extra.partition("/api")[2])  # the remedy's request
    assert due(await plan(connection, app.topology, management)) == due(steps)[:2]


# --- policies -----------------------------------------------------------------------------------


def set_policy(
    broker: Broker,
    vhost: str,
    name: str,
    kind: str = "policies",
    *,
    apply_to: str = "queues",
    **row: Any,
) -> None:
    row = {"pattern": "^mail", "apply-to": apply_to, "priority": 0, **row}
    broker.api("PUT", f"/{kind}/{at(vhost, name)}", row)


@pytest.mark.heavy  # (its small version, without a broker, is in tests/unit/test_policies.py)
async def test_which_policy_applies_is_what_the_broker_says(
    management: Management, declared: Declared, broker: Broker, vhost: str
) -> None:
    expires = {"expires": 600_000}
    set_policy(broker, vhost, "all", apply_to="all", pattern="", definition=expires)
    set_policy(broker, vhost, "retries", pattern=r"\.retry\.\d+\.", priority=5, definition=expires)
    set_policy(broker, vhost, "ends", pattern="ed$", priority=4, definition=expires)
    set_policy(broker, vhost, "case", pattern="MAIL", priority=9, definition=expires)
    set_policy(
        broker, vhost, "mirrors", priority=10, definition={"max-age": "1D", "expires": 600_000}
    )
    away = {"alternate-exchange": "x"}
    set_policy(broker, vhost, "exchanges", apply_to="exchanges", priority=11, definition=away)
    await declared(app)
    policies = [Policy.of(row) for row in await management.rows("policies", vhost)]
    assert len(policies) == 6

    async def told() -> dict[str, str]:
        rows = await management.rows("queues", vhost)
        return {row["name"]: row["policy"] for row in rows if row.get("policy")}

    names = [queue.name for queue in app.topology.queues]
    ours = {name: applying(policies, name, "quorum queue") for name in names}
    expected = {name: policy.name for name, policy in ours.items() if policy}
    assert set(expected.values()) == {"all", "retries", "ends"}
    await eventually(lambda: _are(told, expected))


async def _are(told: Callable[[], Awaitable[Any]], expected: Any) -> bool:
    return bool(await told() == expected)


async def test_policies_and_operator_policies_are_rows_of_a_plan_made_before_and_after_declare(
    connection: Connection, management: Management, broker: Broker, vhost: str
) -> None:
    set_policy(broker, vhost, "short", pattern="retry", definition={"message-ttl": 100})
    set_policy(
        broker, vhost, "few", "operator-policies", pattern="parked$", definition={"max-length": 2}
    )
    expected = [
        (
            "policy on mail.retry.1.300ms: messages wait there for 100ms (message-ttl: 100), less "
            "than it was declared with"
        ),
        (
            "operator policy on mail.parked: beyond 2 messages (max-length) the oldest parked messages "
            "are lost"
        ),
    ]
    for _ in range(2):
        steps = await plan(connection, app.topology, management)
        assert [step.says for step in steps if step.what == "policy"] == expected
        await declare(connection, app.topology)
    # As the remedy does; at once, whatever the management API's figures still say.
    broker.api("DELETE", f"/policies/{at(vhost, 'short')}")
    broker.api("DELETE", f"/operator-policies/{at(vhost, 'few')}")
    assert due(await plan(connection, app.topology, management)) == []


@pytest.mark.heavy  # (its small version, without a broker, is in tests/unit/test_plan.py)
async def test_a_policy_that_was_set_a_moment_ago_is_told_at_once(
    connection: Connection, management: Management, declared: Declared, broker: Broker, vhost: str
) -> None:
    set_policy(broker, vhost, "old", pattern="parked$", definition={"max-length": 1_000_000})
    await declared(app)

    async def is_known() -> bool:
        row = await management.get("queues", vhost, "mail.parked")
        return bool(row.get("policy") == "old")

    await eventually(is_known)
    set_policy(
        broker, vhost, "short", pattern="parked$", priority=1, definition={"message-ttl": 100}
    )
    (step,) = [s for s in await plan(connection, app.topology, management) if s.is_due]
    assert step.says.startswith("policy on mail.parked: parked messages are lost after 100ms")


async def test_a_policy_does_to_our_queues_what_the_plan_says_of_it(
    connection: Connection, publisher: Publisher, declared: Declared, broker: Broker, vhost: str
) -> None:
    """Of what the broker's documents leave open: an argument of ours and a policy, both."""
    await declared(app)
    retry, parked = "mail.retry.1.300ms", "mail.parked"
    persistent = Properties.of({}, delivery_mode=2)

    async def is_at(queue: str, count: int) -> bool:
        return await depth(connection, queue) == count

    # A dead-letter exchange, key and strategy of a policy change nothing: the argument counts.
    set_policy(
        broker, vhost, "away", priority=1,
        definition={"dead-letter-exchange": "nowhere", "dead-letter-routing-key": "x",
                    "dead-letter-strategy": "at-most-once"},
    )  # fmt: skip
    await publisher.send("", retry, b"1", persistent)
    await eventually(lambda: is_at("mail", 1))
    # Of a length limit, a policy's overflow counts: what was confirmed is parked.
    set_policy(
        broker, vhost, "drops", priority=2, pattern="^mail$",
        definition={"max-length": 1, "overflow": "drop-head"},
    )  # fmt: skip
    for body in (b"2", b"3"):
        await publisher.send("", "mail", body, persistent)
    await eventually(lambda: is_at(parked, 2))
    assert [one.body for one in await take_all(connection, "mail")] == [b"3"]
    await take_all(connection, parked)
    # Without it the argument does: it is refused.
    set_policy(broker, vhost, "drops", priority=2, pattern="^mail$", definition={"max-length": 1})

    async def refuses() -> bool:
        try:
            await publisher.send("", "mail", b"4", persistent)
        except Refused:
            return True
        return False

    await eventually(refuses)
    # A parked message is lost by looks.
    set_policy(
        broker, vhost, "looks", priority=3, pattern="parked$", definition={"delivery-limit": 1}
    )
    await publisher.send("parking-lot", "mail", b"{}", persistent)
    for left in (1, 0):
        channel = await connection.open()
        await channel.basic_get(parked)
        await channel.close()
        await eventually(partial(is_at, parked, left))


# --- permissions and limits -----------------------------------------------------------------------


@pytest.fixture
def user(broker: Broker) -> Iterator[str]:
    name = f"user-{uuid.uuid4().hex[:6]}"
    broker.create_user(name, "p")
    yield name
    broker.delete_user(name)


@pytest.mark.parametrize(
    ("is_declared", "rights", "declares", "works"),
    [
        (False, {"configure": "^mail$"}, "mail.retry.1.300ms", None),
        (False, {"configure": "^mail"}, "exchange 'parking-lot'", None),
        (True, {"configure": "^mail"}, "exchange 'parking-lot'", None),
        (False, {"write": "^mail|parking-lot$"}, "amq.default", "amq.default"),
        (False, {"write": "^mail|amq.default"}, "exchange 'parking-lot'", "exchange 'parking-lot'"),
        (False, {"read": "^parking-lot$|parked$|retry|crashed"}, "queue 'mail'", "queue 'mail'"),
        (True, {"read": "^parking-lot$|parked$|retry|crashed"}, None, "queue 'mail'"),
    ],
    ids=["some queues", "not the exchange", "not the exchange that is there",
         "not the default exchange", "not parking", "not reading", "not reading what is there"],
)  # fmt: skip
async def test_permissions_that_are_missing_are_rows_and_asking_for_them_changes_nothing(
    is_declared: bool,
    rights: dict[str, str],
    declares: str | None,
    works: str | None,
    user: str,
    declared: Declared,
    broker: Broker,
    vhost: str,
) -> None:
    if is_declared:
        await declared(app)
    broker.allow(vhost, user, **rights)
    as_it_was = everything(broker, vhost)
    async with connected(Settings(url=broker.url(vhost, user, "p")), "plan") as mine:
        steps = [step for step in await plan(mine, app.topology) if step.what == "permission"]
        found = {step.name: step.says for step in steps}
        # (What is there already asks for no more than configure, and what binding needs.)
        who = {"declare": declares, "work": works}
        assert set(found) == {one for one, what in who.items() if what}
        if declares:
            assert declares in found["declare"]
        if works:
            assert works in found["work"]
        assert all(step.remedy == f"allow it: {mine.permit}" for step in steps)
        assert everything(broker, vhost) == as_it_was
        broker.allow(vhost, user)  # the remedy
        assert not [step for step in await plan(mine, app.topology) if step.what == "permission"]


async def test_a_virtual_host_with_room_for_too_few_queues_is_told_beforehand(
    connection: Connection, management: Management, broker: Broker, vhost: str
) -> None:
    broker.api("PUT", f"/vhost-limits/{at(vhost, 'max-queues')}", {"value": 3})
    steps = await plan(connection, app.topology, management)
    (limit,) = [step for step in steps if step.what == "limit"]
    count = len(app.topology.queues)
    assert limit.says == f"may have 3 queues, has 0, and {count} are to be created"
    value = json.loads(limit.remedy.split("'")[-2])["max-queues"]
    broker.api("PUT", f"/vhost-limits/{at(vhost, 'max-queues')}", {"value": value})
    await declare(connection, app.topology)
    assert due(await plan(connection, app.topology, management)) == []


async def test_a_user_who_may_see_little_is_told_what_was_not_looked_at(
    connection: Connection,
    settings: Settings,
    declared: Declared,
    user: str,
    broker: Broker,
    vhost: str,
) -> None:
    await declared(app)
    where = broker.management_url.replace("://", f"://{user}:p@")
    blind = Management(settings.changed(management_url=where), where)
    with pytest.raises(ManagementError, match=r"rabbitmqctl set_user_tags USER monitoring \(.+\)"):
        await blind.get("queues", vhost)
    steps = await plan(connection, app.topology, blind)
    assert [step.name for step in steps if step.what == "unseen"] == [
        "bindings, policies, limits, queues that no lock file names"
    ]
    broker.api("PUT", f"/users/{user}", {"password": "p", "tags": "management"})
    broker.allow(vhost, user)
    steps = await plan(connection, app.topology, blind)
    assert [step for step in steps if step.what == "unseen"] == []
