"""python -m bench: what to measure, beside whom, how often."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from bench import __doc__ as usage
from bench import growth, table
from bench.contenders import OURS, PEERS, RAW
from bench.lane import Failed
from bench.machine import load, machine
from bench.measure import MEASURES, Measure, Size
from bench.profile import Profile
from bench.race import Race, Result, opened
from rabbit_tasks.broker import connected
from rabbit_tasks.errors import RabbitTasksError
from rabbit_tasks.settings import Settings

QUICK = 140.0
"""Seconds for all measures of `quick`, after which there are fewer rounds."""
BASELINE = RAW[0]
"""Whose ratios the goals are."""
SLACK = 1.5
"""How much worse than its goal a figure may be in a check: rates wander, by a third or so."""
FUNCTIONS = 40
"""Lines of a profile."""


def main(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[quick | check | growth | profile MEASURE | MEASURE…]", show_default=False
        ),
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="NAME,…", help=f"{', '.join((*RAW, *PEERS))}.")
    ] = ",".join(RAW),
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Of every measure: 5, or 3 where it is quick.")
    ] = None,
    most: Annotated[
        int, typer.Option(min=10, help="Of growth: messages that are queued in the end.")
    ] = 100_000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Lines of JSON, with every round.")
    ] = False,
) -> None:
    """Measure rabbit_tasks beside others on the broker of RABBIT_TASKS_URL."""
    first, *rest = words or [""]
    is_profile, is_check = first == "profile", first == "check"
    is_quick = is_check or first == "quick"
    if words == ["growth"]:
        show_growth(most)
        return
    named = rest if is_profile or is_quick else words or []
    measures = [measure_of(name) for name in named] or list(MEASURES)
    if is_profile and (len(named) != 1 or named == ["start"]):
        raise typer.BadParameter(f"profile takes one of {', '.join(_names()[:-1])}")
    others = [name for name in against.split(",") if name] if not is_check else [BASELINE]
    if unknown := [name for name in others if name not in (*RAW, *PEERS)]:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join((*RAW, *PEERS))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        settings = Settings()
        url, server = url_of(settings), asyncio.run(version_of(settings))
        with opened(url, [OURS] if is_profile else [OURS, *others], tell) as race:
            if is_profile:
                show_profile(race, measures[0], as_json)
            else:
                size: Size = "quick" if is_quick else "whole"
                found = compare(
                    race, measures, size, rounds or (3 if is_quick else 5), as_json, server
                )
                if is_check:
                    judge(found)
    except KeyboardInterrupt:
        tell("interrupted; the queues of this run are removed")
        raise typer.Exit(130) from None
    except (Failed, RabbitTasksError, OSError) as error:
        tell(f"error: {error}")
        raise typer.Exit(1) from None


def compare(
    race: Race, measures: list[Measure], size: Size, rounds: int, as_json: bool, server: str
) -> list[Result]:
    """A row for every figure as soon as it is there."""
    names = [lane.name for lane in race.lanes]
    baseline = next((name for name in RAW if name in names), names[-1])
    versions = ", ".join(f"{name} {version}" for name, version in race.versions.items())
    tell(f"{versions}; RabbitMQ {server}; {machine()}; {load()}")
    fewest, found = rounds, []
    if not as_json:
        show(*table.head(names, baseline))
    for result in race.run(measures, size, rounds, QUICK if size == "quick" else None):
        if as_json:
            show(*table.lines(result, baseline, race.versions))
        else:
            show(table.row(result, names, baseline))
        fewest = min(fewest, len(result.load))
        found.append(result)
    tell(f"medians of {fewest} rounds{f' to {rounds}' if fewest < rounds else ''}; {load()}")
    return found


def judge(found: list[Result]) -> None:
    """Exit 1 where a figure is far from its goal."""
    worse = [text for one in found if (text := table.regression(one, BASELINE, SLACK))]
    for text in worse:
        tell(f"worse: {text}")
    if worse:
        raise typer.Exit(1)
    tell(f"every figure is within {SLACK:g} times its goal")


def show_growth(most: int) -> None:
    """What a message costs beside more of everything, a row as soon as it is there."""

    async def rows() -> None:
        async for row in growth.grown(Settings(), most):
            show(growth.row(row))

    tell(f"{machine()}; {load()}")
    show(*growth.HEAD)
    try:
        asyncio.run(rows())
    except RabbitTasksError as error:
        tell(f"error: {error}")
        raise typer.Exit(1) from None


def show_profile(race: Race, measure: Measure, as_json: bool) -> None:
    """Libraries and functions by their share of the CPU time, of rabbit_tasks alone."""
    (lane,) = race.lanes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples")
        figures = race.once(lane, measure, measure.count("whole"), path)
        profile = Profile(path)
    tell(f"{measure.name}: {profile.samples} samples; {figures}; {machine()}; {load()}")
    if as_json:
        show(*table.profile_lines(profile, FUNCTIONS))
    else:
        show(*table.profile_rows(profile, FUNCTIONS))


def measure_of(name: str) -> Measure:
    for measure in MEASURES:
        if measure.name == name:
            return measure
    raise typer.BadParameter(
        f"{name} is none of quick, check, growth, profile, {', '.join(_names())}"
    )


def _names() -> list[str]:
    return [measure.name for measure in MEASURES]


async def version_of(settings: Settings) -> str:
    """The broker's; ConnectError where it does not let us in."""
    async with connected(settings, "bench") as connection:
        return connection.server_version


def url_of(settings: Settings) -> str:
    """The first node's, as everybody's client reads it."""
    address = settings.addresses()[0]
    if address.tls:
        raise Failed("RABBIT_TASKS_URL: TLS would be most of what is measured; take amqp://")
    user, password, vhost = (
        quote(text, safe="") for text in (address.user, address.password, address.vhost)
    )
    return f"amqp://{user}:{password}@{address.host}:{address.port}/{vhost}"


def show(*lines: str) -> None:
    for line in lines:
        typer.echo(line)


def tell(text: str) -> None:
    typer.echo(text, err=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=usage, epilog=f"Measures: {', '.join(_names())}")(main)
    app()
