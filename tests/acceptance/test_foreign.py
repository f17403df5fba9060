"""The command line on what others parked: another framework's dead letters, a queue made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rabbit_tasks import Publisher, Settings
from rabbit_tasks.broker import connected
from rabbit_tasks.properties import Properties
from tests.conftest import eventually
from tests.support.commands import Run
from tests.support.queues import depth, take_all

DEAD = "celery.dead"
Fill = Callable[..., None]


@pytest.fixture(params=["quorum", "classic"])
def fill(request: pytest.FixtureRequest, settings: Settings) -> Fill:
    """As another framework has it: a main queue whose dead letters go to a queue of their own. Then
    the broker moves some there, and others are put there by hand."""
    kind = {"x-queue-type": request.param}

    def call(rejected: list[bytes], by_hand: list[dict[str, Any]]) -> None:
        async def work() -> None:
            async with connected(settings, "test") as connection, Publisher.open(settings) as made:
                channel = await connection.open()
                await channel.queue_declare(DEAD, durable=True, arguments=kind)
                dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
                await channel.queue_declare("celery", durable=True, arguments={**kind, **dead})
                for body in rejected:
                    await made.send("", "celery", body, Properties.of({"task": "add"}))
                    message = await channel.basic_get("celery")
                    await channel.basic_reject(message.delivery_tag or 0, requeue=False)

                async def moved() -> bool:
                    return await depth(connection, DEAD) == len(rejected)

                await eventually(moved)
                for headers in by_hand:
                    await made.send("", DEAD, b"by hand", Properties.of(headers))

        asyncio.run(work())

    return call


def bodies(settings: Settings, queue: str) -> list[bytes]:
    async def work() -> list[bytes]:
        async with connected(settings, "test") as connection:
            return [found.body for found in await take_all(connection, queue)]

    return asyncio.run(work())


def test_dead_letters_of_another_framework_are_listed_grouped_shown_and_replayed(
    cli: Run, settings: Settings, fill: Fill
) -> None:
    fill([b"[1]", b"[2]", b"[3]"], [])
    listed = cli("parked", "list", DEAD, "--foreign", "--json")
    assert listed.code == 0
    assert [(one["origin"], one["reason"]) for one in listed.lines] == [
        ("celery", "rejected by its consumer")
    ] * 3
    name = listed.lines[1]["id"]
    assert name.startswith("~")
    [group] = cli("parked", "groups", DEAD, "--foreign", "--json").lines
    assert group["count"] == 3
    shown = cli("parked", "show", DEAD, name, "--foreign")
    assert (shown.code, "task: 'add'" in shown.out) == (0, True)
    assert cli("parked", "replay", DEAD, "--foreign", "--id", name).code == 0
    assert cli("parked", "discard", DEAD, "--foreign", "--limit", "1", "--yes").code == 0
    kept = cli("parked", "export", DEAD, "--foreign")
    assert [one["body"] for one in kept.lines] == [{"text": "[3]"}]
    assert bodies(settings, "celery") == [b"[2]"]
    assert bodies(settings, DEAD) == [b"[3]"]


def test_without_foreign_it_is_the_parking_queue_that_is_looked_for(cli: Run, fill: Fill) -> None:
    fill([b"[1]"], [])
    found = cli("parked", "list", DEAD)
    assert (found.code, f"there is no queue {DEAD}.parked" in found.err) == (1, True)
    said = cli("parked", "list", "nowhere", "--foreign")
    assert (said.code, "there is no queue nowhere;" in said.err) == (1, True)


def test_a_message_of_which_nothing_tells_where_it_came_from_goes_where_into_says(
    cli: Run, settings: Settings, fill: Fill
) -> None:
    fill([b"[1]"], [{}])
    stuck = cli("parked", "replay", DEAD, "--foreign", "--all")
    assert stuck.code == 1
    assert "--into QUEUE" in stuck.err
    assert stuck.err.count("error: ") == 1
    assert bodies(settings, "celery") == [b"[1]"]
    went = cli("parked", "replay", DEAD, "--foreign", "--all", "--into", "celery")
    assert went.code == 0
    assert bodies(settings, "celery") == [b"by hand"]
    assert bodies(settings, DEAD) == []


def test_an_origin_that_is_forged_stops_a_replay_and_keeps_the_message(
    cli: Run, settings: Settings, fill: Fill
) -> None:
    forged = [{"x-origin-queue": "no such queue"}, {"x-origin-queue": 7, "x-death": [{"queue": 1}]}]
    fill([], forged)
    stopped = cli("parked", "replay", DEAD, "--foreign", "--all")
    assert (stopped.code, stopped.err.count("error: ")) == (1, 1)
    assert "no such queue" in stopped.err
    sent = cli("parked", "replay", DEAD, "--foreign", "--all", "--to", "celery")
    assert sent.code == 0
    assert bodies(settings, "celery") == [b"by hand"] * 2


def test_a_main_queue_is_refused_by_every_command(cli: Run, settings: Settings, fill: Fill) -> None:
    fill([], [])

    async def work() -> None:
        async with connected(settings, "test") as connection, Publisher.open(settings) as publisher:
            channel = await connection.open()
            await channel.queue_declare("celery.parked", durable=True)
            await publisher.send("", "celery", b"live", Properties.of(message_id="m"))

    asyncio.run(work())
    for verb in (
        ["list"], ["groups"], ["show", "m"], ["replay", "--all"], ["export"],
        ["discard", "--all", "--yes"], ["import"],
    ):  # fmt: skip
        found = cli("parked", verb[0], "celery", "--foreign", *verb[1:],
                    stdin=b'{"rabbit_tasks": 1, "body": {"text": ""}, "properties": {}}')  # fmt: skip
        assert found.code == 1, verb
        assert "celery is a main queue, celery.parked is beside it" in found.err, verb
    assert bodies(settings, "celery") == [b"live"]
