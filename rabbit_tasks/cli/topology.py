"""`rabbit-tasks topology`: show, export, declare, check."""

from __future__ import annotations

import difflib
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.app import App, find_app
from rabbit_tasks.cli import cli, run, settings_of, tell
from rabbit_tasks.topology import tree

if TYPE_CHECKING:
    from rabbit_tasks.declare import Difference
    from rabbit_tasks.settings import Settings

topology = typer.Typer(help="The queues and exchanges of the app.", no_args_is_help=True)
cli.add_typer(topology, name="topology")

Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


@topology.command("show")
def show(context: typer.Context, as_json: Json = False) -> None:
    """Show the app's topology as a tree."""
    app = find_app(context.obj.app)
    typer.echo(app.topology.definitions() if as_json else tree(app.topology), nl=not as_json)


@topology.command("export")
def export(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Only compare: exit 1 where the file differs.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(help="The lock file.", show_default="topology/<app>.json")
    ] = None,
) -> None:
    """Write the lock file, topology/<app>.json, in RabbitMQ's definitions format."""
    app = find_app(context.obj.app)
    path = file or Path("topology") / f"{app.name}.json"
    wanted = app.topology.definitions()
    command = "rabbit-tasks topology export" + (f" --file {shlex.quote(str(file))}" if file else "")
    if not check:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted)
        except OSError as error:
            tell(f"error: {path} cannot be written: {error.strerror}")
            raise typer.Exit(1) from None
        tell(f"wrote {path}")
        return
    if not path.is_file():
        tell(f"error: there is no {path}; write it: {command}")
        raise typer.Exit(1)
    found = path.read_text(errors="replace")
    if found != wanted:
        lines = difflib.unified_diff(
            found.splitlines(), wanted.splitlines(), str(path), "the app", lineterm="", n=1
        )
        typer.echo("\n".join(lines))
        tell(f"error: {path} is not the app's topology; write it: {command}")
        raise typer.Exit(1)
    tell(f"{path} is up to date")


@topology.command("declare")
def declare_command(context: typer.Context) -> None:
    """Create what is missing on the broker; change nothing that is there."""
    app = find_app(context.obj.app)
    created = run(_declare(app, settings_of(context)))
    for name in created:
        typer.echo(f"created {name}")
    tell(_summary(app) + (f": {len(created)} created" if created else ": all there already"))


@topology.command("check")
def check_command(context: typer.Context, as_json: Json = False) -> None:
    """Compare the broker with the app: exit 1 where something is missing or different."""
    app = find_app(context.obj.app)
    differences, warnings = run(_check(app, settings_of(context)))
    for warning in warnings:
        tell(f"warning: {warning}")
    for difference in differences:
        typer.echo(json.dumps(asdict(difference)) if as_json else str(difference))
    if differences:
        raise typer.Exit(1)
    tell(
        f"{_summary(app)}: as they should be (bindings cannot be read over AMQP; declare sets them)"
    )


def _summary(app: App) -> str:
    found = app.topology
    return f"{len(found.queues)} queues and {len(found.exchanges)} exchange of app {app.name}"


async def _declare(app: App, settings: Settings) -> list[str]:
    from rabbit_tasks.broker import connected
    from rabbit_tasks.declare import declare

    async with connected(settings, "topology declare") as connection:
        return await declare(connection, app.topology)


async def _check(app: App, settings: Settings) -> tuple[list[Difference], list[str]]:
    """What differs; and what this version of the broker does to handlers that take long."""
    from rabbit_tasks.broker import connected
    from rabbit_tasks.declare import check
    from rabbit_tasks.timeouts import warning_of

    async with connected(settings, "topology check") as connection:
        told = [warning_of(connection.server_version, type(one)) for one in app.consumers]
        return await check(connection, app.topology), [text for text in told if text]
