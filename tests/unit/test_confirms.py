"""What became of each message on a channel, whatever the order in which the broker says it."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import aiormq.exceptions as amqp
import pytest
from pamqp import commands
from pamqp.base import Frame

from rabbit_tasks import confirms as module
from rabbit_tasks.confirms import Confirms, Late, Letter, Lost, Nacked, Rejected, Returned
from rabbit_tasks.properties import Properties
from tests.conftest import eventually

END = b"\xce"


class Line:
    """A connection and its one channel: what is written on it, and a broker that is played."""

    frame_max = 131_072

    def __init__(self) -> None:
        self.is_blocked = False
        self.free_since = 0.0
        self.written = b""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.channel: Any = SimpleNamespace(number=7, closing=self.lost, rpc=self._rpc)
        self.taps: list[Any] = []

    async def open(self) -> Any:
        return self.channel

    async def _rpc(self, *_: Any, **__: Any) -> None: ...

    def tap(self, _: Any, tap: Any) -> None:
        self.taps.append(tap)

    def write(self, frames: bytes) -> None:
        self.written += frames

    def says(self, method: int, arguments: Frame, kind: int = 60) -> bool:
        number = kind.to_bytes(2, "big") + method.to_bytes(2, "big")
        return bool(self.taps[0](1, number + arguments.marshal() + END))

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        assert self.says(80, commands.Basic.Ack(tag, multiple))

    def nack(self, tag: int, *, multiple: bool = False) -> None:
        assert self.says(120, commands.Basic.Nack(tag, multiple))

    def give_back(self, letter: Letter) -> None:
        assert self.says(50, commands.Basic.Return(312, "NO_ROUTE", letter.exchange, letter.key))
        size = len(letter.body).to_bytes(8, "big")
        assert self.taps[0](2, b"\0\x3c\0\0" + size + letter.properties + END)
        for at in range(0, len(letter.body), 100):
            assert self.taps[0](3, letter.body[at : at + 100] + END)

    async def opened(self, timeout: float = 10, *, patient: bool = False) -> Confirms:
        connection: Any = self
        return await Confirms.open(connection, timeout, patient=patient)

    def refuses(self, error: BaseException) -> asyncio.Event:
        """To take confirms on the channel; set when that is closed."""
        closed = asyncio.Event()

        async def rpc(*_: Any, **__: Any) -> None:
            raise error

        async def close(**_: Any) -> None:
            closed.set()

        self.channel.rpc, self.channel.close = rpc, close
        return closed


def letter(key: str, message_id: str | None = None, body: bytes = b"", **headers: Any) -> Letter:
    properties = Properties.of(headers, message_id=message_id)
    return Letter("", key, properties.encode(), properties.raw("message_id"), body)


class Answers(dict[str, Exception | None]):
    def to(self, name: str) -> Any:
        def told(error: Exception | None) -> None:
            assert name not in self, "told twice"
            self[name] = error

        return told


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), TimeoutError(), amqp.ChannelInvalidStateError("no")]
)
async def test_a_channel_on_which_nothing_is_confirmed_is_not_left_open(
    error: BaseException,
) -> None:
    line = Line()
    closed = line.refuses(error)
    with pytest.raises(type(error)):
        await line.opened()
    assert closed.is_set()


async def test_whoever_waits_for_one_message_is_told_what_became_of_it() -> None:
    line = Line()
    confirms = await line.opened()
    sending = [asyncio.create_task(confirms.send(letter("q", name))) for name in "abc"]
    await asyncio.sleep(0)
    line.ack(1)
    line.nack(2)
    await sending[0]
    with pytest.raises(Nacked, match="refused"):
        await sending[1]
    sending[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending[2]
    async with asyncio.timeout(1):
        await confirms.settled()  # nobody waits for it any more
    assert confirms.unanswered == 1
    line.ack(3)


async def test_acks_nacks_and_returns_in_any_order_reach_their_own_messages() -> None:
    """A return comes before the ack of its message; acks come in any order, alone or of many."""
    for seed in range(300):
        draw = random.Random(seed)
        line, answers = Line(), Answers()
        confirms = await line.opened()
        fates: dict[str, type[Exception] | None] = {}
        unsaid: dict[int, tuple[str, Letter]] = {}
        unreturned: list[int] = []
        tag = 0
        while len(fates) < 60 or unsaid:
            if len(fates) < 60 and draw.random() < 0.5:
                tag += 1
                name = str(tag)
                # Ids in common, but never one id to one queue twice without an answer.
                free = [
                    one for key in ("q", "nowhere") for number in range(3)
                    if confirms.of((one := letter(key, f"id {number}", bytes(number * 80))).mark) is None
                ]  # fmt: skip
                if not free:
                    tag -= 1
                else:
                    one = draw.choice(free)
                    confirms.publish(one, answers.to(name))
                    unsaid[tag] = name, one
                    fates[name] = Returned if one.key == "nowhere" else None
                    if one.key == "nowhere":
                        unreturned.append(tag)
            elif unsaid and draw.random() < 0.3 and unreturned:
                line.give_back(unsaid[unreturned.pop(0)][1])
            elif unsaid:
                said = draw.choice(list(unsaid))
                multiple = draw.random() < 0.3
                those = [one for one in unsaid if one == said or (multiple and one < said)]
                if any(one in unreturned for one in those):
                    continue
                if draw.random() < 0.2 and not any(
                    unsaid[one][1].key == "nowhere" for one in those
                ):
                    line.nack(said, multiple=multiple)
                    fates.update(dict.fromkeys((unsaid[one][0] for one in those), Nacked))
                else:
                    line.ack(said, multiple=multiple)
                for each in those:
                    del unsaid[each]
        kinds = {name: None if error is None else type(error) for name, error in answers.items()}
        assert kinds == fates, f"seed {seed}"
        assert confirms.unanswered == 0


async def test_a_returned_message_that_nobody_knows_makes_no_message_stored() -> None:
    line, answers = Line(), Answers()
    confirms = await line.opened()
    for name in "ab":
        confirms.publish(letter("q", name), answers.to(name))
    line.give_back(letter("q", "c"))
    line.ack(2, multiple=True)
    assert {type(error) for error in answers.values()} == {Lost}


async def test_a_message_is_on_the_wire_as_it_was_given_in_frames_of_the_brokers_size() -> None:
    line = Line()
    line.frame_max = 4_096
    confirms = await line.opened()
    one = letter("q", "a", bytes(range(256)) * 40, header="h")
    confirms.publish(one, lambda _: None)
    payloads, rest = [], line.written
    while rest:
        size = int.from_bytes(rest[3:7], "big")
        assert size + 8 <= 4_096
        assert rest[1:3] == b"\0\7"
        assert rest[7 + size : 8 + size] == END
        payloads.append((rest[0], rest[7 : 7 + size]))
        rest = rest[8 + size :]
    assert [kind for kind, _ in payloads] == [1, 2, 3, 3, 3]
    assert payloads[1][1][12:] == one.properties
    assert int.from_bytes(payloads[1][1][4:12], "big") == len(one.body)
    assert b"".join(payload for kind, payload in payloads if kind == 3) == one.body


@pytest.mark.parametrize(
    ("cause", "has_stored", "fates"),
    [
        (amqp.ChannelNotFoundEntity("no exchange"), False, [Rejected, Rejected]),
        (amqp.ChannelNotFoundEntity("no exchange"), True, [Lost, Lost]),
        (amqp.ChannelAccessRefused("no"), True, [Lost, Lost]),
        (amqp.ChannelPreconditionFailed("no"), False, [Lost, Lost]),
        (amqp.ChannelPreconditionFailed("message size 3 is larger"), True, [Lost, Rejected]),
        (ConnectionResetError("gone"), False, [Lost, Lost]),
        (asyncio.CancelledError(), False, [Lost, Lost]),
    ],
)
async def test_a_channel_that_is_closed_answers_all_and_says_of_none_that_it_is_not_stored_unless_sure(
    cause: BaseException, has_stored: bool, fates: list[type[Exception]]
) -> None:
    line, answers = Line(), Answers()
    confirms = await line.opened()
    if has_stored:
        confirms.publish(letter("q", "before"), lambda _: None)
        line.ack(1)
    for name in "ab":
        confirms.publish(letter("q", name, b"abc" if name == "b" else b""), answers.to(name))
    assert not line.says(40, commands.Channel.Close(404, "no", 0, 0), 20)  # the library must see it
    assert not confirms.is_open
    line.lost.set_exception(cause)
    await asyncio.sleep(0)
    assert [type(answers[name]) for name in "ab"] == fates
    line.lost.exception()


async def test_the_only_message_on_a_channel_that_is_closed_over_one_is_that_one() -> None:
    line, answers = Line(), Answers()
    confirms = await line.opened()
    confirms.publish(letter("q", "before"), lambda _: None)
    line.ack(1)
    confirms.publish(letter("q", "a"), answers.to("a"))
    line.lost.set_exception(amqp.ChannelNotFoundEntity("no exchange"))
    await asyncio.sleep(0)
    assert isinstance(answers["a"], Rejected)


async def test_each_message_is_given_up_in_its_own_time_and_its_answer_is_not_anothers() -> None:
    line, answers = Line(), Answers()
    confirms = await line.opened(timeout=600)
    late = letter("q", "late")
    late.since -= 599.95
    for one, name in ((letter("q", "a"), "a"), (late, "late"), (letter("q", "b"), "b")):
        confirms.publish(one, answers.to(name))
    await eventually(lambda: "late" in answers)
    assert isinstance(answers["late"], Late)
    assert list(answers) == ["late"]
    known = confirms.of(late.mark)
    assert known is not None
    assert known.told is None
    line.ack(3, multiple=True)
    assert confirms.of(late.mark) is None
    assert (answers["a"], answers["b"]) == (None, None)


@pytest.mark.parametrize("patient", [True, False])
async def test_the_time_that_a_broker_holds_publishers_back_counts_only_for_the_impatient(
    patient: bool,
) -> None:
    line, answers = Line(), Answers()
    confirms = await line.opened(timeout=600, patient=patient)
    line.is_blocked = True
    one = letter("q", "a")
    one.since -= 599.9
    confirms.publish(one, answers.to("a"))
    other = letter("q", "b")
    other.since -= 599.95
    confirms.publish(other, answers.to("b"))
    if patient:
        await asyncio.sleep(0.2)
        assert answers == {}
    else:
        await eventually(lambda: len(answers) == 2)


async def test_after_that_time_the_patient_have_their_whole_time_again() -> None:
    line, answers = Line(), Answers()
    confirms = await line.opened(timeout=600, patient=True)
    one = letter("q", "a")
    one.since -= 1_000
    line.free_since = asyncio.get_running_loop().time() - 599.9
    confirms.publish(one, answers.to("a"))
    await asyncio.sleep(0)
    assert answers == {}
    await eventually(lambda: "a" in answers)


async def test_a_channel_with_too_many_that_were_given_up_is_given_up_when_nobody_waits_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "UNANSWERED_KEPT", 10)
    line, answers = Line(), Answers()
    ended = asyncio.Event()

    async def close(**_: Any) -> None:
        ended.set()

    line.channel.close = close
    confirms = await line.opened(timeout=600)
    for number in range(11):
        given_up = letter("q", str(number))
        given_up.since -= 600
        confirms.publish(given_up, lambda _: None)
    live = letter("q", "live")
    live.since -= 599.5
    confirms.publish(live, answers.to("live"))
    await eventually(lambda: not confirms.is_open)
    assert not ended.is_set()
    line.ack(12)
    assert answers == {"live": None}
    await eventually(ended.is_set)
