"""`parked discard`: gone for good."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.cli import run, settings_of, tell
from rabbit_tasks.cli.parked.options import (
    DryRun,
    Foreign,
    Queue,
    choosing,
    end,
    parked,
    queue_of,
)
from rabbit_tasks.text import one_line

if TYPE_CHECKING:
    from rabbit_tasks.parking import Asked, Choice, Choose, Moved, ParkedMessage, ParkingQueue
    from rabbit_tasks.settings import Settings


@parked.command("discard")
@choosing(required=True)
def discard(
    context: typer.Context,
    queue: Queue,
    choice: Choice,
    foreign: Foreign = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove parked messages for good; asks first.

    Takes no others then than it asked about.
    """
    from rabbit_tasks.parking import Asked

    settings, parking = settings_of(context), queue_of(queue, foreign)
    verb = "would be discarded" if dry_run else "discarded"
    if yes or dry_run:
        moved = _told(verb, settings, parking, choice, choice.limit, dry_run=dry_run)
    else:
        asked = Asked()
        moved = run(_discard(settings, parking, choice, choice.limit, told=asked.add, dry_run=True))
        if asked.count:
            _ask(asked)
            moved = _told(verb, settings, parking, asked, None, dry_run=False)
            if gone := asked.count - moved.chosen:
                tell(f"{gone} of them were not there any more")
    end(moved, verb, choice, parking)


def _ask(asked: Asked) -> None:
    """Come back with a yes, or not at all."""
    for kind, count in asked.kinds.most_common(10):
        tell(f"{count:6} {one_line(kind)}")
    if more := asked.kinds.most_common()[10:]:
        tell(f"{sum(count for _, count in more):6} of {len(more)} other kinds")
    if not sys.stdin.isatty():
        tell("error: nobody to ask; say --yes to discard them")
        raise typer.Exit(2)
    # (typer.confirm would write a space to stdout.)
    try:
        typer.echo(f"Discard these {asked.count} for good? [y/N]: ", err=True, nl=False)
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        tell("nothing discarded" if answer else "\nnothing discarded")
        raise typer.Exit(1 if answer else 130)


def _told(
    verb: str,
    settings: Settings,
    queue: ParkingQueue,
    choose: Choose,
    limit: int | None,
    *,
    dry_run: bool,
) -> Moved:
    """Discard, and say how many went, also after a fault or an interrupt: what was done is done."""
    count = 0

    def told(_: ParkedMessage) -> None:
        nonlocal count
        count += 1

    try:
        return run(_discard(settings, queue, choose, limit, told=told, dry_run=dry_run))
    except KeyboardInterrupt:
        tell(f"interrupted; what is still there: {queue.to_type('list')}")
        raise
    finally:
        typer.echo(f"{count} {verb}")


async def _discard(
    settings: Settings,
    queue: ParkingQueue,
    choose: Choose,
    limit: int | None,
    *,
    told: Callable[[ParkedMessage], None],
    dry_run: bool,
) -> Moved:
    from rabbit_tasks import parking
    from rabbit_tasks.broker import connected
    from rabbit_tasks.cli.progress import going

    count = 0
    with going("looking" if dry_run else "discarding") as progress:

        def each(message: ParkedMessage) -> None:
            nonlocal count
            count += 1
            told(message)
            progress.at(message.position, count)

        async with connected(settings, "parked") as connection:
            return await parking.discard(
                connection, queue, choose, limit=limit, dry_run=dry_run, told=each,
                began=progress.began,
            )  # fmt: skip
