"""What metrics, traces and tests are told about deliveries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rabbit_tasks.message import Message
from rabbit_tasks.retry import Outcome


@dataclass(frozen=True, slots=True)
class Settled:
    """A message was settled: its outcome is on the broker and its delivery acked.

    Once for each run, though its ack be lost and the redelivery acked with the same outcome.
    """

    message: Message
    outcome: Outcome
    seconds: float
    """How long the handler took."""


Observer = Callable[[Settled], None]
"""Called in the event loop after the ack, so it must not block. What it raises is logged."""
