"""The wheel: what is in it, and that it runs where nothing else is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import rabbit_tasks
from tests.support.brokers import ROOT
from tests.unit.test_imports import PACKAGE, imports_of


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the build backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    held = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    source = {
        path.relative_to(ROOT) for path in (ROOT / "rabbit_tasks").rglob("*") if path.is_file()
    }
    source = {path for path in source if "__pycache__" not in path.parts}
    assert {path for path in held if path.parts[0] == "rabbit_tasks"} == source
    assert Path("rabbit_tasks/py.typed") in held
    assert {path.parts[0] for path in held - source} == {"rabbit_tasks-0.1.0.dist-info"}
    assert any(path.name == "LICENSE" for path in held - source)


def test_the_source_archive_holds_the_two_commands_of_the_readme(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= {"scripts/demo", "scripts/test", "docker-compose.yml", "rabbit_tasks/py.typed",
                    "tests/conftest.py", "topology/demo.json", "README.md", "LICENSE"}  # fmt: skip


def test_every_library_that_we_import_is_a_dependency_of_our_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    names = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in declared}
    imported = set().union(*map(imports_of, (ROOT / "rabbit_tasks").rglob("*.py")))
    theirs = imported - sys.stdlib_module_names - {path.stem for path in PACKAGE.iterdir()}
    # (pydantic pins the pydantic_core that goes with it; Pillow is imported as PIL; type checkers
    # bring _typeshed)
    assert theirs - {"pydantic_core", "PIL", "rabbit_tasks", "_typeshed"} <= names


@pytest.mark.timeout(300)
def test_the_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    if uv := shutil.which("uv"):
        venv.create(environment)
        install, lazily = [uv, "pip", "install", "--python", str(python)], []
    else:
        venv.create(environment, with_pip=True)
        # (Of what is installed a tenth is imported.)
        install, lazily = [str(python), "-m", "pip", "install"], ["--no-compile"]
    subprocess.run([*install, "--quiet", *lazily, str(wheel)], check=True, capture_output=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def output(*command: str) -> str:
        return subprocess.run(
            [str(environment / "bin" / command[0]), *command[1:]], cwd=tmp_path, env=clean,
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    assert output("rabbit-tasks", "--version").strip() == "0.1.0"
    assert "parked" in output("rabbit-tasks", "--help")
    where = "import rabbit_tasks, sys; print(rabbit_tasks.__file__); print(*rabbit_tasks.__all__)"
    file, names = output("python", "-W", "error", "-c", where).splitlines()
    assert Path(file).is_relative_to(environment)
    assert names.split() == rabbit_tasks.__all__
    tree = output("rabbit-tasks", "--app", "rabbit_tasks.demo:app", "topology", "show")
    assert "images.resize.parked" in tree  # the demo's app needs no Pillow to be looked at
