"""What two failures have in common when they are one: a fingerprint. Pure.

Of an error: its type and the functions in which it was raised, and the same of what caused it. No
text, since texts have ids in them, and no line numbers: an edit elsewhere in the file must not make
two failures of one. Of a reason that is only words: the words without what varies.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType
from typing import Final

from rabbit_tasks.errors import MalformedBody, Park

FRAMES: Final = 5
"""Functions of one error that count, the innermost ones; each once, since recursion varies."""
CAUSES: Final = 5
"""Errors of one chain of causes that count; each once, since tries vary."""
_WIDTH: Final = 100
_TEXT: Final = 300
# What lies outside of a handler depends on where it runs: in the loop, a thread, a child process.
_AROUND: Final = frozenset(
    {"rabbit_tasks.delivery", "rabbit_tasks.handler", "rabbit_tasks.isolation"}
)
# Functions of their own before Python 3.12 only.
_INLINED: Final = ("<listcomp>", "<dictcomp>", "<setcomp>")
_SCRIPTS: Final = ("__main__", "__mp_main__")
_FORM: Final = re.compile(r"[0-9a-f]{12}")
# Whatever stands in quotes, and every word with a digit in it.
_VARIES: Final = re.compile(r"\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)|[\w-]*\d[\w.:+-]*")


def is_fingerprint(text: object) -> bool:
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


def of_error(error: BaseException) -> str:
    """12 hexadecimal digits, whatever the error's class does.

    A body that did not decode is told by the codes of its faults, a Park by the words of its reason.
    """
    try:
        return _digest(_parts(error, CAUSES))
    except BaseException:  # (a class may raise even out of its __traceback__)
        return _digest([_name(type(error))])


def of_words(text: str) -> str:
    """The same for all texts that differ in numbers, in what is quoted, and in words with digits."""
    return _digest(["words", _VARIES.sub("#", text[:_TEXT])])


def _digest(parts: list[str]) -> str:
    raw = "\n".join(parts).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(raw, digest_size=6).hexdigest()


def _parts(error: BaseException, depth: int) -> list[str]:
    kind = type(error)  # (isinstance asks the error itself, whose class may raise anything)
    if issubclass(kind, MalformedBody):
        assert isinstance(error, MalformedBody)
        return [_name(kind), error.codes]
    if issubclass(kind, Park):
        return [_name(kind), of_words(str(getattr(error, "reason", error)))]
    found: dict[str, None] = {}
    for one in _chain(error):
        entry = [_name(type(one)), *_functions(one)]
        if issubclass(type(one), BaseExceptionGroup) and depth:
            assert isinstance(one, BaseExceptionGroup)
            entry += sorted({_digest(_parts(part, depth - 1)) for part in one.exceptions[:_WIDTH]})
        found["\n".join(entry)] = None
    return list(found)[:CAUSES]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, as a stack trace tells them."""
    met: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in met and len(met) < _WIDTH:
        met.add(id(one))
        yield one
        is_told = one.__cause__ is None and not one.__suppress_context__
        one = one.__context__ if is_told else one.__cause__


def _functions(error: BaseException) -> list[str]:
    """Where it was raised, innermost first."""
    frames: list[FrameType] = []
    step = error.__traceback__
    while step is not None:
        if is_around(step.tb_frame):
            frames = []
        else:
            frames.append(step.tb_frame)
        step = step.tb_next
    found: dict[str, None] = {}
    for frame in reversed(frames):
        if frame.f_code.co_name not in _INLINED:
            found[f"{_module(frame)}:{frame.f_code.co_qualname}"] = None
        if len(found) == FRAMES:
            break
    return list(found)


def is_around(frame: FrameType) -> bool:
    """Whether it is ours, between the worker and the handler."""
    return _module(frame) in _AROUND


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    if type(name) is str and name not in _SCRIPTS:
        return name
    return PurePath(frame.f_code.co_filename).stem


def _name(kind: type[BaseException]) -> str:
    module = _SCRIPTS[0] if kind.__module__ in _SCRIPTS else kind.__module__
    return f"{module}.{kind.__qualname__}"
