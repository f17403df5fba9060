"""Workers for RabbitMQ: retries by the broker, a parking lot, replay. No confirmed message is lost."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from rabbit_tasks.app import App
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import (
    ConfigurationError,
    ConnectError,
    Park,
    PublishError,
    RabbitTasksError,
    Refused,
    TopologyError,
    Unconfirmed,
    Unroutable,
)
from rabbit_tasks.message import Message
from rabbit_tasks.retry import Done, Parked, RetryAfter, RetryPolicy

if TYPE_CHECKING:
    from rabbit_tasks.publisher import Publisher
    from rabbit_tasks.settings import Settings

__all__ = [
    "App",
    "ConfigurationError",
    "ConnectError",
    "Consumer",
    "Done",
    "Message",
    "Park",
    "Parked",
    "PublishError",
    "Publisher",
    "RabbitTasksError",
    "Refused",
    "RetryAfter",
    "RetryPolicy",
    "Settings",
    "TopologyError",
    "Unconfirmed",
    "Unroutable",
]

_LATER: Final = {"Publisher": "rabbit_tasks.publisher", "Settings": "rabbit_tasks.settings"}
"""Imported when somebody asks for them (PEP 562): the client library and pydantic-settings take
three quarters of the time, which a module of consumers or `rabbit-tasks --help` has no use for."""

if not TYPE_CHECKING:  # whoever checks types would take a function for leave to ask for anything

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_LATER[name]), name)
        return found

    def __dir__():
        return sorted({*globals(), *_LATER})
