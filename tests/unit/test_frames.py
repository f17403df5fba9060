"""Frames, cut out of what the network brings in whatever pieces, and written without copies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from rabbit_tasks import frames as module
from rabbit_tasks.confirms import Confirms, Letter
from rabbit_tasks.frames import BODY, Frames
from rabbit_tasks.properties import Properties

TAPPED, LIBRARYS = 1, 2
HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"


def frame(channel: int, payload: bytes, kind: int = BODY) -> bytes:
    return (
        bytes([kind]) + channel.to_bytes(2, "big") + len(payload).to_bytes(4, "big")
        + payload + b"\xce"
    )  # fmt: skip


class Incoming:
    """What a connection makes of what it reads."""

    def __init__(self) -> None:
        frames, self.taken, self.now = Frames(), list[bytes](), 0.0
        self.reader = asyncio.StreamReader()
        self.cutter = module._Cutter(frames, self.reader, asyncio.get_running_loop())  # noqa: SLF001
        self.cutter._time = lambda: self.now  # noqa: SLF001
        transport: Any = SimpleNamespace(
            pause_reading=lambda: None, resume_reading=lambda: None, is_closing=lambda: False
        )
        self.cutter.transport = transport
        frames.taps[TAPPED.to_bytes(2, "big")] = self._take

    def _take(self, _: int, rest: bytes) -> bool:
        self.taken.append(rest)
        return True

    async def fed(self) -> bytes:
        """What the library was given."""
        self.reader.feed_eof()
        return await self.reader.read()


@given(
    st.lists(st.tuples(st.sampled_from([TAPPED, LIBRARYS]), st.integers(0, 40)), max_size=8),
    st.lists(st.tuples(st.integers(0, 60), st.booleans())),
)
def test_frames_are_the_same_in_whatever_pieces_they_come_and_whenever_they_are_held(
    sizes: list[tuple[int, int]], reads: list[tuple[int, bool]]
) -> None:
    async def read() -> None:
        frames = [(channel, bytes([size]) * size) for channel, size in sizes]
        stream = b"".join(frame(channel, payload) for channel, payload in frames)
        incoming, at = Incoming(), 0
        for size, held in [*reads, (len(stream), False)]:
            incoming.cutter.hold(held=held)
            await asyncio.sleep(0)
            before = len(incoming.taken)
            incoming.cutter.data_received(stream[at : at + size])
            assert not held or len(incoming.taken) == before
            at += size
        incoming.cutter.connection_lost(None)
        assert incoming.taken == [p + b"\xce" for channel, p in frames if channel == TAPPED]
        assert await incoming.fed() == b"".join(
            frame(channel, payload) for channel, payload in frames if channel == LIBRARYS
        )

    asyncio.run(read())


async def test_a_large_frame_that_comes_slowly_keeps_the_library_from_taking_the_broker_for_dead() -> (
    None
):
    incoming, large = Incoming(), frame(TAPPED, b"x" * 100)
    for second in range(10):
        incoming.now = second
        incoming.cutter.data_received(large[second * 10 : second * 10 + 10])
    assert incoming.taken == []
    assert await incoming.fed() == 4 * HEARTBEAT


async def test_a_large_message_is_written_in_its_order_and_never_copied_as_a_whole() -> None:
    body, received = b"x" * 20_000_000, bytearray()
    is_over = asyncio.Event()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**20):
            received.extend(data)
        writer.close()
        is_over.set()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    frames = Frames()
    _, writer = await frames.create(URL(f"amqp://127.0.0.1:{port}"), ssl_context_provider=None)
    write, written = writer.write, list[int]()

    def noted(data: bytes) -> None:
        written.append(len(data))
        write(data)

    writer.write = noted  # type: ignore[method-assign,assignment]
    channel: Any = SimpleNamespace(number=7)
    connection: Any = SimpleNamespace(frame_max=131_072, write=frames.write)
    confirms = Confirms(connection, channel, 60, patient=False)
    letter = Letter("", "q", Properties.of().encode(), None, body)
    frames.write(frame(5, b"before"))
    confirms.publish(letter, lambda _: None)
    frames.write(frame(5, b"behind"))
    await frames.drained()
    writer.close()
    await is_over.wait()
    server.close()
    assert max(written) < 300_000
    read, at = list[tuple[int, int, bytes]](), 0
    while at < len(received):
        end = at + 7 + int.from_bytes(received[at + 3 : at + 7], "big")
        read.append((received[at], received[at + 2], bytes(received[at + 7 : end])))
        assert received[end] == 0xCE
        at = end + 1
    assert read[0] == (BODY, 5, b"before")
    assert read[-1] == (BODY, 5, b"behind")
    assert {channel for _, channel, _ in read[1:-1]} == {7}
    assert b"".join(payload for kind, _, payload in read[1:-1] if kind == BODY) == body
