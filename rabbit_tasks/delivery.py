"""The life of one delivery: attempt, settle, ack.

This is the page to read. A delivery comes in, the handler is tried once, what came of it is brought
to the broker, and only then is the delivery acked:

    process     attempt → settle → ack
    attempt     decode and handle; an exception becomes an outcome
    settle      carry the outcome out: a confirmed copy in a retry queue or in the parking lot

A worker that dies in between is noticed by the broker, which delivers again: before the confirm
nothing has happened, after it the message is there twice, once as a copy. The other order would
lose it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import tenacity
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from rabbit_tasks import consumer as consumers
from rabbit_tasks import history
from rabbit_tasks.broker import LOST, Publisher, is_cancelled
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.durations import duration_text
from rabbit_tasks.errors import ConnectError, PublishError
from rabbit_tasks.frames import properties_of
from rabbit_tasks.handler import Handler
from rabbit_tasks.isolation import Children
from rabbit_tasks.message import Message
from rabbit_tasks.observer import Observer, Settled
from rabbit_tasks.properties import Properties
from rabbit_tasks.retry import Done, Outcome, Parked, RetryAfter
from rabbit_tasks.text import one_line
from rabbit_tasks.topology import PARKING_LOT, retry_queue

log = logging.getLogger("rabbit_tasks")

PUT_BACK_TIMEOUT: Final = 5.0
"""Seconds for putting a message back at shutdown; over it, the broker requeues it by itself."""
ORPHANS_KEPT: Final = 600.0
"""Seconds that the outcome of a run whose delivery was lost waits for the redelivery."""


class DeliveryLost(Exception):
    """The delivery is no longer ours: its channel or connection is gone, or its consumer cancelled."""

    def __init__(self) -> None:
        super().__init__("its channel was closed")


class Stopping(Exception):
    """The worker must go while a copy is still being tried."""


class Delivery:
    """One arrival of a message on a channel: what is acked."""

    __slots__ = ("_channel", "_tag", "body", "lost", "properties", "redelivered", "run", "settling")

    def __init__(
        self,
        body: bytes,
        properties: Properties,
        *,
        redelivered: bool = False,
        channel: Channel | None = None,
        tag: int = 0,
    ) -> None:
        self.body = body
        self.properties = properties
        self.redelivered = redelivered
        self.run: Run | None = None
        self.settling = False
        """The handler is through and its outcome is on its way: not to be cancelled."""
        self.lost = False
        """The broker has it again. An ack would fail, or on 4.3.0 to 4.3.6, for a consumer that was
        cancelled, make the broker deliver to nobody."""
        self._channel = channel
        self._tag = tag

    @classmethod
    def of(cls, message: DeliveredMessage) -> Delivery:
        """The delivery that the client library hands over."""
        assert isinstance(message.channel, Channel)
        return cls(
            message.body,
            properties_of(message),
            redelivered=message.redelivered or False,
            channel=message.channel,
            tag=message.delivery_tag or 0,
        )

    async def ack(self) -> None:
        """Done with: the broker forgets it. DeliveryLost where the broker has it again."""
        with self._answering() as channel:
            await channel.basic_ack(self._tag, wait=False)

    async def reject(self) -> None:
        """Let the broker itself dead-letter it to the parking lot."""
        with self._answering() as channel:
            await channel.basic_reject(self._tag, requeue=False, wait=False)

    @contextmanager
    def _answering(self) -> Iterator[Channel]:
        if self.lost or self._channel is None:
            raise DeliveryLost
        try:
            yield self._channel
        except LOST as error:
            self.lost = True
            raise DeliveryLost from error


class Run:
    """One run of a handler in this process: usually of one delivery, of two where one was lost."""

    __slots__ = ("copied", "failure", "free", "lost_at", "outcome", "owned", "seconds", "when")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.failure: history.Failure | None = None
        self.copied = False
        self.owned = False
        """A delivery is being processed by it now."""
        self.free: asyncio.Future[None] | None = None
        self.when = 0.0
        self.seconds = 0.0
        self.lost_at = 0.0


class Runs:
    """The runs whose deliveries were lost, until their messages are redelivered.

    A connection lost in mid-handler must not run the handler twice at once: the redelivery joins
    the run that is going on, or takes the outcome that is there.
    """

    def __init__(self) -> None:
        self._orphans: dict[bytes, deque[Run]] = {}

    def orphan(self, delivery: Delivery) -> None:
        """The delivery in hand is lost; its run waits for the redelivery."""
        delivery.lost = True
        run, delivery.run = delivery.run, None
        # Without an id of its own nothing says that the next such message is the same one.
        if run is None or delivery.properties.text("message_id") is None:
            return
        run.lost_at = time.monotonic()
        self._orphans.setdefault(_identity(delivery), deque()).append(run)
        for key, runs in list(self._orphans.items()):
            while runs and runs[0].lost_at < run.lost_at - ORPHANS_KEPT:
                runs.popleft()
            if not runs:
                del self._orphans[key]

    async def take(self, delivery: Delivery) -> Run:
        """The run for this delivery: a new one, or that of its lost twin once nobody works on it."""
        run = Run()
        if delivery.redelivered and self._orphans:
            key = _identity(delivery)
            if runs := self._orphans.get(key):
                run = runs.popleft()
                if not runs:
                    del self._orphans[key]
        delivery.run = run
        while run.owned:
            run.free = run.free or asyncio.get_running_loop().create_future()
            await asyncio.wait([run.free])
            if delivery.lost:  # lost once more while it waited: the run is for the next twin
                raise DeliveryLost
        run.owned = True
        return run

    def release(self, run: Run) -> None:
        """Whoever worked on the run is through with it."""
        run.owned = False
        if run.free is not None:
            run.free.set_result(None)
            run.free = None


def _identity(delivery: Delivery) -> bytes:
    """Equal for a delivery and its redelivery, and for nothing else but a twin in every byte."""
    kept = delivery.properties.replace({}, without=_counted_by_the_broker).encode()
    return hashlib.blake2b(len(kept).to_bytes(4, "big") + kept + delivery.body).digest()


def _counted_by_the_broker(header: str) -> bool:
    return header in ("x-delivery-count", "x-acquired-count")


class Handling:
    """How the deliveries of one consumer are handled: the consumer and what its messages need."""

    def __init__(
        self,
        consumer: Consumer[Any],
        *,
        publisher: Publisher | None = None,
        observers: tuple[Observer, ...] = (),
        redact: Callable[[str], str] | None = None,
        error_stack: bool = True,
        worker: str = "",
        children: Children | None = None,
    ) -> None:
        self.consumer = consumer
        self.kind = type(consumer)
        self.runs = Runs()
        self.stopping = asyncio.Event()
        """Set when the grace time is over: what is held is put back."""
        self._publisher = publisher
        self._observers = observers
        self._redact = redact
        self._error_stack = error_stack
        self._worker = worker
        self._children = children
        self._handler = Handler(consumer)
        self._permits = asyncio.Semaphore(self.kind.concurrency)

    async def start(self) -> None:
        """Have child processes ready before the first message; ConfigurationError if they cannot."""
        if self._children is not None:
            await self._children.start()

    def close(self) -> None:
        """No more messages: let go of threads and child processes."""
        self._handler.close()
        if self._children is not None:
            self._children.close()

    # --- the walk -------------------------------------------------------------------------------

    async def process(self, delivery: Delivery) -> None:
        """Attempt, settle, ack. The only ack of a worker.

        Raises DeliveryLost where the broker has the message again, and Stopping or CancelledError
        where the worker must go: then the message was put back.
        """
        run: Run | None = None
        try:
            run = await self.runs.take(delivery)
            if run.outcome is None:
                async with self._permits:
                    run.outcome = await self.attempt(delivery, run)
                run.failure = self._failure(run.outcome)
                self._tell(delivery, run)
            delivery.settling = True
            if not run.copied:
                run.copied = await self.settle(delivery, run)
            if run.copied:
                await delivery.ack()
        except DeliveryLost:
            self.runs.orphan(delivery)
            raise
        except Stopping:
            await self._put_back(delivery)
            raise
        except asyncio.CancelledError:
            # Not where its copy may be on its way; nor where nobody stops us and the event loop ends
            # all the same, perhaps of this very message: the broker counts how often that happens.
            if not delivery.settling and self.stopping.is_set():
                await self._put_back(delivery)
            raise
        finally:
            if run is not None:
                self.runs.release(run)
        self._report(delivery, run)

    async def attempt(self, delivery: Delivery, run: Run) -> Outcome:
        """Decode, handle; an exception becomes an outcome. Cancellation passes through."""
        if delivery.lost:
            raise DeliveryLost
        if self.stopping.is_set():
            raise Stopping
        message = self._message(delivery)
        run.when, started = time.time(), time.perf_counter()
        try:
            if self._children is not None:
                return await self._children.attempt(message)
            await self._handler.call(consumers.decode(self.kind, delivery.body), message)
            return Done()
        except BaseException as error:  # even SystemExit: a message must not take the worker down
            if _ends_us(error):
                raise
            return self.consumer.retry.after_failure(message.attempt, error, draw=random.random())
        finally:
            run.seconds = time.perf_counter() - started

    async def settle(self, delivery: Delivery, run: Run) -> bool:
        """Carry the outcome out; True when a copy is confirmed or none is needed, so: ack.

        A copy that is refused, returned or not confirmed is tried again with growing pauses for as
        long as the delivery is ours. Closing the channel instead would spend a delivery each time.
        False where the broker itself was told to park it.
        """
        match run.outcome:
            case RetryAfter() as outcome:
                exchange, key = "", retry_queue(self.kind.queue, outcome.attempt, outcome.delay)
            case Parked() as outcome:
                exchange, key = PARKING_LOT, self.kind.queue
            case _:
                return True
        headers = history.after(
            outcome,
            run.failure,
            delivery.properties,
            queue=self.kind.queue,
            attempt=self._message(delivery).attempt,
            when=datetime.fromtimestamp(run.when, UTC),
            seconds=run.seconds,
            now=datetime.now(UTC),
            worker=self._worker,
            stack=self._error_stack,
        )
        return await self._copy(delivery, run, exchange, key, headers)

    # --- its steps ------------------------------------------------------------------------------

    def _failure(self, outcome: Outcome) -> history.Failure | None:
        if isinstance(outcome, Done) or outcome.error is None:
            return None
        return history.failure_of(outcome.error, self._redact)

    def _message(self, delivery: Delivery) -> Message:
        return Message(
            self.kind.queue, delivery.body, delivery.properties, redelivered=delivery.redelivered
        )

    async def _copy(
        self, delivery: Delivery, run: Run, exchange: str, key: str, headers: dict[str, Any]
    ) -> bool:
        publisher = self._publisher
        assert publisher is not None
        message_id = uuid.uuid4().hex
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((PublishError, ConnectError)),
            wait=tenacity.wait_exponential(multiplier=0.5, max=30) + tenacity.wait_random(0, 0.5),
            sleep=self._hold,
            before_sleep=partial(self._tell_held, delivery),
        ):
            with attempt:
                if delivery.lost:
                    raise DeliveryLost
                copy = history.copy(
                    delivery.properties,
                    headers,
                    message_id=message_id,
                    frame_max=(await publisher.connect()).frame_max,
                )
                if copy is None:
                    run.outcome = Parked("its headers leave no room for ours: parked by the broker")
                    self._tell(delivery, run)
                    await delivery.reject()
                    return False
                await publisher.send(exchange, key, delivery.body, copy)
        return True

    async def _hold(self, pause: float) -> None:
        """Wait before the copy is tried again; Stopping when the worker must go."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self.stopping.wait()
                raise Stopping

    async def _put_back(self, delivery: Delivery) -> None:
        """A confirmed copy to the main queue, then ack: neither an attempt nor a delivery is spent.

        (A nack counts as a delivery before 4.3, closing the channel on every version.)
        """
        publisher, queue = self._publisher, self.kind.queue
        if delivery.lost or publisher is None:
            return
        delivery.settling = True
        try:
            async with asyncio.timeout(PUT_BACK_TIMEOUT):
                copy = history.returned(
                    delivery.properties,
                    message_id=uuid.uuid4().hex,
                    frame_max=(await publisher.connect()).frame_max,
                )
                await publisher.send("", queue, delivery.body, copy)
                await delivery.ack()
        except (PublishError, ConnectError, DeliveryLost, TimeoutError) as error:
            why = str(error) or f"no answer within {PUT_BACK_TIMEOUT:g} s"
            self._log(logging.WARNING, delivery, f"not put back ({why}); the broker does")
        else:
            self._log(logging.INFO, delivery, "put back")

    # --- who is told ----------------------------------------------------------------------------

    def _log(self, level: int, delivery: Delivery, text: str, **more: Any) -> None:
        """One line about one message, with the fields that every such line has."""
        message = self._message(delivery)
        fields = {"queue": message.queue, "id": message.id, "attempt": message.attempt, **more}
        log.log(
            level, "%s: message %s %s", message.queue, message.id, text, extra={"fields": fields}
        )

    def _tell(self, delivery: Delivery, run: Run) -> None:
        """What was decided, where it is not simply done."""
        if isinstance(run.outcome, Done) or run.outcome is None:
            return
        error = run.failure.log if run.failure else ""
        tries = f"attempt {self._message(delivery).attempt} of {self.kind.retry.attempts}"
        if isinstance(run.outcome, RetryAfter):
            delay = duration_text(run.outcome.delay)
            text = f"{tries} failed: {error}; again in {delay}"
            self._log(logging.WARNING, delivery, text, error=error, delay=delay)
        else:
            reason = one_line(run.outcome.reason)
            text = f"{tries} parked: {reason}; {error}"
            self._log(logging.ERROR, delivery, text, error=error, reason=reason)

    def _tell_held(self, delivery: Delivery, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0.0
        text = f"is held, its copy was not taken ({error}); next try in {pause:.1f} s"
        self._log(logging.ERROR, delivery, text, error=str(error))

    def _report(self, delivery: Delivery, run: Run) -> None:
        if not self._observers or run.outcome is None:
            return
        settled = Settled(self._message(delivery), run.outcome, run.seconds)
        for observer in self._observers:
            failure = None
            try:
                observer(settled)
            except BaseException as error:  # (the delivery is settled, whatever it raises)
                failure = history.failure_of(error, self._redact)
            # Not in the handling of the error: a log handler that fails prints what is being handled.
            if failure is not None:
                name = getattr(observer, "__qualname__", type(observer).__qualname__)
                log.error("observer %s raised %s", name, failure.log)


def _ends_us(error: BaseException) -> bool:
    """Whether it came from outside the handler: our task is cancelled, or its loop is gone."""
    kind = type(error)  # (isinstance asks the error itself, whose class may raise anything)
    if issubclass(kind, GeneratorExit):
        return asyncio._get_running_loop() is None  # noqa: SLF001 (get_running_loop raises)
    return issubclass(kind, asyncio.CancelledError) and is_cancelled()
