"""The machine under it all, in a line: without it no figure means anything."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    return (
        f"{os.cpu_count()} cores ({_processor()}), {platform.system()}, "
        f"Python {platform.python_version()}"
    )


def load() -> str:
    """Processes that want to run: the mean of the last minute and of the last five."""
    one, five, _ = os.getloadavg()
    return f"load {one:.1f} (one minute), {five:.1f} (five)"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
