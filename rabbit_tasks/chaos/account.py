"""The account of a run: where every task is, and why it ran more than once.

Pure: what is known → the account. For each task its appearances (runs of the handler, copies that lie
in a queue in the end) are set against what can have made them (its publish, a failed run's retry copy,
a delivery that was never acked). An appearance that nothing can have made is an unexplained duplicate;
a confirmed task that was never done and lies nowhere is lost.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Protocol

from rabbit_tasks.chaos.ledger import Event

MOMENT: Final = 1.0
"""Seconds for an ack, from the socket it was written to, to the broker."""
AFTERMATH: Final = 60.0
"""Seconds after the broker was hurt in which connections are still lost of it."""
ENDS: Final = frozenset({"kill", "done", "fail", "cancel"})
BUCKETS: Final = 120
"""Of the rate over time, at most."""

PUBLISHED: Final = "published"
RETRIED: Final = "retried after a failure"
KILLED: Final = "its worker was killed in mid-work"
BESIDE: Final = "its worker died in mid-work of something else"
UNACKED: Final = "its worker was killed after the work, before the ack"
ON_ITS_WAY: Final = "its worker was killed with the ack on its way"
PUT_BACK: Final = "put back by a stopping worker"
LOST_CONNECTION: Final = "the connection was lost before the ack was through"
AGAIN: Final = "published again, the first time was not confirmed"
COPIED_AGAIN: Final = "its retry copy was published again, the first time was not confirmed"
COPY_UNACKED: Final = "its worker was killed between a copy's confirm and the ack"
HURT: Final = "the broker was hurt while it was there"
UNEXPLAINED: Final = "unexplained"

# The surest first: what certainly made an appearance is used up before what may have.
SURENESS: Final = (PUBLISHED, RETRIED, KILLED, BESIDE, PUT_BACK, UNACKED, LOST_CONNECTION, AGAIN,
                   COPIED_AGAIN, COPY_UNACKED, ON_ITS_WAY, HURT)  # fmt: skip


@dataclass(frozen=True)
class Hurt:
    """One time that the broker was hurt, or seen to be gone, by the machine's monotonic clock."""

    began: float
    ended: float


class Events(Protocol):
    """Events that can be read twice."""

    def __call__(self) -> Iterable[Event]: ...


@dataclass(frozen=True)
class Known:
    """What is known of a run when it is over."""

    tasks: int
    confirmed: bytes | bytearray
    """By task: 1 where the broker has confirmed its publish."""
    events: Events
    poison: frozenset[int] = frozenset()
    repeats: int = 0
    """Publishes that were not confirmed, and were made again."""
    repeated: Mapping[int, int] = field(default_factory=dict)
    """By task: publishes that were not confirmed and may be stored all the same."""
    parked: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """By task: the reasons with which copies of it are parked."""
    queued: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """By task: the queues in which copies of it lie."""
    uncounted: int = 0
    """Messages in queues that were not looked into one by one: of an interrupted run."""
    foreign: int = 0
    """Messages that are none of the run's."""
    hurts: Sequence[Hurt] = ()
    outages: Sequence[Hurt] = ()
    """When the broker did not answer us, whoever's doing that was."""
    began: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Missing:
    """A task that is not where it should be, and the last that is known of it."""

    task: int
    story: str


@dataclass
class Account:
    """Where every task is, and why some ran more than once."""

    tasks: int = 0
    published: int = 0
    """Tasks whose publish was confirmed."""
    repeats: int = 0
    """Publishes that were not confirmed, and were published again."""
    maybe_stored: int = 0
    """Of these, how many may be stored all the same."""
    done: int = 0
    parked: dict[str, int] = field(default_factory=dict)
    """By reason: messages."""
    parked_tasks: int = 0
    parked_and_done: int = 0
    queued: dict[str, int] = field(default_factory=dict)
    """By queue: messages that are neither done nor parked."""
    uncounted: int = 0
    foreign: int = 0
    lost: list[Missing] = field(default_factory=list)
    poison: int = 0
    poison_parked: int = 0
    runs: int = 0
    more_than_once: int = 0
    """Tasks with more than one run."""
    again: dict[str, int] = field(default_factory=dict)
    """Runs after a task's first one, by what made them."""
    unexplained: list[Missing] = field(default_factory=list)
    deaths: int = 0
    deaths_by_poison: int = 0
    workers: int = 0
    """Worker processes that took messages."""
    recovery: list[float] = field(default_factory=list)
    """Seconds from a death in mid-work to the task's next run, sorted."""
    recovery_later: list[float] = field(default_factory=list)
    """The same of second deaths and later ones, after which a task is made to wait, sorted."""
    at_once: int = 0
    """Runs of a task that began in a process while another run of it went on there."""
    seconds: float = 0.0
    """From the first publish to the last event."""
    bucket: float = 1.0
    done_over_time: list[int] = field(default_factory=list)
    deaths_over_time: list[int] = field(default_factory=list)
    hurts: list[tuple[float, float]] = field(default_factory=list)
    """Seconds into the run: from, to."""
    outages: list[tuple[float, float]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def rate(self) -> float:
        """Tasks done per second."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def is_clean(self) -> bool:
        """Whether every task is accounted for and every run explained."""
        unfinished = 0 if self.interrupted else sum(self.queued.values())
        return not (self.lost or self.unexplained or unfinished)

    def as_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        told = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("lost", "unexplained", "recovery", "recovery_later", "hurts",
                            "outages")
        }  # fmt: skip
        return {
            **told,
            "rate": round(self.rate, 3),
            "seconds": round(self.seconds, 3),
            "lost": len(self.lost),
            "lost_tasks": [{"task": one.task, "story": one.story} for one in self.lost],
            "unexplained": len(self.unexplained),
            "unexplained_tasks": [
                {"task": one.task, "story": one.story} for one in self.unexplained
            ],
            "recovery": _figures(self.recovery),
            "recovery_later": _figures(self.recovery_later),
            "hurts": [{"from": round(a, 3), "to": round(b, 3)} for a, b in self.hurts],
            "outages": [{"from": round(a, 3), "to": round(b, 3)} for a, b in self.outages],
            "is_clean": self.is_clean,
        }


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that this share of them does not exceed."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _figures(ordered: Sequence[float]) -> dict[str, float | int | None]:
    def shown(value: float | None) -> float | None:
        return None if value is None else round(value, 6)

    return {
        "count": len(ordered),
        "median": shown(percentile(ordered, 0.5)),
        "p99": shown(percentile(ordered, 0.99)),
        "max": shown(percentile(ordered, 1.0)),
    }


# --- one task -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Run:
    """One run of the handler."""

    attempt: int
    worker: str
    start: float
    end: float | None = None
    how: str = ""
    """kill, done, fail or cancel; nothing where it has no end."""
    settled: float | None = None


class _Source:
    """What can have made one appearance: by one reason, or by another."""

    def __init__(self, attempt: int | None, *reasons: tuple[str, float]) -> None:
        self.attempt = attempt
        """None where it may be any."""
        self._reasons = reasons

    def reason(self, at: float) -> tuple[int, float, str] | None:
        """The surest reason that holds by then, after how sure and how old it is."""
        holding = [(SURENESS.index(why), since, why) for why, since in self._reasons if since <= at]
        return min(holding, default=None)


class _Times:
    """What happened when to workers and to the broker."""

    def __init__(self, hurts: Sequence[Hurt]) -> None:
        self._killed: dict[str, float] = {}
        self._last_seen: dict[str, float] = {}
        self._left: set[str] = set()
        self._losses: dict[str, list[float]] = defaultdict(list)
        self._hurts = sorted(hurts, key=lambda hurt: hurt.began)

    def note(self, event: Event) -> None:
        self._last_seen[event.worker] = event.at
        if event.kind == "kill":
            self._killed[event.worker] = event.at
        elif event.kind == "left":
            self._left.add(event.worker)
        elif event.kind == "lost":
            self._losses[event.worker].append(event.at)

    def death(self, worker: str) -> float | None:
        """When the worker died; of one that did not die by our hand, when it was last heard of."""
        if worker in self._killed:
            return self._killed[worker]
        return None if worker in self._left else self._last_seen.get(worker)

    def died(self, worker: str, after: float, *, within: float = math.inf) -> float | None:
        """When the worker died, if it did in this time."""
        death = self.death(worker)
        return death if death is not None and after <= death <= after + within else None

    def is_troubled(self, worker: str, since: float, until: float) -> bool:
        """Whether the worker lost a channel or its connection, or the broker was hurt."""
        losses = self._losses.get(worker, [])
        i = bisect_left(losses, since)
        if i < len(losses) and losses[i] <= until + AFTERMATH:
            return True
        return any(self.hurts(since, until))

    def hurts(self, since: float, until: float) -> Iterator[Hurt]:
        """The times that the broker was hurt of which this time may have seen the effects."""
        return (
            hurt for hurt in self._hurts if hurt.began <= until and hurt.ended + AFTERMATH >= since
        )


def _runs_of(events: Sequence[Event]) -> list[_Run]:
    """The runs of one task, by their starts."""
    runs: list[_Run] = []
    for event in events:
        if event.kind == "start":
            runs.append(_Run(event.attempt, event.worker, event.at))
            continue
        mine = [r for r in runs if r.worker == event.worker and r.attempt == event.attempt]
        if event.kind == "settled":
            # (One that no run belongs to: a message that was parked, or had to wait, without one.)
            if ended := [r for r in mine if r.how in ("done", "fail") and r.settled is None]:
                ended[-1].settled = event.at
        elif event.kind in ENDS and (going := [r for r in mine if not r.how]):
            going[-1].how, going[-1].end = event.kind, event.at
    return runs


def _sources(
    events: Sequence[Event], runs: Sequence[_Run], times: _Times, repeats: int
) -> list[_Source]:
    """Everything that can have made an appearance of this task."""
    found = [_Source(1, (PUBLISHED, -math.inf))]
    found += [_Source(1, (AGAIN, -math.inf)) for _ in range(repeats)]
    for run in runs:
        end = run.end if run.end is not None else run.start
        if run.how == "fail":
            found.append(_Source(run.attempt + 1, (RETRIED, end)))
            until = math.inf if run.settled is None else run.settled
            if times.is_troubled(run.worker, run.start, until):
                found.append(_Source(run.attempt + 1, (COPIED_AGAIN, end)))
        if reasons := list(_redelivered(run, end, times)):
            found.append(_Source(run.attempt, *reasons))
    for event in events:
        if event.kind == "held":
            found.append(_Source(None, (COPIED_AGAIN, event.at)))
        elif event.kind == "waits" and times.died(event.worker, event.at, within=MOMENT):
            found.append(_Source(event.attempt, (COPY_UNACKED, event.at)))
    first = min((event.at for event in events), default=math.inf)
    last = max((event.at for event in events), default=-math.inf)
    found += [_Source(None, (HURT, hurt.began)) for hurt in times.hurts(first, last)]
    return found


def _redelivered(run: _Run, end: float, times: _Times) -> Iterator[tuple[str, float]]:
    """Why the broker may have delivered again, once, what this run had, and since when."""
    if run.how == "kill":
        yield KILLED, end
    elif run.how == "cancel":
        yield PUT_BACK, end
    elif run.settled is None:
        if (death := times.died(run.worker, end)) is not None:
            yield (UNACKED if run.how else BESIDE), death
        if times.is_troubled(run.worker, run.start, math.inf):
            yield LOST_CONNECTION, run.start
    else:
        if times.died(run.worker, run.settled, within=MOMENT) is not None:
            yield ON_ITS_WAY, run.settled
        if times.is_troubled(run.worker, run.start, run.settled + MOMENT):
            yield LOST_CONNECTION, run.start


def _take(sources: list[_Source], attempt: int | None, at: float) -> str | None:
    """Use up what most surely made an appearance; why it did, None where nothing can have."""
    fitting = [
        (reason, i) for i, source in enumerate(sources)
        if (attempt is None or source.attempt in (attempt, None))
        and (reason := source.reason(at)) is not None
    ]  # fmt: skip
    if not fitting:
        return None
    (_, _, why), i = min(fitting)
    del sources[i]
    return why


# --- all of them --------------------------------------------------------------------------------


def account(known: Known, *, interrupted: bool = False) -> Account:
    """The account of a run that has ended; of an interrupted one, so far."""
    made = Account(
        tasks=known.tasks, interrupted=interrupted, uncounted=known.uncounted,
        foreign=known.foreign, poison=len(known.poison), repeats=known.repeats,
        maybe_stored=sum(known.repeated.values()), published=sum(known.confirmed),
    )  # fmt: skip
    times = _Times([*known.hurts, *known.outages])
    starts, done = bytearray(known.tasks), bytearray(known.tasks)
    workers: set[str] = set()
    last = known.began
    for event in known.events():
        times.note(event)
        last = max(last, event.at)
        if event.kind == "ready":
            workers.add(event.worker)
        if not 0 <= event.task < known.tasks:
            continue
        if event.kind == "start":
            made.runs += 1
            starts[event.task] = min(255, starts[event.task] + 1)
        elif event.kind == "done":
            done[event.task] = 1
        elif event.kind == "kill":
            made.deaths += 1
            made.deaths_by_poison += event.task in known.poison
    made.workers = len(workers)
    made.done = sum(done)
    _place(made, known, done)
    # Of most tasks there is nothing to explain: one run, and done. Only the others are kept in mind.
    told: dict[int, list[Event]] = defaultdict(list)
    for event in known.events():
        task = event.task
        if 0 <= task < known.tasks and not (
            starts[task] == 1 and done[task] and task not in known.parked
            and task not in known.queued
        ):  # fmt: skip
            told[task].append(event)
    _explain(made, known, told, times)
    _miss(made, known, told, done)
    _over_time(made, known, last)
    return made


def _place(made: Account, known: Known, done: bytearray) -> None:
    """Where the tasks are that are not simply done."""
    reasons = Counter(reason for copies in known.parked.values() for reason in copies)
    made.parked = dict(sorted(reasons.items()))
    made.parked_tasks = len(known.parked)
    made.parked_and_done = sum(1 for task in known.parked if 0 <= task < known.tasks and done[task])
    made.poison_parked = len(known.poison & known.parked.keys())
    queued = Counter(queue for copies in known.queued.values() for queue in copies)
    made.queued = dict(sorted(queued.items()))


def _explain(
    made: Account, known: Known, told: Mapping[int, Sequence[Event]], times: _Times
) -> None:
    again: Counter[str] = Counter()
    # (A task that nobody ran may all the same lie twice in a queue.)
    for task in sorted({*told, *known.parked, *known.queued}):
        events = told.get(task, ())
        runs = _runs_of(events)
        sources = _sources(events, runs, times, known.repeated.get(task, 0))
        for i, run in enumerate(runs):
            why = _take(sources, run.attempt, run.start)
            if why is None:
                made.unexplained.append(Missing(task, _story(events, known, f"run {i + 1}")))
            if i:
                again[why or UNEXPLAINED] += 1
            made.at_once += any(
                one.worker == run.worker and (one.end is None or one.end > run.start)
                for one in runs[:i]
            )
        made.more_than_once += len(runs) > 1
        for reason in known.parked.get(task, ()):
            if _take(sources, None, math.inf) is None:
                story = _story(events, known, f"a copy is parked ({reason})")
                made.unexplained.append(Missing(task, story))
        for queue in known.queued.get(task, ()):
            if _take(sources, None, math.inf) is None:
                story = _story(events, known, f"a copy is in {queue}")
                made.unexplained.append(Missing(task, story))
        _recovery(made, runs, [event.at for event in events if event.kind == "waits"])
    made.again = {why: again[why] for why in (*SURENESS, UNEXPLAINED) if again[why]}
    made.recovery.sort()
    made.recovery_later.sort()


def _recovery(made: Account, runs: Sequence[_Run], waits: Sequence[float]) -> None:
    """How long a task waited for its next run after each of its deaths."""
    for run, following in pairwise(runs):
        if run.how == "kill" and run.end is not None:
            made_to_wait = any(run.end <= at <= following.start for at in waits)
            found = made.recovery_later if made_to_wait else made.recovery
            found.append(max(0.0, following.start - run.end))


def _miss(
    made: Account, known: Known, told: Mapping[int, Sequence[Event]], done: bytearray
) -> None:
    """What was confirmed, was never done, and lies nowhere."""
    if made.interrupted:
        return
    for task in range(known.tasks):
        if known.confirmed[task] and not (
            done[task] or task in known.parked or task in known.queued
        ):
            story = _story(told.get(task, ()), known, "confirmed")
            made.lost.append(Missing(task, story))


def _story(events: Sequence[Event], known: Known, what: str) -> str:
    """The last that is known of a task, for a person who looks for it."""
    shown = [
        f"{event.kind} at {event.at - known.began:.3f} s (attempt {event.attempt}, "
        f"worker {event.worker}{', redelivered' if event.redelivered else ''})"
        for event in list(events)[-6:]
    ]
    return f"{what}; {', '.join(shown) or 'never seen by a worker'}"


def _over_time(made: Account, known: Known, last: float) -> None:
    """Done and deaths, by even parts of the run."""
    made.seconds = max(0.0, last - known.began)
    ended = max(last, known.ended)
    made.bucket = _nice(max(ended - known.began, 0.001) / BUCKETS)
    size = int((ended - known.began) / made.bucket) + 1
    made.done_over_time, made.deaths_over_time = [0] * size, [0] * size
    for event in known.events():
        if event.kind in ("done", "kill"):
            i = min(size - 1, max(0, int((event.at - known.began) / made.bucket)))
            (made.done_over_time if event.kind == "done" else made.deaths_over_time)[i] += 1
    made.hurts = [_since(known.began, one) for one in known.hurts]
    made.outages = [_since(known.began, one) for one in known.outages]


def _since(began: float, hurt: Hurt) -> tuple[float, float]:
    return max(0.0, hurt.began - began), max(0.0, hurt.ended - began)


def _nice(seconds: float) -> float:
    """A round length that is not shorter."""
    for length in (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600):
        if length >= seconds:
            return float(length)
    return float(math.ceil(seconds / 3600) * 3600)
