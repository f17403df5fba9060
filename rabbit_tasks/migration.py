"""Migrate: a queue that cannot be changed in place is made anew under its own name.

    Q ──────► Q.migrating      away: every message is copied into a queue that waits beside it
    Q                          deleted, and declared as the app wants it
    Q ◄────── Q.migrating      back: every message again; then that queue is deleted

Which of the two there are, and whether Q is the old one, tells how far a run came that was killed;
running it again goes on from there, and nothing is lost. There twice is what was between its copy and
its ack: where we are killed, a window's worth of messages (`pour.WINDOW`); where the broker is killed,
also those whose ack it had not written to its disk yet (of a classic queue, hundreds).

One thing no client can do: delete a queue to which somebody publishes at that moment. What reaches
the broker while it deletes is confirmed to its publisher, and gone (3.10 to 4.3, classic and quorum).
So it happens only in a silence: publishers may go on all the while but for these two seconds. What
comes through an exchange need not pause: its binding leads to Q.migrating meanwhile. Nor need retries:
their queue keeps them until Q is back.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, Literal

import aiormq.exceptions as amqp
from aiormq.channel import Channel

from rabbit_tasks import declare
from rabbit_tasks.broker import LOST, RPC_TIMEOUT, Connection, connected, is_cancelled, words
from rabbit_tasks.confirms import may_publish
from rabbit_tasks.declare import Difference, Questions
from rabbit_tasks.errors import ConfigurationError, ConnectError, PublishError, TopologyError
from rabbit_tasks.management import Management
from rabbit_tasks.message import ACQUIRED_COUNT, DEATH, DELIVERY_COUNT, MIGRATING, is_brokers
from rabbit_tasks.policies import Policy, applying
from rabbit_tasks.pour import Pour
from rabbit_tasks.properties import Properties
from rabbit_tasks.settings import Settings
from rabbit_tasks.text import quoted, to_type
from rabbit_tasks.topology import Binding, Queue, Topology

AGE: Final = 2.0
"""Seconds before what a new queue has confirmed counts as kept: one that is declared half a second
before its single broker dies comes back empty (3.10 to 4.3)."""
SILENCE: Final = 2.0
"""Seconds without a message, after which we take it that nobody publishes."""
PATIENCE: Final = 10.0
"""Seconds to wait for that silence where nobody said how long."""
_PAUSE: Final = 0.2
_BRIEF: Final = 0.01
_SETTLE: Final = 2.0
"""Seconds for what is on its way by retries or bindings to become less."""
_FOR_EVER: Final = 2_147_483_647

Stage = Literal["missing", "done", "away", "between", "back"]
Told = Callable[[Literal["away", "back"], int, int], None]
"""Called after each message that was moved: where to, how many so far, and of how many."""


@dataclass(frozen=True)
class Bound:
    """A binding of the queue that is not the default exchange's."""

    exchange: str
    key: str
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Migration:
    """What is to be done for one queue, and what stands in the way: nothing has been changed yet.

    stage       missing: there is neither queue. done: it is as the app wants it. away: its messages
                go to the holding queue, all of it is still to be done. between: it is deleted.
                back: it is new, its messages come back
    """

    queue: Queue
    holding: str
    stage: Stage
    differences: tuple[Difference, ...] = ()
    messages: int = 0
    """Ready in the queue."""
    held: int = 0
    """In the holding queue, from a run that did not come to its end."""
    consumers: int = 0
    bindings: tuple[Bound, ...] = ()
    is_seen: bool = True
    """Whether the management API told of bindings, policies and messages in somebody's hands."""
    obstacles: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The queue's type now."""
        found = {d.what: d.found for d in self.differences}
        if "durable" in found:
            return "classic"  # no other can be transient
        return found.get("x-queue-type", "quorum")

    def steps(self) -> list[str]:
        """For people: what is done, in order."""
        name, holding = quoted(self.queue.name), quoted(self.holding)
        steps = []
        if self.stage == "away":
            steps.append(f"move its messages, {self.messages} now, to {holding}")
            steps.append(
                f"delete {name} and declare it as the app wants it, after {SILENCE:g} s in which "
                "nobody published to it: for that moment publishers must pause"
            )
        elif self.stage == "between":
            steps.append(f"declare {name}, which an earlier run has deleted")
        if self.stage in ("away", "between", "back"):
            held = "them" if self.stage == "away" else f"{self.held} messages"
            steps.append(f"move {held} back from {holding}, and delete that")
        return steps

    def notes(self) -> list[str]:
        """For people: what else changes, and what is not known."""
        if self.stage not in ("away", "between", "back"):
            return []
        notes = [
            f"the binding from {one.exchange} with key {one.key!r} leads to {quoted(self.holding)} "
            "meanwhile"
            for one in self.bindings
        ]
        if self.queue.role in ("retry", "crashed"):
            notes.append("the time for which its messages wait begins anew")
        if self.queue.role == "main":
            notes.append(
                "a retry that is due while the queue is not there comes within three minutes"
            )
        if not self.is_seen:
            notes.append(
                "not seen without RABBIT_TASKS_MANAGEMENT_URL: bindings that others made, policies, "
                "messages in the hands of consumers that have stopped"
            )
        return notes


@dataclass
class Migrated:
    """What a migration did."""

    away: int = 0
    back: int = 0
    gap: float | None = None
    """Seconds for which the queue was not there."""
    unnamed: int = 0
    """Messages that lost their user_id: the broker takes it from that user alone."""
    restarted: int = 0
    """Messages whose time limit, the publisher's `expiration`, begins anew."""


def stage_of(*, is_there: bool, differs: bool, is_held: bool) -> Stage:
    """How far it is, by what exists."""
    if not is_there:
        return "between" if is_held else "missing"
    if differs:
        return "away"
    return "back" if is_held else "done"


def holding_name(name: str) -> str:
    """Of the queue where the messages of this one wait."""
    holding = f"{name}.migrating"
    if len(holding) <= 255:
        return holding
    digest = hashlib.blake2s(name.encode(), digest_size=6).hexdigest()
    return f"{name[:200]}.{digest}.migrating"


def holding_queue(topology: Topology, name: str) -> Queue:
    """Where the messages of a queue wait: it loses none by itself.

    What a policy may make it give up (a time limit) goes home as a dead letter.
    """
    holding = holding_name(name)
    if any(queue.name == holding for queue in topology.queues):
        raise ConfigurationError(
            f"{quoted(holding)} is a queue of the app, and where the messages of {quoted(name)} "
            "would wait; give "
            "that consumer another queue"
        )
    return Queue(holding, "parked", name, {
        "x-queue-type": "quorum",
        "x-delivery-limit": _FOR_EVER,
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": name,
        "x-dead-letter-strategy": "at-least-once",
    })  # fmt: skip


# --- look ---------------------------------------------------------------------------------------


async def survey(
    connection: Connection, topology: Topology, name: str, management: Management | None = None
) -> Migration:
    """What `migrate` would do; changes nothing.

    ConfigurationError where it is no queue of the app; Forbidden without configure on it.
    """
    queue = next((one for one in topology.queues if one.name == name), None)
    if queue is None:
        raise ConfigurationError(
            f"the app has no queue {name!r}; its queues: rabbit-tasks topology show"
        )
    holding = holding_queue(topology, name)
    found = await declare.compare(connection, queue)
    differences = tuple(one for one in found if not one.is_missing)
    held = await declare.look(connection, holding.name)
    there = await declare.look(connection, name)
    stage = stage_of(
        is_there=there is not None, differs=bool(differences), is_held=held is not None
    )
    migration = Migration(
        queue=queue,
        holding=holding.name,
        stage=stage,
        differences=differences,
        messages=there[0] if there else 0,
        held=held[0] if held else 0,
        consumers=there[1] if there and stage == "away" else 0,
        bindings=tuple(
            Bound(one.exchange, one.key) for one in topology.bindings if one.queue == name
        ),
        is_seen=management is not None,
    )
    if stage in ("missing", "done"):
        return migration
    obstacles = list(_obstacles(migration))
    if held is not None and await declare.compare(connection, holding):
        obstacles.append(f"{holding.name} is there, and none that we made; rename or delete it")
    if stage == "away":
        obstacles += await _first_the_others(connection, topology, queue)
    if management is not None:
        bindings, more = await _by_management(management, migration)
        migration = replace(migration, bindings=bindings)
        obstacles += more
    return replace(migration, obstacles=tuple(obstacles))


def _obstacles(migration: Migration) -> Iterable[str]:
    name = migration.queue.name
    for one in migration.differences:
        if one.what == "exclusive":
            yield f"{quoted(name)} is exclusive and goes with the connection that declared it"
        elif one.what == "auto_delete":
            yield f"{quoted(name)} is auto-delete: it goes, with its messages, with its last consumer"
        elif not one.what.startswith("x-") and one.what != "durable":
            yield str(one)
    if migration.kind not in ("classic", "quorum"):
        yield f"{quoted(name)} is a {migration.kind} queue, from which nothing can be taken"


async def _first_the_others(connection: Connection, topology: Topology, queue: Queue) -> list[str]:
    """A waiting queue that somebody made by hand may drop what it cannot deliver."""
    if queue.role != "main":
        return []
    return [
        f"{quoted(one.name)} differs as well, and may lose what is due while {quoted(queue.name)} "
        "is not there; "
        f"first: {command(one.name)}"
        for one in topology.queues
        if one.main == queue.name and one.role in ("retry", "crashed")
        if any(not found.is_missing for found in await declare.compare(connection, one))
    ]


async def _by_management(
    management: Management, migration: Migration
) -> tuple[tuple[Bound, ...], list[str]]:
    """Every binding of the two queues; and what AMQP does not tell, where it stands in the way."""
    vhost, name = management.vhost, migration.queue.name
    bindings = list(migration.bindings)
    for one in (name, migration.holding):
        for row in await management.rows("queues", vhost, one, "bindings"):
            bound = Bound(row["source"], row["routing_key"], row.get("arguments") or {})
            if bound.exchange and bound not in bindings:
                bindings.append(bound)
    obstacles = []
    for kind in ("policies", "operator-policies"):
        policies = [
            Policy.of(row, is_operators=kind != "policies")
            for row in await management.rows(kind, vhost)
        ]
        policy = applying(policies, migration.holding, "quorum queue")
        limits = {"message-ttl", "expires", "max-length", "max-length-bytes", "delivery-limit",
                  "overflow"} & set(policy.definition if policy else ())  # fmt: skip
        if policy and limits:
            obstacles.append(
                f"{policy.kind} {policy.name!r} ({', '.join(sorted(limits))}) applies to "
                f"{migration.holding} as well, where messages wait; narrow its pattern for now"
            )
    if migration.stage == "away" and migration.consumers == 0:
        obstacles += await _unseen(management, name)
    return tuple(bindings), obstacles


async def _unseen(management: Management, name: str) -> list[str]:
    """Messages that would go with the queue though it looks empty; of a run that was just killed, the
    API tells so for some seconds more."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        row = await management.get("queues", management.vhost, name) or {}
        found = [
            f"{quoted(name)}: {row[key]} messages are {what}"
            for key, what in (
                ("messages_unacknowledged", "in the hands of somebody who has stopped consuming"),
                ("messages_dlx", "dead letters that their exchange does not take; mend that first"),
                ("messages_delayed", "put back for later; wait for them"),
            )
            if row.get(key)
        ]
        if not found or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(_PAUSE)


def command(name: str, *options: str) -> str:
    """What to type."""
    return to_type("topology migrate", name, *options)


# --- do -----------------------------------------------------------------------------------------


async def migrate(
    settings: Settings,
    topology: Topology,
    name: str,
    *,
    wait: timedelta | None = None,
    forget_bindings: bool = False,
    told: Told = lambda _stage, _done, _total: None,
    waits: Callable[[str], None] = lambda _why: None,
) -> Migrated:
    """Make a queue of the app anew as it is wanted, with its messages; see this module.

    wait                how long to wait for its consumers to leave, and for publishers to pause
    forget_bindings     go on where nobody can tell which bindings it has
    waits               called with what is waited for, when that begins

    TopologyError where something stands in the way: before anything was changed, or with every
    message in one of the two queues, and the text says which command goes on.
    """
    async with AsyncExitStack() as stack:
        # An alarm of the broker holds a connection that publishes, acks and all.
        consuming = await stack.enter_async_context(connected(settings, "topology migrate"))
        publishing = await stack.enter_async_context(connected(settings, "topology migrate"))
        run = _Run(consuming, publishing, settings, topology, told, waits)
        with _explained(consuming, name):
            await stack.enter_async_context(_alone(consuming, name))
            found = await survey(consuming, topology, name, Management.of(settings))
            refuse(found, forget_bindings=forget_bindings)
            if found.stage == "away":
                await run.away(found, wait)
            if found.stage in ("away", "between"):
                await run.make(found)
            if found.stage != "done":
                await run.back(found)
        return run.migrated


def refuse(migration: Migration, *, forget_bindings: bool) -> None:
    """TopologyError where it must not begin; in a line for each reason."""
    name = migration.queue.name
    if migration.stage == "missing":
        raise TopologyError(f"{quoted(name)}: missing; create it: {declare.COMMAND}")
    if migration.stage == "done":
        return
    reasons = list(migration.obstacles)
    if not migration.is_seen and not forget_bindings:
        reasons.append(
            f"{quoted(name)}: AMQP does not tell which bindings it has, and they go with it; set "
            "RABBIT_TASKS_MANAGEMENT_URL, or say --forget-bindings where there are none but the app's"
        )
    if reasons:
        raise TopologyError("\n".join(reasons))


class _Run:
    def __init__(
        self,
        consuming: Connection,
        publishing: Connection,
        settings: Settings,
        topology: Topology,
        told: Told,
        waits: Callable[[str], None],
    ) -> None:
        self.migrated = Migrated()
        self._consuming = consuming
        self._publishing = publishing
        self._patience = settings.publish_timeout.total_seconds()
        self._topology = topology
        self._told = told
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._settled_by = 0.0
        self._deleted_at = 0.0

    # --- away

    async def away(self, found: Migration, wait: timedelta | None) -> None:
        """All messages into the holding queue; the queue deleted."""
        name, holding = found.queue.name, holding_queue(self._topology, found.queue.name)
        deadline = self._loop.time() + (wait.total_seconds() if wait else 0)
        await self._consumers_gone(name, deadline)
        await self._may(found, holding)
        total, done = found.messages, 0

        def told() -> None:
            nonlocal done
            done += 1
            self.migrated.away = done
            self._told("away", done, max(total, done))

        def change(properties: Properties) -> Properties:
            return leaving(
                properties, keeps_deaths=found.queue.role == "parked",
                frame_max=self._publishing.frame_max,
            )  # fmt: skip

        bound = {one.exchange for one in found.bindings}

        def is_noise(exchange: str, properties: Properties) -> bool:
            # A dead letter is held by its own queue, and what a binding brings is led elsewhere.
            return properties.header(DEATH) is None and exchange not in bound

        async with Pour(
            self._consuming, self._publishing, name, holding.name,
            change=change, is_noise=is_noise, told=told, patience=self._patience,
        ) as pour:  # fmt: skip
            # (Now, because it is here that a missing permission to read is told.)
            await declare.declare(self._consuming, Topology((holding,), (), ()))
            await self._exchanges(found)
            pour.acks_from = self._loop.time() + AGE
            while not await self._silent(pour, found, wait):
                pass

    async def _silent(self, pour: Pour, found: Migration, wait: timedelta | None) -> bool:
        """Wait until nobody publishes, and delete the queue; False where somebody did meanwhile."""
        name = found.queue.name
        deadline: float | None = None
        while pour.quiet < SILENCE:
            await pour.flow()
            is_drained = pour.is_empty and pour.idle >= _PAUSE
            if not is_drained and self.migrated.away < found.messages:
                continue
            # What was there has gone, so the rest is new.
            now = self._loop.time()
            if deadline is None:
                deadline = now + (wait.total_seconds() if wait else PATIENCE)
                self._waits(f"for {SILENCE:g} s in which nobody publishes to {quoted(name)}")
            if now > deadline:
                raise TopologyError(
                    f"{quoted(name)}: somebody still publishes to it, and what reaches the broker "
                    "while it "
                    f"deletes a queue is lost; pause the publishers for {SILENCE + 1:g} s, or wait "
                    f"longer for a pause of theirs: {command(name, '--wait', '10m')} (what was moved is "
                    f"safe in {quoted(found.holding)}, and running it again goes on)"
                )
        for one in found.bindings:
            await self._bind(found.holding, one)
            await self._unbind(name, one)
        # Retries may come all the while; their queue keeps what this one did not confirm.
        self._settled_by = self._settled_by or self._loop.time() + _SETTLE
        while not (pour.is_empty and (pour.idle >= _PAUSE or self._loop.time() > self._settled_by)):
            await pour.flow()
        ready, consumers = await declare.look(self._consuming, name) or (0, 0)
        if consumers > 1:
            raise TopologyError(
                f"{quoted(name)}: {consumers - 1} consumer(s) came meanwhile; stop them and run it "
                "again: "
                f"{command(name)} (what was moved is safe in {quoted(found.holding)})"
            )
        if ready or pour.quiet < SILENCE:
            return False
        return await self._delete(pour, found)

    async def _delete(self, pour: Pour, found: Migration) -> bool:
        name, classic = found.queue.name, found.kind == "classic"
        if classic:
            await pour.cancel()
        else:
            await pour.rest()  # what came through a binding in its last moment
            if await declare.look(self._consuming, name) != (0, 1):
                return False
        channel = await self._consuming.open()
        self._deleted_at = self._loop.time()
        try:
            # Quorum queues answer if-empty by closing the connection (540, 3.10 to 4.3).
            await channel.queue_delete(
                name, if_empty=classic, if_unused=classic, timeout=RPC_TIMEOUT
            )
        except amqp.ChannelPreconditionFailed:
            await pour.consume()
            return False
        # What it had given us before it went is in our hands, and only there.
        await pour.rest(acks=False)
        await channel.close(timeout=RPC_TIMEOUT)
        return True

    async def _consumers_gone(self, name: str, deadline: float) -> None:
        told = False
        while (there := await declare.look(self._consuming, name)) and there[1]:
            if self._loop.time() >= deadline:
                raise TopologyError(
                    f"{quoted(name)}: {there[1]} consumer(s) are attached; stop them, or have it "
                    "wait for "
                    f"them: {command(name, '--wait', '10m')}; who: rabbitmqctl list_consumers "
                    f"-p {shlex.quote(self._consuming.vhost)}"
                )
            if not told:
                self._waits(f"for {there[1]} consumer(s) of {quoted(name)} to leave")
                told = True
            await asyncio.sleep(_PAUSE)

    async def _may(self, found: Migration, holding: Queue) -> None:
        """Ask for every permission that is needed, before anything is changed."""
        await declare.may_make(self._consuming, holding)
        for one in found.bindings:
            for queue in (found.queue.name, holding.name):
                binding = Binding(one.exchange, queue, one.key)
                await declare.may_make(self._consuming, binding)
        await may_publish(self._publishing)
        if await declare.look(self._consuming, holding.name) is None:
            with suppress(amqp.ChannelNotFoundEntity):
                async with Questions(self._consuming) as questions:
                    await questions.ask(
                        holding.name, lambda channel: _consume(channel, holding.name)
                    )

    # --- between

    async def make(self, found: Migration) -> None:
        """The queue as the app wants it."""
        queue = found.queue
        await declare.declare(self._consuming, Topology((queue,), (), ()))
        if self._deleted_at:
            self.migrated.gap = self._loop.time() - self._deleted_at

    # --- back

    async def back(self, found: Migration) -> None:
        """All messages out of the holding queue, and that deleted."""
        name, holding = found.queue.name, found.holding
        await self._exchanges(found)
        for one in found.bindings:
            await self._bind(name, one)
            await self._unbind(holding, one)
        total, done = await self._left_in(found), 0

        def told() -> None:
            nonlocal done
            done += 1
            self.migrated.back = done
            self._told("back", done, max(total, done))

        user = self._publishing.address.user

        def change(properties: Properties) -> Properties:
            kept = _kept(properties)
            self.migrated.restarted += "expiration" in kept
            self.migrated.unnamed += kept.get("user_id", user) != user
            return arriving(properties, user, keeps_deaths=found.queue.role == "parked")

        acks_from, left = self._loop.time() + AGE, total
        while left:
            async with Pour(
                self._consuming, self._publishing, holding, name,
                change=change, told=told, patience=self._patience,
            ) as pour:  # fmt: skip
                pour.acks_from = acks_from
                while not (pour.is_empty and pour.idle >= _PAUSE):
                    await pour.flow()
            left = await self._left_in(found)
        channel = await self._consuming.open()
        await channel.queue_delete(holding, timeout=RPC_TIMEOUT)
        await channel.close(timeout=RPC_TIMEOUT)

    async def _left_in(self, found: Migration) -> int:
        """Messages in the holding queue. Nobody consumes it: what it has given to somebody, and is on
        its way or in his hands, is among them only when he has gone."""
        deadline = self._loop.time() + PATIENCE
        while there := await declare.look(self._consuming, found.holding):
            ready, consumers = there
            if not consumers:
                return ready
            if self._loop.time() > deadline:
                raise TopologyError(
                    f"{quoted(found.holding)}: {consumers} consumer(s) are attached; stop them and run "
                    f"it again: {command(found.queue.name)}"
                )
            await asyncio.sleep(_BRIEF)
        return 0

    async def _exchanges(self, found: Migration) -> None:
        """Those of the app that its bindings need."""
        names = {one.exchange for one in found.bindings}
        exchanges = tuple(one for one in self._topology.exchanges if one.name in names)
        await declare.declare(self._consuming, Topology((), exchanges, ()))

    async def _bind(self, queue: str, one: Bound) -> None:
        await self._change(queue, one, Channel.queue_bind)

    async def _unbind(self, queue: str, one: Bound) -> None:
        await self._change(queue, one, Channel.queue_unbind)

    async def _change(self, queue: str, one: Bound, how: Callable[..., Awaitable[object]]) -> None:
        async def change(channel: Channel) -> None:
            await how(
                channel, queue, one.exchange, routing_key=one.key, arguments=one.arguments,
                timeout=RPC_TIMEOUT,
            )  # fmt: skip

        async with Questions(self._consuming) as questions:
            await questions.ask(queue, change)


async def _consume(channel: Channel, queue: str) -> None:
    await channel.basic_consume(queue, _nothing, timeout=RPC_TIMEOUT)


async def _nothing(_: object) -> None: ...


@asynccontextmanager
async def _alone(connection: Connection, name: str) -> AsyncIterator[None]:
    """Nobody else migrates this queue: an exclusive one is ours, and goes with our connection.

    Without the permission to create that one, the counts of consumers must do.
    """
    lock = f"{holding_name(name)}.lock"[-255:]
    deadline = asyncio.get_running_loop().time() + PATIENCE
    channel = None
    while channel is None:
        channel = await connection.open()
        try:
            await channel.queue_declare(lock, exclusive=True, timeout=RPC_TIMEOUT)
        except amqp.ChannelAccessRefused:
            break
        except amqp.ChannelLockedResource:
            # (One that was killed may still be on the broker's list for a moment.)
            if asyncio.get_running_loop().time() > deadline:
                raise TopologyError(
                    f"somebody else migrates {quoted(name)}; look again when they are done"
                ) from None
            channel = None
            await asyncio.sleep(_PAUSE)
    try:
        yield
    finally:
        if not channel.is_closed:
            with suppress(Exception):
                await channel.queue_delete(lock, timeout=RPC_TIMEOUT)
                await channel.close(timeout=RPC_TIMEOUT)


@contextmanager
def _explained(connection: Connection, name: str) -> Iterator[None]:
    """What goes wrong on the way, in a line that says where the messages are and how to go on."""
    safe = f"every message is in {quoted(name)} or {quoted(holding_name(name))}; go on: {command(name)}"
    try:
        yield
    except PublishError as error:
        raise TopologyError(f"{error}; {safe}") from error
    except ConnectError as error:
        raise ConnectError(f"{error}; {safe}", permanent=error.permanent) from error
    except amqp.ChannelAccessRefused as error:
        raise TopologyError(
            f"{quoted(name)}: {words(error)} (RABBIT_TASKS_USER); allow it: {connection.permit}"
        ) from None
    except TimeoutError:
        raise ConnectError(f"{quoted(name)}: the broker did not answer in time; {safe}") from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ConnectError(f"{quoted(name)}: connection lost; {safe}") from None
    except amqp.ChannelNotFoundEntity as error:
        raise TopologyError(f"{quoted(name)}: {words(error)}; {safe}") from None
    except (*LOST, amqp.AMQPError) as error:
        raise ConnectError(f"{quoted(name)}: connection lost ({words(error)}); {safe}") from None


# --- properties ---------------------------------------------------------------------------------

_MOST: Final = 315_360_000_000
"""Milliseconds: the longest time limit that a broker takes."""


def leaving(before: Properties, *, keeps_deaths: bool, frame_max: int) -> Properties:
    """The properties of a copy that waits: what would make it vanish there, or be refused, waits in
    a header of its own; what is true of one life in one queue alone is left out."""
    kept = {name: before.text(name) for name in ("expiration", "user_id")}
    kept = {name: text for name, text in kept.items() if text is not None}
    if not kept and not any(_is_left_out(name, keeps_deaths) for name in before.headers):
        return before

    def made(headers: dict[str, Any]) -> Properties:
        return before.replace(
            headers,
            without=lambda name: _is_left_out(name, keeps_deaths),
            drop=("expiration", "user_id"),
        )

    full = made({MIGRATING: kept} if kept else {})
    return full if full.frame_size() <= frame_max else made({})


def arriving(before: Properties, user: str, *, keeps_deaths: bool) -> Properties:
    """The properties of the message as they were, but for another's user_id (which the broker takes
    from that user alone)."""
    kept = _kept(before)
    if not any(_is_left_out(name, keeps_deaths) for name in before.headers):
        return before
    limit = kept.get("expiration", "")
    return before.replace(
        {},
        without=lambda name: _is_left_out(name, keeps_deaths),
        expiration=limit if re.fullmatch(r"[0-9]{1,12}", limit) and int(limit) <= _MOST else None,
        user_id=user if kept.get("user_id") == user else None,
    )


def _kept(properties: Properties) -> dict[str, str]:
    table = properties.header(MIGRATING)
    return {k: v for k, v in table.items() if isinstance(v, str)} if isinstance(table, dict) else {}


def _is_left_out(header: str, keeps_deaths: bool) -> bool:
    """In the parking lot, the death record is why a message is there, and no other death follows."""
    if keeps_deaths and header not in (DELIVERY_COUNT, ACQUIRED_COUNT, "CC", "BCC"):
        return header == MIGRATING
    return header == MIGRATING or is_brokers(header)
