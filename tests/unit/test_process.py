"""How a process ended, in words."""

from __future__ import annotations

import pytest

from rabbit_tasks.process import ending


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"), (7, "ended with exit code 7"),
        (-11, "was killed by SIGSEGV"),
        (-40, "was killed by signal 40"),
        (-9, "was killed by SIGKILL (by the kernel, if memory ran out)"),
    ],
)  # fmt: skip
def test_how_a_process_ended_in_words(code: int, words: str) -> None:
    assert ending(code) == words
