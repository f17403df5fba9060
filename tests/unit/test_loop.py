"""`rabbit-tasks work --loop`: uvloop where it is installed, asyncio's own where it is not wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UVLOOP = """
import asyncio

class Loop(asyncio.SelectorEventLoop): ...

new_event_loop = Loop
"""
SAYS = """
import asyncio, sys
from rabbit_tasks.cli import main
from rabbit_tasks.worker import Worker

async def run(self):
    print(type(asyncio.get_running_loop()).__module__)

Worker.run = run
sys.argv = ["rabbit-tasks", "--app", "rabbit_tasks.demo:app", "work", *sys.argv[1:]]
main()
"""


def work(folder: Path, uvloop: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A worker in whose environment `uvloop` is this module."""
    (folder / "uvloop.py").write_text(uvloop)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", SAYS, *arguments],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "loop"),
    [
        ([], "uvloop"),
        (["--loop", "uvloop"], "uvloop"),
        (["--loop", "asyncio"], "asyncio.unix_events"),
    ],
)
def test_a_worker_takes_uvloop_where_it_is_installed_unless_told_otherwise(
    tmp_path: Path, arguments: list[str], loop: str
) -> None:
    done = work(tmp_path, UVLOOP, *arguments)
    assert (done.stdout, done.returncode) == (f"{loop}\n", 0), done.stderr


def test_a_uvloop_that_is_wanted_and_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    done = work(tmp_path, 'raise ImportError("no such wheel")', "--loop", "uvloop")
    assert done.returncode == 2
    assert done.stderr == (
        "error: --loop uvloop: no such wheel; pip install 'rabbit-tasks[uvloop]', or take "
        "--loop asyncio\n"
    )
