"""Sessions and their end: one worker, in the test's own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from rabbit_tasks import (
    App,
    ConfigurationError,
    Consumer,
    Message,
    Publisher,
    RetryPolicy,
    Settings,
)
from rabbit_tasks.broker import Connection
from rabbit_tasks.declare import declare
from rabbit_tasks.errors import PublishError
from rabbit_tasks.worker import Worker
from tests.conftest import PASSWORD, eventually
from tests.support.brokers import Broker
from tests.support.inprocess import Running
from tests.support.line import line
from tests.support.queues import depth, take_all

Declared = Callable[[App], Awaitable[None]]
Run = Callable[[App], Awaitable[Running]]


class Deaf(Consumer[dict[str, Any]]):
    """Swallows the first cancellation."""

    queue = "deaf"

    def __init__(self) -> None:
        self.started = asyncio.Event()

    async def handle(self, body: dict[str, Any], message: Message) -> None:
        self.started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)


async def test_a_handler_that_resists_its_cancellation_is_put_back_once(
    settings: Settings, connection: Connection, publisher: Publisher, declared: Declared
) -> None:
    deaf = Deaf()
    app = App("deaf", [deaf])
    await declared(app)
    worker = Worker(app, settings.changed(grace=timedelta(milliseconds=100)))
    task = asyncio.create_task(worker.run())
    await publisher.publish(Deaf, {})
    await asyncio.wait_for(deaf.started.wait(), 30)
    worker.stop()
    await asyncio.wait_for(task, 30)
    (back,) = await take_all(connection, "deaf")
    assert back.properties.header("x-delivery-count") in (None, 0)


async def test_more_slots_than_the_broker_has_channels_are_refused_at_the_start(
    settings: Settings, declared: Declared
) -> None:
    class Wide(Consumer[bytes]):
        queue = "wide.1"
        concurrency = 1000

        async def handle(self, body: bytes, message: Message) -> None: ...

    class Wider(Wide):
        queue = "wide.2"

    class Widest(Wide):
        queue = "wide.3"

    app = App("wide", [Wide(), Wider(), Widest()])
    await declared(app)
    with pytest.raises(ConfigurationError, match=r"3000 slots .* 2047 .*channel_max"):
        await Worker(app, settings).run()


async def test_a_queue_missing_after_a_reconnect_stops_its_own_consumer_only(
    connection: Connection, publisher: Publisher, broker: Broker, vhost: str, user: str,
    declared: Declared, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    done: list[str] = []

    class One(Consumer[dict[str, Any]]):
        queue = "one"

        async def handle(self, body: dict[str, Any], message: Message) -> None:
            done.append(message.queue)

    class Other(One):
        queue = "other"

    app = App("two", [One(), Other()])
    await declared(app)
    running = Running(app, Settings(url=broker.url(vhost, user, PASSWORD)))
    for kind in (One, Other):
        await publisher.publish(kind, {})
    await eventually(lambda: sorted(done) == ["one", "other"])
    channel = await connection.open()
    await channel.queue_delete("other.retry.1.1s")
    await channel.queue_delete("other")
    await channel.close()

    await eventually(lambda: asyncio.to_thread(broker.close_connections, user))
    await eventually(lambda: "other: not consuming" in caplog.text)
    await publisher.publish(One, {})
    await eventually(lambda: done.count("one") == 2)
    await running.end()


async def test_a_permission_missing_after_a_reconnect_stops_its_own_consumer_only(
    publisher: Publisher, broker: Broker, vhost: str, user: str, declared: Declared,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    done: list[str] = []

    class Open(Consumer[dict[str, Any]]):
        queue = "open"

        async def handle(self, body: dict[str, Any], message: Message) -> None:
            done.append(message.queue)

    class Shut(Open):
        queue = "shut"

    app = App("two", [Open(), Shut()])
    await declared(app)
    running = Running(app, Settings(url=broker.url(vhost, user, PASSWORD)))
    for kind in (Open, Shut):
        await publisher.publish(kind, {})
    await eventually(lambda: sorted(done) == ["open", "shut"])
    broker.allow(vhost, user, read="^open")
    await eventually(lambda: asyncio.to_thread(broker.close_connections, user))
    await eventually(lambda: "shut: not consuming" in caplog.text)
    assert "ACCESS_REFUSED" in caplog.text
    assert f"allow it: rabbitmqctl set_permissions -p {vhost} '{user}'" in caplog.text
    for kind in (Shut, Open):
        await publisher.publish(kind, {})
    await eventually(lambda: done.count("open") == 2)
    broker.allow(vhost, user)
    await eventually(lambda: done.count("shut") == 2)
    await running.end()


async def test_twenty_slots_that_hold_copies_for_one_reason_say_so_five_times_and_once_at_the_end(
    connection: Connection, publisher: Publisher, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rabbit_tasks")

    class Wide(Consumer[dict[str, Any]]):
        queue = "wide"
        concurrency = 20
        retry = RetryPolicy(delays=(timedelta(milliseconds=100),))

        def __init__(self) -> None:
            self.attempts: list[int] = []

        async def handle(self, body: dict[str, Any], message: Message) -> None:
            self.attempts.append(message.attempt)
            if message.attempt == 1:
                raise ValueError

    wide = Wide()
    running = await run(App("wide", [wide]))
    await eventually(lambda: "connected to RabbitMQ" in caplog.text)
    channel = await connection.open()
    await channel.queue_delete("wide.retry.1.100ms")
    for _ in range(20):
        await publisher.publish(Wide, {})
    await eventually(lambda: len(wide.attempts) == 20)
    await asyncio.sleep(2)  # three or four tries of each
    assert caplog.text.count("is held, its copy was not taken") == 5
    await declare(connection, App("wide", [wide]).topology)
    await eventually(lambda: wide.attempts.count(2) == 20)
    assert caplog.text.count("is held no more") == 1
    await running.end()


async def test_a_closed_publisher_publishes_no_more_and_opens_nothing(
    settings: Settings, connection: Connection, declared: Declared
) -> None:
    await declared(App("deaf", [Deaf()]))
    async with Publisher.open(settings) as publisher:
        late = [asyncio.create_task(publisher.publish(Deaf, {"i": i})) for i in range(300)]
        await asyncio.sleep(0)
    ended = await asyncio.gather(*late, return_exceptions=True)
    confirmed = [one for one in ended if isinstance(one, str)]
    assert await depth(connection, "deaf") == len(confirmed)
    with pytest.raises(PublishError, match="closed") as refused:
        await publisher.publish(Deaf, {})
    assert not refused.value.maybe_stored


async def test_what_is_settled_is_not_told_to_be_delivered_again_where_the_broker_hangs(
    settings: Settings, publisher: Publisher, broker: Broker, vhost: str, declared: Declared,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its slot is still there at the end: the broker does not answer its cancel."""
    settled = asyncio.Event()

    class Quick(Consumer[dict[str, Any]]):
        queue = "quick"

        async def handle(self, body: dict[str, Any], message: Message) -> None: ...

    app = App("quick", [Quick()], observers=[lambda _: settled.set()])
    await declared(app)
    async with line(broker) as network:
        worker = Worker(app, settings.changed(url=network.url(vhost), grace=1))
        task = asyncio.create_task(worker.run())
        await publisher.publish(Quick, {})
        await asyncio.wait_for(settled.wait(), 30)
        network.silence()
        worker.stop()
        await asyncio.wait_for(task, 30)
    assert "neither settled nor put back" not in caplog.text


@pytest.mark.parametrize("held", [1, 4])
async def test_workers_that_stop_in_the_midst_of_a_full_queue_cost_no_message_a_delivery(
    held: int, settings: Settings, publisher: Publisher, declared: Declared
) -> None:
    """What is on its way to a consumer when that is cancelled would come again, as after a death."""
    handled: list[bool] = []

    class Quick(Consumer[int]):
        queue = "quick"
        concurrency = 16
        prefetch = held
        retry = RetryPolicy(attempts=1)

        async def handle(self, body: int, message: Message) -> None:
            handled.append(message.redelivered)

    app = App("quick", [Quick()])
    await declared(app)
    await publisher.publish_many(Quick, range(3000))
    for _ in range(3):
        before = len(handled)
        running = Running(app, settings)
        await eventually(lambda n=before: len(handled) > n + 200)  # type: ignore[misc]
        await running.end()
    assert len(handled) < 3000, "it was not stopped in the midst"
    running = Running(app, settings)
    await eventually(lambda: len(handled) >= 3000, within=30)
    await running.end()
    assert len(handled) == 3000
    assert not any(handled)
