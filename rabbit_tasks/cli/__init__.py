"""The command line: each command is a few lines over one function of the package.

Data goes to stdout, words to stderr. Exit 0: fine; 1: failed, or a difference found; 2: wrong usage.

Commands import what they work with inside their functions: every command is registered before any of
them runs, and `--help` must not wait for the client library.
"""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer
import typer.main

from rabbit_tasks.errors import ConfigurationError, RabbitTasksError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from rabbit_tasks.app import App
    from rabbit_tasks.settings import Settings

NOUNS: Final = {
    "chaos": ("chaos",),
    "demo": ("demo",),
    "doctor": ("doctor",),
    "parked": ("parked",),
    "publish": ("publish",),
    "topology": ("topology", "migrate"),
    "work": ("work",),
}
"""In which modules the commands of each are. They register them when they are imported."""
HELP: Final = ("-h", "--help")

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """What stands before the noun: which app, which broker."""

    app: str | None
    url: str | None


cli = typer.Typer(
    help="Workers for RabbitMQ: retries by the broker, a parking lot, replay.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes around help and errors take as long to load as all the rest
    context_settings={"help_option_names": list(HELP)},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("rabbit-tasks"))
        raise typer.Exit


@cli.callback()
def options(
    context: typer.Context,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:ATTRIBUTE",
            help="The app. Else RABBIT_TASKS_APP, else app of tool.rabbit_tasks in pyproject.toml.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The broker, amqp://user:password@host:port/vhost; several with commas. "
            "Else RABBIT_TASKS_URL.",
        ),
    ] = None,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="The version.")
    ] = False,
) -> None:
    context.obj = Given(app, url)


def app_of(given: Given) -> App:
    """The app that is named; ConfigurationError where none is, or it cannot be had."""
    from rabbit_tasks.app import find_app

    return find_app(given.app)


def app_if_given(given: Given) -> App | None:
    """The app; None where nobody names one."""
    from rabbit_tasks.app import is_given

    return app_of(given) if given.app or is_given() else None


def settings_of(context: typer.Context, *, grace: str | None = None) -> Settings:
    """The environment's settings, and what the command line says instead."""
    from rabbit_tasks.settings import Settings

    given: Given = context.obj
    return Settings(url=given.url, grace=grace)


def run(
    work: Coroutine[Any, Any, T], loop_factory: Callable[[], AbstractEventLoop] | None = None
) -> T:
    """Run a command's coroutine. RabbitTasksError where the client library gave one of its calls up."""
    import asyncio

    collect()
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(work)
    except asyncio.CancelledError:  # (nobody's Ctrl-C: that is a KeyboardInterrupt)
        raise RabbitTasksError("the connection to the broker is lost") from None


def collect() -> None:
    """From here on there is garbage. What was loaded lives as long as the process: it is looked
    through no more, and processes that part from this one go on sharing its memory."""
    gc.freeze()
    gc.enable()


def exit_code(error: RabbitTasksError) -> int:
    """2 where what we were given is wrong, 1 for the rest."""
    return 2 if isinstance(error, ConfigurationError) else 1


def tell(text: str) -> None:
    """Words for a person, on stderr."""
    typer.echo(text, err=True)


def no_constant(name: str) -> None:
    """For json.loads, which takes NaN and Infinity otherwise."""
    raise ValueError(f"{name} is none of its values")


def _refuse_empty_values(command: Any) -> None:
    """Whoever gives an option gives it a value. An empty one is a variable of a script that was not
    set: as a filter it would take everything, as an app or a URL whatever is the default."""

    def refuse(_context: typer.Context, parameter: Any, value: Any) -> Any:
        if value == "" or (isinstance(value, list | tuple) and "" in value):
            raise typer.BadParameter("its value is empty", param=parameter)
        return value

    for one in command.params:
        # (A body that is published may be empty.)
        if one.callback is None and not (one.param_type_name == "argument" and one.nargs < 0):
            one.callback = refuse
    for verb in getattr(command, "commands", {}).values():
        _refuse_empty_values(verb)


def load(words: Sequence[str]) -> None:
    """Register the commands that these words may mean: those of every noun among them, or else all.

    (Most of a worker's start is imports. A noun that is the value of an option loads what nobody
    needs; a noun after --help, which lists them all, loads nothing.)
    """
    named = [word for word in takewhile(lambda word: word not in HELP, words) if word in NOUNS]
    for noun in named or NOUNS:
        for module in NOUNS[noun]:
            import_module(f"{__name__}.{module}")


def command() -> NoReturn:
    """What was typed, to its end: SystemExit with its code."""
    try:
        load(sys.argv[1:])
        # Or else Python prints what the client library says of a refused connection, beside our line.
        logging.getLogger("aiormq").addHandler(logging.NullHandler())
        whole = typer.main.get_command(cli)
        _refuse_empty_values(whole)
        whole(prog_name="rabbit-tasks")
    except RabbitTasksError as error:
        for line in str(error).splitlines():
            tell(f"error: {line}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        tell("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has enough. Nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        tell(f"error: {error.strerror}: where stdout goes, or temporary files (TMPDIR)")
        sys.exit(1)
    sys.exit(0)


def main() -> None:
    """The `rabbit-tasks` process: it ends with the command, and takes nothing else with it."""
    code = 1
    gc.disable()  # until all is loaded: a tenth of a worker's start, for nothing

    def end() -> None:
        logging.shutdown()
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)

    # The first to be registered is the last to run. Python would go on to wait for processes that
    # multiprocessing has started beside our children; a worker's grace time does not wait for them.
    atexit.register(end)
    try:
        command()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
