"""Rows that say what is so and what to type: of `topology plan`, `topology check` and `doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import typer

from rabbit_tasks.text import escaped

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_COLORS: Final = {
    "ok": "green", "keep": "green", "warning": "yellow", "fault": "bold red", "differs": "bold red",
    "permission": "bold red", "unseen": "dim", "note": "dim",
}  # fmt: skip
_OTHERS: Final = "yellow"


class Row(NamedTuple):
    """One of them: its kind, what it is about, what is so, and what to type if there is anything."""

    kind: str
    about: str
    says: str
    remedy: str = ""


def show_rows(rows: Sequence[Row]) -> None:
    """A row each: for people with its remedy below it, in a pipe on one line."""
    if sys.stdout.isatty():
        with _whoever_reads():
            _show_table(rows)
        return
    kind, about = (max((len(row[at]) for row in rows), default=0) for at in (0, 1))
    show_lines(
        f"{row.kind:<{kind}}  {row.about:<{about}}  {row.says}"
        + (f"; {row.remedy}" if row.remedy else "")
        for row in rows
    )


def show_json(values: Iterable[DataclassInstance]) -> None:
    """An object each, on one line."""
    show_lines(json.dumps(asdict(value)) for value in values)


def show_lines(lines: Iterable[str]) -> None:
    """A line each, whatever is in it."""
    with _whoever_reads():
        for line in lines:
            typer.echo(escaped(line))


@contextmanager
def _whoever_reads() -> Iterator[None]:
    """A reader that has enough, such as `head -1`, changes nothing in what was found, and so nothing
    in the exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for row in rows:
        says: Any = Text(escaped(row.says))
        if row.remedy:
            says.append(f"\n→ {escaped(row.remedy)}", style="bold")
        style = _COLORS.get(row.kind, _OTHERS)
        table.add_row(Text(row.kind, style=style), Text(escaped(row.about)), says)
    Console().print(table)
