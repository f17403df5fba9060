"""Names of queues in sentences and in commands to type."""

from __future__ import annotations

import shlex

import pytest

from rabbit_tasks.declare import Difference
from rabbit_tasks.errors import ConfigurationError
from rabbit_tasks.parking import ParkingQueue
from rabbit_tasks.text import numbers, quoted, some, to_type


@pytest.mark.parametrize(
    ("name", "shown"),
    [("mail", "mail"), ("images.resize", "images.resize"), ("my mail", "'my mail'"),
     (" ", "' '"), ("", "''"), ("a,b", "a,b"), ("a#b", "'a#b'"), ("\x1b[2J", "'\\x1b[2J'")],
)  # fmt: skip
def test_a_name_is_in_quotes_where_it_could_be_taken_for_the_sentence(
    name: str, shown: str
) -> None:
    assert quoted(name) == shown


@pytest.mark.parametrize("name", ["mail", "my mail", "-mail", "--all", "it's -x", "-"])
def test_a_command_to_type_has_the_name_as_one_argument_and_no_option_behind_the_dashes(
    name: str,
) -> None:
    words = shlex.split(to_type("parked replay", name, "--resume"))
    assert words[:3] == ["rabbit-tasks", "parked", "replay"]
    assert sorted(word for word in words[3:] if word != "--") == sorted(["--resume", name])
    if name.startswith("-"):
        assert words[3:] == ["--resume", "--", name]


def test_parking_queues_and_differences_are_named_so() -> None:
    assert str(ParkingQueue.of(" ")) == "' '"
    assert ParkingQueue.of("-q").to_type("list") == "rabbit-tasks parked list -- -q"
    assert ParkingQueue.foreign("-q").to_type("list") == "rabbit-tasks parked list --foreign -- -q"
    missing = Difference("my mail", "missing", "", "", "create it")
    assert str(missing) == "'my mail': missing; create it"
    with pytest.raises(ConfigurationError, match="Its name is empty"):
        ParkingQueue.of(".parked")


@pytest.mark.parametrize(
    ("names", "told"),
    [("", ""), ("a", "a"), ("abc", "a, b, c"), ("abcd", "a, b, c and 1 more")],
)
def test_of_many_names_three_are_told_and_how_many_more(names: str, told: str) -> None:
    assert some(names) == told


@pytest.mark.parametrize(
    ("version", "found"),
    [("4.3.6", (4, 3, 6)), ("4.3.6-rc.1", (4, 3, 6)), ("3.10.7+1", (3, 10, 7)), ("?", ())],
)
def test_a_version_is_its_numbers(version: str, found: tuple[int, ...]) -> None:
    assert numbers(version) == found
