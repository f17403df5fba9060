"""What a conveyor says of messages whose channel goes before their confirm."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import aiormq.exceptions as amqp
import pytest

from rabbit_tasks.confirms import Confirms
from rabbit_tasks.parking.conveyor import Conveyor
from rabbit_tasks.properties import Properties


class Line:
    """A connection that takes everything and answers nothing."""

    frame_max = 131_072
    is_blocked = False
    free_since = 0.0

    def write(self, frames: bytes) -> None: ...

    def tap(self, channel: object, tap: object) -> None: ...

    async def drained(self) -> None: ...


class Channel:
    number = 1

    def __init__(self) -> None:
        self.closing: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def is_closed(self) -> bool:
        return self.closing.done()


@pytest.mark.parametrize(
    "cause",
    [amqp.ConnectionClosed(320, "gone"), amqp.ChannelPreconditionFailed("over another")],
)
async def test_what_was_not_confirmed_when_the_channel_went_is_never_called_stored(
    cause: Exception,
) -> None:
    line, channel = cast(Any, Line()), cast(Any, Channel())
    confirms = Confirms(line, channel, 30.0, patient=True)
    channel.closing.add_done_callback(confirms._closed)  # noqa: SLF001
    conveyor = Conveyor(line, confirms, 30.0, lambda *_: None)
    await conveyor.publish("", "lot", Properties.of(delivery_mode=2), b"copy")
    asyncio.get_running_loop().call_soon(channel.closing.set_exception, cause)
    with pytest.raises(amqp.ChannelInvalidStateError):
        await conveyor.stored()
