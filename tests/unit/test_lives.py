"""The life of deliveries, with anything at any moment: a model-based test in an imagined world.

Ten thousand examples: `scripts/test -m heavy tests/unit/test_lives.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.imagined import MAIN, PARKED, Process, World, imagining

FEW = st.integers(0, 5)
SOME = st.integers(0, 30)
HOW = st.sampled_from(["", "ok", "raise", "raise", "park"])


class Lives(RuleBasedStateMachine):
    """Messages, workers and everything that may befall them."""

    def __init__(self) -> None:
        super().__init__()
        self._imagining = imagining()
        tell = self._imagining.__enter__()
        self._tell = tell
        self.world: World

    @initialize(
        version=st.sampled_from(["3.10", "4.0", "4.3"]),
        limit=st.sampled_from([1, 2, 2, 5]),
        attempts=st.integers(1, 3),
        concurrency=st.integers(1, 3),
        workers=st.integers(1, 3),
        stuck=st.booleans(),
        messages=st.integers(0, 3),
    )
    def begin(
        self, version: str, limit: int, attempts: int, concurrency: int, workers: int, stuck: bool,
        messages: int,
    ) -> None:  # fmt: skip
        self.world = World(version, limit, attempts, concurrency)
        self._tell(self.world)
        self.world.stuck = stuck
        for _ in range(workers):
            self.world.start()
        for _ in range(messages):
            self.world.publish()
        self.world.wait(1)

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.heal()
                self.world.finish()
                self.world.check()
                self.world.check_rest()
        finally:
            if hasattr(self, "world"):
                self.world.close()
            self._imagining.__exit__(None, None, None)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def _of(self, number: int) -> Process:
        alive = self.world.alive
        return alive[number % len(alive)]

    def _some_work(self) -> bool:
        return any(process.running for process in self.world.alive)

    def _has_workers(self) -> bool:
        return bool(self.world.alive)

    def _end(self, number: int, how: str) -> None:
        running = [one for process in self.world.alive for one in process.running]
        if running and how:
            one = running[number % len(running)]
            if not one.end.done():
                one.end.set_result(how)

    def _then(self, number: int, how: str, steps: int) -> None:
        """A handler ends, perhaps, and so many steps later something happens."""
        self.world.rough = True
        self._end(number, how)
        self.world.some(steps)

    # --- work

    @rule(
        number=st.integers(1, 3), with_id=st.sampled_from([True, True, True, False]),
        alike=st.sampled_from([1, 1, 1, 2]),
    )  # fmt: skip
    def publish(self, number: int, with_id: bool, alike: int) -> None:
        if MAIN in self.world.broker.queues and not self.world.broker.queues[MAIN].full:
            for _ in range(number):
                self.world.publish(with_id=with_id, alike=alike)

    @precondition(_some_work)
    @rule(number=FEW, how=st.sampled_from(["ok", "raise", "raise", "park"]))
    def a_handler_ends(self, number: int, how: str) -> None:
        self._end(number, how)

    @rule(steps=SOME)
    def some_steps(self, steps: int) -> None:
        self.world.some(steps)

    @rule(seconds=st.sampled_from([0, 0.2, 1, 1, 5, 31, 700]))
    def time_goes_by(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def replay(self) -> None:
        self.world.replay()

    @precondition(lambda self: len(self.world.alive) < 4)
    @rule()
    def a_worker_starts(self) -> None:
        self.world.start()

    # --- in calm

    @precondition(_has_workers)
    @rule(number=FEW, times=st.integers(1, 3))
    def workers_die_in_calm(self, number: int, times: int) -> None:
        for _ in range(times):
            self.world.idle()
            if self._has_workers():
                self._of(number).die(0)
            self.world.start()
            self.world.wait(0.6)

    @precondition(_has_workers)
    @rule(number=FEW, times=st.integers(1, 4))
    def a_connection_is_lost_and_comes_back(self, number: int, times: int) -> None:
        for _ in range(times):
            self.world.idle()
            if self._has_workers():
                for line in self._of(number).lines:
                    line.cut(0)
            self.world.wait(10)

    @precondition(_has_workers)
    @rule(times=st.integers(1, 4))
    def the_broker_restarts(self, times: int) -> None:
        for _ in range(times):
            self.world.idle()
            for line in list(self.world.lines()):
                line.cut(0)
            self.world.wait(10)

    # --- at any moment

    @precondition(_has_workers)
    @rule(number=FEW, how=HOW, steps=SOME, arrive=FEW)
    def a_worker_dies(self, number: int, how: str, steps: int, arrive: int) -> None:
        self._then(number, how, steps)
        if self._has_workers():
            self._of(number).die(arrive)

    @precondition(_has_workers)
    @rule(number=FEW, how=HOW, steps=SOME, arrive=FEW, client_first=st.booleans())
    def a_connection_is_lost(
        self, number: int, how: str, steps: int, arrive: int, client_first: bool
    ) -> None:
        self._then(number, how, steps)
        lines = [line for line in self.world.lines() if not (line.is_down or line.is_lost)]
        if lines:
            lines[number % len(lines)].cut(arrive, client_first=client_first)

    @precondition(_has_workers)
    @rule(number=FEW, how=HOW, steps=SOME, arrive=FEW)
    def all_connections_are_lost(self, number: int, how: str, steps: int, arrive: int) -> None:
        self._then(number, how, steps)
        for line in list(self.world.lines()):
            line.cut(arrive)

    @precondition(_has_workers)
    @rule(number=FEW, how=HOW, steps=SOME)
    def the_broker_gives_a_consumer_up(self, number: int, how: str, steps: int) -> None:
        self._then(number, how, steps)
        pipes = [pipe for line in self.world.lines() for pipe in line.pipes if pipe.unacked]
        if pipes := [*self.world.broker.consumers, *pipes]:
            pipes[number % len(pipes)].give_up()

    @precondition(_has_workers)
    @rule(number=FEW, how=HOW, steps=SOME)
    def a_worker_is_asked_to_stop(self, number: int, how: str, steps: int) -> None:
        self._then(number, how, steps)
        if self._has_workers():
            self._of(number).stop()

    @rule(is_up=st.booleans())
    def the_broker_takes_connections_or_does_not(self, is_up: bool) -> None:
        self.world.rough = True
        self.world.is_up = is_up

    @rule(number=st.integers(0, 10), what=st.sampled_from(["full", "mute", "gone", "well", "well"]))
    def a_queue_is(self, number: int, what: str) -> None:
        self.world.rough = True
        broker, wanted = self.world.broker, list(self.world.arguments)
        name = wanted[number % len(wanted)]
        queue = broker.queues.get(name)
        if what == "gone":
            if queue is not None and (name != PARKED or not queue.ready):
                broker.delete(name)
        elif queue is None:
            broker.create(name)
        else:
            queue.full, queue.mute = what == "full", what == "mute"


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(200, marks=pytest.mark.timeout(300)),  # (on a busy machine)
        pytest.param(10_000, marks=[pytest.mark.heavy, pytest.mark.timeout(3600)]),
    ],
)
def test_whatever_happens_at_whatever_moment_nothing_is_lost(quiet: None, examples: int) -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
