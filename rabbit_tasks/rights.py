"""The permissions that each part of the work needs, and no more: three patterns as RabbitMQ has them.

Pure: a topology in, patterns out. A changed retry policy needs no others: the patterns know how retry
queues are named, not how long they wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rabbit_tasks.topology import PARKING_LOT, Topology

NOTHING: Final = "^$"
DEFAULT_EXCHANGE: Final = r"amq\.default"
"""The default exchange's name in a permission."""

_WAITING: Final = r"(retry\.[0-9]+|crashed)\.[0-9]+(ms|s|m|h|d)"


@dataclass(frozen=True)
class Rights:
    """What a user may do in one virtual host: patterns of the names of queues and exchanges."""

    configure: str
    write: str
    read: str


def rights(topology: Topology) -> dict[str, Rights]:
    """What a user needs in order to `publish`, `work`, `declare` and use `parked`, by that word.

    `declare` is enough for topology declare, check and plan, and for declare --prune. Who does several
    of these needs all of their rights: the patterns joined by |.
    """
    names = sorted(queue.name for queue in topology.queues if queue.role == "main")
    if not names:
        return {}
    mains = f"({'|'.join(_escaped(name) for name in names)})"
    lot = _escaped(PARKING_LOT)
    served = rf"{mains}(\.({_WAITING}|parked))?"
    return {
        "publish": Rights(NOTHING, _only(DEFAULT_EXCHANGE), NOTHING),
        # It writes to no queue itself. But 4.3 lets a user look for those alone on which he has some
        # permission; this one lets him do nothing with them.
        "work": Rights(
            NOTHING, _only(DEFAULT_EXCHANGE, lot, rf"{mains}\.({_WAITING}|parked)"), _only(mains)
        ),
        # Reading and writing: what a queue with a dead-letter exchange and a binding ask for.
        "declare": Rights(
            _only(lot, served), _only(DEFAULT_EXCHANGE, lot, rf"{mains}\.parked"),
            _only(lot, served),
        ),
        # Configure: the exclusive queue by which two looks wait for each other, and what the copies
        # of a replay go through, queue and exchange, without which they go one by one.
        "parked": Rights(
            _only(rf"{mains}\.(parked\.look|replaying)"),
            _only(DEFAULT_EXCHANGE, rf"{mains}\.replaying"),
            _only(rf"{mains}\.(parked|replaying)"),
        ),
    }  # fmt: skip


def _escaped(name: str) -> str:
    # Not re.escape, which escapes more than Erlang's patterns need and people can read.
    return re.sub(r"([\\.^$|?*+()\[\]{}])", r"\\\1", name)


def _only(*patterns: str) -> str:
    return f"^({'|'.join(patterns)})$" if len(patterns) > 1 else f"^{patterns[0]}$"
