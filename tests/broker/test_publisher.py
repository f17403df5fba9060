"""A publish is confirmed, or the error says which of three it is and whether it may be stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from rabbit_tasks import Publisher, Settings
from rabbit_tasks.broker import Connection
from rabbit_tasks.confirms import Confirms
from rabbit_tasks.errors import PublishError, Refused, Unconfirmed, Unroutable
from rabbit_tasks.properties import Properties
from rabbit_tasks.publisher import ALONE_FROM
from tests.conftest import eventually
from tests.support.brokers import Broker
from tests.support.proxy import Proxy, before
from tests.support.queues import depth, take_all


async def queue(connection: Connection, name: str = "q", **arguments: Any) -> None:
    channel = await connection.open()
    await channel.queue_declare(
        name, durable=True,
        arguments={"x-queue-type": "quorum"} | {k.replace("_", "-"): v for k, v in arguments.items()},
    )  # fmt: skip
    await channel.close()


async def full_queue(connection: Connection) -> None:
    channel = await connection.open()
    await channel.queue_declare(
        "full", durable=True,
        arguments={"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"},
    )  # fmt: skip
    await channel.close()


async def test_two_messages_in_flight_with_one_id_never_swap_their_answers(
    connection: Connection, publisher: Publisher
) -> None:
    await queue(connection)

    async def publish(to: str) -> str:
        try:
            await publisher.publish(to, to, message_id="one id")
        except Unroutable:
            return f"{to} unroutable"
        return f"{to} stored"

    targets = ["q", "nowhere", "nowhere", "q"] * 50
    answers = await asyncio.gather(*(publish(to) for to in targets))
    assert Counter(answers) == {"q stored": 100, "nowhere unroutable": 100}
    assert [answer.split()[0] for answer in answers] == targets
    assert await depth(connection, "q") == 100


async def test_ids_that_only_look_alike_never_swap_their_answers(
    connection: Connection, publisher: Publisher
) -> None:
    await queue(connection)
    ids = ["", "ü", "ü" * 100, "a" * 255, "a" * 199, "\n", "None"]
    given = [*(Properties.of({}, message_id=one) for one in ids), Properties({})]
    answers = await asyncio.gather(
        *(publisher.send("", to, b"", one) for one in given for to in ("q", "nowhere")),
        return_exceptions=True,
    )
    assert answers[::2] == [None] * len(given)
    assert all(isinstance(answer, Unroutable) for answer in answers[1::2])


async def test_an_unroutable_message_is_told_so_and_was_not_stored(
    connection: Connection, publisher: Publisher
) -> None:
    with pytest.raises(Unroutable, match="topology declare") as error:
        await publisher.publish("nowhere", {"a": 1})
    assert not error.value.maybe_stored
    with pytest.raises(Unroutable) as error:
        await publisher.send("no-such-exchange", "key", b"", Properties({}))
    assert not error.value.maybe_stored
    await queue(connection)
    await publisher.publish("q", "good")
    assert await depth(connection, "q") == 1


async def test_a_full_queue_refuses_and_the_next_publish_is_confirmed(
    connection: Connection, publisher: Publisher
) -> None:
    await full_queue(connection)
    await publisher.publish("full", "first")
    with pytest.raises(Refused, match="full") as error:
        await publisher.publish("full", "second")
    assert not error.value.maybe_stored
    (first,) = await take_all(connection, "full")
    assert first.body == b"first"
    await publisher.publish("full", "third")


async def test_headers_beyond_a_frame_are_refused_and_cost_no_one_else_anything(
    connection: Connection, publisher: Publisher
) -> None:
    await queue(connection)
    long = {"long": "x" * 131_072}
    answers = await asyncio.gather(
        *(publisher.publish("q", i, headers=long if i == 25 else None) for i in range(50)),
        return_exceptions=True,
    )
    (refused,) = (answer for answer in answers if isinstance(answer, BaseException))
    assert isinstance(refused, Refused)
    assert not refused.maybe_stored
    assert await depth(connection, "q") == 49


@pytest.mark.parametrize("wrong", ["too large", "expiration", "user_id", "CC"])
async def test_what_the_broker_refuses_is_not_told_to_others_in_flight(
    wrong: str, broker: Broker, connection: Connection, publisher: Publisher
) -> None:
    """The broker closes the channel over one message, with all that are unconfirmed on it."""
    await queue(connection)
    cases: dict[str, dict[str, Any]] = {
        "too large": {
            "body": bytes(135_000_000 if broker.version.startswith("3.") else 17_000_000)
        },
        "expiration": {"expiration": "soon"},
        "user_id": {"user_id": "somebody"},
        "CC": {"headers": {"CC": "not a list"}},
    }
    how = cases[wrong]
    body = how.pop("body", b"wrong")

    async def publish(i: int) -> str:
        try:
            if i == 10:
                await publisher.publish("q", body, message_id="wrong", **how)
            else:
                await publisher.publish("q", str(i), message_id=str(i))
        except Refused:
            return "refused"
        except Unconfirmed as error:
            return "unconfirmed" if error.maybe_stored else "not sent"
        return "stored"

    answers = await asyncio.gather(*(publish(i) for i in range(20)))
    assert answers[10] == "refused"
    stored = {one.body.decode() for one in await take_all(connection, "q")}
    assert answers == ["refused" if i == 10 else "stored" for i in range(20)]
    assert stored == {str(i) for i in range(20)} - {"10"}
    await publisher.publish("q", "good")
    assert await depth(connection, "q") == 1


@pytest.fixture
async def proxy(broker: Broker) -> Any:
    async with before(broker.host, broker.port) as made:
        yield made


@pytest.fixture
def impatient(broker: Broker, vhost: str, proxy: Proxy) -> Settings:
    url = broker.url(vhost).replace(f":{broker.port}/", f":{proxy.port}/")
    return Settings(url=url, heartbeat=10, publish_timeout=0.5, connect_timeout=2)


async def test_no_answer_in_time_is_unconfirmed_and_may_be_stored(
    connection: Connection, proxy: Proxy, impatient: Settings
) -> None:
    await queue(connection)
    async with Publisher.open(impatient) as publisher:
        await publisher.publish("q", "before")
        proxy.swallow()
        with pytest.raises(Unconfirmed, match=r"not confirmed within 0\.5 s") as error:
            await publisher.publish("q", "during")
        assert error.value.maybe_stored
        await eventually(lambda: _holds(connection, 2))
        proxy.flow()
        await eventually(lambda: _confirms(publisher))
        bodies = [one.body for one in await take_all(connection, "q")]
        assert bodies[:2] == [b"before", b"during"]
        assert bodies[-1] == b"after"


async def test_a_late_answer_does_not_reach_the_next_message_of_that_id(
    connection: Connection, proxy: Proxy, impatient: Settings
) -> None:
    await queue(connection)
    async with Publisher.open(impatient) as publisher:
        await publisher.publish("q", "before")
        proxy.hold()
        with pytest.raises(Unconfirmed):
            await publisher.publish("nowhere", "gone", message_id="one id")
        sent = proxy.sent
        publishing = asyncio.create_task(publisher.publish("q", "stored", message_id="one id"))
        # On its way, or asking for a channel: its answer is held.
        await eventually(lambda: proxy.sent > sent)
        proxy.release()
        assert await publishing == "one id"
    assert [one.body for one in await take_all(connection, "q")] == [b"before", b"stored"]


async def test_a_connection_cut_before_the_confirm_is_unconfirmed_and_the_next_publish_connects(
    connection: Connection, proxy: Proxy, impatient: Settings
) -> None:
    await queue(connection)
    async with Publisher.open(impatient.changed(publish_timeout=10)) as publisher:
        await publisher.publish("q", "before")
        proxy.swallow()
        publishing = [asyncio.create_task(publisher.publish("q", str(i))) for i in range(20)]
        await eventually(lambda: _holds(connection, 21))
        proxy.flow()  # cuts
        answers = await asyncio.gather(*publishing, return_exceptions=True)
        assert [type(answer) for answer in answers] == [Unconfirmed] * 20
        assert all(isinstance(a, PublishError) and a.maybe_stored for a in answers)
        await publisher.publish("q", "after")
        assert await depth(connection, "q") == 22


async def test_connections_cut_again_and_again_lose_no_confirmed_message(
    connection: Connection, proxy: Proxy, impatient: Settings
) -> None:
    await queue(connection)
    confirmed: set[str] = set()
    async with Publisher.open(impatient.changed(publish_timeout=10)) as publisher:

        async def publish(i: int) -> None:
            try:
                await publisher.publish("q", str(i))
            except Unconfirmed:
                pass
            else:
                confirmed.add(str(i))

        for start in range(0, 400, 80):
            publishing = [asyncio.create_task(publish(i)) for i in range(start, start + 80)]
            await eventually(lambda s=start: len(confirmed) > s // 4)  # type: ignore[misc]
            proxy.cut()
            await asyncio.gather(*publishing)
        await publisher.publish("q", "last")
    stored = {one.body.decode() for one in await take_all(connection, "q")}
    assert confirmed <= stored
    assert "last" in stored


async def test_publish_many_stops_at_a_failure_and_says_how_many_were_confirmed(
    connection: Connection, publisher: Publisher
) -> None:
    await full_queue(connection)
    read: list[int] = []

    def bodies() -> Iterator[int]:
        for i in range(10_000):
            read.append(i)
            yield i

    with pytest.raises(Refused) as error:
        await publisher.publish_many("full", bodies(), window=5)
    stored = await depth(connection, "full")
    assert error.value.__notes__ == [f"{stored} were confirmed before this one"]
    assert len(read) < 100


async def test_a_publish_that_is_cancelled_leaves_the_publisher_usable(
    connection: Connection, publisher: Publisher
) -> None:
    await queue(connection)
    for _ in range(20):
        publishing = [
            asyncio.create_task(publisher.publish(to, "x", message_id="same"))
            for to in ("q", "nowhere", "q", "nowhere")
        ]
        await asyncio.sleep(0)
        for task in publishing[::2]:
            task.cancel()
        answers = await asyncio.gather(*publishing, return_exceptions=True)
        assert all(isinstance(answer, Unroutable) for answer in answers[1::2]), answers
    await publisher.publish("q", "last", message_id="same")
    assert (await take_all(connection, "q"))[-1].body == b"last"


async def _holds(connection: Connection, count: int) -> bool:
    return await depth(connection, "q") == count


async def _confirms(publisher: Publisher) -> bool:
    try:
        await publisher.publish("q", "after")
    except PublishError:
        return False
    return True


async def test_a_channel_that_one_message_closes_tells_no_other_that_it_was_refused(
    broker: Broker, connection: Connection, publisher: Publisher
) -> None:
    """Where it could not be foreseen, the others may be stored, and are told so."""
    if not broker.version.startswith("3."):
        pytest.skip("4.x takes any delivery mode: nothing unforeseen is known")
    await queue(connection)

    async def publish(i: int) -> str:
        try:
            wrong = {"delivery_mode": 7} if i == 10 else {}
            await publisher.send(
                "", "q", str(i).encode(), Properties.of({}, message_id=str(i), **wrong)
            )
        except Refused:
            return "refused"
        except Unconfirmed as error:
            return "unconfirmed" if error.maybe_stored else "not sent"
        return "stored"

    answers = await asyncio.gather(*(publish(i) for i in range(20)))
    stored = {one.body.decode() for one in await take_all(connection, "q")}
    assert "10" not in stored
    assert answers[10] in ("refused", "unconfirmed")
    for i, answer in enumerate(answers):
        if i != 10:
            assert answer == "unconfirmed" or (str(i) in stored) == (answer == "stored"), answers
    await publisher.publish("q", "good")


async def test_an_exchange_that_goes_while_messages_are_on_their_way_makes_no_one_tell_a_falsehood(
    connection: Connection, publisher: Publisher
) -> None:
    """The broker closes the channel over the first it has no exchange for: others may be stored."""
    await queue(connection)
    channel = await connection.open()
    for _ in range(5):
        await channel.exchange_declare("x", exchange_type="fanout")
        await channel.queue_bind("q", "x")
        answers: dict[str, str] = {}

        async def publish(body: str, answers: dict[str, str] = answers) -> None:
            try:
                await publisher.send("x", "key", body.encode(), Properties.of(message_id=body))
            except PublishError as error:
                answers[body] = "maybe" if error.maybe_stored else "no"
            else:
                answers[body] = "yes"

        await publish("first")
        publishing = [asyncio.create_task(publish(str(i))) for i in range(50)]
        await asyncio.sleep(0)
        await channel.exchange_delete("x")
        publishing += [asyncio.create_task(publish(str(i))) for i in range(50, 100)]
        await asyncio.gather(*publishing)
        stored = {one.body.decode() for one in await take_all(connection, "q")}
        assert {body for body, said in answers.items() if said == "yes"} <= stored
        assert {body for body, said in answers.items() if said == "no"} & stored == set()
        assert len(answers) == 101


async def test_nacks_of_a_full_queue_reach_the_messages_that_it_did_not_take_and_no_others(
    connection: Connection, publisher: Publisher
) -> None:
    await queue(connection)
    await full_queue(connection)

    async def publish(i: int) -> str:
        try:
            await publisher.publish(("q", "full", "nowhere")[i % 3], str(i))
        except PublishError as error:
            return type(error).__name__
        return "stored"

    answers = await asyncio.gather(*(publish(i) for i in range(600)))
    assert set(answers[0::3]) == {"stored"}
    assert set(answers[2::3]) == {"Unroutable"}
    assert set(answers[1::3]) == {"stored", "Refused"}
    told = [str(3 * i + 1) for i, answer in enumerate(answers[1::3]) if answer == "stored"]
    assert [one.body.decode() for one in await take_all(connection, "full")] == told
    assert await depth(connection, "q") == 200


async def test_a_thousand_publishers_at_once_store_each_message_once(
    connection: Connection, publisher: Publisher
) -> None:
    await queue(connection)
    ids = await asyncio.gather(
        *(publisher.publish("q", bytes(i % 3 * 100_000)) for i in range(1_000))
    )
    assert await depth(connection, "q") == len(set(ids)) == 1_000


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_publish_may_be_cancelled_at_any_point(
    is_connected: bool, connection: Connection, settings: Settings
) -> None:
    await queue(connection)
    point, was_done = 0, False
    while not was_done:
        publisher = Publisher(settings)
        if is_connected:
            await publisher.publish("q", "before")
        others = [
            asyncio.create_task(publisher.publish(to, "other", message_id="id"))
            for to in ("q", "nowhere")
        ]
        publishing = asyncio.create_task(publisher.publish("q", "cancelled", message_id="id"))
        for _ in range(point * point):  # turns of the event loop
            await asyncio.sleep(0)
        was_done = publishing.done()
        publishing.cancel()
        stored, returned = await asyncio.gather(*others, return_exceptions=True)
        assert stored == "id", point
        assert isinstance(returned, Unroutable), point
        async with asyncio.timeout(10):
            assert await publisher.publish("q", "after", message_id="id") == "id"
        await publisher.close()
        point += 1
    assert point >= 3


async def test_publish_many_over_a_connection_that_is_cut_knows_how_many_were_confirmed(
    connection: Connection, proxy: Proxy, impatient: Settings
) -> None:
    await queue(connection)
    async with Publisher.open(impatient.changed(publish_timeout=10)) as publisher:
        await publisher.publish("q", "before")

        def bodies() -> Iterator[int]:
            for i in range(10_000):
                if i == 3_000:
                    proxy.cut()
                yield i

        with pytest.raises(Unconfirmed) as error:
            await publisher.publish_many("q", bodies(), window=50)
        assert error.value.maybe_stored
        (note,) = error.value.__notes__
        confirmed = int(note.split()[0])
        assert confirmed > 2_000
        # Those before the cut, and of 50 that were on their way any.
        assert confirmed <= await depth(connection, "q") - 1 <= confirmed + 50
        assert len(await publisher.publish_many("q", range(10))) == 10


async def test_publish_many_that_is_cancelled_leaves_nothing_that_waits(
    connection: Connection, publisher: Publisher
) -> None:
    await queue(connection)
    for _ in range(10):
        publishing = asyncio.create_task(publisher.publish_many("q", range(100_000)))
        await eventually(lambda: depth_is_over(connection, 0))
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
    async with asyncio.timeout(5):
        await publisher.close()


async def depth_is_over(connection: Connection, count: int) -> bool:
    return await depth(connection, "q") > count


async def test_a_channel_of_its_own_that_the_broker_closes_at_once_is_not_published_on(
    connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue(connection)
    opened: list[Confirms] = []
    open_one = Confirms.open

    async def open_and_lose(*arguments: Any, **more: Any) -> Confirms:
        opened.append(await open_one(*arguments, **more))
        if len(opened) == 1:
            await opened[0].end()
        return opened[-1]

    monkeypatch.setattr(Confirms, "open", open_and_lose)
    await publisher.publish("q", bytes(ALONE_FROM + 1))
    assert len(opened) == 2
    assert await depth(connection, "q") == 1


async def test_of_large_bodies_no_more_than_one_waits_for_the_socket(
    connection: Connection, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue(connection)
    body, waiting = bytes(10_000_000), []
    write = Connection.write

    def counted(self: Connection, frames: bytes) -> None:
        write(self, frames)
        waiting.append(self.unsent)

    monkeypatch.setattr(Connection, "write", counted)
    await asyncio.gather(
        *(publisher.publish("q", body) for _ in range(8)),
        publisher.publish_many("q", [body] * 4),
        publisher.publish_many("q", [bytes(500_000)] * 50),
    )
    assert await depth(connection, "q") == 62
    assert max(waiting) < len(body) + 2 * 2**20
