"""What the broker's policies change in queues of ours.

Pure: a queue and a policy's definition in, sentences out. A policy stands beside a queue's own
arguments. Of numbers the smaller one counts; a dead-letter exchange, key or strategy counts as the
argument says; `overflow` counts as the policy says (3.10 to 4.3).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal, Self

from rabbit_tasks.durations import duration_text
from rabbit_tasks.retry import MILLISECOND
from rabbit_tasks.topology import Queue

_NOT_FOR_QUORUM: Final = frozenset(
    {"max-priority", "queue-mode", "ha-mode", "ha-params", "ha-sync-mode", "ha-promote-on-shutdown",
     "ha-promote-on-failure", "queue-master-locator", "max-age", "stream-max-segment-size-bytes",
     "initial-cluster-size"}
)  # fmt: skip
"""One of these in a policy, and none of it applies to a quorum queue (3.10 to 4.3)."""

_CONSUMER_TIMEOUT: Final = timedelta(minutes=30) // MILLISECOND
"""What the broker comes with."""


@dataclass(frozen=True)
class Policy:
    """A policy of a virtual host, or an operator policy."""

    name: str
    pattern: str
    apply_to: str
    priority: float
    definition: Mapping[str, Any] = field(hash=False)
    is_operators: bool = False

    @classmethod
    def of(cls, row: Mapping[str, Any], *, is_operators: bool = False) -> Self:
        """As the management API tells it."""
        return cls(
            name=str(row.get("name", "")),
            pattern=str(row.get("pattern", "")),
            apply_to=str(row.get("apply-to", "all")),
            priority=row["priority"] if isinstance(row.get("priority"), int | float) else 0,
            definition=row["definition"] if isinstance(row.get("definition"), dict) else {},
            is_operators=is_operators,
        )

    @property
    def kind(self) -> str:
        return "operator policy" if self.is_operators else "policy"

    def applies_to(self, name: str, kind: Literal["quorum queue", "exchange"]) -> bool:
        """Whether it could apply to a queue or an exchange of ours; a pattern that cannot be read
        here (the broker has a few forms that Python has not) may apply to any."""
        if kind == "exchange":
            if self.apply_to not in ("all", "exchanges"):
                return False
        elif self.apply_to not in ("all", "queues", "quorum_queues") or (
            _NOT_FOR_QUORUM & set(self.definition)
        ):
            return False
        return not self.is_readable or re.search(self.pattern, name) is not None

    @property
    def is_readable(self) -> bool:
        """Whether Python takes its pattern, and for the same as the broker: [[:alpha:]] it takes for
        another set, with a warning."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                re.compile(self.pattern)
        except (re.error, Warning):
            return False
        return True


def applying(
    policies: Iterable[Policy], name: str, kind: Literal["quorum queue", "exchange"]
) -> Policy | None:
    """The one policy that applies: policies do not add up, the highest priority wins."""
    found = [one for one in policies if one.applies_to(name, kind)]
    return max(found, key=lambda one: one.priority, default=None)


@dataclass(frozen=True)
class Change:
    """What a policy makes of a queue of ours, in words that follow its name."""

    says: str
    loses: bool = False
    """Whether messages are lost, or parked without being handled."""


def changes(queue: Queue, definition: Mapping[str, Any]) -> list[Change]:
    """All that a policy of this definition makes of a queue of ours."""
    numbers = {
        key: value
        for key, value in definition.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    found = [
        *_by_time(queue, numbers),
        *_by_length(queue, numbers, definition.get("overflow")),
        *_by_delivery(queue, numbers, definition.get("delayed-retry-type")),
    ]
    overflow = definition.get("overflow", "reject-publish")
    if queue.role != "parked" and overflow != "reject-publish":
        says = f"its dead letters are moved at most once and may be lost (overflow: {overflow})"
        found.append(Change(says, loses=True))
    return found


def changes_of_copies(definition: Mapping[str, Any]) -> list[Change]:
    """The same of the queue through which the copies of a replay go.

    What is dropped or expires there goes home at once: where a replay is killed before it has acked the
    originals, it is there twice (3.10 to 4.3).
    """
    early = [key for key in ("message-ttl", "delivery-limit") if key in definition]
    if definition.get("overflow", "reject-publish") != "reject-publish":
        early += [key for key in ("max-length", "max-length-bytes") if key in definition]
    found = []
    if early:
        found.append(Change(
            f"copies of a replay go home early ({', '.join(early)}): of one that is killed, up to a "
            "thousand messages are there twice"
        ))  # fmt: skip
    if "expires" in definition:
        found.append(Change(
            "it is deleted when nobody uses it for a while (expires), with the copies that a killed "
            "replay left in it", loses=True,
        ))  # fmt: skip
    return found


def _by_time(queue: Queue, numbers: Mapping[str, int]) -> Iterable[Change]:
    ttl = numbers.get("message-ttl")
    if ttl is not None:
        own = queue.arguments.get("x-message-ttl")
        told = f"{_time(ttl)} (message-ttl: {ttl})"
        if queue.role == "main":
            yield Change(
                f"messages that wait there for {told} are parked without being handled", loses=True
            )
        elif queue.role == "parked":
            yield Change(f"parked messages are lost after {told}", loses=True)
        elif isinstance(own, int) and ttl < own:
            yield Change(f"messages wait there for {told}, less than it was declared with")
    if (expires := numbers.get("expires")) is not None:
        told = f"{_time(expires)} (expires: {expires})"
        yield Change(f"it is deleted with its messages when nobody uses it for {told}", loses=True)


def _by_length(queue: Queue, numbers: Mapping[str, int], overflow: object) -> Iterable[Change]:
    for key, unit in (("max-length", "messages"), ("max-length-bytes", "bytes")):
        if (most := numbers.get(key)) is None:
            continue
        full = f"beyond {most} {unit} ({key})"
        if overflow == "reject-publish" or (overflow is None and queue.role != "parked"):
            if queue.role == "parked":
                yield Change(f"{full} nothing more can be parked: workers keep it in their hands")
            else:
                yield Change(f"{full} it refuses what is published, retries and replays as well")
        elif queue.role == "parked":
            yield Change(f"{full} the oldest parked messages are lost", loses=True)
        elif queue.role == "main":
            yield Change(f"{full} the oldest are parked without being handled", loses=True)
        else:
            yield Change(f"{full} the oldest go home before their time")


def _by_delivery(queue: Queue, numbers: Mapping[str, int], delayed: object) -> Iterable[Change]:
    limit, own = numbers.get("delivery-limit"), queue.arguments.get("x-delivery-limit")
    if limit is not None and isinstance(own, int) and 0 <= limit < own:
        if queue.role == "parked":
            yield Change(
                f"a parked message is lost after {limit + 1} looks at it (delivery-limit: {limit})",
                loses=True,
            )
        else:
            yield Change(
                f"a message is parked after {limit + 1} deliveries instead of {own + 1} "
                f"(delivery-limit: {limit})"
            )
    taken = numbers.get("consumer-timeout")
    allowed = queue.arguments.get("x-consumer-timeout", _CONSUMER_TIMEOUT)
    if queue.role == "main" and taken is not None and taken < allowed:
        yield Change(
            f"what a handler has not done within {_time(taken)} instead of {_time(allowed)} is "
            f"delivered again (consumer-timeout: {taken})"
        )
    wait = numbers.get("delayed-retry-min", 0)
    if queue.role in ("main", "parked") and delayed in ("all", "failed", "returned") and wait:
        yield Change(
            f"what is put back into it is hidden for {_time(wait)} and more "
            f"(delayed-retry-min: {wait})"
        )


def _time(milliseconds: int) -> str:
    return duration_text(milliseconds * MILLISECOND)
