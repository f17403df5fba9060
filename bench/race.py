"""Rounds of measures: every contender in turn, in an order that moves on with each round."""

from __future__ import annotations

import math
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.lane import Failed, Lane
from bench.measure import Figure, Measure, Size
from bench.queues import Queues

Tell = Callable[[str], None]


@dataclass
class Result:
    """What the contenders reached in one figure: a number for each round, None where they have none.

    load    of the machine, in each round: processes that want to run, the last minute's mean
    """

    measure: Measure
    figure: Figure
    rounds: dict[str, list[float | None]]
    load: list[float] = field(default_factory=list)

    def median(self, name: str) -> float | None:
        found = [one for one in self.rounds[name] if one is not None]
        return statistics.median(found) if found else None

    def ratio(self, name: str, to: str) -> float | None:
        """The median of the ratios within each round."""
        pairs = zip(self.rounds[name], self.rounds[to], strict=True)
        found = [one / other for one, other in pairs if one is not None and other]
        return statistics.median(found) if found else None

    def of_goal(self, name: str, to: str) -> float | None:
        """What is to be held against the figure's goal."""
        return self.median(name) if self.figure.is_absolute else self.ratio(name, to)


class Race:
    """The contenders of a run, each with a process and queues of its own."""

    def __init__(self, lanes: Sequence[Lane], queues: Queues, tell: Tell) -> None:
        self.lanes = lanes
        self.queues = queues
        self._tell = tell

    @property
    def versions(self) -> dict[str, str]:
        return {lane.name: lane.version for lane in self.lanes}

    def run(
        self, measures: Sequence[Measure], size: Size, rounds: int, within: float | None = None
    ) -> Iterator[Result]:
        """One result after another; a contender that fails in a measure is told of, and left out.

        within  seconds for all; on a slow or busy machine there are fewer rounds, one at least
        """
        ends = time.monotonic() + within if within is not None else math.inf
        for position, measure in enumerate(measures):
            began = time.monotonic()
            share = (ends - began) / (len(measures) - position)
            found: dict[str, list[dict[str, float] | None]] = {lane.name: [] for lane in self.lanes}
            load = []
            for number in range(rounds):
                turn = number % len(self.lanes)
                for lane in (*self.lanes[turn:], *self.lanes[:turn]):
                    found[lane.name].append(self._once(lane, measure, size))
                load.append(os.getloadavg()[0])
                taken = time.monotonic() - began
                if taken + taken / (number + 1) > share:
                    break
            for figure in measure.figures:
                numbers = {
                    name: [one[figure.name] if one else None for one in ones]
                    for name, ones in found.items()
                }
                yield Result(measure, figure, numbers, load)

    def _once(self, lane: Lane, measure: Measure, size: Size) -> dict[str, float] | None:
        try:
            return self.once(lane, measure, measure.count(size))
        except Failed as error:
            self._tell(f"{measure.name}: {error}")
            return None

    def once(
        self, lane: Lane, measure: Measure, count: int, profile: Path | None = None
    ) -> dict[str, float] | None:
        """The figures of one run of one contender, whose queue is empty before and after."""
        try:
            if measure.name == "start":
                return self._start(lane)
            if measure.filled:
                lane.ask("fill", count=count)
            figures: dict[str, float] | None = lane.run(measure, count, profile)
            if figures is not None and not measure.name.startswith("publish"):
                self.queues.make_sure_of_acks(lane.queue, measure.slots)
            return figures
        finally:
            self.queues.purge(lane.queue)

    def _start(self, lane: Lane) -> dict[str, float]:
        """Of the second process, where none has started before."""
        while True:
            was_warm = lane.is_warm
            lane.ask("fill", count=1)
            figures = lane.start()
            if was_warm:
                return figures


@contextmanager
def opened(url: str, names: Sequence[str], tell: Tell) -> Iterator[Race]:
    """The contenders with their queues, which are gone in the end.

    Failed where one cannot be had, such as a peer that is not installed.
    """
    run = uuid.uuid4().hex[:6]
    queues = Queues(url)
    with ExitStack() as stack:
        stack.callback(queues.remove)  # the last thing: when no contender's process is left
        lanes = []
        for name in names:
            lane = stack.enter_context(Lane(name, url, f"bench.{run}.{name}"))
            made, exchanges, lane.version = lane.ask("names")
            queues.note(made, exchanges)
            lane.ask("declare")
            lanes.append(lane)
        yield Race(lanes, queues, tell)
