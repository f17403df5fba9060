"""The archive: parked messages as lines of JSON, and back into a parking queue. One line is

    {"rabbit_tasks": 1, "queue": "images.resize.parked",
     "body": {"text": "…"},
     "properties": {"content_type": …, "headers": {…}, …},
     "raw": "…"}

body        its text where it is UTF-8, else {"base64": "…"}; it may be edited
properties  decoded, for people. JSON has fewer types than AMQP: a time is its ISO text, bytes are hex
raw         the property list as it came over the wire, in base64: every header and every type of it.
            It is what counts on the way back. Where the decoded properties do not agree with it, the
            line was edited, and is refused: whoever means the edit takes `raw` out, and the decoded
            properties count, with the types that JSON gives them
queue       where it lay; of no meaning on the way back

What the broker counts of looks at a message is left out. Its death records (`x-death`) are kept, or
nobody would know any more where a message came from; a replay leaves them out, as it always does.
"""

from __future__ import annotations

import asyncio
import json
import math
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, BinaryIO, Final

from rabbit_tasks.broker import Connection
from rabbit_tasks.errors import ParkingError, PublishError
from rabbit_tasks.parking.foreign import refuse_main
from rabbit_tasks.parking.look import Moved, taking
from rabbit_tasks.parking.parked import Choose, ParkedMessage, kept
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.properties import Properties
from rabbit_tasks.publisher import ALONE_FROM, Publisher
from rabbit_tasks.text import one_line

VERSION: Final = 1
"""Of the lines: one more when what is written for people changes, for it is compared."""
LONGEST: Final = 2**30
"""Bytes of the longest line that is read: nothing a broker takes makes a longer one."""
_WINDOW: Final = 200
"""Messages that are on their way at once, and the bytes of their bodies."""
_WINDOW_BYTES: Final = 2**24
_TEXTS: Final = (
    "content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id",
    "type", "user_id", "app_id", "cluster_id",
)  # fmt: skip


@dataclass(frozen=True)
class Archived:
    """A message out of an archive."""

    body: bytes = field(repr=False)
    properties: Properties = field(repr=False)


# --- a line, pure -------------------------------------------------------------------------------


def line_of(queue: str, message: ParkedMessage) -> bytes:
    """A message as a line of the archive, in ASCII: nothing in it can drive a terminal."""
    properties = kept(message.properties)
    line = {
        "rabbit_tasks": VERSION,
        "queue": queue,
        "body": _readable_body(message.body),
        "properties": _readable(properties),
        "raw": b64encode(properties.encode()).decode(),
    }
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def archived(line: bytes) -> Archived:
    """The message of a line. ValueError says what is wrong with it."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("not JSON: nested too deep") from None
    except ValueError as error:
        if not line.endswith(b"\n"):
            raise ValueError("cut short: the file ends in the middle of it") from None
        raise ValueError(f"not JSON: {error}") from None
    version = found.get("rabbit_tasks") if isinstance(found, dict) else None
    if type(version) is not int:
        raise ValueError("not of an archive: `rabbit-tasks parked export` writes those")
    if version != VERSION:
        raise ValueError(f"an archive of version {version}, by another release of rabbit_tasks; "
                         f"this one reads version {VERSION}")  # fmt: skip
    return Archived(
        _body(found.get("body")), _properties(found.get("raw"), found.get("properties"))
    )


def read(file: BinaryIO) -> Iterator[tuple[int, Archived]]:
    """The messages of an archive, with the numbers of their lines, from 1; blank lines are none.

    ParkingError, with the number, where a line is not what `export_to` writes.
    """
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise ParkingError(f"line {number}: longer than {LONGEST} bytes, as no message is")
        if not line.isspace():
            try:
                message = archived(line)
            except ValueError as error:
                raise ParkingError(f"line {number}: {one_line(str(error))}") from None
            yield number, message


def _readable_body(body: bytes) -> dict[str, str]:
    try:
        return {"text": body.decode()}
    except UnicodeDecodeError:
        return {"base64": b64encode(body).decode()}


def _body(found: object) -> bytes:
    match found:
        case {"text": str(text), **others} if not others:
            try:
                return text.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    "its body has a lone surrogate, which UTF-8 cannot carry"
                ) from None
        case {"base64": str(text), **others} if not others:
            return _bytes(text, "body")
    raise ValueError('its body is neither {"text": …} nor {"base64": …}')


def _bytes(text: str, what: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"its {what} is not base64") from None


def _readable(properties: Properties) -> dict[str, Any]:
    values: dict[str, Any] = {name: properties.text(name) for name in _TEXTS}
    values |= {name: properties.number(name) for name in ("delivery_mode", "priority")}
    values["timestamp"] = properties.timestamp or properties.number("timestamp")
    told = {name: _plain(value) for name, value in values.items() if value is not None}
    return {**told, "headers": _plain(properties.headers)}


def _properties(raw: object, readable: object) -> Properties:
    if not isinstance(readable, dict):
        raise ValueError("it has no properties")
    if raw is None:
        return _given(readable)
    properties = Properties.decode(_bytes(raw, "raw")) if isinstance(raw, str) else None
    if properties is None or not properties.is_whole:
        raise ValueError("its raw is no property list")
    if _readable(properties) != readable:
        raise ValueError(
            "its properties were edited, and raw says otherwise: undo that, or take raw out of the "
            "line, and the properties count as they can be read"
        )
    return properties


def _given(readable: dict[str, Any]) -> Properties:
    """What a person wrote, with the types that JSON has."""
    values = dict(readable)
    headers = values.pop("headers", {})
    if not isinstance(headers, dict):
        raise ValueError("its headers are no object")
    when = values.get("timestamp")
    if isinstance(when, str):
        values["timestamp"] = datetime.fromisoformat(when)
    return Properties.of(headers, **values)


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
        case datetime():
            return value.isoformat()
        case bool() | str() | int() | float() | None:
            return value
    return str(value)  # a Decimal


# --- out of a parking queue ---------------------------------------------------------------------


async def export_to(
    connection: Connection,
    queue: str | ParkingQueue,
    choose: Choose,
    write: Callable[[bytes], Awaitable[None]],
    *,
    limit: int | None = None,
    began: Callable[[int], None] = lambda _count: None,
    told: Callable[[ParkedMessage], None] = lambda _message: None,
) -> Moved:
    """Write chosen messages as lines, in their order; all stay where they are.

    `write` is given one line at a time, and waited for; `began` is told how many are parked, and
    `told` is called after each line.
    """
    parking = ParkingQueue.of(queue)
    moved = Moved()
    async with taking(connection, parking) as taken:
        moved.there = taken.count
        began(taken.count)
        async for _, message in taken:
            if limit is not None and moved.chosen >= limit:
                break
            if choose(message):
                await write(line_of(parking.name, message))
                moved.chosen += 1
                told(message)
    return moved


# --- into a parking queue -----------------------------------------------------------------------


@dataclass
class Imported:
    """What an import has done so far."""

    count: int = 0
    """Messages that the broker has confirmed."""
    through: int = 0
    """The last line before the first that failed: all to here are in the queue."""
    beyond: list[int] = field(default_factory=list)
    """Lines behind the first that failed which are in the queue as well."""
    maybe: list[int] = field(default_factory=list)
    """Lines of which nobody knows, because no answer came."""
    altered: int = 0
    """Messages that came without what the broker would not have taken as it stands."""

    def __str__(self) -> str:
        parts = [f"{self.count} imported"]
        if self.count:
            parts[0] += f", all to line {self.through}"
        if self.beyond:
            parts.append(f"line {_ranges(self.beyond)} as well")
        if self.maybe:
            parts.append(f"nobody knows of line {_ranges(self.maybe)}")
        return "; ".join(parts)


async def import_from(
    publisher: Publisher,
    queue: str | ParkingQueue,
    messages: Iterable[tuple[int, Archived]],
    imported: Imported,
    *,
    told: Callable[[], None] = lambda: None,
) -> None:
    """Publish messages into a parking queue that exists, in their order, and see them confirmed.

    `messages` come with the numbers of their lines. However it ends, `imported` says what went;
    `told` is called after each. ParkingError where one does not go: no others are begun then.

    Two things cannot come back, for what the broker would make of them: CC and BCC, by which it would
    deliver the message once more to the queues named there, and the user id of another user than ours.
    """
    parking = ParkingQueue.of(queue)
    connection = await publisher.connect()
    await refuse_main(connection, parking)
    user = connection.address.user
    for chunk in _chunks(messages):
        sent: list[tuple[int, asyncio.Task[None]]] = []
        for line, message in chunk:
            properties = _acceptable(message.properties, user)
            imported.altered += properties is not message.properties
            going = publisher.send("", parking.name, message.body, properties)
            sent.append((line, asyncio.create_task(going)))
        try:
            await asyncio.wait([task for _, task in sent])
        finally:
            # When we are interrupted as well: their answers are on their way.
            await asyncio.wait([task for _, task in sent])
            failed = _tally(sent, imported, told)
        if failed:
            line, error = failed
            raise ParkingError(f"line {line}: {error}; {imported}") from error


def _chunks(messages: Iterable[tuple[int, Archived]]) -> Iterator[list[tuple[int, Archived]]]:
    """Messages that may be on their way together, and are stored in their order all the same.

    On one channel they are. But the publisher lets a message wait while its id is on its way, and
    gives one that the broker may refuse a channel of its own.
    """
    chunk: list[tuple[int, Archived]] = []
    ids: set[bytes] = set()
    size = 0
    for line, message in messages:
        message_id = message.properties.raw("message_id")
        is_apart = len(message.body) > ALONE_FROM or message.properties.text("expiration")
        if chunk and (
            is_apart or message_id in ids or len(chunk) == _WINDOW
            or size + len(message.body) > _WINDOW_BYTES
        ):  # fmt: skip
            yield chunk
            chunk, ids, size = [], set(), 0
        chunk.append((line, message))
        ids.add(message_id)
        size += len(message.body)
        if is_apart:
            yield chunk
            chunk, ids, size = [], set(), 0
    if chunk:
        yield chunk


def _acceptable(properties: Properties, user: str | None) -> Properties:
    """The properties without what the broker would act on or refuse."""
    if {"CC", "BCC"} & properties.headers.keys():
        properties = properties.without("CC", "BCC")
    if properties.text("user_id") not in (None, user):
        properties = properties.replace({}, drop=("user_id",))
    return properties


def _tally(
    sent: list[tuple[int, asyncio.Task[None]]], imported: Imported, told: Callable[[], None]
) -> tuple[int, PublishError] | None:
    """Count what was confirmed; the first that was not, with its error."""
    first: tuple[int, PublishError] | None = None
    for line, task in sent:
        error = task.exception()
        if error is None:
            imported.count += 1
            told()
            if first is None:
                imported.through = line
            else:
                imported.beyond.append(line)
        elif isinstance(error, PublishError):
            first = first or (line, error)
            if error.maybe_stored:
                imported.maybe.append(line)
        else:
            raise error
    return first


def _ranges(numbers: list[int]) -> str:
    """1-3, 5: numbers that rise, in few words."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)
