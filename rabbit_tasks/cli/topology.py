"""`rabbit-tasks topology`: show, export, declare, check, plan."""

from __future__ import annotations

import difflib
import json
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rabbit_tasks.cli import app_of, cli, run, settings_of, tell
from rabbit_tasks.cli.rows import Row, show_json, show_lines, show_rows
from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.text import escaped, quoted

if TYPE_CHECKING:
    from rabbit_tasks.app import App
    from rabbit_tasks.declare import Difference
    from rabbit_tasks.plan import Step
    from rabbit_tasks.pruning import Pruned
    from rabbit_tasks.settings import Settings

topology = typer.Typer(help="The queues and exchanges of the app.", no_args_is_help=True)
cli.add_typer(topology, name="topology")

Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


@topology.command("show")
def show(
    context: typer.Context,
    how: Annotated[
        Literal["tree", "mermaid", "dot", "svg"],
        typer.Option(
            "--format", help="A tree; or a picture, as text for Mermaid or Graphviz, or an SVG."
        ),
    ] = "tree",
    output: Annotated[str, typer.Option(metavar="FILE", help="Where to; - is stdout.")] = "-",
    check: Annotated[
        bool, typer.Option("--check", help="Only compare: exit 1 where the file differs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the app's topology: as a tree, or as a picture."""
    from rabbit_tasks import drawing

    app = app_of(context.obj)
    if as_json:
        if how != "tree":
            raise typer.BadParameter("--json is RabbitMQ's definitions; leave out --format")
        drawn = app.topology.definitions()
    elif how == "svg":
        drawn = drawing.svg(app.topology, f"The queues of app {app.name}")
    else:
        draw = {"tree": drawing.tree, "mermaid": drawing.mermaid, "dot": drawing.dot}[how]
        drawn = draw(app.topology)
    given = ["show", "--json"] if as_json else ["show", "--format", how]
    if output == "-":
        if check:
            raise typer.BadParameter("--check compares a file; which? --output FILE")
        typer.echo(drawn, nl=False)
        return
    _write(Path(output), drawn, [*given, "--output", output], check=check)


@topology.command("export")
def export(
    context: typer.Context,
    how: Annotated[
        Literal["definitions", "terraform", "k8s"],
        typer.Option(
            "--format",
            help="RabbitMQ's own definitions, the lock file; resources of Terraform's provider "
            "cyrilgdn/rabbitmq; or objects for RabbitMQ's messaging topology operator.",
        ),
    ] = "definitions",
    check: Annotated[
        bool, typer.Option("--check", help="Only compare: exit 1 where the file differs.")
    ] = False,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where to; - is stdout.",
            show_default="topology/<app>.json, .tf, .yaml",
        ),
    ] = None,
    vhost: Annotated[
        str | None,
        typer.Option(help="terraform, k8s: the virtual host.", show_default="/"),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="[NAMESPACE/]NAME", help="k8s: the RabbitmqCluster in which the queues are."
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="k8s: of the objects.", show_default="left to kubectl"),
    ] = None,
) -> None:
    """Write the lock file, topology/<app>.json.

    Or the same for what else may create the queues.
    """
    from rabbit_tasks import exports

    app = app_of(context.obj)
    if how != "k8s" and (cluster or namespace):
        raise typer.BadParameter("--cluster and --namespace go with --format k8s")
    if how == "definitions":
        if vhost:
            raise typer.BadParameter("definitions name no virtual host: it is chosen at the import")
        text, ending = app.topology.definitions(), "json"
    elif how == "terraform":
        text, ending = exports.terraform(app.topology, app.name, vhost or "/"), "tf"
    else:
        if not cluster:
            raise typer.BadParameter("which RabbitmqCluster? --cluster NAME, or NAMESPACE/NAME")
        text = exports.kubernetes(
            app.topology, app.name, cluster=cluster, namespace=namespace, vhost=vhost or "/"
        )
        ending = "yaml"
    if file == "-":
        if check:
            raise typer.BadParameter("--check compares a file; which? --file FILE")
        typer.echo(text, nl=False)
        return
    given = [] if how == "definitions" else ["--format", how]
    for name, value in (
        ("vhost", vhost), ("cluster", cluster), ("namespace", namespace), ("file", file),
    ):  # fmt: skip
        given += [f"--{name}", value] if value else []
    path = Path(file) if file else Path("topology") / f"{app.name}.{ending}"
    _write(path, text, ["export", *given], check=check)


def _write(path: Path, text: str, given: list[str], *, check: bool) -> None:
    """Write what was generated, or compare it with what is there: exit 1 where that differs."""
    command = f"rabbit-tasks topology {shlex.join(given)}"
    if not check:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            tell(f"error: {path} cannot be written: {error.strerror}")
            raise typer.Exit(1) from None
        tell(f"wrote {path}")
        return
    if not path.is_file():
        tell(f"error: there is no {path}; write it: {command}")
        raise typer.Exit(1)
    found = path.read_text(encoding="utf-8", errors="replace")
    if found != text:
        lines = difflib.unified_diff(
            found.splitlines(), text.splitlines(), str(path), "the app", lineterm="", n=1
        )
        typer.echo("\n".join(lines))
        tell(f"error: {path} is not the app's topology; write it: {command}")
        raise typer.Exit(1)
    tell(f"{path} is up to date")


@topology.command("permissions")
def permissions(
    context: typer.Context,
    user: Annotated[
        str | None, typer.Option(help="To whom the commands give them.", show_default="USER")
    ] = None,
    as_json: Json = False,
) -> None:
    """The least permissions that each task needs.

    Publishing, working, declaring, and the parking lot.
    """
    from rabbit_tasks.rights import rights

    app = app_of(context.obj)
    vhost = settings_of(context).addresses()[0].vhost
    for what, needed in rights(app.topology).items():
        if as_json:
            typer.echo(json.dumps({"for": what, **asdict(needed)}))
            continue
        given = [vhost, user or "USER", needed.configure, needed.write, needed.read]
        typer.echo(f"# {what}\nrabbitmqctl set_permissions -p {shlex.join(given)}")


@topology.command("declare")
def declare_command(
    context: typer.Context,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="And remove retry queues of older policies that are empty, when no worker is left "
            "that publishes there (asks the management API).",
        ),
    ] = False,
) -> None:
    """Create what is missing on the broker.

    Changes nothing that is there.
    """
    app = app_of(context.obj)
    settings = settings_of(context)
    if prune and not settings.management_url:
        from rabbit_tasks.pruning import NEEDS

        raise ConfigurationError(NEEDS)
    created = run(_declare(app, settings))
    for name in created:
        typer.echo(f"created {quoted(name)}")
    tell(_summary(app) + (f": {len(created)} created" if created else ": all there already"))
    if prune and not run(_prune(app, settings)):
        tell("no retry queue of an older policy is left")


@topology.command("check")
def check_command(context: typer.Context, as_json: Json = False) -> None:
    """Compare the broker with the app.

    Exit 1 where something is missing or different.
    """
    app = app_of(context.obj)
    differences, warnings = run(_check(app, settings_of(context)))
    for warning in warnings:
        tell(f"warning: {warning}")
    if as_json:
        show_json(differences)
    else:
        show_lines(map(str, differences))
    if differences:
        raise typer.Exit(1)
    tell(
        f"{_summary(app)}: as they should be (bindings cannot be read over AMQP; declare sets them)"
    )


@topology.command("plan")
def plan_command(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Option(help="The lock file.", show_default="topology/<app>.json")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one object per line.")] = False,
) -> None:
    """Say what declare would do, and what stands in the way.

    Exit 1 where there is anything to do. Changes nothing. Bindings, policies and limits are told by
    the management API (RABBIT_TASKS_MANAGEMENT_URL).
    """
    app = app_of(context.obj)
    path = file or Path("topology") / f"{app.name}.json"
    if file and not file.is_file():
        raise typer.BadParameter(f"there is no {file}")
    exported = path.read_text(errors="replace") if path.is_file() else None
    steps = run(_plan(app, settings_of(context), exported))
    if as_json:
        show_json(steps)
    else:
        show_rows([_row(step) for step in steps if step.what != "keep"])
    counts = Counter(step.what for step in steps)
    tell(f"{app.name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    if any(step.is_due for step in steps):
        raise typer.Exit(1)


def _row(step: Step) -> Row:
    # (What was not seen has no name, it is words.)
    name = step.name if step.what == "unseen" else quoted(step.name)
    return Row(step.what, name, step.says, step.remedy)


def _summary(app: App) -> str:
    found = app.topology
    return f"{len(found.queues)} queues and {len(found.exchanges)} exchange of app {app.name}"


async def _declare(app: App, settings: Settings) -> list[str]:
    from rabbit_tasks.broker import connected
    from rabbit_tasks.declare import declare

    async with connected(settings, "topology declare") as connection:
        return await declare(connection, app.topology)


async def _prune(app: App, settings: Settings) -> list[Pruned]:
    from rabbit_tasks.pruning import prune

    def told(names: list[str]) -> None:
        many = f"{len(names)} retry queue{'s' if len(names) != 1 else ''} of older policies"
        tell(f"{many} to remove; waiting for figures of what is on its way out, about 10 s")

    def done(one: Pruned) -> None:
        typer.echo(
            escaped(
                f"kept {quoted(one.name)}: {one.kept}"
                if one.kept
                else f"removed {quoted(one.name)}"
            )
        )

    return await prune(settings, app, told=told, done=done)


async def _check(app: App, settings: Settings) -> tuple[list[Difference], list[str]]:
    """What differs; and what this version of the broker does to handlers that take long."""
    from rabbit_tasks.broker import connected
    from rabbit_tasks.declare import check
    from rabbit_tasks.timeouts import warning_of

    async with connected(settings, "topology check") as connection:
        told = [warning_of(connection.server_version, type(one)) for one in app.consumers]
        return await check(connection, app.topology), [text for text in told if text]


async def _plan(app: App, settings: Settings, exported: str | None) -> list[Step]:
    from rabbit_tasks.broker import connected
    from rabbit_tasks.management import Management
    from rabbit_tasks.plan import plan

    async with connected(settings, "topology plan") as connection:
        return await plan(connection, app.topology, Management.of(settings), exported=exported)
