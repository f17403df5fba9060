"""A process that we have started: how it ended, in words; and that it ends with us."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def ending(code: int) -> str:
    """How a process ended, in words.

    >>> ending(-9), ending(1)
    ('was killed by SIGKILL (by the kernel, if memory ran out)', 'ended with exit code 1')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # Nothing tells the kernel's from another's.
    hint = " (by the kernel, if memory ran out)" if code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def end_with_parent(number: signal.Signals) -> None:
    """In the new process: have the kernel send this signal when its parent dies; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
