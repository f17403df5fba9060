"""Try a consumer without a broker: the production path of delivery.py, up to the outcome."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from rabbit_tasks import consumer as consumers
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.delivery import Delivery, Handling, Run
from rabbit_tasks.isolation import Children
from rabbit_tasks.message import RETRY_COUNT
from rabbit_tasks.properties import Properties
from rabbit_tasks.retry import Outcome

B = TypeVar("B")


async def perform(
    consumer: Consumer[B],
    body: B | bytes,
    *,
    attempt: int = 1,
    message_id: str | None = None,
    headers: Mapping[str, Any] | None = None,
    **properties: Any,
) -> Outcome:
    """Handle one message as a worker would, and return what would become of it.

    The body is encoded and decoded on the way, as if it had been published; `bytes` are taken as
    they are, so that a malformed body can be tried. The outcome is `Done()`, `RetryAfter` with the
    delay and the error, or `Parked` with the reason and the error; nothing is raised for a handler
    that fails.

        outcome = await perform(ResizeImage(store), ImageUploaded(path="a.jpg"))
        assert outcome == Done()
    """
    if isinstance(body, bytes):
        raw, values = body, properties
    else:
        raw, content_type = consumers.encode(type(consumer), body)
        values = {"content_type": content_type, **properties}
    failed = {RETRY_COUNT: attempt - 1} if attempt > 1 else {}
    given = Properties.of(
        {**(headers or {}), **failed},
        message_id=message_id or uuid.uuid4().hex,
        **{"timestamp": datetime.now(UTC), "delivery_mode": 2, **values},
    )
    children = Children(consumer) if consumer.isolation == "process" else None
    handling = Handling(consumer, children=children)
    try:
        return await handling.attempt(Delivery(raw, given), Run())
    finally:
        handling.close()
