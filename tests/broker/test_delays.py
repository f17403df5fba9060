"""Delays are kept, whatever waits beside; and what is one message and what are two."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from rabbit_tasks import App, Consumer, Message, Park, Publisher, RetryAfter, RetryPolicy, parking
from rabbit_tasks.broker import Connection
from rabbit_tasks.observer import Settled
from tests.conftest import eventually
from tests.support.inprocess import Running
from tests.support.pace import pace
from tests.support.queues import depth
from tests.support.wire import properties, short

Run = Callable[[App], Awaitable[Running]]


async def test_a_hundred_messages_with_mixed_delays_return_within_150_ms_of_their_own(
    run: Run, connection: Connection, publisher: Publisher
) -> None:
    """Beside what is late on this machine without us."""
    failed: dict[str, float] = {}
    settled: dict[str, tuple[float, timedelta]] = {}
    back: dict[str, float] = {}

    class Mixed(Consumer[int]):
        queue = "mixed"
        retry = RetryPolicy(
            attempts=2, base=timedelta(seconds=2), cap=timedelta(seconds=2), spread=8
        )
        concurrency = 20

        async def handle(self, body: int, message: Message) -> None:
            if message.attempt == 2:
                back[str(message.id)] = time.monotonic()
                return
            failed[str(message.id)] = time.monotonic()
            raise ValueError("once")

    class Slow(Consumer[int]):
        """Ten messages that wait a minute, beside the others."""

        queue = "slow"
        retry = RetryPolicy(delays=(timedelta(minutes=1),))

        async def handle(self, body: int, message: Message) -> None:
            raise ValueError("once")

    def observe(what: Settled) -> None:
        if isinstance(what.outcome, RetryAfter):
            settled[str(what.message.id)] = time.monotonic(), what.outcome.delay

    await run(App("mixed", [Mixed(), Slow()], observers=[observe]))
    await publisher.publish_many(Slow, range(10))
    async with pace(connection) as machine:
        await publisher.publish_many(Mixed, range(100))
        await eventually(lambda: len(back) == 100)
    assert len({settled[one][1] for one in back}) >= 4, "the draw is among eight"
    early = [back[one] - failed[one] - settled[one][1].total_seconds() for one in back]
    late = [back[one] - settled[one][0] - settled[one][1].total_seconds() for one in back]
    assert min(early) >= 0
    assert machine.worst > 0
    assert (
        max(late) < 0.15 + 5 * machine.worst
    )  # (a hundred, of which it does not take all at once)


async def test_different_messages_with_one_id_all_run_and_all_fail_for_themselves(
    run: Run, connection: Connection, publisher: Publisher
) -> None:
    seen: Counter[tuple[int, int]] = Counter()

    class Twins(Consumer[int]):
        queue = "twins"
        retry = RetryPolicy(attempts=3, base=timedelta(milliseconds=100), jitter=False)
        concurrency = 5

        async def handle(self, body: int, message: Message) -> None:
            seen[body, message.attempt] += 1
            if body % 2:
                raise ValueError("odd")

    await run(App("twins", [Twins()]))
    for i in range(20):
        await publisher.publish(Twins, i, message_id="one id")
    await eventually(lambda: _holds(connection, "twins.parked", 10))
    assert seen == {
        (i, attempt): 1 for i in range(20) for attempt in ((1, 2, 3) if i % 2 else (1,))
    }


async def test_messages_that_are_the_same_in_every_byte_are_all_handled(
    run: Run, connection: Connection, publisher: Publisher
) -> None:
    runs: list[int] = []

    class Same(Consumer[bytes]):
        queue = "same"
        retry = RetryPolicy(attempts=2, base=timedelta(milliseconds=100), jitter=False)
        concurrency = 5

        async def handle(self, body: bytes, message: Message) -> None:
            runs.append(message.attempt)
            raise ValueError("always")

    await run(App("same", [Same()]))
    for _ in range(20):
        await publisher.send("", "same", b"same", properties(message_id=short("same")))
    await eventually(lambda: _holds(connection, "same.parked", 20))
    assert Counter(runs) == {1: 20, 2: 20}


async def test_a_message_that_expires_before_it_is_taken_is_parked_and_can_be_replayed(
    declared: Callable[[App], Awaitable[None]],
    run: Run,
    connection: Connection,
    publisher: Publisher,
) -> None:
    done: list[Any] = []

    class Late(Consumer[str]):
        queue = "late"

        async def handle(self, body: str, message: Message) -> None:
            done.append(body)

    app = App("late", [Late()])
    await declared(app)
    await publisher.publish(Late, "hurry", expiration="50")
    await eventually(lambda: _holds(connection, "late.parked", 1))
    (one,) = [message async for message in parking.browse(connection, "late")]
    assert "expired" in one.reason
    await run(app)
    assert (await parking.replay(connection, publisher, "late", lambda _: True)).to == {"late": 1}
    await eventually(lambda: done == ["hurry"])
    assert await depth(connection, "late.parked") == 0


async def test_a_publishers_time_limit_does_not_take_its_message_out_of_the_parking_lot(
    run: Run, connection: Connection, publisher: Publisher
) -> None:
    class Parks(Consumer[str]):
        queue = "limited"

        async def handle(self, body: str, message: Message) -> None:
            raise Park("told to")

    await run(App("limited", [Parks()]))
    await publisher.publish(Parks, "hurry", expiration="60000")
    await eventually(lambda: _holds(connection, "limited.parked", 1))
    (one,) = [message async for message in parking.browse(connection, "limited")]
    assert one.properties.text("expiration") is None


async def _holds(connection: Connection, queue: str, count: int) -> bool:
    return await depth(connection, queue) == count
