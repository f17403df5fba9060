"""What the broker delivers on one channel, and the acks: as the frames they are.

The client library makes a task and a dozen objects of a delivery. Here its three frames are read as
they arrive; an ack is 21 bytes, written together with the others of its turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import aiormq.exceptions as amqp
from aiormq.channel import Channel

from rabbit_tasks.broker import Connection
from rabbit_tasks.frames import ACK, BODY, CANCEL, CHANNEL_CLOSE, DELIVER, HEADER, METHOD, REJECT

OnDelivery = Callable[[int, bool, bytes, bytes], None]
"""Called with a delivery's tag, whether it is a redelivery, its property list and its body."""


class Deliveries:
    """The deliveries of a channel that consumes.

    on_delivery     called while the stream is read, for one after another: it must not raise
    together        acks of one turn of the event loop are one, as far as there is none in between that
                    is not acked
    consumer        the tag of the consumer that the last one is for
    """

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        on_delivery: OnDelivery,
        *,
        together: bool = False,
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._on_delivery = on_delivery
        self._head = bytes([METHOD]) + channel.number.to_bytes(2, "big") + (13).to_bytes(4, "big")
        self.consumer = b""
        self._is_delivery = False
        self._tag = 0
        self._redelivered = False
        self._properties = b""
        self._left = 0
        self._parts: list[bytes] = []
        self._open: dict[int, None] | None = {} if together else None
        """Tags of what is not answered, in their order; where that matters."""
        self._acked: set[int] = set()
        self._is_over = False
        self._kept: list[tuple[bytes, int]] | None = None
        self.unanswered = 0
        """Deliveries that the broker waits for an answer to."""
        connection.tap(channel, self.frame)

    def frame(self, kind: int, payload: bytes) -> bool:
        """A frame of the channel; whether it was of a delivery."""
        if kind == METHOD:
            self._is_delivery = payload[:4] == DELIVER
            if self._is_delivery:
                at = 5 + payload[4]
                self.consumer = payload[5:at]
                self._tag = int.from_bytes(payload[at : at + 8], "big")
                self._redelivered = payload[at + 8] & 1 == 1
            elif payload[:4] in (CHANNEL_CLOSE, CANCEL):
                # (An ack behind a cancel would make 4.3.0 to 4.3.6 deliver to nobody.)
                self._is_over = True
            return self._is_delivery
        if not self._is_delivery:  # the message of a return, or of a get
            return False
        if kind == HEADER:
            self._left = int.from_bytes(payload[4:12], "big")
            self._properties = payload[12:-1]
        elif kind == BODY:
            self._parts.append(payload[:-1])
            self._left -= len(payload) - 1
        if self._left == 0:
            parts, self._parts = self._parts, []
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            if self._open is not None:
                self._open[self._tag] = None
            self.unanswered += 1
            self._on_delivery(self._tag, self._redelivered, self._properties, body)
        return True

    @property
    def is_open(self) -> bool:
        """Whether an answer still goes out."""
        return not self._is_over and self._connection.is_writable and not self._channel.is_closed

    def end(self) -> None:
        """The broker has them again: no answer is to go out any more."""
        self._is_over = True

    def keep(self) -> None:
        """Write no answers for now: so that nothing more is delivered, once enough is here."""
        self._kept = []

    def go_on(self) -> None:
        """Write what was kept, and what comes."""
        kept, self._kept = self._kept or [], None
        if self.is_open:
            for method, tag in kept:
                self._answer(method, tag)
            self._ack_together()

    def ack(self, tag: int) -> None:
        """The broker forgets it. What aiormq raises, where the channel is closed."""
        if self._open is None:
            self._answer(ACK, tag)
            return
        self._check()
        self._acked.add(tag)
        if len(self._open) == 1:  # nothing else is there that could go along
            self._ack_together()
        elif len(self._acked) == 1:
            asyncio.get_running_loop().call_soon(self._ack_together)

    def _ack_together(self) -> None:
        if self._open is None or self._kept is not None or not self._acked:
            return
        acked, self._acked = self._acked, set()
        self.unanswered -= len(acked)
        up_to = 0
        for tag in self._open:
            if tag not in acked:
                break
            up_to = tag
        for tag in acked:
            self._open.pop(tag, None)
        if self.is_open:
            self.ack_all(sorted(tag for tag in acked if tag > up_to), up_to=up_to)
            self._connection.flush()

    def ack_all(self, tags: Iterable[int], *, up_to: int = 0) -> None:
        """The same of many, and of every delivery up to one, in one write."""
        self._check()
        head = self._head + ACK
        frames = [head + tag.to_bytes(8, "big") + b"\0\xce" for tag in tags]
        if up_to:
            frames.append(head + up_to.to_bytes(8, "big") + b"\1\xce")
        self._connection.write(b"".join(frames))

    def reject(self, tag: int) -> None:
        """The broker dead-letters it. Raises as `ack` does."""
        self._answer(REJECT, tag)
        if self._open is not None:
            self._open.pop(tag, None)

    def _check(self) -> None:
        if not self.is_open:
            raise amqp.ChannelInvalidStateError("the channel was closed")

    def _answer(self, method: bytes, tag: int) -> None:
        self._check()
        if self._kept is not None:
            self._kept.append((method, tag))
            return
        self.unanswered -= 1
        # (The bit behind the tag: not several; not back into the queue.)
        self._connection.write(self._head + method + tag.to_bytes(8, "big") + b"\0\xce")


async def unread(_: object) -> None:
    """What the library is told to call with deliveries, of which it sees none."""
