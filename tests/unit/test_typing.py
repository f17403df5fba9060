"""What mypy --strict makes of consumers and publishers: the body type is inferred everywhere."""

from __future__ import annotations

from pathlib import Path

import mypy.api
import pytest

PREAMBLE = """
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from rabbit_tasks import App, Consumer, Message, Park, Publisher, RetryPolicy, Settings
from rabbit_tasks.testing import perform


class ImageUploaded(BaseModel):
    path: str
    width: int = 320


class Store:
    def write(self, path: str) -> None: ...


class ResizeImage(Consumer[ImageUploaded]):
    queue = "images.resize"
    retry = RetryPolicy(attempts=5, base=timedelta(seconds=1), park_on=(FileNotFoundError,))
    concurrency = 4
    timeout = timedelta(seconds=30)
    isolation = "process"

    def __init__(self, store: Store) -> None:
        self.store = store

    def handle(self, upload: ImageUploaded, message: Message) -> None:
        if not upload.path:
            raise Park("an image without a path")
        self.store.write(upload.path)


@asynccontextmanager
async def lifespan() -> AsyncIterator[None]:
    yield


app = App("demo", consumers=[ResizeImage(Store())], lifespan=lifespan)
"""

ACCEPTED = """
class Plain(Consumer[dict[str, Any]]):
    queue = "plain"

    async def handle(self, body: dict[str, Any], message: Message) -> None: ...


class Raw(Consumer[bytes]):
    queue = "raw"

    def handle(self, body: bytes, message: Message, /) -> None: ...


@dataclass
class Point:
    x: int


class Points(Consumer[list[Point]]):
    queue = "points"

    async def handle(self, points: list[Point], message: Message) -> None: ...


both = App("both", [Plain(), Raw(), Points()])


async def send(publisher: Publisher) -> None:
    first: str = await publisher.publish(ResizeImage, ImageUploaded(path="a"), message_id="m")
    ids: list[str] = await publisher.publish_many(ResizeImage, [ImageUploaded(path="a")])
    await publisher.publish(ResizeImage(Store()), ImageUploaded(path="a"), headers={"a": 1})
    await publisher.publish(Plain, {"a": 1})
    await publisher.publish(Raw, b"a")
    await publisher.publish(Points, [Point(1)])
    await publisher.publish("by.name", {"any": "thing"}, priority=3)


async def main() -> None:
    async with Publisher.open(Settings(url="amqp://localhost", grace="5s")) as publisher:
        await send(publisher)
    print(await perform(ResizeImage(Store()), ImageUploaded(path="a"), attempt=2))
    print(await perform(ResizeImage(Store()), b"malformed"))
    print(Settings(tls_ca="ca.pem", password="p", heartbeat=5).changed(url=None, grace=1.5))


asyncio.run(main())
"""

REFUSED = {
    "publish another type": (
        "async def f(p: Publisher) -> None:\n    await p.publish(ResizeImage, {'path': 'a'})\n",
        "publish",
    ),
    "publish many of another type": (
        (
            "async def f(p: Publisher) -> None:\n"
            "    await p.publish_many(ResizeImage, [{'path': 'a'}])\n"
        ),
        "publish_many",
    ),
    "perform another type": (
        "async def f() -> None:\n    await perform(ResizeImage(Store()), {'path': 'a'})\n",
        "perform",
    ),
    "an async handler of another type": (
        (
            "class X(Consumer[ImageUploaded]):\n    queue = 'x'\n\n"
            "    async def handle(self, body: dict[str, Any], message: Message) -> None: ...\n"
        ),
        "handle",
    ),
    "a plain handler of another type": (
        (
            "class X(Consumer[ImageUploaded]):\n    queue = 'x'\n\n"
            "    def handle(self, body: str, message: Message) -> None: ...\n"
        ),
        "handle",
    ),
    "a handler that returns something": (
        (
            "class X(Consumer[str]):\n    queue = 'x'\n\n"
            "    def handle(self, body: str, message: Message) -> int:\n        return 1\n"
        ),
        "handle",
    ),
    "a consumer without the type of its bodies": (
        (
            "class X(Consumer):\n    queue = 'x'\n\n"
            "    def handle(self, body: str, message: Message) -> None: ...\n"
        ),
        "type-arg",
    ),
    "an app of classes": ("other = App('x', [ResizeImage])\n", "list-item"),
    "a retry that is a number": (
        (
            "class X(Consumer[str]):\n    queue = 'x'\n    retry = 5\n\n"
            "    def handle(self, body: str, message: Message) -> None: ...\n"
        ),
        "assignment",
    ),
    "a name that there is not": ("from rabbit_tasks import Nothing\n", "Nothing"),
    "a setting that there is not": ("Settings(urll='amqp://h')\n", "urll"),
    "a setting of another type": ("Settings(grace=[])\n", "grace"),
    "a change of a setting that there is not": ("Settings().changed(urll='amqp://h')\n", "urll"),
    "an isolation that there is not": (
        (
            "class X(Consumer[str]):\n    queue = 'x'\n    isolation = 'thread'\n\n"
            "    def handle(self, body: str, message: Message) -> None: ...\n"
        ),
        "assignment",
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each snippet, all in one run."""
    folder = tmp_path_factory.mktemp("typed")
    snippets = {"accepted": ACCEPTED, **{name: code for name, (code, _) in REFUSED.items()}}
    files = {f"snippet_{i}.py": name for i, name in enumerate(snippets)}
    for file, name in files.items():
        (folder / file).write_text(PREAMBLE + "\n\n" + snippets[name])
    out, err, _ = mypy.api.run(
        ["--strict", "--config-file=", "--no-error-summary", "--hide-error-context",
         "--follow-imports=silent", f"--cache-dir={cache()}", *(str(folder / file) for file in files)]
    )  # fmt: skip
    assert not err
    lines: dict[str, list[str]] = {name: [] for name in snippets}
    for line in out.splitlines():
        place, _, text = line.partition(":")
        lines[files[Path(place).name]].append(text)
    return lines


def cache() -> Path:
    """Kept between runs: the libraries are read once."""
    return Path(__file__).parents[2] / ".mypy_cache" / "snippets"


def test_consumers_and_publishers_as_the_readme_has_them_pass_strict(
    found: dict[str, list[str]],
) -> None:
    assert found["accepted"] == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_wrong_type_is_an_error_of_mypy(found: dict[str, list[str]], name: str) -> None:
    errors = [line for line in found[name] if " error: " in line]
    assert len(errors) == 1, found[name]
    assert any(REFUSED[name][1] in line for line in errors)
