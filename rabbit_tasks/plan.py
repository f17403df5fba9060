"""What `declare` would do against this broker, and what stands in the way of what it makes.

Asked over AMQP, and over the management API where it is reachable; decided without asking anything.
AMQP tells of a queue only to whoever knows its name: so without the management API, queues of an
older policy or of a consumer that is gone are those which the lock file still names.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal
from urllib.parse import quote

import aiormq.exceptions as amqp
from aiormq.channel import Channel

from rabbit_tasks import declare
from rabbit_tasks.broker import RPC_TIMEOUT, Connection
from rabbit_tasks.declare import COMMAND, Difference, Questions
from rabbit_tasks.errors import ConfigurationError, Forbidden, ManagementError, TopologyError
from rabbit_tasks.management import Management
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.parking.staging import staging_queue
from rabbit_tasks.policies import Change, Policy, applying, changes, changes_of_copies
from rabbit_tasks.stale import not_ours, removed_names, stale_names
from rabbit_tasks.text import quoted, some
from rabbit_tasks.topology import PARKING_LOT, Binding, Exchange, Queue, Topology, waiting_for

PRUNE: Final = f"{COMMAND} --prune"
BY_MANAGEMENT: Final = "bindings, policies, limits, queues that no lock file names"
"""What AMQP does not tell."""
_NAMED: Final = 3
"""Of many queues, how many are named in a sentence."""

What = Literal[
    "create", "bind", "keep", "differs", "stale", "removed", "extra", "policy", "limit",
    "permission", "note", "unseen",
]  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One row of a plan.

    create      is missing; declare makes it
    bind        a binding is missing; declare makes it
    keep        is there, as it should be
    differs     is there with another argument, so that declare refuses
    stale       a retry or crashed queue of an older policy
    removed     a queue that the lock file names, of a consumer that the app has no more
    extra       a binding of a queue or a key of ours that is not ours
    policy      changes what a queue of ours means
    limit       of the virtual host, too low for what is to be created
    permission  that our user lacks
    note        for the reader to know; nothing is to be done
    unseen      was not looked at, and why
    """

    what: What
    name: str
    says: str
    remedy: str = ""
    messages: int | None = None
    """In a stale or removed queue, those on their way out of it included, as far as is known."""
    argument: str = ""
    """That differs."""
    loses: bool = False
    """Whether a policy loses messages, or what a main queue holds is parked without being handled."""

    @property
    def is_due(self) -> bool:
        """Whether somebody has something to do."""
        return self.what not in ("keep", "note", "unseen")


@dataclass
class Facts:
    """What the broker told. None where it was not asked, or did not tell."""

    vhost: str
    permit: str = ""
    """What gives our user the permissions that it lacks."""
    differences: list[Difference] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    """For `declare` and for a worker: what our user may not, in the broker's words."""
    uncompared: set[str] = field(default_factory=set)
    others: dict[str, int] = field(default_factory=dict)
    """Messages that are ready in queues which are there and not in the topology: those of its main
    queues that are stale, and those that the lock file names."""
    exported: frozenset[str] = frozenset()
    """The queues of the lock file."""
    queues: Mapping[str, Mapping[str, Any]] | None = None
    exchanges: Mapping[str, Mapping[str, Any]] | None = None
    bindings: list[Mapping[str, Any]] | None = None
    policies: list[Policy] | None = None
    default_type: str | None = None
    most_queues: int | None = None
    api: str = ""
    unseen: list[tuple[str, str]] = field(default_factory=list)
    """What was not looked at, and why."""


async def plan(
    connection: Connection,
    topology: Topology,
    management: Management | None = None,
    *,
    queues: list[dict[str, Any]] | None = None,
    exported: str | None = None,
) -> list[Step]:
    """What declare would do, and what stands in the way. Creates and changes nothing.

    `queues` is what the management API has just told of them, where somebody has asked already;
    `exported` is the text of the lock file. ConfigurationError where it is none; ConnectError where
    the broker does not answer.
    """
    facts = Facts(connection.vhost, connection.permit, exported=exported_queues(exported))
    await _compare(connection, topology, facts)
    await _try_permissions(connection, topology, facts)
    if management is None:
        facts.unseen.append((BY_MANAGEMENT, "RABBIT_TASKS_MANAGEMENT_URL is not set"))
    else:
        await _ask(management, facts, queues)
    await _look_at_others(connection, topology, facts)
    return decide(topology, facts)


def exported_queues(text: str | None) -> frozenset[str]:
    """The queues that a lock file names; ConfigurationError where it is none."""
    if text is None:
        return frozenset()
    try:
        return frozenset(str(queue["name"]) for queue in json.loads(text)["queues"])
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(
            "the lock file has no queues in RabbitMQ's definitions format; write it anew: "
            "rabbit-tasks topology export"
        ) from None


# --- decisions ----------------------------------------------------------------------------------


def decide(topology: Topology, facts: Facts) -> list[Step]:
    """The rows, in the order in which a reader needs them."""
    return [
        *_objects(topology, facts),
        *_bindings(topology, facts),
        *_stale(topology, facts),
        *_removed(topology, facts),
        *_policies(topology, facts),
        *_limits(facts),
        *_permissions(facts),
        *_notes(facts),
        *(Step("unseen", about, why) for about, why in facts.unseen),
    ]


def _objects(topology: Topology, facts: Facts) -> Iterable[Step]:
    found: defaultdict[str, list[Difference]] = defaultdict(list)
    for one in facts.differences:
        found[one.name].append(one)
    for part in topology.parts:
        kind = "exchange" if isinstance(part, Exchange) else f"{part.role} queue"
        for difference in found[part.name]:
            if difference.is_missing:
                yield Step("create", part.name, f"{kind} is missing", difference.remedy)
            else:
                yield Step(
                    "differs", part.name, difference.says, difference.remedy,
                    argument=difference.what,
                )  # fmt: skip
        if not found[part.name] and part.name not in facts.uncompared:
            yield Step("keep", part.name, f"{kind} as it should be")


def _bindings(topology: Topology, facts: Facts) -> Iterable[Step]:
    if facts.bindings is None:
        return
    there = {
        (one.get("source"), one.get("destination"), one.get("routing_key"))
        for one in facts.bindings
    }
    missing = {one.name for one in facts.differences if one.is_missing}
    for one in topology.bindings:
        # Not told apart where declare creates the queue or the exchange as well.
        known = (one.exchange, one.queue, one.key) in there or missing & {one.exchange, one.queue}
        if not known:
            says = f"is not bound to {one.exchange} with key {one.key!r}"
            yield Step("bind", one.queue, says, f"bind it: {COMMAND}")
    ours = {(one.exchange, one.queue, one.key) for one in topology.bindings}
    queues, keys = {b.queue for b in topology.bindings}, {b.key for b in topology.bindings}
    for row in facts.bindings:
        source, to, key = (str(row.get(k)) for k in ("source", "destination", "routing_key"))
        if source != PARKING_LOT or (source, to, key) in ours or not (to in queues or key in keys):
            continue
        path = [
            facts.vhost, "e", source, "q" if row.get("destination_type") == "queue" else "e", to,
            str(row.get("properties_key") or "~"),
        ]  # fmt: skip
        at = "/".join(quote(part, safe="") for part in path)
        yield Step(
            "extra", to,
            f"is bound to {source} with key {key!r}, which is not the app's: what is parked goes there "
            "as well",
            f"if nobody needs it: curl -u USER -X DELETE {shlex.quote(f'{facts.api}/bindings/{at}')}",
        )  # fmt: skip


def _stale(topology: Topology, facts: Facts) -> Iterable[Step]:
    for name in stale_names(topology, facts.others):
        row = (facts.queues or {}).get(name)
        if row is not None and (wrong := not_ours(name, row, facts.bindings or ())) is not None:
            yield Step("note", name, f"has the name of a retry queue of ours, but is {wrong}")
            continue
        messages = _messages(name, facts)
        main = quoted(waiting_for(name) or name)
        if not messages:
            says, remedy = "of an older policy, and empty", f"remove it: {PRUNE}"
        else:
            says = f"of an older policy, with {_count(messages)} that will go home to {main}"
            remedy = f"once it is empty: {PRUNE}"
        yield Step("stale", name, says, remedy, messages)


def _removed(topology: Topology, facts: Facts) -> Iterable[Step]:
    for name in removed_names(topology, facts.exported):
        if name not in facts.others:
            continue
        messages = _messages(name, facts)
        holds = f"holds {_count(messages)}" if messages else "is empty"
        delete = f"rabbitmqctl delete_queue -p {shlex.quote(facts.vhost)} {shlex.quote(name)}"
        yield Step(
            "removed", name,
            f"is in the lock file, but of no consumer of the app any more; it {holds}",
            f"when it is empty and nobody else's: {delete}",
            messages,
        )  # fmt: skip


def _messages(name: str, facts: Facts) -> int:
    """Ready ones as of now; with those in hand and the dead letters on their way, if told."""
    row = (facts.queues or {}).get(name, {})
    more = (row.get("messages_unacknowledged"), row.get("messages_dlx"))
    return facts.others[name] + sum(one for one in more if isinstance(one, int))


def _count(messages: int) -> str:
    return f"{messages} message" + ("s" if messages != 1 else "")


def _policies(topology: Topology, facts: Facts) -> Iterable[Step]:
    if facts.policies is None:
        return
    found: defaultdict[tuple[Policy, Change], list[str]] = defaultdict(list)
    for is_operators in (False, True):
        policies = [one for one in facts.policies if one.is_operators == is_operators]
        for queue in topology.queues:
            policy = _policy_of(queue.name, policies, facts.queues, "quorum queue")
            for change in changes(queue, policy.definition) if policy else ():
                found[policy, change].append(queue.name)  # type: ignore[index]
        for queue in topology.queues:
            if queue.role == "parked":
                copies = staging_queue(ParkingQueue.of(queue.name))
                policy = _policy_of(copies, policies, facts.queues, "quorum queue")
                for change in changes_of_copies(policy.definition) if policy else ():
                    found[policy, change].append(copies)  # type: ignore[index]
        for exchange in topology.exchanges:
            policy = _policy_of(exchange.name, policies, facts.exchanges, "exchange")
            if policy and (other := policy.definition.get("alternate-exchange")):
                change = Change(
                    f"what has no parking queue goes to exchange {other!r}, as if it were parked"
                )
                found[policy, change].append(exchange.name)
    for (policy, change), names in found.items():
        clear = "clear_operator_policy" if policy.is_operators else "clear_policy"
        yield Step(
            "policy", policy.name, f"{policy.kind} on {some(map(quoted, names))}: {change.says}",
            f"narrow its pattern {policy.pattern!r}, or: rabbitmqctl {clear} -p "
            f"{shlex.quote(facts.vhost)} {shlex.quote(policy.name)}",
            loses=change.loses,
        )  # fmt: skip


def _policy_of(
    name: str,
    policies: list[Policy],
    there: Mapping[str, Mapping[str, Any]] | None,
    kind: Literal["quorum queue", "exchange"],
) -> Policy | None:
    """What the broker's rules say. Its own answer, which is late by seconds and knows nothing of a
    policy that was set a moment ago, counts where they leave it open: of two with the same priority,
    and of a pattern that we cannot read."""
    best = applying(policies, name, kind)
    open_ = [
        one
        for one in policies
        if one.applies_to(name, kind)
        and best is not None
        and (one.priority == best.priority or not one.is_readable)
    ]
    row = (there or {}).get(name)
    told = "operator_policy" if any(p.is_operators for p in policies) else "policy"
    if (
        row is not None
        and told in row
        and (len(open_) > 1 or not all(p.is_readable for p in open_))
    ):
        return next((one for one in policies if one.name == row[told]), None)
    return best


def _limits(facts: Facts) -> Iterable[Step]:
    if facts.most_queues is None or facts.most_queues < 0 or facts.queues is None:
        return
    missing = sum(one.is_missing for one in facts.differences if one.name != PARKING_LOT)
    needed = len(facts.queues) + missing
    if missing and needed > facts.most_queues:
        limits = shlex.quote(json.dumps({"max-queues": needed}))
        yield Step(
            "limit", facts.vhost,
            f"may have {facts.most_queues} queues, has {len(facts.queues)}, and {missing} are to be "
            "created",
            f"rabbitmqctl set_vhost_limits -p {shlex.quote(facts.vhost)} {limits}",
        )  # fmt: skip


def _permissions(facts: Facts) -> Iterable[Step]:
    for who, refused in facts.refused.items():
        if refused:
            told = "; ".join(refused[:_NAMED])
            more = len(refused) - _NAMED
            says = f"our user may not: {told}" + (f"; and {more} more" if more > 0 else "")
            yield Step("permission", who, says, f"allow it: {facts.permit}")


def _notes(facts: Facts) -> Iterable[Step]:
    # (4.x tells "classic" for every virtual host that was made without one.)
    if facts.default_type not in (None, "undefined", "classic", "quorum"):
        yield Step(
            "note", facts.vhost,
            f"its queues are of type {facts.default_type} unless they say otherwise; all of ours do",
        )  # fmt: skip


# --- questions ----------------------------------------------------------------------------------


async def _look_at_others(connection: Connection, topology: Topology, facts: Facts) -> None:
    """Queues that are not in the topology: stale ones, and those that the lock file names."""
    names = stale_names(topology, {*(facts.queues or ()), *facts.exported})
    async with Questions(connection) as questions:
        for name in names + removed_names(topology, facts.exported):
            try:
                found = await declare.look(questions, name)
            except Forbidden as error:  # (4.3: not even a look without any permission on it)
                facts.unseen.append((name, error.said))
            except TopologyError as error:
                facts.unseen.append((name, str(error).removeprefix(f"{name}: ")))
            else:
                if found is not None:
                    facts.others[name] = found[0]


async def _compare(connection: Connection, topology: Topology, facts: Facts) -> None:
    refused = facts.refused["declare"] = []
    parts: list[Exchange | Queue | Binding] = []
    async with Questions(connection) as questions:
        for part in topology.parts:
            try:
                found = await declare.compare(questions, part)
            except Forbidden as error:
                refused.append(error.said)
                facts.uncompared.add(part.name)
                continue
            facts.differences += found
            parts += [part] if any(one.is_missing for one in found) else []
        for making in (*parts, *topology.bindings):
            try:
                await declare.may_make(questions, making)
            except Forbidden as error:
                refused.append(error.said)
    facts.refused["declare"] = list(dict.fromkeys(refused))


async def _try_permissions(connection: Connection, topology: Topology, facts: Facts) -> None:
    """What a worker needs of our user: to read its main queues, to publish to the others.

    The broker looks at permissions before it looks at what is wrong with the request (3.10 to 4.3):
    so it is asked for what it refuses, and nothing is published or consumed.
    """
    refused = facts.refused["work"] = []
    mains = [queue.name for queue in topology.queues if queue.role == "main"]
    asked: list[tuple[str, Callable[[Channel], Coroutine[Any, Any, None]]]] = [
        *((main, partial(_consume_nothing, queue=main)) for main in mains),
        *((to, partial(_write_nothing, exchange=to)) for to in ("", PARKING_LOT) if mains),
    ]
    async with Questions(connection) as questions:
        for name, ask in asked:
            try:
                with suppress(amqp.ChannelPreconditionFailed, amqp.ChannelNotFoundEntity):
                    await questions.ask(name, ask)
            except Forbidden as error:
                if "operation not permitted on the default exchange" not in error.said:
                    refused.append(error.said)


async def _consume_nothing(channel: Channel, queue: str) -> None:
    async def never(_: object) -> None: ...

    await channel.basic_consume(
        queue, never, arguments={"x-priority": "permission probe"}, timeout=RPC_TIMEOUT
    )


async def _write_nothing(channel: Channel, exchange: str) -> None:
    """Nothing may be unbound from the default exchange, which the broker says after it has looked
    whether we may write. (A publish would be held back by an alarm, and what is asked after it.)"""
    await channel.exchange_unbind(destination=exchange, source="", timeout=RPC_TIMEOUT)


async def _ask(management: Management, facts: Facts, queues: list[dict[str, Any]] | None) -> None:
    vhost = facts.vhost

    async def ask(about: str, *path: str) -> list[dict[str, Any]] | None:
        try:
            return await management.rows(*path)
        except ManagementError as error:
            facts.unseen.append((about, str(error)))
            return None

    facts.api = management.url
    if queues is None:
        queues = await ask(BY_MANAGEMENT, "queues", vhost)
    if queues is None:
        return  # nor would it answer the rest
    facts.queues = {str(row.get("name")): row for row in queues}
    exchanges, bindings, policies, operators, limits, vhosts = await asyncio.gather(
        ask("exchanges", "exchanges", vhost),
        ask("bindings", "bindings", vhost),
        ask("policies", "policies", vhost),
        ask("operator policies", "operator-policies", vhost),
        ask("limits of the virtual host", "vhost-limits", vhost),
        ask("the virtual host's default queue type", "vhosts"),
    )
    if exchanges is not None:
        facts.exchanges = {str(row.get("name")): row for row in exchanges}
    facts.bindings = [*bindings] if bindings is not None else None
    if policies is not None and operators is not None:
        facts.policies = [
            *(Policy.of(row) for row in policies),
            *(Policy.of(row, is_operators=True) for row in operators),
        ]
    for row in limits or ():
        most = row["value"].get("max-queues") if isinstance(row.get("value"), dict) else None
        facts.most_queues = most if isinstance(most, int) else None
    # Of all that we may see: about one alone it tells administrators only.
    for row in vhosts or ():
        if row.get("name") == vhost:
            facts.default_type = row.get("default_queue_type")
