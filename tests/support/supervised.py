"""An app for supervisors: it says who imports it, can fail to begin, and leaves processes behind.

SUPERVISED_FAILS names a file. While it is there, the lifespan raises, or where it says `kill`, kills
its process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rabbit_tasks import App, Consumer, Message
from tests.support.obedient import record
from tests.support.unruly import ONCE_MORE

print(f"imported in {os.getpid()}", flush=True)  # noqa: T201 (what is tested)


class Leaves(Consumer[str]):
    """Starts a process that starts another and ends before it."""

    queue = "supervised.leaves"
    retry = ONCE_MORE

    async def handle(self, body: str, message: Message) -> None:
        child = await asyncio.create_subprocess_shell(f"{body} >/dev/null 2>&1 &")
        await child.wait()
        record("end", message)


@asynccontextmanager
async def _fails() -> AsyncIterator[None]:
    file = Path(os.environ.get("SUPERVISED_FAILS", "/nowhere"))
    if file.exists():  # noqa: ASYNC240 (a test's own file)
        if file.read_text() == "kill":  # noqa: ASYNC240
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the database is away")
    yield


app = App("supervised", [Leaves()], lifespan=_fails)
