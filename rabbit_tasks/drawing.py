"""Pictures of a topology: a tree for terminals, Mermaid, Graphviz, and an SVG with a layout of our own.

Pure: a topology in, text out; the same topology, the same text. All of them show the same life of a
message, but for the tree, which names the queues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final
from xml.sax.saxutils import escape

from rabbit_tasks.durations import duration_text
from rabbit_tasks.retry import MILLISECOND
from rabbit_tasks.text import escaped
from rabbit_tasks.topology import PARKING_LOT, Queue, Topology, retry_queue

FAILS: Final = "handler fails"
DIED: Final = "workers died"
COPIED: Final = "copy, confirm, ack"
HOME: Final = "TTL over"
PARKS: Final = "attempts spent, Park, malformed body, died too often: copy, confirm, ack"
BROKER_PARKS: Final = "rejected, over the delivery limit: the broker itself"
REPLAY: Final = "replay, by a person"
IN_WORDS: Final = (
    "What is published waits in a main queue. A failed attempt waits in a retry queue of that attempt, "
    "and a message whose workers died in a crashed queue, until a TTL brings it back. What cannot "
    f"succeed goes by the exchange {PARKING_LOT} to a parked queue, until a person replays it."
)


@dataclass(frozen=True)
class Wait:
    """Queues in which a message waits for the same reason: of one attempt, or of several alike."""

    first: int
    """The attempt that failed; the first of those that have the same delays. 0: workers died."""
    last: int
    delays: tuple[str, ...]

    @property
    def title(self) -> str:
        if self.first == self.last:
            return f"attempt {self.first}"
        return f"attempts {self.first}-{self.last}"


@dataclass(frozen=True)
class Life:
    """A main queue and the queues that serve it."""

    main: Queue
    retries: tuple[Wait, ...]
    crashed: tuple[str, ...]
    """Delays."""
    parked: str

    @property
    def attempts(self) -> int:
        return max((wait.last for wait in self.retries), default=0) + 1


def lives(topology: Topology) -> list[Life]:
    """The main queues with what serves them, in the topology's order."""
    return [_life(topology, queue) for queue in topology.queues if queue.role == "main"]


def _life(topology: Topology, main: Queue) -> Life:
    served = [queue for queue in topology.queues if queue.main == main.name]
    after: dict[int, list[str]] = {}
    for queue in served:
        if queue.role == "retry":
            after.setdefault(_attempt(queue), []).append(_delay(queue))
    retries = []
    for delays, same in groupby(after.items(), key=lambda one: tuple(one[1])):
        attempts = [attempt for attempt, _ in same]
        retries.append(Wait(attempts[0], attempts[-1], delays))
    crashed = tuple(_delay(queue) for queue in served if queue.role == "crashed")
    (parked,) = (queue.name for queue in served if queue.role == "parked")
    return Life(main, tuple(retries), crashed, parked)


def _attempt(queue: Queue) -> int:
    before = len(retry_queue(queue.main, 0, MILLISECOND).rpartition("0.")[0])
    return int(queue.name[before:].partition(".")[0])


def _delay(queue: Queue) -> str:
    return duration_text(queue.arguments["x-message-ttl"] * MILLISECOND)


# --- tree ---------------------------------------------------------------------------------------


def tree(topology: Topology) -> str:
    """For a terminal: every queue by its name, a line each."""
    lines = []
    for main in (q for q in topology.queues if q.role == "main"):
        limit = main.arguments["x-delivery-limit"]
        lines.append(f"{main.name}   (quorum, delivery limit {limit})")
        served = [q for q in topology.queues if q.main == main.name and q.role != "main"]
        for queue in served:
            if queue.role == "parked":
                lines.append(f"└── {queue.name}   set aside, by exchange {PARKING_LOT}")
                continue
            why = "where workers died, then back" if queue.role == "crashed" else "then back"
            lines.append(f"├── {queue.name}   waits {_delay(queue)}, {why} to {main.name}")
    return "\n".join([*lines, ""]) if lines else ""


# --- Mermaid ------------------------------------------------------------------------------------


def mermaid(topology: Topology) -> str:
    """A Mermaid flowchart, which GitHub and GitLab draw where it stands in a Markdown block.

    The retry queues of an attempt are one box. Eight arrows a consumer: Mermaid draws at most 500,
    unless its maxEdges says otherwise.
    """
    found = lives(topology)
    lines = ["flowchart LR"]
    if found:
        lines.append(f"    lot{{{{{_mermaid('exchange', PARKING_LOT)}}}}}")
    for n, life in enumerate(found, 1):
        q = f"q{n}"
        lines += [
            f"    {q}in([publish]) --> {q}[{_mermaid(life.main.name)}]",
            *_mermaid_waits(f"{q}r", "retry queues", life.retries),
            *_mermaid_waits(f"{q}c", "crashed queues", _died(life)),
        ]
        if life.retries:
            lines += [
                f"    {q} -->|{_mermaid(FAILS + ':', COPIED)}| {q}r",
                f"    {q}r -->|{_mermaid(HOME)}| {q}",
            ]
        if life.crashed:
            lines += [
                f"    {q} -->|{_mermaid(DIED + ':', COPIED)}| {q}c",
                f"    {q}c -->|{_mermaid(HOME)}| {q}",
            ]
        lines += [
            f"    {q} -->|{_mermaid(*PARKS.split(': '), BROKER_PARKS)}| lot",
            f"    lot --> {q}p[({_mermaid(life.parked)})]",
            f"    {q}p -.->|{_mermaid(REPLAY)}| {q}",
        ]
    return "\n".join(lines) + "\n"


def _mermaid_waits(name: str, title: str, waits: Sequence[Wait]) -> Iterable[str]:
    if waits:
        yield f"    subgraph {name}[{_mermaid(title)}]"
        for i, wait in enumerate(waits, 1):
            words = [wait.title] if wait.first else []
            yield f"        {name}{i}[{_mermaid(*words, ' · '.join(wait.delays))}]"
        yield "    end"


# Mermaid's own syntax, Markdown and HTML all have a meaning in a label.
_NOT_PLAIN: Final = re.compile(
    r"[^\w .:·,-]"
    r"|^[- ]|-(?=-)|\.(?= )"  # a list's beginning, a line
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis
    r"| $|(?<= ) "  # blanks that would be lost
)


def _mermaid(*lines: str) -> str:
    def code(found: re.Match[str]) -> str:
        return "#160;" if found[0] == " " else f"#{ord(found[0])};"  # (160: no-break space)

    texts = (_NOT_PLAIN.sub(code, escaped(line)) for line in lines)
    return '"' + "<br>".join(texts) + '"'


# --- Graphviz -----------------------------------------------------------------------------------


def dot(topology: Topology) -> str:
    """A graph in Graphviz' language: `rabbit-tasks topology show --format dot | dot -Tpng`."""
    lines = [
        "digraph topology {",
        "    rankdir=LR",
        '    graph [fontname="Helvetica" fontsize=11 color="#888888" bgcolor="white" style=rounded]',
        '    node [fontname="Helvetica" fontsize=11 shape=box style="rounded,filled"]',
        '    node [color="#59636e" fillcolor="#f6f8fa"]',
        '    edge [fontname="Helvetica" fontsize=9 color="#59636e" fontcolor="#59636e"]',
    ]
    found = lives(topology)
    if found:
        lines.append(f"    lot [shape=hexagon style=filled label={_dot('exchange', PARKING_LOT)}]")
    for n, life in enumerate(found, 1):
        q = f"q{n}"
        lines += [
            f'    {q} [color="#0969da" fillcolor="#ddf4ff" label={_dot(life.main.name)}]',
            f"    {q}in [shape=plaintext style=solid label=publish]",
            f"    {q}in -> {q}",
        ]
        for i, wait in enumerate(life.retries, 1):
            lines += [
                f'    {q}r{i} [color="#bf8700" fillcolor="#fff8c5"]',
                f"    {q}r{i} [label={_dot(f'retry, {wait.title}', *_rows(wait.delays))}]",
                f"    {q} -> {q}r{i} [label={_dot(FAILS + ':', COPIED)}]",
                f"    {q}r{i} -> {q} [constraint=false label={_dot(HOME)}]",
            ]
        if life.crashed:
            lines += [
                f'    {q}c [color="#cf222e" fillcolor="#ffebe9"]',
                f"    {q}c [label={_dot('crashed', *_rows(life.crashed))}]",
                f"    {q} -> {q}c [label={_dot(DIED + ':', COPIED)}]",
                f"    {q}c -> {q} [constraint=false label={_dot(HOME)}]",
            ]
        lines += [
            f'    {q}p [color="#8250df" fillcolor="#fbefff" label={_dot(life.parked)}]',
            f"    {q} -> lot [label={_dot(*PARKS.split(': '), BROKER_PARKS)}]",
            f"    lot -> {q}p [label={_dot('key ' + life.main.name)}]",
            f"    {q}p -> {q} [constraint=false style=dashed label={_dot(REPLAY)}]",
        ]
    return "\n".join([*lines, "}"]) + "\n"


def _dot(*lines: str) -> str:
    # A backslash begins an escape (\N is the node's name), & one of HTML's names.
    texts = (
        escaped(line).replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;")
        for line in lines
    )
    return '"' + r"\n".join(texts) + '"'


def _rows(delays: Sequence[str], width: int = 6) -> Iterable[str]:
    for i in range(0, len(delays), width):
        yield "  ".join(delays[i : i + width])


def _died(life: Life) -> tuple[Wait, ...]:
    return (Wait(0, 0, life.crashed),) if life.crashed else ()


# --- SVG ----------------------------------------------------------------------------------------

WIDTH: Final = 1040
_PAD: Final = 24
_MAIN, _MAIN_WIDTH = 104, 192
_WAITS, _WAITS_WIDTH = 434, 288
_LOT, _LOT_WIDTH = 762, 34
_PARKED, _PARKED_WIDTH = 836, 180
_LETTER: Final = 7.3
"""The width of a letter of a queue's name: a monospaced one of 12 pixels has 0.6 of its size."""

# As attributes, because some viewers leave out style sheets; the dark ones as a style sheet, for the
# viewers that know whether it is dark. The card has a ground of its own, so that it can be read on any.
_LIGHT: Final = {
    "card": {"fill": "#ffffff", "stroke": "#d0d7de"},
    "rule": {"stroke": "#e4e8ec"},
    "main": {"fill": "#ddf4ff", "stroke": "#0969da"},
    "retry": {"fill": "#fff8c5", "stroke": "#bf8700"},
    "crashed": {"fill": "#ffebe9", "stroke": "#cf222e"},
    "parked": {"fill": "#fbefff", "stroke": "#8250df"},
    "lot": {"fill": "#f6f8fa", "stroke": "#59636e"},
    "chip": {"fill": "#ffffff"},
    "text": {"fill": "#1f2328"},
    "word": {"fill": "#59636e"},
    "to-main": {"stroke": "#0969da"}, "tip-main": {"fill": "#0969da"},
    "to-retry": {"stroke": "#bf8700"}, "tip-retry": {"fill": "#bf8700"},
    "to-crashed": {"stroke": "#cf222e"}, "tip-crashed": {"fill": "#cf222e"},
    "to-parked": {"stroke": "#8250df"}, "tip-parked": {"fill": "#8250df"},
}  # fmt: skip
_DARK: Final = {
    "card": {"fill": "#0d1117", "stroke": "#3d444d"},
    "rule": {"stroke": "#262c36"},
    "main": {"fill": "#10233f", "stroke": "#4493f8"},
    "retry": {"fill": "#2b230f", "stroke": "#d29922"},
    "crashed": {"fill": "#2f1719", "stroke": "#f85149"},
    "parked": {"fill": "#231a36", "stroke": "#ab7df8"},
    "lot": {"fill": "#1b2129", "stroke": "#9198a1"},
    "chip": {"fill": "#0d1117"},
    "text": {"fill": "#f0f6fc"},
    "word": {"fill": "#9198a1"},
    "to-main": {"stroke": "#4493f8"}, "tip-main": {"fill": "#4493f8"},
    "to-retry": {"stroke": "#d29922"}, "tip-retry": {"fill": "#d29922"},
    "to-crashed": {"stroke": "#f85149"}, "tip-crashed": {"fill": "#f85149"},
    "to-parked": {"stroke": "#ab7df8"}, "tip-parked": {"fill": "#ab7df8"},
}  # fmt: skip
_SANS: Final = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_MONO: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def svg(topology: Topology, title: str) -> str:
    """A picture that needs nothing but a viewer: one band a consumer, one exchange along them all.

    title   said to those who cannot see it, and shown by a browser where the mouse rests
    """
    found = lives(topology)
    top, y = 44.0, 44.0
    bands = []
    for life in found:
        bands.append((life, y))
        y += _Band(life).height
    height = y + 4 if found else 84
    size = f'width="{WIDTH}" height="{height:g}"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" {size} role="img">',
        f"<title>{_xml(title)}</title>",
        f"<desc>{_xml(IN_WORDS)}</desc>",
        f"<style>.name {{ white-space: pre }} {_dark()}</style>",
        f'<g font-family="{_SANS}" font-size="12">',
        f'<rect {_look("card")} x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="12"/>',
    ]
    if not found:
        drawn.append(_words(WIDTH / 2, 46, "no consumers", anchor="middle"))
    else:
        for x, width, words in (
            (_MAIN, _MAIN_WIDTH, "MAIN QUEUE"), (_WAITS, _WAITS_WIDTH, "WAITS ON THE BROKER"),
            (_LOT, _LOT_WIDTH, "EXCHANGE"), (_PARKED, _PARKED_WIDTH, "PARKED"),
        ):  # fmt: skip
            drawn.append(_words(x + width / 2, 27, words, anchor="middle", more='font-size="10.5"'))
    for i, (_, at) in enumerate(bands):
        if i:
            drawn.append(f'<path {_look("rule")} d="M{_PAD} {at:g}H{WIDTH - _PAD}"/>')
    # Lines first: they pass behind the exchange, which stands for all the bands.
    parts = [_Band(life).drawn(at) for life, at in bands]
    for lines, _ in parts:
        drawn += lines
    if found:
        last, at = bands[-1]
        drawn += _exchange(top, at + _Band(last).lane + 14)
    for _, boxes in parts:
        drawn += boxes
    return "\n".join([*drawn, "</g>", "</svg>"]) + "\n"


class _Band:
    """One consumer's part of the picture; `drawn` gives its lines and what stands on them."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._name = _wrapped(life.main.name, _MAIN_WIDTH)
        self._parked = _wrapped(life.parked, _PARKED_WIDTH)
        self._delays_at = 92 if all(wait.first == wait.last for wait in life.retries) else 108
        self._retry = [
            (wait.title, list(_chip_rows(wait.delays, _WAITS_WIDTH - 12 - self._delays_at)))
            for wait in life.retries
        ]
        self._crashed = list(_chip_rows(life.crashed, _WAITS_WIDTH - 24))
        rows = sum(len(rows) for _, rows in self._retry)
        self._retry_height = 34 + 26 * rows if rows else 0
        self._crashed_height = 34 + 26 * len(self._crashed) if self._crashed else 0
        waits = self._retry_height + self._crashed_height
        waits += 14 if self._retry_height and self._crashed_height else 0
        self._parked_height = 16 * len(self._parked) + 44
        self._main_height = max(waits, 16 * len(self._name) + 76, self._parked_height - 40)

    _TOP: Final = 14

    @property
    def lane(self) -> float:
        """Where the way to the exchange runs, below the band's upper edge."""
        return self._TOP + self._main_height + 34

    @property
    def height(self) -> float:
        return self.lane + 60

    def drawn(self, top: float) -> tuple[list[str], list[str]]:
        life, y = self._life, top + self._TOP
        main, right = _MAIN + _MAIN_WIDTH, _WAITS + _WAITS_WIDTH
        bottom, lane = y + self._main_height, top + self.lane
        middle = y + self._main_height / 2
        lines, boxes = [], []

        lines += _arrow("main", (_PAD, middle), (_MAIN, middle))
        lines.append(_words(_PAD, middle - 8, "publish"))

        boxes.append(_box("main", _MAIN, y, _MAIN_WIDTH, self._main_height, life.main.name))
        attempts = f"{life.attempts} attempts" if life.attempts > 1 else "1 attempt"
        about = [attempts, f"delivery limit {life.main.arguments['x-delivery-limit']}"]
        at = middle - (16 * len(self._name) + 8 + 16 * len(about)) / 2 + 12
        boxes += _name(_MAIN + _MAIN_WIDTH / 2, at, self._name)
        for i, words in enumerate(about):
            below = at + 16 * len(self._name) + 6 + 16 * i
            boxes.append(_words(_MAIN + _MAIN_WIDTH / 2, below, words, anchor="middle"))

        at = y
        for kind, height, why, titled in (
            ("retry", self._retry_height, FAILS, self._retry),
            ("crashed", self._crashed_height, DIED, [("", self._crashed)]),
        ):
            if not height:
                continue
            there, back = at + height / 2 - 10, at + height / 2 + 18
            lines += _arrow(kind, (main, there), (_WAITS, there))
            lines += _arrow("main", (_WAITS, back), (main, back))
            centre = (main + _WAITS) / 2
            lines += [
                _words(centre, there - 20, why, anchor="middle"),
                _words(centre, there - 6, COPIED, anchor="middle"),
                _words(centre, back - 6, HOME, anchor="middle"),
            ]
            names = f"{life.main.name}.{'retry.N' if kind == 'retry' else 'crashed'}.DELAY"
            boxes.append(_box(kind, _WAITS, at, _WAITS_WIDTH, height, names))
            boxes.append(_words(_WAITS + 12, at + 19, f"{kind} queues"))
            boxes += _chips(at + 28, self._delays_at, titled)
            at += height + 14

        out, home = _MAIN + _MAIN_WIDTH - 48, _MAIN + 48
        lines += _arrow("parked", (out, bottom), (out, lane), (_LOT, lane))
        lines += [
            _words(out + 10, lane - 7, PARKS),
            _words(out + 10, lane + 15, BROKER_PARKS),
        ]
        box = lane + 14 - self._parked_height
        into = box + self._parked_height / 2
        lines += _arrow("parked", (_LOT + _LOT_WIDTH, into), (_PARKED, into))
        boxes.append(_box("parked", _PARKED, box, _PARKED_WIDTH, self._parked_height, life.parked))
        boxes += _name(_PARKED + _PARKED_WIDTH / 2, box + 23, self._parked)
        boxes.append(
            _words(
                _PARKED + _PARKED_WIDTH / 2, box + self._parked_height - 14,
                "list, show, replay, discard", anchor="middle",
            )
        )  # fmt: skip
        under, person = lane + 36, _PARKED + _PARKED_WIDTH / 2
        lines += _arrow(
            "main", (person, box + self._parked_height), (person, under), (home, under),
            (home, bottom), dashed=True,
        )  # fmt: skip
        lines.append(_words(right - 4, under - 6, REPLAY, anchor="end"))
        return lines, boxes


def _exchange(top: float, bottom: float) -> list[str]:
    centre = _LOT + _LOT_WIDTH / 2
    drawn = [_box("lot", _LOT, top + 6, _LOT_WIDTH, bottom - top - 6, f"exchange {PARKING_LOT}")]
    # Its name again and again, so that no part of a long picture is without.
    count = max(1, int((bottom - top) // 500))
    for i in range(count):
        y = top + 6 + (bottom - top - 6) * (i + 0.5) / count
        drawn.append(
            f'<text {_look("text")} font-family="{_MONO}" x="{centre:g}" y="{y:.1f}" '
            f'text-anchor="middle" transform="rotate(-90 {centre:g} {y:.1f}) translate(0 4)">'
            f"{_xml(PARKING_LOT)}</text>"
        )
    return drawn


def _chip_rows(delays: Sequence[str], width: float) -> Iterable[list[tuple[str, float]]]:
    """Delays with their widths, in rows of this width."""
    row: list[tuple[str, float]] = []
    used = 0.0
    for delay in delays:
        wide = len(delay) * _LETTER + 10
        if row and used + wide > width:
            yield row
            row, used = [], 0.0
        row.append((delay, wide))
        used += wide + 5
    if row:
        yield row


def _chips(
    y: float, indent: float, titled: Iterable[tuple[str, list[list[tuple[str, float]]]]]
) -> list[str]:
    drawn = []
    for title, rows in titled:
        if title:
            drawn.append(_words(_WAITS + 12, y + 15, title, kind="text"))
        for row in rows:
            x = _WAITS + (indent if title else 12.0)
            for delay, wide in row:
                place = f'x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="21"'
                drawn.append(f'<rect {_look("chip")} {place} rx="6"/>')
                drawn += _name(x + wide / 2, y + 15, [delay])
                x += wide + 5
            y += 26
    return drawn


def _wrapped(name: str, width: float) -> list[str]:
    """The name in lines, broken behind a separator where there is one near the end."""
    most = int((width - 20) / _LETTER)
    left, lines = escaped(name), []
    while len(left) > most:
        head = left[:most]
        cut = max((head.rfind(c) + 1 for c in ".-_/: "), default=0)
        cut = cut if cut > most // 2 else most
        lines.append(left[:cut])
        left = left[cut:]
    return [*lines, left]


def _name(x: float, y: float, lines: Sequence[str]) -> list[str]:
    return [
        f'<text {_look("text", "name")} font-family="{_MONO}" xml:space="preserve" x="{x:.1f}" '
        f'y="{y + 16 * i:.1f}" text-anchor="middle">{_xml(line)}</text>'
        for i, line in enumerate(lines)
    ]


def _words(
    x: float, y: float, words: str, *, anchor: str = "start", kind: str = "word", more: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f"<text {_look(kind)} {place}{' ' + more if more else ''}>{_xml(words)}</text>"


def _box(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    return (
        f'<rect {_look(kind)} x="{x:g}" y="{y:.1f}" width="{width:g}" height="{height:.1f}" rx="8" '
        f'stroke-width="1.25"><title>{_xml(title)}</title></rect>'
    )


def _arrow(kind: str, *points: tuple[float, float], dashed: bool = False) -> list[str]:
    """A line with round corners from the first point to the last, and its tip; only along the axes."""
    (x1, y1), (x2, y2) = points[-2:]
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    path = f"M{points[0][0]:g} {points[0][1]:.1f}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        for other, verb in ((before, "L"), (after, f"Q{corner[0]:g} {corner[1]:.1f} ")):
            x = corner[0] + 8 * ((other[0] > corner[0]) - (other[0] < corner[0]))
            y = corner[1] + 8 * ((other[1] > corner[1]) - (other[1] < corner[1]))
            path += f"{verb}{x:g} {y:.1f}"
    path += f"L{x2 - 6 * dx:g} {y2 - 6 * dy:.1f}"
    tip = " ".join(
        f"{x2 - 8 * dx + side * 4 * dy:g},{y2 - 8 * dy + side * 4 * dx:.1f}" for side in (1, -1)
    )
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return [
        f'<path {_look(f"to-{kind}")} fill="none" stroke-width="1.5"{dashes} d="{path}"/>',
        f'<polygon {_look(f"tip-{kind}")} points="{x2:g},{y2:.1f} {tip}"/>',
    ]


def _look(kind: str, *classes: str) -> str:
    attributes = " ".join(f'{name}="{value}"' for name, value in _LIGHT[kind].items())
    return f'class="{" ".join((kind, *classes))}" {attributes}'


def _dark() -> str:
    rules = (
        f".{kind} {{ {'; '.join(f'{name}: {value}' for name, value in look.items())} }}"
        for kind, look in _DARK.items()
    )
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"


def _xml(text: str) -> str:
    return escape(escaped(text))
