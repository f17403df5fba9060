"""A redelivery joins the run of its lost twin; and messages that are alike are each settled once."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from rabbit_tasks import Consumer, Done, Message, RetryPolicy
from rabbit_tasks import message as names
from rabbit_tasks.deliveries import Deliveries
from rabbit_tasks.delivery import Delivery, DeliveryLost, Handling
from rabbit_tasks.observer import Settled
from rabbit_tasks.properties import Properties
from rabbit_tasks.publisher import Publisher
from tests.conftest import eventually

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Line:
    """What acks go over, and a publisher, that note what comes over them."""

    frame_max: int = 131_072
    is_open: bool = True
    acked: list[int] = field(default_factory=list)
    breaks: bool = False
    """The connection goes with the next ack, which the broker may have all the same."""
    copies: list[tuple[str, Properties]] = field(default_factory=list)

    def ack(self, tag: int) -> None:
        self.acked.append(tag)
        if self.breaks:
            self.breaks = False
            raise ConnectionResetError

    async def connect(self) -> Line:
        return self

    async def send(self, exchange: str, key: str, body: bytes, copy: Properties) -> None:
        self.copies.append((key, copy))


class Asks(Consumer[bytes]):
    """Each run waits until it is told how it ends."""

    queue = "asks"
    retry = RetryPolicy(attempts=3, jitter=False)
    concurrency = 4

    def __init__(self) -> None:
        self.runs: list[asyncio.Future[None]] = []

    async def handle(self, body: bytes, message: Message) -> None:
        self.runs.append(asyncio.get_running_loop().create_future())
        await self.runs[-1]


class Process:
    """A worker's process, of which the connection is lost as often as one likes."""

    def __init__(self) -> None:
        self.line = Line()
        self.asks = Asks()
        self.told: list[Settled] = []
        self.handling = Handling(
            self.asks, publisher=cast(Publisher, self.line), observers=(self.told.append,)
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._hands: list[Delivery] = []

    @property
    def runs(self) -> list[asyncio.Future[None]]:
        return self.asks.runs

    async def deliver(
        self, tag: int, *, again: bool = False, headers: dict[str, Any] | None = None, **how: Any
    ) -> None:
        """Into the hands of a slot; returns when the handler runs or the message is settled."""
        values = {"message_id": "customer-42", "timestamp": WHEN, **how}
        properties = Properties.of(headers, **{k: v for k, v in values.items() if v is not None})
        delivery = Delivery(
            b"refresh",
            properties,
            redelivered=again,
            tag=tag,
            deliveries=cast(Deliveries, self.line),
        )
        self._hands.append(delivery)
        self._tasks.append(asyncio.create_task(self.handling.process(delivery)))
        for _ in range(20):
            await asyncio.sleep(0)

    def lose(self) -> None:
        """What is in a slot's hands, and be it acked, is noted as lost."""
        for delivery in self._hands:
            self.handling.runs.orphan(delivery)
        self._hands.clear()

    def lose_one(self) -> None:
        """The one that has been in hand for the longest time."""
        self.handling.runs.orphan(self._hands.pop(0))

    async def end(self, run: int, error: BaseException | None = None) -> None:
        if error is None:
            self.runs[run].set_result(None)
        else:
            self.runs[run].set_exception(error)
        for _ in range(20):
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self.handling.stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def all_through(self) -> None:
        await eventually(lambda: all(task.done() for task in self._tasks))
        for task in self._tasks:
            error = task.exception()
            assert error is None or isinstance(error, DeliveryLost)


@pytest.fixture
def process() -> Process:
    return Process()


async def test_a_redelivery_joins_the_run_that_goes_on(process: Process) -> None:
    await process.deliver(1)
    for tag in (2, 3):
        process.lose()
        await process.deliver(tag, again=True)
    await process.end(0)
    await process.all_through()
    assert len(process.runs) == 1
    assert process.line.acked == [3]


async def test_a_copy_that_another_worker_put_back_joins_the_run_that_goes_on(
    process: Process,
) -> None:
    """Which lost its connection: the other had the redelivery in hand when it was asked to stop."""
    await process.deliver(1)
    process.lose()
    other = Process()
    await other.deliver(1, again=True)
    await other.stop()
    ((key, copy),) = other.line.copies
    assert key == "asks"
    await process.deliver(2, headers=copy.headers)
    assert len(process.runs) == 1
    await process.end(0)
    await process.all_through()
    assert len(process.runs) == 1
    assert process.line.acked == [2]


async def test_a_redelivery_that_comes_before_word_of_the_loss_joins_all_the_same(
    process: Process,
) -> None:
    """The broker takes a message from one slot and gives it to another, which hears of it first."""
    await process.deliver(1)
    await process.deliver(2, again=True)
    assert len(process.runs) == 1
    process.lose_one()
    await process.end(0)
    await process.all_through()
    assert len(process.runs) == 1
    assert process.line.acked == [2]


async def test_a_redelivery_that_is_like_one_in_hand_is_run_after_it(process: Process) -> None:
    await process.deliver(1)
    await process.deliver(2, again=True)
    await process.end(0)
    assert process.line.acked == [1]
    assert len(process.runs) == 2
    await process.end(1)
    await process.all_through()
    assert process.line.acked == [1, 2]


async def test_a_redelivery_does_not_wait_for_alike_ones_that_come_after_it(
    process: Process,
) -> None:
    """In a queue full of messages that are alike its slot would stall."""
    await process.deliver(1)
    await process.deliver(2, again=True)
    await process.deliver(3)
    assert len(process.runs) == 2
    await process.end(0)
    assert len(process.runs) == 3
    for run in (1, 2):
        await process.end(run)
    await process.all_through()


async def test_a_redelivery_joins_the_lost_run_though_one_like_it_is_still_in_hand(
    process: Process,
) -> None:
    await process.deliver(1)
    await process.deliver(2)
    await process.deliver(3, again=True)
    process.lose_one()
    await process.end(0)
    assert process.line.acked == [3]
    await process.end(1)
    await process.all_through()
    assert len(process.runs) == 2


async def test_copies_that_waited_for_a_run_are_not_run_beside_it_or_each_other(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was lost after the first one's confirm, before the original's ack."""
    monkeypatch.setattr(Asks, "delivery_limit", 3)
    await process.deliver(1)
    process.lose()
    process.line.breaks = True
    for tag in (2, 3):
        await process.deliver(tag, again=True, headers={"x-delivery-count": tag})
    (_, one), (_, another) = process.line.copies
    for tag, copy in ((4, one), (5, another)):
        await process.deliver(tag, headers=copy.headers)
    assert len(process.runs) == 1
    await process.end(0)
    assert process.line.acked == [2, 3, 4]
    assert len(process.runs) == 2
    await process.end(1)
    await process.all_through()
    assert process.line.acked == [2, 3, 4, 5]


async def test_deaths_that_others_have_counted_are_none_where_the_run_goes_on(
    process: Process,
) -> None:
    """Its connection was lost, and whoever got the message next took this worker for dead."""
    await process.deliver(1)
    process.lose()
    await process.deliver(2, headers={names.CRASHES: {"count": 3}})
    ((key, copy),) = process.line.copies
    assert key.startswith("asks.crashed.")
    assert names.crashes(copy) == 0
    await process.deliver(3, headers=copy.headers)
    await process.end(0)
    await process.all_through()
    assert len(process.runs) == len(process.line.copies) == 1
    assert process.line.acked == [2, 3]


async def test_a_message_that_was_replayed_is_run_though_the_outcome_of_its_life_before_waits(
    process: Process,
) -> None:
    await process.deliver(1)
    process.lose()
    await process.end(0, ValueError())
    await process.deliver(2, again=True, headers={names.REPLAYED: {"count": 1}})
    assert len(process.runs) == 2
    await process.end(1)
    await process.all_through()
    assert process.line.acked == [2]


async def test_a_redelivery_takes_the_outcome_of_the_run_that_has_ended(process: Process) -> None:
    await process.deliver(1)
    process.lose()
    await process.end(0, ValueError())
    assert process.line.copies == []
    await process.deliver(2, again=True)
    await process.all_through()
    assert len(process.runs) == 1
    assert [key for key, _ in process.line.copies] == ["asks.retry.1.1s"]
    assert process.line.acked == [2]


async def test_a_message_whose_ack_was_lost_is_not_run_again_nor_told_again(
    process: Process,
) -> None:
    await process.deliver(1)
    await process.end(0)
    process.lose()
    await process.deliver(2, again=True, headers={"x-delivery-count": 1})
    await process.all_through()
    assert len(process.runs) == 1
    assert process.line.acked == [1, 2]
    assert [settled.outcome for settled in process.told] == [Done()]


async def test_a_run_that_goes_on_is_joined_however_long_ago_it_was_lost(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rabbit_tasks.delivery.ORPHANS_KEPT", 0.0)
    await process.deliver(1)
    process.lose()
    await process.deliver(2, message_id="another")
    process.lose()
    await process.deliver(3, again=True)
    for run in (0, 1):
        await process.end(run)
    await process.all_through()
    assert len(process.runs) == 2
    assert process.line.acked == [3]


@pytest.mark.parametrize("ends", [(None, None), (None, ValueError()), (ValueError(), None)])
async def test_two_messages_that_are_alike_and_lost_at_once_are_each_settled_once(
    process: Process, ends: tuple[BaseException | None, ...]
) -> None:
    await process.deliver(1)
    await process.deliver(2)
    process.lose()
    await process.deliver(3, again=True)
    await process.deliver(4, again=True)
    for run, error in enumerate(ends):
        await process.end(run, error)
    await process.all_through()
    assert len(process.runs) == 2
    assert sorted(process.line.acked) == [3, 4]
    assert len(process.line.copies) == sum(error is not None for error in ends)


async def test_a_message_is_not_settled_by_the_run_of_one_that_was_like_it_and_is_acked(
    process: Process,
) -> None:
    """The one that was acked is not delivered again: the redelivery is of the one that still runs."""
    await process.deliver(1)
    await process.deliver(2)
    await process.end(0)
    process.lose()
    await process.deliver(3, again=True)
    assert process.line.acked == [1]
    await process.end(1, ValueError())
    await process.all_through()
    assert len(process.runs) == 2
    assert process.line.acked == [1, 3]
    assert [key for key, _ in process.line.copies] == ["asks.retry.1.1s"]


async def test_a_message_from_elsewhere_is_run_though_one_like_it_was_acked_here(
    process: Process,
) -> None:
    """Its id is its customer's, it does not say when it was published, and its worker died."""
    await process.deliver(1, timestamp=None)
    await process.end(0)
    process.lose()
    await process.deliver(2, again=True, timestamp=None)
    assert len(process.runs) == 2
    await process.end(1)
    await process.all_through()
    assert process.line.acked == [1, 2]


async def test_one_published_in_another_second_is_another_message(process: Process) -> None:
    await process.deliver(1)
    process.lose()
    await process.deliver(2, again=True, timestamp=datetime(2026, 1, 2, tzinfo=UTC))
    assert len(process.runs) == 2
    for run in range(2):
        await process.end(run)
    await process.all_through()


async def test_an_ack_of_long_ago_is_in_no_doubt(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rabbit_tasks.delivery.IN_DOUBT", 0.0)
    await process.deliver(1)
    await process.end(0)
    process.lose()
    await process.deliver(2, again=True)
    assert len(process.runs) == 2
    await process.end(1)
    await process.all_through()


async def test_a_run_that_waits_for_its_redelivery_holds_on_to_nothing_of_its_handler(
    process: Process,
) -> None:
    """The frames of its error lead to the message, the channel and the connection that was lost."""
    error = ValueError()
    await process.deliver(1)
    process.lose()
    await process.end(0, error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert len(frames) > 1
    assert not any(frame.f_locals for frame in frames)
    await process.deliver(2, again=True)
    await process.all_through()
    assert len(process.line.copies) == 1


@pytest.mark.parametrize(
    ("breaks", "words"),
    [(False, "put back\n"), (True, "put back, and not acked (its channel was closed): the broker")],
)
async def test_what_is_put_back_is_told_as_it_is(
    process: Process, caplog: pytest.LogCaptureFixture, breaks: bool, words: str
) -> None:
    caplog.set_level("INFO", "rabbit_tasks")
    process.line.breaks = breaks
    await process.deliver(1)
    await process.stop()
    assert [key for key, _ in process.line.copies] == ["asks"]
    assert f"message customer-42 {words}" in caplog.text


async def test_a_message_without_an_id_joins_nothing(process: Process) -> None:
    await process.deliver(1, message_id=None)
    process.lose()
    await process.deliver(2, again=True, message_id=None)
    assert len(process.runs) == 2
    for run in range(2):
        await process.end(run)
    await process.all_through()
    assert process.line.acked == [2]


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("again", [False, True])
async def test_a_copy_that_waited_because_workers_died_is_not_settled_by_its_original(
    process: Process, again: bool, breaks: bool
) -> None:
    """Its original was copied and acked; then the connection was lost, and the copy came home."""
    process.line.breaks = breaks
    await process.deliver(1, again=True, headers={"x-delivery-count": 2})
    await process.all_through()
    ((key, copy),) = process.line.copies
    assert key.startswith("asks.crashed.")
    assert process.runs == []
    process.lose()
    known = copy.header(names.CRASHES)
    await process.deliver(2, again=again, headers={names.CRASHES: known, **copy.headers})
    # It is run; or where it comes again at once, it was one more death, and it waits once more.
    assert (len(process.runs), len(process.line.copies)) == ((0, 2) if again else (1, 1))
    if not again:
        await process.end(0)
    await process.all_through()
    assert process.line.acked == [1, 2]
