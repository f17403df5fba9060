"""The queues, exchanges and bindings of an app: names, arguments, definitions.

Pure: consumers in, a topology out. For a consumer of `images.resize`:

    images.resize                     main: what consumers read
    images.resize.retry.1.500ms       retry: a copy waits its constant TTL, then goes home
    images.resize.crashed.4s          crashed: likewise, where workers died with it in their hands
    images.resize.parked              parked: set aside for a person, bound to parking-lot

Every queue is a quorum queue and every argument is written out, because brokers' defaults differ by
version. Nothing has a length limit or an expiry of its own: a full or expired queue loses messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

from rabbit_tasks.consumer import Consumer
from rabbit_tasks.durations import duration_of, duration_text
from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.retry import CRASH_DELAYS, MILLISECOND

PARKING_LOT: Final = "parking-lot"
"""The exchange of all parking queues; a direct one, keyed by main queue."""

# An explicit, very large limit behaves alike on 3.10, 4.0 and 4.3. -1 dead-letters at the first
# return on 3.10, and none means 20 on 4.x: 21 looks at a parked message would lose it.
_LOOKED_AT_FOR_EVER: Final = 2_147_483_647

_WAITING_NAME: Final = re.compile(r"\.(?:retry\.(\d+)|crashed)\.(\d+(?:ms|s|m|h|d))$")

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Queue:
    """A durable quorum queue: the main queue of a consumer, or one of those that serve it."""

    name: str
    role: Literal["main", "retry", "crashed", "parked"]
    main: str
    arguments: Arguments = field(hash=False)


@dataclass(frozen=True)
class Exchange:
    """A durable exchange."""

    name: str
    type: str = "direct"


@dataclass(frozen=True)
class Binding:
    """What leads from an exchange to a queue."""

    exchange: str
    queue: str
    key: str


@dataclass(frozen=True)
class Topology:
    """Everything an app needs on the broker."""

    queues: tuple[Queue, ...]
    exchanges: tuple[Exchange, ...]
    bindings: tuple[Binding, ...]

    def definitions(self) -> str:
        """RabbitMQ's definitions format for one virtual host, sorted: the same app, the same text.

        It is what the management API takes at `POST /api/definitions/VHOST`.
        """
        content = {
            "exchanges": [
                {"name": e.name, "type": e.type, "durable": True, "auto_delete": False,
                 "internal": False, "arguments": {}}
                for e in sorted(self.exchanges, key=lambda e: e.name)
            ],
            "queues": [
                {"name": q.name, "durable": True, "auto_delete": False, "arguments": q.arguments}
                for q in sorted(self.queues, key=lambda q: q.name)
            ],
            "bindings": [
                {"source": b.exchange, "destination": b.queue, "destination_type": "queue",
                 "routing_key": b.key, "arguments": {}}
                for b in sorted(self.bindings, key=lambda b: (b.exchange, b.queue, b.key))
            ],
        }  # fmt: skip
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    @property
    def parts(self) -> tuple[Exchange | Queue, ...]:
        """Exchanges and queues, in the order in which they can be made."""
        return (*self.exchanges, *self.queues)

    @property
    def digest(self) -> str:
        """12 hexadecimal digits: the same for the same definitions, and for no others."""
        return hashlib.sha256(self.definitions().encode()).hexdigest()[:12]


def retry_queue(main: str, attempt: int, delay: timedelta) -> str:
    """Where a copy waits after this failed attempt. The delay is in the name: a TTL cannot be
    changed in place, so a changed policy makes new queues and the old ones drain home."""
    return f"{main}.retry.{attempt}.{duration_text(delay)}"


def crashed_queue(main: str, delay: timedelta) -> str:
    """Where a message waits whose worker died with it, so that it does not kill the next at once."""
    return f"{main}.crashed.{duration_text(delay)}"


def waiting_for(name: str) -> str | None:
    """The main queue that a retry or crashed queue of this name serves, of whatever policy; None
    where it is no such name. (No main queue may have one.)

    >>> waiting_for("images.resize.retry.1.500ms")
    'images.resize'
    """
    found = _WAITING_NAME.search(name)
    return name[: found.start()] if found and found.start() else None


def waiting_queue(name: str) -> Queue | None:
    """The retry or crashed queue of this name, as every policy that has one declares it; None where
    no policy has a queue of this name."""
    main, found = waiting_for(name), _WAITING_NAME.search(name)
    if main is None or found is None:
        return None
    try:
        attempt, delay = found[1], duration_of(found[2])
    except ValueError:  # longer than Python's durations
        return None
    if attempt is None:
        queue = _waiting(crashed_queue(main, delay), "crashed", main, delay)
    else:
        queue = _waiting(retry_queue(main, int(attempt), delay), "retry", main, delay)
    return queue if queue.name == name else None  # (60s is written 1m)


def parked_queue(main: str) -> str:
    """Where messages of this main queue are set aside."""
    return f"{main}.parked"


def replaying_queue(main: str) -> str:
    """Where the copies of a replay of many wait until their originals are gone: the queue, and the
    exchange in front of it. Not of an app's topology: the first such replay creates it."""
    return f"{main}.replaying"


def topology_of(consumers: Iterable[type[Consumer[Any]]]) -> Topology:
    """The topology of these consumer classes.

    Raises ConfigurationError where two of them take one queue, or a name is none the broker takes or
    could be that of a queue that serves another. (So no other two names can be the same.)
    """
    queues: list[Queue] = []
    owners: dict[str, type[Consumer[Any]]] = {}
    bindings = []
    for consumer in consumers:
        served = tuple(_queues(consumer))
        _check_names(served, consumer)
        if other := owners.get(consumer.queue):
            raise ConfigurationError(
                f"{other.__name__} and {consumer.__name__} both take queue {consumer.queue!r}; "
                "give each its own, or handle both kinds in one consumer"
            )
        owners[consumer.queue] = consumer
        queues += served
        bindings.append(Binding(PARKING_LOT, parked_queue(consumer.queue), consumer.queue))
    exchanges = (Exchange(PARKING_LOT),) if bindings else ()
    return Topology(tuple(queues), exchanges, tuple(bindings))


def _queues(consumer: type[Consumer[Any]]) -> Iterable[Queue]:
    main = consumer.queue
    yield Queue(main, "main", main, {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": PARKING_LOT,
        "x-dead-letter-routing-key": main,
        # Without reject-publish the strategy is silently at-most-once (3.10 to 4.3).
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-delivery-limit": consumer.delivery_limit,
        # When a consumer's node dies, 4.3 otherwise waits 60 s before it redelivers. Inert before
        # 4.3, and always sent, so that an upgrade of the broker changes no argument.
        "x-consumer-disconnected-timeout": 2000,
        **_ack_timeout(consumer),
    })  # fmt: skip
    for attempt in range(1, consumer.retry.attempts):
        for delay in consumer.retry.delays_after(attempt):
            yield _waiting(retry_queue(main, attempt, delay), "retry", main, delay)
    for delay in CRASH_DELAYS:
        yield _waiting(crashed_queue(main, delay), "crashed", main, delay)
    yield Queue(parked_queue(main), "parked", main, {
        "x-queue-type": "quorum",
        "x-delivery-limit": _LOOKED_AT_FOR_EVER,
    })  # fmt: skip


def _ack_timeout(consumer: type[Consumer[Any]]) -> Arguments:
    # Only where it is set: other queues stay as they were declared. Then on every version: it counts
    # from 3.12, is accepted and ignored by 3.10, and compared on a redeclare from 4.3 alone.
    if consumer.ack_timeout is None:
        return {}
    return {"x-consumer-timeout": consumer.ack_timeout // MILLISECOND}


def _waiting(name: str, role: Literal["retry", "crashed"], main: str, delay: timedelta) -> Queue:
    return Queue(name, role, main, {
        "x-queue-type": "quorum",
        "x-message-ttl": delay // MILLISECOND,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": main,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    })  # fmt: skip


def _check_names(served: tuple[Queue, ...], consumer: type[Consumer[Any]]) -> None:
    name, where = consumer.queue, f"{consumer.__name__}.queue"
    # `parked discard NAME.parked` empties a parking queue: no name may be both that and live work.
    if name.endswith((parked_queue(""), replaying_queue(""))) or _WAITING_NAME.search(name):
        other = re.sub(r"\.(parked|replaying|retry|crashed)", r"-\1", name)
        raise ConfigurationError(
            f"{where} {name!r}: names that end in .parked, .replaying, .retry.N.DELAY or "
            ".crashed.DELAY are those of the queues that serve a main queue; take another ending, such "
            f"as {other!r}"
        )
    longest = max(served, key=lambda queue: len(queue.name))
    if (over := len(longest.name) - 255) > 0:
        raise ConfigurationError(
            f"{where}: its {longest.role} queue's name {name[:40]}… has {len(longest.name)} bytes, "
            f"AMQP takes 255; make the queue's name {over} shorter"
        )
