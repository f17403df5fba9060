"""When to try again and when to park: values and two pure questions, of errors and of deaths."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rabbit_tasks.errors import ConfigurationError, MalformedBody, Park

MAX_DELAY: Final = timedelta(milliseconds=315_360_000_000)
"""The broker's own limit for a TTL, ten years (3.10 to 4.3)."""
MAX_RETRY_QUEUES: Final = 200
"""Retry queues of one consumer: a quorum queue costs the broker some 50 KiB and four processes."""

MILLISECOND: Final = timedelta(milliseconds=1)

CRASH_DELAYS: Final = tuple(timedelta(seconds=s) for s in (1, 2, 4, 8))
"""How long a message waits whose worker died with it more than once; one is drawn. Different ones,
because those that were in the same hands would come back together, the deadly one among them."""


@dataclass(frozen=True, slots=True)
class Done:
    """The handler returned: the message is acked."""


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """The handler failed: a copy waits this long on the broker, then comes back."""

    attempt: int
    """The attempt that failed."""
    delay: timedelta
    error: BaseException


@dataclass(frozen=True, slots=True)
class Parked:
    """Set aside for a person, with the reason."""

    reason: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Crashed:
    """Its worker died with it, once more: a copy waits this long on the broker, then comes back."""

    delay: timedelta


class _Unsaid(int):
    """A default that can be told from the same number written out."""


Outcome = Done | RetryAfter | Parked


@dataclass(frozen=True)
class RetryPolicy:
    """How many attempts, and how long to wait between them.

    attempts    how often the handler is tried, the first time included
    base, cap   the wait after attempt n is drawn from 0 to min(cap, base * 2^(n-1)): full jitter.
                The broker keeps a message for a constant time per queue, so the draw is among
                `spread` evenly spaced delays, of which each has its queue
    jitter      False: always the longest of them, and one queue per attempt
    delays      a fixed list instead of all of these, one delay per retry; sets `attempts`
    park_on     exception types that no retry can mend: parked at once

    Raises ConfigurationError for zero attempts, for delays under 1 ms or over ten years, for more
    than 200 retry queues, and for delays beside what they stand instead of.
    """

    attempts: int = _Unsaid(5)
    base: timedelta = timedelta(seconds=1)
    cap: timedelta = timedelta(minutes=5)
    jitter: bool = True
    spread: int = 4
    delays: tuple[timedelta, ...] | None = None
    park_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        for name in ("delays", "park_on"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            elif not isinstance(value, tuple) and value is not None:
                kind = "timedeltas" if name == "delays" else "exception types"
                raise ConfigurationError(
                    f"RetryPolicy: {name} is {value!r}; it takes a tuple of {kind}"
                )
        if self.delays is not None:
            self._check_alone(self.delays)
            object.__setattr__(self, "attempts", len(self.delays) + 1)
        elif isinstance(self.attempts, _Unsaid):
            object.__setattr__(self, "attempts", int(self.attempts))
        self._check()

    def _check_alone(self, delays: tuple[timedelta, ...]) -> None:
        """That nothing contradicts the fixed list."""
        if self.attempts != len(delays) + 1 and not isinstance(self.attempts, _Unsaid):
            raise ConfigurationError(
                f"RetryPolicy: {len(delays)} delays make {len(delays) + 1} attempts, the first try "
                f"included, not {self.attempts}; leave attempts out"
            )
        for name in ("base", "cap", "jitter", "spread"):
            if getattr(self, name) != getattr(RetryPolicy, name):
                raise ConfigurationError(
                    f"RetryPolicy: delays are taken as they are; leave out {name}, or delays"
                )

    def _check(self) -> None:
        for name in ("attempts", "spread"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(
                    f"RetryPolicy({name}={value!r}): must be a whole number from 1; "
                    "attempts counts the first try too"
                )
        times = {"base": self.base, "cap": self.cap} if self.delays is None else {
            f"delays[{i}]": delay for i, delay in enumerate(self.delays)
        }  # fmt: skip
        for name, delay in times.items():
            if not isinstance(delay, timedelta):
                raise ConfigurationError(
                    f"RetryPolicy: {name} is {delay!r}; write a timedelta, such as "
                    "timedelta(seconds=10)"
                )
            if not MILLISECOND <= delay <= MAX_DELAY:
                raise ConfigurationError(
                    f"RetryPolicy: {name} is {delay}; the broker takes 1 ms to {MAX_DELAY.days} days"
                )
        if self.delays is None and self.cap < self.base:
            raise ConfigurationError(
                f"RetryPolicy: cap {self.cap} is shorter than base {self.base}"
            )
        queues = (self.attempts - 1) * (self.spread if self.jitter and self.delays is None else 1)
        if queues > MAX_RETRY_QUEUES:
            raise ConfigurationError(
                f"RetryPolicy: {self.attempts} attempts need {queues} retry queues, more than "
                f"{MAX_RETRY_QUEUES}; take fewer attempts, a smaller spread, or jitter=False"
            )
        for kind in self.park_on:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise ConfigurationError(
                    f"RetryPolicy: park_on has {kind!r}; it takes exception types"
                )

    def delays_after(self, attempt: int) -> tuple[timedelta, ...]:
        """The delays among which the wait after this failed attempt is drawn, shortest first.

        Whole milliseconds. Empty where there is no next attempt.
        """
        if not 1 <= attempt < self.attempts:
            return ()
        if self.delays is not None:
            return (_whole(self.delays[attempt - 1]),)
        longest = self.cap
        # 2 ** (attempt - 1) overflows a timedelta long before it overflows anything else.
        if attempt - 1 < (self.cap // self.base).bit_length():
            longest = min(self.cap, self.base * 2 ** (attempt - 1))
        longest = longest // MILLISECOND * MILLISECOND
        if not self.jitter:
            return (longest,)
        delays = (_whole(longest * k / self.spread) for k in range(1, self.spread + 1))
        return tuple(dict.fromkeys(delays))

    def after_failure(
        self, attempt: int, error: BaseException, *, draw: float
    ) -> RetryAfter | Parked:
        """What follows when this attempt failed with this error.

        `draw` is from 0 (the shortest delay) up to, not including, 1 (the longest).
        """
        if park := _find(error, (Park,)):
            return Parked(_reason(park), error)
        if issubclass(type(error), MalformedBody):
            return Parked("malformed body", error)
        if hopeless := _find(error, self.park_on):
            return Parked(f"{type(hopeless).__name__} is never retried (park_on)", error)
        delays = self.delays_after(attempt)
        if not delays:
            tries = "1 attempt" if attempt == 1 else f"{attempt} attempts"
            return Parked(f"failed {tries} of {self.attempts}", error)
        return RetryAfter(attempt, delays[int(draw * len(delays))], error)


def after_crash(
    deaths: int, deliveries: int, *, limit: int, draw: float
) -> Crashed | Parked | None:
    """What follows when the broker delivers a message again that nobody here works on.

    deaths      of workers that had it in their hands, since it last had an outcome
    deliveries  how many were never settled, by the broker's own count
    limit       the queue's delivery limit
    draw        as for a failure

    None: run it. At once after a first death, since most deaths are nobody's fault; a second one
    points to the message. Nor may the broker's count come near its limit: a copy starts it anew.
    """
    if deaths > limit:
        return Parked(f"its worker died {deaths} times")
    if deaths > 1 or deliveries >= min(2, limit):
        return Crashed(CRASH_DELAYS[int(draw * len(CRASH_DELAYS))])
    return None


def _find(error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException | None:
    """The error, or the first in a group of errors, that is of one of these kinds."""
    left = [error]
    while left:  # (a loop, because groups may nest deeper than our stack)
        one = left.pop()
        kind = type(one)  # (isinstance asks the error itself, whose class may raise anything)
        if issubclass(kind, kinds):
            return one
        if issubclass(kind, BaseExceptionGroup):
            assert isinstance(one, BaseExceptionGroup)
            left.extend(reversed(one.exceptions))
    return None


def _reason(park: BaseException) -> str:
    try:
        return str(getattr(park, "reason", park))
    except BaseException as broken:  # (a subclass of Park may say its reason in its own way)
        return f"Park, whose reason raised {type(broken).__name__}"


def _whole(delay: timedelta) -> timedelta:
    """Rounded up to a millisecond, the broker's unit."""
    return -(-delay // MILLISECOND) * MILLISECOND
