"""A network namespace whose cable can be unplugged, without a word to who is in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.workers import is_gone

_PREFIX = "rabbit-tasks-"


class Namespace:
    """A network of its own, with a cable to ours.

    under   the command that runs a process in it
    host    our address at the cable's end
    """

    def __init__(self) -> None:
        self._name = f"{_PREFIX}{os.getpid()}"
        self._ours, self._theirs = f"rt{os.getpid()}", f"rn{os.getpid()}"
        self.under = f"ip netns exec {self._name}"
        # Of the addresses for measurements (RFC 2544), which no network has.
        block = os.getpid() % 16_384 * 4
        self.host = f"198.18.{block // 256}.{block % 256 + 1}"
        theirs = f"198.18.{block // 256}.{block % 256 + 2}"
        _ip("netns", "add", self._name)
        _ip("link", "add", self._ours, "type", "veth", "peer", self._theirs, "netns", self._name)
        _ip("addr", "add", f"{self.host}/30", "dev", self._ours)
        _ip("-n", self._name, "addr", "add", f"{theirs}/30", "dev", self._theirs)
        _ip("-n", self._name, "link", "set", self._theirs, "up")
        _ip("-n", self._name, "link", "set", "lo", "up")
        self.plug()

    def unplug(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _ip("link", "set", self._ours, "down")

    def plug(self) -> None:
        _ip("link", "set", self._ours, "up")

    def remove(self) -> None:
        _ip("link", "del", self._ours)
        _ip("netns", "del", self._name)


def _ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=30
    ).stdout


@contextmanager
def a_namespace() -> Iterator[Namespace | None]:
    """None where there are none to be had: they take Linux, its `ip`, and root."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        yield None
        return
    try:
        _remove_leftovers()
        made = Namespace()
    except subprocess.CalledProcessError:  # root in a container, without the right to
        yield None
        return
    try:
        yield made
    finally:
        made.remove()


def _remove_leftovers() -> None:
    """Of test runs that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        number = name.removeprefix(_PREFIX)
        if name != number and number.isdecimal() and is_gone(int(number)):
            _ip("netns", "del", name)
