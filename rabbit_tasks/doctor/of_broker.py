"""The broker: its version, its cluster, its alarms and its clock."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Final

from rabbit_tasks.doctor.facts import Facts, Listener, Node, Quorum
from rabbit_tasks.doctor.row import Row
from rabbit_tasks.text import numbers, quoted, some

SKEW: Final = timedelta(seconds=10)
"""Between two clocks: the management API tells whole seconds, and some time passes on the way."""
NEARLY: Final = 0.8
TESTED: Final = ("3.10", "4.0", "4.3")


def of_versions(listeners: Iterable[Listener]) -> Iterator[Row]:
    """What the broker's version means for us."""
    versions = sorted({one.version for one in listeners if one.failure is None}, key=numbers)
    if len(versions) > 1:
        yield Row(
            "warning",
            "version",
            f"nodes of several versions, {some(versions)}: while that lasts, the oldest counts",
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
            f"in use on this broker: {some(used)}; rabbit_tasks uses none"
            if used
            else "none in use",
            "rabbitmqctl list_deprecated_features --used" if used else "",
        )
    if facts.disabled_flags is not None:
        off = facts.disabled_flags
        yield Row(
            "warning" if off else "ok",
            "feature flags",
            f"off since an upgrade: {some(off)}; the next upgrade may ask for them"
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
            f"{len(down)} of {len(nodes)} nodes down: {some(down)}",
            "rabbitmq-diagnostics cluster_status; on that node: rabbitmqctl start_app",
        )
    for node in nodes:
        if node.partitions:
            yield Row(
                "fault",
                "cluster",
                f"{node.name} is cut off from {some(node.partitions)}",
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
            f"{some(quoted(q.queue) for q in stuck)}",
            f"start {some(sorted(_missing(stuck)))}; rabbitmq-queues quorum_status "
            f"--vhost {vhost} {shlex.quote(stuck[0].queue)}",
        )
    if weak:
        yield Row(
            "warning",
            "quorum",
            f"{len(weak)} queues lack nodes ({some(sorted(_missing(weak)))}) and go on with the "
            f"others: {some(quoted(q.queue) for q in weak)}",
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
            f"loss of one: {some(quoted(q.queue) for q in narrow)}",
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
