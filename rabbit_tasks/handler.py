"""How a handler is called: a coroutine in a task, a function in a thread.

(In a child process: isolation.py.)
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from rabbit_tasks import consumer as consumers
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.message import Message
from rabbit_tasks.walk import Ended

log = logging.getLogger("rabbit_tasks")


class Handler:
    """The handler of one consumer."""

    def __init__(self, consumer: Consumer[Any]) -> None:
        self._consumer = consumer
        self._kind = type(consumer)
        self.is_async = consumers.is_async(self._kind)
        self._threads: Executor | None = None

    def close(self) -> None:
        """No more messages. A thread that still runs cannot be stopped."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def call(self, body: bytes, message: Message) -> None:
        """Decode and handle; returns when the handler does, and raises what it raises, whatever that is.

        When the calling task is cancelled a coroutine is cancelled too; a thread goes on.
        """
        if not self.is_async:
            await self._in_thread(consumers.decode(self._kind, body), message)
            return
        # In a task of its own: a handler, or a library that it uses, may cancel the task in which it
        # runs. In ours that would look as if the worker had to go. Nor do its context variables
        # outlive its message.
        loop = asyncio.get_running_loop()
        ended = Ended(loop=loop)
        task = loop.create_task(self._run(body, message, ended))
        task.add_done_callback(partial(_cancelled, ended))
        try:
            error = await ended
        except asyncio.CancelledError:
            task.cancel()
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                task.cancel()
                raise
            if task.cancelled() or task.result() is not None:
                raise
            return
        if error is not None:
            raise error

    async def _run(self, body: bytes, message: Message, ended: Ended) -> BaseException | None:
        """How it ended, as a value: SystemExit out of a task would end the event loop."""
        error: BaseException | None = None
        try:
            await self._in_time(consumers.decode(self._kind, body), message)
        except BaseException as raised:
            error = raised
        ended.tell(error)
        return error

    async def _in_time(self, body: Any, message: Message) -> None:
        if self._kind.timeout is None:
            await self._consumer.handle(body, message)  # type: ignore[misc]
            return
        limit = self._kind.timeout.total_seconds()
        late = asyncio.get_running_loop().call_later(limit + 10, self._overdue, message.id)
        try:
            async with asyncio.timeout(limit) as timeout:
                await self._consumer.handle(body, message)  # type: ignore[misc]
        except TimeoutError as error:
            if timeout.expired():
                raise TimeoutError(f"the handler outlasted its {limit:g} s") from error
            raise
        finally:
            late.cancel()

    def _overdue(self, message_id: str | None) -> None:
        log.error(
            "%s does not stop: its time was up 10 s ago, it was cancelled, and it still runs with "
            "message %s; let CancelledError pass, or use isolation = \"process\"",
            self._kind.__qualname__, message_id,
            extra={"fields": {"queue": self._kind.queue, "id": message_id}},
        )  # fmt: skip

    async def _in_thread(self, body: Any, message: Message) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._kind.concurrency, self._kind.__qualname__)
        # Errors come back as values: StopIteration cannot be set on a future, and the slot would
        # wait for ever.
        call = partial(contextvars.copy_context().run, _call, self._consumer, body, message)
        error = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        if error is not None:
            raise error


def _cancelled(ended: Ended, _: object) -> None:
    """Whoever waits is told of a task that was cancelled before its first step, too."""
    ended.tell(asyncio.CancelledError())


def _call(consumer: Consumer[Any], body: Any, message: Message) -> BaseException | None:
    try:
        result: Any = consumer.handle(body, message)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError("handle returned an awaitable: write it as async def")
    except BaseException as error:  # (carried to the slot that waits for it)
        return error
    return None
