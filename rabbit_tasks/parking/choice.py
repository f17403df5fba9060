"""Which parked messages: a filter, as a value. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any, Final, Self

from rabbit_tasks.parking.parked import ParkedMessage
from rabbit_tasks.text import escaped

_HEADER: Final = "header."


@dataclass(frozen=True)
class Match:
    """One FIELD=VALUE.

    FIELD is a path into the JSON body, its steps keys and list indexes from 0 with dots in between
    (`user.id`, `items.0.sku`; a key may itself have dots), or `header.NAME`. A dot in front means
    the body in any case: `.header.x` is the field of a body that has one called header.
    VALUE is compared as JSON where it is JSON, and with text as it stands there: `id=7` takes 7, 7.0
    and "7", `id='"7"'` the text alone, `ok=true` no 1. Nothing matches a field that is not there.
    """

    path: str
    value: str
    in_headers: bool = False

    @classmethod
    def of(cls, text: str) -> Self:
        """Read what was typed; ValueError where it has no field or no value."""
        name, equals, value = text.partition("=")
        path = name.removeprefix(_HEADER)
        is_header = path != name
        path = path if is_header else path.removeprefix(".")
        if not equals or not path:
            raise ValueError(
                f"{escaped(text)!r} is not FIELD=VALUE, such as user.id=7 or header.tenant=acme"
            )
        return cls(path, value, is_header)

    def takes(self, document: object) -> bool:
        """Whether the decoded body, or the headers, have such a value at that place."""
        try:
            return any(self._is_meant(found) for found in _at(document, self.path.split(".")))
        except RecursionError:
            return False

    def _is_meant(self, found: Any) -> bool:
        match found:
            case str():
                return found == self.value or _same(found, self._json)
            case bytes():
                return found.decode("utf-8", "backslashreplace") == self.value
            case datetime():
                return found.isoformat() == self.value
            case Decimal():
                return str(found) == self.value or _same(float(found), self._json)
        return _same(found, self._json)

    @cached_property
    def _json(self) -> Any:
        try:
            return json.loads(self.value)
        except (ValueError, RecursionError):
            return self.value


def _at(document: object, path: list[str]) -> Iterator[object]:
    """What stands at the path; more than one thing where keys have dots."""
    if not path:
        yield document
    elif isinstance(document, list):
        step = path[0]
        if step.isdecimal() and step.isascii() and len(step) < 10 and int(step) < len(document):
            yield from _at(document[int(step)], path[1:])
    elif isinstance(document, dict):
        for steps in range(1, len(path) + 1):
            if (key := ".".join(path[:steps])) in document:
                yield from _at(document[key], path[steps:])


def _same(found: Any, wanted: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and not true."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_same(found[k], wanted[k]) for k in wanted)
    return bool(found == wanted)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which messages are meant: those that every given filter takes; without any, all of them.

    ids         any of these, as they are or as a terminal shows them
    error       failed with this type of error, by its full or its short name
    reason      this text is in the reason that `parked list` shows, in capitals or not
    older_than  parked at least so long before `now`; a message whose time of parking is unknown is
                neither older nor newer than anything
    newer_than  parked less than so long before `now`
    match       every one of these fields has its value; a body that is not JSON has no fields
    group       its fingerprint, as `parked groups` shows it
    limit       at most so many, the oldest first; kept by whoever asks

    It remembers which ids it met; `dataclasses.replace(choice)` has met none.
    """

    ids: tuple[str, ...] = ()
    error: str | None = None
    reason: str | None = None
    older_than: timedelta | None = None
    newer_than: timedelta | None = None
    now: datetime | None = None
    match: tuple[Match, ...] = ()
    group: str | None = None
    limit: int | None = None
    _met: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.now is None and (self.older_than is not None or self.newer_than is not None):
            raise ValueError("older_than and newer_than need to know what is now")

    def __call__(self, message: ParkedMessage) -> bool:
        # (All that tell of an id are asked first: `absent` is about what is not there at all.)
        return (
            self._names(message)
            and (self.error is None or message.has_error(self.error))
            and self._explains(message)
            and self._is_of_age(message)
            and (self.group is None or message.fingerprint == self.group)
            and self._matches(message)
        )

    def _names(self, message: ParkedMessage) -> bool:
        if not self.ids:
            return True
        called = self._ids & {message.id, escaped(message.id)}
        self._met.update(called)
        return bool(called)

    @cached_property
    def _ids(self) -> frozenset[str]:
        return frozenset(self.ids)

    def _explains(self, message: ParkedMessage) -> bool:
        if self.reason is None:
            return True
        wanted, reason = self.reason.casefold(), message.reason.casefold()
        return wanted in reason or wanted in escaped(reason)

    def _is_of_age(self, message: ParkedMessage) -> bool:
        if self.now is None or (self.older_than is None and self.newer_than is None):
            return True
        if message.parked_time is None:
            return False
        age = self.now - message.parked_time
        return (self.older_than is None or age >= self.older_than) and (
            self.newer_than is None or age < self.newer_than
        )

    def _matches(self, message: ParkedMessage) -> bool:
        if not self.match:
            return True
        in_headers = [one for one in self.match if one.in_headers]
        if in_headers:
            headers = message.headers
            if not all(one.takes(headers) for one in in_headers):
                return False
        in_body = [one for one in self.match if not one.in_headers]
        if not in_body:
            return True
        try:
            document = json.loads(message.body)
        except (ValueError, RecursionError):
            return False
        return all(one.takes(document) for one in in_body)

    def absent(self, chosen: int) -> list[str]:
        """The ids that were not met; not asked of those behind the limit."""
        if self.limit is not None and chosen >= self.limit:
            return []
        return [name for name in self.ids if name not in self._met]
