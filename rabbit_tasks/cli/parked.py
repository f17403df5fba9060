"""`rabbit-tasks parked`: list, show, replay, discard. It needs a queue, not the app."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rabbit_tasks import message as names
from rabbit_tasks import parking
from rabbit_tasks.broker import Publisher, connected
from rabbit_tasks.cli import cli, run, tell
from rabbit_tasks.history import one_line
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
    messages = run(_browse(_settings(context), queue, _summary))
    if as_json:
        for one in messages:
            typer.echo(json.dumps(one, ensure_ascii=False))
        return
    if not messages:
        tell(f"nothing is parked for {queue}")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("id", "parked", "attempts", "error", "reason", "bytes"):
        table.add_column(name, overflow="fold", justify="right" if name == "bytes" else "left")
    for one in messages:
        row = (
            one["id"],
            one["parked_at"],
            one["attempts"],
            one["error"],
            one["reason"],
            one["bytes"],
        )
        table.add_row(*(Text(one_line(str("-" if cell is None else cell))) for cell in row))
    _console().print(table)
    tell(f"{len(messages)} parked; one in full: rabbit-tasks parked show {queue} ID")


@parked.command("show")
def show(
    context: typer.Context,
    queue: Queue,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="As `parked list` shows it.")],
    as_json: Json = False,
) -> None:
    """Show one parked message: why, its error, its attempts, its headers, its body."""
    found = [
        one
        for one in run(_browse(_settings(context), queue, lambda message: message))
        if one.id == message_id
    ]
    if not found:
        tell(
            f"error: no message {message_id} is parked for {queue}: rabbit-tasks parked list {queue}"
        )
        raise typer.Exit(1)
    for one in found:
        typer.echo(json.dumps(_full(one), ensure_ascii=False) if as_json else _page(one))


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
    choose = _choice(ids, error, limit, everything)
    moved = run(_replay(_settings(context), queue, choose, limit, dry_run=dry_run))
    verb = "would be replayed" if dry_run else "replayed"
    for target, count in sorted(moved.to.items()):
        typer.echo(f"{count} {verb} to {target}")
    _end(moved, verb, ids, queue)


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
    choose = _choice(ids, error, limit, everything)
    settings = _settings(context)
    if not (yes or dry_run):
        kinds: Counter[str] = Counter()
        found = run(
            _discard(settings, queue, choose, limit, dry_run=True,
                     told=lambda m: kinds.update([m.error_type or m.reason]))
        )  # fmt: skip
        if not found.chosen:
            _end(found, "discarded", ids, queue)
            return
        for kind, count in kinds.most_common(10):
            tell(f"{count:6} {one_line(kind)}")
        if not sys.stdin.isatty():
            tell("error: nobody to ask; say --yes to discard them")
            raise typer.Exit(2)
        if not typer.confirm(f"Discard these {found.chosen} for good?", err=True):
            tell("nothing discarded")
            raise typer.Exit(1)
    moved = run(_discard(settings, queue, choose, limit, dry_run=dry_run))
    verb = "would be discarded" if dry_run else "discarded"
    typer.echo(f"{moved.chosen} {verb}")
    _end(moved, verb, ids, queue)


# --- what they share ----------------------------------------------------------------------------


def _settings(context: typer.Context) -> Settings:
    return Settings().changed(url=context.obj.url)


def _console() -> Console:
    # Into a pipe, lines must not be broken to a terminal's width.
    return Console(width=None if sys.stdout.isatty() else 1000)


def _choice(
    ids: list[str] | None, error: str | None, limit: int | None, everything: bool
) -> parking.Choice:
    if not (ids or error or limit or everything):
        raise typer.BadParameter("which? Say --id, --error, --limit, or --all")
    if everything and (ids or error or limit):
        raise typer.BadParameter("--all goes with no other choice")
    wanted = set(ids or ())
    return lambda message: (
        (not wanted or message.id in wanted) and (error is None or message.has_error(error))
    )


def _end(moved: Moved, verb: str, ids: list[str] | None, queue: str) -> None:
    tell(f"{moved.chosen} of {moved.there} parked for {queue} {verb}")
    if ids and moved.chosen < len(set(ids)):
        tell(f"error: not all of these ids are parked: rabbit-tasks parked list {queue}")
        raise typer.Exit(1)


async def _browse(
    settings: Settings, queue: str, keep: Callable[[ParkedMessage], Any]
) -> list[Any]:
    async with connected(settings, "parked") as connection:
        return [keep(message) async for message in parking.browse(connection, queue)]


async def _replay(
    settings: Settings, queue: str, choose: parking.Choice, limit: int | None, *, dry_run: bool
) -> Moved:
    with _progress("replaying") as step:
        async with (
            connected(settings, "parked") as connection,
            Publisher.open(settings) as publisher,
        ):
            return await parking.replay(
                connection, publisher, queue, choose, limit=limit, dry_run=dry_run,
                told=lambda _message, _queue: step(),
            )  # fmt: skip


async def _discard(
    settings: Settings,
    queue: str,
    choose: parking.Choice,
    limit: int | None,
    *,
    dry_run: bool,
    told: Callable[[ParkedMessage], None] = lambda _: None,
) -> Moved:
    async with connected(settings, "parked") as connection:
        return await parking.discard(
            connection, queue, choose, limit=limit, dry_run=dry_run, told=told
        )


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[], None]]:
    """Call what it gives once per message: a count on stderr, on a terminal only."""
    with Progress(
        SpinnerColumn(), TextColumn(verb), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(verb, total=None)
        yield lambda: progress.advance(task)


def _summary(message: ParkedMessage) -> dict[str, Any]:
    return {
        "id": message.id,
        "parked_at": message.parked_at,
        "attempts": len(message.attempts),
        "error": message.error_type,
        "reason": message.reason,
        "origin": message.origin,
        "replays": message.replays,
        "bytes": len(message.body),
    }


def _full(message: ParkedMessage) -> dict[str, Any]:
    form, text = body_text(message.body)
    return {
        **_summary(message),
        "error_message": message.error_message,
        "stack": message.stack,
        "attempts": message.attempts,
        "headers": json.loads(json.dumps(message.properties.headers, default=_jsonable)),
        "body": {form: json.loads(message.body) if form == "json" else text},
    }


def _jsonable(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def body_text(body: bytes) -> tuple[str, str]:
    """How a body is shown, and as what: json, text or hex. Nothing in it can drive a terminal."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return "hex", _hex(body)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "text", escaped(text)
    return "json", escaped(json.dumps(value, indent=2, ensure_ascii=False))


def escaped(text: str) -> str:
    """Control and formatting characters as escapes; lines and tabs stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def _hex(body: bytes, shown: int = 1024) -> str:
    rows = [
        f"{at:06x}  {body[at : at + 16].hex(' ')}" for at in range(0, min(len(body), shown), 16)
    ]
    more = [f"… {len(body) - shown} bytes more"] if len(body) > shown else []
    return "\n".join([f"{len(body)} bytes", *rows, *more])


def _page(message: ParkedMessage) -> str:
    form, body = body_text(message.body)
    lines = [
        f"message   {message.id}",
        f"reason    {message.reason}",
        f"error     {message.error_type or '-'}: {message.error_message or ''}".rstrip(": "),
        f"parked    {message.parked_at or '-'}",
        f"origin    {message.origin or '-'}",
        f"replayed  {message.replays} times",
        "",
        "attempts",
    ]
    lines += [
        f"  {one.get('attempt', '-')}  {one.get('when', '-')}  {one.get('seconds', 0.0):.3f} s  "
        f"{one.get('error', '-')}  ({one.get('worker', '-')})"
        for one in message.attempts
    ] or ["  none recorded"]
    if message.stack:
        lines += ["", "stack", *(f"  {line}" for line in message.stack.rstrip().splitlines())]
    lines += ["", "headers"]
    lines += [
        f"  {name}: {value!r}"
        for name, value in message.properties.headers.items()
        if name not in names.OURS
    ]
    lines += ["", f"body ({form}, {len(message.body)} bytes)"]
    lines += [f"  {line}" for line in body.splitlines()]
    return escaped("\n".join(lines))
