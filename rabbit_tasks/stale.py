"""Queues that the app's topology has no more: which those are, and which of them may go.

Pure: names and what the management API tells of queues and bindings in, an answer out. `plan` tells of
them and `declare --prune` removes them: both ask here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rabbit_tasks.text import quoted
from rabbit_tasks.topology import Topology, waiting_for, waiting_queue

Row = Mapping[str, Any]


def stale_names(topology: Topology, names: Iterable[str]) -> list[str]:
    """Those of retry and crashed queues that serve a main queue of the topology and are not its."""
    ours = {queue.name for queue in topology.queues}
    mains = {queue.main for queue in topology.queues}
    return sorted(name for name in names if name not in ours and waiting_for(name) in mains)


def removed_names(topology: Topology, exported: Iterable[str]) -> list[str]:
    """Those in a lock file that serve no main queue of the topology."""
    ours = {queue.name for queue in topology.queues}
    mains = {queue.main for queue in topology.queues}
    return sorted(name for name in exported if name not in ours and waiting_for(name) not in mains)


def not_ours(name: str, queue: Row, bindings: Iterable[Row]) -> str | None:
    """Why a queue with the name of a retry queue is none of ours, of whatever policy; None where it
    may well be. `bindings` may be those of other queues as well."""
    wanted = ours.arguments if (ours := waiting_queue(name)) else {}
    found = dict(queue.get("arguments") or {})
    if not wanted or wanted != found:
        differs = sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key))
        return (
            f"declared as none of ours ever was ({', '.join(differs) or 'its name'}): whose is it?"
        )
    # (Of the default exchange every queue has one.)
    sources = {
        str(one["source"])
        for one in bindings
        if one.get("source")
        and one.get("destination") == name
        and one.get("destination_type", "queue") == "queue"
    }
    if sources:
        named = ", ".join(map(quoted, sorted(sources)))
        return f"bound to {named}, as none of ours ever was: whose is it?"
    return None
