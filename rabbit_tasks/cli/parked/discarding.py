"""`parked discard`: gone for good."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.cli import run, settings_of, tell
from rabbit_tasks.cli.parked.options import (
    DryRun,
    Queue,
    choosing,
    end,
    parked,
)
from rabbit_tasks.text import one_line

if TYPE_CHECKING:
    from rabbit_tasks.parking import Choice, Moved, ParkedMessage
    from rabbit_tasks.settings import Settings


@parked.command("discard")
@choosing(required=True)
def discard(
    context: typer.Context,
    queue: Queue,
    choice: Choice,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove parked messages for good; asks first."""
    settings = settings_of(context)
    verb = "would be discarded" if dry_run else "discarded"
    if yes or dry_run:
        moved = run(_discard(settings, queue, choice, dry_run=dry_run))
    else:
        asked = replace(choice)
        kinds: Counter[str] = Counter()
        found = run(
            _discard(settings, queue, asked, dry_run=True,
                     told=lambda m: kinds.update([m.error_type or m.reason]))
        )  # fmt: skip
        if not found.chosen:
            end(found, verb, asked, queue)
            return
        for kind, count in kinds.most_common(10):
            tell(f"{count:6} {one_line(kind)}")
        if not sys.stdin.isatty():
            tell("error: nobody to ask; say --yes to discard them")
            raise typer.Exit(2)
        if not typer.confirm(f"Discard these {found.chosen} for good?", err=True):
            tell("nothing discarded")
            raise typer.Exit(1)
        # No more than were asked about, though others may have been parked meanwhile.
        moved = run(_discard(settings, queue, choice, dry_run=False, limit=found.chosen))
    typer.echo(f"{moved.chosen} {verb}")
    end(moved, verb, choice, queue)


async def _discard(
    settings: Settings,
    queue: str,
    choice: Choice,
    *,
    dry_run: bool,
    limit: int | None = None,
    told: Callable[[ParkedMessage], None] = lambda _: None,
) -> Moved:
    from rabbit_tasks import parking
    from rabbit_tasks.broker import connected
    from rabbit_tasks.cli.progress import counting

    with counting("looking" if dry_run else "discarding") as step:

        def each(message: ParkedMessage) -> None:
            told(message)
            step()

        async with connected(settings, "parked") as connection:
            return await parking.discard(
                connection, queue, choice, limit=limit or choice.limit, dry_run=dry_run, told=each
            )
