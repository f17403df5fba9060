"""What a handler sees of a message, and every header we write or read."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from rabbit_tasks.properties import Properties

# Ours.
RETRY_COUNT: Final = "x-retry-count"
"""Failed attempts so far, an integer. The attempt number is one more."""
ORIGIN_QUEUE: Final = "x-origin-queue"
"""The main queue that the message came from, and goes back to."""
ERROR_TYPE: Final = "x-error-type"
ERROR_MESSAGE: Final = "x-error-message"
ERROR_STACK: Final = "x-error-stack"
ERROR_FINGERPRINT: Final = "x-error-fingerprint"
"""Of a parked message: 12 hexadecimal digits, the same for whatever failed in the same way."""
ATTEMPTS: Final = "x-attempts"
"""The history: a list of at most 20 tables of attempt, when, seconds, error, worker."""
PARKED_REASON: Final = "x-parked-reason"
PARKED_AT: Final = "x-parked-at"
REPLAYED: Final = "x-replayed"
"""A table of count, when and id: how often the message was replayed; the last time, and which replay
it was: no other copy has this id."""
REPLAYING: Final = "x-replaying"
"""Of a note that a replay leaves on the broker beside its copies; never of a message."""
EDITED: Final = "x-edited"
"""A table of when, size and body: the message's body was changed in the parking lot, the last time;
how many bytes it had before the first time, and these, as far as a frame holds them."""
MIGRATING: Final = "x-migrating"
"""A table of expiration and user_id: what a message had before its queue is migrated, while it waits."""
CRASHES: Final = "x-crashes"
"""A table of count, worker and when: how many workers died with the message in their hands since it
last had an outcome, and which worker is the last that is known to have had it, when."""

OURS: Final = frozenset(
    {RETRY_COUNT, ORIGIN_QUEUE, ERROR_TYPE, ERROR_MESSAGE, ERROR_STACK, ERROR_FINGERPRINT,
     ATTEMPTS, PARKED_REASON, PARKED_AT, REPLAYED, REPLAYING, EDITED, MIGRATING, CRASHES}
)  # fmt: skip

# The broker's: read for display and for the crash count, never for the attempt number.
DEATH: Final = "x-death"
DELIVERY_COUNT: Final = "x-delivery-count"
ACQUIRED_COUNT: Final = "x-acquired-count"

MAX_COUNT: Final = 1_000_000
"""As far as we count; more reads as this."""


def is_brokers(header: str) -> bool:
    """Whether a copy must leave this header out.

    Death records and counts are true of one life in one queue only: 3.10 takes a stale `x-death`
    for a cycle and drops the message at its next death. CC and BCC would route each copy to the
    publisher's other queues once more.
    """
    return (
        header in ("CC", "BCC", DEATH, DELIVERY_COUNT, ACQUIRED_COUNT)
        or header.startswith(("x-first-death-", "x-last-death-"))
    )  # fmt: skip


def retry_count(properties: Properties) -> int:
    """Failed attempts before this delivery.

    Absent, negative, or anything but an integer reads as 0; more than 1,000,000 as 1,000,000.
    """
    return _count(properties.header(RETRY_COUNT))


def crashes(properties: Properties) -> int:
    """Workers that died with it, as its own header tells. Read like `retry_count`."""
    table = properties.header(CRASHES)
    return _count(table.get("count")) if isinstance(table, dict) else 0


def deliveries(properties: Properties) -> int:
    """Deliveries of a redelivered message that were never settled, by the broker's count, from 1.

    A consumer that the broker gave up on (4.3) counts in `x-acquired-count` alone, which older
    brokers leave as the publisher wrote it: so it is read only where the other is not there.
    """
    count = properties.header(DELIVERY_COUNT)
    return max(1, _count(properties.header(ACQUIRED_COUNT) if count is None else count))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        return 0
    return min(value, MAX_COUNT)


class Message:
    """What a handler is told about its message, next to the decoded body."""

    __slots__ = ("body", "properties", "queue", "redelivered")

    def __init__(
        self, queue: str, body: bytes, properties: Properties, *, redelivered: bool = False
    ) -> None:
        self.queue = queue
        self.body = body
        self.redelivered = redelivered
        self.properties = properties

    @property
    def id(self) -> str | None:
        """The publisher's message id: the same on every attempt and after a replay."""
        return self.properties.text("message_id")

    @property
    def attempt(self) -> int:
        """The number of this try, from 1. A redelivery after a crash is not a new attempt."""
        return retry_count(self.properties) + 1

    @property
    def headers(self) -> dict[str, Any]:
        """All headers, decoded: numbers, text, bytes, datetimes, Decimals, lists and dicts."""
        return self.properties.headers

    @property
    def timestamp(self) -> datetime | None:
        """When it was published, by its publisher's clock."""
        return self.properties.timestamp

    @property
    def content_type(self) -> str | None:
        return self.properties.text("content_type")

    @property
    def content_encoding(self) -> str | None:
        return self.properties.text("content_encoding")

    @property
    def correlation_id(self) -> str | None:
        return self.properties.text("correlation_id")

    @property
    def reply_to(self) -> str | None:
        return self.properties.text("reply_to")

    @property
    def type(self) -> str | None:
        return self.properties.text("type")

    @property
    def app_id(self) -> str | None:
        return self.properties.text("app_id")

    @property
    def priority(self) -> int | None:
        return self.properties.number("priority")

    def __repr__(self) -> str:
        return (
            f"<Message {self.id} of {self.queue}, attempt {self.attempt}, {len(self.body)} bytes>"
        )
