"""`rabbit-tasks parked`: list, show, replay, discard. It needs a queue, not the app."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rabbit_tasks import message as names
from rabbit_tasks import parking
from rabbit_tasks.broker import Publisher, connected
from rabbit_tasks.cli import cli, run, tell
from rabbit_tasks.cli.progress import counting
from rabbit_tasks.parking import Moved, ParkedMessage
from rabbit_tasks.settings import Settings
from rabbit_tasks.text import escaped, one_line

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
    _console().print(table)
    tell(f"{len(messages)} parked; one in full: rabbit-tasks parked show {shlex.quote(queue)} ID")


@parked.command("show")
def show(
    context: typer.Context,
    queue: Queue,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="As `parked list` shows it.")],
    as_json: Json = False,
) -> None:
    """Show one parked message: why, its error, its attempts, its headers, its body."""
    found = run(
        _browse(_settings(context), queue, lambda m: m if m.is_called(message_id) else None)
    )
    found = [one for one in found if one is not None]
    if not found:
        tell(f"error: no message {message_id} is parked for {queue}: {_list(queue)}")
        raise typer.Exit(1)
    for one in found:
        typer.echo(as_line(_full(one)) if as_json else _page(one))


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
        moved = run(_replay(_settings(context), queue, choice, went, dry_run=dry_run))
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
    settings = _settings(context)
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


def _settings(context: typer.Context) -> Settings:
    return Settings().changed(url=context.obj.url)


def _console() -> Console:
    # Into a pipe, lines must not be broken to a terminal's width.
    return Console(width=None if sys.stdout.isatty() else 1000)


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
    with counting("looking" if dry_run else "discarding") as step:

        def each(message: ParkedMessage) -> None:
            told(message)
            step()

        async with connected(settings, "parked") as connection:
            return await parking.discard(
                connection, queue, choice, limit=limit or choice.limit, dry_run=dry_run, told=each
            )


# --- how a message is shown ---------------------------------------------------------------------


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
    return {
        **_summary(message),
        "error_message": message.error_message,
        "stack": message.stack,
        "attempts": message.attempts,
        "headers": message.properties.headers,
        "body": _body(message.body),
    }


def _body(body: bytes) -> dict[str, Any]:
    """For machines: the value where it is JSON and comes out the same, else all of its text or bytes."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(body).decode()}
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
        as_line([[[[value]]]])  # it will stand some levels deep
    except (ValueError, RecursionError):
        return {"text": text}
    return {"json": value}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def as_line(value: object) -> str:
    """One line of JSON, in ASCII: nothing in it can drive a terminal or break a line."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: object) -> Any:
    match value:
        case dict():
            return {str(name): _plain(one) for name, one in value.items()}
        case list():
            return [_plain(one) for one in value]
        case float() if not math.isfinite(value):
            return str(value)
        case bytes():
            return value.hex()
        case str() | int() | float() | None:
            return value
    return str(value)  # a time, a Decimal


def body_text(body: bytes) -> tuple[str, str]:
    """How a body is shown, and as what: json, text or hex. Nothing in it can drive a terminal."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return "hex", _hex(body)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "text", escaped(text, "\n\t")
    return "json", escaped(text if len(text) > _LONG else _indented(text), "\n\t")


_LONG: Final = 1_000_000
"""Characters over which JSON is shown as it was sent: nobody reads it, and lines cost memory."""
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]\s*[\]}]|[\[{\]},:]|[^\s\[{\]},:"]+')


def _indented(text: str) -> str:
    """JSON on lines of its own, every token as it was sent: keys twice, 1.10, 1e999."""
    parts: list[str] = []
    depth = 0
    for token in _TOKEN.findall(text):
        match token[0]:
            case "[" | "{" if len(token) > 1:  # empty
                parts.append(token[0] + token[-1])
            case "[" | "{":
                depth += 1
                parts.append(f"{token}\n{'  ' * depth}")
            case "]" | "}":
                depth -= 1
                parts.append(f"\n{'  ' * depth}{token}")
            case ",":
                parts.append(f",\n{'  ' * depth}")
            case ":":
                parts.append(": ")
            case _:
                parts.append(token)
    return "".join(parts)


def _hex(body: bytes, shown: int = 1024) -> str:
    rows = [
        f"{at:06x}  {body[at : at + 16].hex(' ')}" for at in range(0, min(len(body), shown), 16)
    ]
    more = [f"… {len(body) - shown} bytes more"] if len(body) > shown else []
    return "\n".join([f"{len(body)} bytes", *rows, *more])


def _page(message: ParkedMessage) -> str:
    form, body = body_text(message.body)
    lines = [
        f"message   {escaped(message.id)}",
        f"reason    {escaped(message.reason)}",
        f"error     {escaped(message.error_type or '-')}",
        *_block(message.error_message or ""),
        f"parked    {escaped(message.parked_at or '-')}",
        f"origin    {escaped(message.origin or '-')}",
        f"replayed  {message.replays} times",
        "",
        "attempts",
    ]
    lines += [
        f"  {one.get('attempt', '-')}  {escaped(one.get('when', '-'))}  "
        f"{one.get('seconds', 0.0):.3f} s  {escaped(one.get('error', '-'))}  "
        f"({escaped(one.get('worker', '-'))})"
        for one in message.attempts
    ] or ["  none recorded"]
    if message.stack:
        lines += ["", "stack", *_block(message.stack)]
    lines += ["", "headers"]
    lines += [
        f"  {escaped(name)}: {escaped(repr(value))}"
        for name, value in message.properties.headers.items()
        if name not in names.OURS
    ]
    lines += ["", f"body ({form}, {len(message.body)} bytes)", *_block(body)]
    return "\n".join(lines)


def _block(text: str) -> list[str]:
    """Indented, so that no line of it can be taken for one of ours."""
    return [f"  {line}" for line in escaped(text, "\n\t").rstrip("\n").split("\n") if text]
