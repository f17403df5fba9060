"""`rabbit-tasks work`: run the consumers."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rabbit_tasks.app import find_app
from rabbit_tasks.cli import cli, run, settings_of, tell
from rabbit_tasks.cli.logs import Format, configure

if TYPE_CHECKING:
    from rabbit_tasks.worker import Worker


@cli.command("work")
def work(
    context: typer.Context,
    queues: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[QUEUE]...", help="Only these queues' consumers.", show_default="all"
        ),
    ] = None,
    declare: Annotated[
        bool, typer.Option("--declare", help="First create what is missing on the broker.")
    ] = False,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="How long to finish after SIGTERM.", show_default="30s"
        ),
    ] = None,
    log_format: Annotated[Format, typer.Option(help="How log lines look.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the app's consumers until SIGTERM or SIGINT."""
    from rabbit_tasks.worker import Worker

    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"{log_level!r} is not debug, info, warning or error")
    log_setup = partial(configure, log_format, log_level)
    log_setup()
    settings = settings_of(context, grace=grace)
    app = find_app(context.obj.app)
    worker = Worker(app, settings, queues=queues or (), declare=declare, log_setup=log_setup)
    try:
        run(_work(worker))
    except SystemExit as error:
        # Not ours: we never exit in the event loop. With its code it could pass for a clean end.
        tell(
            f"error: a task or callback that a handler started raised SystemExit({error.code!r}), "
            "which ends the event loop; its message is delivered again, up to the delivery limit"
        )
        raise typer.Exit(1) from None
    if any(
        not thread.daemon
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
    ):
        # A handler in a thread cannot be stopped. Its message was put back; the interpreter would
        # wait for it at exit, longer than whoever sent SIGTERM.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


async def _work(worker: Worker) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run()
