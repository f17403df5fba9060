"""Workers for RabbitMQ: retries by the broker, a parking lot, replay. Nothing is ever lost."""

from rabbit_tasks.app import App
from rabbit_tasks.broker import Publisher
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import (
    ConfigurationError,
    Park,
    PublishError,
    RabbitTasksError,
    TopologyError,
)
from rabbit_tasks.message import Message
from rabbit_tasks.retry import Done, Parked, RetryAfter, RetryPolicy
from rabbit_tasks.settings import Settings

__all__ = [
    "App",
    "ConfigurationError",
    "Consumer",
    "Done",
    "Message",
    "Park",
    "Parked",
    "PublishError",
    "Publisher",
    "RabbitTasksError",
    "RetryAfter",
    "RetryPolicy",
    "Settings",
    "TopologyError",
]
