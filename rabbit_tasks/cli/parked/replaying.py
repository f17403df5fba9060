"""`parked replay`: back to work."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from rabbit_tasks.cli import run, settings_of
from rabbit_tasks.cli.parked.options import (
    DryRun,
    Queue,
    choosing,
    end,
    parked,
)

if TYPE_CHECKING:
    from rabbit_tasks.parking import Choice, Moved, ParkedMessage
    from rabbit_tasks.settings import Settings


@parked.command("replay")
@choosing(required=True)
def replay(
    context: typer.Context,
    queue: Queue,
    choice: Choice,
    dry_run: DryRun = False,
) -> None:
    """Copy parked messages back to their main queue, with fresh attempts."""
    verb = "would be replayed" if dry_run else "replayed"
    went: Counter[str] = Counter()
    try:
        moved = run(_replay(settings_of(context), queue, choice, went, dry_run=dry_run))
    finally:  # also after a fault: what was done is done
        for target, count in sorted(went.items()):
            typer.echo(f"{count} {verb} to {target}")
    end(moved, verb, choice, queue)


async def _replay(
    settings: Settings, queue: str, choice: Choice, went: Counter[str], *, dry_run: bool
) -> Moved:
    from rabbit_tasks import parking
    from rabbit_tasks.broker import Publisher, connected
    from rabbit_tasks.cli.progress import counting

    with counting("replaying") as step:

        def told(_: ParkedMessage, target: str) -> None:
            went[target] += 1
            step()

        async with (
            connected(settings, "parked") as connection,
            Publisher.open(settings) as publisher,
        ):
            return await parking.replay(
                connection, publisher, queue, choice, limit=choice.limit, dry_run=dry_run, told=told
            )
