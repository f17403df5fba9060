"""Pictures: everything is on them, nothing on top of anything else, whatever the names are."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from itertools import combinations
from typing import Any
from xml.etree import ElementTree as Xml

import pytest

from rabbit_tasks import App, Consumer, Message, RetryPolicy
from rabbit_tasks.drawing import _DARK, _LIGHT, WIDTH, dot, lives, mermaid, svg, tree
from rabbit_tasks.topology import Exchange, Queue, Topology

HOSTILE = [
    "a b", "eu/mail@home", "<b>&amp;", 'q"uo\'te', "back\\slash\\n", "#35;", "1. list", "- dash", "--",
    "_emphasis_", "`code`", "{}[]()|", "end", "two  blanks", " edge ", "ü😀", "esc\x1b[31m", "]]>", "%%",
    "x" * 248, "long.name.with-many_parts/" * 9,
]  # fmt: skip


def made(queue: str, **policy: Any) -> Consumer[Any]:
    async def handle(self: Any, body: Any, message: Message) -> None: ...

    body = {"queue": queue, "handle": handle, "retry": RetryPolicy(**policy)}
    return type("Made", (Consumer,), body)()  # type: ignore[no-any-return]


def topology(*consumers: Consumer[Any]) -> Topology:
    return App("app", consumers).topology


ONE = topology(made("images.resize", attempts=3, base=timedelta(seconds=2)))
THIRTY = topology(*(made(f"shop.orders-{i}", attempts=1 + i % 7) for i in range(30)))
LONG = topology(made("n" * 240), made("fifty", attempts=50, jitter=False), made("w", spread=40))


def named(name: str) -> Topology:
    """A queue of this name, which no consumer could have, and what serves it."""
    served = [
        Queue(queue.name.replace("q", name, 1), queue.role, name, queue.arguments)
        for queue in topology(made("q", attempts=2)).queues
    ]
    return Topology(tuple(served), (Exchange("parking-lot"),), ())


def escaped(name: str) -> str:
    return name.replace("\x1b", "\\x1b")


def test_attempts_that_wait_alike_are_told_once() -> None:
    (long, fifty, _) = lives(LONG)
    assert [(wait.first, wait.last) for wait in long.retries] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert fifty.retries[-1].title == "attempts 10-49"
    assert fifty.retries[-1].delays == ("5m",)
    assert (fifty.attempts, long.crashed) == (50, ("1s", "2s", "4s", "8s"))


def test_a_queue_whose_name_looks_like_a_retry_queues_is_drawn_with_its_own_attempts() -> None:
    (life,) = lives(topology(made("a.retry.7.b", attempts=3, jitter=False)))
    assert [(wait.first, wait.delays) for wait in life.retries] == [(1, ("1s",)), (2, ("2s",))]


def test_the_tree_names_every_queue() -> None:
    lines = tree(ONE).splitlines()
    assert [
        line.removeprefix("├── ").removeprefix("└── ").partition("   ")[0] for line in lines
    ] == [queue.name for queue in ONE.queues]
    assert lines[0] == "images.resize   (quorum, delivery limit 5)"
    assert "├── images.resize.retry.2.4s   waits 4s, then back to images.resize" in lines
    assert (
        "├── images.resize.crashed.4s   waits 4s, where workers died, then back to images.resize"
        in lines
    )


# --- SVG ----------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


class Drawn:
    """What is on a picture."""

    def __init__(self, text: str) -> None:
        self.root = Xml.fromstring(text)
        self.height = float(self.root.attrib["height"])

    def boxes(self, *kinds: str) -> list[tuple[float, float, float, float, Xml.Element]]:
        """Left, top, right, bottom."""
        found = []
        for one in self.root.iter(f"{SVG}rect"):
            if one.attrib["class"] in kinds:
                x, y, width, height = (float(one.attrib[k]) for k in ("x", "y", "width", "height"))
                found.append((x, y, x + width, y + height, one))
        return found

    def titles(self, kind: str) -> list[str]:
        return [one.findtext(f"{SVG}title", "") for *_, one in self.boxes(kind)]

    def names(self) -> list[tuple[float, float, str]]:
        return [
            (float(one.attrib["x"]), float(one.attrib["y"]), one.text or "")
            for one in self.root.iter(f"{SVG}text")
            if "name" in one.attrib["class"].split()
        ]

    def inside(self, box: tuple[float, float, float, float, Xml.Element]) -> list[str]:
        left, top, right, bottom, _ = box
        return [text for x, y, text in self.names() if left < x < right and top < y < bottom]


@pytest.mark.parametrize("found", [ONE, THIRTY, LONG], ids=["one", "thirty", "long"])
def test_every_part_is_on_the_picture_once_and_in_its_place(found: Topology) -> None:
    drawn = Drawn(svg(found, "title"))
    mains = [queue.name for queue in found.queues if queue.role == "main"]
    assert drawn.titles("main") == mains
    assert ["".join(drawn.inside(box)) for box in drawn.boxes("main")] == mains
    parked = [f"{name}.parked" for name in mains]
    assert drawn.titles("parked") == parked
    assert ["".join(drawn.inside(box)) for box in drawn.boxes("parked")] == parked
    assert drawn.titles("lot") == ["exchange parking-lot"]
    assert [drawn.inside(box) for box in drawn.boxes("crashed")] == [
        ["1s", "2s", "4s", "8s"]
    ] * len(mains)
    retried = [life for life in lives(found) if life.retries]
    assert [drawn.inside(box) for box in drawn.boxes("retry")] == [
        [delay for wait in life.retries for delay in wait.delays] for life in retried
    ]
    # publish, park, to its queue, replay; to and from the waiting queues.
    tips = len(list(drawn.root.iter(f"{SVG}polygon")))
    assert tips == 4 * len(mains) + 2 * len(mains) + 2 * len(retried)


@pytest.mark.parametrize("found", [ONE, THIRTY, LONG], ids=["one", "thirty", "long"])
def test_nothing_is_on_top_of_anything_else_or_outside(found: Topology) -> None:
    drawn = Drawn(svg(found, "title"))
    big = drawn.boxes("main", "retry", "crashed", "parked", "lot")
    chips = drawn.boxes("chip")
    for boxes in (big, chips):
        for one, other in combinations(boxes, 2):
            apart = (
                one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            )
            assert apart, (one, other)
    for left, top, right, bottom, _ in big + chips:
        assert 0 < left < right < WIDTH
        assert 0 < top < bottom < drawn.height
    for chip in chips:
        assert any(b[0] < chip[0] < chip[2] < b[2] and b[1] < chip[1] < chip[3] < b[3]
                   for b in drawn.boxes("retry", "crashed"))  # fmt: skip
    for box in drawn.boxes("main", "parked", "chip"):
        for line in drawn.inside(box):
            assert len(line) * 7.3 <= box[2] - box[0]


@pytest.mark.parametrize("name", HOSTILE)
def test_an_svg_shows_a_name_as_it_is(name: str) -> None:
    drawn = Drawn(svg(named(name), name))
    assert drawn.root.findtext(f"{SVG}title") == escaped(name)
    (main,), (parked,) = drawn.boxes("main"), drawn.boxes("parked")
    assert "".join(drawn.inside(main)) == escaped(name)
    assert "".join(drawn.inside(parked)) == f"{escaped(name)}.parked"


def test_it_can_be_read_where_it_is_dark_and_needs_nothing_from_elsewhere() -> None:
    text = svg(ONE, "title")
    assert {kind: set(look) for kind, look in _DARK.items()} == {
        kind: set(look) for kind, look in _LIGHT.items()
    }
    for kind in _DARK:
        assert f".{kind} {{" in text
    used = {one for element in Drawn(text).root.iter() for one in element.get("class", "").split()}
    assert used - {"name"} <= set(_LIGHT)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


def test_an_app_without_consumers_is_drawn_as_none() -> None:
    empty = App("empty", []).topology
    assert "no consumers" in svg(empty, "title")
    assert (tree(empty), mermaid(empty)) == ("", "flowchart LR\n")
    assert dot(empty).endswith("}\n")


# --- Mermaid and Graphviz -----------------------------------------------------------------------


def mermaid_labels(text: str) -> list[str]:
    def shown(label: str) -> str:
        return html.unescape(re.sub(r"#(\d+);", r"&#\1;", label)).replace("\xa0", " ")

    return [shown(label) for label in re.findall(r'"([^"]*)"', text)]


def dot_labels(text: str) -> list[str]:
    found = re.findall(r'label="((?:[^"\\]|\\.)*)"', text)
    return [html.unescape(re.sub(r'\\(["\\])', r"\1", label)) for label in found]


@pytest.mark.parametrize("name", HOSTILE)
def test_mermaid_and_graphviz_take_no_name_for_anything_but_text(name: str) -> None:
    quoted = re.compile(r'"(?:[^"\\]|\\.)*"')
    for draw, labels in ((mermaid, mermaid_labels), (dot, dot_labels)):
        text = draw(named(name))
        assert labels(text).count(escaped(name)) == 1
        assert labels(text).count(f"{escaped(name)}.parked") == 1
        # But for the labels it is the graph of any other.
        assert quoted.sub('""', text) == quoted.sub('""', draw(named("mail")))


def test_a_plain_name_stands_in_mermaid_as_it_is() -> None:
    assert '["shop.orders-1"]' in mermaid(THIRTY)
    assert '["eu_mail"]' in mermaid(topology(made("eu_mail")))


def test_mermaid_draws_thirty_consumers_within_its_own_limits() -> None:
    text = mermaid(THIRTY)
    assert len(re.findall(r"-->|-\.->", text)) == 8 * 30 - 2 * 5  # five are tried once
    assert len(text) < 50_000


@pytest.mark.parametrize("draw", [mermaid, dot])
def test_each_attempts_delays_stand_in_one_box(draw: Any) -> None:
    text = draw(ONE)
    for delays in (
        ("500ms", "1s", "1500ms", "2s"),
        ("1s", "2s", "3s", "4s"),
        ("1s", "2s", "4s", "8s"),
    ):
        assert any(all(re.search(rf"(?<!\d){d}\b", label) for d in delays)
                   for label in re.findall(r'"([^"]*)"', text))  # fmt: skip
