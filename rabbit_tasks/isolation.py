"""Handlers in child processes: one child per slot, which can be killed and may crash.

Our own and not a pool from PyPI, because it must be known whose message a dying child had, a kill
must not hurt the others (no shared queue or lock), and a child is asked once per message.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from rabbit_tasks import consumer as consumers
from rabbit_tasks import history
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.message import Message
from rabbit_tasks.properties import Properties
from rabbit_tasks.retry import Done, Outcome, Parked, RetryAfter

# Not fork: the parent has threads and an event loop, of which a forked child gets a broken half.
_SPAWN: Final = multiprocessing.get_context("spawn")
_PR_SET_PDEATHSIG: Final = 1

START_TIMEOUT: Final = 60.0
"""Seconds for a child to load the consumer: its imports, and whatever its __setstate__ does."""
_REAP_TIMEOUT: Final = 5.0

log = logging.getLogger("rabbit_tasks")


class ChildDied(Exception):
    """The handler's process ended before the handler did."""


class Children:
    """The child processes of one consumer, made as they are needed, at most one per slot."""

    def __init__(
        self,
        consumer: Consumer[Any],
        *,
        redact: Callable[[str], str] | None = None,
        log_setup: Callable[[], None] | None = None,
    ) -> None:
        kind = type(consumer)
        try:
            self._crossing = pickle.dumps((consumer, redact, log_setup))
        except Exception as error:
            raise ConfigurationError(
                f'{kind.__qualname__} has isolation = "process", but cannot be sent to a child '
                f"process: {error}; give it what can be pickled (paths, URLs, settings) and open "
                "connections in the handler"
            ) from None
        self._kind = kind
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._threads = ThreadPoolExecutor(kind.concurrency, f"{kind.__qualname__}-child")

    async def attempt(self, message: Message) -> Outcome:
        """Handle the message in a child; the outcome, with the error as text.

        When the time is up, or the calling task is cancelled, the child is killed.
        """
        limit = self._kind.timeout.total_seconds() if self._kind.timeout else None
        loop = asyncio.get_running_loop()
        child = self._rested() or await self._new()
        try:
            async with asyncio.timeout(limit):
                outcome = await loop.run_in_executor(self._threads, child.ask, message)
        except TimeoutError as error:
            self._end(child)
            raise TimeoutError(f"the handler outlasted its {limit:g} s and was killed") from error
        except BaseException:
            self._end(child)
            raise
        self._idle.append(child)
        return outcome

    def _rested(self) -> _Child | None:
        """An idle child. One that died meanwhile has no message that could answer for it."""
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            log.warning("%s: %s while it was idle", self._kind.__qualname__, child.ending)
            self._end(child)
        return None

    async def _new(self) -> _Child:
        child = _Child(self._crossing)
        self._all.add(child)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await asyncio.get_running_loop().run_in_executor(self._threads, child.ready)
        except TimeoutError:
            self._end(child)
            raise ChildDied(
                f"the handler's process did not start within {START_TIMEOUT:g} s"
            ) from None
        except BaseException:
            self._end(child)
            raise
        return child

    def _end(self, child: _Child) -> None:
        self._all.discard(child)
        child.kill()

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
        while self._all:
            self._end(next(iter(self._all)))
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Child:
    """One child process and the pipe to it."""

    def __init__(self, crossing: bytes) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, crossing), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Blocks until the child has loaded the consumer; ChildDied where it cannot."""
        if (fault := self._receive()) is not None:
            raise ChildDied(str(fault))

    def ask(self, message: Message) -> Outcome:
        """Blocks until the child answers; ChildDied where it does not."""
        asked = (message.queue, message.body, message.properties.encode(), message.redelivered)
        try:
            self._pipe.send(asked)
        except OSError:
            pass  # it is dead: the receiving end says how
        outcome: Outcome = self._receive()
        return outcome

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._reap()
            raise ChildDied(self.ending) from None

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        return _ending(self._process.exitcode)

    def kill(self) -> None:
        """Sends the signal and waits for nothing: a process may take long to go."""
        self._process.kill()
        # A daemon: what is left to do at the end of a worker must not look like a handler's thread.
        threading.Thread(target=self._reap, name="reap-child", daemon=True).start()

    def _reap(self) -> None:
        """Blocks until the process is gone."""
        # Asked again and again, because of two threads that wait for one process the kernel tells
        # one alone; the other sees it once the first has written it down.
        deadline = time.monotonic() + _REAP_TIMEOUT
        while self._process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.005)


def _ending(code: int | None) -> str:
    if code is None:
        return "the handler's process closed its connection to the worker and did not end"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the handler's process was killed by {name}"
    return f"the handler's process ended by itself with exit code {code}"


# --- in the child -------------------------------------------------------------------------------


def _serve(pipe: Connection, crossing: bytes) -> None:
    # The parent decides when a child ends; a terminal or a service manager signals all of a group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A child ends by being killed, also at a clean stop: what it printed must be out by then.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        consumer, redact, log_setup = pickle.loads(crossing)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    if log_setup is not None:
        log_setup()
    pipe.send(None)
    with asyncio.Runner() as runner:
        while True:
            try:
                queue, body, properties, redelivered = pipe.recv()
            except (EOFError, OSError):
                return
            message = Message(queue, body, Properties.decode(properties), redelivered=redelivered)
            pipe.send(runner.run(_attempt(consumer, message, redact)))


def _end_with_parent() -> None:
    """A worker that was killed must not leave a handler running beside its redelivery."""
    if sys.platform == "linux":
        # The kernel does it even where the handler never lets this thread run, as a bad regular
        # expression does not.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


async def _attempt(
    consumer: Consumer[Any], message: Message, redact: Callable[[str], str] | None
) -> Outcome:
    try:
        result: Any = consumer.handle(consumers.decode(type(consumer), message.body), message)
        if result is not None:
            await result
        return Done()
    except BaseException as error:  # as in delivery.py: an outcome, whatever it is
        log.debug("handler failed in its process", exc_info=True)
        told = history.FailedElsewhere(history.failure_of(error, redact))
        outcome = consumer.retry.after_failure(message.attempt, error, draw=random.random())
        if isinstance(outcome, RetryAfter):
            return RetryAfter(outcome.attempt, outcome.delay, told)
        return Parked(outcome.reason, told)
