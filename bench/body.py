"""The body of every message: 256 bytes of JSON."""

from __future__ import annotations

import json
from typing import Any, Final

SIZE: Final = 256


def body_of(number: int) -> dict[str, Any]:
    """Something of several fields and types; as JSON of 256 bytes."""
    body = {"id": number, "path": "/images/cat.jpg", "width": 320, "tags": ["a", "b"], "pad": ""}
    body["pad"] = "x" * (SIZE - len(json.dumps(body)))
    return body


def bytes_of(number: int) -> bytes:
    return json.dumps(body_of(number)).encode()
