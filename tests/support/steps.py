"""The steps of a process between its broker and itself, frame by frame; and to die at one of them.

From a delivery on, each frame that it writes is three steps: before, half of it written, after; each
that it reads is one, before anybody in the process knows of it. They are written down as they are taken.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pamqp.commands
from pamqp.base import Frame

from rabbit_tasks import frames

_NAMES: Final = {
    kind.index: kind.name
    for space in vars(pamqp.commands).values() if isinstance(space, type)
    for kind in vars(space).values()
    if isinstance(kind, type) and issubclass(kind, Frame) and kind.index
}  # fmt: skip


_NOTES: Final = b".replaying"


class Steps:
    """Count from the nth delivery on, die at a step (0: at none), and stop after so many acks."""

    def __init__(self, path: Path, *, begin: int, die_at: int, acks: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._begin = begin
        self._die_at = die_at
        self.acks_left = acks
        self._count = 0
        self._lines: list[object] = []
        self._aside: set[tuple[object, int]] = set()
        """Channels for a replay's notes to the next one."""
        self._write = asyncio.StreamWriter.write
        self.consuming: asyncio.StreamWriter | None = None
        """The line of the last consumer."""

    def watch(self) -> None:
        """Be in front of every line of this process."""
        steps = self
        cut = frames._Cutter.data_received  # noqa: SLF001 (there is no other place where frames pass)
        rests: dict[frames._Cutter, bytes] = {}

        def write(writer: asyncio.StreamWriter, data: Any) -> None:
            steps.written(writer, data)

        def received(cutter: frames._Cutter, data: bytes) -> None:
            """Frame by frame, as if each had come alone."""
            data, at = rests.pop(cutter, b"") + data, 0
            while len(data) - at >= 8:
                end = at + 8 + int.from_bytes(data[at + 3 : at + 7], "big")
                if end > len(data):
                    break
                for channel, name, _ in methods(data[at:end]):
                    steps.read(steps.line(cutter._reader, channel), name)  # noqa: SLF001
                cut(cutter, data[at:end])
                at = end
            rests[cutter] = data[at:]

        asyncio.StreamWriter.write = write  # type: ignore[method-assign,assignment]
        frames._Cutter.data_received = received  # type: ignore[method-assign,assignment]  # noqa: SLF001

    def line(self, reader: object, channel: int) -> str:
        """The number of a connection, and of its channel; with a mark where that is for notes."""
        if reader not in self._lines:
            self._lines.append(reader)
        mark = "~" if (reader, channel) in self._aside else ""
        return f"{self._lines.index(reader)}.{channel}{mark}"

    def written(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        reader = writer._reader  # type: ignore[attr-defined]  # noqa: SLF001 (which is its partner)
        for channel, name, arguments in methods(data):
            if name == "Channel.Open":
                self._aside.discard((reader, channel))
            elif name in ("Basic.Consume", "Basic.Publish") and _NOTES in arguments:
                self._aside.add((reader, channel))
        found = [(self.line(reader, channel), name) for channel, name, _ in methods(data)]
        for where, name in found:
            self._take(f"before {name} {where}")
        if found and self._take(f"half {found[0][1]} {found[0][0]}", dies=False):
            self._write(writer, data[: len(data) // 2])
            self._die()
        self._write(writer, data)
        for where, name in found:
            if name == "Basic.Consume":
                self.consuming = writer
            self._take(f"after {name} {where}")
            if name in ("Basic.Ack", "Basic.Reject") and self._count:
                self.acks_left -= 1
                if self.acks_left == 0:
                    os.kill(os.getpid(), signal.SIGTERM)

    def read(self, channel: str, name: str) -> None:
        if name == "Basic.Deliver":
            self._begin -= 1
        self._take(f"read {name} {channel}")

    def _take(self, what: str, *, dies: bool = True) -> bool:
        """Whether it is the last one."""
        if self._begin > 0:
            return False
        self._count += 1
        os.write(self._file, f"{what}\n".encode())
        if self._count == self._die_at and dies:
            self._die()
        return self._count == self._die_at

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def methods(raw: bytes) -> Iterator[tuple[int, str, bytes]]:
    """The method frames in these bytes, which are whole frames: channel, name, arguments."""
    at = 0
    while at + 7 <= len(raw) and raw[at] in (1, 2, 3, 8):
        size = int.from_bytes(raw[at + 3 : at + 7], "big")
        if raw[at] == 1:
            name = _NAMES[int.from_bytes(raw[at + 7 : at + 11], "big")]
            yield int.from_bytes(raw[at + 1 : at + 3], "big"), name, raw[at + 11 : at + 7 + size]
        at += size + 8


class Trace:
    """What a process wrote down of its steps."""

    def __init__(self, path: Path) -> None:
        self.steps = path.read_text().splitlines() if path.exists() else []

    def _count(self, pattern: str) -> int:
        return sum(re.match(pattern, step) is not None for step in self.steps)

    @property
    def last(self) -> str:
        return self.steps[-1] if self.steps else "nothing"

    def has(self, what: str) -> bool:
        return self._count(f"{what} ") > 0

    def copies(self) -> tuple[int, int]:
        """How many times, at least and at most, what was in hand is at the broker now.

        It was there once. What is confirmed is stored, what is written may be; what is acked may be
        gone, and is gone where the channel has answered since. (Notes are no copies.)
        """
        steps = [step.split() for step in self.steps if not step.endswith("~")]
        stored = sum(step[:2] == ["read", "Basic.Ack"] for step in steps)
        written = sum(step[:2] == ["after", "Basic.Publish"] for step in steps)
        acked = sum(step[:2] == ["after", "Basic.Ack"] for step in steps)
        gone, answered = 0, set[str]()
        for what, name, channel in reversed(steps):
            if what == "read" and name in ("Basic.Deliver", "Channel.CloseOk", "Basic.QosOk"):
                answered.add(channel)
            elif what == "after" and name == "Basic.Ack":
                gone += channel in answered
        return 1 + stored - acked, 1 + written - gone
