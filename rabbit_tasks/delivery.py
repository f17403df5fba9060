"""The life of one delivery: attempt, settle, ack.

This is the page to read. A delivery comes in, the handler is tried once, what came of it is brought
to the broker, and only then is the delivery acked:

    process     attempt → settle → ack
    attempt     decode and handle; an exception becomes an outcome
    settle      carry the outcome out: a confirmed copy in a retry queue or in the parking lot

A worker that dies in between is noticed by the broker, which delivers again: before the confirm
nothing has happened, after it the message is there twice, once as a copy. The other order would
lose it. How often that happened is counted apart from failed attempts: a message whose workers die
again and again is given pauses of its own, and parked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import tenacity

from rabbit_tasks import history
from rabbit_tasks import message as names
from rabbit_tasks.broker import LOST, is_cancelled
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.deliveries import Deliveries
from rabbit_tasks.durations import duration_text
from rabbit_tasks.errors import ConnectError, PublishError, Unconfirmed
from rabbit_tasks.handler import Handler
from rabbit_tasks.message import Message
from rabbit_tasks.observer import Observer, Settled
from rabbit_tasks.properties import Properties
from rabbit_tasks.publisher import Publisher, new_id
from rabbit_tasks.repeats import Repeats
from rabbit_tasks.retry import (
    CRASH_DELAYS,
    Crashed,
    Done,
    Outcome,
    Parked,
    RetryAfter,
    after_crash,
)
from rabbit_tasks.text import one_line
from rabbit_tasks.topology import PARKING_LOT, crashed_queue, retry_queue

if TYPE_CHECKING:
    from rabbit_tasks.isolation import Children

log = logging.getLogger("rabbit_tasks")

PUT_BACK_TIMEOUT: Final = 5.0
"""Seconds for putting a message back at shutdown; over it, the broker requeues it by itself."""
ORPHANS_KEPT: Final = 600.0
"""Seconds that the outcome of a run whose delivery was lost waits for the redelivery."""
IN_DOUBT: Final = 60.0
"""Seconds after an ack in which, when the connection is lost, it may have been lost with it: some three
heartbeats, after which a silent line is noticed."""
SHAKEN: Final = 30.0
"""Seconds after we lost our connection and have it back, in which a redelivery says nothing of its
message: the broker or the network dropped others as well, whose workers are alive."""
NO_CONFIRM: Final = "no confirm"
"""What is told once of all messages whose copies wait for a connection."""


class DeliveryLost(Exception):
    """The delivery is no longer ours: its channel or connection is gone, or its consumer cancelled."""

    def __init__(self) -> None:
        super().__init__("its channel was closed")


class Stopping(Exception):
    """The worker must go while a copy is still being tried."""


class Delivery:
    """One arrival of a message on a channel: what is acked."""

    __slots__ = (
        "_deliveries",
        "_tag",
        "body",
        "is_first",
        "lost",
        "properties",
        "redelivered",
        "run",
        "settling",
    )

    def __init__(
        self,
        body: bytes,
        properties: Properties,
        *,
        redelivered: bool = False,
        deliveries: Deliveries | None = None,
        tag: int = 0,
    ) -> None:
        self.body = body
        self.properties = properties
        self.redelivered = redelivered
        self.is_first = not redelivered and properties.header(names.CRASHES) is None
        """Nothing tells that it has been in anybody's hands before."""
        self.run: Run | None = None
        self.settling = False
        """The handler is through and its outcome is on its way: not to be cancelled."""
        self.lost = False
        """The broker has it again. An ack would fail, or on 4.3.0 to 4.3.6, for a consumer that was
        cancelled, make the broker deliver to nobody."""
        self._deliveries = deliveries
        self._tag = tag

    @property
    def is_ours(self) -> bool:
        """Whether an answer would reach the broker, as far as is known here."""
        return not self.lost and self._deliveries is not None and self._deliveries.is_open

    @property
    def is_answered(self) -> bool:
        """Whether the broker was told what became of it."""
        return self.run is not None and self.run.answered_at > 0

    def ack(self) -> None:
        """Done with: the broker forgets it. DeliveryLost where the broker has it again."""
        self._answer(is_ack=True)

    def reject(self) -> None:
        """Let the broker itself dead-letter it to the parking lot."""
        self._answer(is_ack=False)

    def _answer(self, *, is_ack: bool) -> None:
        if self.lost or self._deliveries is None:
            raise DeliveryLost
        try:
            if is_ack:
                self._deliveries.ack(self._tag)
            else:
                self._deliveries.reject(self._tag)
        except LOST as error:
            self.lost = True
            raise DeliveryLost from error


class Run:
    """One run of a handler in this process: usually of one delivery, of two where one was lost."""

    __slots__ = (
        "answered_at", "copied", "deaths", "failure", "free", "lost_at", "outcome", "owned",
        "seconds", "when",
    )  # fmt: skip

    def __init__(self) -> None:
        self.outcome: Outcome | Crashed | None = None
        self.failure: history.Failure | None = None
        self.deaths: int | None = None
        """Of workers, where they decided its outcome and it was not run."""
        self.copied = False
        self.owned = False
        """A delivery is being processed by it now."""
        self.free: asyncio.Future[None] | None = None
        self.when = 0.0
        self.seconds = 0.0
        self.answered_at = 0.0
        """Its delivery was acked, or rejected to the parking lot."""
        self.lost_at = 0.0

    def forget_frames(self) -> None:
        """Let go of all that the handler's functions held, and with it of our lost connection.

        It may wait for its redelivery for minutes. The stack traces keep their lines.
        """
        left = [None if isinstance(self.outcome, Crashed | Done | None) else self.outcome.error]
        seen: set[int] = set()
        while left:
            if (error := left.pop()) is not None and id(error) not in seen:
                seen.add(id(error))
                with suppress(Exception):  # (its class may raise anything when it is asked)
                    traceback.clear_frames(error.__traceback__)
                    left += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]


class Runs:
    """The runs whose deliveries were lost, until their messages are redelivered.

    A connection lost in mid-handler must not run the handler twice at once: the redelivery joins
    the run that is going on, or takes the outcome that is there.

    Messages may be alike: one id for several, and the same body. A run that is not answered for comes
    again, or one like it, and each such redelivery takes one. A run that is answered for comes again
    only if its ack was lost, so that it could swallow another message: it is taken last, and by a
    message alone that says when it was published, and is the same in every byte.
    """

    def __init__(self) -> None:
        self._orphans: dict[bytes, deque[Run]] = {}
        self._in_hand: dict[Delivery, asyncio.Future[None] | None] = {}

    def orphan_all(self, deliveries: Iterable[Delivery]) -> None:
        """These deliveries are lost; their runs wait for the redeliveries."""
        for delivery in deliveries:
            self._orphan(delivery)
        self._forget()

    def orphan(self, delivery: Delivery) -> None:
        """The delivery in hand is lost; its run waits for the redelivery."""
        self.orphan_all([delivery])

    def _orphan(self, delivery: Delivery) -> None:
        delivery.lost = True
        self.let_go(delivery)
        run, delivery.run = delivery.run, None
        # Without an id of its own nothing says that the next such message is the same one.
        if run is None or delivery.properties.text("message_id") is None:
            return
        run.lost_at = time.monotonic()
        run.forget_frames()
        identity = _identity(delivery)
        if run.answered_at:
            is_in_doubt = run.lost_at - run.answered_at < IN_DOUBT
            if not is_in_doubt or delivery.properties.number("timestamp") is None:
                return
            identity = _sameness(delivery)
        elif run.deaths is not None:
            # Its copy, which may be on the broker, differs in our headers alone, and must be run.
            identity = _sameness(delivery)
        self._orphans.setdefault(identity, deque()).append(run)

    def _forget(self) -> None:
        """Those that have waited too long; they stand in the order in which they were lost."""
        until = time.monotonic() - ORPHANS_KEPT
        over = []
        for key, runs in self._orphans.items():
            if runs[0].lost_at >= until:
                break
            # (One that goes on is kept: its redelivery would run beside it.)
            while runs and not runs[0].owned and runs[0].lost_at < until:
                runs.popleft()
            if not runs:
                over.append(key)
        for key in over:
            del self._orphans[key]

    async def of(self, delivery: Delivery) -> Run:
        """The run for this delivery: a new one, or that of its lost twin.

        Where the broker takes a message from one of our slots and gives it to another (a consumer
        timeout), this one may hear of it first. So it waits until the other has heard of it as well,
        or is through with a message of its own that is alike. (What comes into hand later is none of
        them: this message is here. Of messages that are all alike, one would wait for ever.)
        """
        twins = self._twins(delivery)
        while (run := self._orphaned(delivery)) is None and twins:
            _, twins = await asyncio.wait(twins, return_when=asyncio.FIRST_COMPLETED)
            if delivery.lost:
                raise DeliveryLost
        return self.begin(delivery, run or Run())

    def begin(self, delivery: Delivery, run: Run) -> Run:
        """It is in hand now."""
        delivery.run = run
        self._in_hand[delivery] = None
        return run

    def let_go(self, delivery: Delivery) -> None:
        """It is not in hand any more: settled, or lost."""
        if (gone := self._in_hand.pop(delivery, None)) is not None:
            gone.set_result(None)

    def _orphaned(self, delivery: Delivery) -> Run | None:
        for key in self._keys(delivery):
            if runs := self._orphans.get(key):
                run = runs.popleft()
                if not runs:
                    del self._orphans[key]
                return run
        return None

    def _twins(self, delivery: Delivery) -> set[asyncio.Future[None]]:
        """Of what is in hand and may be this message, when it is not any more."""
        message_id = delivery.properties.text("message_id")
        if message_id is None or delivery.is_first:
            return set()
        alike = [one for one in self._in_hand if one.properties.text("message_id") == message_id]
        same = _identity(delivery) if alike else b""
        return {self._gone(one) for one in alike if _identity(one) == same}

    def _gone(self, delivery: Delivery) -> asyncio.Future[None]:
        """When it is in hand no more."""
        found = self._in_hand[delivery]
        if found is None:
            found = self._in_hand[delivery] = asyncio.get_running_loop().create_future()
        return found

    def _keys(self, delivery: Delivery) -> Iterator[bytes]:
        if self._orphans and not delivery.is_first:
            yield _identity(delivery)
            if delivery.redelivered:
                yield _sameness(delivery)

    async def take(self, run: Run, delivery: Delivery) -> None:
        """Wait until nobody works on the run, and then work on it."""
        while run.owned:
            run.free = run.free or asyncio.get_running_loop().create_future()
            await asyncio.wait([run.free])
            if delivery.lost:  # lost once more while it waited: the run is for the next twin
                raise DeliveryLost
        run.owned = True

    def release(self, run: Run) -> None:
        """Whoever worked on the run is through with it."""
        run.owned = False
        if run.free is not None:
            run.free.set_result(None)
            run.free = None


def _identity(delivery: Delivery) -> bytes:
    """Equal for a delivery, its redelivery and its copy without an outcome, and for nothing else but
    a twin in every byte."""
    kept = delivery.properties.replace(
        {}, without=_may_change, drop=history.NOT_COPIED, delivery_mode=2
    )
    # (4.x sorts the headers of what has been dead-lettered, as a copy that waited has.)
    headers = b"".join(key + value for key, value in sorted(kept.table))
    digest = hashlib.blake2b(len(headers).to_bytes(4, "big") + headers)
    digest.update(kept.replace({}, without=lambda _: True).encode())
    digest.update(delivery.body)
    return digest.digest()


def _sameness(delivery: Delivery) -> bytes:
    """Equal for a delivery and its redelivery; not for any copy of it, as one that a worker's death,
    a retry or a replay has made."""
    kept = delivery.properties.replace({}, without=_is_count).encode()
    whole = len(kept).to_bytes(4, "big") + kept + delivery.body
    return hashlib.blake2b(whole, person=b"same").digest()


def _is_count(header: str) -> bool:
    return header in (names.DELIVERY_COUNT, names.ACQUIRED_COUNT)


def _may_change(header: str) -> bool:
    # (A replay, like a retry, is another life of the message.)
    told = header in names.OURS and header not in (names.RETRY_COUNT, names.REPLAYED)
    return told or names.is_brokers(header)


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
        repeats: Repeats | None = None,
    ) -> None:
        self.consumer = consumer
        self.kind = type(consumer)
        self.runs = Runs()
        self.stopping = asyncio.Event()
        """Set when the grace time is over: what is held is put back."""
        self.calm_from = 0.0
        """By the monotonic clock: from when on a redelivery tells of a worker's death."""
        self._publisher = publisher
        self._observers = observers
        self._redact = redact
        self._error_stack = error_stack
        self._worker = worker
        self._children = children
        self._repeats = repeats or Repeats()
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

    def is_plain(self, delivery: Delivery) -> bool:
        """Whether `process` waits for nothing before its handler, and is through with it where it does
        not fail."""
        return delivery.is_first and not (
            self._children is not None or not self._handler.is_async or self.stopping.is_set()
        )

    # --- the walk -------------------------------------------------------------------------------

    async def process(self, delivery: Delivery) -> None:
        """Attempt, settle, ack. The only ack of a worker.

        Raises DeliveryLost where the broker has the message again, and Stopping or CancelledError
        where the worker must go: then the message was put back.
        """
        run, ours = Run(), False
        try:
            if delivery.is_first:
                self.runs.begin(delivery, run)
            else:
                run = await self.runs.of(delivery)
                if run.owned and await self._renewed(delivery):
                    return
                await self.runs.take(run, delivery)
            ours = run.owned = True
            if run.outcome is None:
                run.outcome = self._after_crash(delivery, run)
                if run.outcome is None:
                    async with self._permits:
                        run.outcome = await self.attempt(delivery, run)
                    run.failure = self._failure(run.outcome)
                    if delivery.lost:
                        run.forget_frames()
                self._tell(delivery, run)
            delivery.settling = True
            if not run.copied:
                run.copied = await self.settle(delivery, run)
            if run.copied:
                delivery.ack()
            is_news = not run.answered_at  # or else its ack was lost, and it is acked once more
            run.answered_at = time.monotonic()
        except DeliveryLost:
            self.runs.orphan(delivery)
            raise
        except Stopping:
            await self.put_back(delivery)
            raise
        except asyncio.CancelledError:
            # Not where its copy may be on its way; nor where nobody stops us and the event loop ends
            # all the same, perhaps of this very message: the broker counts how often that happens.
            if not delivery.settling and self.stopping.is_set():
                await self.put_back(delivery)
            raise
        finally:
            self.runs.let_go(delivery)
            if ours:
                self.runs.release(run)
        if is_news:
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
            await self._handler.call(delivery.body, message)
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
            case Crashed() as outcome:
                exchange, key = "", crashed_queue(self.kind.queue, outcome.delay)
            case Parked() as outcome:
                exchange, key = PARKING_LOT, self.kind.queue
            case _:
                return True
        if await self._copy(delivery, exchange, key, self._headers(delivery, run, outcome)):
            return True
        run.outcome = Parked("its headers leave no room for ours: parked by the broker")
        self._tell(delivery, run)
        delivery.reject()
        return False

    # --- its steps ------------------------------------------------------------------------------

    def _failure(self, outcome: Outcome) -> history.Failure | None:
        if isinstance(outcome, Done) or outcome.error is None:
            return None
        return history.failure_of(outcome.error, self._redact)

    def _after_crash(self, delivery: Delivery, run: Run) -> Crashed | Parked | None:
        """Whether a message is not to be run because workers died with it in their hands."""
        if delivery.is_first:
            return None
        known = names.crashes(delivery.properties)
        if not delivery.redelivered:
            if known:
                text = f"is run again: its worker died {known} times"
                self._log(logging.WARNING, delivery, text, deaths=known)
            return None
        deliveries = names.deliveries(delivery.properties)
        # More than two are no deaths: at the second a copy is made. A worker that lives, lost its
        # connection and joined its own run again may have been among them.
        deaths = known + min(deliveries, 2) if time.monotonic() >= self.calm_from else known
        outcome = after_crash(
            deaths, deliveries, limit=self.kind.delivery_limit, draw=random.random()
        )
        if outcome is not None:
            run.deaths = deaths
        elif deaths:
            self._log(
                logging.WARNING,
                delivery,
                "comes again: its worker died, lost its connection, or took too long",
                deaths=deaths,
            )
        return outcome

    async def _renewed(self, delivery: Delivery) -> bool:
        """Whether a copy now waits for the end of the run that goes on here.

        Each time the connection is lost the broker counts a delivery, and at its limit it would park
        a message that nothing is wrong with. A copy starts the count anew.
        """
        # Early enough for the copy to be lost a few times too, with connections that do not live long.
        enough = max(1, self.kind.delivery_limit // 2)
        is_due = delivery.redelivered and names.deliveries(delivery.properties) >= enough
        # And whoever has counted deaths of it did not know that we live.
        if not is_due and not names.crashes(delivery.properties):
            return False
        delay = random.choice(CRASH_DELAYS)
        headers = self._headers(delivery, Run(), Crashed(delay))
        delivery.settling = True
        if not await self._copy(delivery, "", crashed_queue(self.kind.queue, delay), headers):
            delivery.settling = False
            return False
        self._log(logging.INFO, delivery, "is still running here; its copy waits for it")
        delivery.ack()
        self.runs.orphan(delivery)
        return True

    def _headers(
        self, delivery: Delivery, run: Run, outcome: RetryAfter | Crashed | Parked
    ) -> dict[str, Any]:
        """What the copy says of its message."""
        now = datetime.now(UTC)
        if isinstance(outcome, Crashed) or run.deaths is not None:
            assert not isinstance(outcome, RetryAfter)
            return history.after_crash(
                outcome,
                run.deaths or 0,
                delivery.properties,
                queue=self.kind.queue,
                now=now,
                worker=self._worker,
            )
        return history.after(
            outcome,
            run.failure,
            delivery.properties,
            queue=self.kind.queue,
            attempt=self._message(delivery).attempt,
            when=datetime.fromtimestamp(run.when, UTC),
            seconds=run.seconds,
            now=now,
            worker=self._worker,
            stack=self._error_stack,
        )

    def _message(self, delivery: Delivery) -> Message:
        return Message(
            self.kind.queue, delivery.body, delivery.properties, redelivered=delivery.redelivered
        )

    async def _copy(
        self, delivery: Delivery, exchange: str, key: str, headers: dict[str, Any]
    ) -> bool:
        """False where its own headers leave no room for ours."""
        # (What tries again is not built for nothing: that takes 35 µs, half of what a retry does.)
        once = partial(self._copy_once, delivery, exchange, key, headers, new_id())
        try:
            return await once()
        except (PublishError, ConnectError) as error:
            first = error
        return await self._copy_again(delivery, once, first)

    async def _copy_once(
        self, delivery: Delivery, exchange: str, key: str, headers: dict[str, Any], message_id: str
    ) -> bool:
        publisher = self._publisher
        assert publisher is not None
        if delivery.lost:
            raise DeliveryLost
        copy = history.copy(
            delivery.properties,
            headers,
            message_id=message_id,
            frame_max=(await publisher.connect()).frame_max,
        )
        if copy is None:
            return False
        await publisher.send(exchange, key, delivery.body, copy)
        return True

    async def _copy_again(
        self,
        delivery: Delivery,
        once: Callable[[], Awaitable[bool]],
        first: PublishError | ConnectError,
    ) -> bool:
        """The copy after a first try that failed, with growing pauses."""
        copied, why = False, set[str]()
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((PublishError, ConnectError)),
            wait=tenacity.wait_exponential(multiplier=0.5, max=30) + tenacity.wait_random(0, 0.5),
            sleep=self._hold,
            before_sleep=partial(self._tell_held, delivery, why),
        ):
            with attempt:
                if attempt.retry_state.attempt_number == 1:
                    raise first
                copied = await once()
        for one in why:
            if how_often := self._repeats.over(one):
                text = f"is held no more: copies are taken again, {how_often}"
                self._log(logging.INFO, delivery, text)
        return copied

    async def _hold(self, pause: float) -> None:
        """Wait before the copy is tried again; Stopping when the worker must go."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self.stopping.wait()
                raise Stopping

    async def put_back(self, delivery: Delivery) -> None:
        """A confirmed copy to the main queue, then ack: neither an attempt nor a delivery is spent.

        (A nack counts as a delivery before 4.3, closing the channel on every version.)
        """
        publisher, queue = self._publisher, self.kind.queue
        if publisher is None or not delivery.is_ours:
            return
        delivery.settling = True
        what = "not put back"
        try:
            async with asyncio.timeout(PUT_BACK_TIMEOUT):
                copy = history.returned(
                    delivery.properties,
                    message_id=new_id(),
                    frame_max=(await publisher.connect()).frame_max,
                    again=delivery.redelivered,
                )
                await publisher.send("", queue, delivery.body, copy)
                what = "put back, and not acked"
                delivery.ack()
        except (PublishError, ConnectError, DeliveryLost, TimeoutError) as error:
            why = str(error) or f"no answer within {PUT_BACK_TIMEOUT:g} s"
            self._log(logging.WARNING, delivery, f"{what} ({why}): the broker delivers it again")
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
        if isinstance(run.outcome, Done):
            return
        error = run.failure.log if run.failure else ""
        tries = f"attempt {self._message(delivery).attempt} of {self.kind.retry.attempts}"
        match run.outcome:
            case RetryAfter() as outcome:
                delay = duration_text(outcome.delay)
                text = f"{tries} failed: {error}; again in {delay}"
                self._log(logging.WARNING, delivery, text, error=error, delay=delay)
            case Crashed() as outcome:
                delay = duration_text(outcome.delay)
                # None died where we had lost our connection, and perhaps others lost theirs.
                why = (
                    f"its worker died {run.deaths} times" if run.deaths else "nobody has settled it"
                )
                text = f"comes again: {why}; run again in {delay}"
                self._log(logging.WARNING, delivery, text, deaths=run.deaths, delay=delay)
            case Parked() as outcome:
                reason = one_line(outcome.reason)
                text = f"{tries} parked: {reason}{f'; {error}' if error else ''}"
                self._log(logging.ERROR, delivery, text, error=error, reason=reason)

    def _tell_held(self, delivery: Delivery, why: set[str], state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0.0
        # No connection is the same trouble for all messages in hand; a queue that is missing is told
        # a few times, or somebody who looks for one message does not find why it waits.
        outage = isinstance(error, Unconfirmed | ConnectError)
        about = NO_CONFIRM if outage else f"held: {error}"
        why.add(about)
        ending = self._repeats.say(about, first=1 if outage else 5)
        if ending is not None:
            text = f"is held, its copy was not taken ({error}); next try in {pause:.1f} s{ending}"
            self._log(logging.ERROR, delivery, text, error=str(error))

    def _report(self, delivery: Delivery, run: Run) -> None:
        if not self._observers or run.outcome is None or isinstance(run.outcome, Crashed):
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
