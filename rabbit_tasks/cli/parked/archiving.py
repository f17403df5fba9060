"""`parked export` and `parked import`: out into a file, and back."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, Literal

import typer

from rabbit_tasks.cli import run, settings_of, tell
from rabbit_tasks.cli.parked.options import (
    DryRun,
    Foreign,
    Queue,
    choosing,
    end,
    parked,
    queue_of,
    tell_unfinished,
)
from rabbit_tasks.errors import ParkingError
from rabbit_tasks.text import escaped, quoted

if TYPE_CHECKING:
    from rabbit_tasks.parking import Choice, Moved, ParkedMessage, ParkingQueue
    from rabbit_tasks.parking.archive import Imported
    from rabbit_tasks.settings import Settings

_PIECE: Final = 262_144
"""Bytes that go into a pipe at once."""

Write = Callable[[bytes], Awaitable[None]]


@parked.command("export")
@choosing(required=False)
def export_command(
    context: typer.Context,
    queue: Queue,
    choice: Choice,
    file: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="A new file; - or none is stdout.")
    ] = "-",
    foreign: Foreign = False,
) -> None:
    """Write parked messages as JSON lines. All stay parked.

    Whole: body, headers and properties. A file is there when all of it is there, and never in place
    of one that was there before.
    """
    parking = queue_of(queue, foreign)
    to_terminal = file == "-" and sys.stdout.isatty()
    with _new(file) as write:
        exporting = _export(settings_of(context), parking, choice, write, to_terminal=to_terminal)
        moved, is_unfinished = run(exporting)
    if is_unfinished:
        tell_unfinished(parking)
    end(moved, "exported", choice, parking)


@parked.command("import")
def import_command(
    context: typer.Context,
    queue: Queue,
    file: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="What export wrote; - or none is stdin.")
    ] = "-",
    foreign: Foreign = False,
    dry_run: DryRun = False,
) -> None:
    """Put exported messages into a parking queue.

    One that is there; in their order. Every line is read before the first message goes: where one is
    wrong, nothing is imported.
    """
    from rabbit_tasks.parking.archive import Imported, read

    settings, parking = settings_of(context), queue_of(queue, foreign)
    imported = Imported()
    with _opened(file) as lines:
        count = sum(1 for _ in read(lines))
        if dry_run:
            typer.echo(f"{count} would be imported")
            return
        lines.seek(0)
        try:
            run(_import(settings, parking, lines, count, imported))
        finally:  # also after a fault or an interrupt
            typer.echo(f"{imported.count} imported")
            if imported.count < count:
                tell(f"{imported}; of {count}")
    if imported.altered:
        tell(
            f"{imported.altered} of them without a header or property that the broker does not take "
            "back: CC, BCC, another user's id"
        )
    tell(f"{count} imported into {quoted(parking.name)}; what is there: {parking.to_type('list')}")


async def _export(
    settings: Settings, queue: ParkingQueue, choice: Choice, write: Write, *, to_terminal: bool
) -> tuple[Moved, bool]:
    """What was exported; and whether a replay that was killed has messages elsewhere."""
    from rabbit_tasks import parking
    from rabbit_tasks.broker import connected
    from rabbit_tasks.cli.progress import going
    from rabbit_tasks.parking.staging import is_unfinished

    count = 0
    with going("exporting", shown=not to_terminal) as progress:

        def told(message: ParkedMessage) -> None:
            nonlocal count
            count += 1
            progress.at(message.position, count)

        async with connected(settings, "parked") as connection:
            unfinished = await is_unfinished(connection, queue)
            moved = await parking.export_to(
                connection, queue, choice, write, limit=choice.limit, told=told,
                began=progress.began,
            )  # fmt: skip
            return moved, unfinished


async def _import(
    settings: Settings, queue: ParkingQueue, lines: BinaryIO, total: int, imported: Imported
) -> None:
    from rabbit_tasks import parking
    from rabbit_tasks.cli.progress import going
    from rabbit_tasks.parking.archive import read
    from rabbit_tasks.publisher import Publisher

    with going("importing") as progress:
        progress.began(total)

        def told() -> None:
            progress.at(imported.count, imported.count)

        async with Publisher.open(settings) as publisher:
            await parking.import_from(publisher, queue, read(lines), imported, told=told)


class _Stream:
    """Writes into a pipe or a terminal, in threads: a reader who takes his time costs neither the
    connection its heartbeats nor, when he has stopped reading, Ctrl-C its effect."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._held = bytearray()

    async def __call__(self, line: bytes) -> None:
        import asyncio

        self._held += line
        if len(self._held) < _PIECE:
            return
        piece, self._held = bytes(self._held), bytearray()
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()

        def end(error: Exception | None) -> None:
            if not written.done():
                written.set_exception(error) if error else written.set_result(None)

        def write() -> None:
            failure = None
            try:
                self._write(piece)
            except (OSError, ParkingError) as error:
                failure = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end, failure)

        threading.Thread(target=write, daemon=True).start()
        await written

    def finish(self) -> None:
        """Write what is left."""
        self._write(self._held)

    def _write(self, piece: bytes | bytearray) -> None:
        left = memoryview(piece)
        with _said(self._name):
            while left:
                left = left[os.write(self._descriptor, left) :]


@contextmanager
def _new(file: str) -> Iterator[Write]:
    """Where an export is written to: stdout, a pipe that is there, or a file that is not yet."""
    path = Path(file)
    if file == "-":
        stream = _Stream("stdout", sys.stdout.fileno())
        yield stream
        stream.finish()
    elif path.is_file() or path.is_dir():
        raise typer.BadParameter(f"{escaped(file)} is there; name a new file", param_hint="FILE")
    elif path.exists():
        with _open(file, "wb") as pipe:
            stream = _Stream(file, pipe.fileno())
            yield stream
            stream.finish()
    else:
        with _whole(path) as write:
            yield write


@contextmanager
def _whole(path: Path) -> Iterator[Write]:
    """A file that takes its name when all of it is there; for our eyes alone, as messages may be."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".export-")
    except OSError as error:
        raise _no_file(str(path), error) from None
    try:
        with os.fdopen(descriptor, "wb") as unfinished:

            async def write(line: bytes) -> None:
                with _said(str(path)):
                    unfinished.write(line)

            yield write
            with _said(str(path)):
                unfinished.flush()
                os.fsync(descriptor)
                os.rename(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """What is imported, in a file in which one can go back to its beginning."""
    if file == "-" and sys.stdin.isatty():
        tell("reading what `parked export` wrote; end with Ctrl-D")
    with ExitStack() as opened:
        given: BinaryIO = sys.stdin.buffer
        if file != "-":
            given = opened.enter_context(_open(file, "rb"))
        if file == "-" or not given.seekable():
            copy = opened.enter_context(tempfile.TemporaryFile())
            with _said(file):
                shutil.copyfileobj(given, copy)
            copy.seek(0)
            given = copy
        yield given


def _open(file: str, mode: Literal["rb", "wb"]) -> BinaryIO:
    try:
        return open(file, mode)
    except OSError as error:
        raise _no_file(file, error) from None


def _no_file(file: str, error: OSError) -> typer.BadParameter:
    return typer.BadParameter(f"{escaped(file)}: {error.strerror}", param_hint="FILE")


@contextmanager
def _said(file: str) -> Iterator[None]:
    """What the system says no with, in a line; that nobody reads a pipe is for others to handle."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ParkingError(f"{escaped(file)}: {error.strerror}") from None
