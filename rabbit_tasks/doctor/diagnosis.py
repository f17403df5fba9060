"""The diagnosis: facts in, rows of ok, warning and fault out. Pure.

Each function looks at one thing and says at least what it saw; where it finds nothing wrong, in a row
that is ok. A row that is neither ends with what to type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rabbit_tasks.doctor.facts import Facts
from rabbit_tasks.doctor.of_app import of_handlers, of_left, of_plan, of_queues
from rabbit_tasks.doctor.of_broker import (
    of_alarms,
    of_clock,
    of_features,
    of_nodes,
    of_quorums,
    of_versions,
)
from rabbit_tasks.doctor.of_us import of_clients, of_heartbeat, of_listeners, of_logins
from rabbit_tasks.doctor.row import Row

UNSEEN = "not looked at"


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
