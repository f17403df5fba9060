"""`rabbit-tasks demo`: real work end to end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.cli import cli, run, settings_of, tell

if TYPE_CHECKING:
    from rabbit_tasks.settings import Settings


@cli.command("demo")
def demo(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", exists=True, file_okay=False, resolve_path=True,
            show_default="images made for it",
            help="Its images; thumbnails go to FOLDER/thumbnails, originals are only read.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Make thumbnails of images.

    Declare, publish, work, retry, park, repair, replay.
    """
    run(_demo(settings_of(context), folder))


async def _demo(settings: Settings, folder: Path | None) -> None:
    import asyncio

    from rich.console import Console

    from rabbit_tasks.demo.tour import tour

    task = asyncio.current_task()
    assert task is not None
    told = asyncio.Event()

    def end() -> None:
        told.set()
        task.cancel()  # as Ctrl-C: through every `finally`, so that the worker ends too

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    try:
        await tour(settings, folder, Console(highlight=False))
    except asyncio.CancelledError:
        if not told.is_set():
            raise
        tell("terminated")
        raise typer.Exit(143) from None
