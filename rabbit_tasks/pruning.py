"""Remove retry queues of older policies, once nothing is in them and nobody publishes to them.

A quorum queue is deleted with whatever is in it: if-empty and if-unused are refused (540, 3.10 to
4.3), a look over AMQP does not count dead letters on their way, and the management API is late by
seconds. Worse, a message that is published to a queue in the moment of its deletion is confirmed to
its publisher and gone (3.10 to 4.3). So, in this order:

1. No worker is connected that may publish there: each tells which topology is its. And the queue is
   surely ours: of a name, with arguments, as our policies make them, and bound to no exchange.
2. We consume from each queue that is empty and that nobody else consumes from. From now on what
   arrives comes to us, and cannot become a dead letter.
3. We wait until the management API shows our consumer: that figure, and the count of dead letters
   beside it, were taken after we came.
4. Nothing arrived, nothing is on its way, still no such worker is connected, and nobody consumes but
   we: the queue is deleted.
5. Had something arrived all the same, it came to us before the broker ended our consumer (also on
   another node than the queue's leader): the queue is made again, and that message put back into it.
   So it is where somebody else deleted the queue while we had a message of it.

What remains: somebody who is no worker of this version, publishes to a retry queue of an older
policy, and does so in the millisecond of its deletion; and our own death between 4. and 5.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import aiormq.exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from rabbit_tasks import declare, history
from rabbit_tasks.app import App
from rabbit_tasks.broker import LOST, RPC_TIMEOUT, Connection, connected
from rabbit_tasks.declare import Questions
from rabbit_tasks.errors import (
    ConfigurationError,
    ConnectError,
    ManagementError,
    PublishError,
    TopologyError,
)
from rabbit_tasks.frames import properties_of
from rabbit_tasks.management import Management
from rabbit_tasks.plan import PRUNE
from rabbit_tasks.publisher import Publisher, new_id
from rabbit_tasks.settings import Settings
from rabbit_tasks.stale import not_ours, stale_names
from rabbit_tasks.text import quoted
from rabbit_tasks.topology import waiting_for

log = logging.getLogger("rabbit_tasks")

T = TypeVar("T")

NEEDS: Final = (
    f"{PRUNE} needs the management API, set RABBIT_TASKS_MANAGEMENT_URL: AMQP tells neither which "
    "queues there are nor whether dead letters are still on their way out of one"
)
PATIENCE: Final = 40.0
"""Seconds for figures that were taken after we came; by default the broker takes them every 5 s, and
the management API shows them up to 5 s later."""
_EVERY: Final = 0.5
"""Seconds between two looks at them."""
_PAUSE: Final = 1.0
"""Seconds before a message is put back once more, where the broker did not take it."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Pruned:
    """What became of one retry queue of an older policy."""

    name: str
    kept: str | None = None
    """Why it is still there; None where it is removed."""


@dataclass
class _Watch:
    """Our consumer on a queue that is to go."""

    name: str
    arguments: dict[str, Any]
    channel: Channel
    arrived: list[DeliveredMessage] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_message(self, message: DeliveredMessage) -> None:
        self.arrived.append(message)


async def prune(
    settings: Settings,
    app: App,
    *,
    told: Callable[[list[str]], None] = lambda _names: None,
    done: Callable[[Pruned], None] = lambda _pruned: None,
) -> list[Pruned]:
    """Remove the stale retry and crashed queues of the app's main queues; what became of each.

    One that holds anything is kept, and what waits there goes home in its time. `told` is called
    with the names before the wait for the broker's figures of them, `done` with each as soon as it is
    removed or kept. TopologyError while a worker of another topology of this app is connected, or a
    permission is missing; ConfigurationError without the management API, ManagementError where it does
    not tell enough, ConnectError that names those that were removed before the connection was lost.
    """
    management = Management.of(settings)
    if management is None:
        raise ConfigurationError(NEEDS)
    rows = await _queues(management)
    names = stale_names(app.topology, rows)
    if not names:
        return []
    await _nobody_else(management, app)
    bindings = await management.rows("bindings", management.vhost)
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(connected(settings, "topology prune"))
        publisher = await stack.enter_async_context(Publisher.open(settings))
        found: dict[str, Pruned] = {}
        watches: dict[str, _Watch] = {}

        def settle(one: Pruned) -> None:
            found[one.name] = one
            done(one)

        async def remove(watch: _Watch) -> None:
            settle(await _remove(connection, publisher, watch))

        for name in names:
            kept = not_ours(name, rows[name], bindings) or await _in_use(
                connection, name, rows[name]
            )
            if kept is not None:
                settle(Pruned(name, kept))
            else:
                watches[name] = await _watch(connection, publisher, name, rows[name], stack)
        if watches:
            told(list(watches))
        for name, kept in (await _settled(management, watches)).items():
            settle(Pruned(name, kept))
            del watches[name]
        if watches:
            await _nobody_else(management, app)
        for watch in watches.values():
            try:
                await _to_its_end(remove(watch))
            except ConnectError as error:
                gone = ", ".join(one.name for one in found.values() if one.kept is None)
                raise ConnectError(
                    f"{error}; removed before: {gone or 'nothing'}; again: {PRUNE}"
                ) from None
    return [found[name] for name in names]


async def _queues(management: Management) -> dict[str, Row]:
    return {str(row.get("name")): row for row in await management.rows("queues", management.vhost)}


# --- 1. who publishes there -----------------------------------------------------------------------


async def _nobody_else(management: Management, app: App) -> None:
    """TopologyError where a worker is connected that may publish to a queue of an older policy."""
    whoami = await management.get("whoami")
    tags = whoami.get("tags", ()) if isinstance(whoami, dict) else ()
    tags = tags.split(",") if isinstance(tags, str) else tags
    if not {"monitoring", "administrator"} & set(tags):
        # Without them it shows nobody's connections but the user's own.
        name = whoami.get("name", "USER") if isinstance(whoami, dict) else "USER"
        raise ManagementError(
            f"the management API at {management.host} shows user {name!r} only its own connections, "
            "and a worker of an older version may be among the others: "
            f"rabbitmqctl set_user_tags {name} monitoring"
        )
    others = []
    for row in await management.rows("vhosts", management.vhost, "connections"):
        told = row.get("client_properties")
        told = told if isinstance(told, dict) else {}
        name = str(row.get("user_provided_name") or told.get("connection_name") or "")
        if "topology" in told:
            if told.get("app") == app.name and told["topology"] != app.topology.digest:
                others.append(f"{name} (its topology is {told['topology']})")
        elif name.startswith("rabbit-tasks worker "):
            others.append(f"{name} (of a version that does not tell its topology)")
    if others:
        raise TopologyError(
            f"workers of another topology than {app.topology.digest} are connected and may publish to "
            f"the queues that are to go: {'; '.join(sorted(set(others)))}; stop them or start them "
            f"anew with this version, then: {PRUNE}"
        )


# --- 2. and 3. what is in it ----------------------------------------------------------------------


async def _in_use(connection: Connection, name: str, row: Row) -> str | None:
    """Why this queue stays, as far as can be seen without touching it."""
    found = await declare.look(connection, name)
    if found is None:
        return "somebody else removed it"
    ready, consumers = found
    if ready:
        return f"{_messages(ready)} in it, to go home to {quoted(waiting_for(name) or name)}"
    if consumers or row.get("consumers"):
        return "somebody consumes from it, or did so a moment ago: is another prune at work?"
    return None


async def _watch(
    connection: Connection, publisher: Publisher, name: str, row: Row, stack: AsyncExitStack
) -> _Watch:
    channel = await connection.open()
    watch = _Watch(name, dict(row.get("arguments") or {}), channel)
    stack.push_async_callback(_leave, publisher, watch)
    channel.on_consumer_cancel_callbacks.add(lambda _: watch.ended.set())
    async with Questions(connection) as questions:
        await questions.ask(name, lambda _: _consume(channel, watch))
    return watch


async def _consume(channel: Channel, watch: _Watch) -> None:
    # As many as come: what would not fit into a prefetch count might expire in the queue.
    await channel.basic_consume(
        watch.name, watch.on_message, consumer_tag=f"rabbit-tasks.{uuid.uuid4().hex}",
        timeout=RPC_TIMEOUT,
    )  # fmt: skip


async def _leave(publisher: Publisher, watch: _Watch) -> None:
    """What came to us goes back to where it was."""
    with suppress(Exception):
        await watch.channel.close(timeout=RPC_TIMEOUT)
    if watch.ended.is_set():  # where it was is no more
        await _to_its_end(_put_all_back(publisher, watch))


async def _settled(management: Management, watches: Mapping[str, _Watch]) -> dict[str, str]:
    """Which of them stay, and why; returns when the figures of all were taken after we came."""
    kept: dict[str, str] = {}
    waiting = set(watches)
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while waiting:
        rows = await _queues(management)
        for name in sorted(waiting):
            row, watch = rows.get(name, {}), watches[name]
            if watch.arrived:
                kept[name] = "a message was published to it just now: who does that?"
            elif watch.ended.is_set() or not row:
                kept[name] = "somebody else removed it"
            elif row.get("consumers") and (held := row.get("messages_dlx")) is not None:
                if held:
                    kept[name] = (
                        f"{held} dead letter{'s' if held != 1 else ''} on the way out of it: does "
                        f"{quoted(waiting_for(name) or name)} take them? rabbit-tasks topology check"
                    )
            else:
                continue
            waiting.discard(name)
        if waiting and asyncio.get_running_loop().time() > deadline:
            raise ManagementError(
                f"the management API at {management.host} had no figures of {min(waiting)} "
                f"within {PATIENCE:g} s that are newer than our own consumer there (are its statistics "
                "switched off, management_agent.disable_metrics_collector?); nothing was removed"
            )
        if waiting:
            await asyncio.sleep(_EVERY)
    return kept


# --- 4. and 5. remove it --------------------------------------------------------------------------


async def _remove(connection: Connection, publisher: Publisher, watch: _Watch) -> Pruned:
    if watch.arrived:
        return Pruned(watch.name, "a message was published to it just now: who does that?")
    _, consumers = await declare.look(connection, watch.name) or (0, 0)
    if consumers > 1:  # and may have been given what is published to it
        return Pruned(
            watch.name, "somebody else consumes from it by now: is another prune at work?"
        )
    try:
        async with Questions(connection) as questions:
            await questions.ask(watch.name, partial(_delete, name=watch.name))
            # Before this comes whatever the queue had confirmed before it was deleted.
            async with asyncio.timeout(RPC_TIMEOUT):
                await watch.ended.wait()
    except (ConnectError, TimeoutError) as error:
        why = str(error) or f"{watch.name}: our consumer there was not ended"
        if await declare.look(await publisher.connect(), watch.name) is not None:
            raise ConnectError(why) from None  # and what had come to us is there again
        log.warning("%s; but it is removed", why)
    if not watch.arrived:
        return Pruned(watch.name)
    count = len(watch.arrived)
    await _put_all_back(publisher, watch)
    return Pruned(
        watch.name,
        f"{_messages(count)} published to it as it was removed: it was made again, with "
        "them in it; who does that?",
    )


async def _delete(channel: Channel, name: str) -> None:
    await channel.queue_delete(name, timeout=RPC_TIMEOUT)


async def _put_all_back(publisher: Publisher, watch: _Watch) -> None:
    while watch.arrived:
        await _put_back(publisher, watch, watch.arrived[0])
        del watch.arrived[0]


async def _put_back(publisher: Publisher, watch: _Watch, message: DeliveredMessage) -> None:
    """Until the broker has confirmed it, however long that takes: we have the only copy."""
    while True:
        try:
            connection = await publisher.connect()
            async with Questions(connection) as questions:
                await questions.ask(watch.name, partial(_make, watch=watch))
            properties = history.returned(
                properties_of(message), message_id=new_id(), frame_max=connection.frame_max
            )
            await publisher.send("", watch.name, message.body, properties)
            return
        except (PublishError, ConnectError, TopologyError, amqp.AMQPError, *LOST) as error:
            log.warning("%s: a message of its is still in our hands (%s)", watch.name, error)
            await asyncio.sleep(_PAUSE)


async def _make(channel: Channel, watch: _Watch) -> None:
    await channel.queue_declare(
        watch.name, durable=True, arguments=watch.arguments, timeout=RPC_TIMEOUT
    )


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result, also where we are cancelled meanwhile: that counts when it is done."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _quietly(task)
        raise


async def _quietly(task: Awaitable[Any]) -> None:
    with suppress(Exception):
        await task


def _messages(count: int) -> str:
    return f"{count} message{'s' if count != 1 else ''}"
