"""`rabbit-tasks topology migrate`: a queue that cannot be changed in place is made anew."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.cli import app_of, run, settings_of, tell
from rabbit_tasks.cli.topology import topology
from rabbit_tasks.durations import duration_of
from rabbit_tasks.text import escaped, quoted, to_type

if TYPE_CHECKING:
    from rabbit_tasks.app import App
    from rabbit_tasks.migration import Migrated, Migration
    from rabbit_tasks.settings import Settings


@topology.command("migrate")
def migrate(
    context: typer.Context,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Any queue of the app.")],
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Wait so long for its consumers to leave and its publishers to pause, as in 10m.",
        ),
    ] = None,
    forget_bindings: Annotated[
        bool,
        typer.Option(
            "--forget-bindings",
            help="Without the management API: it has no bindings but the app's own.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Make a queue anew, with its messages; asks first.

    For one that cannot be changed in place. Run it again where it was stopped: it goes on.
    """
    from rabbit_tasks.migration import refuse

    try:
        patience = None if wait is None else duration_of(wait)
    except ValueError as error:
        raise typer.BadParameter(f"--wait: {error}") from None
    app, settings = app_of(context.obj), settings_of(context)
    found = run(_survey(app, settings, queue))
    if found.stage == "done":
        tell(f"{quoted(queue)} is as the app wants it: nothing to migrate")
        return
    _show(found)
    refuse(found, forget_bindings=forget_bindings)
    if found.consumers and patience is None:
        tell(f"{found.consumers} consumer(s) are attached; stop them first, or say --wait 10m")
    if dry_run:
        tell("nothing was changed")
        return
    if not yes:
        if not sys.stdin.isatty():
            tell("error: nobody to ask; say --yes to migrate it, --dry-run to look only")
            raise typer.Exit(2)
        if not typer.confirm(f"Migrate {quoted(queue)}?", err=True):
            tell("nothing was changed")
            raise typer.Exit(1)
    try:
        done = run(_migrate(app, settings, queue, patience, forget_bindings=forget_bindings))
    except KeyboardInterrupt:
        tell(
            f"stopped; every message is in {quoted(queue)} or {quoted(found.holding)}; go on: "
            + to_type("topology migrate", queue)
        )
        raise
    _end(queue, done)


def _show(found: Migration) -> None:
    for difference in found.differences:
        tell(escaped(f"{quoted(difference.name)}: {difference.says}"))
    for number, step in enumerate(found.steps(), 1):
        typer.echo(escaped(f"{number}. {step}"))
    for note in found.notes():
        tell(escaped(f"note: {note}"))


def _end(queue: str, done: Migrated) -> None:
    gap = f"; it was not there for {done.gap * 1000:.0f} ms" if done.gap else ""
    typer.echo(f"{done.away} moved away, {done.back} moved back")
    if done.restarted:
        tell(f"{done.restarted} with a time limit (expiration): it begins anew")
    if done.unnamed:
        tell(f"{done.unnamed} lost their user_id: the broker takes it from that user alone")
    tell(f"{quoted(queue)} is as the app wants it{gap}")


async def _survey(app: App, settings: Settings, queue: str) -> Migration:
    from rabbit_tasks.broker import connected
    from rabbit_tasks.management import Management
    from rabbit_tasks.migration import survey

    async with connected(settings, "topology migrate") as connection:
        return await survey(connection, app.topology, queue, Management.of(settings))


async def _migrate(
    app: App,
    settings: Settings,
    queue: str,
    wait: timedelta | None,
    *,
    forget_bindings: bool,
) -> Migrated:
    from rabbit_tasks.cli.progress import moving
    from rabbit_tasks.migration import migrate

    with moving() as told:
        return await migrate(
            settings, app.topology, queue, wait=wait, forget_bindings=forget_bindings, told=told,
            waits=lambda why: tell(escaped(f"waits {why}")),
        )  # fmt: skip
