"""An app: a name and its consumers; and how to find one."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from rabbit_tasks.consumer import Consumer, check
from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.observer import Observer
from rabbit_tasks.topology import Topology, topology_of

VARIABLE: Final = "RABBIT_TASKS_APP"

Lifespan = Callable[[], AbstractAsyncContextManager[Any]]
Redact = Callable[[str], str]


class App:
    """The consumers that are declared, run and reviewed together.

    name        of its lock file, topology/<name>.json
    consumers   instances, made with what they need
    lifespan    an async context manager factory: entered before the first message, left after the
                last, to open and close what consumers hold. Not in the child processes of
                isolation = "process": such a handler opens what it needs itself
    observers   called with what became of each delivery
    redact      passes over error messages and stack traces before they go into headers or logs

    Raises ConfigurationError for consumers that cannot work, alone or together.
    """

    def __init__(
        self,
        name: str,
        consumers: Sequence[Consumer[Any]],
        *,
        lifespan: Lifespan | None = None,
        observers: Sequence[Observer] = (),
        redact: Redact | None = None,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ConfigurationError(
                f"App({name!r}): a name has letters, digits and . _ - only; it names a file"
            )
        self.consumers = tuple(consumers)
        for consumer in self.consumers:
            if isinstance(consumer, type) and issubclass(consumer, Consumer):
                raise ConfigurationError(
                    f"App({name!r}) got the class {consumer.__name__}; pass an instance, "
                    f"{consumer.__name__}(…)"
                )
            if not isinstance(consumer, Consumer):
                raise ConfigurationError(
                    f"App({name!r}) got {consumer!r}, which is not a rabbit_tasks.Consumer"
                )
            check(type(consumer))
        if lifespan is not None and (
            isinstance(lifespan, AbstractAsyncContextManager) or not callable(lifespan)
        ):
            raise ConfigurationError(
                f"App({name!r}): lifespan is {type(lifespan).__name__}; pass the function that makes "
                "an async context manager, without calling it"
            )
        for observer in observers:
            if not callable(observer) or inspect.iscoroutinefunction(
                observer if inspect.isroutine(observer) else type(observer).__call__
            ):
                raise ConfigurationError(
                    f"App({name!r}): observer {getattr(observer, '__name__', observer)!r} must be a "
                    "plain function, which takes one Settled; it is called in the event loop"
                )
        self.name = name
        self.lifespan = lifespan
        self.observers = tuple(observers)
        self.redact = redact
        self.topology: Topology = topology_of(type(consumer) for consumer in self.consumers)

    @cached_property
    def queues(self) -> dict[str, Consumer[Any]]:
        """The consumers by main queue."""
        return {consumer.queue: consumer for consumer in self.consumers}

    def consumer(self, queue: str) -> Consumer[Any]:
        """The consumer of a main queue; ConfigurationError that names those there are."""
        try:
            return self.queues[queue]
        except KeyError:
            known = ", ".join(sorted(self.queues)) or "none"
            raise ConfigurationError(
                f"app {self.name} has no consumer of queue {queue!r}; its queues: {known}"
            ) from None

    def __repr__(self) -> str:
        return f"<App {self.name}: {', '.join(self.queues)}>"


def find_app(spec: str | None = None) -> App:
    """The app at `module:attribute`, else at RABBIT_TASKS_APP, else at [tool.rabbit_tasks] app in
    the pyproject.toml of this folder.

    The current folder is importable, as with `python -m`. An attribute that is a function without
    arguments is called. ConfigurationError says what was looked for, and where.
    """
    place = _place(spec)
    if place is None:
        raise ConfigurationError(
            f"which app? Give --app module:attribute, set {VARIABLE}, or write it into pyproject.toml "
            "as [tool.rabbit_tasks] app"
        )
    spec, source = place
    module_name, _, attribute = spec.partition(":")
    if not attribute or not module_name:
        raise ConfigurationError(
            f"{source}: {spec!r} is not module:attribute, such as shop.tasks:app"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigurationError(
                f"{source}: there is no module {error.name!r} in {here} or among the installed ones"
            ) from None
        raise ConfigurationError(
            f"{source}: {module_name} needs {error.name}, not installed"
        ) from error
    except BaseException as error:
        raise _broken(error, f"{source}: importing {module_name}", module_name) from error
    found: Any = module
    try:
        for part in attribute.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, App) and callable(found) and not isinstance(found, type):
            found = found()
    except BaseException as error:
        raise _broken(error, f"{source}: {spec}", module_name) from error
    if not isinstance(found, App):
        apps = [name for name, value in vars(module).items() if isinstance(value, App)]
        hint = f"; it has {', '.join(f'{module_name}:{name}' for name in apps)}" if apps else ""
        raise ConfigurationError(f"{source}: {spec} is not a rabbit_tasks.App{hint}")
    return found


def _broken(error: BaseException, what: str, module: str) -> BaseException:
    """The user's own fault in one line, with the place to mend; what is ours stays as it is."""
    if isinstance(error, (ConfigurationError, KeyboardInterrupt)):
        return error
    stack = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in stack if f.filename != __file__ and "importlib" not in f.filename]
    where = f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return ConfigurationError(
        f"{what} raised {text}{where}; python -c 'import {module}' shows its stack trace"
    )


def is_given() -> bool:
    """Whether the environment or pyproject.toml names an app; ConfigurationError if unreadable."""
    return _place(None) is not None


def _place(spec: str | None) -> tuple[str, str] | None:
    """What names the app, and where that is written; None where nothing does."""
    if spec:
        return spec, "--app"
    if named := os.environ.get(VARIABLE):
        return named, VARIABLE
    project = Path("pyproject.toml")
    if project.is_file():
        import tomllib  # (5 ms of a worker's start, where it is not needed)

        try:
            found: Any = tomllib.loads(project.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigurationError(f"pyproject.toml cannot be read: {error}") from None
        for part in ("tool", "rabbit_tasks", "app"):
            found = found.get(part) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found, "pyproject.toml [tool.rabbit_tasks] app"
    return None
