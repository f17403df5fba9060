"""What is exported, taken by a real broker as those take it who read such files, is what we declare."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from rabbit_tasks import App, Consumer, Message, RetryPolicy
from rabbit_tasks.broker import Connection
from rabbit_tasks.declare import check, declare
from rabbit_tasks.exports import kubernetes, terraform
from rabbit_tasks.topology import Topology
from tests.support.applied import apply_kubernetes, apply_terraform
from tests.support.brokers import Broker


def made(queue: str, attempts: int = 2) -> Consumer[Any]:
    class Made(Consumer[dict[str, Any]]):
        retry = RetryPolicy(attempts=attempts, spread=2)

        async def handle(self, body: dict[str, Any], message: Message) -> None: ...

    kind: type[Consumer[Any]] = type("Made", (Made,), {"queue": queue})
    return kind()


ODD = "a b, c+d #e:-_" + "n" * 229
TOPOLOGY = App("odd", [made("mail_EU"), made(ODD, 1)]).topology
SLASHES = App("slashes", [made("eu/mail@home", 1)]).topology


def parts(definitions: dict[str, Any], like: dict[str, Any]) -> dict[str, list[Any]]:
    """Queues, exchanges and bindings in whatever order, by what is said of them in another file.

    (4.3 says the type of a queue a second time, and of an exchange not that it is not internal.)
    """
    return {
        kind: sorted(
            ({name: one.get(name, False) for name in like[kind][0]} for one in definitions[kind]),
            key=lambda one: json.dumps(one, sort_keys=True),
        )
        for kind in ("exchanges", "queues", "bindings")
    }


def as_definitions(broker: Broker, vhost: str, topology: Topology) -> None:
    path = f"/definitions/{quote(vhost, safe='')}"
    broker.api("POST", path, json.loads(topology.definitions()))


def as_terraform(broker: Broker, vhost: str, topology: Topology) -> None:
    apply_terraform(broker, terraform(topology, "odd"), vhost)


def as_kubernetes(broker: Broker, vhost: str, topology: Topology) -> None:
    apply_kubernetes(broker, kubernetes(topology, "odd", cluster="rabbit", vhost=vhost))


@pytest.mark.parametrize(
    ("take", "topology"),
    [
        (as_definitions, TOPOLOGY), (as_terraform, TOPOLOGY), (as_kubernetes, TOPOLOGY),
        (as_kubernetes, SLASHES),
    ],
)  # fmt: skip
async def test_what_is_exported_and_taken_is_to_the_letter_what_we_declare(
    take: Any, topology: Topology, connection: Connection, broker: Broker, vhost: str
) -> None:
    take(broker, vhost, topology)
    assert await check(connection, topology) == []
    assert await declare(connection, topology) == []
    there = broker.api("GET", f"/definitions/{quote(vhost, safe='')}")
    ours = json.loads(topology.definitions())
    assert parts(there, ours) == parts(ours, ours)
