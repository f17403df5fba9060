"""The house's import table: imports point one way, and the pure part knows nothing of AMQP."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rabbit_tasks

PACKAGE = Path(rabbit_tasks.__file__).parent

# From the top of the house to its ground. A module imports from lower floors only.
FLOORS = [
    {"cli", "demo", "__main__"},
    {"chaos"},
    {"rabbit_tasks"},  # the public names
    {"doctor", "pruning"},
    {"worker", "testing", "supervisor", "plan", "migration"},
    {"intake"},
    {"delivery", "parking", "pour", "watchdog", "deadline"},
    {"declare", "deliveries"},
    {"publisher"},
    {"confirms", "lookup"},
    {"handler", "isolation", "broker", "repeats", "management"},
    {"walk"},
    {"frames", "process"},
    # ----- nothing below imports aiormq -----
    {"app", "policies", "drawing", "exports", "rights"},
    {"stale"},
    {"topology", "observer", "history", "timeouts"},
    {"consumer", "settings"},
    {"retry", "message", "fingerprint"},
    {"errors", "properties", "durations", "text"},
]
PURE = {"errors", "message", "properties", "durations", "retry", "consumer", "topology", "settings",
        "observer", "app", "history", "text", "timeouts", "fingerprint",
        "drawing", "exports", "policies", "rights", "stale"}  # fmt: skip
AMQP = {"aiormq", "pamqp", "yarl"}
TYPER = {"typer", "rich", "click"}

NAMES = [
    "App",
    "ConfigurationError",
    "ConnectError",
    "Consumer",
    "Done",
    "Message",
    "Park",
    "Parked",
    "PublishError",
    "Publisher",
    "RabbitTasksError",
    "Refused",
    "RetryAfter",
    "RetryPolicy",
    "Settings",
    "TopologyError",
    "Unconfirmed",
    "Unroutable",
]


def imports_of(path: Path) -> set[str]:
    """What a file imports anywhere in it: our modules by their name in the house, others by theirs."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found.update(module_of(name) for name in dotted)
    return found


def module_of(dotted: str) -> str:
    first, *rest = dotted.split(".")
    if first != "rabbit_tasks":
        return first
    is_module = rest and ((PACKAGE / rest[0]).is_dir() or (PACKAGE / f"{rest[0]}.py").is_file())
    return rest[0] if is_module else "rabbit_tasks"


def house() -> dict[str, set[str]]:
    """What each module of the house imports; a folder is one module."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE).with_suffix("").parts
        name = "rabbit_tasks" if inside == ("__init__",) else inside[0]
        found.setdefault(name, set()).update(imports_of(path))
    return found


HOUSE = house()


def test_every_module_has_its_floor() -> None:
    assert sorted(HOUSE) == sorted(name for floor in FLOORS for name in floor)


@pytest.mark.parametrize("name", sorted(HOUSE))
def test_imports_point_one_way(name: str) -> None:
    (level,) = [i for i, floor in enumerate(FLOORS) if name in floor]
    below = {module for floor in FLOORS[level + 1 :] for module in floor}
    if level == 0:
        below |= FLOORS[0]  # the command line shows the demo, which is told as a command
    ours = {module for module in HOUSE[name] if module in HOUSE}
    assert ours - below - {name} == set()


@pytest.mark.parametrize("name", sorted(PURE))
def test_the_pure_part_knows_nothing_of_amqp_nor_of_a_terminal(name: str) -> None:
    assert HOUSE[name] & (AMQP | TYPER | {"asyncio", "socket", "logging", "time"}) == set()
    floors = [i for i, floor in enumerate(FLOORS) if floor & PURE]
    assert set().union(*(FLOORS[i] for i in floors)) == PURE


def test_only_the_command_line_knows_of_a_terminal() -> None:
    assert {name for name in HOUSE if HOUSE[name] & TYPER} <= {"cli", "demo"}


def test_the_public_names_are_these() -> None:
    assert rabbit_tasks.__all__ == NAMES
    assert all(hasattr(rabbit_tasks, name) for name in NAMES)
    assert set(NAMES) <= set(dir(rabbit_tasks))
    assert not hasattr(rabbit_tasks, "Nothing")


LOADED = "import sys, {0}; print([m for m in {1} if m in sys.modules])"
HEAVY = ["aiormq", "pydantic", "rich"]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_library_is_loaded_when_somebody_asks_for_a_publisher() -> None:
    code = LOADED.format("rabbit_tasks", HEAVY)
    assert run("-c", code) == "[]\n"
    assert run("-c", f"from rabbit_tasks import Publisher\n{code}") != "[]\n"
    assert run("-c", "from rabbit_tasks import *\nprint(Publisher.__name__)") == "Publisher\n"


APP = ["--app", "rabbit_tasks.demo:app"]


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (["--version"], ["aiormq", "rabbit_tasks.settings", "rich"]),
        (["--help"], ["aiormq", "pydantic", "asyncio", "rich"]),
        (["parked", "list", "--help"], ["aiormq", "rabbit_tasks.settings", "rich"]),
        (
            ["work", "--help"],
            ["aiormq", "rabbit_tasks.settings", "asyncio", "rich", "rabbit_tasks.cli.topology"],
        ),
        ([*APP, "topology", "show"], ["aiormq", "rabbit_tasks.worker", "tenacity"]),
    ],
)
def test_a_command_loads_only_what_it_needs(command: list[str], unused: list[str]) -> None:
    code = (
        "import sys\nfrom rabbit_tasks.cli import main\n"
        f"sys.argv = ['rabbit-tasks', *{command}]\n"
        f"try:\n    main()\nfinally:\n    print([m for m in {unused} if m in sys.modules])"
    )
    assert run("-c", code).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (["--help"], "topology"),
        (["--help", "work"], "topology"),
        (["--app", "work", "topology", "--help"], "migrate"),
        (["--url", "parked", "work", "--help"], "--processes"),
    ],
)
def test_every_command_is_there_wherever_a_name_of_one_stands(
    words: list[str], listed: str
) -> None:
    assert listed in run("-m", "rabbit_tasks", *words)


def test_garbage_is_collected_from_the_moment_at_which_a_command_begins_its_work() -> None:
    code = (
        "import asyncio, gc, sys\nfrom rabbit_tasks.cli import main\n"
        "def look(_, work):\n    work.close()\n    print(gc.isenabled(), gc.get_freeze_count() > 9999)\n"
        f"asyncio.Runner.run = look\nsys.argv = ['rabbit-tasks', *{APP}, 'work']\nmain()"
    )
    assert run("-c", code) == "True True\n"


def test_a_command_that_another_process_calls_leaves_its_exit_code_alone() -> None:
    """As our own tests do: pytest's exit code was once that of the last command in a test."""
    code = (
        "import sys\nfrom rabbit_tasks.cli import command\nsys.argv = ['rabbit-tasks', '--version']\n"
        "try:\n    command()\nexcept SystemExit as end:\n    sys.exit(7 + end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 7, done.stderr


IMPORT = """
import os, sys, threading

class Environment(type(os.environ)):
    def __getitem__(self, name):
        assert not name.startswith("RABBIT_TASKS"), name
        return super().__getitem__(name)

os.environ.__class__ = Environment

def watch(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.fork", "os.exec", "os.spawn", "os.system")):
        # (libraries may ask whether there is IPv6: a socket that is neither bound nor connected)
        assert event == "socket.__new__", (event, arguments)
    if event == "open" and isinstance(arguments[1], str):
        assert not set(arguments[1]) & set("wax+"), arguments

sys.addaudithook(watch)
import rabbit_tasks
import rabbit_tasks.testing
assert threading.active_count() == 1, threading.enumerate()
assert "asyncio" in sys.modules
print(sorted(m for m in sys.modules if m.startswith("rabbit_tasks.cli") or m in ("typer", "rich")))
"""


def test_importing_opens_nothing_and_reads_no_environment() -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[]\n"
