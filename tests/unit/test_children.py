"""Child processes that do not start, or do not go: nobody waits for them longer than is said."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from rabbit_tasks import ConfigurationError, Consumer, Message
from rabbit_tasks import isolation as module
from rabbit_tasks.isolation import ChildDied, Children
from rabbit_tasks.properties import Properties
from tests.support.workers import is_gone

MESSAGE = Message("q", b"x", Properties.of())


class Hangs(Consumer[bytes]):
    """Is pickled, and never made again on the other side."""

    queue = "hangs"
    isolation = "process"
    concurrency = 2

    def __init__(self) -> None:
        self.made_in = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        time.sleep(600)

    def handle(self, body: bytes, message: Message) -> None: ...


class Sleeps(Consumer[bytes]):
    queue = "sleeps"
    isolation = "process"
    timeout = timedelta(milliseconds=100)

    def handle(self, body: bytes, message: Message) -> None:
        time.sleep(600)


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    before = pids()
    yield
    left, deadline = pids() - before, time.monotonic() + 5
    while not all(map(is_gone, left)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(is_gone, left))


def pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


@asynccontextmanager
async def children_of(consumer: Consumer[bytes]) -> AsyncIterator[Children]:
    children = Children(consumer)
    try:
        yield children
    finally:
        children.close()


async def test_a_child_that_hangs_while_it_loads_is_a_failed_attempt_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT", 0.3)
    async with children_of(Hangs()) as children, asyncio.timeout(10):
        with pytest.raises(ChildDied, match=r"did not start within 0\.3 s"):
            await children.attempt(MESSAGE)
        assert await all_gone()


async def test_a_child_that_hangs_while_it_loads_ends_the_start_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT", 0.3)
    async with children_of(Hangs()) as children, asyncio.timeout(10):
        with pytest.raises(ConfigurationError, match=r"Hangs cannot be loaded .* within 0\.3 s"):
            await children.start()
        assert await all_gone()


@pytest.mark.parametrize("work", ["attempt", "start"])
async def test_whoever_is_cancelled_while_a_child_loads_leaves_none_behind(work: str) -> None:
    async with children_of(Hangs()) as children, asyncio.timeout(10):
        task = asyncio.ensure_future(
            children.attempt(MESSAGE) if work == "attempt" else children.start()
        )
        while not pids():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await all_gone()


async def test_the_event_loop_never_waits_for_a_process_to_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaped: list[threading.Thread] = []
    reap = module._Child._reap  # noqa: SLF001

    def slow(child: module._Child) -> None:
        reaped.append(threading.current_thread())
        time.sleep(1)
        reap(child)

    async with children_of(Sleeps()) as children:
        await children.start()
        monkeypatch.setattr(module._Child, "_reap", slow)  # noqa: SLF001
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"outlasted its 0\.1 s and was killed"):
            await children.attempt(MESSAGE)
        assert time.monotonic() - began < 0.9
        assert await all_gone()
    assert reaped
    assert threading.main_thread() not in reaped


async def all_gone() -> bool:
    async with asyncio.timeout(5):
        while pids():
            await asyncio.sleep(0.01)
    return True
