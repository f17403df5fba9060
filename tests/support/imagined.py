"""An imagined broker: queues, lines and worker processes in memory, with a clock that is told the time.

Real are the worker, its sessions, the publisher, the handling of deliveries, their headers. Imagined is
what lies between them and the broker, and the broker, as 3.10, 4.0 and 4.3 were measured to be. Every
process has an event loop of its own, which takes one step when told to: so a process may die, and a
line break, between any two steps.

    Broker     queues, what is unacked, expiry, delivery limits
    Line       a connection: what is written on it arrives in order, later, or not at all
    Process    a worker, its event loop and its handlers that run
    World      all of them, and what must never be
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import aiormq.exceptions as amqp
from aiormq.channel import Channel
from pamqp.commands import Basic

from rabbit_tasks import App, Consumer, Message, Park, RetryPolicy, Settings, declare, history
from rabbit_tasks import delivery as delivery_module
from rabbit_tasks import message as names
from rabbit_tasks import publisher as publisher_module
from rabbit_tasks import worker as worker_module
from rabbit_tasks.errors import ConnectError
from rabbit_tasks.frames import BODY, HEADER, METHOD, Tap
from rabbit_tasks.properties import Properties
from rabbit_tasks.settings import Address
from rabbit_tasks.topology import PARKING_LOT, parked_queue, topology_of
from rabbit_tasks.worker import Worker

MAIN: Final = "life"
PARKED: Final = parked_queue(MAIN)
SETTINGS: Final = Settings(url="amqp://imagined/", grace=10)
Key = tuple[str, int, int]
"""One try of a message: its name, failed attempts before, replays before."""


class Handlers(Consumer[bytes]):
    """What all imagined consumers have in common: the test says how each run ends."""

    queue = MAIN

    def __init__(self, process: Process) -> None:
        self.process = process

    async def handle(self, body: bytes, message: Message) -> None:
        await self.process.run(body, message)


@cache
def consumer(limit: int, attempts: int, concurrency: int) -> type[Handlers]:
    """A class with this delivery limit, so many attempts and slots."""

    class Imagined(Handlers):
        queue = MAIN
        retry = RetryPolicy(attempts=attempts, base=timedelta(milliseconds=200), jitter=False)

    Imagined.delivery_limit = limit
    Imagined.concurrency = concurrency
    return Imagined


# --- the broker -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Letter:
    """A message in one queue."""

    body: bytes
    properties: Properties
    count: int = 0
    acquired: int = 0
    returned: bool = False
    due: float = float("inf")

    @property
    def name(self) -> str:
        return self.body.decode()

    @property
    def key(self) -> Key:
        last = self.properties.header(names.REPLAYED)
        replays = last["count"] if isinstance(last, dict) else 0
        return self.name, names.retry_count(self.properties), replays


@dataclass(eq=False)
class Queue:
    name: str
    ttl: float | None
    limit: int | None
    ready: deque[Letter] = field(default_factory=deque)
    full: bool = False
    """It refuses what is published to it."""
    mute: bool = False
    """It stores and does not confirm."""


class Broker:
    def __init__(self, world: World) -> None:
        self.world = world
        self.queues: dict[str, Queue] = {}
        self.held: list[tuple[str, Letter]] = []
        """Dead letters whose queue is missing (at-least-once)."""
        self.instances: Counter[str] = Counter()
        self.consumers: deque[Pipe] = deque()

    def create(self, name: str) -> None:
        arguments = self.world.arguments[name]
        ttl = arguments.get("x-message-ttl")
        limit = arguments.get("x-delivery-limit") if name == MAIN else None
        self.queues[name] = Queue(name, None if ttl is None else ttl / 1000, limit)

    def delete(self, name: str) -> None:
        """By an operator: what is in it is gone, and its consumers are told."""
        queue = self.queues.pop(name)
        for letter in queue.ready:
            self._destroy(letter)
        if name == MAIN:
            for pipe in [pipe for line in self.world.lines() for pipe in line.pipes]:
                for letter in pipe.unacked.values():
                    self._destroy(letter)
                pipe.unacked.clear()
                if pipe in self.consumers:
                    self.consumers.remove(pipe)
                    pipe.line.into.append(pipe.cancelled)

    def _destroy(self, letter: Letter) -> None:
        self.instances[letter.name] -= 1
        self.world.destroyed.add(letter.name)

    def publish(self, exchange: str, key: str, body: bytes, properties: Properties) -> Queue | None:
        """The queue that has it now; None where there is none, or it is full."""
        queue = self.queues.get(parked_queue(key) if exchange == PARKING_LOT else key)
        if queue is not None and not queue.full:
            self.instances[body.decode()] += 1
            self._store(queue, Letter(body, properties))
        return queue

    def _store(self, queue: Queue, letter: Letter) -> None:
        if queue.ttl is not None:
            letter.due = self.world.now + queue.ttl
        queue.ready.append(letter)
        if queue.name == PARKED:
            self.world.see_parked(letter)

    def expire(self) -> None:
        """Dead letters go where they go, as far as there is room; the others are held."""
        held, self.held = self.held, []
        for target, letter in held:
            self._move(target, letter)
        for queue in self.queues.values():
            while queue.ready and queue.ready[0].due <= self.world.now:
                self._dead_letter(MAIN, queue.ready.popleft(), queue.name, "expired")

    def _dead_letter(self, target: str, letter: Letter, queue: str, reason: str) -> None:
        when = datetime.fromtimestamp(int(self.world.now), UTC)
        death = {"count": 1, "reason": reason, "queue": queue, "time": when}
        headers = {"x-death": [death], "x-first-death-queue": queue}
        if self.world.version != "3.10":
            headers["x-last-death-queue"] = queue
        self._move(target, Letter(letter.body, letter.properties.replace(headers)))

    def _move(self, target: str, letter: Letter) -> None:
        queue = self.queues.get(target)
        if queue is None or queue.full:
            self.held.append((target, letter))
        else:
            self._store(queue, letter)

    def deliver(self) -> bool:
        """Hand out one message, where a consumer has room."""
        queue = self.queues.get(MAIN)
        for _ in range(len(self.consumers) if queue and queue.ready else 0):
            assert queue is not None
            pipe = self.consumers[0]
            self.consumers.rotate(-1)
            if len(pipe.unacked) < pipe.prefetch:
                letter = queue.ready.popleft()
                tag = next(pipe.tags)
                pipe.unacked[tag] = letter
                pipe.line.into.append(partial(pipe.deliver, tag, letter, self._shown(letter)))
                return True
        return False

    def _shown(self, letter: Letter) -> Properties:
        headers = {}
        if letter.count:
            headers[names.DELIVERY_COUNT] = letter.count
        if letter.acquired and self.world.version == "4.3":
            headers[names.ACQUIRED_COUNT] = letter.acquired
        return letter.properties.replace(headers) if headers else letter.properties

    def give_back(self, letter: Letter, *, counted: bool = True) -> None:
        """To the front of its queue; or to the parking lot, where that was once too often."""
        queue = self.queues.get(MAIN)
        assert queue is not None, "the unacked of a queue go with it"
        letter.returned = True
        letter.acquired += 1
        letter.count += counted
        assert queue.limit is not None
        if letter.count > queue.limit:
            self._dead_letter(PARKED, letter, MAIN, "delivery_limit")
        else:
            queue.ready.appendleft(letter)

    def ack(self, pipe: Pipe, tag: int, *, together: bool = False) -> None:
        """Of one delivery; or of all that are no later."""
        if together:
            for earlier in [one for one in pipe.unacked if one < tag]:
                self.ack(pipe, earlier)
        letter = pipe.unacked.pop(tag, None)
        if letter is not None:
            self.instances[letter.name] -= 1
            self.world.see_acked(letter)
        elif pipe in self.consumers:
            self.world.fault("an ack for what was not in hand")

    def reject(self, pipe: Pipe, tag: int) -> None:
        letter = pipe.unacked.pop(tag, None)
        if letter is not None:
            self._dead_letter(PARKED, letter, MAIN, "rejected")

    def forget(self, pipe: Pipe, *, counted: bool = True) -> None:
        """The channel is gone, or its consumer: whatever it held goes back, the last one first."""
        if pipe in self.consumers:
            self.consumers.remove(pipe)
        for tag in sorted(pipe.unacked, reverse=True):
            letter = pipe.unacked.pop(tag)
            self.world.see_returned(pipe.line.process, letter)
            self.give_back(letter, counted=counted)


# --- between the broker and its clients -----------------------------------------------------------


_REJECT: Final = b"\0\x3c\0\x5a"
_CHANNEL: Any = Channel  # (whose many parameters nobody here gives)


class Pipe(_CHANNEL):  # type: ignore[misc]
    """A channel."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.unacked: dict[int, Letter] = {}
        self.prefetch = 1
        self.tags = itertools.count(1)
        self.published = itertools.count(1)
        self.on_consumer_cancel_callbacks: set[Callable[[Any], Any]] = set()
        self.waiting: set[asyncio.Future[Any]] = set()
        self._closed: asyncio.Future[Any] = line.process.loop.create_future()
        self.number = len(line.pipes) + 1
        self._cancelled_at = float("inf")

    @property
    def closing(self) -> asyncio.Future[Any]:
        return self._closed

    @property
    def is_closed(self) -> bool:
        return self._closed.done()

    def __hash__(self) -> int:
        return id(self)

    def __str__(self) -> str:
        return "imagined"

    __repr__ = __str__

    def end(self, error: BaseException | None) -> None:
        """On the client's side: it is gone."""
        if not self._closed.done():
            if error is None:
                self._closed.set_result(None)
            else:
                self._closed.set_exception(error)
                self._closed.exception()
        for future in self.waiting:
            if not future.done():
                if self.line.process.world.stuck:
                    future.cancel()  # as the library does where a connection hung
                else:
                    future.set_exception(error or amqp.ChannelInvalidStateError("closed"))
                    future.exception()
        self.waiting.clear()

    async def ask(self, do: Callable[[], Any]) -> Any:
        """A question to the broker, and its answer."""
        if self.is_closed:
            raise amqp.ChannelInvalidStateError("closed")
        future = self.line.process.loop.create_future()
        self.waiting.add(future)
        self.line.out.append(partial(self._answer, do, future))
        try:
            return await future
        finally:
            self.waiting.discard(future)

    def _answer(self, do: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        answer = do()
        if answer is not ...:
            self.line.into.append(partial(_settle, future, answer))

    def _tell(self, do: Callable[[], Any]) -> None:
        if self.is_closed:
            raise amqp.ChannelInvalidStateError("closed")
        self.line.out.append(do)

    async def basic_qos(self, prefetch_count: int, **_: Any) -> Any:
        self.prefetch = prefetch_count
        return await self.ask(lambda: None)

    async def basic_consume(self, queue: str, *_: Any, **__: Any) -> Any:
        broker = self.line.broker

        def consume() -> Any:
            if queue not in broker.queues:
                broker.forget(self)
                self.line.into.append(partial(self.end, amqp.ChannelNotFoundEntity("no queue")))
                return ...
            broker.consumers.append(self)
            return None

        return await self.ask(consume)

    async def basic_cancel(self, tag: str, **_: Any) -> Any:
        def cancel() -> None:
            if self in self.line.broker.consumers:
                self.line.broker.consumers.remove(self)

        return await self.ask(cancel)

    def answer(self, method: bytes) -> None:
        """An ack or a reject has been written."""
        tag = int.from_bytes(method[4:12], "big")
        if method[:4] == _REJECT:
            self._tell(lambda: self.line.broker.reject(self, tag))
            return
        # (In the same moment it cannot know, and it closes the channel at once.)
        if self._cancelled_at < self.line.process.world.now:
            self.line.process.world.fault("an ack for a consumer that was cancelled")
        together = method[12] & 1 == 1
        self._tell(lambda: self.line.broker.ack(self, tag, together=together))

    async def rpc(self, _: Any, **__: Any) -> Any:
        return await self.ask(lambda: None)

    def publish(self, exchange: str, key: str, properties: bytes, body: bytes) -> None:
        """Written here; its answers come as frames, as those of a real broker do."""
        tag = next(self.published)

        def publish() -> None:
            decoded = Properties.decode(properties)
            queue = self.line.broker.publish(exchange, key, body, decoded)
            frames = []
            if queue is None:
                returned = Basic.Return(312, "NO_ROUTE", exchange, key)
                size = len(body).to_bytes(8, "big")
                frames += [(1, _method(50, returned)), (2, bytes(4) + size + properties + b"\xce")]
                frames += [(3, body + b"\xce")] if body else []
            if queue is None or not queue.mute:
                is_full = queue is not None and queue.full
                answer = _method(120, Basic.Nack(tag)) if is_full else _method(80, Basic.Ack(tag))
                frames.append((1, answer))
            for kind, payload in frames:
                self.line.into.append(partial(self.line.taps[self], kind, payload))

        self._tell(publish)

    async def close(self, *_: Any, **__: Any) -> None:
        with suppress(amqp.ChannelInvalidStateError):
            await self.ask(lambda: self.line.broker.forget(self))
        self.end(None)

    def deliver(self, tag: int, letter: Letter, shown: Properties) -> None:
        """A message has come."""
        if not self.is_closed:
            method = b"\0\x3c\0\x3c\0" + tag.to_bytes(8, "big") + bytes([letter.returned, 0, 0])
            header = b"\0\x3c\0\0" + len(letter.body).to_bytes(8, "big") + shown.encode()
            for kind, payload in ((METHOD, method), (HEADER, header), (BODY, letter.body)):
                assert self.line.taps[self](kind, payload + b"\xce")

    def give_up(self) -> None:
        """The broker's patience with its consumer is over: by version, the channel goes or it alone."""
        broker, is_new = self.line.broker, self.line.process.world.version == "4.3"
        is_cancelled = (
            self not in broker.consumers
        )  # by the client, and this is what it left in hand
        broker.forget(self, counted=not is_new)
        if is_new and not is_cancelled:
            self.line.into.append(self.cancelled)
        else:
            timed_out = amqp.ChannelPreconditionFailed("delivery acknowledgement timed out")
            self.line.into.append(partial(self.end, timed_out))

    def cancelled(self) -> None:
        """The broker has cancelled the consumer."""
        self._cancelled_at = self.line.process.world.now
        for callback in tuple(self.on_consumer_cancel_callbacks):
            callback(None)


def _method(number: int, arguments: Any) -> bytes:
    """Of the basic class, as it goes on the wire, with its end mark."""
    return b"\x00\x3c" + number.to_bytes(2, "big") + bytes(arguments.marshal()) + b"\xce"


def _first(frames: bytes) -> tuple[int, list[bytes], bytes]:
    """The channel of the first method, it and the payloads of its message, and what is left."""
    payloads: list[bytes] = []
    at = 0
    while at < len(frames) and (not payloads or frames[at] != 1):
        end = at + 7 + int.from_bytes(frames[at + 3 : at + 7], "big")
        payloads.append(frames[at + 7 : end])
        at = end + 1
    return int.from_bytes(frames[1:3], "big"), payloads, frames[at:]


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    if not future.done():
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class Line:
    """A connection."""

    frame_max = 131_072
    channel_max = 2_047
    is_blocked = False
    free_since = 0.0
    unsent = 0
    close_reason = None
    address = Address("imagined", 5672, "guest", "guest", "/", tls=False)

    def __init__(self, process: Process) -> None:
        self.process = process
        self.broker = process.world.broker
        self.server_version = process.world.version
        self.on_blocked: Callable[[bool], None] = lambda _: None
        self.out: deque[Callable[[], Any]] = deque()
        self.into: deque[Callable[[], Any]] = deque()
        self.is_lost = False
        self.is_down = False
        """As the broker sees it."""
        self.pipes: list[Pipe] = []
        self.taps: dict[Pipe, Tap] = {}

    async def open(self, *, confirms: bool = False) -> Pipe:
        if self.is_lost:
            raise amqp.ChannelInvalidStateError("connection closed")
        pipe = Pipe(self)
        self.pipes.append(pipe)
        await pipe.ask(lambda: None)
        return pipe

    def tap(self, pipe: Pipe, tap: Tap) -> None:
        self.taps[pipe] = tap

    def write(self, frames: bytes) -> None:
        """Answers; and publishes: of each a method, a header, and a body where it has one."""
        while frames:
            number, (method, *message), frames = _first(frames)
            pipe = self.pipes[number - 1]
            if pipe.is_closed:
                continue
            if not message:
                pipe.answer(method)
                continue
            sent = Basic.Publish()
            sent.unmarshal(method[4:])
            pipe.publish(sent.exchange, sent.routing_key, message[0][12:], b"".join(message[1:]))

    @property
    def is_writable(self) -> bool:
        return not self.is_lost

    def flush(self) -> None: ...

    async def unblocked(self) -> None: ...

    async def end(self, within: float = 3.0) -> None:
        if not self.is_lost and self.pipes and not self.pipes[0].is_closed:
            with suppress(Exception):
                async with asyncio.timeout(within):
                    await self.pipes[0].ask(self.down)
        self.abort()
        await asyncio.sleep(0)

    def abort(self) -> None:
        """By the client. What was written may still arrive."""
        if not self.is_lost:
            self.out.append(self.down)
            self.lose()

    def down(self) -> None:
        """The broker takes notice that it is gone."""
        self.is_down = True
        self.out.clear()
        for pipe in reversed(self.pipes):
            self.broker.forget(pipe)

    def lose(self) -> None:
        """The client takes notice that it is gone."""
        self.is_lost = True
        self.into.clear()
        for pipe in self.pipes:
            pipe.end(ConnectionResetError("line broken"))

    def cut(self, arrive: int, *, client_first: bool = False) -> None:
        """It breaks: so many of the things that were written still arrive, and nothing comes back."""
        kept = list(itertools.islice(self.out, arrive))
        self.out.clear()
        if client_first or self.process.is_dead:
            self.out.extend([*kept, self.down])
            self.lose()
            return
        for do in kept:
            do()
        self.down()
        self.into.clear()
        self.into.append(self.lose)


# --- worker processes -----------------------------------------------------------------------------


class Loop(asyncio.SelectorEventLoop):
    """An event loop that is told the time, and when to take a step."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._soon = False
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        super().__init__()
        self.set_exception_handler(lambda *_: None)  # of what dies there is much to complain

    def time(self) -> float:
        return self.process.world.now

    def call_soon(self, *args: Any, **kwargs: Any) -> asyncio.Handle:  # type: ignore[override]
        self._soon = True
        return super().call_soon(*args, **kwargs)

    def call_at(self, when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        handle = super().call_at(when, *args, **kwargs)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def next_timer(self) -> float:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else float("inf")

    @property
    def is_due(self) -> bool:
        """Whether there is something to do at once."""
        return self._soon or self.next_timer() <= self.time()

    @contextmanager
    def running(self) -> Iterator[None]:
        """As in a step of it: what arrives is read there."""
        asyncio._set_running_loop(self)  # noqa: SLF001 (there for whoever writes an event loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001

    def step(self) -> None:
        """Once around."""
        self._soon = False
        while self.next_timer() <= self.time():
            heapq.heappop(self._timers)
        self.stop()
        self.run_forever()


@dataclass(eq=False)
class Running:
    key: Key
    has_id: bool
    end: asyncio.Future[str]


class Process:
    """A worker process."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.is_dead = False
        self.stops = 0
        self.lines: list[Line] = []
        self.running: list[Running] = []
        self.loop = Loop(self)
        self._spawned: set[asyncio.Task[None]] = set()
        self.worker = Worker(
            App("imagined", [world.consumer(self)]),
            SETTINGS.model_copy(update={"worker_name": f"process-{number}"}),
        )
        self.task = self.loop.create_task(self.worker.run())

    def spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    async def run(self, body: bytes, message: Message) -> None:
        """What the handler does."""
        if self.is_dead:
            raise asyncio.CancelledError
        letter = Letter(body, message.properties)
        running = Running(letter.key, message.id is not None, self.loop.create_future())
        self.world.see_begun(self, running, message)
        self.running.append(running)
        try:
            how = await running.end
        finally:
            self.running.remove(running)
        if how == "raise":
            raise ValueError("told to")
        if how == "park":
            raise Park("told to")
        self.world.done[letter.name] += 1

    def stop(self) -> None:
        self.stops += 1
        self.worker.stop()

    def die(self, arrive: int) -> None:
        """SIGKILL."""
        self.is_dead = True
        self.running.clear()
        for line in self.lines:
            if not line.is_down:
                line.cut(arrive)
        self.close()

    def close(self) -> None:
        """Unwind what is left of its tasks, which nobody sees any more."""
        self.is_dead = True
        for line in self.lines:
            if not line.is_lost:
                line.lose()
        if self.loop.is_closed():
            return
        with self.loop.running():  # of what has no task of its own, too
            for intake in self.worker._intakes:  # noqa: SLF001
                for walk in tuple(intake.in_hand):
                    walk.cancel()
        self.loop.step()
        for _ in range(100):
            tasks = asyncio.all_tasks(self.loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            for _ in range(3):
                self.loop.step()
        self.loop.close()


# --- all together ---------------------------------------------------------------------------------


class World:
    """A broker, some worker processes, and the time."""

    def __init__(self, version: str, limit: int, attempts: int, concurrency: int) -> None:
        self.version = version
        self.kind = consumer(limit, attempts, concurrency)
        self.consumer: Callable[[Process], Handlers] = self.kind
        self.now = 1_000_000.0
        self.is_up = True
        self.stuck = False
        """Calls on a line that breaks end by CancelledError."""
        self.rough = False
        """Something happened while something else was still going on, or parts were missing."""
        self.is_shaken = False
        """A worker that lives has lost a message that it had."""
        self.arguments = {q.name: q.arguments for q in topology_of([self.kind]).queues}
        self.broker = Broker(self)
        for name in self.arguments:
            self.broker.create(name)
        self.processes: list[Process] = []
        self.published: Counter[str] = Counter()
        """How many there are of one name."""
        self.done: Counter[str] = Counter()
        self.destroyed: set[str] = set()
        self.faults: list[str] = []
        self.deaths: Counter[Key] = Counter()
        self.shocks: defaultdict[Key, list[int]] = defaultdict(list)
        self.runs: Counter[str] = Counter()
        self._numbers = itertools.count(1)

    # --- what must never be

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def see_acked(self, letter: Letter) -> None:
        name = letter.name
        if self._is_short(name):
            self.fault(f"{name} is lost: acked, not done, and there is no copy")

    def _is_short(self, name: str) -> bool:
        """Whether there were more of it than are there, or done."""
        there = self.broker.instances[name] + self.done[name]
        return there < self.published[name] and name not in self.destroyed

    def see_begun(self, process: Process, running: Running, message: Message) -> None:
        self.runs[running.key[0]] += 1
        limit = self.kind.delivery_limit
        alone = self.published[running.key[0]] == 1
        if alone and self.deaths[running.key] > limit and not (self.rough or self.is_shaken):
            self.fault(f"{running.key[0]} runs again after {self.deaths[running.key]} deaths")
        if message.attempt > self.kind.retry.attempts:
            self.fault(f"{running.key[0]}: attempt {message.attempt}")
        if (
            running.has_id
            and self.published[running.key[0]] == 1
            and any(other.has_id and other.key == running.key for other in process.running)
            and self.broker.instances[running.key[0]] < 2
        ):
            self.fault(f"{running.key[0]} runs twice at once in one process")

    def see_returned(self, process: Process, letter: Letter) -> None:
        if process.is_dead:
            self.deaths[letter.key] += 1
        else:
            self.is_shaken = True
            self.shocks[letter.key].append(process.number)

    def see_parked(self, letter: Letter) -> None:
        if letter.key[1] > self.kind.retry.attempts:
            self.fault(f"{letter.name}: parked after {letter.key[1]} attempts")
        reason = history.reason(letter.properties)
        if "delivery limit" in reason and self.published[letter.name] == 1 and not self.rough:
            self.fault(f"{letter.name}: parked by the broker's limit, in calm")
        if found := re.fullmatch(r"its worker died (\d+) times", reason):
            counted = int(found[1])
            shocks = self.shocks[letter.key]
            # An interruption of another worker looks like a death: twice for each of them at most,
            # unless they come faster than it can be handled, or a real death in between has brought
            # the message back to a worker that was interrupted with it before.
            deaths = self.deaths[letter.key]
            allowed = deaths + (len(shocks) if self.rough or deaths else 2 * len(set(shocks)))
            if not self.kind.delivery_limit < counted <= allowed:
                self.fault(f"{letter.name}: parked after {counted} deaths; there were {allowed}")

    # --- what may happen

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.is_dead]

    def start(self) -> Process:
        process = Process(self, next(self._numbers))
        self.processes.append(process)
        return process

    def publish(self, *, with_id: bool = True, alike: int = 1) -> str:
        """One message, or several of which nothing tells one from the other."""
        name = f"m{next(self._numbers)}"
        # (One whose ack may be lost settles another one that is published in the same second.)
        when = datetime.fromtimestamp(self.now, UTC) if alike == 1 else None
        properties = Properties.of(
            {"theirs": name}, message_id=name if with_id else None, delivery_mode=2, timestamp=when
        )
        for _ in range(alike):
            self.published[name] += 1
            self.broker.publish("", MAIN, name.encode(), properties)
        return name

    def replay(self) -> None:
        """Everything that is parked."""
        queue = self.broker.queues.get(PARKED)
        main = self.broker.queues.get(MAIN)
        if queue is None or main is None or main.full:
            return
        while queue.ready:
            letter = queue.ready.popleft()
            self.now += 0.001
            copy = history.replayed(
                letter.properties, when=datetime.fromtimestamp(self.now, UTC), message_id="new",
                frame_max=Line.frame_max,
            )  # fmt: skip
            self.broker.publish("", MAIN, letter.body, copy)
            self.broker.instances[letter.name] -= 1

    def lines(self) -> Iterator[Line]:
        """Those on which something may still happen."""
        for process in self.processes:
            process.lines = [line for line in process.lines if not (line.is_down and line.is_lost)]
            yield from process.lines

    def steps(self) -> Iterator[bool]:
        """One thing after another, each in its turn; whether something is left to do."""
        while True:
            left = False
            for process in list(self.processes):
                if not process.is_dead and process.loop.is_due:
                    process.loop.step()
                    left = True
                    self._see_ended(process)
                    yield True
            for line in list(self.lines()):
                if line.out and not line.is_down:
                    line.out.popleft()()
                    left = True
                    yield True
                if line.into and not line.process.is_dead:
                    with line.process.loop.running():
                        line.into.popleft()()
                    left = True
                    yield True
            self.broker.expire()
            left = self.broker.deliver() or left
            yield left

    def _see_ended(self, process: Process) -> None:
        if process.task.done():
            error = None if process.task.cancelled() else process.task.exception()
            if not process.stops or error is not None:
                self.fault(f"a worker has ended: {error!r}")
            for line in process.lines:
                line.abort()
            process.close()

    def some(self, steps: int) -> None:
        for _ in itertools.islice(self.steps(), steps):
            pass

    def idle(self) -> None:
        """Until nothing is left to do at once."""
        for count, left in enumerate(self.steps()):
            if not left:
                return
            assert count < 100_000, "it never comes to rest"

    def wait(self, seconds: float) -> None:
        """Time goes by, and everything happens when it is due."""
        until = self.now + seconds
        self.idle()
        while (due := self._next_due()) <= until:
            self.now = max(self.now, due)
            self.idle()
        self.now = until
        self.idle()

    def _next_due(self) -> float:
        timers = [process.loop.next_timer() for process in self.alive]
        letters = [q.ready[0].due for q in self.broker.queues.values() if q.ready]
        return min([*timers, *(due for due in letters if due > self.now)], default=float("inf"))

    # --- the end

    def heal(self) -> None:
        """Everything is there and up; somebody works."""
        self.is_up = True
        for name in self.arguments:
            if name not in self.broker.queues:
                self.broker.create(name)
        for queue in self.broker.queues.values():
            queue.full = queue.mute = False
        if all(process.stops for process in self.alive):
            self.start()

    def finish(self) -> None:
        """Until nothing waits any more but what is parked."""
        for _ in range(200):
            self.idle()
            for process in self.alive:
                for running in process.running:
                    if not running.end.done():
                        running.end.set_result("ok")
            self.idle()
            if not self.waiting():
                return
            # (Who looks every second has something to do every second.)
            self.wait(min(30.0, max(5.0, self._next_due() - self.now)))
        self.fault(f"it never ends: {self.waiting()} in {self.where()}")

    def waiting(self) -> int:
        queues = self.broker.queues.values()
        return (
            sum(len(queue.ready) for queue in queues if queue.name != PARKED)
            + len(self.broker.held)
            + self.unacked()
        )

    def unacked(self) -> int:
        return sum(len(pipe.unacked) for line in self.lines() for pipe in line.pipes)

    def where(self) -> dict[str, int]:
        return {q.name: len(q.ready) for q in self.broker.queues.values() if q.ready}

    def check(self) -> None:
        """What holds at every moment."""
        for name in self.published:
            if self._is_short(name):
                self.fault(f"{name} is nowhere")
        assert not self.faults, self.faults

    def check_rest(self) -> None:
        """At rest: all is done or parked, and every slot takes the next message."""
        parked = Counter(letter.name for letter in self.broker.queues[PARKED].ready)
        for name in self.published.keys() - self.destroyed:
            if self.done[name] + parked[name] < self.published[name]:
                self.fault(f"{name} is neither done nor parked")
            if self.broker.instances[name] != parked[name]:
                self.fault(f"{name}: {self.broker.instances[name]} in the books")
        working = [process for process in self.alive if not process.stops]
        for process in working:
            if process.running:
                self.fault("a handler runs, of which no delivery knows")
        probes = [self.publish() for _ in range(len(working) * self.kind.concurrency)]
        self.wait(60)
        held = sum(len(process.running) for process in working)
        if held != len(probes):
            self.fault(f"{held} of {len(probes)} slots take messages")
        self.finish()
        for process in self.alive:
            process.stop()
        self.wait(60)
        if self.alive:
            self.fault("a worker that was asked to stop is still there")
        assert not self.faults, self.faults

    def close(self) -> None:
        for process in self.processes:
            process.close()


@contextmanager
def imagining() -> Iterator[Callable[[World], None]]:
    """Workers that are made within this block live in the world that was told of last."""
    worlds: list[World] = []

    async def connect(*_: Any) -> Line:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        await asyncio.sleep(0)
        if loop.process.is_dead or not loop.process.world.is_up:
            raise ConnectError("nobody is there")
        line = Line(loop.process)
        loop.process.lines.append(line)
        return line

    async def missing(*_: Any) -> list[str]:
        return []

    def now() -> float:
        return worlds[-1].now

    clock = SimpleNamespace(monotonic=now, time=now, perf_counter=now)
    with (
        patch.object(worker_module, "connect", connect),
        patch.object(publisher_module, "connect", connect),
        patch.object(declare, "missing", missing),
        patch.object(worker_module, "Watchdog", lambda *_: SimpleNamespace(start=int, stop=int)),
        patch.object(worker_module, "time", clock),
        patch.object(delivery_module, "time", clock),
        patch.object(publisher_module, "time", clock),
    ):
        yield worlds.append
