"""A delivery's walk through `process`, without a task as long as nothing needs one.

A task for every message beside that of its handler would be two more turns of the event loop for each,
and on one slot a turn costs as much as all the rest. So a walk is begun where the delivery arrives, and
goes on in the last step of its handler's task, if all is well. What has anything to wait for but its
handler, or to tell the broker but an ack, becomes a task.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any


class Ended(asyncio.Future[BaseException | None]):
    """How a handler ended: nothing, or what it raised.

    on_told     called at once, in the last step of the handler's task, instead of in a later turn of
                the event loop
    """

    on_told: Callable[[], None] | None = None

    def tell(self, error: BaseException | None) -> None:
        """Once; the first word counts."""
        if self.done():
            return
        self.set_result(error)
        if self.on_told is not None:
            self.on_told()


class Walk:
    """One delivery on its way.

    coroutine   `process`, not yet begun
    context     what all of it runs in
    on_end      called with the walk and what it raised, when it is over
    is_ending   whether the event loop is about to end, and has cancelled all tasks of it
    """

    __slots__ = ("_context", "_coroutine", "_ended", "_is_ending", "_on_end", "_task")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        context: contextvars.Context,
        on_end: Callable[[Walk, BaseException | None], None],
        is_ending: Callable[[], bool],
    ) -> None:
        self._coroutine = coroutine
        self._context = context
        self._on_end = on_end
        self._is_ending = is_ending
        self._ended: Ended | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, *, in_a_task: bool) -> None:
        """Go on until the handler runs; or in a task, if it may have to wait before that."""
        if in_a_task:
            self._become(self._coroutine)
        else:
            self._context.run(self._step)

    def cancel(self) -> None:
        """As a task is cancelled."""
        if self._ended is not None:
            self._wait_in_a_task()
        # Not before its first step, which would never be taken.
        asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _step(self) -> None:
        self._ended = None
        try:
            found = self._coroutine.send(None)
        except StopIteration:
            self._on_end(self, None)
        except Exception as error:  # (DeliveryLost, or a fault of ours)
            self._on_end(self, error)
        else:
            if isinstance(found, Ended):
                self._ended = found
                found.on_told = self._told
            else:
                self._become(_rest(self._coroutine, found))

    def _told(self) -> None:
        ended = self._ended
        assert ended is not None
        error = ended.result()
        if error is None:
            self._context.run(self._step)
        # (isinstance asks the error itself, whose class may raise anything.)
        elif issubclass(type(error), asyncio.CancelledError) and self._is_ending():
            # It did not cancel itself: every task was, and of ours there was none.
            self.cancel()
        else:
            self._wait_in_a_task()

    def _wait_in_a_task(self) -> None:
        ended, self._ended = self._ended, None
        assert ended is not None
        ended.on_told = None
        self._become(_rest(self._coroutine, ended))

    def _become(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(coroutine, context=self._context)
        self._task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._on_end(self, asyncio.CancelledError() if task.cancelled() else task.exception())


async def _rest(coroutine: Coroutine[Any, Any, None], found: Any) -> None:
    """The rest of a coroutine that has been begun outside of a task and waits for something.

    (From Python 3.12 on a task takes no generator.)
    """
    await _waiting(coroutine, found)


@types.coroutine
def _waiting(coroutine: Coroutine[Any, Any, None], found: Any) -> Generator[Any, Any, None]:
    while True:
        go_on: Callable[[], Any]
        try:
            go_on = partial(coroutine.send, (yield found))
        except BaseException as error:
            go_on = partial(coroutine.throw, error)
        try:
            found = go_on()
        except StopIteration:
            return
