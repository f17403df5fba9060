"""The examination: everything that is asked of the broker, over AMQP and the management API.

It changes nothing. Each question has its own time limit, and a broker that does not answer one is
asked no further.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import Any, Final

import aiormq.exceptions as amqp
from aiormq.channel import Channel

from rabbit_tasks import declare, frames
from rabbit_tasks.app import App
from rabbit_tasks.broker import (
    CLOSE_TIMEOUT,
    LOST,
    RPC_TIMEOUT,
    Connection,
    connect,
    is_cancelled,
    words,
)
from rabbit_tasks.doctor.facts import Clients, Facts, Held, Listener, Node, Quorum, Reader
from rabbit_tasks.errors import ConnectError, ManagementError, TopologyError
from rabbit_tasks.management import Management
from rabbit_tasks.settings import Address, Settings
from rabbit_tasks.timeouts import warning_of
from rabbit_tasks.topology import PARKING_LOT, Queue
from rabbit_tasks.worker import SPARE_CHANNELS

DISTRIBUTION: Final = "rabbit-tasks"
_DEFAULT_LOGIN: Final = ("guest", "guest")
Call = Callable[[Channel], Awaitable[object]]


async def examine(settings: Settings, app: App | None = None) -> Facts:
    """What is to be seen of the broker, of the app's queues on it, and of our own side.

    ConfigurationError for settings that cannot be used; what goes wrong on the way is a fact.
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
        facts.permit = connection.permit
        await asyncio.gather(
            _ask_amqp(facts, settings, connection, app), _ask_management(facts, settings)
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
    facts: Facts, settings: Settings, connection: Connection, app: App | None
) -> None:
    try:
        facts.is_blocked = await _is_blocked(settings)
        if app is None:
            return
        facts.app = app.name
        facts.channels = SPARE_CHANNELS + sum(one.concurrency for one in app.consumers)
        told = (warning_of(connection.server_version, type(one)) for one in app.consumers)
        facts.handlers = tuple(text for text in told if text)
        facts.worker_refusals = tuple(await _worker_refusals(connection, app))
        facts.missing = tuple(await declare.missing(connection, app.topology))
        facts.held = tuple(await _held(connection, app.topology.queues))
        try:
            found = await declare.check(connection, app.topology)
        except TopologyError as error:
            facts.unseen.append(("arguments of the queues", str(error)))
        else:
            facts.differences = tuple(one for one in found if not one.is_missing)
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


async def _worker_refusals(connection: Connection, app: App) -> list[str]:
    """What a worker of the app needs and our user may not, without doing any of it.

    The broker looks at permissions first (3.10 to 4.3): at reading, before it sees that a consumer
    cannot have such a priority; at writing, before it sees that nothing is unbound from the default
    exchange.
    """
    refused = []
    for consumer in app.consumers:
        refused += await _refusal(connection, partial(_consume, queue=consumer.queue))
    for exchange in ("", PARKING_LOT):
        refused += await _refusal(connection, partial(_unbind, exchange=exchange))
    return refused


async def _refusal(connection: Connection, call: Call) -> list[str]:
    try:
        async with _channel(connection) as channel:
            await call(channel)
    except amqp.ChannelAccessRefused as error:
        return [] if "default exchange" in words(error) else [words(error)]
    except (amqp.ChannelPreconditionFailed, amqp.ChannelNotFoundEntity):
        pass
    return []


async def _consume(channel: Channel, queue: str) -> None:
    async def none(_: object) -> None: ...

    await channel.basic_consume(queue, none, arguments={"x-priority": "none"}, timeout=RPC_TIMEOUT)


async def _unbind(channel: Channel, exchange: str) -> None:
    await channel.exchange_unbind(destination=exchange, source="", timeout=RPC_TIMEOUT)


async def _held(connection: Connection, queues: Iterable[Queue]) -> list[Held]:
    """Of those that are there, and that we may look at."""
    found = []
    for queue in queues:
        with suppress(
            amqp.ChannelNotFoundEntity, amqp.ChannelAccessRefused, amqp.ChannelLockedResource
        ):
            async with _channel(connection) as channel:
                answer = await channel.queue_declare(queue.name, passive=True, timeout=RPC_TIMEOUT)
                found.append(
                    Held(
                        queue=queue.name, role=queue.role, main=queue.main,
                        messages=answer.message_count or 0, consumers=answer.consumer_count or 0,
                    )
                )  # fmt: skip
    return found


@asynccontextmanager
async def _channel(connection: Connection) -> AsyncIterator[Channel]:
    """A channel for one question; ConnectError where the broker does not answer any more."""
    where = connection.address
    channel = None
    try:
        channel = await connection.open()
        yield channel
    except TimeoutError:
        raise ConnectError(f"{where} did not answer within {RPC_TIMEOUT:g} s") from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ConnectError(f"{where}: connection lost") from None
    except LOST as error:
        if connection.is_lost:
            raise ConnectError(f"{where}: connection lost ({words(error)})") from None
        raise
    finally:
        if channel is not None and not channel.is_closed and not connection.is_lost:
            with suppress(Exception):
                await channel.close(timeout=RPC_TIMEOUT)


# --- over the management API --------------------------------------------------------------------

_BY_MANAGEMENT: Final = "cluster, policies, clients, clock"


async def _ask_management(facts: Facts, settings: Settings) -> None:
    management = Management.of(settings)
    if management is None:
        facts.unseen.append((_BY_MANAGEMENT, "RABBIT_TASKS_MANAGEMENT_URL is not set"))
        return
    vhost = management.vhost
    try:
        await management.get("whoami")  # what everybody may ask who may ask anything
    except ManagementError as error:
        facts.unseen.append((_BY_MANAGEMENT, str(error)))
        return

    async def ask(about: str, *path: str) -> Any:
        try:
            return await management.get(*path)
        except ManagementError as error:
            facts.unseen.append((about, str(error)))
            return None

    nodes, queues, consumers, connections, deprecated, flags = await asyncio.gather(
        ask("nodes", "nodes"),
        ask("quorum queues", "queues", vhost),
        ask("consumers", "consumers", vhost),
        ask("consumers' clients", "vhosts", vhost, "connections"),
        ask("deprecated features", "deprecated-features", "used"),
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
    clients = {
        row.get("name"): (
            row.get("client_properties", {}).get("product") or "unknown",
            row.get("user_provided_name") or row.get("name"),
        )
        for row in connections
    }
    for row in consumers:
        channel = row.get("channel_details") or {}  # none, a moment after it went
        client, name = clients.get(
            channel.get("connection_name"), ("unknown", channel.get("connection_name", "?"))
        )
        yield Reader(row["queue"]["name"], client, name, channel.get("user", "?"))
