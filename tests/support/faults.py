"""What can happen to a broker, to the way to it, and to its queues; and how it is mended."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
import urllib.error
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import quote

from rabbit_tasks import Consumer, Publisher, Settings
from tests.conftest import eventually
from tests.support.brokers import ROOT, Broker
from tests.support.line import Line
from tests.support.load import KINDS, Load
from tests.support.namespace import Namespace
from tests.support.obedient import Obey, ObeyInProcess, ObeyInThread, Order
from tests.support.workers import Runs, WorkerProcess

SILENT: Final = 6.5
"""Seconds that a silence lasts: past three heartbeats of 1 s, and what the client library adds."""


@dataclass
class Scene:
    """Where the faults happen: a worker of the obedient app under load, behind a line.

    user        the worker's, and nobody else's
    settings    straight to the broker, as somebody else
    long        the ids of messages that are in hand while it happens
    declared    when queues were last made anew
    """

    broker: Broker
    vhost: str
    user: str
    settings: Settings
    line: Line
    namespace: Namespace | None
    worker: WorkerProcess
    load: Load
    runs: Runs
    long: list[str] = field(default_factory=list)
    declared: float = -math.inf

    async def in_hand(self, order: Order, kinds: Sequence[type[Consumer[Order]]] = KINDS) -> None:
        """A message like this in each kind of handler."""
        async with Publisher.open(self.settings) as publisher:
            ids = {await publisher.publish(kind, order) for kind in kinds}
        self.long += ids
        await eventually(lambda: ids <= {row["id"] for row in self.runs.all()})

    async def silent(self) -> None:
        """Past three heartbeats, and until the worker has noticed: it has no session any more."""
        await asyncio.sleep(SILENT)
        await eventually(
            lambda: (
                self.worker.log.rfind('"message": "connection lost')
                > self.worker.log.rfind('"message": "connected to RabbitMQ')
            ),
            within=30,
        )


class Fault(Protocol):
    """`strike` returns when it has had its effect, `mend` when nothing is wrong any more."""

    name: str
    loses_connection: bool = True

    def why_not(self, broker: Broker, namespace: Namespace | None) -> str:
        """Why it cannot be tried here; nothing where it can."""
        return ""

    @abstractmethod
    async def strike(self, scene: Scene) -> None: ...

    async def mend(self, scene: Scene) -> None:
        return None


class Closed(Fault):
    """An operator closes the worker's connections."""

    name = "connection closed"

    async def strike(self, scene: Scene) -> None:
        await eventually(
            lambda: asyncio.to_thread(scene.broker.close_connections, scene.user), within=30
        )


@dataclass(frozen=True)
class Gone(Fault):
    """The broker itself: stop, kill, or freeze, which lasts past three heartbeats."""

    verb: str
    back: str = "start"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"broker {self.verb}"

    def why_not(self, broker: Broker, namespace: Namespace | None) -> str:
        return "" if broker.can_be_hurt else "RABBIT_TASKS_TEST_BROKER is not set"

    async def strike(self, scene: Scene) -> None:
        if (
            self.verb == "kill"
        ):  # a quorum queue's first half second does not survive it (3.10 to 4.3)
            await asyncio.sleep(scene.declared + 2 - time.monotonic())
        await asyncio.to_thread(scene.broker.hurt, self.verb)
        if self.verb == "freeze":
            await scene.silent()

    async def mend(self, scene: Scene) -> None:
        await asyncio.to_thread(scene.broker.hurt, self.back)


class Silence(Fault):
    """Nothing passes between worker and broker, and nothing is closed."""

    name = "silent line"

    async def strike(self, scene: Scene) -> None:
        scene.line.silence()
        await scene.silent()

    async def mend(self, scene: Scene) -> None:
        scene.line.speak()


class Unplugged(Fault):
    """The same, by the kernel: packets are sent and nobody answers."""

    name = "cable unplugged"

    def why_not(self, broker: Broker, namespace: Namespace | None) -> str:
        return "" if namespace else "no network namespaces here"

    async def strike(self, scene: Scene) -> None:
        assert scene.namespace is not None
        scene.namespace.unplug()
        await scene.silent()

    async def mend(self, scene: Scene) -> None:
        assert scene.namespace is not None
        scene.namespace.plug()


class Deleted(Fault):
    """Two main queues are deleted, with what is in them, and declared again; the third goes on."""

    name = "queues deleted"
    loses_connection = False

    async def strike(self, scene: Scene) -> None:
        for kind in (Obey, ObeyInThread):
            try:
                await asyncio.to_thread(scene.broker.delete, scene.vhost, "queues", kind.queue)
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
        async with Publisher.open(scene.settings) as publisher:
            probe = await publisher.publish(ObeyInProcess, Order(seconds=0.5))
        await eventually(lambda: scene.runs.all("end", probe), within=60)

    async def mend(self, scene: Scene) -> None:
        await declare_by_hand(scene.settings.url)
        scene.declared = time.monotonic()
        scene.load.forget()


class TimedOut(Fault):
    """The broker waits too short for an ack: again and again while a message is in hand."""

    name = "consumer timeout"

    def why_not(self, broker: Broker, namespace: Namespace | None) -> str:
        if broker.version.startswith("3."):
            return "RabbitMQ 3 takes its consumer timeout from its configuration alone"
        return ""

    @staticmethod
    def _policy(scene: Scene) -> str:
        return f"/policies/{quote(scene.vhost, safe='')}/impatient"

    async def strike(self, scene: Scene) -> None:
        policy = {
            "pattern": "^obey", "definition": {"consumer-timeout": 1500}, "apply-to": "quorum_queues",
        }  # fmt: skip
        said = "acknowledgement on channel"
        before = scene.worker.log.count(said)
        await asyncio.to_thread(scene.broker.api, "PUT", self._policy(scene), policy)
        if not _times_out_soon(scene.broker):  # it looks once a minute
            await eventually(lambda: scene.worker.log.count(said) >= before + len(KINDS), 150)
            return
        await Closed().strike(scene)  # a consumer is given its time when it comes
        known = len(scene.long)
        await scene.in_hand(Order(seconds=4))
        for one in scene.long[known:]:
            lost = f"lost with message {one} in hand"
            await eventually(lambda lost=lost: lost in scene.worker.log, within=60)  # type: ignore[misc]

    async def mend(self, scene: Scene) -> None:
        await asyncio.to_thread(scene.broker.api, "DELETE", self._policy(scene))
        await Closed().strike(scene)


def _times_out_soon(broker: Broker) -> bool:
    major, minor = map(int, broker.version.split(".")[:2])
    return (major, minor) >= (4, 3)


def is_quick(fault: Fault, broker: Broker, namespace: Namespace | None) -> bool:
    """Whether it belongs to a tour that takes a minute: it is quick, and no other is much like it."""
    match fault:
        case TimedOut():
            return _times_out_soon(broker)
        case Silence():
            return namespace is None
        case Gone(verb="stop"):
            return False
    return True


FAULTS: tuple[Fault, ...] = (
    Closed(), Silence(), Unplugged(), Deleted(), TimedOut(), Gone("kill"), Gone("freeze", "thaw"),
    Gone("stop"),
)  # fmt: skip


async def declare_by_hand(url: str, app: str = "tests.support.obedient:app") -> None:
    """What the log says to type."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rabbit_tasks", "--app", app, "topology", "declare",
        cwd=ROOT, env={**os.environ, "RABBIT_TASKS_URL": url},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
