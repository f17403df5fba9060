"""An app for the command line's tests: one consumer of each kind of body."""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel

from rabbit_tasks import App, Consumer, Message, RetryPolicy

ONCE = RetryPolicy(attempts=2, base=timedelta(milliseconds=100), jitter=False)


class Letter(BaseModel):
    to: str


class Letters(Consumer[Letter]):
    queue = "letters"
    retry = ONCE

    async def handle(self, letter: Letter, message: Message) -> None: ...


class Texts(Consumer[str]):
    queue = "texts"
    retry = ONCE

    async def handle(self, text: str, message: Message) -> None: ...


class Blobs(Consumer[bytes]):
    queue = "blobs"
    retry = ONCE

    async def handle(self, blob: bytes, message: Message) -> None: ...


app = App("post", [Letters(), Texts(), Blobs()])
