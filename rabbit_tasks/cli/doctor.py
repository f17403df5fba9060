"""`rabbit-tasks doctor`: what is wrong, and what to type."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.app import find_app, is_given
from rabbit_tasks.cli import cli, run, settings_of, tell
from rabbit_tasks.text import escaped

if TYPE_CHECKING:
    from rabbit_tasks.doctor import Row


@cli.command("doctor")
def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one object per line.")] = False,
) -> None:
    """Look at the broker and the app's queues: exit 1 where something is wrong."""
    from rabbit_tasks.doctor import diagnose, examine, has_fault

    app = find_app(context.obj.app) if context.obj.app or is_given() else None
    lock = Path("topology") / f"{app.name}.json" if app else None
    exported = lock.read_text(errors="replace") if lock and lock.is_file() else None
    rows = diagnose(run(examine(settings_of(context), app, exported=exported)))
    if as_json:
        for row in rows:
            typer.echo(json.dumps(asdict(row)))
    else:
        _show(rows)
    counts = Counter(row.state for row in rows)
    tell(", ".join(f"{counts[state]} {state}" for state in ("ok", "warning", "fault", "unseen")))
    if has_fault(rows):
        raise typer.Exit(1)


def _show(rows: list[Row]) -> None:
    """A row each: for people with its remedy below it, in a pipe on one line."""
    if not sys.stdout.isatty():
        wide = max(len(row.about) for row in rows)
        for row in rows:
            line = f"{row.state:<7}  {row.about:<{wide}}  {row.says}"
            typer.echo(escaped(line + (f"; {row.remedy}" if row.remedy else "")))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colors = {"ok": "green", "warning": "yellow", "fault": "bold red", "unseen": "dim"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for row in rows:
        says = Text(escaped(row.says))
        if row.remedy:
            says.append(f"\n→ {escaped(row.remedy)}", style="bold")
        table.add_row(Text(row.state, style=colors[row.state]), Text(escaped(row.about)), says)
    Console().print(table)
