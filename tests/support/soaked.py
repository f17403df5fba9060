"""The obedient app in a worker that counts what it has whenever it is asked.

SOAKED names a folder: for each file ask-N there, from 1, it writes answer-N.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rabbit_tasks import App, intake, worker
from tests.support.obedient import Obey, ObeyInProcess, ObeyInThread

_COUNTED = (
    "aiormq.channel.Channel",
    "aiormq.connection.Connection",
    "rabbit_tasks.broker.Connection",
)


# Soon enough for a test that counts channels.
for module in (intake, worker):
    setattr(module, "CALM", 1.0)  # noqa: B010 (a constant)


def _numbers() -> dict[str, Any]:
    gc.collect()
    me = Path("/proc/self")
    return {
        "memory": int((me / "statm").read_text().split()[1]) * resource.getpagesize(),
        "files": len(os.listdir(me / "fd")),
        "children": sum(
            len((thread / "children").read_text().split()) for thread in (me / "task").iterdir()
        ),
        "threads": Counter(
            # (A pool's thread has a number, and there may be more or less of them for a while.)
            "pool" if thread.name[-1].isdecimal() else thread.name
            for thread in threading.enumerate()
        ),
        "tasks": Counter(
            getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()
        ),
        "objects": Counter(
            name
            for one in gc.get_objects()
            if (name := f"{type(one).__module__}.{type(one).__qualname__}") in _COUNTED
        ),
    }


async def _answer(folder: Path) -> None:
    number = 1
    while True:
        if (folder / f"ask-{number}").exists():
            new = folder / "answer"
            new.write_text(json.dumps(_numbers()))
            new.rename(folder / f"answer-{number}")
            number += 1
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _tells() -> AsyncIterator[None]:
    task = asyncio.create_task(_answer(Path(os.environ["SOAKED"])))
    yield
    task.cancel()


app = App("soaked", [Obey(), ObeyInThread(), ObeyInProcess()], lifespan=_tells)
