"""What metrics, traces and tests are told about deliveries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rabbit_tasks.message import Message
from rabbit_tasks.retry import Outcome


@dataclass(frozen=True, slots=True)
class Settled:
    """A delivery was settled: its outcome is on the broker and it is acked."""

    message: Message
    outcome: Outcome
    seconds: float
    """How long the handler took."""


Observer = Callable[[Settled], None]
"""Called in the event loop after the ack, so it must not block. What it raises is logged."""
