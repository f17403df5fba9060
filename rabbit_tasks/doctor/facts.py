"""What the doctor saw, as values. None is what was not looked at; `unseen` says why. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from rabbit_tasks.plan import Step

Role = Literal["main", "retry", "crashed", "parked"]


@dataclass(frozen=True)
class Clients:
    """The libraries that we stand on."""

    asked: tuple[str, ...]
    """What our package's metadata asks for: `aiormq<8,>=7.2`."""
    installed: Mapping[str, str]
    """Versions, by name; absent is not installed."""
    made_for: str
    """The version of aiormq whose frames we read."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """One address of the settings' URL, and what was said there."""

    where: str
    is_loopback: bool
    tls: bool
    failure: str | None = None
    """Why there is no connection; then the rest is unknown."""
    version: str = "?"
    asked_heartbeat: int | None = None
    channel_max: int = 65_535
    frame_max: int = 131_072
    certificate_until: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster, as the management API tells."""

    name: str
    is_running: bool = True
    memory_alarm: bool = False
    disk_alarm: bool = False
    is_draining: bool = False
    partitions: tuple[str, ...] = ()
    memory: tuple[int, int] | None = None
    """Bytes in use, and at which the alarm is raised."""
    disk: tuple[int, int] | None = None
    """Bytes free, and below which the alarm is raised."""


@dataclass(frozen=True)
class Quorum:
    """The nodes that have a quorum queue."""

    queue: str
    members: frozenset[str]
    online: frozenset[str]
    leader: str | None


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a queue has, as a passive declare tells."""

    queue: str
    role: Role
    main: str
    messages: int
    consumers: int
    since: datetime | None = None
    """Of a parking queue: when its first message was parked."""


@dataclass(frozen=True)
class Left:
    """A queue that a replay or a migration has left behind, or is using at this moment."""

    by: Literal["replay", "migrate"]
    queue: str
    of: str
    """The queue whose messages it took."""
    messages: int


@dataclass(frozen=True)
class Reader:
    """A consumer on a queue, as the management API tells."""

    queue: str
    client: str
    """The product that it says it is."""
    connection: str
    user: str

    @property
    def is_ours(self) -> bool:
        return self.client == "rabbit_tasks"


@dataclass(kw_only=True)
class Facts:
    """Filled in while the doctor looks."""

    clients: Clients
    user: str
    vhost: str
    has_default_login: bool
    heartbeat: timedelta
    checks_host: bool = True
    now: datetime
    listeners: tuple[Listener, ...] = ()
    is_blocked: bool | None = None
    """Whether a connection that publishes is held back."""

    app: str | None = None
    channels: int = 0
    """That a worker of all its queues opens on one connection."""
    handlers: tuple[str, ...] = ()
    """What this broker does to handlers that take long."""
    steps: tuple[Step, ...] | None = None
    """What stands between the app and this broker: the plan."""
    held: tuple[Held, ...] | None = None
    left: tuple[Left, ...] = ()

    nodes: tuple[Node, ...] | None = None
    quorums: tuple[Quorum, ...] | None = None
    readers: tuple[Reader, ...] | None = None
    dead_letters: Mapping[str, int] | None = None
    """Per queue, how many dead letters it holds because nobody takes them."""
    deprecated: tuple[str, ...] | None = None
    """Deprecated features that somebody uses."""
    disabled_flags: tuple[str, ...] | None = None
    """Stable feature flags that are off."""
    ahead: timedelta | None = None
    """How far the broker's clock is ahead of ours."""

    silence: str | None = None
    """Why the broker was asked no further."""
    unseen: list[tuple[str, str]] = field(default_factory=list)
    """What was not looked at, and why."""
