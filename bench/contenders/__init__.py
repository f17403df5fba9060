"""Who competes: one small file each, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from bench.contender import Contender

OURS: Final = "rabbit_tasks"
RAW: Final = ("aio-pika", "aiormq")
"""Hand-written, with the same guarantees."""
PEERS: Final = ("celery", "dramatiq", "taskiq", "faststream")


def kind_of(name: str) -> type[Contender]:
    """The class of a contender; ImportError where what it needs is not installed."""
    module = import_module(f"bench.contenders.{name.replace('-', '_')}")
    kind: type[Contender] = module.Entry
    return kind


def version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "?"
