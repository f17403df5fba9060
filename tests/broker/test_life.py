"""The life of a delivery, in one process, on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy, Settings
from rabbit_tasks.broker import Connection
from rabbit_tasks.worker import Worker
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.queues import depth, take_all


async def running(app: App, settings: Settings) -> tuple[Worker, asyncio.Task[None]]:
    worker = Worker(app, settings)
    return worker, asyncio.create_task(worker.run())


async def test_a_failing_handler_is_tried_as_often_as_its_policy_says_and_then_parked(
    settings: Settings,
    connection: Connection,
    publisher: Publisher,
    declared: Callable[[App], Awaitable[None]],
) -> None:
    seen: list[int] = []

    class Fails(Consumer[dict[str, Any]]):
        queue = "fails"
        retry = RetryPolicy(attempts=3, base=timedelta(milliseconds=100), jitter=False)

        async def handle(self, body: dict[str, Any], message: Message) -> None:
            seen.append(message.attempt)
            raise ValueError("always")

    app = App("fails", [Fails()])
    await declared(app)
    worker, task = await running(app, settings)
    message_id = await publisher.publish(Fails, {"a": 1})
    await eventually(lambda: depth(connection, "fails.parked"))
    assert seen == [1, 2, 3]
    worker.stop()
    await task
    (parked,) = await take_all(connection, "fails.parked")
    assert parked.body == b'{"a":1}'
    assert parked.properties.text("message_id") == message_id
    headers = parked.properties.headers
    assert headers["x-error-type"] == "ValueError"
    assert headers["x-error-message"] == "always"
    assert headers["x-parked-reason"] == "failed 3 attempts of 3"
    assert [one["attempt"] for one in headers["x-attempts"]] == [1, 2, 3]
    assert "handle" in headers["x-error-stack"]


async def test_both_connections_of_a_worker_tell_which_app_and_topology_is_theirs(
    settings: Settings,
    declared: Callable[[App], Awaitable[None]],
    broker: Broker,
    vhost: str,
) -> None:
    class Waits(Consumer[dict[str, Any]]):
        queue = "waits"

        async def handle(self, body: dict[str, Any], message: Message) -> None: ...

    class Other(Waits):
        queue = "other"

    app = App("told", [Waits(), Other()])
    await declared(app)
    worker = Worker(app, settings, queues=["waits"])
    task = asyncio.create_task(worker.run())

    def told() -> list[tuple[Any, Any]]:
        rows = broker.api("GET", f"/vhosts/{quote(vhost, safe='')}/connections")
        properties = [row["client_properties"] for row in rows if "client_properties" in row]
        return [(one.get("app"), one.get("topology")) for one in properties]

    await eventually(lambda: told() == [("told", app.topology.digest)] * 2)
    worker.stop()
    await task
