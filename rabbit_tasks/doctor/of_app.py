"""The app on this broker: what stands in its way, what is in its queues, who takes from them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rabbit_tasks.declare import COMMAND
from rabbit_tasks.doctor.facts import Facts, Reader
from rabbit_tasks.doctor.row import Row
from rabbit_tasks.durations import age_text
from rabbit_tasks.plan import Step
from rabbit_tasks.text import quoted, some, to_type


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
            f"{some(quoted(step.name) for step in missing)}",
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
    says = f"{quoted(step.name)}: {step.says}"
    match step.what:
        case "differs" if step.argument == "x-queue-type":
            return Row("fault", "queue type", says, to_type("topology migrate", step.name))
        case "bind" | "differs" | "limit":
            return Row("fault", "topology", says, step.remedy)
        case "extra" | "removed" | "stale":
            return Row("warning", step.what, says, step.remedy)
        case "policy":
            return Row("fault" if step.loses else "warning", "policies", says, step.remedy)
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
                f"{quoted(main.queue)}: {main.messages} messages wait and nobody consumes",
                to_type("work", main.queue),
            )
    told = [f"{one.consumers} on {quoted(one.queue)}" for one in mains if one.consumers]
    if told:
        yield Row("ok", "consumers", some(told))
    yield from _of_strangers(facts)
    for lot in facts.held:
        if lot.role == "parked" and lot.messages:
            yield Row(
                "warning",
                "parked",
                f"{quoted(lot.main)}: {lot.messages} messages wait for a person"
                + (f", the first for {age_text(facts.now - lot.since)}" if lot.since else ""),
                to_type("parked list", lot.main),
            )
    for queue, count in (facts.dead_letters or {}).items():
        yield Row(
            "warning",
            "dead letters",
            f"{quoted(queue)} holds {count} that the queue they should go to does not take; they "
            "are tried "
            "again every three minutes, and 32 of them stop all that come after",
            "rabbit-tasks topology declare",
        )
    lots = [one.messages for one in facts.held if one.role == "parked"]
    if lots and not any(lots):
        yield Row("ok", "parked", "nothing")


def of_left(facts: Facts) -> Iterator[Row]:
    """What a replay or a migration was killed with."""
    for one in facts.left:
        if one.by == "migrate":
            yield Row(
                "fault",
                "left behind",
                f"{quoted(one.of)}: {one.messages} of its messages wait in {quoted(one.queue)}: a "
                "migration is at work, "
                "or was stopped",
                to_type("topology migrate", one.of),
            )
        elif one.messages:  # (the queue itself stays, for the next one)
            yield Row(
                "warning",
                "left behind",
                f"{quoted(one.of)}: {one.messages} copies in {quoted(one.queue)}: a replay is at "
                "work, or was killed; "
                "the next one puts them right",
                to_type("parked replay", one.of, "--resume"),
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
                f"{quoted(one.queue)}: {one.consumers} consumer(s) take what waits there for its "
                "next attempt",
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
            f"{quoted(queue)}: {len(readers)} consumer(s) that are not rabbit_tasks': {client}, "
            f"user {user}, "
            f"{readers[0].connection}",
            remedy,
        )
