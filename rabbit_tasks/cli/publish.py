"""`rabbit-tasks publish`: publish bodies from arguments or from stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from rabbit_tasks import consumer as consumers
from rabbit_tasks.app import find_app, is_given
from rabbit_tasks.broker import Publisher
from rabbit_tasks.cli import Given, cli, run, tell
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import ConfigurationError, MalformedBody, PublishError
from rabbit_tasks.settings import Settings

_CHUNK = 200


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
    """Publish bodies, each confirmed by the broker; prints the message ids.

    Where the app is known and has a consumer of the queue, bodies are validated as its type, and
    for a consumer of text or bytes taken literally. Else they must be JSON. They are sent as given.
    """
    given: Given = context.obj
    settings = Settings().changed(url=given.url)
    consumer = find_app(given.app).queues.get(queue) if given.app or is_given() else None
    if message_id is not None and len(bodies or ()) != 1:
        raise typer.BadParameter("--id goes with exactly one body")
    headers = dict(_header(text) for text in header or ())
    if bodies:
        checked = [_check(consumer, body.encode(), f"body {i}") for i, body in enumerate(bodies, 1)]
        run(_publish(settings, queue, consumer, iter(checked), headers, message_id))
    else:
        lines = enumerate(iter(sys.stdin.buffer.readline, b""), 1)
        stream = (
            _check(consumer, line.rstrip(b"\r\n"), f"line {i}") for i, line in lines if line.strip()
        )
        run(_publish(settings, queue, consumer, stream, headers, None))


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--header {text!r} is not NAME=VALUE")
    return name, value


def _check(consumer: Consumer[object] | None, body: bytes, where: str) -> bytes:
    """ConfigurationError where a worker would park it."""
    try:
        if consumer is not None:
            consumers.decode(type(consumer), body)
        else:
            json.loads(body)
    except MalformedBody as error:
        kind = type(consumer).__name__
        raise ConfigurationError(f"{where} is not what {kind} takes: {error}") from None
    except ValueError as error:
        raise ConfigurationError(
            f"{where} is not JSON: {error}; quote it as the shell wants"
        ) from None
    return body


def _content_type(consumer: Consumer[object] | None) -> str:
    how = None if consumer is None else consumers.body_of(type(consumer))
    if how == "bytes":
        return "application/octet-stream"
    return "text/plain; charset=utf-8" if how == "text" else "application/json"


async def _publish(
    settings: Settings,
    queue: str,
    consumer: Consumer[object] | None,
    bodies: Iterator[bytes],
    headers: dict[str, str],
    message_id: str | None,
) -> None:
    count = 0
    common: dict[str, Any] = {"headers": headers, "content_type": _content_type(consumer)}
    async with Publisher.open(settings) as publisher:
        try:
            for chunk in _chunks(bodies):
                if message_id is not None:
                    ids = [
                        await publisher.publish(queue, chunk[0], message_id=message_id, **common)
                    ]
                else:
                    ids = await publisher.publish_many(queue, chunk, **common)
                count += len(ids)
                typer.echo("\n".join(ids))
        except (PublishError, ConfigurationError):
            tell(f"{count} published before the fault")
            raise
    tell(f"{count} published to {queue}")


def _chunks(bodies: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Some bodies at a time; those before a bad one come before its error."""
    chunk: list[bytes] = []
    try:
        for body in bodies:
            chunk.append(body)
            if len(chunk) == _CHUNK:
                yield chunk
                chunk = []
    except ConfigurationError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk
