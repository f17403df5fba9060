"""The process of one contender: told on stdin what to do, a line of JSON each; answers on stdout.

python -m bench.runner NAME, with the broker and the queue in the environment. With BENCH_FIRST there
it is the process whose start is measured, and does what `first` does.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.contender import FIRST, QUEUE, URL, Contender, Unsupported
from bench.contenders import kind_of, version_of


def main() -> None:
    (name,) = sys.argv[1:]
    url, queue = os.environ[URL], os.environ[QUEUE]
    if FIRST in os.environ:
        kind_of(name)(url, queue).first()
        return
    # Logs cost time, and who runs workers keeps them; whatever is printed must not get in between.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO)
    contender: Contender | None = None
    for line in sys.stdin:
        try:
            contender = contender or kind_of(name)(url, queue)
            answer = {"answer": _do(contender, json.loads(line))}
        except Unsupported:
            answer = {"answer": None}
        except ModuleNotFoundError as error:
            answer = {"missing": error.name}
        except BaseException as error:
            traceback.print_exc()
            last = "".join(traceback.format_exception_only(error)).strip()
            answer = {"error": last.splitlines()[-1]}
        answers.write(json.dumps(answer) + "\n")


def _do(contender: Contender, order: dict[str, Any]) -> Any:
    match order:
        case {"do": "names"}:
            version = version_of(contender.distribution)
            return [contender.names(), contender.exchanges(), version]
        case {"do": "declare"}:
            return contender.declare()
        case {"do": "fill", "count": count}:
            return contender.fill(count)
        case {"do": "command"}:
            return [contender.command(), dict(contender.environment())]
        case {"do": "run", "profile": None, **what}:
            return _run(contender, **what)
        case {"do": "run", "profile": path, **what}:
            from bench.profile import sampled

            with sampled(Path(path)):
                return _run(contender, **what)
    raise ValueError(f"what is {order}?")


def _run(contender: Contender, *, name: str, method: str, count: int, slots: int) -> Any:
    """The figures of one run."""
    work: Callable[..., None] = getattr(contender, method)
    if name.startswith("publish"):
        from bench.tally import Stopwatch

        watch = Stopwatch(count)
        work(watch)
        return watch.figures()
    if name == "latency":
        from bench.tally import Times

        times = Times(count)
        work(times)
        return times.figures()
    from bench.tally import Tally

    tally = Tally(count, slots)
    if name == "retry-delay":
        return _retry_delay(contender, work, tally, count)
    if name == "isolated":
        return _isolated(work, tally, slots)
    work(tally, slots)
    return tally.figures()


def _retry_delay(
    contender: Contender, work: Callable[..., None], tally: Any, count: int
) -> dict[str, float]:
    """One message after another: the next is published when the last one has succeeded."""
    from bench.load import Feeder
    from bench.measure import DELAY_MS

    if type(contender).fill is not Contender.fill:  # it reads none but its own
        raise Unsupported
    tally.on_hit = Feeder(contender.url, contender.queue, count).another
    work(tally, 1)
    return {"p50": statistics.median(tally.waits[1:]) * 1e3 - DELAY_MS}


def _isolated(work: Callable[..., None], tally: Any, slots: int) -> dict[str, float]:
    from bench import burning

    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records")
        os.environ[burning.RECORDS] = str(records)
        work(tally, slots)
        parent = tally.figures()["cpu"] / 1e3
        return {"overhead": parent + burning.overhead(records) * 1e3}


if __name__ == "__main__":
    main()
