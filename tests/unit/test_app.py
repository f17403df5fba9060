"""Apps, and how one is found."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rabbit_tasks import App, ConfigurationError, Consumer, Message
from rabbit_tasks.app import find_app, is_given
from rabbit_tasks.observer import Settled


class Takes(Consumer[str]):
    queue = "q"

    async def handle(self, body: str, message: Message) -> None: ...


def test_an_app_knows_its_consumers_by_queue() -> None:
    takes = Takes()
    app = App("app", [takes])
    assert app.consumer("q") is takes
    assert repr(app) == "<App app: q>"
    with pytest.raises(ConfigurationError, match="app app has no consumer of queue 'x'; its queue"):
        app.consumer("x")


@pytest.mark.parametrize("name", ["", "a b", "../a", ".a", "ü", "a\n", "a" * 101])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="a name has letters, digits and"):
        App(name, [])


# --- find_app -----------------------------------------------------------------------------------

Write = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module into the current folder, an empty one; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RABBIT_TASKS_APP", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    written: list[str] = []

    def write(text: str) -> str:
        name = f"shop_{uuid.uuid4().hex[:8]}"
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


APP = "from rabbit_tasks import App\napp = App('shop', [])\n"


def test_an_app_is_found_by_its_place_then_the_environment_then_the_project(
    module: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {kind: module(APP.replace("shop", kind)) for kind in ("option", "variable", "project")}
    assert not is_given()
    Path("pyproject.toml").write_text(f"[tool.rabbit_tasks]\napp = '{names['project']}:app'\n")
    assert is_given()
    assert find_app().name == "project"
    monkeypatch.setenv("RABBIT_TASKS_APP", f"{names['variable']}:app")
    assert find_app().name == "variable"
    assert find_app(f"{names['option']}:app").name == "option"


def test_an_app_may_be_deep_inside_or_made_by_a_function(module: Write) -> None:
    name = module(APP + "class inside:\n    one = app\ndef make():\n    return app\n")
    assert find_app(f"{name}:inside.one").name == "shop"
    assert find_app(f"{name}:make").name == "shop"


@pytest.mark.parametrize(
    ("text", "attribute", "says"),
    [
        (APP, "", "--app: 'NAME:' is not module:attribute, such as shop.tasks:app"),
        (APP, "other", "--app: NAME:other is not a rabbit_tasks.App; it has NAME:app"),
        ("", "app", "--app: NAME:app is not a rabbit_tasks.App"),
        (APP, "App", "--app: NAME:App is not a rabbit_tasks.App; it has NAME:app"),
        ("def make(): return 5", "make", "--app: NAME:make is not a rabbit_tasks.App"),
        ("def make(a): ...", "make", "--app: NAME:make raised TypeError: "),
        ("def make():\n    exit(3)", "make", "--app: NAME:make raised SystemExit: 3 at "),
        ("import nowhere_at_all", "app", "--app: NAME needs nowhere_at_all, not installed"),
        ("\n\n1 / 0", "app",
         "--app: importing NAME raised ZeroDivisionError: division by zero at HERE/NAME.py:3; "),
        ("1 / 0", "app", "; python -c 'import NAME' shows its stack trace"),
        ("raise SystemExit", "app", "--app: importing NAME raised SystemExit at HERE/NAME.py:1; "),
        ("raise SystemExit('a\\nb')", "app", "--app: importing NAME raised SystemExit: a b at "),
        ("raise BaseException", "app", "--app: importing NAME raised BaseException at "),
        ("from rabbit_tasks import Nothing", "app", "importing NAME raised ImportError: cannot"),
        ("def (", "app", "raised File \"HERE/NAME.py\", line 1 def ( ^ SyntaxError: "),
        ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", "app",
         "--app: importing NAME raised NAME.E: <exception str() failed> at HERE/NAME.py:3; "),
        ("def __getattr__(name): return 1 / 0", "app", "NAME:app raised ZeroDivisionError"),
        (APP.replace("'shop'", "''"), "app", "App(''): a name has letters, digits"),
    ],
)  # fmt: skip
def test_what_is_no_app_is_one_line_that_says_what_to_do(
    module: Write, text: str, attribute: str, says: str
) -> None:
    name = module(text)
    with pytest.raises(ConfigurationError) as refused:
        find_app(f"{name}:{attribute}")
    said = str(refused.value)
    assert says.replace("NAME", name).replace("HERE", str(Path.cwd())) in said
    assert "\n" not in said


@pytest.mark.parametrize("spec", ["nowhere:app", "nowhere.deep:app", "json.nowhere:app"])
def test_a_missing_module_is_named_with_where_it_was_looked_for(module: Write, spec: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--app: there is no module '.*nowhere' in /.*"):
        find_app(spec)


@pytest.mark.parametrize("spec", ["app", ":app", ".x:app", "a..b:app"])
def test_what_is_no_place_is_refused(module: Write, spec: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--app: ") as refused:
        find_app(spec)
    assert "\n" not in str(refused.value)


def test_without_any_app_the_three_ways_are_named(module: Write) -> None:
    with pytest.raises(ConfigurationError, match=r"Give --app .*RABBIT_TASKS_APP, .*pyproject"):
        find_app()


@pytest.mark.parametrize(
    "text", ["", "[tool]", "tool = 1", "[tool]\nrabbit_tasks = 1", "[tool.rabbit_tasks]\napp = 1"]
)
def test_a_project_that_names_no_app_is_none(module: Write, text: str) -> None:
    Path("pyproject.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"^which app\?"):
        find_app()


@pytest.mark.parametrize("raw", [b"[tool", b"\xff"])
def test_a_project_file_that_cannot_be_read_says_so(module: Write, raw: bytes) -> None:
    Path("pyproject.toml").write_bytes(raw)
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml cannot be read: "):
        find_app()
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml cannot be read: "):
        is_given()  # (and not: publish without a check)


def test_the_project_is_read_as_utf8_in_any_locale(module: Write) -> None:
    name = module(APP)
    text = f"# grün ☃\n[tool.rabbit_tasks]\napp = '{name}:app'\n"
    Path("pyproject.toml").write_text(text, encoding="utf-8")
    assert find_app().name == "shop"


@pytest.mark.parametrize("text", ["raise SystemExit(0)", "1 / 0", "def ("])
def test_the_command_line_fails_in_one_line_for_an_app_that_cannot_be_imported(
    module: Write, tmp_path: Path, text: str
) -> None:
    name = module(text)
    done = subprocess.run(
        [sys.executable, "-m", "rabbit_tasks", "--app", f"{name}:app", "topology", "show"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: --app: importing {name} raised ")
    assert done.stderr.count("\n") == 1


async def watches(settled: Settled) -> None: ...


class Watches:
    async def __call__(self, settled: Settled) -> None: ...


@pytest.mark.parametrize("observer", [watches, Watches(), None])
def test_an_observer_that_would_never_be_awaited_is_refused(observer: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a plain function"):
        App("app", [], observers=[observer])


def test_a_lifespan_that_was_called_already_is_refused() -> None:
    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        yield

    with pytest.raises(ConfigurationError, match="without calling it"):
        App("app", [], lifespan=life())  # type: ignore[arg-type]
    App("app", [], lifespan=life)
