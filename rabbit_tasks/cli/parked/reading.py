"""`parked`, `parked list`, `parked groups` and `parked show`: what is there, and why."""

from __future__ import annotations

import heapq
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rabbit_tasks.cli import app_if_given, run, settings_of, tell
from rabbit_tasks.cli.lines import Lines
from rabbit_tasks.cli.parked.options import (
    Foreign,
    Json,
    Queue,
    all_met,
    choosing,
    parked,
    queue_of,
    tell_unfinished,
)
from rabbit_tasks.durations import age_text
from rabbit_tasks.text import escaped, one_line

if TYPE_CHECKING:
    from rabbit_tasks.app import App
    from rabbit_tasks.parking import Choice, ParkedMessage, ParkingQueue
    from rabbit_tasks.parking.groups import Group
    from rabbit_tasks.parking.lots import Lot
    from rabbit_tasks.settings import Settings

_COLUMNS: Final = ("id", "parked", "attempts", "error", "reason", "bytes")
_SORTS: Final[dict[str, Callable[[ParkedMessage], Any]]] = {
    "parked": lambda m: m.position,
    "id": lambda m: m.id,
    "attempts": lambda m: len(m.attempts),
    "error": lambda m: m.error_type or "",
    "reason": lambda m: m.reason,
    "origin": lambda m: m.origin or "",
    "replays": lambda m: m.replays,
    "bytes": lambda m: len(m.body),
}
_TOGETHER: Final = 500
"""Rows that are laid out at once: a table of all of them would be in memory, and late."""


@parked.callback(invoke_without_command=True)
def overview(context: typer.Context, as_json: Json = False) -> None:
    """The parking lot: what could not be done.

    Alone: every parking queue, how much is in it, since when, and mostly why.
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise typer.BadParameter("goes behind the verb", param_hint="--json")
        return
    lots = run(_overview(settings_of(context), app_if_given(context.obj)))
    if as_json:
        from rabbit_tasks.cli.parked.page import as_line

        for lot in lots:
            typer.echo(as_line(_lot(lot)))
    else:
        with Lines() as out:
            columns = ("queue", "parked", "oldest", "mostly")
            out.write(_table(columns, [_lot_row(lot) for lot in lots if lot.depth or lot.fault]))
    there = sum(lot.depth for lot in lots)
    tell(
        f"{there} parked in {len(lots)} parking queues; more of one: rabbit-tasks parked groups QUEUE"
    )
    if faults := [lot for lot in lots if lot.fault]:
        for lot in faults:
            tell(f"error: {lot.fault}")
        raise typer.Exit(1)


@parked.command("list")
@choosing(required=False)
def list_command(
    context: typer.Context,
    queue: Queue,
    choice: Choice,
    sort: Annotated[
        str,
        typer.Option(
            metavar="FIELD",
            help=f"By {', '.join(_SORTS)}; -FIELD for the other way round (--sort=-bytes).",
        ),
    ] = "parked",
    foreign: Foreign = False,
    as_json: Json = False,
) -> None:
    """List what is parked, oldest first.

    Nothing is consumed or reordered.
    """
    from rabbit_tasks.cli.parked.page import as_line, summary

    name = sort.removeprefix("-")
    if name not in _SORTS:
        raise typer.BadParameter(
            f"{escaped(sort)!r}; it takes {', '.join(_SORTS)}", param_hint="--sort"
        )
    parking = queue_of(queue, foreign)
    seen = _Seen()
    found = _chosen(settings_of(context), parking, choice, seen, stops=sort == "parked")
    with Lines() as out:

        async def show() -> None:
            rows: list[dict[str, Any]] = []
            shown = 0

            def flush() -> None:
                nonlocal shown
                if rows:
                    out.write(_table(_COLUMNS, map(_row, rows), header=not shown))
                shown += len(rows)
                rows.clear()

            # Closed here, whatever happens: nobody may read what is written.
            async with aclosing(_sorted(found, sort, choice.limit, summary)) as chosen:  # type: ignore[type-var]
                async for one in chosen:
                    seen.shown += 1
                    if as_json:
                        out.write(as_line(one) + "\n")
                        continue
                    rows.append(one)
                    if len(rows) == _TOGETHER:
                        flush()
            flush()

        run(show())
    _end(parking, choice, seen)


@parked.command("groups")
@choosing(required=False)
def groups(
    context: typer.Context,
    queue: Queue,
    choice: Choice,
    foreign: Foreign = False,
    as_json: Json = False,
) -> None:
    """Count the kinds of failure, the most frequent first.

    A row each: how many, since when, an example.
    """
    from rabbit_tasks.cli.parked.page import as_line
    from rabbit_tasks.parking.groups import Groups

    parking = queue_of(queue, foreign)
    seen, kinds = _Seen(), Groups()

    async def read() -> None:
        chosen = _chosen(settings_of(context), parking, choice, seen, stops=True)
        async with aclosing(chosen):  # type: ignore[type-var]
            async for message in chosen:
                seen.shown += 1
                kinds.add(message)

    run(read())
    rows = kinds.rows
    with Lines() as out:
        if as_json:
            for one in rows:
                out.write(as_line(_group(one)) + "\n")
        elif rows:
            columns = ("group", "count", "first", "last", "error", "message", "example")
            out.write(_table(columns, map(_group_row, rows)))
    if rows and not as_json:
        tell(
            f"{seen.shown} messages in {len(rows)} groups; those of one: "
            f"{parking.to_type('list', '--group', rows[0].fingerprint)}"
        )
    _end(parking, choice, seen, quietly=bool(rows))


@parked.command("show")
def show(
    context: typer.Context,
    queue: Queue,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="As `parked list` shows it.")],
    foreign: Foreign = False,
    as_json: Json = False,
) -> None:
    """Show one parked message.

    Why, its error, its attempts, its headers, its body.
    """
    from rabbit_tasks.cli.parked.page import as_line, full, text_of

    parking = queue_of(queue, foreign)
    found = run(
        _browse(settings_of(context), parking, lambda m: m if m.is_called(message_id) else None)
    )
    if not found:
        tell(
            f"error: no message {escaped(message_id)} is parked for {parking}: "
            f"{parking.to_type('list')}"
        )
        raise typer.Exit(1)
    for one in found:
        typer.echo(as_line(full(one)) if as_json else text_of(one))


async def _browse(
    settings: Settings, queue: ParkingQueue, keep: Callable[[ParkedMessage], Any]
) -> list[Any]:
    from rabbit_tasks.parking import Choice

    return [
        kept
        async for message in _chosen(settings, queue, Choice(), _Seen(), stops=False)
        if (kept := keep(message)) is not None
    ]


class _Seen:
    """What a look has met."""

    def __init__(self) -> None:
        self.there = 0
        self.untimed = 0
        self.shown = 0
        self.unfinished = False


async def _chosen(
    settings: Settings, queue: ParkingQueue, choice: Choice, seen: _Seen, *, stops: bool
) -> AsyncIterator[ParkedMessage]:
    """The chosen ones, as they lie there; `stops` at the limit."""
    from rabbit_tasks import parking
    from rabbit_tasks.broker import connected
    from rabbit_tasks.cli.progress import going
    from rabbit_tasks.parking.staging import is_unfinished

    left = choice.limit if stops else None
    # (On a terminal that the rows go to, they are what tells how far it is.)
    with going("reading", shown=not sys.stdout.isatty()) as progress:

        def began(count: int) -> None:
            seen.there = count
            progress.began(count)

        async with connected(settings, "parked") as connection:
            seen.unfinished = await is_unfinished(connection, queue)
            messages: Any = parking.browse(connection, queue, began=began)
            async with aclosing(messages):
                async for message in messages:
                    seen.untimed += message.parked_time is None
                    if choice(message):
                        yield message
                        if left is not None and (left := left - 1) == 0:
                            return
                    progress.at(message.position, message.position)


async def _sorted(
    messages: AsyncIterator[ParkedMessage],
    sort: str,
    limit: int | None,
    row: Callable[[ParkedMessage], dict[str, Any]],
) -> AsyncIterator[dict[str, Any]]:
    """Their rows: in the order in which they come where that is what is asked for, else of all of
    them, or of as many as are wanted, at the end."""
    async with aclosing(messages):  # type: ignore[type-var]
        if sort == "parked":
            async for message in messages:
                yield row(message)
            return
        key = _SORTS[sort.removeprefix("-")]
        is_first, together = (heapq.nlargest if sort[0] == "-" else heapq.nsmallest), 10_000
        kept: list[tuple[Any, int, dict[str, Any]]] = []
        async for message in messages:
            # (The position, so that equals keep their order and no two rows are compared.)
            at = -message.position if sort[0] == "-" else message.position
            kept.append((key(message), at, row(message)))
            if limit is not None and len(kept) >= limit + together:
                kept = is_first(limit, kept)
    kept.sort(reverse=sort[0] == "-")
    for _, _, one in kept[:limit]:
        yield one


def _end(queue: ParkingQueue, choice: Choice, seen: _Seen, *, quietly: bool = False) -> None:
    """Say what was shown of what; exit 1 where an id that was asked for is not there."""
    if not seen.there:
        tell(f"nothing is parked for {queue}")
    elif not seen.shown:
        tell(f"none of the {seen.there} parked for {queue} is meant")
    elif not quietly:
        of = f" of {seen.there}" if seen.shown < seen.there else ""
        tell(f"{seen.shown}{of} parked; one in full: {queue.to_type('show')} ID")
    if seen.untimed and (choice.older_than is not None or choice.newer_than is not None):
        tell(f"{seen.untimed} do not tell when they were parked: neither older nor newer")
    if seen.unfinished:
        tell_unfinished(queue)
    all_met(choice, seen.shown, queue)


async def _overview(settings: Settings, app: App | None) -> list[Lot]:
    from rabbit_tasks.broker import connected
    from rabbit_tasks.cli.progress import going
    from rabbit_tasks.management import Management
    from rabbit_tasks.parking.lots import looked_at, parking_queues

    queues = await parking_queues(Management.of(settings), app)
    with going("reading") as progress:
        async with connected(settings, "parked") as connection:
            return [
                lot
                async for lot in looked_at(
                    connection, queues,
                    began=lambda _, count: progress.began(count),
                    told=lambda message: progress.at(message.position, message.position),
                )
            ]  # fmt: skip


# --- rows ---------------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, header: bool = True) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, show_header=header)
    for name in columns:
        is_number = name in ("bytes", "count")
        table.add_column(name, overflow="fold", justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    # Into a pipe, lines must not be broken to a terminal's width.
    console = Console(width=None if sys.stdout.isatty() else 1000)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _row(one: dict[str, Any]) -> list[object]:
    cells = (one["parked_at"], one["attempts"], one["error"], one["reason"], one["bytes"])
    return [escaped(one["id"]), *(one_line(str("-" if cell is None else cell)) for cell in cells)]


def _when(time: datetime | None) -> str | None:
    return time.isoformat(timespec="seconds") if time else None


def _group(group: Group) -> dict[str, Any]:
    return {
        "fingerprint": group.fingerprint,
        "count": group.count,
        "first": _when(group.first),
        "last": _when(group.last),
        "error": group.error,
        "message": group.message,
        "example": group.example,
    }


def _group_row(group: Group) -> list[object]:
    error = one_line(group.error) if group.error else None
    return [
        group.fingerprint, group.count, _when(group.first), _when(group.last), error,
        group.message, escaped(group.example),
    ]  # fmt: skip


def _lot(lot: Lot) -> dict[str, Any]:
    return {
        "queue": lot.queue.name,
        "parked": lot.depth,
        "oldest": _when(lot.oldest),
        "top": _group(lot.top) if lot.top else None,
        "fault": lot.fault,
    }


def _lot_row(lot: Lot) -> list[object]:
    age = age_text(datetime.now(UTC) - lot.oldest) if lot.oldest else None
    mostly = None
    if lot.top:
        mostly = one_line(f"{lot.top.count} of {lot.top.error or lot.top.message}")
    return [lot.queue.name, lot.depth, age, mostly]
