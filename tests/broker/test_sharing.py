"""Slots that share a channel as long as their messages are quick, and part where one is not."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import ClassVar

import pytest

from rabbit_tasks import App, Consumer, Message, Publisher, RetryPolicy
from rabbit_tasks import consumer as consumers_module
from rabbit_tasks import intake as intake_module
from rabbit_tasks import worker as worker_module
from rabbit_tasks.broker import Connection
from tests.broker.test_ack_timeout import is_prompt
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.inprocess import Running
from tests.support.queues import consumers, depth

Declared = Callable[[App], Awaitable[None]]
Run = Callable[[App], Awaitable[Running]]
SLOTS = 4


class Mixed(Consumer[str]):
    """Handles what is quick at once, and what is not when it may."""

    queue = "mixed"
    concurrency = SLOTS
    ack_timeout: ClassVar[timedelta | None] = None

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.again: list[str] = []
        self.in_hand = self.most = 0
        self.done: set[str] = set()
        self.gates: dict[str, asyncio.Event] = {}

    async def handle(self, body: str, message: Message) -> None:
        self.runs[body] += 1
        if message.redelivered or "x-delivery-count" in message.headers:
            self.again.append(body)
        self.in_hand += 1
        self.most = max(self.most, self.in_hand)
        try:
            if body.startswith("slow"):
                gate = self.gates[body] = asyncio.Event()
                await gate.wait()
        finally:
            self.in_hand -= 1
        self.done.add(body)


@pytest.fixture
def mixed() -> Mixed:
    return Mixed()


@pytest.fixture
async def running(run: Run, mixed: Mixed) -> Running:
    return await run(App("mixed", [mixed]))


def channels(running: Running) -> list[int]:
    """Of those that deliver: with how many slots."""
    intakes = running.worker._intakes  # noqa: SLF001
    return sorted(one.slots for one in intakes if not one.is_over)


def comes_again(running: Running) -> bool:
    """Whether a redelivery is in hand."""
    intakes = running.worker._intakes  # noqa: SLF001
    return any(delivery.redelivered for one in intakes for delivery in one.in_hand.values())


async def _waiting(connection: Connection, count: int) -> bool:
    return await depth(connection, "mixed") == count


async def _consuming(connection: Connection, count: int) -> bool:
    return await consumers(connection, "mixed") == count


async def test_slots_share_a_channel_and_each_holds_one_message(
    running: Running, mixed: Mixed, publisher: Publisher, connection: Connection
) -> None:
    await publisher.publish_many(Mixed, [f"slow {number}" for number in range(SLOTS + 3)])
    await eventually(lambda: len(mixed.gates) == SLOTS)
    assert await consumers(connection, "mixed") == 1
    await eventually(lambda: _waiting(connection, 3))
    for number in range(SLOTS + 3):
        await eventually(lambda n=number: f"slow {n}" in mixed.gates)  # type: ignore[misc]
        mixed.gates[f"slow {number}"].set()
    await eventually(lambda: len(mixed.done) == SLOTS + 3)
    assert mixed.most == SLOTS
    assert set(mixed.runs.values()) == {1}


async def test_a_message_that_takes_its_time_is_left_behind_and_the_other_slots_go_on(
    running: Running, mixed: Mixed, publisher: Publisher, connection: Connection
) -> None:
    await publisher.publish_many(Mixed, ["slow", "slower"])
    await eventually(lambda: channels(running) == [SLOTS - 2])
    await publisher.publish_many(Mixed, [str(number) for number in range(50)])
    await eventually(lambda: len(mixed.done) == 50)
    mixed.gates["slow"].set()
    await eventually(lambda: channels(running) == [1, SLOTS - 2])
    mixed.gates["slower"].set()
    await eventually(lambda: channels(running) == [1, 1, SLOTS - 2])
    await eventually(lambda: _consuming(connection, 3))
    await publisher.publish_many(Mixed, [f"slow {number}" for number in range(SLOTS + 1)])
    await eventually(lambda: mixed.in_hand == SLOTS)
    await eventually(lambda: _waiting(connection, 1))
    assert mixed.most == SLOTS
    assert not mixed.again


async def test_slots_that_parted_share_a_channel_again_when_all_is_quick(
    monkeypatch: pytest.MonkeyPatch, run: Run, mixed: Mixed, publisher: Publisher,
    connection: Connection,
) -> None:  # fmt: skip
    for module in (intake_module, worker_module):
        monkeypatch.setattr(module, "CALM", 2.0)
    running = await run(App("mixed", [mixed]))
    await publisher.publish_many(Mixed, ["slow 1", "slow 2"])
    await eventually(lambda: channels(running) == [SLOTS - 2])
    for gate in mixed.gates.values():
        gate.set()
    await eventually(lambda: channels(running) == [SLOTS], within=20)
    await eventually(lambda: _consuming(connection, 1))
    await publisher.publish_many(Mixed, [f"slow {number}" for number in range(3, 3 + SLOTS)])
    await eventually(lambda: mixed.in_hand == SLOTS)
    assert not mixed.again


async def test_parting_in_the_midst_of_a_full_queue_costs_no_message_a_delivery(
    monkeypatch: pytest.MonkeyPatch, run: Run, mixed: Mixed, publisher: Publisher,
    connection: Connection,
) -> None:  # fmt: skip
    """And so does coming together again."""
    monkeypatch.setattr(intake_module, "LONG", 0.1)
    for module in (intake_module, worker_module):
        monkeypatch.setattr(module, "CALM", 0.5)
    running = await run(App("mixed", [mixed]))
    wanted: set[str] = set()
    for round_ in range(3):
        slow = f"slow {round_}"
        bodies = [slow, *(f"{round_}: {number}" for number in range(2_000))]
        wanted |= set(bodies)
        flow = asyncio.create_task(publisher.publish_many(Mixed, bodies, window=50))
        await eventually(
            lambda slow=slow: slow in mixed.gates and SLOTS not in channels(running)  # type: ignore[misc]
        )
        assert await depth(connection, "mixed") or not flow.done()
        mixed.gates[slow].set()
        await flow
        rest = [f"{round_}: rest {number}" for number in range(2_000)]
        wanted.update(rest)
        await publisher.publish_many(Mixed, rest)
        await eventually(lambda: channels(running) == [SLOTS])
    await eventually(lambda: len(mixed.done) == len(wanted))
    assert mixed.done == wanted
    assert not mixed.again
    assert set(mixed.runs.values()) == {1}
    assert await depth(connection, "mixed") == 0


async def test_a_handler_that_outlasts_the_brokers_patience_costs_no_other_message_a_delivery(
    monkeypatch: pytest.MonkeyPatch, run: Run, mixed: Mixed, publisher: Publisher,
    connection: Connection, broker: Broker,
) -> None:  # fmt: skip
    if not is_prompt(broker):
        pytest.skip("before 4.3 the shortest timeout that can be tested is a minute")
    monkeypatch.setattr(consumers_module, "MIN_ACK_TIMEOUT", timedelta())
    monkeypatch.setattr(Mixed, "ack_timeout", timedelta(seconds=4))
    running = await run(App("mixed", [mixed]))
    await publisher.publish(Mixed, "slow")
    await eventually(lambda: channels(running) == [SLOTS - 1])
    await publisher.publish_many(Mixed, ["slow 1", "slow 2"])
    await eventually(lambda: len(mixed.gates) == 3)
    await eventually(lambda: comes_again(running))
    mixed.gates["slow 1"].set()
    mixed.gates["slow 2"].set()
    await eventually(lambda: {"slow 1", "slow 2"} <= mixed.done)
    mixed.gates["slow"].set()
    await eventually(lambda: "slow" in mixed.done)
    await running.end()
    assert mixed.runs == {"slow": 1, "slow 1": 1, "slow 2": 1}
    assert not mixed.again
    assert await depth(connection, "mixed") == 0


async def test_parting_where_messages_keep_coming_costs_no_message_a_delivery(
    monkeypatch: pytest.MonkeyPatch, run: Run, publisher: Publisher
) -> None:
    """The queue is neither full nor ever quiet: something is always on its way. And of many acks at once
    the broker loses some, where their channel is closed behind them (4.3.6)."""
    monkeypatch.setattr(intake_module, "LONG", 0.1)
    for module in (intake_module, worker_module):
        monkeypatch.setattr(module, "CALM", 0.4)
    monkeypatch.setattr(Mixed, "concurrency", 60)
    mixed = Mixed()
    running = await run(App("mixed", [mixed]))
    counter = itertools.count()
    for number in range(4):
        await publisher.publish(Mixed, f"slow {number}")
        while channels(running) == [60] or f"slow {number}" not in mixed.gates:
            await publisher.publish(Mixed, f"{number}: {next(counter)}")
            await asyncio.sleep(0.004)
        mixed.gates[f"slow {number}"].set()
        while channels(running) != [60]:
            await publisher.publish(Mixed, f"{number}: {next(counter)}")
            await asyncio.sleep(0.004)
    assert not mixed.again
    assert set(mixed.runs.values()) == {1}


async def test_what_a_slow_handler_has_in_its_context_reaches_no_later_message(
    run: Run, publisher: Publisher
) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    begun: list[str] = []

    class Tenants(Mixed):
        async def handle(self, body: str, message: Message) -> None:
            begun.append(tenant.get("nobody's"))
            tenant.set(body)
            await super().handle(body, message)

    tenants = Tenants()
    seen: list[str] = []
    app = App("mixed", [tenants], observers=[lambda _: seen.append(tenant.get("nobody's"))])
    running = await run(app)
    await publisher.publish(Tenants, "slow")
    await eventually(lambda: channels(running) == [SLOTS - 1])
    tenants.gates["slow"].set()
    await eventually(lambda: channels(running) == [1, SLOTS - 1])
    await publisher.publish_many(Tenants, [str(number) for number in range(20)])
    await eventually(lambda: len(tenants.done) == len(seen) == 21)
    assert set(begun) == {"nobody's"}
    assert set(seen) == {"nobody's"}


async def test_a_worker_works_whatever_factory_of_tasks_its_loop_has(
    run: Run, publisher: Publisher, connection: Connection
) -> None:
    class Fails(Consumer[str]):
        queue = "mixed"
        concurrency = SLOTS
        retry = RetryPolicy(delays=(timedelta(milliseconds=100),))

        def __init__(self) -> None:
            self.done: list[str] = []

        async def handle(self, body: str, message: Message) -> None:
            if message.attempt == 1:
                raise ValueError("at once")
            self.done.append(body)

    loop = asyncio.get_running_loop()
    eager = getattr(asyncio, "eager_task_factory", None)  # from 3.12 on
    loop.set_task_factory(eager or (lambda loop, work, **how: asyncio.Task(work, loop=loop, **how)))
    try:
        fails = Fails()
        await run(App("mixed", [fails]))
        wanted = [str(number) for number in range(200)]
        await publisher.publish_many(Fails, wanted)
        await eventually(lambda: len(fails.done) == len(wanted))
        assert sorted(fails.done) == sorted(wanted)
        assert await depth(connection, "mixed.parked") == 0
    finally:
        loop.set_task_factory(None)


async def test_slots_that_part_keep_no_bodies_of_messages_that_are_through(
    monkeypatch: pytest.MonkeyPatch, run: Run, mixed: Mixed, publisher: Publisher
) -> None:
    monkeypatch.setattr(intake_module, "IN_DOUBT", 0.2)
    running = await run(App("mixed", [mixed]))
    await publisher.publish_many(Mixed, [*map(str, range(20)), "slow"])
    await eventually(lambda: channels(running) == [SLOTS - 1])
    (left,) = (one for one in running.worker._intakes if one.has_parted)  # noqa: SLF001
    await eventually(lambda: not left._answered)  # noqa: SLF001
    mixed.gates["slow"].set()
    await eventually(lambda: channels(running) == [1, SLOTS - 1])
