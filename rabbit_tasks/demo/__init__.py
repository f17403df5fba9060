"""A complete app: thumbnails of images. Importing it does nothing but define it.

    rabbit-tasks --app rabbit_tasks.demo:app topology declare
    rabbit-tasks --app rabbit_tasks.demo:app work
    rabbit-tasks publish images.resize '{"path": "/photos/cat.jpg"}'

`rabbit-tasks demo` does all of it, on images that it makes itself or on a folder of yours.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from rabbit_tasks import App, ConfigurationError, Consumer, Done, Message, Park, RetryPolicy
from rabbit_tasks.observer import Settled

log = logging.getLogger("rabbit_tasks.demo")


class ImageUploaded(BaseModel):
    """An image that is to have a thumbnail, in the folder `thumbnails` next to it."""

    path: Path
    width: Annotated[int, Field(gt=0, le=2000)] = 320

    @property
    def thumbnail(self) -> Path:
        return self.path.parent / "thumbnails" / f"{self.path.name}.png"


class FlakyDisk:
    """A disk that fails at the first attempt to read some files, as a busy network drive does.

    Which ones, their names decide: about every third.
    """

    def read(self, path: Path, attempt: int) -> bytes:
        if attempt == 1 and self.is_flaky_at(path):
            raise OSError(errno.EIO, "the disk did not answer", path.name)
        return path.read_bytes()

    def is_flaky_at(self, path: Path) -> bool:
        return zlib.crc32(path.name.encode()) % 3 == 0


class ResizeImage(Consumer[ImageUploaded]):
    """Make a thumbnail of an uploaded image. The original is only read."""

    queue = "images.resize"
    retry = RetryPolicy(
        attempts=3,
        base=timedelta(seconds=2),
        cap=timedelta(seconds=4),
        park_on=(FileNotFoundError,),
    )
    concurrency = 4

    def __init__(self, disk: FlakyDisk) -> None:
        self.disk = disk

    def handle(self, upload: ImageUploaded, message: Message) -> None:
        from PIL import Image, ImageOps, UnidentifiedImageError

        content = self.disk.read(upload.path, message.attempt)
        try:
            opened = Image.open(BytesIO(content))
        except UnidentifiedImageError:
            raise Park(f"{upload.path.name} is not an image ({len(content)} bytes)") from None
        with opened:
            image = ImageOps.exif_transpose(opened)
            image.thumbnail((upload.width, upload.width))
            image.convert("RGBA").save(thumbnail := BytesIO(), "PNG")
        # A message may run twice: it writes the same file again, and never half a file.
        upload.thumbnail.parent.mkdir(exist_ok=True)
        unfinished = upload.thumbnail.with_suffix(f".{os.getpid()}-{id(message):x}")
        unfinished.write_bytes(thumbnail.getvalue())
        unfinished.replace(upload.thumbnail)


def tell_done(settled: Settled) -> None:
    """A log line for each message that is done; a failed attempt has its own already."""
    if isinstance(settled.outcome, Done):
        message, seconds = settled.message, round(settled.seconds, 3)
        fields = {"queue": message.queue, "id": message.id, "seconds": seconds}
        log.info("%s: message %s done", message.queue, message.id, extra={"fields": fields})


@asynccontextmanager
async def with_pillow() -> AsyncIterator[None]:
    """Refuse to work without what the work needs, instead of failing message by message."""
    need_pillow()
    yield


def need_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "the demo needs Pillow to make thumbnails: pip install 'rabbit-tasks[demo]'"
        ) from None


app = App("demo", [ResizeImage(FlakyDisk())], lifespan=with_pillow, observers=[tell_done])
