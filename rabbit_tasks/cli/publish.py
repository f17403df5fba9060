"""`rabbit-tasks publish`: publish bodies from arguments or from stdin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rabbit_tasks.cli import app_if_given, cli, no_constant, run, settings_of, tell
from rabbit_tasks.errors import ConfigurationError, MalformedBody, RabbitTasksError

if TYPE_CHECKING:
    from rabbit_tasks.consumer import Consumer
    from rabbit_tasks.publisher import Publisher
    from rabbit_tasks.settings import Settings

_CHUNK: Final = 200
"""Bodies that are on their way at once."""

Place = tuple[str, bytes]
"""A body, and where it stands, for errors."""


class _BadLine(RabbitTasksError):
    """A line of stdin that a worker would park: what was read failed, not what was typed."""


@cli.command("publish")
def publish(
    context: typer.Context,
    queue: Annotated[str, typer.Argument(help="The main queue.")],
    bodies: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JSON]...", help="Bodies; without any, one per line of stdin."),
    ] = None,
    message_id: Annotated[
        str | None, typer.Option("--id", help="The message id, for a single body.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header, text; repeatable.")
    ] = None,
) -> None:
    """Publish bodies, each confirmed by the broker.

    Prints the message ids.

    Where the app is known and has a consumer of the queue, bodies are validated as its type, and
    for a consumer of text or bytes taken literally. Else they must be JSON. They are sent as given.
    """
    settings = settings_of(context)
    app = app_if_given(context.obj)
    consumer = app.queues.get(queue) if app else None
    if message_id is not None and len(bodies or ()) != 1:
        raise typer.BadParameter("--id goes with exactly one body")
    headers = dict(_header(text) for text in header or ())
    if bodies:
        places = [(f"body {i}", os.fsencode(body)) for i, body in enumerate(bodies, 1)]
        try:
            for where, body in places:  # all of them before the first one goes
                _check(consumer, where, body)
        except _BadLine as error:
            raise ConfigurationError(str(error)) from None
        stream: Iterator[Place] = iter(places)
    else:
        if sys.stdin.isatty():
            tell("reading bodies, one a line; end with Ctrl-D")
        stream = _lines(consumer)
    run(_publish(settings, queue, consumer, stream, headers, message_id))


def _lines(consumer: Consumer[object] | None) -> Iterator[Place]:
    """The lines of stdin, checked; a blank one is a body only where bodies are taken literally."""
    literal = _how(consumer) in ("bytes", "text")
    for i, line in enumerate(iter(sys.stdin.buffer.readline, b""), 1):
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        if literal or body.strip():
            _check(consumer, f"line {i}", body)
            yield f"line {i}", body


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--header {text!r} is not NAME=VALUE")
    return name, value


def _check(consumer: Consumer[object] | None, where: str, body: bytes) -> None:
    """_BadLine where a worker would park it."""
    try:
        if consumer is not None:
            from rabbit_tasks.consumer import decode

            decode(type(consumer), body)
        else:
            json.loads(body.decode(), parse_constant=no_constant)
    except MalformedBody as error:
        kind = type(consumer).__name__
        raise _BadLine(f"{where} is not what {kind} takes: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"{where} is not JSON: {error}; quote it as the shell wants") from None


def _how(consumer: Consumer[object] | None) -> object:
    """How its bodies are read; None where nobody knows."""
    if consumer is None:
        return None
    from rabbit_tasks.consumer import body_of

    return body_of(type(consumer))


def _content_type(consumer: Consumer[object] | None) -> str:
    how = _how(consumer)
    if how == "bytes":
        return "application/octet-stream"
    return "text/plain; charset=utf-8" if how == "text" else "application/json"


async def _publish(
    settings: Settings,
    queue: str,
    consumer: Consumer[object] | None,
    places: Iterator[Place],
    headers: dict[str, str],
    message_id: str | None,
) -> None:
    from rabbit_tasks.cli.progress import counting
    from rabbit_tasks.publisher import Publisher

    count = 0
    common: dict[str, Any] = {
        "headers": headers, "content_type": _content_type(consumer), "message_id": message_id,
    }  # fmt: skip
    # The ids are on stdout: where that is a terminal, they are the progress.
    with counting("publishing", shown=not sys.stdout.isatty()) as step:
        async with Publisher.open(settings) as publisher:
            try:
                for chunk in _chunks(places):
                    count += await _send(publisher, queue, chunk, common, step)
            except RabbitTasksError:
                tell(f"{count} published before the fault")
                raise
    tell(f"{count} published to {queue}")


async def _send(
    publisher: Publisher,
    queue: str,
    chunk: list[Place],
    common: dict[str, Any],
    step: Callable[[], None],
) -> int:
    """Publish some at once; how many. A failure says which went and which did not."""
    import asyncio

    results = await asyncio.gather(
        *(publisher.publish(queue, body, **common) for _, body in chunk), return_exceptions=True
    )
    failed: list[tuple[str, BaseException]] = []
    for (where, _), result in zip(chunk, results, strict=True):
        if isinstance(result, BaseException):
            failed.append((where, result))
        else:
            typer.echo(result)
            step()
    if failed:
        where, error = failed[0]
        if isinstance(error, ValueError):  # an id or a header that AMQP cannot carry
            raise ConfigurationError(str(error)) from None
        if not isinstance(error, RabbitTasksError):
            raise error
        more = f"; and so for {len(failed) - 1} more, to {failed[-1][0]}" if failed[1:] else ""
        tell(f"{len(chunk) - len(failed)} of the last {len(chunk)} published")
        raise type(error)(f"{where}: {error}{more}") from None
    return len(chunk)


def _chunks(places: Iterator[Place]) -> Iterator[list[Place]]:
    """Some bodies at a time; those before a bad one come before its error."""
    chunk: list[Place] = []
    try:
        for place in places:
            chunk.append(place)
            if len(chunk) == _CHUNK:
                yield chunk
                chunk = []
    except _BadLine:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk
