"""`parked replay`: back to work."""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.cli import Given, app_if_given, run, settings_of, tell
from rabbit_tasks.cli.parked.options import (
    DryRun,
    Foreign,
    Queue,
    choosing,
    end,
    parked,
    queue_of,
)
from rabbit_tasks.text import escaped, one_line, quoted

if TYPE_CHECKING:
    import asyncio

    from rabbit_tasks.app import App
    from rabbit_tasks.broker import Connection
    from rabbit_tasks.cli.progress import Going
    from rabbit_tasks.parking import Choice, ParkedMessage, ParkingQueue
    from rabbit_tasks.parking.replaying import Replayed
    from rabbit_tasks.publisher import Publisher
    from rabbit_tasks.settings import Settings


@dataclass(frozen=True)
class _How:
    """What was asked for, beside which messages."""

    to: str | None
    into: str | None
    rate: float | None
    canary: int | None
    canary_wait: timedelta
    edit: bool
    dry_run: bool


@parked.command("replay")
@choosing(required=True)
def replay(
    context: typer.Context,
    queue: Queue,
    choice: Choice,
    foreign: Foreign = False,
    to: Annotated[
        str | None,
        typer.Option(metavar="QUEUE", help="To this queue, wherever they came from."),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE", help="To this queue where nothing tells where they came from."
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="At most so many: 50/s, 600/m.")
    ] = None,
    canary: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="First so many; the others only if none fails again."),
    ] = None,
    canary_wait: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="For how long to wait for them. Longer than all attempts of one take.",
        ),
    ] = "60s",
    edit: Annotated[
        bool, typer.Option("--edit", help="Change the body in $EDITOR first; with one --id.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Only end what a replay began that was killed.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Copy parked messages back to their main queue.

    With fresh attempts. Ctrl-C ends it between two messages. Ended in any way, or killed, the same
    command goes on where it stopped.
    """
    if resume:
        choice = replace(choice, limit=0)
    if edit and (len(choice.ids) != 1 or canary or dry_run):
        raise typer.BadParameter("goes with exactly one --id, and no canary", param_hint="--edit")
    from rabbit_tasks.parking import ParkingQueue

    for target in (to, into):
        if target is not None:
            ParkingQueue.foreign(target)  # or wrong usage, where no queue can be called that
    how = _How(to, into, _rate(rate), canary, _wait(canary_wait), edit, dry_run)
    parking = queue_of(queue, foreign)
    verb = "would be replayed" if dry_run else "replayed"
    went: Counter[str] = Counter()
    try:
        done = run(_replay(settings_of(context), context.obj, parking, choice, how, went))
    finally:  # also after a fault: what was done is done
        for target, count in sorted(went.items()):
            typer.echo(f"{count} {verb} to {quoted(target)}")
    _tell_more(done)
    if resume:
        if done.resumed is None:
            tell(f"no replay of {parking} was killed in the middle")
        return
    if done.stopped:
        tell(
            f"stopped: {done.chosen} of {done.there} parked for {parking} {verb}; the rest is parked"
        )
        raise typer.Exit(130)
    end(done, verb, choice, parking)
    if not done.chosen and not dry_run:
        tell("nothing to replay")


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(s|m|h))?", text.strip())
    rate = float(found[1]) / {"s": 1, "m": 60, "h": 3600}[found[2] or "s"] if found else 0.0
    if rate <= 0:
        raise typer.BadParameter(f"{text!r} is no rate, such as 50/s or 600/m", param_hint="--rate")
    return rate


def _wait(text: str) -> timedelta:
    from rabbit_tasks.durations import duration_of

    try:
        return duration_of(text)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong), param_hint="--canary-wait") from None


def _tell_more(done: Replayed) -> None:
    if done.resumed is not None:
        tell(
            f"a replay before this was killed: {done.resumed.sent_home} that it had on their way went "
            f"on, {done.resumed.removed} were still parked and stayed"
        )
    if done.alone:
        tell(
            f"went one by one: this user may not create {done.staging}; had this been killed, one "
            "message might be there twice, the first that the next replay takes"
        )


async def _replay(
    settings: Settings,
    given: Given,
    queue: ParkingQueue,
    choice: Choice,
    how: _How,
    went: Counter[str],
) -> Replayed:
    import asyncio

    from rabbit_tasks.broker import connected, is_cancelled
    from rabbit_tasks.cli.progress import going
    from rabbit_tasks.publisher import Publisher

    app = app_if_given(given)
    loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()

    def interrupted() -> None:
        if stop.is_set() and task is not None:
            task.cancel()  # asked twice: at once
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        with going("replaying") as progress:
            async with (
                connected(settings, "parked") as connection,
                Publisher.open(settings) as publisher,
            ):
                work = _Work(settings, connection, publisher, queue, choice, how, stop)
                work.app, work.went, work.progress = app, went, progress
                return await work.all()
    except asyncio.CancelledError:
        if is_cancelled():
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@dataclass
class _Work:
    """One command's replays: the canary, then the others."""

    settings: Settings
    connection: Connection
    publisher: Publisher
    queue: ParkingQueue
    choice: Choice
    how: _How
    stop: asyncio.Event

    def __post_init__(self) -> None:
        self.app: App | None = None
        self.went: Counter[str] = Counter()
        self.progress: Going

    async def all(self) -> Replayed:
        how, limit = self.how, self.choice.limit
        if how.edit:
            return await self._edited()
        if how.canary is None or how.dry_run:
            return await self._some(limit)
        first = await self._some(min(how.canary, limit or how.canary))
        if not first.chosen or first.stopped:
            return first
        await self._watch(first)
        if self.stop.is_set():
            return replace(first, stopped=True)
        if limit is not None and limit <= first.chosen:
            return first
        rest = await self._some(limit and limit - first.chosen, among=first.there - first.chosen)
        return replace(rest, there=first.there, chosen=first.chosen + rest.chosen,
                       resumed=first.resumed or rest.resumed)  # fmt: skip

    async def _some(
        self, limit: int | None, *, among: int | None = None, body: bytes | None = None
    ) -> Replayed:
        from rabbit_tasks import parking

        def told(message: ParkedMessage, target: str) -> None:
            self.went[target] += 1
            self.progress.at(message.position, self.went.total())

        return await parking.replay(
            self.connection, self.publisher, self.queue, self.choice, limit=limit, among=among,
            to=self.how.to, into=self.how.into, rate=self.how.rate, edited=body,
            dry_run=self.how.dry_run, stop=self.stop, told=told, maybe_twice=_warn,
            began=lambda there: self.progress.began(there if limit is None else min(there, limit)),
        )  # fmt: skip

    async def _watch(self, first: Replayed) -> None:
        """Come back when the others may follow."""
        from rabbit_tasks.management import Management
        from rabbit_tasks.parking import canary

        tell(f"{first.chosen} replayed first; waiting for what becomes of them")
        beside = tuple(
            queue.name
            for queue in (self.app.topology.queues if self.app else ())
            if queue.main in first.to and queue.role in ("retry", "crashed")
        )
        verdict = await canary.watch(
            self.connection, self.queue, first, wait=self.how.canary_wait, beside=beside,
            management=Management.of(self.settings), stop=self.stop,
        )  # fmt: skip
        if verdict.is_done or self.stop.is_set():
            return
        tell(f"error: {one_line(str(verdict))}; the others are still parked")
        if verdict.back:
            tell(f"look at: {self.queue.to_type('groups')}")
        else:
            tell("is a worker running? wait for longer with --canary-wait")
        raise typer.Exit(1)

    async def _edited(self) -> Replayed:
        import asyncio

        from rabbit_tasks import parking
        from rabbit_tasks.cli.parked.editing import edited
        from rabbit_tasks.parking.replaying import Replayed

        meant = replace(self.choice)
        found = [one async for one in parking.browse(self.connection, self.queue) if meant(one)]
        if len(found) != 1:
            if found:
                tell(f"error: {len(found)} messages are called that; nothing was replayed")
                raise typer.Exit(1)
            return Replayed()
        (message,) = found
        target = self.how.to or message.origin or self.how.into or self.queue.main
        consumer = self.app.queues.get(target or "") if self.app else None
        body = await asyncio.to_thread(edited, message.body, consumer)
        if body is None:
            tell("the body is as it was; nothing was replayed")
            raise typer.Exit(1)
        return await self._some(1, body=body)


def _warn(message_id: str) -> None:
    tell(
        f"warning: {escaped(message_id)} may have been replayed already, by a replay that was killed; "
        "it is parked as well"
    )
