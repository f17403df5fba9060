"""One run: publish, work, kill, hurt, and in the end the account."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiormq.exceptions as amqp

from rabbit_tasks.broker import LOST
from rabbit_tasks.chaos import ledger
from rabbit_tasks.chaos.account import Account, Hurt, Known, account
from rabbit_tasks.chaos.fleet import Fleet
from rabbit_tasks.chaos.hurts import Done, Hurts
from rabbit_tasks.chaos.ledger import Ledger, Reading
from rabbit_tasks.chaos.plan import Plan
from rabbit_tasks.chaos.post import Post
from rabbit_tasks.chaos.queues import Queues
from rabbit_tasks.durations import duration_text
from rabbit_tasks.errors import ConnectError, RabbitTasksError
from rabbit_tasks.publisher import Publisher
from rabbit_tasks.settings import Settings

T = TypeVar("T")

TICK: Final = 0.2
"""Seconds between two looks into the ledger."""
LOOK: Final = 1.0
"""Seconds between two looks at the queues' depths."""
IDLE: Final = 3.0
"""Seconds in which nothing is waiting, in hand or written down, after which nothing more will come:
on a broker that was well all the time."""
MOMENT: Final = 0.5
"""Seconds in which a worker would have written down that it has one more in hand."""
HURRIED: Final = 5.0
"""Seconds for the broker to answer once we are to hurry."""
PUBLISHING_ENDS: Final = 5.0
"""Seconds for what is on its way to the broker when no more is to be published."""
RECENT: Final = 5.0
"""Seconds over which the rate shown in between is taken."""


class TrialError(RabbitTasksError):
    """The run could not be made."""


@dataclass
class Progress:
    """How far a run is."""

    tasks: int
    seconds: float = 0.0
    published: int = 0
    done: int = 0
    parked: int = 0
    waiting: int = 0
    deaths: int = 0
    hurts: int = 0
    rate: float = 0.0
    doing: str = ""

    @property
    def finished(self) -> int:
        return min(self.tasks, self.done + self.parked)


@dataclass
class Result:
    """What a run has shown."""

    plan: Plan
    account: Account
    server_version: str
    hurts: list[Done] = field(default_factory=list)
    hurts_wanted: int = 0
    hung: str = ""
    """Where what hung, if the run was given up."""
    supervised_deaths: int = 0
    left: str = ""
    """What is left on the broker, and why."""

    @property
    def is_clean(self) -> bool:
        return self.account.is_clean and not self.hung

    @property
    def failed_hurts(self) -> list[Done]:
        """Runs of the broker command that did not end with exit code 0."""
        return [one for one in self.hurts if one.code != 0]


class Trial:
    """One run. `interrupt` may be called at any moment; `run` cleans up whatever happens."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        folder: Path,
        *,
        patience: float,
        command: str | None = None,
        hurts: int = 0,
        told: Callable[[str], None] = lambda _: None,
        shown: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.plan = plan
        self.progress = Progress(plan.tasks)
        self._settings = settings
        self._folder = folder
        self._patience = patience
        self._told = told
        self._shown = shown
        self._queues = Queues(settings, plan)
        self._hurts = Hurts(command or "", hurts if command else 0, folder)
        self._outages: list[Hurt] = []
        self._interrupted = asyncio.Event()
        self._hurry = asyncio.Event()
        self._fleet: Fleet | None = None
        self._is_halted = False
        self._post: Post | None = None
        self._reading = Reading(folder)
        self._done = bytearray(plan.tasks)
        self._in_hand: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
        self._recent: deque[tuple[float, int]] = deque()
        self._depths: dict[str, int] = {}
        self._began = self._moved = time.monotonic()
        self._is_troubled = False
        self._away_since: float | None = None

    def interrupt(self) -> None:
        """Stop and tell what there is to tell so far; a second time: only clean up."""
        if self._interrupted.is_set():
            self._hurry.set()
        self._interrupted.set()

    async def run(self) -> Result:
        """The whole of it. TrialError and other RabbitTasksErrors after the broker is clean again."""
        result: Result | None = None
        self.plan.write(self._folder)
        Ledger(self._folder, self.plan.tasks).close()
        try:
            hung = await self._work()
            await self._halt()
            result = await self._account(hung)
            return result
        finally:
            await self._halt()
            left = await self._clean()
            if result is not None:
                result.left = left
            elif left:
                self._told(left)

    # --- the work -------------------------------------------------------------------------------

    async def _work(self) -> str:
        """Until all is done or parked; else what hung, and where."""
        made = await self._unless_interrupted(self._queues.make())
        if made is None:
            return ""
        self._told(
            f"{made} queues made: {self.plan.prefix}* (if this process is killed, they stay)"
        )
        self._fleet = await Fleet.start(self.plan, self._settings, self._folder)
        async with Publisher.open(self._settings) as publisher:
            self._post = Post(self.plan, publisher, lambda: self.progress.finished)
            posting = asyncio.create_task(self._post.run())
            try:
                self._began = self._moved = time.monotonic()
                return await self._watch(posting)
            finally:
                self._post.stop()
                await asyncio.wait([posting], timeout=PUBLISHING_ENDS)
                posting.cancel()
                await asyncio.wait([posting])

    async def _watch(self, posting: asyncio.Task[None]) -> str:
        looked = 0.0
        while not self._interrupted.is_set():
            self._read()
            if posting.done() and (error := posting.exception()) is not None:
                raise _of(error)
            if self._fleet is not None and self._fleet.code is not None:
                raise TrialError(
                    f"the fleet has ended with exit code {self._fleet.code}: "
                    f"{self._fleet.last_words()}"
                )
            if (ended := self._hurts.collect()) is not None:
                self.progress.hurts += 1
                self._is_troubled = True
                self._told(f"broker command {self.progress.hurts}: {ended}")
            # (A quorum queue that is younger than half a second may come back empty from a kill.)
            elif self._queues.age > 2 and self._hurts.due(self.progress.finished / self.plan.tasks):
                self._hurts.start()
            may_be_over = self.progress.done + self.progress.parked >= self.plan.tasks
            if may_be_over or time.monotonic() - looked > LOOK:
                await self._look()
                looked = time.monotonic()
                if self._hurts.running is None and (ends := self._has_ended()) is not None:
                    return ends
            self._show()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._interrupted.wait()
        return ""

    def _read(self) -> None:
        """Take in what the workers have written down."""
        progress = self.progress
        for event in self._reading.new():
            self._moved = time.monotonic()
            hand = self._in_hand[event.worker]
            run = (event.task, event.attempt)
            match event.kind:
                case "start":
                    hand[run] = event.at
                case "done":
                    progress.done += not self._done[event.task]
                    self._done[event.task] = 1
                case "kill":
                    progress.deaths += 1
                    del self._in_hand[event.worker]
                case "settled" | "cancel":
                    hand.pop(run, None)
                case "lost" | "held":
                    self._is_troubled = True

    async def _look(self) -> None:
        """How much lies where. (The broker may be away: somebody hurts it.)"""
        try:
            async with asyncio.timeout(LOOK * 3):
                depths = await self._queues.depths()
        except (*LOST, amqp.AMQPError, ConnectError, TimeoutError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if isinstance(error, amqp.ChannelNotFoundEntity):
                raise TrialError(f"a queue of the run is gone: {error}") from None
            self._away_since = self._away_since or time.monotonic()
            self._is_troubled = True
            await self._queues.close()
            return
        if self._away_since is not None:
            self._outages.append(Hurt(self._away_since - LOOK, time.monotonic()))
            self._away_since = None
        if depths != self._depths:
            self._moved = time.monotonic()
        self._depths = depths
        self.progress.parked = depths[self._queues.parked]
        self.progress.waiting = sum(depths.values()) - self.progress.parked

    def _has_ended(self) -> str | None:
        """Nothing while it goes on; empty when all is done or parked; else what hangs, and where."""
        post, progress = self._post, self.progress
        assert post is not None
        quiet = time.monotonic() - self._moved
        # (A run whose connection was lost is never settled: its task was done elsewhere.)
        in_hand = sum(not self._done[task] for runs in self._in_hand.values() for task, _ in runs)
        at_rest = self._away_since is None and post.is_through and progress.waiting == 0
        # (A message may be parked twice, and then stand for another that a worker still has in hand.)
        if (
            at_rest and progress.done + progress.parked >= self.plan.tasks
            and (not progress.parked or (not in_hand and quiet > MOMENT))
        ):  # fmt: skip
            return ""
        if at_rest and not in_hand and not self._is_troubled and quiet > IDLE:
            return ""  # nothing hangs: what is not accounted for is lost
        if quiet < self._patience:
            return None
        lie = [f"{n} in {name}" for name, n in self._depths.items() if n] or [
            "nothing in any queue"
        ]
        missing = self.plan.tasks - progress.done - progress.parked
        away = "; the broker does not answer" if self._away_since is not None else ""
        return (
            f"no progress for {self._patience:g} s: {post.count} published, {missing} neither done "
            f"nor parked; {', '.join(lie)}; {in_hand} in workers' hands{away}"
        )

    def _show(self) -> None:
        progress, now = self.progress, time.monotonic()
        progress.seconds = now - self._began
        progress.published = self._post.count if self._post else 0
        self._recent.append((now, progress.done))
        while len(self._recent) > 2 and self._recent[0][0] < now - RECENT:
            self._recent.popleft()
        since, before = self._recent[0]
        progress.rate = (progress.done - before) / (now - since) if now > since else 0.0
        if self._hurts.running is not None:
            progress.doing = "hurting the broker"
        elif self._away_since is not None:
            progress.doing = "the broker is away"
        else:
            quiet = now - self._moved
            progress.doing = f"nothing moves for {quiet:.0f} s" if quiet > IDLE else ""
        self._shown(progress)

    async def _unless_interrupted(self, work: Awaitable[T]) -> T | None:
        """The result; None where we were interrupted first."""
        task = asyncio.ensure_future(work)
        interrupted = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait([task, interrupted], return_when=asyncio.FIRST_COMPLETED)
        interrupted.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            return None
        return task.result()

    # --- the end --------------------------------------------------------------------------------

    async def _halt(self) -> None:
        """Stop what runs; the broker is left to come back from what hurts it."""
        if self._fleet is not None and not self._is_halted:
            self._is_halted = True
            self._told("stopping the workers")
            await self._fleet.stop(now=self._interrupted.is_set())
        if self._hurts.running is not None:
            self._told("waiting for the broker command to end")
            await asyncio.wait([self._hurts.running])
            if (ended := self._hurts.collect()) is not None:
                self._told(f"broker command {len(self._hurts.done)}: {ended}")

    async def _account(self, hung: str) -> Result:
        """Look for every task, in the ledger and on the broker."""
        self._read()
        post = self._post
        found = _Found()
        if post is not None and not self._hurry.is_set():
            self._told("looking where every task is")
            looking = asyncio.create_task(self._find(post, found))
            try:
                await self._hurried(looking)
            except Exception as error:  # (asked again and again for a minute)
                found.is_whole = False
                hung = hung or f"the broker cannot be asked where the tasks lie ({_why(error)})"
        interrupted = self._interrupted.is_set() or not found.is_whole
        parked, queued = found.parked, found.queued
        if self._away_since is not None:
            self._outages.append(Hurt(self._away_since - LOOK, time.monotonic()))
        foreign = len(parked.pop(-1, ())) + len(queued.pop(-1, ()))
        known = Known(
            tasks=self.plan.tasks,
            confirmed=post.confirmed if post else bytearray(self.plan.tasks),
            events=lambda: ledger.events(self._folder),
            poison=post.poison if post else frozenset(),
            repeats=post.repeats if post else 0,
            repeated=post.repeated if post else {},
            parked=parked,
            queued=queued,
            foreign=foreign,
            uncounted=found.uncounted,
            hurts=[one.hurt for one in self._hurts.done],
            outages=self._outages,
            began=self._began,
            ended=time.monotonic(),
        )
        made = await asyncio.to_thread(account, known, interrupted=interrupted)
        fleet = self._fleet
        return Result(
            self.plan, made, self._queues.server_version, self._hurts.done,
            self._hurts.times, hung,
            supervised_deaths=await asyncio.to_thread(fleet.deaths) if fleet else 0,
        )  # fmt: skip

    async def _find(self, post: Post, found: _Found) -> None:
        """Look into the queues: of an interrupted run only how much lies there."""
        queues = self._queues
        depths = await queues.surely(queues.depths)
        if depths[queues.parked]:
            for name, reason in await queues.surely(queues.parked_reasons):
                found.parked[_number(name)].append(reason)
        waiting = sum(depths[name] for name in queues.waiting)
        if self._interrupted.is_set():
            found.uncounted = waiting
        elif waiting or self._is_any_missing(post.confirmed, found.parked):
            for name, queue in await queues.surely(queues.look):
                found.queued[_number(name)].append(queue)
        found.is_whole = True

    async def _hurried(self, work: asyncio.Task[Any]) -> None:
        """Wait for it; not much longer, once we are to hurry."""
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([work, hurry], return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        await asyncio.wait([work], timeout=HURRIED)
        if not work.done():
            work.cancel()
            await asyncio.wait([work])
            raise TrialError("interrupted")
        work.result()

    def _is_any_missing(self, confirmed: bytearray, parked: Mapping[int, object]) -> bool:
        return any(
            confirmed[task] and not self._done[task] and task not in parked
            for task in range(self.plan.tasks)
        )

    async def _clean(self) -> str:
        """Remove the queues; what is left, if they cannot be."""
        removing = asyncio.create_task(self._queues.surely(self._queues.remove))
        try:
            await self._hurried(removing)
        except Exception as error:
            return (
                f"queues {self.plan.prefix}* are left on the broker, they could not be deleted "
                f"({_why(error)}); to delete them: rabbitmqctl list_queues -q name "
                f"| grep '^{self.plan.prefix}' | xargs -n 1 rabbitmqctl delete_queue"
            )
        finally:
            await self._queues.close()
        return ""

    def report(self, result: Result) -> dict[str, Any]:
        """All of it, for machines."""
        plan = result.plan
        return {
            "run": plan.run,
            "broker": result.server_version,
            "tasks": plan.tasks,
            "seed": plan.seed,
            "kill": plan.kill,
            "fail": plan.fail,
            "poison": plan.poison,
            "workers": plan.workers,
            "concurrency": plan.concurrency,
            "work_time": duration_text(plan.work_time),
            "hung": result.hung,
            "left_on_the_broker": result.left,
            "supervised_deaths": result.supervised_deaths,
            "broker_commands": [
                {"code": one.code, "output": one.output,
                 "from": round(one.hurt.began - self._began, 3),
                 "to": round(one.hurt.ended - self._began, 3)}
                for one in result.hurts
            ],
            "account": result.account.as_json(),
        }  # fmt: skip


@dataclass
class _Found:
    """What lies in the queues when the work is over."""

    parked: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    queued: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    uncounted: int = 0
    is_whole: bool = False


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _number(message_id: str) -> int:
    """The task of a message; -1 for one that is not ours."""
    return int(message_id) if message_id.isdecimal() else -1


def _of(error: BaseException) -> BaseException:
    """The first of a group's errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def forget(folder: Path) -> None:
    """Delete a run's ledger."""
    shutil.rmtree(folder, ignore_errors=True)
