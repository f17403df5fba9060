"""Sessions, consuming, stopping.

    Worker.run          one session after another until asked to stop
    Worker._session     the connection and its slots, until the connection is lost
    Worker._consume     a channel with prefetch 1 per slot; for each delivery: process

Nothing of a lost session is restored: it is thrown away and the next one starts from nothing. Only
handlers that still run are kept, for their messages' redelivery to join.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import socket
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from typing import Any, Final, TypeVar

import aiormq.exceptions as amqp
import tenacity
from aiormq.channel import Channel

from rabbit_tasks import declare, timeouts
from rabbit_tasks.app import App
from rabbit_tasks.broker import (
    CLOSE_TIMEOUT,
    LOST,
    RPC_TIMEOUT,
    Connection,
    connect,
    is_cancelled,
    words,
)
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.deadline import Deadline
from rabbit_tasks.deliveries import Deliveries, unread
from rabbit_tasks.delivery import (
    NO_CONFIRM,
    SHAKEN,
    Delivery,
    DeliveryLost,
    Handling,
    Stopping,
)
from rabbit_tasks.durations import duration_text
from rabbit_tasks.errors import (
    ConfigurationError,
    ConnectError,
    RabbitTasksError,
    TopologyError,
)
from rabbit_tasks.history import failure_of
from rabbit_tasks.properties import Properties
from rabbit_tasks.publisher import Publisher
from rabbit_tasks.repeats import Repeats
from rabbit_tasks.settings import Settings
from rabbit_tasks.topology import topology_of
from rabbit_tasks.watchdog import Watchdog

T = TypeVar("T")

log = logging.getLogger("rabbit_tasks")

FIRST_PAUSE: Final = 0.5
SPARE_CHANNELS: Final = 8
"""Channels of a connection beside those of its slots, for looking up and declaring."""
LONGEST_PAUSE: Final = 5.0
"""Seconds between two tries to consume from a queue, on a connection that lives."""
HEALTHY: Final = 30.0
"""Seconds after which a session counts as a success, and the pauses begin small again."""
LULL: Final = 0.2
"""Seconds without a delivery, after which a queue is taken for an empty one when we stop."""
MOMENT: Final = 0.5
"""Seconds after the order to stop for what has not begun to consume."""
SOONEST: Final = 2.0
"""Seconds that a stop may take in any case, however short the grace time, and at a second signal."""
FAREWELL: Final = 0.2
"""Seconds before the end of that time, at which the process begins to end whatever is still open."""
LONGEST_RESERVE: Final = 5.0
"""Seconds of the grace time, or else a quarter of it, for putting back what handlers have not done."""


class Worker:
    """Runs the consumers of an app.

    queues      only the consumers of these main queues; none given means all
    declare     create what is missing at start (needs the configure permission)
    log_setup   called in child processes of consumers with isolation = "process"
    on_ready    called once, when it first consumes
    on_overdue  called in a thread of its own, with whether the worker had failed, at the moment when
                its process should be gone and something that cannot be cancelled is in the way: a
                blocked event loop, a thread

    `run` returns after `stop`, within the grace time, or 2 s where that is shorter. It raises for what
    trying again cannot mend: ConfigurationError, TopologyError at the first session, a permanent
    ConnectError.
    """

    def __init__(
        self,
        app: App,
        settings: Settings | None = None,
        *,
        queues: Collection[str] = (),
        declare: bool = False,
        log_setup: Callable[[], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        on_overdue: Callable[[bool], None] | None = None,
    ) -> None:
        self._app = app
        self._settings = settings or Settings()
        self._consumers = [app.consumer(q) for q in dict.fromkeys(queues)] or list(app.consumers)
        if not self._consumers:
            raise ConfigurationError(
                f"app {app.name} has no consumers: there is nothing to work on"
            )
        self._topology = topology_of(type(consumer) for consumer in self._consumers)
        self._declare = declare
        self._log_setup = log_setup
        self._on_ready = on_ready
        self._failed = False
        self._asked = False
        self._deadline = Deadline(lambda: on_overdue(self._failed)) if on_overdue else None
        self._gone_by = math.inf
        self._handlers_until = 0.0
        self._publisher: Publisher | None = None
        self._connection: Connection | None = None
        self._connected_at = math.inf
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._handlings: list[Handling] = []
        self._slots: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._in_hand: dict[asyncio.Task[None], deque[Delivery]] = {}
        self._worked = False
        self._quiet_until: dict[str, float] = {}
        self._repeats = Repeats()
        self.name = self._settings.worker_name or f"{socket.gethostname()}:{os.getpid()}"
        # So that nobody takes a queue away to which we publish: see pruning.py.
        self._told = {"app": app.name, "topology": app.topology.digest}

    def stop(self) -> None:
        """Take no more messages, finish those in hand within the grace time, and return from `run`.

        Called again: do not wait any longer, put them back now.
        """
        if self._stop.is_set():
            self._be_gone_within(SOONEST)
            self._stop_now.set()
        else:
            grace = self._settings.grace
            log.info("stopping: finishing what is in hand, gone within %s", duration_text(grace))
            self._be_gone_within(max(grace.total_seconds(), SOONEST))
            self._handlers_until = time.monotonic() + grace.total_seconds() - self._reserve
        self._stop.set()

    def asked(self) -> None:
        """To be called in a signal's handler, before the event loop calls `stop`.

        The loop may stand still, in a handler that blocks it; the time runs from now on all the same.
        """
        if self._deadline is not None:
            grace = self._settings.grace.total_seconds()
            again, self._asked = self._asked, True
            seconds = SOONEST if again else max(grace, SOONEST)
            self._deadline.set(time.monotonic() + seconds - FAREWELL)

    def _be_gone_within(self, seconds: float) -> None:
        self._gone_by = min(self._gone_by, time.monotonic() + seconds - FAREWELL)
        if self._deadline is not None:
            self._deadline.set(self._gone_by)

    @property
    def _reserve(self) -> float:
        """Seconds of the grace time that are not the handlers'."""
        return min(LONGEST_RESERVE, self._settings.grace.total_seconds() / 4)

    def _left(self, at_most: float = math.inf, *, but: float = 0.0) -> float:
        """Seconds until we must be gone, less some that others need."""
        return min(at_most, max(0.0, self._gone_by - time.monotonic() - but))

    async def run(self) -> None:
        """One session after another until asked to stop; jittered, capped pauses between them."""
        cap = self._settings.reconnect_cap.total_seconds()
        async with AsyncExitStack() as stack:
            publisher = self._publisher = Publisher(self._settings, patient=True, told=self._told)
            stack.push_async_callback(self._close_publisher)
            await self._unless_stopped(self._set_up(stack, publisher))
            if self._stop.is_set():
                return
            watchdog = Watchdog(self._consumers, self._settings.heartbeat.total_seconds() / 2)
            watchdog.start()
            stack.callback(watchdog.stop)
            stopper = asyncio.create_task(self._put_an_end())
            stack.push_async_callback(self._finish, stopper)
            async for attempt in tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception(self._worth_another),
                # Full jitter: workers that lost one broker together do not come back together.
                wait=tenacity.wait_random_exponential(multiplier=FIRST_PAUSE, max=cap),
                sleep=self._pause,
                before_sleep=self._tell_pause,
                reraise=True,
            ):
                with attempt:
                    self._connected_at = math.inf
                    try:
                        await self._session(publisher)
                    finally:
                        if time.monotonic() - self._connected_at > HEALTHY:
                            attempt.retry_state.attempt_number = 1

    def _worth_another(self, error: BaseException) -> bool:
        if isinstance(error, ConnectError):
            return not error.permanent
        return isinstance(error, Exception) and not isinstance(error, RabbitTasksError)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def _tell_pause(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0.0
        if isinstance(error, (RabbitTasksError, OSError, TimeoutError, amqp.AMQPError, *LOST)):
            why = str(error) or repr(error)
            ending = self._repeats.say("outage", why)
            if ending is not None:
                log.warning("%s; next try in %.1f s%s", why, pause, ending)
        else:
            log.error("fault in rabbit_tasks, please report it", exc_info=error)

    async def _set_up(self, stack: AsyncExitStack, publisher: Publisher) -> None:
        for consumer in self._consumers:
            handling = self._handling(consumer, publisher)
            stack.callback(handling.close)
            self._handlings.append(handling)
            await handling.start()
        if self._app.lifespan is not None:
            await stack.enter_async_context(_Lifespan(self._app.lifespan(), self._left))

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result; None where we were asked to stop first, and the work was given up.

        Not before it had a moment to end by itself, as a lifespan that is just being entered may.
        """
        limit = asyncio.timeout(None)

        def give_up(asked: asyncio.Task[Any]) -> None:
            with suppress(RuntimeError):  # the work has just ended by itself
                if not asked.cancelled():
                    limit.reschedule(asyncio.get_running_loop().time() + MOMENT)

        asked = asyncio.create_task(self._stop.wait())
        asked.add_done_callback(give_up)
        try:
            async with limit:  # not a task of its own: a lifespan is left by the task that entered
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            asked.cancel()

    def _handling(self, consumer: Consumer[Any], publisher: Publisher) -> Handling:
        children = None
        if consumer.isolation == "process":
            from rabbit_tasks.isolation import Children  # (multiprocessing, which others need not)

            children = Children(consumer, redact=self._app.redact, log_setup=self._log_setup)
        return Handling(
            consumer,
            publisher=publisher,
            observers=self._app.observers,
            redact=self._app.redact,
            error_stack=self._settings.error_stack,
            worker=self.name,
            children=children,
            repeats=self._repeats,
        )

    # --- a session ------------------------------------------------------------------------------

    async def _session(self, publisher: Publisher) -> None:
        """Connect, make sure of the queues, consume until the connection is lost or we must stop."""
        if self._stop.is_set():
            return
        connection = await self._unless_stopped(
            connect(self._settings, f"worker {self.name}", self._told)
        )
        if connection is None:
            return
        self._connection = connection
        try:
            await self._unless_stopped(publisher.connect())
            await self._unless_stopped(self._make_sure(connection))
            if self._stop.is_set():
                return
            for handling in self._handlings:
                if self._worked:
                    handling.calm_from = time.monotonic() + SHAKEN
                for _ in range(_channels(handling.kind)):
                    slot = asyncio.create_task(self._slot(connection, handling))
                    self._slots.add(slot)
                    slot.add_done_callback(self._slots.discard)
            queues = ", ".join(handling.kind.queue for handling in self._handlings)
            slots = sum(handling.kind.concurrency for handling in self._handlings)
            outage = self._repeats.over("outage")
            self._repeats.over(NO_CONFIRM)
            for handling in self._handlings:
                self._repeats.over(f"{handling.kind.queue}: in hand")
            log.info(
                "connected to RabbitMQ %s: %d slots on %s%s",
                connection.server_version, slots, queues,
                f"; again, {outage}" if outage else "",
                extra={"fields": {"worker": self.name, "slots": slots}},
            )  # fmt: skip
            self._worked = True
            self._connected_at = time.monotonic()
            await _all_of(self._slots)
            if not self._stop.is_set():
                code, text = connection.close_reason or (0, "")
                why = f": {code} {text}" if code else ", without a word from the broker"
                raise ConnectError(f"connection lost{why}")
        except asyncio.CancelledError:
            if not is_cancelled():
                raise ConnectError("connection lost") from None
            self.stop()
            self.stop()
            await _all_of(self._slots)
            raise
        finally:
            await connection.end(self._left(CLOSE_TIMEOUT))

    async def _make_sure(self, connection: Connection) -> None:
        """Create or look up what we need: TopologyError, but for a worker that has worked before.

        That one goes on with the queues that are there: what is missing holds up only its own.
        """
        wanted = sum(_channels(handling.kind) for handling in self._handlings)
        if wanted + SPARE_CHANNELS > connection.channel_max:
            raise ConfigurationError(
                f"{wanted} slots need as many channels, and the broker allows {connection.channel_max} "
                "on a connection (channel_max): lower concurrency, or start two workers, each with "
                "some of the queues"
            )
        try:
            if self._declare:
                for name in await declare.declare(connection, self._topology):
                    log.info("created %s", name)
            elif absent := await declare.missing(connection, self._topology):
                more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
                raise TopologyError(
                    f"missing: {', '.join(absent[:5])}{more}; create them: {declare.COMMAND}"
                )
        except TopologyError as error:
            if not self._worked:
                raise
            for line in str(error).splitlines():
                log.error("%s", line)
        if not self._worked:
            for consumer in self._consumers:
                if text := timeouts.warning_of(connection.server_version, type(consumer)):
                    log.warning("%s", text)

    async def _slot(self, connection: Connection, handling: Handling) -> None:
        """Consume on one channel after another, as long as the connection lives."""
        failures = 0
        while not (connection.is_lost or self._stop.is_set()):
            started = time.monotonic()
            try:
                why = await self._consume(connection, handling)
            except amqp.ChannelAccessRefused as error:
                why = f"{words(error)}; allow it: {connection.permit}"
            except (*LOST, amqp.AMQPError, TimeoutError) as error:
                why = words(error)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                why = "the channel was closed"
            except Exception:
                # Ours to mend. The broker counts the delivery, and parks a message that does this
                # every time; the other slots go on.
                log.exception("%s: fault in rabbit_tasks, please report it", handling.kind.queue)
                why = "fault in rabbit_tasks"
            if connection.is_lost or self._stop.is_set():
                return
            failures = 0 if time.monotonic() - started > HEALTHY else min(failures + 1, 10)
            pause = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**failures))
            queue = handling.kind.queue
            if first := self._quiet_until.get(queue, 0.0) <= time.monotonic():
                # The other slots of this queue wait for the same thing.
                self._quiet_until[queue] = time.monotonic() + pause
                ending = self._repeats.say(f"{queue}: not consuming", why, first=3)
                if ending is not None:
                    log.warning(
                        "%s: not consuming (%s); again in %.1f s%s",
                        queue, why, pause, ending, extra={"fields": {"queue": queue}},
                    )  # fmt: skip
            await self._pause(pause)
            if self._declare and first and not connection.is_lost:
                with suppress(TopologyError, ConnectError):
                    await declare.declare(connection, self._topology)

    async def _consume(self, connection: Connection, handling: Handling) -> str:
        """A channel with prefetch 1 and a fresh tag; for each delivery: process.

        A slot has one to itself: what closes it, as a handler that outlasts the broker's patience,
        costs no other message a delivery. With a prefetch of more than 1 all slots share one.

        Returns why the channel is of no more use. A handler that still runs goes on without it.
        """
        queue, kind = handling.kind.queue, handling.kind
        slots = kind.concurrency // _channels(kind)
        most = slots * kind.prefetch
        channel = await connection.open()
        deliveries: asyncio.Queue[Delivery | None] = asyncio.Queue()
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_delivery(tag: int, redelivered: bool, properties: bytes, body: bytes) -> None:
            deliveries.put_nowait(
                Delivery(
                    body, Properties.decode(properties), redelivered=redelivered, tag=tag,
                    deliveries=arriving,
                )
            )  # fmt: skip

        arriving = Deliveries(connection, channel, on_delivery, together=most > 1)

        def end(why: str) -> None:
            arriving.end()
            if not ended.done():
                ended.set_result(why)

        channel.on_consumer_cancel_callbacks.add(
            lambda _: end(
                "consumer cancelled by the broker: its queue is gone "
                f"({declare.COMMAND}), or a handler takes longer than its ack_timeout"
            )
        )
        closing = channel.closing
        closing.add_done_callback(lambda future: end(_why_closed(future)))
        pumps = [asyncio.create_task(self._pump(deliveries, handling)) for _ in range(slots)]
        self._pumps.update(pumps)
        for pump in pumps:
            pump.add_done_callback(self._pump_ended)
        stopping = asyncio.create_task(self._stop.wait())
        tag = f"rabbit-tasks.{uuid.uuid4().hex}"
        try:
            await channel.basic_qos(prefetch_count=most, timeout=RPC_TIMEOUT)
            await channel.basic_consume(queue, unread, consumer_tag=tag, timeout=RPC_TIMEOUT)
            if how_often := self._repeats.over(f"{queue}: not consuming"):
                log.info(
                    "%s: consuming again, %s", queue, how_often, extra={"fields": {"queue": queue}}
                )
            if self._on_ready is not None:
                on_ready, self._on_ready = self._on_ready, None
                on_ready()
            first: list[asyncio.Future[Any]] = [ended, stopping, *pumps]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                if pump.done() and not pump.cancelled() and not ended.done():
                    pump.result()  # none ends by itself: a fault of ours, for the session to raise
            if not ended.done():
                if self._stop.is_set():
                    await _fill(arriving, most, ended)
                await self._leave(channel, tag, arriving, deliveries, handling, pumps, ended)
            # (Told only where we do not stop: the slot has ended over an ack that nobody took.)
            return ended.result() if ended.done() else "an ack was not taken"
        finally:
            stopping.cancel()
            arriving.go_on()
            self._lose(pumps, deliveries, handling)
            if not channel.is_closed:
                with suppress(Exception):
                    await channel.close(timeout=self._left(CLOSE_TIMEOUT))

    async def _leave(
        self,
        channel: Channel,
        tag: str,
        arriving: Deliveries,
        deliveries: asyncio.Queue[Delivery | None],
        handling: Handling,
        pumps: list[asyncio.Task[None]],
        ended: asyncio.Future[str],
    ) -> None:
        """Stop consuming, put back what waits, and keep the channel for what is in hand until it is
        settled, or not ours.

        The channel's own close comes last and is answered last: so the acks before it are through.
        """
        with suppress(TimeoutError, *LOST):
            await channel.basic_cancel(tag, timeout=self._left(CLOSE_TIMEOUT))
        arriving.go_on()
        if self._stop.is_set():  # (or else a pump has ended over a loss: the broker has them again)
            await asyncio.gather(*map(handling.put_back, _emptied(deliveries)))
        for _ in pumps:
            deliveries.put_nowait(None)
        settled: asyncio.Future[Any] = asyncio.gather(*pumps, return_exceptions=True)
        await asyncio.wait({settled, ended}, return_when=asyncio.FIRST_COMPLETED)

    def _lose(
        self,
        pumps: list[asyncio.Task[None]],
        deliveries: asyncio.Queue[Delivery | None],
        handling: Handling,
    ) -> None:
        """The channel is of no more use: what it brought belongs to the broker again."""
        for waiting in _emptied(deliveries):
            waiting.lost = True
        for pump in pumps:
            deliveries.put_nowait(None)
            for delivery in self._in_hand.get(pump, ()):
                handling.runs.orphan(delivery)
            pump.add_done_callback(lambda ended: self._in_hand.pop(ended, None))

    async def _pump(self, deliveries: asyncio.Queue[Delivery | None], handling: Handling) -> None:
        """Process deliveries of a channel, one at a time."""
        pump = asyncio.current_task()
        assert pump is not None
        # The last ones are kept: an ack that was lost on its way makes the broker deliver a message
        # again whose run has just ended.
        hands = self._in_hand[pump] = deque(maxlen=handling.kind.prefetch)
        while (delivery := await deliveries.get()) is not None:
            hands.append(delivery)
            try:
                await handling.process(delivery)
            except DeliveryLost:
                queue, message_id = handling.kind.queue, delivery.properties.text("message_id")
                ending = self._repeats.say(f"{queue}: in hand", first=5)
                if ending is not None:
                    log.info(
                        "%s: channel lost with message %s in hand; if it comes here again, it goes "
                        "on%s", queue, message_id, ending,
                        extra={"fields": {"queue": queue, "id": message_id}},
                    )  # fmt: skip
                return
            except Stopping:
                return

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        self._pumps.discard(pump)
        if not pump.cancelled() and (error := pump.exception()) is not None:
            log.debug("a pump ended by %r", error)  # its slot raises it, or has left it behind

    # --- stopping -------------------------------------------------------------------------------

    async def _put_an_end(self) -> None:
        """When the handlers' time is over: cancel what is not decided, put it back, then let go."""
        await self._stop.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._handlers_until - time.monotonic())):
                await self._stop_now.wait()
        for handling in self._handlings:
            handling.stopping.set()
        reserve = self._left()
        self._cancel_handlers()
        # A handler that held on to the first cancellation is put back at the second. Only then may
        # its channel go: without it nothing could be acked, and the copy would be one too many.
        await _all_of(self._pumps, reserve * 0.4)
        self._cancel_handlers()
        await _all_of(self._pumps | self._slots, self._left(but=reserve * 0.2))
        hands = [self._in_hand.get(pump, deque()) for pump in self._pumps]
        if in_hand := [one for last in hands for one in last if not one.is_answered]:
            log.warning(
                "%d messages are neither settled nor put back, and the time is over: the broker "
                "delivers them again", len(in_hand), extra={"fields": {"worker": self.name}},
            )  # fmt: skip
        for task in (*self._pumps, *self._slots):
            task.cancel()
        # Whoever still waits for the broker is told that it is gone.
        if self._publisher is not None:
            self._publisher.abort()
        if self._connection is not None:
            self._connection.abort()

    def _cancel_handlers(self) -> None:
        for pump in self._pumps:
            hands = self._in_hand.get(pump)
            if not (hands and hands[-1].settling):
                pump.cancel()

    async def _finish(self, stopper: asyncio.Task[None]) -> None:
        """Handlers whose connection was lost end like the others: in time, or cancelled."""
        if not self._stop.is_set():
            self._failed = True
            self._be_gone_within(max(self._settings.grace.total_seconds(), SOONEST))
            self._stop.set()
            self._stop_now.set()
        await _all_of(self._pumps, self._left())
        stopper.cancel()

    async def _close_publisher(self) -> None:
        if self._publisher is not None:
            await self._publisher.close(self._left(2 * CLOSE_TIMEOUT))


class _Lifespan(AbstractAsyncContextManager[None]):
    """An app's lifespan, kept from ending the worker as if all were well.

    It may raise SystemExit(0), or swallow what the worker ended of, or hang.
    """

    def __init__(
        self, lifespan: AbstractAsyncContextManager[Any], left: Callable[[], float]
    ) -> None:
        self._lifespan = lifespan
        self._left = left

    async def __aenter__(self) -> None:
        with _explained("the app's lifespan raised {} before the first message"):
            await self._lifespan.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        limit = asyncio.timeout(self._left() * 0.8)
        try:
            with _explained("the app's lifespan raised {} after the last message", but=error[1]):
                async with limit:
                    await self._lifespan.__aexit__(*error)
        except TimeoutError:
            if not limit.expired():
                raise
            log.error("the app's lifespan did not end within the grace time and was cancelled")


@contextmanager
def _explained(text: str, but: BaseException | None = None) -> Iterator[None]:
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if error is but or is_cancelled():
            raise
        raise ConfigurationError(text.format(failure_of(error).log)) from error


def _channels(kind: type[Consumer[Any]]) -> int:
    """Of all slots of a consumer: one each, or one for all where they hold more than they handle."""
    return kind.concurrency if kind.prefetch == 1 else 1


async def _fill(arriving: Deliveries, most: int, ended: asyncio.Future[str]) -> None:
    """Hold as much as the broker hands out, before it is told that we take no more.

    What is on its way to a consumer when that is cancelled, the broker takes back, and counts as a
    delivery that failed (seen with 4.3.6). Where all that may be held is here, nothing is on its way.
    """
    arriving.keep()
    loop = asyncio.get_running_loop()
    until = loop.time() + LULL
    while arriving.unanswered < most and loop.time() < until and not ended.done():
        await asyncio.sleep(LULL / 20)


def _emptied(deliveries: asyncio.Queue[Delivery | None]) -> Iterator[Delivery]:
    while not deliveries.empty():
        if (waiting := deliveries.get_nowait()) is not None:
            yield waiting


async def _all_of(tasks: set[asyncio.Task[None]], within: float | None = None) -> None:
    if tasks:
        await asyncio.wait(set(tasks), timeout=within)


def _why_closed(closing: asyncio.Future[Any]) -> str:
    error = None if closing.cancelled() else closing.exception()
    return words(error) if error else "the channel was closed"
