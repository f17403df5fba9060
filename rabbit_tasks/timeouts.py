"""How long the broker lets a handler take: its consumer timeout, by version."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from rabbit_tasks.consumer import Consumer, longest_wait
from rabbit_tasks.durations import duration_text
from rabbit_tasks.retry import MILLISECOND
from rabbit_tasks.text import numbers

DEFAULT: Final = timedelta(minutes=30)
"""What every version comes with, for quorum queues (3.10 to 4.3)."""
_ARGUMENT_COUNTS: Final = (3, 12)
"""From here on the queue's argument decides, be it shorter or longer than what is configured."""
_CANCELS: Final = (4, 3)
_MINUTE: Final = timedelta(minutes=1)
_SPARE: Final = timedelta(minutes=5)
"""For what comes after the handler; and before 4.3 the broker looks once a minute only."""


def warning_of(version: str, consumer: type[Consumer[Any]]) -> str | None:
    """What this version of the broker does to a handler that is allowed to take so long, if anything.

    Only for what the class says: a handler without a time limit may be as quick as any. Nor can it be
    seen over AMQP how the broker is configured.
    """
    # (A version that tells none is taken for a new one.)
    broker, wait = numbers(version)[:2] or (99,), longest_wait(consumer)
    says = "ack_timeout" if consumer.ack_timeout is not None else "timeout"
    if broker >= _ARGUMENT_COUNTS:
        if consumer.ack_timeout is not None or not _exceeds(wait):
            return None
    elif not (_exceeds(wait) or _exceeds(consumer.ack_timeout)):
        return None
    takes = consumer.ack_timeout or wait
    assert takes is not None
    enough = consumer.ack_timeout or -(-takes // _MINUTE) * _MINUTE + _SPARE
    if broker < _ARGUMENT_COUNTS:
        remedy = (
            f"write consumer_timeout = {enough // MILLISECOND} into rabbitmq.conf, since this version "
            "takes it from there alone"
        )
    else:
        remedy = (
            f"write ack_timeout = timedelta(minutes={enough // _MINUTE}); where its queue is there "
            f"already, set it by a policy (consumer-timeout: {enough // MILLISECOND})"
        )
    how = "cancels the consumer" if broker >= _CANCELS else "closes the channel"
    return (
        f"{consumer.queue}: its handler may take {duration_text(takes)} ({says}), but RabbitMQ "
        f"{version}, unless configured otherwise, {how} after {duration_text(DEFAULT)} without an ack "
        f"and delivers the message again; {remedy}"
    )


def _exceeds(time: timedelta | None) -> bool:
    return time is not None and time >= DEFAULT
