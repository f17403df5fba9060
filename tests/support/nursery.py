"""Processes that are forked from one that has imported everything: a worker within tens of milliseconds.

Pauses after a death are 100 ms in all of them, and so are their queues' names; a migration hurries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.brokers import ROOT


class Nursery:
    """Forks one process after another, each running `rabbit-tasks` with these arguments."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery"], cwd=ROOT, env={**os.environ, **env},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def begin(
        self, *arguments: str, log: Path, env: dict[str, str] | None = None,
        steps: dict[str, Any] | None = None,
    ) -> int:  # fmt: skip
        """Start one; its process id."""
        self._say({"argv": arguments, "log": str(log), "env": env or {}, "steps": steps})
        return int(self._hear())

    def end(self) -> int:
        """Wait for it; its exit code, or a signal's number, negative."""
        return int(self._hear())

    def run(self, *arguments: str, **options: Any) -> int:
        self.begin(*arguments, **options)
        return self.end()

    def _say(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def serve() -> None:
    """The process that forks."""
    import rabbit_tasks.cli
    import rabbit_tasks.declare
    import rabbit_tasks.migration
    import rabbit_tasks.parking
    import rabbit_tasks.worker
    from rabbit_tasks import delivery, retry, topology

    for module in (retry, topology, delivery):
        vars(module)["CRASH_DELAYS"] = (timedelta(milliseconds=100),)
    # (Ages are for brokers that die.)
    vars(rabbit_tasks.migration).update(AGE=0.1, SILENCE=0.3)
    for line in sys.stdin:
        told = json.loads(line)
        child = os.fork()
        if child == 0:
            _be(told, rabbit_tasks.cli.main)
        print(child, flush=True)  # noqa: T201
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _be(told: dict[str, Any], main: Callable[[], None]) -> None:
    log = os.open(told["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.environ.update(told["env"])
    code: Any = 1
    try:
        if steps := told["steps"]:
            from tests.support import swept
            from tests.support.steps import Steps

            swept.steps = Steps(Path(steps.pop("path")), **steps)
            swept.steps.watch()
        sys.argv = ["rabbit-tasks", *told["argv"]]
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()
