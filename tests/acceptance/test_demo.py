"""The demo: real work end to end, on a broker that others use too."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from rabbit_tasks import App, Publisher, Settings
from rabbit_tasks.broker import Connection
from rabbit_tasks.demo import FlakyDisk, ImageUploaded, ResizeImage, app, samples
from rabbit_tasks.demo.tour import DemoError, tour
from rabbit_tasks.parking import browse
from tests.conftest import eventually
from tests.support.queues import consumers, depth, take, take_all
from tests.support.workers import WorkerProcess, wait_until

QUEUE = ResizeImage.queue
BAD = ("truncated-photo.jpg", "zero-byte.png", "missing.jpg")
MISSING_PILLOW = "import sys; sys.modules['PIL'] = None; from rabbit_tasks.cli import main; main()"


class Demo:
    """`rabbit-tasks demo` in a process group of its own, as a shell starts it."""

    def __init__(self, url: str, folder: Path, *arguments: str) -> None:
        self._output = folder / "demo.log"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rabbit_tasks", "demo", *arguments],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "RABBIT_TASKS_URL": url, "TMPDIR": str(folder)},
                start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text()

    def worker_is_running(self) -> bool:
        """Whether anything of the process group is left but the demo itself."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@pytest.fixture
def start_demo(url: str, tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    started: list[Demo] = []

    def start(*arguments: str) -> Demo:
        started.append(Demo(url, tmp_path, *arguments))
        return started[-1]

    yield start
    for demo in started:
        if demo.worker_is_running():
            os.killpg(demo.process.pid, signal.SIGKILL)
        demo.process.wait(10)


def made_in(folder: Path) -> set[str]:
    """Names of the sample images that have their thumbnail, each of which is one."""
    made = [*folder.glob("rabbit-tasks-demo-*/thumbnails/*.png")]
    for path in made:
        with Image.open(path) as thumbnail:
            assert max(thumbnail.size) <= 320
            thumbnail.verify()
    return {path.name.removesuffix(".png") for path in made}


async def parked(connection: Connection) -> list[str]:
    """Names of the files whose messages are parked, in order."""
    bodies = [one.body async for one in browse(connection, QUEUE)]
    return [ImageUploaded.model_validate_json(body).path.name for body in bodies]


async def elsewhere(connection: Connection) -> int:
    """Messages that wait anywhere but in the parking lot."""
    queues = [queue.name for queue in app.topology.queues if queue.role != "parked"]
    return sum([await depth(connection, queue) for queue in queues])


async def test_the_demo_does_retries_parks_repairs_and_replays(
    start_demo: Callable[..., Demo], connection: Connection, tmp_path: Path
) -> None:
    demo = start_demo()
    assert demo.process.wait(60) == 0, demo.output
    flaky = [name for name in samples.IMAGES if FlakyDisk().is_flaky_at(Path(name))]
    assert len(flaky) >= 2
    for name in flaky:
        assert f"{name:<20} → retry" in demo.output
    assert "9 thumbnails in " in demo.output
    assert made_in(tmp_path) == {*samples.IMAGES, "truncated-photo.jpg"}
    assert (
        "parked   truncated-photo.jpg: failed 3 attempts of 3: image file is trunc" in demo.output
    )
    assert sorted(await parked(connection)) == ["missing.jpg", "zero-byte.png"]
    assert await elsewhere(connection) == 0
    assert await consumers(connection, QUEUE) == 0
    assert not demo.worker_is_running()


async def test_the_demo_leaves_alone_what_is_parked_and_works_off_what_an_earlier_run_left_waiting(
    start_demo: Callable[..., Demo],
    connection: Connection,
    publisher: Publisher,
    declared: Callable[[App], Awaitable[None]],
    tmp_path: Path,
) -> None:
    await declared(app)
    await publisher.publish(f"{QUEUE}.parked", {"path": "of-an-earlier-run.jpg"})
    Image.new("RGB", (10, 10)).save(tmp_path / "waiting.png")
    waiting = ImageUploaded(path=tmp_path / "waiting.png")
    await publisher.publish(ResizeImage, waiting)
    demo = start_demo()
    assert demo.process.wait(60) == 0, demo.output
    first, *others = await parked(connection)
    assert first == "of-an-earlier-run.jpg"
    assert sorted(others) == ["missing.jpg", "zero-byte.png"]
    assert waiting.thumbnail.is_file()


async def test_a_folder_gets_thumbnails_beside_its_images_which_stay_as_they_are(
    start_demo: Callable[..., Demo], connection: Connection, tmp_path: Path
) -> None:
    folder = tmp_path / "my photos"
    folder.mkdir()
    for name in ("harbour.jpg", "portrait [1].PNG", "ünïcode.webp"):
        Image.linear_gradient("L").resize((900, 600)).save(folder / name)
    (folder / "broken.png").write_bytes(b"no image at all")
    (folder / "notes.txt").write_text("not mine to touch")
    before = fingerprints(folder)
    demo = start_demo(str(folder))
    assert demo.process.wait(60) == 0, demo.output
    assert {
        path: digest for path, digest in fingerprints(folder).items() if path in before
    } == before
    thumbnails = folder / "thumbnails"
    assert f"3 thumbnails in {thumbnails}" in demo.output
    assert sorted(path.name for path in thumbnails.iterdir()) == [
        "harbour.jpg.png", "portrait [1].PNG.png", "ünïcode.webp.png",
    ]  # fmt: skip
    assert await parked(connection) == ["broken.png"]


async def test_a_message_that_vanishes_is_missed(
    settings: Settings,
    connection: Connection,
    declared: Callable[[App], Awaitable[None]],
    tmp_path: Path,
) -> None:
    await declared(app)
    for name in ("harbour.jpg", "portrait.jpg", "poster.png"):
        Image.new("RGB", (10, 10)).save(tmp_path / name)
    walk = asyncio.create_task(tour(settings, tmp_path, Console(quiet=True), patience=3))
    await eventually(lambda: depth(connection, QUEUE))
    stolen = await take(connection, QUEUE)
    assert stolen is not None
    name = ImageUploaded.model_validate_json(stolen.body).path.name
    with pytest.raises(DemoError, match=f"unaccounted for.*: {name} "):
        await walk


async def test_a_worker_that_dies_ends_the_demo_with_its_exit_code(
    start_demo: Callable[..., Demo],
) -> None:
    demo = start_demo()
    wait_until(lambda: "→ done" in demo.output)
    (pid,) = re.findall(r"`rabbit-tasks work`, process (\d+)", demo.output)
    os.kill(int(pid), signal.SIGKILL)
    assert demo.process.wait(60) == 1
    assert "error: the worker ended with exit code -9" in demo.output


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
async def test_an_interrupted_demo_takes_its_worker_with_it_and_loses_nothing(
    start_demo: Callable[..., Demo], connection: Connection, tmp_path: Path, how: str
) -> None:
    demo = start_demo()
    wait_until(lambda: "→ retry" in demo.output)
    if how == "Ctrl-C":  # goes to the whole group
        os.killpg(demo.process.pid, signal.SIGINT)
        assert demo.process.wait(60) == 130
    else:
        demo.process.terminate()
        assert demo.process.wait(60) == 143
    assert "Traceback" not in demo.output
    assert not demo.worker_is_running()
    await eventually(lambda: consumers_gone(connection))
    bodies = [
        found.body
        for queue in app.topology.queues
        for found in await take_all(connection, queue.name)
    ]
    still_there = {ImageUploaded.model_validate_json(body).path.name for body in bodies}
    assert made_in(tmp_path) | still_there == {*samples.IMAGES, *BAD}


async def test_the_demo_does_not_share_its_queue_with_somebody_elses_worker(
    start_demo: Callable[..., Demo], start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker("--declare", app="rabbit_tasks.demo:app").ready()
    demo = start_demo()
    assert demo.process.wait(60) == 1
    assert "other workers take from images.resize" in demo.output
    assert "RABBIT_TASKS_VHOST" in demo.output


def test_a_folder_without_images_is_said_so(
    start_demo: Callable[..., Demo], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    demo = start_demo("empty")
    assert demo.process.wait(60) == 1
    assert demo.output == f"error: there are no images in {tmp_path / 'empty'}\n"


def test_without_pillow_one_line_says_how_to_get_it() -> None:
    for command in (["demo"], ["--app", "rabbit_tasks.demo:app", "work"]):
        done = subprocess.run(
            [sys.executable, "-c", MISSING_PILLOW, *command], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            "error: the demo needs Pillow to make thumbnails: pip install 'rabbit-tasks[demo]'"
        ]


def fingerprints(folder: Path) -> dict[Path, tuple[str, int]]:
    """Content and time of change of every file."""
    return {
        path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


async def consumers_gone(connection: Connection) -> bool:
    return await consumers(connection, QUEUE) == 0
