"""Make the broker match a topology, or say how it differs.

Over AMQP alone. A passive declare tells whether a queue exists, and compares nothing; declaring a
queue that exists changes nothing, and the refusal (406) names the first argument that differs. Put
what the broker has in its place and declare again, and every difference comes out.
"""

from __future__ import annotations

import re
import shlex
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self
from urllib.parse import quote

import aiormq.exceptions as amqp
from aiormq.channel import Channel

from rabbit_tasks.broker import LOST, RPC_TIMEOUT, Connection, words
from rabbit_tasks.errors import ConnectError, Forbidden, TopologyError
from rabbit_tasks.lookup import Lookup
from rabbit_tasks.text import quoted, to_type
from rabbit_tasks.topology import Arguments, Binding, Exchange, Queue, Topology

COMMAND: Final = "rabbit-tasks topology declare"

# "received none but current is the value '5' of type 'byte'", "received '6' but current is '5'" …
_DIFFERS: Final = re.compile(
    r"inequivalent arg '(?P<name>.+?)' for .+: "
    r"received (?:the value )?(?P<wanted>none|'.*?')(?: of type '\w+')? "
    r"but current is (?:the value )?(?P<found>none|'.*?')(?: of type '\w+')?$",
    re.DOTALL,
)


@dataclass(frozen=True)
class Difference:
    """One thing in which the broker is not as the topology: a row for a person."""

    name: str
    """The queue or exchange."""
    what: str
    """The argument that differs, or `missing`."""
    wanted: str
    found: str
    remedy: str

    @property
    def is_missing(self) -> bool:
        return self.what == "missing"

    @property
    def says(self) -> str:
        """What stands behind its name, without the remedy."""
        return (
            "missing" if self.is_missing else f"{self.what} is {self.found}, wanted {self.wanted}"
        )

    def __str__(self) -> str:
        return f"{quoted(self.name)}: {self.says}; {self.remedy}"


async def check(connection: Connection, topology: Topology) -> list[Difference]:
    """How the broker differs from the topology; creates and changes nothing.

    Bindings cannot be read over AMQP; `declare` makes them sure. TopologyError where a permission
    is missing that the comparison needs (configure on the queue).
    """
    found: list[Difference] = []
    async with Questions.of(connection) as questions:
        for part in topology.parts:
            found += await compare(questions, part)
    return found


async def compare(by: Connection | Questions, part: Exchange | Queue) -> list[Difference]:
    """How the broker has this one differently; as `check`. Forbidden without configure on it."""
    async with Questions.of(by) as questions:
        if isinstance(part, Exchange):
            return await _compare_exchange(questions, part)
        return await _compare_queue(questions, part)


async def declare(connection: Connection, topology: Topology) -> list[str]:
    """Create what is missing, after everything has been checked; the names that were created.

    Idempotent, and safe from many processes at once. TopologyError where something exists with
    other arguments (one line per difference) or a permission is missing: then nothing was created.
    """
    differences = await check(connection, topology)
    different = [d for d in differences if not d.is_missing]
    if different:
        raise TopologyError("\n".join(str(d) for d in different))
    absent = {d.name for d in differences}
    queues = [queue for queue in topology.queues if queue.name in absent]
    exchanges = [exchange for exchange in topology.exchanges if exchange.name in absent]
    parts: list[Exchange | Queue | Binding] = [*exchanges, *queues, *topology.bindings]
    async with Questions.of(connection) as questions:
        for part in parts:
            await may_make(questions, part)
        for exchange in exchanges:
            await _create(questions, exchange.name, partial(_declare_exchange, exchange=exchange))
        for queue in queues:
            await _create(questions, queue.name, partial(_declare_queue, queue=queue))
        for binding in topology.bindings:
            await _create(questions, binding.queue, partial(_bind, binding=binding))
    return sorted(absent)


async def missing(connection: Connection, topology: Topology) -> list[str]:
    """The queues and exchanges that are not there; needs no configure permission."""
    lookup = Lookup(connection, topology.parts)
    async with Questions.of(connection) as questions:
        while not lookup.is_over:
            await questions.ask(lookup, lookup.go_on)
    return lookup.absent


async def may_make(by: Connection | Questions, part: Exchange | Queue | Binding) -> None:
    """Have the broker check our permissions for one that is not there, and make nothing.

    Forbidden, and what else `declare` raises. (It looks at them before it looks at anything else,
    from 3.10 to 4.3: so each is asked for with something that it refuses afterwards.)
    """
    async with Questions.of(by) as questions:
        if isinstance(part, Binding):
            # Taking away a binding that never was changes nothing and needs the same permissions.
            probe = replace(part, key=f"permission probe {uuid.uuid4().hex}")
            with suppress(amqp.ChannelNotFoundEntity):
                await questions.ask(part.queue, partial(_unbind, binding=probe))
        elif isinstance(part, Queue):
            queue = replace(part, arguments={**part.arguments, "x-queue-type": "none"})
            await _refusal(questions, part.name, partial(_declare_queue, queue=queue))
        else:
            await _refusal(questions, part.name, partial(_declare_nothing, name=part.name))


async def look(by: Connection | Questions, name: str) -> tuple[int, int] | None:
    """Messages that are ready in a queue, and its consumers; None where there is no such queue.

    Neither messages in somebody's hands nor dead letters that are on their way are among them.
    TopologyError for an exclusive queue of another connection; Forbidden where we may not look.
    """
    found: tuple[int, int] | None = None

    async def ask(channel: Channel) -> None:
        nonlocal found
        answer = await channel.queue_declare(name, passive=True, timeout=RPC_TIMEOUT)
        found = answer.message_count or 0, answer.consumer_count or 0

    async with Questions.of(by) as questions:
        try:
            await questions.ask(name, ask)
        except amqp.ChannelNotFoundEntity:
            return None
        except amqp.ChannelLockedResource:
            raise TopologyError(
                f"{quoted(name)}: an exclusive queue of another connection; {_owner(questions)}"
            ) from None
    return found


# --- one object ---------------------------------------------------------------------------------


async def _compare_exchange(questions: Questions, exchange: Exchange) -> list[Difference]:
    name = exchange.name
    if not await _exists(questions, name, partial(_look_for_exchange, name=name)):
        return [_missing(name)]
    refusal = await _refusal(questions, name, partial(_declare_exchange, exchange=exchange))
    if refusal is None:
        return []
    connection = questions.connection
    host, vhost = connection.address.host, connection.vhost
    path = f"{quote(vhost, safe='')}/{quote(exchange.name, safe='')}"
    remedy = (
        "it cannot be changed in place: delete it on the management page (or curl -u USER -X DELETE "
        f"http://{host}:15672/api/exchanges/{path}) and run {COMMAND}"
    )
    return [Difference(exchange.name, *refusal, remedy)]


async def _compare_queue(questions: Questions, queue: Queue) -> list[Difference]:
    if not await _exists(questions, queue.name, partial(_look_for_queue, name=queue.name)):
        return [_missing(queue.name)]
    remedy = (
        "it cannot be changed in place: set it back in the consumer class, or make it anew with its "
        f"messages: {to_type('topology migrate', queue.name)}"
    )
    arguments: Arguments = dict(queue.arguments)
    found: dict[str, Difference] = {}
    while True:
        attempt = partial(_declare_queue, queue=replace(queue, arguments=arguments))
        refusal = await _refusal(questions, queue.name, attempt)
        if refusal is None:
            break
        what, wanted, current = refusal
        known = what in found
        if what == "exclusive":
            remedy = f"it goes with the connection that declared it; {_owner(questions)}"
        if what == "x-queue-type" and current == "none":
            current = "classic"  # what no type meant when it was declared
        found[what] = Difference(queue.name, what, wanted, current, remedy)
        # Queues of another type compare only their own arguments, and what is not an argument
        # (durable, exclusive) is compared first and cannot be put right here.
        if known or what == "x-queue-type" or not what.startswith("x-"):
            break
        if current == "none":
            arguments.pop(what, None)
        else:
            arguments[what] = _like(current, queue.arguments.get(what))
    return list(found.values())


def _owner(questions: Questions) -> str:
    vhost = shlex.quote(questions.connection.vhost)
    return f"which: rabbitmqctl list_queues -p {vhost} name owner_pid"


def _like(text: str, wanted: object) -> Any:
    """The broker's value in the type in which it can be declared again."""
    if isinstance(wanted, str) or not re.fullmatch(r"-?\d+", text):
        return {"true": True, "false": False}.get(text, text)
    return int(text)


def _missing(name: str) -> Difference:
    return Difference(name, "missing", "", "", f"create it: {COMMAND}")


async def _declare_queue(channel: Channel, queue: Queue) -> None:
    await channel.queue_declare(
        queue.name, durable=True, arguments=queue.arguments, timeout=RPC_TIMEOUT
    )


async def _declare_exchange(channel: Channel, exchange: Exchange) -> None:
    await channel.exchange_declare(
        exchange.name, exchange_type=exchange.type, durable=True, timeout=RPC_TIMEOUT
    )


async def _declare_nothing(channel: Channel, name: str) -> None:
    """Refused for its argument by whoever may make an exchange of this name."""
    await channel.exchange_declare(
        name, exchange_type="direct", durable=True, arguments={"alternate-exchange": 0},
        timeout=RPC_TIMEOUT,
    )  # fmt: skip


async def _bind(channel: Channel, binding: Binding) -> None:
    await channel.queue_bind(
        binding.queue, binding.exchange, routing_key=binding.key, timeout=RPC_TIMEOUT
    )


async def _unbind(channel: Channel, binding: Binding) -> None:
    await channel.queue_unbind(
        binding.queue, binding.exchange, routing_key=binding.key, timeout=RPC_TIMEOUT
    )


async def _look_for_queue(channel: Channel, name: str) -> None:
    await channel.queue_declare(name, passive=True, timeout=RPC_TIMEOUT)


async def _look_for_exchange(channel: Channel, name: str) -> None:
    await channel.exchange_declare(name, passive=True, timeout=RPC_TIMEOUT)


# --- one question to the broker -----------------------------------------------------------------

Call = Callable[[Channel], Awaitable[None]]


class Questions:
    """Questions to the broker, on one channel for as long as the answer is not "no", which closes it:
    then the next one is asked on another. (An app has hundreds of queues: a channel for each question
    would take longer than the questions.)
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._channel: Channel | None = None

    @classmethod
    def of(cls, by: Connection | Questions) -> AbstractAsyncContextManager[Questions]:
        """Those that are being asked, or new ones where it is a connection."""
        return nullcontext(by) if isinstance(by, Questions) else cls(by)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            with suppress(Exception):
                await self._channel.close(timeout=RPC_TIMEOUT)

    async def ask(self, about: str | Lookup, call: Call) -> None:
        """`about` is a name, which may change with every answer.

        Forbidden where our user may not, in the broker's own words and with the next step;
        ConnectError where it does not answer. Any other "no" is the client library's exception."""
        connection = self.connection
        try:
            if self._channel is None or self._channel.is_closed:
                self._channel = await connection.open()
            await call(self._channel)
        except amqp.ChannelAccessRefused as error:
            raise Forbidden(
                f"{quoted(str(about))}: {words(error)} (RABBIT_TASKS_USER); "
                f"allow it: {connection.permit}",
                words(error),
            ) from None
        except TimeoutError:
            raise ConnectError(
                f"{quoted(str(about))}: the broker did not answer within {RPC_TIMEOUT:g} s; it may lack "
                "a majority of its nodes: rabbitmq-diagnostics cluster_status"
            ) from None
        except LOST as error:
            if connection.is_lost:
                close = connection.close_reason
                raise ConnectError(
                    f"{quoted(str(about))}: connection lost"
                    + (f": {close[0]} {close[1]}" if close else "")
                ) from None
            raise error


async def _create(questions: Questions, name: str, call: Call) -> None:
    """After everything was checked; so a "no" here is somebody else's work in between, or a limit."""
    try:
        await questions.ask(name, call)
    except amqp.AMQPError as error:
        raise TopologyError(
            f"{quoted(name)}: {words(error)}; what is there now: rabbit-tasks topology check"
        ) from None


async def _exists(questions: Questions, name: str, look: Call) -> bool:
    try:
        await questions.ask(name, look)
    except amqp.ChannelNotFoundEntity:
        return False
    except amqp.ChannelLockedResource:
        return True  # exclusive, and another connection's
    return True


async def _refusal(questions: Questions, name: str, call: Call) -> tuple[str, str, str] | None:
    """Argument, wanted and found, where the broker has it differently."""
    try:
        await questions.ask(name, call)
    except amqp.ChannelLockedResource:
        return "exclusive", "false", "true, of another connection"
    except amqp.ChannelPreconditionFailed as error:
        match = _DIFFERS.search(words(error))
        if match is None:
            return "definition", "ours", words(error)
        return match["name"], match["wanted"].strip("'"), match["found"].strip("'")
    return None
