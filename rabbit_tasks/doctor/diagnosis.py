"""The diagnosis: facts in, rows of ok, warning and fault out. Pure.

Each function looks at one thing and says at least what it saw; where it finds nothing wrong, in a row
that is ok. A row that is neither ends with what to type.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from rabbit_tasks.declare import COMMAND
from rabbit_tasks.doctor.facts import Clients, Facts, Listener, Node, Quorum, Reader
from rabbit_tasks.durations import age_text, duration_text
from rabbit_tasks.plan import Step

State = Literal["ok", "warning", "fault", "unseen"]

SHOWN: Final = 3
"""Names that are told; of more, how many."""
SKEW: Final = timedelta(seconds=10)
"""Between two clocks: the management API tells whole seconds, and some time passes on the way."""
EXPIRES_SOON: Final = timedelta(days=30)
SLOW_HEARTBEAT: Final = timedelta(minutes=1)
LOSES: Final = ("lost", "is deleted", "drops", "without being handled")
"""In what the plan says of a policy: messages are not safe."""
SMALL_FRAME: Final = 131_072
"""What every version comes with; headers with an error and a stack trace are made to fit it."""
TOLD_CLIENTS: Final = ("aio-pika", "aiormq", "pamqp", "pydantic")
NEARLY: Final = 0.8
UNSEEN: Final = "not looked at"
TESTED: Final = ("3.10", "4.0", "4.3")


@dataclass(frozen=True)
class Row:
    """What is so, and what to do about it."""

    state: State
    about: str
    says: str
    remedy: str = ""
    """What to type; nothing where there is nothing to do."""


def diagnose(facts: Facts) -> list[Row]:
    """All of it, in the order in which one thing rests on another."""
    return [
        *of_clients(facts.clients),
        *of_listeners(facts),
        *of_logins(facts),
        *of_heartbeat(facts),
        *of_versions(facts.listeners),
        *of_features(facts),
        *of_nodes(facts.nodes),
        *of_alarms(facts),
        *of_clock(facts.ahead),
        *of_quorums(facts),
        *of_handlers(facts),
        *of_plan(facts),
        *of_queues(facts),
        *of_left(facts),
        *of_unseen(facts),
    ]


def has_fault(rows: Iterable[Row]) -> bool:
    """Whether there is something that does not work, or will not."""
    return any(row.state == "fault" for row in rows)


def names(of: Iterable[str]) -> str:
    """Some names for a person, and how many more."""
    found = list(of)
    more = len(found) - SHOWN
    return ", ".join(found[:SHOWN]) + (f" and {more} more" if more > 0 else "")


# --- our side -----------------------------------------------------------------------------------


def of_clients(clients: Clients) -> Iterator[Row]:
    """The client libraries against what our metadata asks for."""
    wrong = 0
    for requirement in clients.asked:
        name = re.split(r"[\s<>=!~\[(]", requirement, maxsplit=1)[0]
        installed = clients.installed.get(name)
        if installed is None or not fits(installed, requirement):
            wrong += 1
            yield Row(
                "fault",
                "clients",
                f"{name} {installed or 'is not installed'}; rabbit-tasks asks for {requirement}",
                f"pip install {shlex.quote(requirement)}",
            )
    aiormq = clients.installed.get("aiormq", "")
    if aiormq and numbers(aiormq)[:2] != numbers(clients.made_for):
        wrong += 1
        yield Row(
            "warning",
            "clients",
            f"aiormq {aiormq}: rabbit-tasks reads frames as aiormq {clients.made_for} does, and was "
            "tested with that",
            f"pip install 'aiormq=={clients.made_for}.*'",
        )
    if not wrong:
        told = [name for name in TOLD_CLIENTS if name in clients.installed]
        yield Row("ok", "clients", ", ".join(f"{name} {clients.installed[name]}" for name in told))


def fits(version: str, requirement: str) -> bool:
    """Whether a version is in a requirement's range: `aiormq<8,>=7.2`.

    By its numbers; of the operators, those that a range is written with.
    """
    found = numbers(version)
    for operator, wanted in re.findall(r"(<=|>=|==|!=|<|>)\s*([\d.]+)", requirement):
        limit = numbers(wanted)
        width = max(len(found), len(limit))
        ours, theirs = (part + (0,) * (width - len(part)) for part in (found, limit))
        holds = {
            "<": ours < theirs, "<=": ours <= theirs, ">": ours > theirs, ">=": ours >= theirs,
            "==": ours == theirs, "!=": ours != theirs,
        }  # fmt: skip
        if not holds[operator]:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """`4.3.6-rc.1` as 4, 3, 6; empty where it tells none."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-z+-]", version)[0]))


def of_listeners(facts: Facts) -> Iterator[Row]:
    """The addresses in the settings: reached or not, and how."""
    in_all = [one for one in facts.listeners if one.failure is None]
    for one in facts.listeners:
        if one.failure is not None:
            # With others to go to, workers do without it.
            yield Row("warning" if in_all else "fault", "connection", one.failure,
                      "rabbitmq-diagnostics check_port_connectivity, on that node")  # fmt: skip
            continue
        yield from _of_listener(one, facts)


def _of_listener(one: Listener, facts: Facts) -> Iterator[Row]:
    yield Row("ok", "connection", f"{one.where} lets {facts.user} into {facts.vhost}")
    if one.frame_max < SMALL_FRAME:
        yield Row(
            "warning",
            "connection",
            f"{one.where} takes frames of {one.frame_max} bytes: headers with errors and histories "
            "are cut to that",
            f"write frame_max = {SMALL_FRAME} into rabbitmq.conf",
        )
    if facts.channels > one.channel_max:
        yield Row(
            "fault",
            "connection",
            f"{one.where} allows {one.channel_max} channels on a connection, and a worker of all "
            f"the app's queues takes {facts.channels}: it does not start",
            "write a larger channel_max into rabbitmq.conf, or start workers of some queues each: "
            "rabbit-tasks work QUEUE",
        )
    if not one.tls:
        yield (
            Row("ok", "TLS", f"{one.where}: without, on this machine")
            if one.is_loopback
            else Row(
                "warning",
                "TLS",
                f"{one.where}: without; passwords and messages can be read on the way",
                "write amqps:// into RABBIT_TASKS_URL, with RABBIT_TASKS_TLS_CA if need be",
            )
        )
        return
    if not facts.checks_host:
        yield Row(
            "warning",
            "TLS",
            f"{one.where}: the host's name is not compared with the certificate, so another server "
            "with any certificate of the same authority can pass for it",
            "unset RABBIT_TASKS_TLS_CHECK_HOST",
        )
    until = one.certificate_until
    if until is None:
        yield Row("ok", "TLS", f"{one.where}: used")
        return
    left = until - facts.now
    yield Row(
        "warning" if left < EXPIRES_SOON else "ok",
        "TLS",
        f"{one.where}: its certificate expires on {until:%Y-%m-%d}, in {left.days} days",
        "give the broker a new one: https://www.rabbitmq.com/docs/ssl"
        if left < EXPIRES_SOON
        else "",
    )


def of_logins(facts: Facts) -> Iterator[Row]:
    """The login that everybody knows."""
    away = [one.where for one in facts.listeners if not one.is_loopback]
    if facts.has_default_login and away:
        yield Row(
            "warning",
            "login",
            f"{names(away)}: guest with its default password, which everybody knows",
            "rabbitmqctl add_user NAME; rabbit-tasks topology permissions --user NAME; rabbitmqctl "
            "delete_user guest",
        )


def of_heartbeat(facts: Facts) -> Iterator[Row]:
    """Ours against what the broker asks for: ours counts."""
    asked = {one.asked_heartbeat for one in facts.listeners if one.asked_heartbeat is not None}
    if not asked:
        return
    ours = duration_text(facts.heartbeat)
    theirs = " or ".join(f"{seconds}s" if seconds else "none" for seconds in sorted(asked))
    slow = facts.heartbeat > SLOW_HEARTBEAT
    yield Row(
        "warning" if slow else "ok",
        "heartbeat",
        f"{ours} (the broker's: {theirs}): a worker that hangs or vanishes is noticed after about "
        f"{duration_text(3 * facts.heartbeat)}, and its messages wait so long",
        "set RABBIT_TASKS_HEARTBEAT=15s" if slow else "",
    )


# --- the broker ---------------------------------------------------------------------------------


def of_versions(listeners: Iterable[Listener]) -> Iterator[Row]:
    """What the broker's version means for us."""
    versions = sorted({one.version for one in listeners if one.failure is None}, key=numbers)
    if len(versions) > 1:
        yield Row(
            "warning",
            "version",
            f"nodes of several versions, {names(versions)}: while that lasts, the oldest counts",
            "rabbitmq-diagnostics cluster_status",
        )
    for version in versions[:1]:
        yield from _of_version(version)


def _of_version(version: str) -> Iterator[Row]:
    release = numbers(version)[:2]
    if release and release < (3, 10):
        yield Row(
            "fault",
            "version",
            f"RabbitMQ {version} loses dead letters whose queue does not take them: it lacks "
            "at-least-once dead-lettering (3.10)",
            "upgrade it: https://www.rabbitmq.com/docs/upgrade",
        )
        return
    release = release or (99, 0)
    newer = release > numbers(TESTED[-1])
    yield Row(
        "ok",
        "version",
        f"RabbitMQ {version}" + (f", newer than those we are tested with: {', '.join(TESTED)}"
                                 if newer else ""),
    )  # fmt: skip
    yield Row(
        "ok",
        "delivery limit",
        "a limit of n parks at the n+1st death of a worker or connection; "
        + (
            "what a client nacks, or is timed out with, does not count"
            if release >= (4, 3)
            else "what a client nacks counts as well"
        )
        + (
            "; queues of others without a limit have 20"
            if release >= (4, 0)
            else "; queues of others without a limit have none"
        ),
    )
    yield Row(
        "ok",
        "consumer timeout",
        (
            "a queue's own counts (ack_timeout)"
            if release >= (3, 12)
            else "from rabbitmq.conf alone, ack_timeout is not heard"
        )
        + ", else 30 minutes if nobody has changed it; past it the broker "
        + ("cancels the consumer" if release >= (4, 3) else "closes the channel")
        + " and delivers the message again",
    )
    yield Row(
        "ok",
        "priorities",
        "32 levels in a quorum queue, 4 without one"
        if release >= (4, 3)
        else "two levels in a quorum queue, over 4 and the others"
        if release >= (4, 0)
        else "none in a quorum queue: first in, first out",
    )


def of_features(facts: Facts) -> Iterator[Row]:
    """What the broker will not have much longer, and what it has and does not use."""
    if facts.deprecated is not None:
        used = facts.deprecated
        yield Row(
            "warning" if used else "ok",
            "deprecated features",
            f"in use on this broker: {names(used)}; rabbit_tasks uses none"
            if used
            else "none in use",
            "rabbitmqctl list_deprecated_features --used" if used else "",
        )
    if facts.disabled_flags is not None:
        off = facts.disabled_flags
        yield Row(
            "warning" if off else "ok",
            "feature flags",
            f"off since an upgrade: {names(off)}; the next upgrade may ask for them"
            if off
            else "all on",
            "rabbitmqctl enable_feature_flag all" if off else "",
        )


def of_nodes(nodes: Sequence[Node] | None) -> Iterator[Row]:
    """The cluster: how many, and how they are."""
    if nodes is None:
        return
    down = [node.name for node in nodes if not node.is_running]
    if down:
        yield Row(
            "fault",
            "cluster",
            f"{len(down)} of {len(nodes)} nodes down: {names(down)}",
            "rabbitmq-diagnostics cluster_status; on that node: rabbitmqctl start_app",
        )
    for node in nodes:
        if node.partitions:
            yield Row(
                "fault",
                "cluster",
                f"{node.name} is cut off from {names(node.partitions)}",
                f"rabbitmq-diagnostics -n {shlex.quote(node.name)} cluster_status",
            )
        if node.is_draining:
            yield Row(
                "warning",
                "cluster",
                f"{node.name} is in maintenance mode: it takes no connections and leads no queues",
                f"rabbitmq-upgrade -n {shlex.quote(node.name)} revive",
            )
    count = len(nodes)
    if count % 2 == 0:
        yield Row(
            "warning",
            "cluster",
            f"{count} nodes: an even number survives the loss of no more nodes than {count - 1} would",
            f"on a new node: rabbitmqctl join_cluster {shlex.quote(nodes[0].name)}"
            if nodes
            else "rabbitmq-diagnostics cluster_status",
        )
    elif not down:
        survives = (count - 1) // 2
        yield Row(
            "ok",
            "cluster",
            f"{count} nodes, all up: it survives the loss of {survives}"
            if count > 1
            else "one node: while it is down, nothing goes on",
        )


def of_alarms(facts: Facts) -> Iterator[Row]:
    """What holds publishers back, or soon will."""
    found = False
    for node in facts.nodes or ():
        at = shlex.quote(node.name)
        for is_raised, what, look in (
            (node.memory_alarm, "memory", f"rabbitmq-diagnostics -n {at} memory_breakdown"),
            (
                node.disk_alarm,
                "disk",
                f"free space on its disk; rabbitmq-diagnostics -n {at} status",
            ),
        ):
            if is_raised:
                found = True
                yield Row("fault", "alarms", f"{node.name}: {what} alarm; publishers of the whole "
                          "cluster are held back, retries and parking with them", look)  # fmt: skip
        if not node.memory_alarm and node.memory and node.memory[0] > NEARLY * node.memory[1]:
            found = True
            yield Row(
                "warning",
                "alarms",
                f"{node.name} uses {_size(node.memory[0])} of the {_size(node.memory[1])} of memory "
                "at which publishers are held back",
                f"rabbitmq-diagnostics -n {at} memory_breakdown",
            )
        if not node.disk_alarm and node.disk and node.disk[0] * NEARLY < node.disk[1]:
            found = True
            yield Row(
                "warning",
                "alarms",
                f"{node.name} has {_size(node.disk[0])} of disk left, and holds publishers back "
                f"below {_size(node.disk[1])}",
                f"free space on its disk; rabbitmq-diagnostics -n {at} status",
            )
    if facts.is_blocked and not any(n.memory_alarm or n.disk_alarm for n in facts.nodes or ()):
        found = True
        yield Row(
            "fault",
            "alarms",
            "the broker holds publishers back (memory or disk): retries and parking wait",
            "rabbitmq-diagnostics alarms",
        )
    if not found and (facts.is_blocked is not None or facts.nodes is not None):
        yield Row("ok", "alarms", "none")


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count} {unit}"
        count //= 1024
    return f"{count} GiB"


def of_clock(ahead: timedelta | None) -> Iterator[Row]:
    """Ours against the broker's."""
    if ahead is None:
        return
    off = abs(ahead)
    seconds = f"{off.total_seconds():.0f} s"
    if off <= SKEW:
        yield Row("ok", "clock", "the broker's and ours agree to a few seconds")
    else:
        yield Row(
            "warning",
            "clock",
            f"the broker's is {seconds} {'ahead of' if ahead > timedelta() else 'behind'} ours: times "
            "in histories and filters such as --older-than are off by as much (delays are not)",
            "timedatectl, on both machines",
        )


def of_quorums(facts: Facts) -> Iterator[Row]:
    """Our queues on the nodes of the cluster: a majority of its members keeps a queue at work."""
    if facts.quorums is None:
        return
    ours = None if facts.held is None else {one.queue for one in facts.held}
    quorums = [q for q in facts.quorums if (ours is None or q.queue in ours) and q.members]
    if not quorums:
        return
    vhost = shlex.quote(facts.vhost)
    stuck = [q for q in quorums if 2 * len(q.online) <= len(q.members)]
    weak = [q for q in quorums if q not in stuck and q.online < q.members]
    if stuck:
        yield Row(
            "fault",
            "quorum",
            f"{len(stuck)} queues without a majority of their nodes, so that nothing goes in or out: "
            f"{names(q.queue for q in stuck)}",
            f"start {names(sorted(_missing(stuck)))}; rabbitmq-queues quorum_status "
            f"--vhost {vhost} {shlex.quote(stuck[0].queue)}",
        )
    if weak:
        yield Row(
            "warning",
            "quorum",
            f"{len(weak)} queues lack nodes ({names(sorted(_missing(weak)))}) and go on with the "
            f"others: {names(q.queue for q in weak)}",
            f"rabbitmq-queues quorum_status --vhost {vhost} {shlex.quote(weak[0].queue)}",
        )
    nodes = {node.name for node in facts.nodes or ()}
    narrow = [q for q in quorums if q.online == q.members and len(q.members) < min(3, len(nodes))]
    if narrow:
        missing = sorted(nodes - narrow[0].members)
        yield Row(
            "warning",
            "quorum",
            f"{len(narrow)} queues are on fewer nodes than there are, so that they do not survive the "
            f"loss of one: {names(q.queue for q in narrow)}",
            f"rabbitmq-queues grow {shlex.quote(missing[0])} all --vhost-pattern "
            + shlex.quote(f"^{re.escape(facts.vhost)}$"),
        )
    leaders = Counter(q.leader for q in quorums if q.leader)
    (leader, leads) = leaders.most_common(1)[0] if leaders else ("", 0)
    running = [node for node in facts.nodes or () if node.is_running]
    if len(running) > 1 and leads == len(quorums) and leads > len(running):
        yield Row(
            "warning",
            "quorum",
            f"{leader} leads all {leads} queues: it does the work of {len(running)} nodes",
            "rabbitmq-queues rebalance quorum --vhost-pattern "
            + shlex.quote(f"^{re.escape(facts.vhost)}$"),
        )
    if not stuck and not weak and not narrow:
        widths = sorted({len(q.members) for q in quorums})
        each = " or ".join(map(str, widths)) + (" node" if widths == [1] else " nodes")
        yield Row("ok", "quorum", f"{len(quorums)} queues on {each} each, all online")


def _missing(quorums: Iterable[Quorum]) -> set[str]:
    return {node for quorum in quorums for node in quorum.members - quorum.online}


# --- the app ------------------------------------------------------------------------------------


def of_handlers(facts: Facts) -> Iterator[Row]:
    """How long they may take, and how long the broker lets them."""
    for text in facts.handlers:
        says, _, remedy = text.partition("; write ")
        yield Row("warning", "handlers", says, f"write {remedy}" if remedy else "")


def of_plan(facts: Facts) -> Iterator[Row]:
    """What stands between the app and this broker."""
    if facts.steps is None:
        return
    found: dict[str, list[Step]] = {}
    for step in facts.steps:
        found.setdefault(step.what, []).append(step)
    if missing := found.get("create"):
        yield Row(
            "fault",
            "topology",
            f"{len(missing)} queues and exchanges of app {facts.app} are missing: "
            f"{names(step.name for step in missing)}",
            COMMAND,
        )
    for step in facts.steps:
        if (row := _of_step(step, is_worker=not missing)) is not None:
            yield row
    if not {"create", "bind", "differs"} & set(found) and (kept := found.get("keep")):
        yield Row("ok", "topology", f"{len(kept)} queues and exchanges as app {facts.app} has them")
    if "permission" not in found:
        yield Row("ok", "permissions", f"{facts.user} may declare the app's queues and run workers")


def _of_step(step: Step, *, is_worker: bool) -> Row | None:
    says = f"{step.name}: {step.says}"
    match step.what:
        case "differs" if "x-queue-type" in step.says:
            migrate = f"rabbit-tasks topology migrate {typed(step.name)}"
            return Row("fault", "queue type", says, migrate)
        case "bind" | "differs" | "limit":
            return Row("fault", "topology", says, step.remedy)
        case "extra" | "removed" | "stale":
            return Row("warning", step.what, says, step.remedy)
        case "policy":
            is_lossy = any(word in step.says for word in LOSES)
            return Row("fault" if is_lossy else "warning", "policies", says, step.remedy)
        case "permission" if step.name == "declare" and is_worker:
            # As it should be: who runs workers alone needs no more. But then we see less.
            return Row("unseen", "declare", f"{step.says}; a worker need not", step.remedy)
        case "permission":
            return Row("fault", "permissions", says, step.remedy)
        case "note":
            return Row("ok", "topology", says)
    return None


def of_queues(facts: Facts) -> Iterator[Row]:
    """What is in the app's queues, and who takes from them."""
    if facts.held is None:
        return
    mains = [one for one in facts.held if one.role == "main"]
    for main in mains:
        if main.messages and not main.consumers:
            yield Row(
                "warning",
                "consumers",
                f"{main.queue}: {main.messages} messages wait and nobody consumes",
                f"rabbit-tasks work {typed(main.queue)}",
            )
    told = [f"{one.consumers} on {one.queue}" for one in mains if one.consumers]
    if told:
        yield Row("ok", "consumers", names(told))
    yield from _of_strangers(facts)
    for lot in facts.held:
        if lot.role == "parked" and lot.messages:
            yield Row(
                "warning",
                "parked",
                f"{lot.main}: {lot.messages} messages wait for a person"
                + (f", the first for {age_text(facts.now - lot.since)}" if lot.since else ""),
                f"rabbit-tasks parked list {typed(lot.main)}",
            )
    for queue, count in (facts.dead_letters or {}).items():
        yield Row(
            "warning",
            "dead letters",
            f"{queue} holds {count} that the queue they should go to does not take; they are tried "
            "again every three minutes, and 32 of them stop all that come after",
            "rabbit-tasks topology declare",
        )
    lots = [one.messages for one in facts.held if one.role == "parked"]
    if lots and not any(lots):
        yield Row("ok", "parked", "nothing")


def typed(queue: str) -> str:
    """A queue's name as an argument of a command of ours."""
    return ("-- " if queue.startswith("-") else "") + shlex.quote(queue)


def of_left(facts: Facts) -> Iterator[Row]:
    """What a replay or a migration was killed with."""
    for one in facts.left:
        name = typed(one.of)
        if one.by == "migrate":
            yield Row(
                "fault",
                "left behind",
                f"{one.of}: {one.messages} of its messages wait in {one.queue}: a migration is at work, "
                "or was stopped",
                f"rabbit-tasks topology migrate {name}",
            )
        elif one.messages:  # (the queue itself stays, for the next one)
            yield Row(
                "warning",
                "left behind",
                f"{one.of}: {one.messages} copies in {one.queue}: a replay is at work, or was killed; "
                "the next one puts them right",
                f"rabbit-tasks parked replay {name} --resume",
            )


def _of_strangers(facts: Facts) -> Iterator[Row]:
    vhost = shlex.quote(facts.vhost)
    remedy = f"rabbitmqctl list_consumers -p {vhost}"
    roles = {one.queue: one for one in facts.held or ()}
    for one in roles.values():
        if one.role in ("retry", "crashed") and one.consumers:
            yield Row(
                "fault",
                "consumers",
                f"{one.queue}: {one.consumers} consumer(s) take what waits there for its next attempt",
                remedy,
            )
    strangers: dict[tuple[str, str, str], list[Reader]] = {}
    for reader in facts.readers or ():
        at = roles.get(reader.queue)
        if at is not None and at.role in ("main", "parked") and not reader.is_ours:
            strangers.setdefault((reader.queue, reader.client, reader.user), []).append(reader)
    for (queue, client, user), readers in strangers.items():
        yield Row(
            "warning",
            "consumers",
            f"{queue}: {len(readers)} consumer(s) that are not rabbit_tasks': {client}, user {user}, "
            f"{readers[0].connection}",
            remedy,
        )


def of_unseen(facts: Facts) -> Iterator[Row]:
    """What was not looked at, and why: no fault of the broker."""
    if facts.silence is not None:
        yield Row(
            "fault", "connection", f"asked no further: {facts.silence}",
            "rabbitmq-diagnostics check_running; rabbitmq-diagnostics cluster_status",
        )  # fmt: skip
    if facts.app is None and any(one.failure is None for one in facts.listeners):
        yield Row(
            "unseen",
            UNSEEN,
            "the app's queues: no app is named",
            "rabbit-tasks --app module:attribute doctor",
        )
    for about, why in unseen_of(facts):
        yield Row(
            "unseen",
            UNSEEN,
            f"{about}: {why}",
            "set RABBIT_TASKS_MANAGEMENT_URL=http://HOST:15672"
            if why.endswith("is not set")
            else "",
        )


def unseen_of(facts: Facts) -> list[tuple[str, str]]:
    """What was not looked at, once per reason; what the plan had no management API for is among it."""
    found: dict[str, list[str]] = {}
    told = [(step.name, step.says) for step in facts.steps or () if step.what == "unseen"]
    for about, why in [*facts.unseen, *(one for one in told if not one[1].endswith("is not set"))]:
        found.setdefault(why, []).append(about)
    return [(", ".join(abouts), why) for why, abouts in found.items()]
