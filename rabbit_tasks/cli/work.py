"""`rabbit-tasks work`: run the consumers."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rabbit_tasks.cli import Given, app_of, cli, collect, exit_code, run, settings_of, tell
from rabbit_tasks.cli.logs import Format, configure
from rabbit_tasks.errors import ConfigurationError, RabbitTasksError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from rabbit_tasks.settings import Settings
    from rabbit_tasks.supervisor import Place
    from rabbit_tasks.worker import Worker

Loop = Literal["auto", "asyncio", "uvloop"]


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
            metavar="DURATION", help="Be gone within this time after SIGTERM.", show_default="30s"
        ),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="So many workers, each in its process; one that dies is replaced.",
            show_default="one, unsupervised",
        ),
    ] = None,
    loop: Annotated[
        Loop, typer.Option(help="The event loop; auto is uvloop where that is installed.")
    ] = "auto",
    log_format: Annotated[Format, typer.Option(help="How log lines look.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the app's consumers until SIGTERM or SIGINT."""
    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"{log_level!r} is not debug, info, warning or error")
    log_setup = partial(configure, log_format, log_level, several=processes is not None)
    loop_factory = _loop_factory(loop)
    begin = partial(_work, context.obj, queues or (), declare, log_setup, loop_factory)
    if processes is None:
        log_setup()
        begin(settings_of(context, grace=grace))
        return

    from rabbit_tasks.supervisor import MOST, Signals, Supervisor

    if not re.fullmatch("[0-9]{1,9}", processes) or not 1 <= int(processes) <= MOST:
        raise ConfigurationError(f"--processes is a number from 1 to {MOST}, not {processes!r}")
    signals = Signals()
    log_setup()
    settings = settings_of(context, grace=grace)
    import rabbit_tasks.worker  # noqa: F401 (once, before the workers' processes part from this one)

    collect()
    place = Supervisor(int(processes), signals, settings).run()
    if isinstance(place, int):
        raise typer.Exit(place)
    settings = settings.changed(worker_name=place.name(settings.worker_name))
    try:
        begin(settings, place)
    except RabbitTasksError as error:
        if place.gives_up(str(error)):
            raise typer.Exit(exit_code(error)) from None
        raise


def _loop_factory(loop: Loop) -> Callable[[], AbstractEventLoop] | None:
    """What makes the event loop; None is asyncio's own way. It is for our process alone: handlers in
    child processes have asyncio's."""
    if loop == "asyncio" or (loop == "auto" and find_spec("uvloop") is None):
        return None
    try:
        factory: Callable[[], AbstractEventLoop] = import_module("uvloop").new_event_loop
    except ImportError as error:
        raise ConfigurationError(
            f"--loop {loop}: {error}; pip install 'rabbit-tasks[uvloop]', or take --loop asyncio"
        ) from None
    return factory


def _work(
    given: Given,
    queues: Collection[str],
    declare: bool,
    log_setup: Callable[[], None],
    loop_factory: Callable[[], AbstractEventLoop] | None,
    settings: Settings,
    place: Place | None = None,
) -> None:
    """A worker, alone or at its place among others."""
    from rabbit_tasks.worker import Worker

    worker = Worker(
        app_of(given), settings, queues=queues, declare=declare, log_setup=log_setup,
        on_ready=place.consumes if place else None, on_overdue=_leave,
    )  # fmt: skip
    try:
        run(_until_stopped(worker, place), loop_factory)
    except SystemExit as error:
        # Not ours: we never exit in the event loop. With its code it could pass for a clean end.
        tell(
            f"error: a task or callback that a handler started raised SystemExit({error.code!r}), "
            "which ends the event loop; its message is delivered again, up to the delivery limit"
        )
        raise typer.Exit(1) from None
    finally:
        if place is not None:
            place.detach()
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


def _leave(failed: bool) -> None:
    """The grace time is over, and something that cannot be cancelled holds us: a thread, the loop."""

    def last_words() -> None:
        logging.getLogger("rabbit_tasks").warning("the grace time is over: what still runs is left")
        logging.shutdown()
        sys.stdout.flush()

    saying = threading.Thread(target=last_words, daemon=True)
    saying.start()
    saying.join(0.2)  # (what holds us may hold the logs as well)
    os._exit(1 if failed else 0)


async def _until_stopped(worker: Worker, place: Place | None) -> None:
    import asyncio

    if place is not None:
        place.attach(worker.stop, worker.asked)
    else:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
            # The loop is told by other means; this is what runs where it stands still.
            signal.signal(number, lambda *_: worker.asked())
    await worker.run()
