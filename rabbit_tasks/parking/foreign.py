"""Dead letter queues that are not ours: which of them one may look into, and how often.

A main queue must not be taken for one: whoever looks holds its messages. One that has consumers is
refused by every look; here, what has a parking queue beside it, or sends its dead letters to one.

A quorum queue counts how often a message came back, and lets go of it behind its delivery limit:
without an argument that says otherwise 4.0 and later take it at most 21 times (measured: the 22nd
look finds nothing, 4.0 and 4.3; 3.10 has no such default). 4.3 does not count what is returned by
nack, so there a look returns by nack. Before, it counts however one returns: so what is in our hands
for the last time goes to the end of its queue as a copy, in its order, before the broker drops it.

Honest limits: a policy can set a lower limit than the arguments say, and AMQP does not tell. And a
look that is killed while it has a message for the last time loses it.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import aiormq.exceptions as amqp

from rabbit_tasks.broker import LOST, RPC_TIMEOUT, Connection, words
from rabbit_tasks.confirms import Confirms, Letter, NotConfirmed, may_publish
from rabbit_tasks.declare import Difference, check, missing
from rabbit_tasks.errors import ParkingError, TopologyError
from rabbit_tasks.message import DELIVERY_COUNT
from rabbit_tasks.parking.parked import ParkedMessage, kept
from rabbit_tasks.parking.queue import ParkingQueue
from rabbit_tasks.text import quoted, to_type
from rabbit_tasks.topology import PARKING_LOT, Queue, Topology, parked_queue

log = logging.getLogger("rabbit_tasks")

DEFAULT_LIMIT: Final = 20
"""The delivery limit of a quorum queue that has none of its own, from 4.0 on."""
_WARNED_FROM: Final = 5
"""Looks before the last from which on we say so."""
_NO_LIMIT: Final = 2_147_483_647


@dataclass(frozen=True)
class Terms:
    """On which terms a queue lets itself be looked at.

    limit       how often it takes a message back; None where nothing we do counts
    by_nack     messages go back by nack, which it does not count
    """

    limit: int | None = None
    by_nack: bool = False


async def terms_of(connection: Connection, queue: ParkingQueue) -> Terms:
    """How to look into a queue; ParkingError where one cannot, or must not."""
    if not queue.is_foreign:
        return Terms()  # ours have a limit that nobody reaches
    await refuse_main(connection, queue)
    differs: list[Difference] | None
    try:
        differs = await check(connection, _alone(queue.name))
    except TopologyError:
        differs = None  # no configure permission, so nobody tells
    told = None if differs is None else {one.what: one.found for one in differs}
    terms = _judged(connection, queue.name, told)
    if terms.limit is not None:
        await _may_publish(connection, queue.name)
    return terms


async def refuse_main(connection: Connection, queue: ParkingQueue) -> None:
    """ParkingError where the queue is not there, or is one with a parking queue beside it."""
    name = queue.name
    beside = parked_queue(name)
    asked = [one for one in (name, beside) if queue.is_foreign and len(one) <= 255] or [name]
    try:
        absent = await missing(connection, Topology(tuple(map(_queue, asked)), (), ()))
    except TopologyError as error:
        raise ParkingError(str(error)) from None
    if name in absent and queue.is_foreign:
        raise ParkingError(
            f"there is no queue {quoted(name)}; which there are: "
            f"rabbitmqctl list_queues -p {shlex.quote(connection.vhost)} name messages"
        )
    if name in absent:
        raise no_queue(name)
    if beside in asked and beside not in absent:
        raise ParkingError(
            f"{quoted(name)} is a main queue, {quoted(beside)} is beside it; what is parked for it: "
            f"{to_type('parked list', name)} (without --foreign)"
        )


def no_queue(name: str) -> ParkingError:
    """That there is no parking queue of this name."""
    return ParkingError(
        f"there is no queue {quoted(name)}; the app's queues: rabbit-tasks topology show; "
        "create them: rabbit-tasks topology declare"
    )


def _queue(name: str) -> Queue:
    # No queue has these arguments, and no broker makes one with them (3.10 to 4.3): to ask for them
    # creates nothing, even where the queue goes at this moment.
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": _NO_LIMIT, "x-max-priority": 1}
    return Queue(name, "parked", name, arguments)


def _alone(name: str) -> Topology:
    return Topology((_queue(name),), (), ())


def _judged(connection: Connection, name: str, told: dict[str, str] | None) -> Terms:
    """The terms, by what its arguments are where they are not those we asked for; None: unknown."""
    found = told or {}
    version = tuple(int(part) for part in re.findall(r"\d+", connection.server_version)[:2])
    home = found.get("x-dead-letter-routing-key", "")
    if "exclusive" in found:
        raise ParkingError(f"{name}: exclusive, only the connection that declared it may look")
    if found.get("x-queue-type") == "stream":
        raise ParkingError(f"{name} is a stream: nothing can be taken out of it")
    if found.get("x-dead-letter-exchange") == PARKING_LOT:
        raise ParkingError(f"{name} is a main queue: its dead letters go to {PARKING_LOT}")
    if home and name.startswith((f"{home}.retry.", f"{home}.crashed.")):
        raise ParkingError(f"{name} is a retry queue: its messages go to {home} by themselves")
    if "x-queue-type" in found or {"durable", "auto_delete"} & found.keys():
        return Terms()  # classic, which counts nothing
    if version >= (4, 3):
        return Terms(by_nack=True)
    argument = found.get("x-delivery-limit", "none" if told is None else str(_NO_LIMIT))
    if argument == "none":
        return Terms(DEFAULT_LIMIT if version >= (4,) else None)
    limit = int(argument)
    if limit == 0 or (limit < 0 and version < (4,)):
        raise ParkingError(
            f"{name} takes nothing back (x-delivery-limit {limit}, {connection.server_version}): "
            "to look would be to lose"
        )
    return Terms(limit if 0 < limit < _NO_LIMIT else None)


async def _may_publish(connection: Connection, name: str) -> None:
    """ParkingError where no copy could take a message's place: asked before any is taken."""
    try:
        await may_publish(connection)
    except amqp.ChannelAccessRefused as error:
        raise ParkingError(
            f"{name} counts looks, and what is looked at for the last time must be published to it "
            f"again: {words(error)} (RABBIT_TASKS_USER); allow it: {connection.permit}"
        ) from None


class LastTime:
    """Messages that are in our hands for the last time: the broker would not take them back.

    They are kept in a file until the look ends; then copies go to the end of their queue.
    """

    def __init__(self, queue: str, limit: int) -> None:
        self._queue = queue
        self._limit = limit
        self._highest = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the look ends)
        self._kept: dict[int, tuple[int, int, int]] = {}
        """By delivery tag: where it begins in the file, the sizes of its properties and its body."""

    def keep(self, tag: int, message: ParkedMessage) -> None:
        """Told of every message that is read."""
        count = message.properties.header(DELIVERY_COUNT)
        if not isinstance(count, int):
            return
        self._highest = max(self._highest, count)
        if count >= self._limit:
            properties = kept(message.properties).encode()
            at = self._file.seek(0, os.SEEK_END)
            self._file.write(properties)
            self._file.write(message.body)
            self._kept[tag] = (at, len(properties), len(message.body))

    def drop(self, tags: Iterable[int]) -> None:
        """Told of all that are acked."""
        for tag in tags:
            self._kept.pop(tag, None)

    async def put_back(self, connection: Connection, ack: Callable[[int], Awaitable[None]]) -> None:
        """Publish what is kept, in its order, and ack each when the broker has its copy.

        ParkingError where it does not take one: then that and those behind it are lost.
        """
        left = list(self._kept)
        try:
            confirms = await Confirms.open(connection, RPC_TIMEOUT)
            while left:
                await confirms.send(self._letter(left[0]))
                await ack(left[0])
                del left[0]
            await confirms.end()
        except (NotConfirmed, amqp.AMQPError, *LOST, TimeoutError) as error:
            raise ParkingError(
                f"{self._queue}: {len(left)} messages were looked at for the last time (delivery "
                f"limit {self._limit}), and could not be published to it again: {words(error)}"
            ) from None
        finally:
            self._file.close()
            self._tell()

    def _letter(self, tag: int) -> Letter:
        at, head, size = self._kept[tag]
        self._file.seek(at)
        return Letter("", self._queue, self._file.read(head), None, self._file.read(size))

    def _tell(self) -> None:
        if self._limit - self._highest > _WARNED_FROM:
            return
        again = f", so {len(self._kept)} were published to its end" if self._kept else ""
        log.warning(
            "%s takes a message back %d times, and has done so %d times%s; a policy with a higher "
            "delivery-limit ends that",
            self._queue, self._limit, self._highest, again,
        )  # fmt: skip
