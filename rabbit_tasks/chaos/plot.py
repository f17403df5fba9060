"""The rate over time: a few lines of text for a terminal, and an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from rabbit_tasks.chaos.account import Account

BLOCKS: Final = " ▁▂▃▄▅▆▇█"


def text(account: Account, width: int = 60, height: int = 4) -> str:
    """Tasks done per second, and under it where workers died (·) and the broker was hurt (x)."""
    if not account.done:
        return ""
    width = max(10, width)
    rates = _columns(account.done_over_time, width)
    size = len(rates)
    span = len(account.done_over_time) * account.bucket
    column = span / size
    rates = [n / column for n in rates]
    top = max(rates)
    label = max(len(_number(top)), 2)
    lines = []
    for row in range(height, 0, -1):
        drawn = "".join(_block(rate / top * height - (row - 1)) for rate in rates)
        beside = _number(top) if row == height else ""
        lines.append(f"{beside:>{label}} ┤{drawn}".rstrip())
    marks = ["·" if n else " " for n in _columns(account.deaths_over_time, width)]
    for began, ended in account.hurts:
        for i in range(int(began / column), int(ended / column) + 1):
            if 0 <= i < size:
                marks[i] = "x"
    lines.append(f"{'0':>{label}} ┼{'─' * size}")
    end = _span(span)
    lines.append(f"{'':>{label}}  {'0 s'}{end:>{max(1, size - 3)}}")
    if any(mark != " " for mark in marks):
        lines.insert(-1, f"{'':>{label}}  {''.join(marks)}".rstrip())
    return "\n".join(lines)


def _columns(counts: Sequence[int], width: int) -> list[float]:
    """The counts summed up into at most so many columns of even width."""
    size = min(width, len(counts))
    columns = [0.0] * size
    part = size / len(counts)  # of a column: how wide one count is
    for i, count in enumerate(counts):
        first = min(size - 1, int(i * part))
        # One that lies across two columns belongs to both.
        over = max(0.0, (i + 1) * part - (first + 1)) / part
        if first + 1 == size or over < 1e-9:
            over = 0.0
        else:
            columns[first + 1] += count * over
        columns[first] += count * (1 - over)
    return columns


def _block(level: float) -> str:
    return BLOCKS[max(0, min(8, round(level * 8)))]


def _number(value: float) -> str:
    return f"{value:,.0f}/s" if value >= 10 else f"{value:.1f}/s"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


# --- SVG ----------------------------------------------------------------------------------------

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 64, 92
# As attributes, not as a style sheet, which some viewers leave out.
_LOOKS: Final = {
    "title": 'font-size="16" font-weight="600" fill="#111"',
    "grid": 'stroke="#e3e3e3"',
    "axis": 'stroke="#888"',
    "rate": 'fill="#2a6fb0" fill-opacity="0.16" stroke="#2a6fb0" stroke-width="1.5"',
    "deaths": 'fill="#d1822a"',
    "hurt": 'fill="#c0392b" fill-opacity="0.16"',
    "hurt-edge": 'stroke="#c0392b" stroke-width="1.5"',
}


def _look(kind: str) -> str:
    return f'class="{kind}" {_LOOKS[kind]}'


def svg(account: Account, title: str) -> str:
    """The same as a picture: the rate as an area, deaths as bars under it, hurts as red bands."""
    bucket, done = account.bucket, account.done_over_time or [0]
    deaths = account.deaths_over_time or [0]
    span = max(len(done) * bucket, 0.1)
    rates = [n / bucket for n in done]
    top = _round_up(max(*rates, 1.0))
    floor = HEIGHT - BOTTOM

    def x(seconds: float) -> float:
        return LEFT + min(span, max(0.0, seconds)) / span * (WIDTH - LEFT - RIGHT)

    def y(rate: float) -> float:
        return floor - rate / top * (floor - TOP)

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        '<g font-family="system-ui, sans-serif" font-size="12" fill="#444">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text {_look("title")} x="{LEFT}" y="26">{escape(title)}</text>',
        f'<text x="{LEFT}" y="46">{escape(_summary(account))}</text>',
    ]
    for began, ended in account.hurts:
        left, right = x(began), x(ended)
        drawn.append(
            f'<rect {_look("hurt")} x="{left:.1f}" y="{TOP}" width="{max(1.0, right - left):.1f}" '
            f'height="{floor - TOP}"/>'
            f'<line {_look("hurt-edge")} x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" y2="{floor}"/>'
        )
    for step in range(5):
        rate = top * step / 4
        drawn.append(
            f'<line {_look("grid" if step else "axis")} x1="{LEFT}" x2="{WIDTH - RIGHT}" '
            f'y1="{y(rate):.1f}" y2="{y(rate):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:,.4g}</text>'
        )
    # Each part of the run at its middle; the area begins and ends on the ground.
    points = [(x((i + 0.5) * bucket), y(rate)) for i, rate in enumerate(rates)]
    path = " ".join(f"L{px:.1f} {py:.1f}" for px, py in points)
    drawn.append(
        f'<path {_look("rate")} d="M{points[0][0]:.1f} {floor} {path} L{points[-1][0]:.1f} {floor} Z"/>'
    )
    most, part = max(*deaths, 1), (WIDTH - LEFT - RIGHT) / len(deaths)
    for i, count in enumerate(deaths):
        if count:
            tall = max(2.0, 26 * count / most)
            drawn.append(
                f'<rect {_look("deaths")} x="{x(i * bucket):.1f}" y="{floor + 6}" '
                f'width="{max(1.0, part - 0.5):.1f}" height="{tall:.1f}"/>'
            )
    step_seconds = _tick(span)
    for tick in range(int(span / step_seconds) + 1):
        at = tick * step_seconds
        drawn.append(
            f'<line {_look("axis")} x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{floor}" y2="{floor + 4}"/>'
            f'<text x="{x(at):.1f}" y="{floor + 50}" text-anchor="middle">'
            f"{_clock(at, step_seconds)}</text>"
        )
    drawn.append(_legend(floor + 76, most, with_hurts=bool(account.hurts)))
    drawn.append("</g></svg>")
    return "\n".join(drawn) + "\n"


def _summary(account: Account) -> str:
    told = [
        f"{account.published:,} published", f"{account.done:,} done",
        f"{account.parked_tasks:,} parked", f"{len(account.lost):,} lost",
        f"{account.deaths:,} workers killed", f"{account.rate:,.0f} done/s",
    ]  # fmt: skip
    return " · ".join(told)


def _legend(y: float, most: int, *, with_hurts: bool) -> str:
    entries = [
        ("rate", "tasks done per second"),
        ("deaths", f"worker deaths (most at once: {most:,})"),
    ]
    if with_hurts:
        entries.append(("hurt", "the broker is being hurt"))
    drawn, at = [], float(LEFT)
    for kind, words in entries:
        drawn.append(
            f'<rect {_look(kind)} x="{at:.0f}" y="{y - 10}" width="14" height="10"/>'
            f'<text x="{at + 20:.0f}" y="{y}">{words}</text>'
        )
        at += 60 + 6.5 * len(words)
    return "".join(drawn)


def _round_up(value: float) -> float:
    """The next number that a person would write on an axis of four parts."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 4, 6, 8, 10) if n * power >= value - 1e-9)


def _tick(span: float) -> float:
    """Seconds between two marks: round, and at most ten of them."""
    lengths = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400)
    return float(next((n for n in lengths if span / n <= 10), math.ceil(span / 10)))


def _clock(seconds: float, step: float) -> str:
    if step < 1:
        return f"{seconds:.1f} s"
    if step < 60 and seconds < 300:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
