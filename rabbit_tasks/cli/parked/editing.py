"""`parked replay --edit`: a parked message's body in an editor."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import typer

from rabbit_tasks import consumer as consumers
from rabbit_tasks.cli import no_constant, tell
from rabbit_tasks.consumer import Consumer
from rabbit_tasks.errors import MalformedBody, ParkingError
from rabbit_tasks.text import one_line


def edited(body: bytes, consumer: Consumer[object] | None) -> bytes | None:
    """What a person made of the body in $VISUAL, or $EDITOR; None where it is as it was.

    ParkingError where the editor fails, and where the new body is not what the consumer takes, or, no
    consumer known, no JSON any more: then it is kept, and the error says where.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        raise typer.BadParameter("which editor? Set VISUAL or EDITOR", param_hint="--edit")
    handle, name = tempfile.mkstemp(  # readable for us alone
        prefix="rabbit-tasks-", suffix=".json" if _is_json(body) else ".body"
    )
    path, is_kept = Path(name), False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
        try:
            code = subprocess.run([*shlex.split(editor), name], check=False).returncode
        except (OSError, ValueError) as error:
            raise ParkingError(
                f"{editor}: {error} (VISUAL, EDITOR); nothing was replayed"
            ) from None
        if code:
            raise ParkingError(f"{editor} ended with {code}; nothing was replayed")
        new = path.read_bytes()
        if not body.endswith(b"\n") and new.endswith(b"\n"):
            new = new.removesuffix(b"\n")  # editors end a file with one
        if new == body:
            return None
        try:
            _check(new, body, consumer)
        except ValueError as wrong:
            is_kept = True
            raise ParkingError(
                f"the edited body {one_line(str(wrong))}; nothing was replayed, it is kept in {name}"
            ) from None
        return new
    finally:
        if not is_kept:
            path.unlink(missing_ok=True)


def _check(new: bytes, old: bytes, consumer: Consumer[object] | None) -> None:
    """ValueError where a worker would park it at once, as far as we know."""
    if consumer is not None:
        try:
            consumers.decode(type(consumer), new)
        except MalformedBody as error:
            raise ValueError(f"is not what {type(consumer).__name__} takes: {error}") from None
    elif _is_json(old):
        if not _is_json(new):
            raise ValueError("is no JSON, which it was")
        tell("its consumer is not known, and so not asked: --app")


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body.decode(), parse_constant=no_constant)
    except (ValueError, RecursionError):
        return False
    return True
