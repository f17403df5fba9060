"""Child processes: what handlers may do in them, how they are recycled, and how they end."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rabbit_tasks import ConfigurationError, Consumer, Done, Message, Parked, RetryAfter
from rabbit_tasks import isolation as module
from rabbit_tasks.isolation import ChildDied, Children
from rabbit_tasks.properties import Properties
from rabbit_tasks.retry import Outcome
from tests.conftest import eventually
from tests.support import confined
from tests.support.confined import Big, Does, DoesAsync, Outlasts, Small, Tells, Twice, noted
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
def _notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the consumers of tests.support.confined write what they do."""
    monkeypatch.setenv("CONFINED_LOG", str(tmp_path / "notes"))


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    before = pids()
    yield
    left, deadline = pids() - before, time.monotonic() + 30
    while not all(map(is_gone, left)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(is_gone, left))


def pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


@asynccontextmanager
async def children_of(consumer: Consumer[Any]) -> AsyncIterator[Children]:
    children = Children(consumer)
    try:
        yield children
    finally:
        children.close()


async def test_a_child_that_hangs_while_it_loads_is_a_failed_attempt_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT", 0.3)
    async with children_of(Hangs()) as children, asyncio.timeout(30):
        with pytest.raises(ChildDied, match=r"did not start within 0\.3 s"):
            await children.attempt(MESSAGE)
        assert await all_gone()


async def test_a_child_that_hangs_while_it_loads_ends_the_start_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT", 0.3)
    async with children_of(Hangs()) as children, asyncio.timeout(30):
        with pytest.raises(ConfigurationError, match=r"Hangs cannot be loaded .* within 0\.3 s"):
            await children.start()
        assert await all_gone()


@pytest.mark.parametrize("work", ["attempt", "start"])
async def test_whoever_is_cancelled_while_a_child_loads_leaves_none_behind(work: str) -> None:
    async with children_of(Hangs()) as children, asyncio.timeout(30):
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

    attempted = threading.Event()

    def slow(child: module._Child) -> None:
        reaped.append(threading.current_thread())
        assert attempted.wait(30)
        reap(child)

    async with children_of(Sleeps()) as children:
        await children.start()
        monkeypatch.setattr(module._Child, "_reap", slow)  # noqa: SLF001
        with pytest.raises(TimeoutError, match=r"outlasted its 0\.1 s and was killed"):
            await children.attempt(MESSAGE)
        attempted.set()
        assert await all_gone()
    assert reaped
    assert threading.main_thread() not in reaped


async def all_gone() -> bool:
    async with asyncio.timeout(30):
        while pids():
            await asyncio.sleep(0.01)
    return True


# --- what handlers may do -------------------------------------------------------------------------


async def do(children: Children, what: str) -> Outcome:
    message = Message("q", what.encode(), Properties.of(message_id=what))
    return await children.attempt(message)


async def pid_of(children: Children, what: str = "") -> int:
    """The child that handled it."""
    outcome = await do(children, what)
    assert isinstance(outcome, Parked)
    return int(outcome.reason)


async def test_a_def_in_a_child_may_do_what_it_may_in_a_thread() -> None:
    async with children_of(Does()) as children:
        for what in ("runs_a_loop", "returns_a_value", "has_processes", "ends_a_program"):
            assert await do(children, what) == Done(), what
        wrong = await do(children, "returns_an_awaitable")
        assert isinstance(wrong, RetryAfter)
        assert "write it as async def" in str(wrong.error)
        assert len(pids()) == 1


@pytest.mark.parametrize("consumer", [Does(), DoesAsync()])
async def test_context_variables_end_with_their_message(consumer: Consumer[str]) -> None:
    async with children_of(consumer) as children:
        for _ in range(2):
            outcome = await do(children, "sees")
            assert isinstance(outcome, Parked)
            assert outcome.reason == "nothing"


async def test_the_loop_of_an_async_handler_goes_on_between_messages() -> None:
    async with children_of(DoesAsync()) as children:
        assert await do(children, "leaves_a_task") == Done()
        await eventually(lambda: noted("later"))


async def test_an_async_handler_that_cancels_itself_as_it_returns_is_done() -> None:
    async with children_of(DoesAsync()) as children:
        assert await do(children, "cancels_itself") == Done()
        (child,) = pids()
        assert await do(children, "is_well") == Done()
        assert pids() == {child}


async def test_a_consumer_is_imported_once_per_child_and_after_the_logs_are_set_up() -> None:
    children = Children(Tells(), log_setup=confined.log_setup)
    try:
        (child,) = {await pid_of(children) for _ in range(3)}
        # (What sets the logs up in this test stands in the consumer's own module.)
        assert confined.words() == ["import", "logs", "load"]
        assert noted("load") == [child]
    finally:
        children.close()


# --- how they end ---------------------------------------------------------------------------------


async def test_a_handler_that_forked_before_it_died_is_noticed_and_leaves_nothing() -> None:
    async with children_of(Does()) as children, asyncio.timeout(30):
        with pytest.raises(ChildDied, match="killed by SIGSEGV"):
            await do(children, "forks_and_dies")
        (fork,) = noted("fork")
        await eventually(lambda: is_gone(fork))


async def test_a_handler_that_returns_in_a_forked_process_too_answers_once() -> None:
    async with children_of(Does()) as children, asyncio.timeout(30):
        assert await do(children, "forks_and_returns_twice") == Done()
        assert {await pid_of(children, "tells_its_process")} == pids()


async def test_what_a_handler_started_is_killed_with_it_when_its_time_is_up() -> None:
    async with children_of(Outlasts()) as children, asyncio.timeout(30):
        await children.start()
        with pytest.raises(TimeoutError, match=r"outlasted its 0\.3 s and was killed"):
            await do(children, "")
        (program,) = noted("fork")
        await eventually(lambda: is_gone(program))


async def test_a_handler_that_fills_the_memory_fails_and_its_child_goes_on() -> None:
    async with children_of(Does()) as children:
        outcome = await do(children, "fills_the_memory")
        assert isinstance(outcome, RetryAfter)
        assert outcome.error.failure.type == "MemoryError"  # type: ignore[attr-defined]
        assert await do(children, "is_well") == Done()


# --- recycling ------------------------------------------------------------------------------------


async def test_a_child_ends_after_its_number_of_messages() -> None:
    async with children_of(Twice()) as children:
        told = [await pid_of(children) for _ in range(5)]
        first, second, third = (told[i] for i in (0, 2, 4))
        assert told == [first, first, second, second, third]
        assert len({first, second, third}) == 3
        await eventually(lambda: is_gone(first) and is_gone(second))
        assert not is_gone(third)


async def test_the_next_child_loads_while_the_last_message_of_the_old_one_runs() -> None:
    async with children_of(Twice()) as children:
        await pid_of(children)
        old = await pid_of(children, "until the next has loaded")
        new = await pid_of(children)
        assert old != new
        assert noted("load") == [old, new]


async def test_a_child_that_has_grown_works_on_until_another_has_loaded() -> None:
    async with children_of(Big()) as children:
        old = await pid_of(children)
        assert await pid_of(children) == old
        assert await pid_of(children, "grow") == old
        told: list[int] = []

        async def is_another() -> bool:
            told.append(await pid_of(children, "slowly"))
            return told[-1] != old

        await eventually(is_another)
        assert told[0] == old, "a message has waited"
        assert noted("load") == [old, told[-1]]
        await eventually(lambda: is_gone(old))
        assert await pid_of(children) == told[-1]


async def test_a_child_within_its_memory_stays() -> None:
    async with children_of(Small()) as children:
        assert len({await pid_of(children, what) for what in ("", "grow", "grow", "")}) == 1


async def test_a_recycling_that_fails_costs_no_message_an_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with children_of(Twice()) as children:
        old = await pid_of(children)
        monkeypatch.setenv("CONFINED_FAULT", "yes")
        assert await pid_of(children) == old
        await eventually(lambda: "no new child process: OSError: no licence" in caplog.text)
        monkeypatch.delenv("CONFINED_FAULT")
        assert await pid_of(children) != old


async def test_a_recycling_that_fails_while_a_message_waits_costs_it_no_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with children_of(Twice()) as children:
        old = await pid_of(children)
        monkeypatch.setenv("CONFINED_FAULT", "yes")
        assert await pid_of(children) == old
        waiting = asyncio.create_task(pid_of(children))
        await asyncio.sleep(0)  # the successor was spawned with the fault, and is waited for
        monkeypatch.delenv("CONFINED_FAULT")
        assert await waiting != old


async def test_a_recycled_child_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LEAVE_TIMEOUT", 0.3)
    async with children_of(Twice()) as children:
        old = await pid_of(children, "hold on")
        assert await pid_of(children) == old
        await eventually(lambda: is_gone(old))


async def test_whoever_closes_while_a_successor_loads_leaves_none_behind() -> None:
    async with children_of(Twice()) as children:
        await pid_of(children)
        await pid_of(children)
    assert await all_gone()


def test_memory_is_measured_with_proc_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with_proc = module.memory()
    monkeypatch.setattr(module, "Path", lambda name: Path("/there/is/none") / name[1:])
    most = module.memory()
    assert 10 < with_proc <= most + 1 < 10_000
