"""Sessions, consuming, stopping.

    Worker.run          one session after another until asked to stop
    Worker._session     the connection and its slots, until the connection is lost
    Worker._slots       consume on one channel after another (Intake); for each delivery: process

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
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import aiormq.exceptions as amqp
import tenacity

from rabbit_tasks import declare, timeouts
from rabbit_tasks.app import App
from rabbit_tasks.broker import (
    CLOSE_TIMEOUT,
    LOST,
    Connection,
    connect,
    is_cancelled,
    words,
)
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.deadline import Deadline
from rabbit_tasks.delivery import (
    NO_CONFIRM,
    SHAKEN,
    Delivery,
    Handling,
)
from rabbit_tasks.durations import duration_text
from rabbit_tasks.errors import (
    ConfigurationError,
    ConnectError,
    RabbitTasksError,
    TopologyError,
)
from rabbit_tasks.history import failure_of
from rabbit_tasks.intake import CALM, FAULT, OFTEN, Intake
from rabbit_tasks.publisher import Publisher
from rabbit_tasks.repeats import Repeats
from rabbit_tasks.settings import Settings
from rabbit_tasks.topology import topology_of
from rabbit_tasks.walk import Walk
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
        self._consuming: set[asyncio.Task[None]] = set()
        self._intakes: set[Intake] = set()
        self._spare: Counter[tuple[Connection, Handling]] = Counter()
        """Slots that wait for others to share a channel with."""
        self._main: asyncio.Task[Any] | None = None
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
        self._main = asyncio.current_task()
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
        rejoining = asyncio.create_task(self._rejoin(connection))
        try:
            await self._unless_stopped(publisher.connect())
            await self._unless_stopped(self._make_sure(connection))
            if self._stop.is_set():
                return
            for handling in self._handlings:
                if self._worked:
                    handling.calm_from = time.monotonic() + SHAKEN
                self._begin(self._slots(connection, handling, handling.kind.concurrency))
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
            while self._consuming:
                await _all_of(self._consuming)
            if not self._stop.is_set():
                code, text = connection.close_reason or (0, "")
                why = f": {code} {text}" if code else ", without a word from the broker"
                raise ConnectError(f"connection lost{why}")
        except asyncio.CancelledError:
            if not is_cancelled():
                raise ConnectError("connection lost") from None
            self.stop()
            self.stop()
            while self._consuming:
                await _all_of(self._consuming)
            raise
        finally:
            rejoining.cancel()
            await connection.end(self._left(CLOSE_TIMEOUT))

    async def _make_sure(self, connection: Connection) -> None:
        """Create or look up what we need: TopologyError, but for a worker that has worked before.

        That one goes on with the queues that are there: what is missing holds up only its own.
        """
        # (As many as slots where all of them have messages that take their time.)
        kinds = [handling.kind for handling in self._handlings]
        wanted = sum(kind.concurrency if kind.prefetch == 1 else 1 for kind in kinds)
        if wanted + SPARE_CHANNELS > connection.channel_max:
            raise ConfigurationError(
                f"{wanted} slots may need as many channels, and the broker allows "
                f"{connection.channel_max} on a connection (channel_max): lower concurrency, or start "
                "two workers, each with some of the queues"
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

    def _begin(self, consuming: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(consuming)
        self._consuming.add(task)
        task.add_done_callback(self._consuming.discard)

    async def _slots(self, connection: Connection, handling: Handling, slots: int) -> None:
        """Consume on one channel after another, as long as the connection lives."""
        failures = 0
        while not (connection.is_lost or self._stop.is_set()):
            started = time.monotonic()
            intake = self._intake(connection, handling, slots)
            try:
                why = await intake.run()
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
                log.exception(FAULT, handling.kind.queue)
                why = "fault in rabbit_tasks"
            if connection.is_lost or self._stop.is_set() or intake.has_parted:
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

    def _intake(self, connection: Connection, handling: Handling, slots: int) -> Intake:
        intake = Intake(
            connection,
            handling,
            slots,
            stop=self._stop,
            repeats=self._repeats,
            left=self._left,
            is_ending=lambda: self._main is not None and self._main.cancelling() > 0,
            on_ready=self._ready,
            on_free=partial(self._freed, connection, handling),
            on_gone=self._intakes.discard,
        )
        self._intakes.add(intake)
        return intake

    def _ready(self) -> None:
        if self._on_ready is not None:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()

    def _freed(self, connection: Connection, handling: Handling, slots: int) -> None:
        """Let slots that parted from a channel go on with another, together with others that are
        about to."""
        if connection.is_lost or self._stop.is_set():
            return
        if not self._spare[connection, handling]:
            self._begin(self._together(connection, handling))
        self._spare[connection, handling] += slots

    async def _together(self, connection: Connection, handling: Handling) -> None:
        while any(one.is_parting for one in self._of(connection, handling)):
            await asyncio.sleep(OFTEN)
        await self._slots(connection, handling, self._spare.pop((connection, handling)))

    async def _rejoin(self, connection: Connection) -> None:
        """Let slots share a channel again, when all their messages have been quick for a while."""
        while True:
            await asyncio.sleep(CALM)
            for handling in self._handlings:
                apart = self._of(connection, handling)
                if len(apart) > 1 and all(one.is_calm for one in apart):
                    for one in apart:
                        one.part()

    def _of(self, connection: Connection, handling: Handling) -> list[Intake]:
        """Those that deliver."""
        return [
            one for one in self._intakes
            if one.connection is connection and one.handling is handling and not one.is_over
        ]  # fmt: skip

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
        await self._all_through(reserve * 0.4)
        self._cancel_handlers()
        await _all_of(self._consuming, self._left(but=reserve * 0.2))
        await self._all_through(self._left(but=reserve * 0.2))
        left = self._in_hand()
        if in_hand := [delivery for _, delivery in left if not delivery.is_answered]:
            log.warning(
                "%d messages are neither settled nor put back, and the time is over: the broker "
                "delivers them again", len(in_hand), extra={"fields": {"worker": self.name}},
            )  # fmt: skip
        for walk, _ in left:
            walk.cancel()
        for task in self._consuming:
            task.cancel()
        # Whoever still waits for the broker is told that it is gone.
        if self._publisher is not None:
            self._publisher.abort()
        if self._connection is not None:
            self._connection.abort()

    def _in_hand(self) -> list[tuple[Walk, Delivery]]:
        return [each for intake in self._intakes for each in intake.in_hand.items()]

    def _cancel_handlers(self) -> None:
        for walk, delivery in self._in_hand():
            if not delivery.settling:
                walk.cancel()

    async def _all_through(self, within: float) -> None:
        """Wait until nothing is in hand."""
        waiting = {asyncio.create_task(one.through()) for one in self._intakes}
        await _all_of(waiting, within)
        for task in waiting:
            task.cancel()

    async def _finish(self, stopper: asyncio.Task[None]) -> None:
        """Handlers whose connection was lost end like the others: in time, or cancelled."""
        if not self._stop.is_set():
            self._failed = True
            self._be_gone_within(max(self._settings.grace.total_seconds(), SOONEST))
            self._stop.set()
            self._stop_now.set()
        await self._all_through(self._left())
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


async def _all_of(tasks: set[asyncio.Task[None]], within: float | None = None) -> None:
    if tasks:
        await asyncio.wait(set(tasks), timeout=within)
