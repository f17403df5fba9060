"""What the broker does to long handlers is told, by version, and only where it does something."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rabbit_tasks import Consumer, Message
from rabbit_tasks.timeouts import warning_of

MINUTE = timedelta(minutes=1)
EVERY = ("3.10.8", "3.11.28", "3.12.0", "3.13.7", "4.0.5", "4.2.0-rc.1", "4.3.6", "5.0.0", "?")


def consumer(
    timeout: timedelta | None = None, ack_timeout: timedelta | None = None
) -> type[Consumer[bytes]]:
    class Made(Consumer[bytes]):
        queue = "films"

        async def handle(self, body: bytes, message: Message) -> None: ...

    Made.timeout, Made.ack_timeout = timeout, ack_timeout
    return Made


@pytest.mark.parametrize("version", EVERY)
@pytest.mark.parametrize(
    ("timeout", "ack_timeout"),
    [
        (None, None),
        (30 * MINUTE - timedelta(milliseconds=1), None),
        (MINUTE, 29 * MINUTE),
    ],
)
def test_nothing_is_said_where_the_broker_waits_long_enough(
    version: str, timeout: timedelta | None, ack_timeout: timedelta | None
) -> None:
    assert warning_of(version, consumer(timeout, ack_timeout)) is None


@pytest.mark.parametrize("version", [v for v in EVERY if not v.startswith(("3.10", "3.11"))])
@pytest.mark.parametrize("timeout", [None, 59 * MINUTE])
def test_from_3_12_on_an_ack_timeout_is_enough(version: str, timeout: timedelta | None) -> None:
    assert warning_of(version, consumer(timeout, 60 * MINUTE)) is None


@pytest.mark.parametrize(
    ("version", "how"),
    [("3.12.0", "closes the channel"), ("3.13.7", "closes the channel"),
     ("4.0.5", "closes the channel"), ("4.2.0-rc.1", "closes the channel"),
     ("4.3.6", "cancels the consumer"), ("5.0.0", "cancels the consumer"),
     ("?", "cancels the consumer")],
)  # fmt: skip
def test_a_limit_beyond_the_default_asks_for_an_ack_timeout(version: str, how: str) -> None:
    text = warning_of(version, consumer(45 * MINUTE))
    assert text is not None
    assert text.startswith(f"films: its handler may take 45m (timeout), but RabbitMQ {version}, ")
    assert f", {how} after 30m without an ack and delivers the message again; " in text
    assert "write ack_timeout = timedelta(minutes=50); " in text
    assert "(consumer-timeout: 3000000)" in text


@pytest.mark.parametrize("version", ["3.10.8", "3.11.28"])
@pytest.mark.parametrize(
    ("timeout", "ack_timeout", "takes", "line"),
    [
        (30 * MINUTE, None, "30m (timeout)", "consumer_timeout = 2100000"),
        (45 * MINUTE, None, "45m (timeout)", "consumer_timeout = 3000000"),
        (45 * MINUTE, 60 * MINUTE, "1h (ack_timeout)", "consumer_timeout = 3600000"),
        (MINUTE, 60 * MINUTE, "1h (ack_timeout)", "consumer_timeout = 3600000"),
        (None, 60 * MINUTE, "1h (ack_timeout)", "consumer_timeout = 3600000"),
    ],
)
def test_before_3_12_the_line_for_the_brokers_configuration_is_given(
    version: str, timeout: timedelta | None, ack_timeout: timedelta | None, takes: str, line: str
) -> None:
    text = warning_of(version, consumer(timeout, ack_timeout))
    assert text is not None
    assert f"may take {takes}, but RabbitMQ {version}" in text
    assert "closes the channel after 30m" in text
    assert f"write {line} into rabbitmq.conf" in text
    assert "write ack_timeout" not in text
