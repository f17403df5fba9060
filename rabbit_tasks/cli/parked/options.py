"""What the commands of `rabbit-tasks parked` share: their options, and how they end."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from rabbit_tasks.cli import cli, tell
from rabbit_tasks.durations import duration_of
from rabbit_tasks.text import escaped

if TYPE_CHECKING:
    from rabbit_tasks.parking import Choice, Moved, ParkingQueue

parked = typer.Typer(help="The parking lot: what could not be done.")
cli.add_typer(parked, name="parked")

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The main queue.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Foreign = Annotated[
    bool,
    typer.Option(
        "--foreign",
        help="QUEUE itself holds what is parked: another framework's dead letters, or made by hand.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON, one object per line.")]


_CHOICE: Final = {
    "ids": Annotated[list[str] | None, typer.Option("--id", help="Only this message; repeatable.")],
    "error": Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Only failures with this error type, full or short."),
    ],
    "reason": Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only with this text in the reason.")
    ],
    "group": Annotated[
        str | None,
        typer.Option(metavar="FINGERPRINT", help="Only this group, as `parked groups` shows it."),
    ],
    "match": Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Only with this value in the JSON body (user.id=7, items.0.sku=A1) or in a header "
            "(header.tenant=acme); repeatable, all must match.",
        ),
    ],
    "older_than": Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Only parked so long ago: 90s, 2h, 1d. Never of unknown time."
        ),
    ],
    "newer_than": Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Only parked since then. Never of unknown time."),
    ],
    "limit": Annotated[int | None, typer.Option(min=1, help="At most so many, the oldest first.")],
}
_ALL: Final = Annotated[bool, typer.Option("--all", help="All that are parked now.")]


def choosing(*, required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, in place of its parameter `choice`, the options that say which messages.

    required    one of them must be given, or --all (or --resume, where the command has it), which then
                goes with no other
    """

    def of(command: Callable[..., None]) -> Callable[..., None]:
        # What typer asks of a function: its signature and its annotations. Names that are imported
        # for type checkers alone mean nothing to it.
        hints = get_type_hints(command, localns={"Choice": object}, include_extras=True)
        told: list[inspect.Parameter] = []
        for one in inspect.signature(command).parameters.values():
            if one.name == "choice":
                told += [_option(name, None, kind) for name, kind in _CHOICE.items()]
                told += [_option("everything", False, _ALL)] if required else []
            else:
                told.append(_option(one.name, one.default, hints[one.name]))

        @wraps(command)
        def called(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in _CHOICE}
            everything = given.pop("everything", False)
            whole = "--all" if everything else "--resume" if given.get("resume") else None
            if required and not whole and not any(chosen.values()):
                raise typer.BadParameter(
                    "which? Say --id, --error, --limit, or --all, or another of --help's filters"
                )
            if whole and any(chosen.values()):
                raise typer.BadParameter(f"{whole} goes with no other choice")
            command(**given, choice=choice_of(**chosen))

        called.__signature__ = inspect.Signature(told)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in told}
        return called

    return of


def _option(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def choice_of(
    *,
    ids: list[str] | None = None,
    error: str | None = None,
    reason: str | None = None,
    group: str | None = None,
    match: list[str] | None = None,
    older_than: str | None = None,
    newer_than: str | None = None,
    limit: int | None = None,
) -> Choice:
    """The messages that the options name, at this moment; wrong usage where they make no sense."""
    from rabbit_tasks.fingerprint import is_fingerprint
    from rabbit_tasks.parking import Choice
    from rabbit_tasks.parking.choice import Match

    if group is not None and not is_fingerprint(group):
        raise typer.BadParameter(
            f"{escaped(group)!r} is no fingerprint, 12 hexadecimal digits; `parked groups` shows them",
            param_hint="--group",
        )
    try:
        fields = tuple(map(Match.of, match or ()))
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong), param_hint="--match") from None
    return Choice(
        ids=tuple(dict.fromkeys(ids or ())),
        error=error,
        reason=reason,
        group=group,
        match=fields,
        older_than=_duration(older_than, "--older-than"),
        newer_than=_duration(newer_than, "--newer-than"),
        now=datetime.now(UTC),
        limit=limit,
    )


def _duration(text: str | None, option: str) -> timedelta | None:
    try:
        return None if text is None else duration_of(text)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong), param_hint=option) from None


def queue_of(queue: str, foreign: bool) -> ParkingQueue:
    """The parking queue that is meant: QUEUE's own, or with --foreign QUEUE itself."""
    from rabbit_tasks.parking import ParkingQueue

    return ParkingQueue.foreign(queue) if foreign else ParkingQueue.of(queue)


def end(moved: Moved, verb: str, choice: Choice, queue: ParkingQueue) -> None:
    """Say what was moved; exit 1 where an id that was asked for is not there."""
    tell(f"{moved.chosen} of {moved.there} parked for {queue} {verb}")
    all_met(choice, moved.chosen, queue)


def tell_unfinished(queue: ParkingQueue) -> None:
    """That a replay left something elsewhere, which belongs to what is parked."""
    tell(
        "a replay was ended in the middle: what it had on its way waits in a queue of its own, for "
        f"the next one, or for: {queue.to_type('replay', '--resume')}"
    )


def all_met(choice: Choice, chosen: int, queue: ParkingQueue) -> None:
    """Exit 1 where an id that was asked for is not there."""
    if absent := choice.absent(chosen):
        tell(
            f"error: not parked: {', '.join(map(escaped, absent))}; what is: {queue.to_type('list')}"
        )
        raise typer.Exit(1)
