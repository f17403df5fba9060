"""`rabbit-tasks doctor`: what is wrong, and what to type."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from rabbit_tasks.cli import app_if_given, cli, run, settings_of, tell
from rabbit_tasks.cli.rows import Row, show_json, show_rows


@cli.command("doctor")
def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one object per line.")] = False,
) -> None:
    """Look at the broker and the app's queues.

    Exit 1 where something is wrong.
    """
    from rabbit_tasks.doctor import diagnose, examine, has_fault

    app = app_if_given(context.obj)
    lock = Path("topology") / f"{app.name}.json" if app else None
    exported = lock.read_text(errors="replace") if lock and lock.is_file() else None
    rows = diagnose(run(examine(settings_of(context), app, exported=exported)))
    if as_json:
        show_json(rows)
    else:
        show_rows([Row(row.state, row.about, row.says, row.remedy) for row in rows])
    counts = Counter(row.state for row in rows)
    tell(", ".join(f"{counts[state]} {state}" for state in ("ok", "warning", "fault", "unseen")))
    if has_fault(rows):
        raise typer.Exit(1)
