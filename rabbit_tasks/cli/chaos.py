"""`rabbit-tasks chaos`: a loss test for the user's own broker."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from rabbit_tasks.cli import cli, run, settings_of, tell
from rabbit_tasks.durations import duration_of, duration_text
from rabbit_tasks.errors import ConfigurationError

if TYPE_CHECKING:
    from rabbit_tasks.chaos.account import Account
    from rabbit_tasks.chaos.plan import Plan
    from rabbit_tasks.chaos.trial import Progress, Result
    from rabbit_tasks.settings import Settings

NOW_AND_THEN: Final = 10.0
"""Seconds between two lines of progress where there is no terminal."""
SHOWN: Final = 10
"""Lost or unexplained tasks that are told one by one; the report has all."""


N = TypeVar("N", int, float)


def _number(option: str, kind: type[N]) -> Callable[[str | N], N]:
    """Reads an option's number; ConfigurationError, one line, where it is none."""

    def read(text: str | N) -> N:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigurationError(f"{option} is {text!r}; it takes {what}") from None

    return read


@cli.command("chaos")
def chaos(
    context: typer.Context,
    tasks: Annotated[
        int, typer.Option(parser=_number("--tasks", int), metavar="N", help="How many tasks.")
    ] = 10_000,
    kill: Annotated[
        float,
        typer.Option(
            parser=_number("--kill", float),
            metavar="P",
            help="How probably a run SIGKILLs its worker, most of them in mid-work.",
        ),
    ] = 0.05,
    workers: Annotated[
        int, typer.Option(parser=_number("--workers", int), metavar="N", help="Worker processes.")
    ] = 4,
    concurrency: Annotated[
        int,
        typer.Option(
            parser=_number("--concurrency", int),
            metavar="N",
            help="Messages that a worker has in hand at once.",
        ),
    ] = 1,
    work_time: Annotated[
        str, typer.Option(metavar="DURATION", help="How long a run works.")
    ] = "0ms",
    fail: Annotated[
        float,
        typer.Option(
            parser=_number("--fail", float),
            metavar="P",
            help="How probably an attempt fails, and is retried, up to 8 attempts.",
        ),
    ] = 0.0,
    poison: Annotated[
        float,
        typer.Option(
            parser=_number("--poison", float),
            metavar="P|N",
            help="Tasks that always kill their worker: below 1 a probability, else how many.",
        ),
    ] = 0.0,
    delivery_limit: Annotated[
        int,
        typer.Option(
            parser=_number("--delivery-limit", int),
            metavar="N",
            help="Deaths of its workers that a task survives; with one more it is parked.",
        ),
    ] = 5,
    seed: Annotated[
        int | None,
        typer.Option(
            parser=_number("--seed", int),
            metavar="N",
            help="Decides who dies and who fails.",
            show_default="drawn, and told",
        ),
    ] = None,
    broker_command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="A shell command that hurts the broker, and brings it back: "
            "'kill.sh && sleep 3 && start.sh'.",
        ),
    ] = None,
    hurts: Annotated[
        int,
        typer.Option(
            parser=_number("--hurts", int),
            metavar="N",
            help="How often to run it, spread over the work.",
        ),
    ] = 5,
    patience: Annotated[
        str,
        typer.Option(metavar="DURATION", help="Give up when nothing has moved for this long."),
    ] = "4m",
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The whole account, as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The rate over time, as SVG.")
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="An empty folder for what the workers write down.",
            show_default="a temporary one, kept if something is unaccounted for",
        ),
    ] = None,
) -> None:
    """Lose nothing, proven on your broker.

    Publish, work, SIGKILL workers, account for every task. In queues of its own,
    rabbit-tasks-chaos.RUN.*, which it creates and removes.

    Exit 1 if a task is unaccounted for, or ran twice and nothing explains it.
    """
    from rabbit_tasks.chaos.plan import Plan

    settings = settings_of(context)
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    plan = Plan(
        tasks=tasks, kill=kill, fail=fail, poison=poison, workers=workers, seed=seed,
        concurrency=concurrency, work_time=_duration("--work-time", work_time),
        delivery_limit=delivery_limit, run=secrets.token_hex(4), pid=os.getpid(),
    )  # fmt: skip
    if hurts < 1:
        raise ConfigurationError(f"--hurts is {hurts}; it takes a whole number from 1")
    waits = _duration("--patience", patience)
    for option, path in (("--report", report), ("--plot", plot)):
        _check_file(option, path)
    folder = _folder(ledger)

    from rabbit_tasks.chaos.trial import TrialError, forget

    _tell_plan(plan, settings, broker_command, hurts)
    number, is_kept = 0, False
    result: Result | None = None
    try:
        number, result, told = run(
            _chaos(plan, settings, folder, waits.total_seconds(), broker_command, hurts)
        )
    except TrialError:
        is_kept = True
        tell(f"what the workers wrote down is kept: {folder}")
        raise
    finally:
        if ledger is None and not is_kept and (result is None or result.is_clean):
            forget(folder)
    are_written = _write(report, json.dumps(told, indent=2) + "\n")
    if plot is not None:
        from rabbit_tasks.chaos.plot import svg

        are_written &= _write(plot, svg(result.account, _title(plan)))
    typer.echo(page(result))
    if not result.is_clean and ledger is None:
        tell(f"what the workers wrote down is kept: {folder}")
    if result.left:
        tell(f"error: {result.left}")
    if number:
        raise typer.Exit(128 + number)
    if not (result.is_clean and are_written) or result.failed_hurts or result.left:
        raise typer.Exit(1)


async def _chaos(
    plan: Plan,
    settings: Settings,
    folder: Path,
    patience: float,
    command: str | None,
    hurts: int,
) -> tuple[int, Result, object]:
    """The signal that ended the run before its time, or 0; what it has shown; the report."""
    import asyncio

    from rabbit_tasks.chaos.trial import Trial

    signals: list[int] = []
    with _progress(plan.tasks) as (shown, told):
        trial = Trial(
            plan, settings, folder,
            patience=patience, command=command, hurts=hurts, told=told, shown=shown,
        )  # fmt: skip

        def interrupt(number: int) -> None:
            told("interrupted" if not signals else "cleaning up, without an account")
            signals.append(number)
            trial.interrupt()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt, number)
        result = await trial.run()
    return (signals[0] if signals else 0), result, trial.report(result)


# --- what is shown ------------------------------------------------------------------------------


def _tell_plan(plan: Plan, settings: Settings, command: str | None, hurts: int) -> None:
    hosts = ", ".join(str(address) for address in settings.addresses())
    vhost = settings.addresses()[0].vhost
    tell(f"{_title(plan)}, on {hosts}, virtual host {vhost!r}")
    if command:
        tell(f"hurting the broker, times {hurts}: {command}")


def _title(plan: Plan) -> str:
    what = [f"{plan.tasks:,} tasks", f"workers: {plan.workers}", f"kill {plan.kill:.3g}"]
    if plan.fail:
        what.append(f"fail {plan.fail:.3g}")
    if plan.poison:
        what.append(f"poison {plan.poison:g}")
    if plan.concurrency > 1:
        what.append(f"{plan.concurrency} at once")
    if plan.work_time:
        what.append(f"{duration_text(plan.work_time)} of work")
    return ", ".join([*what, f"seed {plan.seed}"])


@contextmanager
def _progress(
    tasks: int,
) -> Iterator[tuple[Callable[[Progress], None], Callable[[str], None]]]:
    """Shows how far the run is: a bar on a terminal, a line now and then elsewhere."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= NOW_AND_THEN:
                last = time.monotonic()
                tell(f"{progress.seconds:.0f} s: {_state(progress)}")

        yield line, tell
        return

    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False)
    with Bar(
        BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True,
    ) as bar:  # fmt: skip
        shown = bar.add_task("beginning", total=tasks)

        def move(progress: Progress) -> None:
            bar.update(shown, completed=progress.finished, description=_state(progress))

        yield move, lambda text: console.print(text, markup=False, soft_wrap=True)


def _state(progress: Progress) -> str:
    told = [
        f"{progress.published:,} published", f"{progress.done:,} done",
        f"{progress.parked:,} parked", f"{progress.deaths:,} deaths", f"{progress.rate:,.0f}/s",
    ]  # fmt: skip
    return ", ".join([*told, progress.doing] if progress.doing else told)


def page(result: Result) -> str:
    """The account, for a person."""
    from rabbit_tasks.chaos import plot

    account = result.account
    lines = [*_places(account), "", *_runs(account), "", *_workers(result)]
    if drawn := plot.text(account):
        lines += ["", "done per second (· workers died, x broker hurt)", drawn]
    lines += ["", *_verdict(result)]
    return "\n".join(lines)


def _row(name: str, value: object, note: str = "") -> str:
    shown = f"{value:,}" if isinstance(value, int) else str(value)
    return f"{name:<22}{shown:>10}   {note}".rstrip()


def _places(account: Account) -> list[str]:
    again = ""
    if account.repeats:
        again = (
            f"{account.repeats:,} publishes were not confirmed and made again; "
            f"{account.maybe_stored:,} of them may be stored all the same"
        )
    lines = [_row("published", account.published, again), _row("done", account.done)]
    notes = []
    if (copies := sum(account.parked.values())) > account.parked_tasks:
        notes.append(f"in {copies:,} messages, some twice")
    if account.parked_and_done:
        notes.append(f"{account.parked_and_done:,} of them done as well")
    lines.append(_row("parked", account.parked_tasks, "; ".join(notes)))
    lines += [_row("", n, reason) for reason, n in account.parked.items()]
    if account.poison:
        lines.append(_row("  of the poison", account.poison_parked, f"of {account.poison:,}"))
    lines.append(_row("still queued", sum(account.queued.values()) + account.uncounted))
    lines += [_row("", n, queue) for queue, n in account.queued.items()]
    if account.foreign:
        lines.append(_row("foreign", account.foreign, "messages that are none of this run's"))
    lines.append(_row("lost", "?" if account.interrupted else len(account.lost)))
    return lines


def _runs(account: Account) -> list[str]:
    lines = [
        _row("runs", account.runs),
        _row(
            "ran more than once",
            account.more_than_once,
            "tasks; the runs after the first:" if account.more_than_once else "",
        ),
    ]
    lines += [_row("", n, why) for why, n in account.again.items() if why != "unexplained"]
    lines.append(_row("unexplained", len(account.unexplained)))
    if account.at_once:
        lines.append(_row("at once", account.at_once, "in one process"))
    return lines


def _workers(result: Result) -> list[str]:
    from rabbit_tasks.chaos.account import percentile

    account = result.account
    lines = [_row("worker deaths", account.deaths)]
    if account.deaths_by_poison:
        lines.append(_row("", account.deaths_by_poison, "by poison"))
    if (others := result.supervised_deaths - account.deaths) > 0:
        lines.append(_row("", others, "more deaths, not by our hand: see fleet.log"))
    for name, waits in (
        ("recovery", account.recovery), ("recovery, later", account.recovery_later),
    ):  # fmt: skip
        middle, late = percentile(waits, 0.5), percentile(waits, 0.99)
        if middle is not None and late is not None:
            note = f"median, {_seconds(late)} p99"
            if waits is account.recovery_later:
                note += ", after second deaths: these tasks are made to wait"
            lines.append(_row(name, _seconds(middle), note))
    for i, one in enumerate(result.hurts, 1):
        lines.append(_row(f"broker command {i}", "", str(one)))
    if (undone := result.hurts_wanted - len(result.hurts)) > 0:
        lines.append(_row("broker command", "", f"not run {undone} more times: the work was over"))
    lines.append(_row("rate", f"{account.rate:,.0f}/s", f"over {account.seconds:,.1f} s"))
    return lines


def _verdict(result: Result) -> list[str]:
    account = result.account
    lines = []
    for what, tasks in (("lost", account.lost), ("unexplained", account.unexplained)):
        lines += [f"{what}: task {one.task}: {one.story}" for one in tasks[:SHOWN]]
        if more := len(tasks) - SHOWN:
            lines += [f"{what}: and {more:,} more; --report has all"] if more > 0 else []
    if result.hung:
        lines.append(f"given up: {result.hung}")
    if account.interrupted:
        lines.append("interrupted: what is lost is not told, what was still queued is gone")
    elif result.is_clean:
        lines.append("every task is accounted for, every run explained")
        if result.failed_hurts:
            lines.append(
                f"BUT the broker command failed {len(result.failed_hurts)} of {len(result.hurts)} "
                "times: the broker may not have been hurt"
            )
    else:
        lines.append(
            f"NOT CLEAN: {len(account.lost):,} lost, {len(account.unexplained):,} unexplained, "
            f"{sum(account.queued.values()):,} still queued"
        )
    return lines


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


# --- what is given ------------------------------------------------------------------------------


def _duration(option: str, text: str) -> timedelta:
    try:
        return duration_of(text)
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from None


def _check_file(option: str, path: Path | None) -> None:
    """That a file can be written when all is over: better to know it now."""
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise ConfigurationError(
            f"{option}: {path} cannot be written: it is a folder, or lies in none"
        )


def _folder(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="rabbit-tasks-chaos-"))
    try:
        given.mkdir(parents=True, exist_ok=True)
        if any(given.iterdir()):
            raise ConfigurationError(f"--ledger: {given} is not empty; name another folder")
    except OSError as error:
        raise ConfigurationError(f"--ledger: {given} cannot be used: {error.strerror}") from None
    return given.resolve()


def _write(path: Path | None, content: str) -> bool:
    """Whether what is wanted is written."""
    try:
        if path is not None:
            path.write_text(content)
    except OSError as error:
        tell(f"error: {path} cannot be written: {error.strerror}")
        return False
    return True
