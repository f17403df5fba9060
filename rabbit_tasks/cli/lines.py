"""Output that may be long, to whoever reads it in his own time."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from io import BytesIO
from types import TracebackType
from typing import IO, Final, Self

_TOGETHER: Final = 65_536


class Lines:
    """Lines on their way to stdout, kept on disk where it takes them slower than they come.

    What is written comes out at once, but nobody waits for a pager: a queue that is read is free again
    when all is read. `write` raises BrokenPipeError once nobody reads any more. Leaving the block waits
    until all is out.
    """

    def __init__(self) -> None:
        self._file: IO[bytes]
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed in __exit__)
        except OSError:  # nowhere to write
            self._file = BytesIO()
        self._news = threading.Condition()
        self._written = 0
        self._is_done = False
        self._fault: OSError | None = None
        self._thread = threading.Thread(target=self._pass_on, name="stdout", daemon=True)

    def write(self, text: str) -> None:
        """Text that ends its own lines. OSError where the disk is full."""
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        with self._news:
            if self._fault is not None:
                raise self._fault
            self._file.seek(self._written)
            while left:  # (a disk that is nearly full takes a part)
                count = self._file.write(left)
                self._written += count
                left = left[count:]
            self._news.notify()

    def __enter__(self) -> Self:
        sys.stdout.flush()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._news:
            self._is_done = True
            self._news.notify()
        # (Not where somebody has interrupted us: he wants to see no more of it.)
        if error is None or isinstance(error, Exception):
            self._thread.join()
            self._file.close()
            if self._fault is not None and error is None:
                raise self._fault

    def _pass_on(self) -> None:
        at = 0
        while True:
            with self._news:
                self._news.wait_for(lambda at=at: self._written > at or self._is_done)  # type: ignore[misc]
                if self._written == at:
                    return
                self._file.seek(at)
                chunk = self._file.read(_TOGETHER)
            at += len(chunk)
            try:
                while chunk:
                    chunk = chunk[os.write(sys.stdout.fileno(), chunk) :]
            except OSError as fault:
                with self._news:
                    self._fault = fault
                return
