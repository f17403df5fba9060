"""Handlers in child processes: one child per slot, which can be killed and may crash.

Our own and not a pool from PyPI, because it must be known whose message a dying child had, a kill
must not hurt the others (no shared queue or lock), and a child is asked once per message.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import io
import logging
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from rabbit_tasks import consumer as consumers
from rabbit_tasks import history
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.message import Message
from rabbit_tasks.process import end_with_parent, ending
from rabbit_tasks.properties import Properties
from rabbit_tasks.retry import Done, Outcome, Parked, RetryAfter

# Not fork: the parent has threads and an event loop, of which a forked child gets a broken half.
_SPAWN: Final = multiprocessing.get_context("spawn")
_NOT_FOR_CHILDREN: Final = (signal.SIGINT, signal.SIGTERM)
_MIB: Final = 1_048_576

START_TIMEOUT: Final = 60.0
"""Seconds for a child to load the consumer: its imports, and whatever its __setstate__ does."""
LEAVE_TIMEOUT: Final = 10.0
"""Seconds for a child that is asked for nothing more to end by itself."""
_REAP_TIMEOUT: Final = 5.0
_LOOK: Final = 500
"""Milliseconds between two looks at a child whose death nothing tells."""

log = logging.getLogger("rabbit_tasks")


class ChildDied(Exception):
    """The handler's process ended before the handler did."""


class Children:
    """The child processes of one consumer, made as they are needed, at most one per slot.

    And beside one that is to be recycled its successor, which loads while the old one works on.
    """

    def __init__(
        self,
        consumer: Consumer[Any],
        *,
        redact: Callable[[str], str] | None = None,
        log_setup: Callable[[], None] | None = None,
    ) -> None:
        kind = type(consumer)
        try:
            # In two: what importing the consumer's module logs and prints is to be kept as well.
            self._crossing = (pickle.dumps(log_setup), pickle.dumps((consumer, redact)))
        except Exception as error:
            raise ConfigurationError(
                f'{kind.__qualname__} has isolation = "process", but cannot be sent to a child '
                f"process: {_culprit(consumer)}{error}; give it what can be pickled (paths, URLs, "
                "settings) and open connections in the handler"
            ) from None
        self._kind = kind
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._coming: set[asyncio.Task[_Child]] = set()
        # A thread waits for each child that works, and for each that loads.
        self._threads = ThreadPoolExecutor(2 * kind.concurrency, f"{kind.__qualname__}-child")

    async def attempt(self, message: Message) -> Outcome:
        """Handle the message in a child; the outcome, with the error as text.

        When the time is up, or the calling task is cancelled, the child is killed.
        """
        limit = self._kind.timeout.total_seconds() if self._kind.timeout else None
        loop = asyncio.get_running_loop()
        child = await self._rested()
        child.asked += 1
        if child.asked == self._kind.recycle_after:
            self._replace(child)
        try:
            async with asyncio.timeout(limit):
                outcome = await loop.run_in_executor(self._threads, child.ask, message)
        except TimeoutError as error:
            self._end(child)
            raise TimeoutError(f"the handler outlasted its {limit:g} s and was killed") from error
        except BaseException:
            self._end(child)
            raise
        above = self._kind.recycle_above
        if above is not None and child.memory > above and not child.is_replaced:
            self._replace(child)
        if child.is_spent:
            self._retire(child)
        else:
            self._idle.append(child)
        return outcome

    async def _rested(self) -> _Child:
        """An idle child, else one that is being started, else a new one.

        One that died meanwhile has no message that could answer for it.
        """
        while self._idle or self._coming:
            if not self._idle:
                coming = self._coming.pop()  # ours now: nobody else waits for it
                try:
                    self._idle.append(await coming)
                except (ChildDied, OSError):
                    continue  # it was told of, and costs no message an attempt
            child = self._idle.pop()
            if child.is_alive:
                return child
            log.warning("%s: %s while it was idle", self._kind.__qualname__, child.ending)
            self._end(child)
        return await self._new()

    async def _new(self) -> _Child:
        child = _Child()
        self._all.add(child)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await asyncio.get_running_loop().run_in_executor(
                    self._threads, child.load, self._crossing
                )
        except TimeoutError:
            self._end(child)
            raise ChildDied(
                f"the handler's process did not start within {START_TIMEOUT:g} s"
            ) from None
        except BaseException:
            self._end(child)
            raise
        return child

    # --- recycling ------------------------------------------------------------------------------

    def _replace(self, old: _Child) -> None:
        """Start the successor of a child, so that no message waits for it to load.

        The last message of `recycle_after` is the last one; a child with too much memory works on
        until its successor is there, or where that cannot start.
        """
        old.is_replaced = True
        old.is_spent = old.asked == self._kind.recycle_after
        coming = asyncio.create_task(self._new())
        self._coming.add(coming)

        def come(_: asyncio.Task[_Child]) -> None:
            is_ours = coming in self._coming  # or else a message has waited for it
            self._coming.discard(coming)
            if coming.cancelled() or coming.exception() is not None:
                old.is_replaced = False
                if not coming.cancelled():
                    log.warning(
                        "%s: no new child process: %s", self._kind.__qualname__, coming.exception()
                    )
                return
            if is_ours:
                self._idle.append(coming.result())
            old.is_spent = True
            if old in self._idle:
                self._idle.remove(old)
                self._retire(old)

        coming.add_done_callback(come)

    def _retire(self, child: _Child) -> None:
        self._all.discard(child)
        log.info(
            "%s: child process %d recycled after %d messages%s",
            self._kind.__qualname__, child.pid, child.asked,
            f" with {child.memory} MiB" if child.memory else "",
        )  # fmt: skip
        child.leave()

    def _end(self, child: _Child) -> None:
        self._all.discard(child)
        child.kill()

    # --- all of them ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Have every child ready, so that the first messages do not wait for imports.

        ConfigurationError where a child cannot load the consumer.
        """
        starting = [self._new() for _ in range(self._kind.concurrency - len(self._idle))]
        for child in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(child, BaseException):
                self.close()
                raise ConfigurationError(
                    f"{self._kind.__qualname__} cannot be loaded in a child process: {child}"
                ) from child
            self._idle.append(child)

    def close(self) -> None:
        """Kill the children; they are gone a moment later."""
        for coming in self._coming:
            coming.cancel()
        self._coming.clear()
        while self._all:
            self._end(next(iter(self._all)))
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _culprit(consumer: Consumer[Any]) -> str:
    """The attribute that cannot be pickled, where it is one."""
    if type(consumer).__reduce_ex__ is object.__reduce_ex__:
        for name, value in getattr(consumer, "__dict__", {}).items():
            try:
                pickle.dumps(value)
            except Exception:
                return f"its {name}: "
    return ""


class _Child:
    """One child process and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        # What comes before the child has handlers of its own waits for them: a terminal's Ctrl-C at
        # that moment must not look like a consumer that cannot be loaded. (The tracker first: to
        # start it, multiprocessing would let them in again.)
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_CHILDREN)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.asked = 0
        """Messages it was given."""
        self.memory = 0
        """MiB that it had after the last one, where that is asked."""
        self.is_replaced = False
        """Its successor was started."""
        self.is_spent = False
        """It takes no more messages."""
        # What tells that the process is gone. Not the end of its pipe, nor its sentinel, which is the
        # end of another one: a handler that forks leaves a process behind that holds both open.
        self._news = select.poll()
        self._news.register(self._pipe, select.POLLIN)
        with suppress(AttributeError, OSError):  # Linux alone has it, and some sandboxes do not
            gone = os.pidfd_open(self.pid)
            weakref.finalize(self, os.close, gone)
            self._news.register(gone, select.POLLIN)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def load(self, crossing: tuple[bytes, bytes]) -> None:
        """Blocks until the child has loaded the consumer; ChildDied where it cannot."""
        # Through the pipe and not as arguments of the process: those are written where it is
        # started, in the event loop, and the child reads them when it gets to it.
        if (fault := self._answer(crossing)) is not None:
            raise ChildDied(str(fault))

    def ask(self, message: Message) -> Outcome:
        """Blocks until the child answers; ChildDied where it does not."""
        outcome: Outcome
        outcome, self.memory = self._answer(
            (message.queue, message.body, message.properties.encode(), message.redelivered)
        )
        return outcome

    def _answer(self, asked: object) -> Any:
        try:
            self._pipe.send(asked)
        except OSError:
            pass  # it is dead: the receiving end says how
        try:
            pipe = self._pipe.fileno()
            while pipe not in dict(self._news.poll(_LOOK)):
                # (Dead, and a last word may have come in between.)
                if not self.is_alive and not self._pipe.poll():
                    raise EOFError
            return self._pipe.recv()
        except (EOFError, OSError):
            self._kill_group()
            self._reap()
            raise ChildDied(self.ending) from None

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        code = self._process.exitcode
        if code is None:
            return "the handler's process closed its connection to the worker and did not end"
        return f"the handler's process {ending(code)}"

    def leave(self) -> None:
        """Have it end by itself, and waits for nothing."""
        self._pipe.close()
        self._in_background(self._reap_after, LEAVE_TIMEOUT)

    def kill(self) -> None:
        """Sends the signal and waits for nothing: a process may take long to go."""
        self._kill_group()
        self._process.kill()
        self._in_background(self._reap)

    def _kill_group(self) -> None:
        """What the handler has started goes with it, or a second try would run beside it."""
        with suppress(OSError):  # gone, or not yet a group
            os.killpg(self.pid, signal.SIGKILL)

    def _in_background(self, do: Callable[..., None], *arguments: Any) -> None:
        # A daemon: what is left to do at the end of a worker must not look like a handler's thread.
        threading.Thread(target=do, args=arguments, name="reap-child", daemon=True).start()

    def _reap_after(self, patience: float) -> None:
        self._reap(patience)
        if self.is_alive:
            self._process.kill()
            self._reap()

    def _reap(self, patience: float = _REAP_TIMEOUT) -> None:
        """Blocks until the process is gone."""
        # Asked again and again, because of two threads that wait for one process the kernel tells
        # one alone; the other sees it once the first has written it down.
        deadline = time.monotonic() + patience
        while self._process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.005)


# --- in the child -------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    # The parent decides when a child ends; a terminal or a service manager signals all of a group.
    # (Not SIG_IGN: programs that the handler starts would inherit it, and no terminate() end them.)
    for number in _NOT_FOR_CHILDREN:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_CHILDREN)
    os.register_at_fork(after_in_child=lambda: _be_another(pipe))
    with suppress(OSError):
        os.setpgid(0, 0)  # a group of its own, with whatever the handler starts
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # It is a daemon to its parent, which kills it; but it may well have processes of its own.
    multiprocessing.current_process().daemon = False
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A child may end by being killed: what it printed must be out by then.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        logs, handling = pipe.recv()
    except (EOFError, OSError):
        return
    try:
        if (log_setup := pickle.loads(logs)) is not None:
            log_setup()
        consumer, redact = pickle.loads(handling)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    serving = _Serving(pipe, consumer, redact)
    if consumers.is_async(type(consumer)):
        asyncio.run(serving.in_loop())
    else:
        serving.without_loop()


def _be_another(pipe: Connection) -> None:
    """In a process that a handler forks: it neither answers for the message nor ignores signals."""
    pipe.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _end_with_parent() -> None:
    """A worker that was killed must not leave a handler running beside its redelivery."""
    # The kernel does it even where the handler never lets this thread run, as a bad regular expression
    # does not.
    end_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Serving:
    """A child's work: one message after another, until the parent closes the pipe."""

    def __init__(
        self, pipe: Connection, consumer: Consumer[Any], redact: Callable[[str], str] | None
    ) -> None:
        self._pipe = pipe
        self._consumer = consumer
        self._redact = redact

    def without_loop(self) -> None:
        """For `def`, which may well run an event loop of its own."""
        while (message := self._next()) is not None:
            self._tell(contextvars.copy_context().run(self._call, message))

    async def in_loop(self) -> None:
        """For `async def`, in a loop that goes on between messages, for connections kept open."""
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        # Read in the callback itself: any later, and the loop finds the pipe readable once more.
        loop.add_reader(self._pipe, lambda: messages.put_nowait(self._next()))
        while (message := await messages.get()) is not None:
            # A task of its own, as in handler.py: it may cancel itself, and its context variables
            # end with its message.
            ended: list[Outcome] = []
            await asyncio.wait([loop.create_task(self._await(message, ended))])
            self._tell(ended[0] if ended else self._outcome(message, asyncio.CancelledError()))

    def _next(self) -> Message | None:
        try:
            queue, body, properties, redelivered = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return Message(queue, body, Properties.decode(properties), redelivered=redelivered)

    def _tell(self, outcome: Outcome) -> None:
        is_asked = type(self._consumer).recycle_above is not None
        self._pipe.send((outcome, memory() if is_asked else 0))

    def _call(self, message: Message) -> Outcome:
        try:
            result: Any = self._handle(message)
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise TypeError("handle returned an awaitable: write it as async def")
            return Done()
        except BaseException as error:
            return self._outcome(message, error)

    async def _await(self, message: Message, ended: list[Outcome]) -> None:
        try:
            await self._handle(message)  # type: ignore[misc]
            ended.append(Done())
        except BaseException as error:
            ended.append(self._outcome(message, error))

    def _handle(self, message: Message) -> Awaitable[None] | None:
        body = consumers.decode(type(self._consumer), message.body)
        return self._consumer.handle(body, message)

    def _outcome(self, message: Message, error: BaseException) -> Outcome:
        """As in delivery.py: an outcome, whatever it is; with the error as text."""
        log.debug("handler failed in its process", exc_info=error)
        told = history.FailedElsewhere(history.failure_of(error, self._redact))
        outcome = self._consumer.retry.after_failure(message.attempt, error, draw=random.random())
        if isinstance(outcome, RetryAfter):
            return RetryAfter(outcome.attempt, outcome.delay, told)
        return Parked(outcome.reason, told)


def memory() -> int:
    """MiB that this process holds in memory; where there is no /proc, its most so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // _MIB
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak // _MIB if sys.platform == "darwin" else peak // 1024
