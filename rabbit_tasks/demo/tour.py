"""The demo from end to end: declare, publish, work; look at what is parked, repair it, replay it.

The worker's log lines tell what happens. What counts in the end are the files on the disk and the
messages on the broker: each message is done or parked, or the tour fails.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from rabbit_tasks import parking
from rabbit_tasks.broker import Connection, connected
from rabbit_tasks.declare import declare
from rabbit_tasks.demo import ImageUploaded, ResizeImage, app, need_pillow, samples
from rabbit_tasks.demo.display import Display, Journey
from rabbit_tasks.demo.worker import WorkerProcess
from rabbit_tasks.errors import RabbitTasksError
from rabbit_tasks.parking import ParkedMessage
from rabbit_tasks.publisher import Publisher
from rabbit_tasks.settings import Settings
from rabbit_tasks.text import one_line

QUEUE: Final = ResizeImage.queue
PATIENCE: Final = 30.0
"""Seconds without a log line of the worker before the tour looks for what is missing."""


class DemoError(RabbitTasksError):
    """The demo cannot begin, or a message is unaccounted for."""


class Tour:
    """One walk through the main job, with what it needs in hand."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        publisher: Publisher,
        console: Console,
        patience: float,
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._publisher = publisher
        self._console = console
        self._patience = patience
        self._uploads: dict[str, ImageUploaded] = {}
        self._journeys: dict[str, Journey] = {}

    # --- the walk -------------------------------------------------------------------------------

    async def walk(self, paths: list[Path], made: samples.Samples | None) -> None:
        """Every path to its end; and with samples, the truncated one from the parking lot to done."""
        await self._declare()
        await self._publish(paths)
        async with WorkerProcess.running(self._settings, "rabbit_tasks.demo:app") as worker:
            self._say("work", f"by `rabbit-tasks work`, process {worker.pid}")
            await self._follow(worker)
            parked = await self._account()
            self._tell_results(parked)
            if made is not None:
                await self._mend(worker, made, parked)
                parked = await self._account()
            if code := await worker.end():
                raise DemoError(f"the worker was told to stop and ended with exit code {code}")
        self._tell_leftovers(parked)

    async def _declare(self) -> None:
        created = await declare(self._connection, app.topology)
        self._say("declare", f"{len(created)} queues and exchanges created" if created else
                  "all queues are there")  # fmt: skip
        waiting, consumers, _ = await self._depths()
        if consumers:
            raise DemoError(
                f"other workers take from {QUEUE}, and would take the demo's messages; "
                "stop them, or give the demo a virtual host of its own (RABBIT_TASKS_VHOST)"
            )
        if waiting:
            self._say(
                "", f"{waiting} messages of an earlier run wait there, and are worked off too"
            )

    async def _publish(self, paths: list[Path]) -> None:
        uploads = [ImageUploaded(path=path) for path in paths]
        ids = await self._publisher.publish_many(ResizeImage, uploads)
        self._uploads = dict(zip(ids, uploads, strict=True))
        self._journeys = {i: Journey(upload.path.name) for i, upload in self._uploads.items()}
        self._say("publish", f"{len(ids)} messages to {QUEUE}, each confirmed by the broker")

    async def _follow(self, worker: WorkerProcess) -> None:
        """Show what moves, until each message is done or parked, or nothing moves any more."""
        with Display(self._console, self._journeys) as display:
            watching = asyncio.create_task(self._watch(display))
            try:
                while not all(journey.has_ended for journey in self._journeys.values()):
                    async with asyncio.timeout(self._patience):
                        _show(display, await worker.next_event())
            except TimeoutError:
                pass  # the account will tell
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    async def _account(self) -> dict[str, ParkedMessage]:
        """The parked of our messages. DemoError where one is neither parked nor has its thumbnail."""
        deadline = asyncio.get_running_loop().time() + 5
        while True:
            found = [one async for one in parking.browse(self._connection, QUEUE)]
            parked = {one.id: one for one in found if one.id in self._journeys}
            missing = [i for i in self._journeys if i not in parked and not self._is_done(i)]
            if not missing:
                return parked
            if asyncio.get_running_loop().time() > deadline:  # (a worker parks after it says so)
                names = ", ".join(f"{self._journeys[i].name} ({i})" for i in missing)
                raise DemoError(f"unaccounted for, neither done nor parked: {names}")

    async def _mend(
        self, worker: WorkerProcess, made: samples.Samples, parked: dict[str, ParkedMessage]
    ) -> None:
        """What an operator does when the bug is fixed."""
        broken = next(i for i, one in self._uploads.items() if one.path == made.truncated)
        if broken not in parked:
            raise DemoError(f"{made.truncated.name} should be parked, but is done")
        made.repair()
        self._say("repair", f"{made.truncated.name} is whole now; its message is replayed")
        self._journeys[broken].place = "main"
        await parking.replay(
            self._connection, self._publisher, QUEUE, lambda message: message.id == broken
        )
        await self._follow(worker)
        if not self._is_done(broken):
            raise DemoError(f"{made.truncated.name} was repaired and replayed, but is not done")

    # --- what it sees ---------------------------------------------------------------------------

    def _is_done(self, message_id: str) -> bool:
        """Whether the worker said so and the thumbnail is there, an image."""
        from PIL import Image

        thumbnail = self._uploads[message_id].thumbnail
        if self._journeys[message_id].place != "done" or not thumbnail.is_file():
            return False
        with Image.open(thumbnail) as image:
            image.verify()
        return True

    async def _watch(self, display: Display) -> None:
        while display.is_live:
            waiting, _, elsewhere = await self._depths()
            display.on_broker = f"waiting on the broker: {waiting} in {QUEUE}{elsewhere}"
            await asyncio.sleep(0.25)

    async def _depths(self) -> tuple[int, int, str]:
        """Messages and consumers of the main queue; what the others hold, in words."""
        channel = await self._connection.open()
        waiting, consumers, counts = 0, 0, Counter[str]()
        for queue in app.topology.queues:
            answer = await channel.queue_declare(queue.name, passive=True)
            if queue.role == "main":
                waiting, consumers = answer.message_count or 0, answer.consumer_count or 0
            else:
                counts[queue.role] += answer.message_count or 0
        await channel.close()
        return (
            waiting,
            consumers,
            f", {counts['retry']} in its retry queues, {counts['parked']} parked",
        )

    # --- what it tells --------------------------------------------------------------------------

    def _say(self, what: str, text: str) -> None:
        self._console.print(Text(f"{what:<9}", "bold"), Text(text), sep="", soft_wrap=True)

    def _tell_results(self, parked: dict[str, ParkedMessage]) -> None:
        done = [upload for i, upload in self._uploads.items() if i not in parked]
        if done:
            self._say("done", f"{len(done)} thumbnails in {done[0].thumbnail.parent}")
        for i, message in parked.items():
            error = "" if message.has_error("Park") else f": {message.error_message}"
            self._say("parked", f"{self._journeys[i].name}: {one_line(message.reason + error)}")

    def _tell_leftovers(self, parked: dict[str, ParkedMessage]) -> None:
        if parked:
            self._say("left", f"{len(parked)} messages stay parked until a person decides:")
            self._say("", f"rabbit-tasks parked list {QUEUE}")
            for i in parked:
                self._say("", f"rabbit-tasks parked discard {QUEUE} --id {i}")
        self._say("", f"all {len(self._journeys)} messages are accounted for")


def _show(display: Display, event: dict[str, Any]) -> None:
    """A log line of the worker as a move."""
    match event:
        case {"id": message_id, "delay": delay, "attempt": attempt, "error": error}:
            display.move(message_id, "retry", f"attempt {attempt}: {error}; again in {delay}")
        case {"id": message_id, "reason": reason}:
            display.move(message_id, "parked", reason)
        case {"id": message_id, "seconds": seconds}:
            display.move(message_id, "done", f"in {seconds * 1000:.0f} ms")


async def tour(
    settings: Settings, folder: Path | None, console: Console, *, patience: float = PATIENCE
) -> None:
    """Make thumbnails of the images in the folder; without one, of samples.

    DemoError where it cannot begin, and where in the end a message is neither done nor parked.
    """
    need_pillow()
    async with (
        connected(settings, "demo") as connection,
        Publisher.open(settings) as publisher,
    ):
        walk = Tour(settings, connection, publisher, console, patience).walk
        if folder is None:
            made = samples.make(Path(tempfile.mkdtemp(prefix="rabbit-tasks-demo-")))
            await walk(made.paths, made)
        elif paths := samples.images_in(folder):
            await walk(paths, None)
        else:
            raise DemoError(f"there are no images in {folder}")
