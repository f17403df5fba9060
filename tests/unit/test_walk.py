"""A walk: without a task as long as nothing needs one, and as if in one where something does."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

from rabbit_tasks.broker import is_cancelled
from rabbit_tasks.walk import Ended, Walk


class Way:
    """What a walk's coroutine does, and how it ended."""

    def __init__(self) -> None:
        self.ended = Ended()
        self.steps: list[str] = []
        self.over: list[BaseException | None] = []
        self.is_ending = False

    def begin(self, work: Coroutine[Any, Any, None], *, in_a_task: bool = False) -> Walk:
        walk = Walk(
            work,
            contextvars.copy_context(),
            lambda _, error: self.over.append(error),
            lambda: self.is_ending,
        )
        walk.begin(in_a_task=in_a_task)
        return walk

    async def handle(self) -> None:
        self.steps.append("begun")
        try:
            error = await self.ended
        except asyncio.CancelledError:
            self.steps.append("ours" if is_cancelled() else "not ours")
            raise
        self.steps.append("in a task" if _own_task() else "at once")
        if error is not None:
            async with asyncio.timeout(1):
                await asyncio.sleep(0)
            self.steps.append("waited")


def _own_task() -> bool:
    """Whether the running task is one of a walk, and not the test's."""
    task = asyncio.current_task()
    return task is not None and "_rest" in repr(task)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_it_is_begun_and_ended_without_a_turn_of_the_event_loop() -> None:
    way = Way()
    tasks = asyncio.all_tasks()
    way.begin(way.handle())
    assert way.steps == ["begun"]
    way.ended.tell(None)
    assert way.steps == ["begun", "at once"]
    assert way.over == [None]
    assert asyncio.all_tasks() == tasks


async def test_after_a_failure_it_goes_on_in_a_task_of_its_own() -> None:
    way = Way()
    way.begin(way.handle())
    way.ended.tell(ValueError())
    assert way.steps == ["begun"]
    await turns()
    assert way.steps == ["begun", "in a task", "waited"]
    assert way.over == [None]


async def test_it_waits_in_a_task_for_anything_but_its_handler() -> None:
    way, gate = Way(), asyncio.Event()

    async def first_wait() -> None:
        await gate.wait()
        await way.handle()

    way.begin(first_wait())
    await turns()
    assert way.steps == []
    gate.set()
    await turns()
    assert way.steps == ["begun"]
    way.ended.tell(None)
    await turns()
    assert way.steps == ["begun", "in a task"]
    assert way.over == [None]


async def test_in_a_task_from_its_beginning_it_is_the_same() -> None:
    way = Way()
    way.begin(way.handle(), in_a_task=True)
    assert way.steps == []
    await turns()
    way.ended.tell(None)
    await turns()
    assert way.over == [None]


async def test_cancelled_while_its_handler_runs_it_hears_of_it_as_a_task_does() -> None:
    for in_a_task in (False, True):
        way = Way()
        walk = way.begin(way.handle(), in_a_task=in_a_task)
        await turns()
        walk.cancel()
        await turns()
        assert way.steps == ["begun", "ours"]
        (error,) = way.over
        assert isinstance(error, asyncio.CancelledError)


async def test_cancelled_in_the_moment_of_its_beginning_it_hears_of_it_too() -> None:
    way = Way()
    way.begin(way.handle(), in_a_task=True).cancel()
    await turns()
    assert way.steps == ["begun", "ours"]
    assert len(way.over) == 1


async def test_it_may_hold_on_to_a_first_cancellation_and_not_to_a_second() -> None:
    way = Way()

    async def stubborn() -> None:
        try:
            await way.ended
        except asyncio.CancelledError:
            way.steps.append("held on")
            await asyncio.Event().wait()

    walk = way.begin(stubborn())
    walk.cancel()
    await turns()
    assert way.over == []
    walk.cancel()
    await turns()
    assert way.steps == ["held on"]
    assert len(way.over) == 1


async def test_a_handler_that_cancels_itself_is_a_failure_and_with_its_loop_a_cancellation() -> (
    None
):
    way = Way()
    way.begin(way.handle())
    way.ended.tell(asyncio.CancelledError())
    await turns()
    assert way.steps == ["begun", "in a task", "waited"]
    last = Way()
    last.is_ending = True
    last.begin(last.handle())
    last.ended.tell(asyncio.CancelledError())
    await turns()
    assert len(last.over) == 1
    assert isinstance(last.over[0], asyncio.CancelledError)


async def test_what_it_raises_is_told_whether_in_a_task_or_not() -> None:
    for in_a_task in (False, True):
        way, fault = Way(), RuntimeError("ours to mend")

        async def break_down(fault: Exception = fault) -> None:
            raise fault

        way.begin(break_down(), in_a_task=in_a_task)
        await turns()
        assert way.over == [fault]
