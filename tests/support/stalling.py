"""Apps that do not end when they should."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rabbit_tasks import App, Consumer, Message
from tests.support.obedient import record
from tests.support.unruly import ONCE_MORE


class InThread(Consumer[bytes]):
    """Waits in a thread that asyncio itself waits for when it ends."""

    queue = "stalling.thread"
    retry = ONCE_MORE

    async def handle(self, body: bytes, message: Message) -> None:
        record("start", message)
        await asyncio.to_thread(threading.Event().wait, 600)


@asynccontextmanager
async def _endless() -> AsyncIterator[None]:
    yield
    print("lifespan: closing", flush=True)  # noqa: T201 (the tests wait for it)
    await asyncio.sleep(600)


@asynccontextmanager
async def _deaf() -> AsyncIterator[None]:
    yield
    print("lifespan: closing", flush=True)  # noqa: T201
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            print("lifespan: no", flush=True)  # noqa: T201


app = App("stalling", [InThread()])
endless = App("endless", [InThread()], lifespan=_endless)
deaf = App("deaf", [InThread()], lifespan=_deaf)
