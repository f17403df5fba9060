"""Workers for RabbitMQ: retries by the broker, a parking lot, replay. No confirmed message is lost."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
    from rabbit_tasks.publisher import Publisher
    from rabbit_tasks.retry import Done, Parked, RetryAfter, RetryPolicy
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

_HOMES: Final = {
    "App": "app",
    "Consumer": "consumer",
    "Done": "retry",
    "Message": "message",
    "Parked": "retry",
    "Publisher": "publisher",
    "RetryAfter": "retry",
    "RetryPolicy": "retry",
    "Settings": "settings",
}
"""In which module a name is; all others are errors. It is imported when somebody asks for the name
(PEP 562): a module of consumers has no use for the client library, nor `rabbit-tasks --help` for
pydantic."""

if not TYPE_CHECKING:  # whoever checks types would take a function for leave to ask for anything

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
        found = globals()[name] = getattr(home, name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
