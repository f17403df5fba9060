"""The examination: everything that is asked of the broker, over AMQP and the management API.

It changes nothing. Each question has its own time limit, and a broker that does not answer one is
asked no further.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import uuid
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import Any, Final, Literal

import aiormq.exceptions as amqp

from rabbit_tasks import declare, frames
from rabbit_tasks.app import App
from rabbit_tasks.broker import (
    CLOSE_TIMEOUT,
    LOST,
    RPC_TIMEOUT,
    Connection,
    connect,
    words,
)
from rabbit_tasks.declare import Questions
from rabbit_tasks.doctor.facts import Clients, Facts, Held, Left, Listener, Node, Quorum, Reader
from rabbit_tasks.errors import (
    ConfigurationError,
    ConnectError,
    ManagementError,
    ParkingError,
    TopologyError,
)
from rabbit_tasks.management import Management
from rabbit_tasks.migration import holding_queue
from rabbit_tasks.parking.look import taking
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.parking.staging import staging_queue
from rabbit_tasks.plan import BY_MANAGEMENT, plan
from rabbit_tasks.settings import PREFIX, Address, Settings
from rabbit_tasks.text import numbers
from rabbit_tasks.timeouts import warning_of
from rabbit_tasks.topology import Queue, Topology
from rabbit_tasks.worker import SPARE_CHANNELS

DISTRIBUTION: Final = "rabbit-tasks"
_DEFAULT_LOGIN: Final = ("guest", "guest")


async def examine(
    settings: Settings, app: App | None = None, *, exported: str | None = None
) -> Facts:
    """What is to be seen of the broker, of the app's queues on it, and of our own side.

    `exported` is the text of the app's lock file. ConfigurationError for settings that cannot be
    used; what goes wrong on the way is a fact.
    """
    addresses = settings.addresses()
    if any(address.tls for address in addresses):
        settings.tls()
    first = addresses[0]
    facts = Facts(
        clients=_clients(),
        user=first.user,
        vhost=first.vhost,
        has_default_login=any((a.user, a.password) == _DEFAULT_LOGIN for a in addresses),
        heartbeat=settings.heartbeat,
        checks_host=settings.tls_check_host,
        now=datetime.now(UTC),
    )
    async with AsyncExitStack() as stack:
        connection = await _knock(settings, facts, stack)
        if connection is None:
            return facts
        management = await _management(settings, facts)
        queues = await _queues(management, facts)
        await asyncio.gather(
            _ask_amqp(facts, settings, connection, management, queues, app, exported),
            _ask_management(facts, management, queues, connection.server_version),
        )
    return facts


def _clients() -> Clients:
    try:
        asked = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from a folder that was never installed
        asked = []
    needed = tuple(line.partition(";")[0].strip() for line in asked if "extra ==" not in line)
    installed = {}
    for name in (
        "aiormq",
        "pamqp",
        *(re.split(r"[\s<>=!~\[(]", line, maxsplit=1)[0] for line in needed),
    ):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return Clients(needed, installed, frames.MADE_FOR)


# --- the way in ---------------------------------------------------------------------------------


async def _knock(settings: Settings, facts: Facts, stack: AsyncExitStack) -> Connection | None:
    """Connect to each node that the settings name; a connection to one that lets us in."""
    urls = [url.strip() for url in settings.url.split(",") if url.strip()]
    tried = await asyncio.gather(
        *(
            _listener(settings.changed(url=url), address, stack)
            for url, address in zip(urls, settings.addresses(), strict=True)
        )
    )
    facts.listeners = tuple(listener for listener, _ in tried)
    return next((connection for _, connection in tried if connection is not None), None)


async def _listener(
    settings: Settings, address: Address, stack: AsyncExitStack
) -> tuple[Listener, Connection | None]:
    seen = partial(
        Listener, where=str(address), is_loopback=is_loopback(address.host), tls=address.tls
    )
    try:
        connection = await connect(settings, "doctor")
    except ConnectError as error:
        return seen(failure=str(error)), None
    stack.push_async_callback(connection.end)
    return seen(
        version=connection.server_version,
        asked_heartbeat=connection.asked_heartbeat,
        channel_max=connection.channel_max,
        frame_max=connection.frame_max,
        certificate_until=connection.certificate_until,
    ), connection


def is_loopback(host: str) -> bool:
    """Whether what is said there stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


# --- over AMQP ----------------------------------------------------------------------------------


async def _ask_amqp(
    facts: Facts,
    settings: Settings,
    connection: Connection,
    management: Management | None,
    queues: list[dict[str, Any]] | None,
    app: App | None,
    exported: str | None,
) -> None:
    try:
        facts.is_blocked = await _is_blocked(settings)
        if app is None:
            return
        facts.app = app.name
        facts.channels = SPARE_CHANNELS + sum(one.concurrency for one in app.consumers)
        told = (warning_of(connection.server_version, type(one)) for one in app.consumers)
        facts.handlers = tuple(text for text in told if text)
        facts.held = tuple(await _held(connection, app.topology.queues))
        facts.left = tuple(await _left(connection, app.topology, queues))
        facts.steps = tuple(
            await plan(connection, app.topology, management, queues=queues, exported=exported)
        )
    except ConnectError as error:
        facts.silence = str(error)


async def _is_blocked(settings: Settings) -> bool:
    """Whether an alarm holds publishers back. It is told to a connection that publishes, not before
    (3.10 to 4.3): so this one does, to nobody, and is given up."""
    connection = await connect(settings, "doctor")
    told = asyncio.Event()
    connection.on_blocked = lambda _: told.set()
    tasks: list[asyncio.Task[Any]] = []
    try:
        channel = await connection.open()
        with suppress(amqp.ChannelAccessRefused):
            await channel.basic_publish(b"", routing_key=f"doctor {uuid.uuid4().hex}")
        # A broker that holds us back reads on no further: it does not answer this.
        tasks = [asyncio.create_task(told.wait()), asyncio.create_task(connection.open())]
        done, _ = await asyncio.wait(
            tasks, timeout=RPC_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise ConnectError(f"{connection.address} did not answer within {RPC_TIMEOUT:g} s")
        return told.is_set()
    except LOST as error:
        raise ConnectError(f"{connection.address}: connection lost ({words(error)})") from None
    finally:
        # A broker that reads on no further answers no close either.
        await connection.end(within=0 if told.is_set() else CLOSE_TIMEOUT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _held(connection: Connection, queues: Iterable[Queue]) -> list[Held]:
    """Of those that are there, and that we may look at."""
    found = []
    async with Questions(connection) as questions:
        for queue in queues:
            with suppress(TopologyError):  # which the plan tells
                if (told := await declare.look(questions, queue.name)) is not None:
                    messages, consumers = told
                    is_lot = queue.role == "parked" and messages and not consumers
                    found.append(
                        Held(
                            queue=queue.name, role=queue.role, main=queue.main,
                            messages=messages, consumers=consumers,
                            since=await _parked_since(connection, queue.name) if is_lot else None,
                        )
                    )  # fmt: skip
    return found


async def _parked_since(connection: Connection, lot: str) -> datetime | None:
    """When the first one was parked, by a look at that one alone; None where it does not tell, or
    we may not look."""
    try:
        async with taking(connection, lot) as taken:
            taken.count = min(taken.count, 1)
            async for _, message in taken:
                return message.parked_time
    except ParkingError:
        pass
    return None


async def _left(
    connection: Connection, topology: Topology, queues: list[dict[str, Any]] | None
) -> list[Left]:
    """What a replay or a migration was killed with, if it is not at work.

    The management API's list of queues, where it is known, spares a question for each that could be
    there.
    """
    names = None if queues is None else {row.get("name") for row in queues}
    places: list[tuple[Literal["replay", "migrate"], str, str]] = []
    for queue in topology.queues:
        if queue.role == "parked":
            places.append(("replay", staging_queue(ParkingQueue.of(queue.name)), queue.main))
        with suppress(ConfigurationError):  # a queue of the app has that name
            places.append(("migrate", holding_queue(topology, queue.name).name, queue.name))
    found = []
    async with Questions(connection) as questions:
        for by, name, of in places:
            if names is not None and name not in names:
                continue
            with suppress(TopologyError):  # not ours to see, so nothing that our user has left
                if (told := await declare.look(questions, name)) is not None:
                    found.append(Left(by, name, of, told[0]))
    return found


# --- over the management API --------------------------------------------------------------------

_BY_MANAGEMENT: Final = "cluster, clients, clock"


async def _management(settings: Settings, facts: Facts) -> Management | None:
    """The management API, if it is there and answers us."""
    management = Management.of(settings)
    why = f"{PREFIX}MANAGEMENT_URL is not set"
    if management is not None:
        try:
            await management.get("whoami")  # what everybody may ask who may ask anything
            return management
        except ManagementError as error:
            why = str(error)
    facts.unseen.append((f"{_BY_MANAGEMENT}, {BY_MANAGEMENT}", why))
    return None


async def _queues(management: Management | None, facts: Facts) -> list[dict[str, Any]] | None:
    """All that the virtual host has: asked once, for everybody here, as it may be long."""
    if management is None:
        return None
    try:
        return await management.rows("queues", management.vhost)
    except ManagementError as error:
        facts.unseen.append(("quorum queues", str(error)))
        return None


async def _ask_management(
    facts: Facts,
    management: Management | None,
    queues: list[dict[str, Any]] | None,
    version: str,
) -> None:
    if management is None:
        return
    vhost = management.vhost

    async def ask(about: str, *path: str) -> Any:
        try:
            return await management.get(*path)
        except ManagementError as error:
            facts.unseen.append((about, str(error)))
            return None

    nodes, consumers, connections, deprecated, flags = await asyncio.gather(
        ask("nodes", "nodes"),
        ask("consumers", "consumers", vhost),
        ask("consumers' clients", "vhosts", vhost, "connections"),
        # (Before 3.13 there are none.)
        ask("deprecated features", "deprecated-features", "used")
        if numbers(version) >= (3, 13)
        else _nothing(),
        ask("feature flags", "feature-flags"),
    )
    if nodes is not None:
        facts.nodes = tuple(map(_node, nodes))
    if queues is not None:
        facts.quorums = tuple(_quorum(row) for row in queues if row.get("type") == "quorum")
        facts.dead_letters = {
            row["name"]: count for row in queues if (count := row.get("messages_dlx"))
        }
    if consumers is not None and connections is not None:
        facts.readers = tuple(_readers(consumers, connections))
    if deprecated is not None:
        facts.deprecated = tuple(row["name"] for row in deprecated)
    if flags is not None:
        facts.disabled_flags = tuple(
            row["name"]
            for row in flags
            if row.get("state") == "disabled" and row.get("stability") != "experimental"
        )
    facts.ahead = management.ahead


async def _nothing() -> None: ...


def _node(row: dict[str, Any]) -> Node:
    def figures(used: str, limit: str) -> tuple[int, int] | None:
        pair = row.get(used), row.get(limit)
        return pair if isinstance(pair[0], int) and isinstance(pair[1], int) else None  # type: ignore[return-value]

    return Node(
        name=row["name"],
        is_running=bool(row.get("running")),
        memory_alarm=bool(row.get("mem_alarm")),
        disk_alarm=bool(row.get("disk_free_alarm")),
        is_draining=bool(row.get("being_drained")),
        partitions=tuple(row.get("partitions") or ()),
        memory=figures("mem_used", "mem_limit"),
        disk=figures("disk_free", "disk_free_limit"),
    )


def _quorum(row: dict[str, Any]) -> Quorum:
    return Quorum(
        row["name"],
        frozenset(row.get("members") or ()),
        frozenset(row.get("online") or ()),
        row.get("leader"),
    )


def _readers(consumers: list[Any], connections: list[Any]) -> Iterable[Reader]:
    """Those whose connection is known; of a new one the management API tells it some seconds later."""
    known = {row.get("name"): row for row in connections}
    for row in consumers:
        channel = row.get("channel_details") or {}
        connection = known.get(channel.get("connection_name"))
        if connection is not None:
            yield Reader(
                row["queue"]["name"],
                connection.get("client_properties", {}).get("product") or "a client without a name",
                connection.get("user_provided_name") or connection["name"],
                channel.get("user", "?"),
            )
