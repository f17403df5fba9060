"""Our side: the libraries that we stand on, the way to the broker, what we log in with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from rabbit_tasks.doctor.facts import Clients, Facts, Listener
from rabbit_tasks.doctor.row import Row
from rabbit_tasks.durations import duration_text
from rabbit_tasks.text import numbers, some

EXPIRES_SOON: Final = timedelta(days=30)
SLOW_HEARTBEAT: Final = timedelta(minutes=1)
SMALL_FRAME: Final = 131_072
"""What every version comes with; headers with an error and a stack trace are made to fit it."""
TOLD_CLIENTS: Final = ("aiormq", "pamqp", "pydantic")


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
            f"{some(away)}: guest with its default password, which everybody knows",
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
