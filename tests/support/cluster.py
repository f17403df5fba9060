"""A cluster of three nodes that tests may hurt.

RABBIT_TASKS_TEST_CLUSTER_URL   the AMQP URLs of its nodes, with commas between them
RABBIT_TASKS_TEST_CLUSTER_API   their management APIs, likewise
RABBIT_TASKS_TEST_CLUSTER       a command that takes a node's number, from 1, and `stop`, `start`,
                                `kill`, `freeze` or `thaw`
"""

from __future__ import annotations

import os
import shlex
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from tests.support.brokers import Broker

_PREFIX = "RABBIT_TASKS_TEST_CLUSTER"


class Cluster:
    """Its nodes, and a virtual host of its own for the test."""

    def __init__(self, nodes: list[Broker], vhost: str) -> None:
        self.nodes = nodes
        self.vhost = vhost
        self.url = ",".join(node.url(vhost) for node in nodes)

    @property
    def name_of(self) -> dict[str, Broker]:
        """The nodes by the names that they have among themselves."""
        return {node.api("GET", "/overview")["node"]: node for node in self.nodes}

    def members(self) -> dict[str, int]:
        """Per queue, how many nodes have it."""
        rows = self.nodes[0].api("GET", f"/queues/{quote(self.vhost, safe='')}")
        return {row["name"]: len(row.get("members", ())) for row in rows}

    def nodes_of_workers(self) -> dict[str, str]:
        """By the worker's name, the name of the node that it is connected to."""
        rows = self.nodes[0].api("GET", f"/vhosts/{quote(self.vhost, safe='')}/connections")
        names = {row["node"]: row.get("user_provided_name", "").split() for row in rows}
        return {words[2]: node for node, words in names.items() if words[1:2] == ["worker"]}


def why_there_is_none() -> str:
    """Nothing where there is a cluster."""
    wanted = [_PREFIX, f"{_PREFIX}_URL", f"{_PREFIX}_API"]
    missing = [name for name in wanted if name not in os.environ]
    return f"no cluster: {', '.join(missing)} not set" if missing else ""


@contextmanager
def the_cluster() -> Iterator[Cluster]:
    """Its nodes are all up."""
    urls = os.environ[f"{_PREFIX}_URL"].split(",")
    apis = os.environ[f"{_PREFIX}_API"].split(",")
    command = shlex.split(os.environ[_PREFIX])
    nodes = [
        Broker(url, api.rstrip("/"), [*command, str(number)])
        for number, (url, api) in enumerate(zip(urls, apis, strict=True), 1)
    ]
    vhost = f"test/{uuid.uuid4().hex[:8]}"
    nodes[0].create_vhost(vhost)
    yield Cluster(nodes, vhost)
    nodes[0].delete_vhost(vhost)
