"""`parked list` and `parked show`: what is there, and why."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rabbit_tasks.cli import run, settings_of, tell
from rabbit_tasks.cli.parked.options import (
    Json,
    Queue,
    list_command_of,
    parked,
)
from rabbit_tasks.text import escaped, one_line

if TYPE_CHECKING:
    from rabbit_tasks.parking import ParkedMessage
    from rabbit_tasks.settings import Settings


@parked.command("list")
def list_command(context: typer.Context, queue: Queue, as_json: Json = False) -> None:
    """List what is parked, oldest first; nothing is consumed or reordered."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rabbit_tasks.cli.parked.page import as_line, summary

    messages = run(_browse(settings_of(context), queue, summary))
    if as_json:
        for one in messages:
            typer.echo(as_line(one))
        return
    if not messages:
        tell(f"nothing is parked for {queue}")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("id", "parked", "attempts", "error", "reason", "bytes"):
        table.add_column(name, overflow="fold", justify="right" if name == "bytes" else "left")
    for one in messages:
        row = (one["parked_at"], one["attempts"], one["error"], one["reason"], one["bytes"])
        cells = [escaped(one["id"]), *(one_line(str("-" if v is None else v)) for v in row)]
        table.add_row(*(Text(cell) for cell in cells))
    # Into a pipe, lines must not be broken to a terminal's width.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)
    tell(f"{len(messages)} parked; one in full: rabbit-tasks parked show {shlex.quote(queue)} ID")


@parked.command("show")
def show(
    context: typer.Context,
    queue: Queue,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="As `parked list` shows it.")],
    as_json: Json = False,
) -> None:
    """Show one parked message: why, its error, its attempts, its headers, its body."""
    from rabbit_tasks.cli.parked.page import as_line, full, text_of

    found = run(
        _browse(settings_of(context), queue, lambda m: m if m.is_called(message_id) else None)
    )
    found = [one for one in found if one is not None]
    if not found:
        tell(f"error: no message {message_id} is parked for {queue}: {list_command_of(queue)}")
        raise typer.Exit(1)
    for one in found:
        typer.echo(as_line(full(one)) if as_json else text_of(one))


async def _browse(
    settings: Settings, queue: str, keep: Callable[[ParkedMessage], Any]
) -> list[Any]:
    from rabbit_tasks import parking
    from rabbit_tasks.broker import connected
    from rabbit_tasks.cli.progress import counting

    kept = []
    with counting("reading") as step:
        async with connected(settings, "parked") as connection:
            async for message in parking.browse(connection, queue):
                kept.append(keep(message))
                step()
    return kept
