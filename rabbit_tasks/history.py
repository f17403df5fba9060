"""What became of a message so far, as headers: its failures, why it is parked, its replays.

Pure: errors and outcomes in, headers out, cut to what a frame holds.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Final

from pydantic import ValidationError

from rabbit_tasks import fingerprint as fingerprints
from rabbit_tasks import message as names
from rabbit_tasks.consumer import fault_codes
from rabbit_tasks.errors import MalformedBody, Park
from rabbit_tasks.properties import Properties
from rabbit_tasks.retry import Crashed, Parked, RetryAfter
from rabbit_tasks.text import cut, one_line

HISTORY: Final = 20
"""Attempts that the history keeps, the latest ones."""
TYPE_BYTES: Final = 512
MESSAGE_BYTES: Final = 2_048
STACK_BYTES: Final = 16_384
ROOM: Final = 8_192
"""Bytes of a frame left free: the broker adds its own headers when it dead-letters."""

# A publisher's time limit has had its chance, and would make a parked copy vanish; another user's
# name makes the broker refuse the copy (406).
NOT_COPIED: Final = ("expiration", "user_id")
_RENEWED: Final = names.OURS - {names.REPLAYED, names.EDITED}
_ENDED: Final = names.OURS - {names.ATTEMPTS, names.REPLAYED, names.EDITED}
_PARK: Final = f"{Park.__module__}.{Park.__qualname__}"
_ENTRY: Final = {"attempt": int, "when": str, "seconds": float, "error": str, "worker": str}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as text: it outlives its process and the exception's own class."""

    type: str
    message: str
    stack: str
    log: str
    """One line for logs; nothing of a body that did not decode."""
    fingerprint: str = ""
    """The same for whatever failed in the same way: see fingerprint.py."""


class FailedElsewhere(Exception):
    """An error that happened in a child process, carried as what it said."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)  # what pickling an exception gives its constructor again
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.message


def failure_of(error: BaseException, redact: Callable[[str], str] | None = None) -> Failure:
    """The error as text, whatever its class does; `redact` passes over all of it."""
    kind = type(error)  # (isinstance asks the error itself, whose class may raise anything)
    if issubclass(kind, FailedElsewhere):
        assert isinstance(error, FailedElsewhere)
        return error.failure
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    text, stack = _text(error), _stack(error)
    if issubclass(kind, MalformedBody):
        assert isinstance(error, MalformedBody)
        log = f"malformed body ({error.codes})"
    elif issubclass(kind, ValidationError):
        assert isinstance(error, ValidationError)
        log = f"{name}: {fault_codes(error)}"
    else:
        log = f"{name}: {text}" if text else name
    clean = _careful(redact) if redact else str
    return Failure(
        cut(name, TYPE_BYTES),
        cut(clean(text), MESSAGE_BYTES),
        cut(clean(stack), STACK_BYTES),
        one_line(clean(log)),
        fingerprints.of_error(error),
    )


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))  # (of a subclass of str, its plain text)
    except BaseException as broken:  # (even SystemExit: it is only a text)
        return f"<its __str__ raised {type(broken).__name__}>"


def _stack(error: BaseException) -> str:
    # traceback survives an exception's own __str__, but neither every other attribute of a class
    # that we do not know nor groups that nest deeper than our stack.
    try:
        steps = _theirs(error.__traceback__)
        told = traceback.TracebackException(type(error), error, steps, compact=True)
        return "".join(told.format())
    except BaseException as broken:
        return f"<no stack trace: formatting it raised {type(broken).__name__}>"


def _theirs(steps: TracebackType | None) -> TracebackType | None:
    """A traceback without our own way to the handler, which is always the same, and dear to show."""
    step = steps
    while step is not None and fingerprints.is_around(step.tb_frame):
        step = step.tb_next
    return step or steps


def _careful(redact: Callable[[str], str]) -> Callable[[str], str]:
    def clean(text: str) -> str:
        try:
            return str.__str__(str(redact(text)))
        except BaseException as error:  # (showing the text instead would be the leak)
            return f"<redact raised {type(error).__name__}>"

    return clean


def after(
    outcome: RetryAfter | Parked,
    failure: Failure | None,
    before: Properties,
    *,
    queue: str,
    attempt: int,
    when: datetime,
    seconds: float,
    now: datetime,
    worker: str,
    stack: bool = True,
) -> dict[str, Any]:
    """The headers of a copy that carries this outcome; the handler started `when`, it is `now`."""
    error = {
        "attempt": attempt,
        "when": when.isoformat(timespec="milliseconds"),
        "seconds": round(seconds, 6),
        "error": one_line(f"{failure.type}: {failure.message}", 256) if failure else "",
        "worker": worker,
    }
    headers: dict[str, Any] = {names.RETRY_COUNT: attempt, names.ORIGIN_QUEUE: queue}
    if isinstance(outcome, Parked):
        headers |= _parking(outcome, failure, now)
    if failure:
        headers[names.ERROR_TYPE] = failure.type
        headers[names.ERROR_MESSAGE] = failure.message
        headers[names.ATTEMPTS] = [*attempts(before), error][-HISTORY:]
        if stack:
            headers[names.ERROR_STACK] = failure.stack
    return headers


def after_crash(
    outcome: Crashed | Parked,
    deaths: int,
    before: Properties,
    *,
    queue: str,
    now: datetime,
    worker: str,
) -> dict[str, Any]:
    """The headers of a copy of a message whose workers died: no attempt was spent, nothing is lost.

    `worker` has found it `now`, and is the last one of which anybody knows that it had it: those that
    died could not say so.
    """
    when = now.isoformat(timespec="milliseconds")
    headers: dict[str, Any] = {names.ORIGIN_QUEUE: queue}
    if count := names.retry_count(before):
        headers[names.RETRY_COUNT] = count
    if deaths or isinstance(outcome, Crashed):
        headers[names.CRASHES] = {"count": deaths, "worker": worker, "when": when}
    if isinstance(outcome, Parked):
        headers |= _parking(outcome, None, now)
    for name in (names.ERROR_TYPE, names.ERROR_MESSAGE, names.ERROR_STACK):
        if isinstance(text := before.header(name), str):
            headers[name] = text
    if known := attempts(before):
        headers[names.ATTEMPTS] = known
    return headers


def _parking(outcome: Parked, failure: Failure | None, now: datetime) -> dict[str, Any]:
    reason = one_line(outcome.reason)
    kind = failure.fingerprint if failure else ""
    return {
        names.PARKED_REASON: reason,
        names.PARKED_AT: now.isoformat(timespec="milliseconds"),
        names.ERROR_FINGERPRINT: kind or fingerprints.of_words(reason),
    }


def attempts(properties: Properties) -> list[dict[str, Any]]:
    """The history that a message carries; of one that we did not write, what is like ours."""
    found = properties.header(names.ATTEMPTS)
    if not isinstance(found, list):
        return []
    entries = [
        {name: entry[name] for name, kind in _ENTRY.items() if _is_ours(entry.get(name), kind)}
        for entry in found
        if isinstance(entry, dict)
    ]
    return [entry for entry in entries if entry][-HISTORY:]


def _is_ours(value: Any, kind: type) -> bool:
    # Forged ones come back into our own headers, which carry neither inf nor nan nor 65 bits.
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(value, int) and abs(value) >= 2**63:
        return False
    return type(value) is kind


def copy(
    before: Properties, headers: Mapping[str, Any], *, message_id: str, frame_max: int
) -> Properties | None:
    """The properties of a copy: foreign ones as they are, ours replaced by these headers.

    Of ours, what does not fit beside the foreign ones is left out, the stack trace first. None
    where the foreign ones alone leave no room for the retry count.
    """
    cuts: tuple[tuple[str, int], ...] = (
        ("", ROOM), (names.ERROR_STACK, ROOM), (names.ATTEMPTS, ROOM), (names.ERROR_MESSAGE, ROOM),
        (names.ERROR_TYPE, 0),
    )  # fmt: skip
    left = dict(headers)
    for name, room in cuts:
        left.pop(name, None)
        made = _replaced(
            before, left, lambda name: name in _RENEWED or names.is_brokers(name), message_id
        )
        if made.frame_size() <= frame_max - room:
            return made
    return None


def returned(
    before: Properties, *, message_id: str, frame_max: int, again: bool = False
) -> Properties:
    """The properties of a copy that goes back to its main queue with its attempts as they are.

    again   it has been in other hands before, which may not have let go of it: the copy says so, as the
            broker would of a redelivery, for a run that still goes on to be joined
    """
    headers: dict[str, Any] = {}
    if again and before.header(names.CRASHES) is None:
        headers[names.CRASHES] = {"count": 0}
    return _as_fits(before, headers, names.is_brokers, message_id, frame_max)


def replayed(
    before: Properties,
    *,
    when: datetime,
    message_id: str,
    frame_max: int,
    replay: str = "",
    edited: bytes | None = None,
) -> Properties:
    """The properties of a parked message's copy with fresh attempts; its history stays.

    replay  the id of this copy, for those who ask which replay made it
    edited  the body it was parked with, where the copy has another. The first of them is kept, cut
            to what fits
    """
    last = before.header(names.REPLAYED)
    count = last.get("count", 0) if isinstance(last, dict) else 0
    count = count if isinstance(count, int) and 0 <= count < 1_000_000 else 0
    now = when.isoformat(timespec="milliseconds")
    headers: dict[str, Any] = {names.REPLAYED: {"count": count + 1, "when": now}}
    if replay:
        headers[names.REPLAYED]["id"] = replay

    def made(more: Mapping[str, Any]) -> Properties:
        return _as_fits(
            before,
            {**headers, **more},
            lambda name: name in _ENDED or names.is_brokers(name),
            message_id,
            frame_max,
        )

    if edited is None:
        return made({})
    size, body = _first_body(before) or (len(edited), edited)
    room = max(0, frame_max - ROOM - made({names.EDITED: _edit(now, size, b"")}).frame_size())
    return made({names.EDITED: _edit(now, size, body[:room])})


def _edit(when: str, size: int, body: bytes) -> dict[str, Any]:
    return {"when": when, "size": size, "body": body}


def _first_body(before: Properties) -> tuple[int, bytes] | None:
    """What an earlier edit kept."""
    kept = before.header(names.EDITED)
    if not isinstance(kept, dict):
        return None
    size, body = kept.get("size"), kept.get("body")
    return (size, body) if isinstance(size, int) and isinstance(body, bytes) else None


def replay_id(properties: Properties) -> str | None:
    """Which replay made this copy; None where none did, or an older version of ours."""
    last = properties.header(names.REPLAYED)
    found = last.get("id") if isinstance(last, dict) else None
    return found if isinstance(found, str) else None


def _as_fits(
    before: Properties,
    headers: Mapping[str, Any],
    without: Callable[[str], bool],
    message_id: str,
    frame_max: int,
) -> Properties:
    """A copy with these headers; without what foreign ones leave no room for.

    (A queue of ours is a quorum queue, which keeps a message on disk whatever its delivery mode.)
    """
    made = _replaced(before, headers, without, message_id)
    if made.frame_size() > frame_max:
        made = before.replace({}, without=without, drop=NOT_COPIED)
    return made


def _replaced(
    before: Properties,
    headers: Mapping[str, Any],
    without: Callable[[str], bool],
    message_id: str,
) -> Properties:
    """These headers in place of those; and an id, where there was none."""
    return before.replace(
        headers,
        without=without,
        drop=NOT_COPIED,
        delivery_mode=2,
        message_id=message_id if before.text("message_id") is None else None,
    )


def reason(properties: Properties) -> str:
    """Why a message is parked, in words: what the broker's death record says, or ours."""
    # Our own copies never carry a death record: where there is one, it was the broker, and whatever
    # else stands there was the publisher's.
    death = last_death(properties)
    if death is None:
        ours = properties.header(names.PARKED_REASON)
        if isinstance(ours, str):
            return ours
        return "unknown: put here by neither a worker nor the broker"
    match death.get("reason"):
        case "delivery_limit":
            # How often is not to be had: x-delivery-count counts the parking queue's deliveries.
            return "its worker died with it, or lost its connection, too often (delivery limit)"
        case "rejected":
            return "rejected by its consumer"
        case "expired":
            return "expired in its queue before a worker took it (its publisher's time limit)"
        case "maxlen":
            return "pushed out of its queue by a length limit"
    return f"dead-lettered by the broker: {death.get('reason')}"


def fingerprint(properties: Properties) -> str:
    """What a parked message has in common with those that failed in the same way.

    As a worker wrote it when it parked; else of the type of the error, or of the reason's words.
    """
    ours = properties.header(names.ERROR_FINGERPRINT)
    if last_death(properties) is None and fingerprints.is_fingerprint(ours):
        return str(ours)
    return fingerprints.of_words(failed_with(properties) or reason(properties))


def failed_with(properties: Properties) -> str | None:
    """The type of the error for which a message is parked; None where it was for something else
    than the error that it may carry: a Park's words, workers that died with it, the broker."""
    kind = properties.header(names.ERROR_TYPE)
    is_by_error = (
        isinstance(kind, str)
        and kind != _PARK
        and last_death(properties) is None
        and properties.header(names.CRASHES) is None
    )
    return str(kind) if is_by_error else None


def last_death(properties: Properties) -> dict[str, Any] | None:
    """The broker's latest death record, where there is one."""
    deaths = properties.header(names.DEATH)
    if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict):
        return deaths[0]
    return None


def origin(properties: Properties) -> str | None:
    """The main queue that a parked message came from; None where nothing tells."""
    death = last_death(properties)
    queue = death.get("queue") if death is not None else properties.header(names.ORIGIN_QUEUE)
    return queue if isinstance(queue, str) and queue else None
