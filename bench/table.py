"""Results for a README: a Markdown table of medians and ratios; or lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bench.contenders import OURS
from bench.measure import Figure
from bench.profile import Function, Profile
from bench.race import Result

NONE = "-"


def head(names: Sequence[str], baseline: str) -> list[str]:
    """The two first lines of the table; they do not wait for the widths of the others."""
    columns = ["measure", *names, f"ratio to {baseline}", "goal"]
    return [_row(columns), "|---|" + "---|" * (len(columns) - 1)]


def row(result: Result, names: Sequence[str], baseline: str) -> str:
    """A figure: every contender's median and its ratio to the baseline's; then ours, and the goal."""
    figure = result.figure
    cells = [f"{figure.text}, {figure.unit}"]
    for name in names:
        ratio = result.ratio(name, baseline)
        beside = "" if name in (OURS, baseline) or ratio is None else f" ({ratio:.2f})"
        cells.append(_number(result.median(name)) + beside)
    return _row([*cells, _ratio(result.ratio(OURS, baseline)), _goal(result, baseline)])


def _goal(result: Result, baseline: str) -> str:
    figure = result.figure
    if figure.goal is None or not (figure.is_absolute or baseline == "aio-pika"):
        return ""
    text, found = _bound(figure), result.of_goal(OURS, baseline)
    if found is None:
        return text
    return f"{text} {'✓' if figure.is_reached(found) else '✗'}"


def _bound(figure: Figure, slack: float = 1.0) -> str:
    sign = "≥" if figure.more_is_better else "≤"
    return f"{sign} {figure.bound(slack):g}{f' {figure.unit}' if figure.is_absolute else ''}"


def regression(result: Result, baseline: str, slack: float) -> str | None:
    """What is so much worse than its goal, or was not measured, in a line; None where all is well."""
    figure, found = result.figure, result.of_goal(OURS, baseline)
    if figure.goal is None or (found is not None and figure.is_reached(found, slack)):
        return None
    what = "its ratio to aio-pika" if not figure.is_absolute else "it"
    is_ = "was not measured" if found is None else f"is {_number(found)}"
    return f"{result.measure.name} ({figure.text}): {what} {is_}; wanted {_bound(figure, slack)}"


def lines(result: Result, baseline: str, versions: dict[str, str]) -> list[str]:
    """One line of JSON for each contender."""
    return [
        json.dumps(
            {
                "measure": result.measure.name,
                "figure": result.figure.name,
                "unit": result.figure.unit,
                "contender": name,
                "version": versions[name],
                "median": result.median(name),
                "ratio": result.ratio(name, baseline),
                "to": baseline,
                "rounds": rounds,
                "load": result.load,
            }
        )
        for name, rounds in result.rounds.items()
    ]


def profile_rows(profile: Profile, most: int) -> list[str]:
    """Libraries, then functions, with their shares of the CPU time."""
    return [
        "    own  with asyncio's for it  library",
        *(
            f"{own:7.1%}  {caused:20.1%}  {name}"
            for name, own, caused in profile.libraries()
            if own >= 0.002
        ),
        *_functions("most by themselves", profile.functions(most)),
        *_functions("most with what they call", profile.functions(most, by_own=False)),
    ]


def _functions(title: str, functions: Sequence[Function]) -> list[str]:
    return [
        "",
        f"    own    total  function: {title}",
        *(f"{one.own:7.1%}  {one.total:7.1%}  {one.place}" for one in functions),
    ]


def profile_lines(profile: Profile, most: int) -> list[str]:
    """The same as lines of JSON."""
    libraries = [
        {"library": name, "own": own, "caused": caused} for name, own, caused in profile.libraries()
    ]
    functions = [
        {"function": one.place, "own": one.own, "total": one.total}
        for one in profile.functions(most)
    ]
    return [json.dumps(one) for one in (*libraries, *functions)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
