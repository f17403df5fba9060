"""The README tells the truth: what it names exists."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command

from rabbit_tasks.cli import chaos, cli, demo, doctor, migrate, parked, publish, topology, work  # noqa: F401
from rabbit_tasks.settings import Settings
from tests.support.brokers import ROOT

README = (ROOT / "README.md").read_text()


def test_it_is_short_enough_to_be_read() -> None:
    assert len(README.splitlines()) <= 200


def test_every_promise_names_tests_that_exist() -> None:
    rows = [
        row for row in README.split("| promise |")[1].split("\n\n")[0].splitlines() if "`" in row
    ]
    assert len(rows) >= 9
    for row in rows:
        files = re.findall(r"`(test_[a-z_*]+\.py)`", row)
        assert files, row
        text = "".join(path.read_text() for file in files for path in ROOT.glob(f"tests/*/{file}"))
        for name in re.findall(r"`(test_[a-z0-9_]+)`", row):
            assert f"def {name}(" in text, f"{name} is not in {files}"


def test_every_setting_stands_in_the_table_with_its_name() -> None:
    table = README.split("## Settings")[1].split("\n## ")[0]
    named = set(re.findall(r"`([A-Z_]+)`", table))
    assert {name.upper() for name in Settings.model_fields} <= named


@pytest.mark.parametrize(
    "words",
    sorted(
        set(
            re.findall(
                r"rabbit-tasks ((?:topology|parked) [a-z]+|work|publish|demo|doctor|chaos)", README
            )
        )
    ),
)
def test_every_command_exists(words: str) -> None:
    command = get_command(cli)
    for word in words.split():
        command = command.commands[word]  # type: ignore[attr-defined]


def test_its_picture_is_that_of_the_demo_as_it_is_today() -> None:
    from rabbit_tasks.demo import app
    from rabbit_tasks.drawing import svg

    (file,) = re.findall(r"!\[[^]]+\]\((topology/[a-z]+\.svg)\)", README)
    assert (ROOT / file).read_text() == svg(app.topology, "The queues of app demo"), (
        "rabbit-tasks topology show --format svg --output topology/demo.svg"
    )


def test_the_example_runs_as_it_stands() -> None:
    (example,) = re.findall(r"```python\n(# shop\.py\n.*?)```", README, re.DOTALL)
    made: dict[str, object] = {}
    exec(compile(example, "shop.py", "exec"), made)
    assert repr(made["app"]) == "<App shop: images.resize>"
