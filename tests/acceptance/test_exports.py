"""`topology show` and `topology export`: where it goes, whether it is up to date, wrong usage."""

from __future__ import annotations

import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support import applied
from tests.support.commands import Run
from tests.support.post import app

APP = ("--app", "tests.support.post:app")


def test_show_draws_in_every_format_on_stdout(cli: Run) -> None:
    begins = {"tree": "letters ", "mermaid": "flowchart LR", "dot": "digraph", "svg": "<svg"}
    for kind, begin in begins.items():
        result = cli(*APP, "topology", "show", "--format", kind)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith(begin)
        assert all(name in result.out for name in app.queues)
    ElementTree.fromstring(cli(*APP, "topology", "show", "--format", "svg").out)


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["show", "--format", "svg", "--output", "doc s/post.svg"], "doc s/post.svg"),
        (["export"], "topology/post.json"),
        (["export", "--format", "terraform"], "topology/post.tf"),
        (["export", "--format", "terraform", "--vhost", "shop", "--file", "it's.tf"], "it's.tf"),
        (
            ["export", "--format", "k8s", "--cluster", "x/r", "--namespace", "n"],
            "topology/post.yaml",
        ),
    ],
)
def test_what_is_written_is_compared_and_written_again_by_the_command_it_names(
    command: list[str], file: str, cli: Run, tmp_path: Path
) -> None:
    check = (*APP, "topology", *command, "--check")
    missing = cli(*check)
    assert (missing.code, missing.out) == (1, "")
    assert f"there is no {file}; write it: rabbit-tasks topology {command[0]}" in missing.err
    words = shlex.split(missing.err.partition("write it: rabbit-tasks ")[2])
    assert cli(*APP, *words).code == 0
    written = (tmp_path / file).read_text()
    assert cli(*check).code == 0
    (tmp_path / file).write_text(written.replace("letters", "lettres", 1))
    stale = cli(*check)
    assert stale.code == 1
    assert "lettres" in stale.out
    assert shlex.join(words) in stale.err
    assert cli(*APP, *shlex.split(stale.err.partition("write it: rabbit-tasks ")[2])).code == 0
    assert (tmp_path / file).read_text() == written


def test_an_export_goes_to_stdout_for_a_pipe(cli: Run, tmp_path: Path) -> None:
    for more in ([], ["--format", "terraform"], ["--format", "k8s", "--cluster", "r"]):
        result = cli(*APP, "topology", "export", *more, "--file", "-")
        assert (result.code, result.err) == (0, "")
        assert "letters" in result.out
    found = applied.documents(result.out)
    assert {one["spec"]["rabbitmqClusterReference"]["name"] for one in found} == {"r"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["show", "--check"], "which? --output FILE"),
        (["show", "--json", "--format", "svg"], "leave out --format"),
        (["export", "--format", "k8s"], "which RabbitmqCluster? --cluster NAME"),
        (["export", "--format", "k8s", "--cluster", "A_b"], "Kubernetes takes up to 63"),
        (["export", "--cluster", "a"], "--format k8s"),
        (["export", "--vhost", "a"], "chosen at the import"),
        (["export", "--file", "-", "--check"], "which? --file FILE"),
        (["export", "--format", "terraform", "--vhost", "a@b"], "cannot keep a name"),
    ],
)
def test_wrong_usage_is_exit_2_and_writes_nothing(
    arguments: list[str], told: str, cli: Run, tmp_path: Path
) -> None:
    result = cli(*APP, "topology", *arguments)
    assert (result.code, result.out) == (2, "")
    assert told in " ".join(result.err.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []
