"""What the commands of `rabbit-tasks parked` share: their options, and how they end."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.cli import cli, tell
from rabbit_tasks.text import escaped

if TYPE_CHECKING:
    from rabbit_tasks.parking import Choice, Moved

parked = typer.Typer(help="The parking lot: what could not be done.", no_args_is_help=True)
cli.add_typer(parked, name="parked")

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The main queue.")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only this message; repeatable.")]
ErrorType = Annotated[
    str | None, typer.Option("--error", metavar="TYPE", help="Only failures with this error type.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many, the oldest first.")]
All = Annotated[bool, typer.Option("--all", help="All that are parked now.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON, one object per line.")]


def choice_of(
    ids: list[str] | None, error: str | None, limit: int | None, everything: bool
) -> Choice:
    """The messages that the options name; wrong usage where they name none, or all and some."""
    from rabbit_tasks.parking import Choice

    if not (ids or error or limit or everything):
        raise typer.BadParameter("which? Say --id, --error, --limit, or --all")
    if everything and (ids or error or limit):
        raise typer.BadParameter("--all goes with no other choice")
    return Choice(ids=tuple(dict.fromkeys(ids or ())), error=error, limit=limit)


def list_command_of(queue: str) -> str:
    """What to type to see what is parked."""
    return f"rabbit-tasks parked list {shlex.quote(queue)}"


def end(moved: Moved, verb: str, choice: Choice, queue: str) -> None:
    """Say what was moved; exit 1 where an id that was asked for is not there."""
    tell(f"{moved.chosen} of {moved.there} parked for {queue} {verb}")
    if absent := choice.absent(moved.chosen):
        tell(
            f"error: not parked: {', '.join(map(escaped, absent))}; what is: {list_command_of(queue)}"
        )
        raise typer.Exit(1)
