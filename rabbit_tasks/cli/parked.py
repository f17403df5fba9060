"""`rabbit-tasks parked`: list, show, replay, discard. It needs a queue, not the app."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rabbit_tasks.cli import cli, run, settings_of, tell
from rabbit_tasks.text import escaped, one_line

if TYPE_CHECKING:
    from rabbit_tasks.parking import Moved, ParkedMessage
    from rabbit_tasks.settings import Settings

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


@parked.command("list")
def list_command(context: typer.Context, queue: Queue, as_json: Json = False) -> None:
    """List what is parked, oldest first; nothing is consumed or reordered."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rabbit_tasks.cli.page import as_line, summary

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
    from rabbit_tasks.cli.page import as_line, full, text_of

    found = run(
        _browse(settings_of(context), queue, lambda m: m if m.is_called(message_id) else None)
    )
    found = [one for one in found if one is not None]
    if not found:
        tell(f"error: no message {message_id} is parked for {queue}: {_list(queue)}")
        raise typer.Exit(1)
    for one in found:
        typer.echo(as_line(full(one)) if as_json else text_of(one))


@parked.command("replay")
def replay(
    context: typer.Context,
    queue: Queue,
    ids: Ids = None,
    error: ErrorType = None,
    limit: Limit = None,
    everything: All = False,
    dry_run: DryRun = False,
) -> None:
    """Copy parked messages back to their main queue, with fresh attempts."""
    choice = Choice(ids, error, limit, everything)
    verb = "would be replayed" if dry_run else "replayed"
    went: Counter[str] = Counter()
    try:
        moved = run(_replay(settings_of(context), queue, choice, went, dry_run=dry_run))
    finally:  # also after a fault: what was done is done
        for target, count in sorted(went.items()):
            typer.echo(f"{count} {verb} to {target}")
    _end(moved, verb, choice, queue)


@parked.command("discard")
def discard(
    context: typer.Context,
    queue: Queue,
    ids: Ids = None,
    error: ErrorType = None,
    limit: Limit = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove parked messages for good; asks first."""
    choice = Choice(ids, error, limit, everything)
    settings = settings_of(context)
    verb = "would be discarded" if dry_run else "discarded"
    if yes or dry_run:
        moved = run(_discard(settings, queue, choice, dry_run=dry_run))
    else:
        asked = Choice(ids, error, limit, everything)
        kinds: Counter[str] = Counter()
        found = run(
            _discard(settings, queue, asked, dry_run=True,
                     told=lambda m: kinds.update([m.error_type or m.reason]))
        )  # fmt: skip
        if not found.chosen:
            _end(found, verb, asked, queue)
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
    _end(moved, verb, choice, queue)


# --- what they share ----------------------------------------------------------------------------


class Choice:
    """Which messages the options name; it remembers which ids it met."""

    def __init__(
        self, ids: list[str] | None, error: str | None, limit: int | None, everything: bool
    ) -> None:
        if not (ids or error or limit or everything):
            raise typer.BadParameter("which? Say --id, --error, --limit, or --all")
        if everything and (ids or error or limit):
            raise typer.BadParameter("--all goes with no other choice")
        self.ids = dict.fromkeys(ids or ())
        self.error = error
        self.limit = limit
        self._met: set[str] = set()

    def __call__(self, message: ParkedMessage) -> bool:
        called = [name for name in self.ids if message.is_called(name)]
        self._met.update(called)
        return (not self.ids or bool(called)) and (
            self.error is None or message.has_error(self.error)
        )

    def absent(self, moved: Moved) -> list[str]:
        """The ids that are not there; not asked of those behind the limit."""
        if self.limit is not None and moved.chosen >= self.limit:
            return []
        return [name for name in self.ids if name not in self._met]


def _list(queue: str) -> str:
    return f"rabbit-tasks parked list {shlex.quote(queue)}"


def _end(moved: Moved, verb: str, choice: Choice, queue: str) -> None:
    tell(f"{moved.chosen} of {moved.there} parked for {queue} {verb}")
    if absent := choice.absent(moved):
        tell(f"error: not parked: {', '.join(map(escaped, absent))}; what is: {_list(queue)}")
        raise typer.Exit(1)


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
