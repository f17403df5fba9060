"""`topology plan` and `declare --prune`: a changed delay over queues with messages in them."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rabbit_tasks import Publisher, Settings
from rabbit_tasks.properties import Properties
from tests.support.brokers import Broker
from tests.support.commands import Run
from tests.support.workers import WorkerProcess, wait_until

SHOP = """
    from datetime import timedelta
    from pathlib import Path
    from typing import Any
    from rabbit_tasks import App, Consumer, Message, RetryPolicy

    class Orders(Consumer[dict[str, Any]]):
        queue = "shop orders"
        retry = RetryPolicy(delays=(timedelta(seconds={delay}),))

        async def handle(self, body: dict[str, Any], message: Message) -> None:
            with Path({done!r}).open("a") as file:
                file.write(f"{{body['n']}} {{message.attempt}}\\n")

    app = App("shop", [Orders()])
"""


@pytest.fixture
def shop(tmp_path: Path) -> Callable[[int], str]:
    """The app with so many seconds of delay, as --app takes it."""

    def write(delay: int) -> str:
        module = f"shop_{delay}_{tmp_path.name.replace('-', '_')}"
        text = textwrap.dedent(SHOP).format(delay=delay, done=str(tmp_path / "done"))
        (tmp_path / f"{module}.py").write_text(text)
        return f"{module}:app"

    return write


def publish(settings: Settings, queue: str, *bodies: bytes) -> None:
    async def send() -> None:
        async with Publisher.open(settings) as publisher:
            for body in bodies:
                properties = Properties.of({"x-retry-count": 1}, delivery_mode=2)
                await publisher.send("", queue, body, properties)

    asyncio.run(send())


def test_a_delay_changed_over_queues_with_messages_waiting_loses_none_and_is_cleaned_up(
    cli: Run,
    shop: Callable[[int], str],
    start_worker: Callable[..., WorkerProcess],
    settings: Settings,
    broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = ("--app", shop(4)), ("--app", shop(9))
    stale = "shop orders.retry.1.4s"
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", broker.management_url)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli(*old, "topology", "export").code == 0
    assert cli(*old, "topology", "declare").code == 0
    assert cli(*old, "topology", "plan").code == 0
    publish(settings, stale, *(b'{"n": %d}' % n for n in range(3)))

    planned = cli(*new, "topology", "plan")
    assert planned.code == 1
    assert planned.out.splitlines() == [
        (
            "create  'shop orders.retry.1.9s'  retry queue is missing; create it: rabbit-tasks "
            "topology declare"
        ),
        (
            f"stale   '{stale}'  of an older policy, with 3 messages that will go home to 'shop "
            "orders'; once it is empty: rabbit-tasks topology declare --prune"
        ),
    ]
    assert planned.err.endswith("1 create, 1 stale\n")
    # Over AMQP alone as well, since the lock file still names it.
    monkeypatch.delenv("RABBIT_TASKS_MANAGEMENT_URL")
    rows = cli(*new, "topology", "plan", "--json").lines
    assert [(r["what"], r["name"], r["messages"]) for r in rows if r["what"] != "keep"] == [
        ("create", "shop orders.retry.1.9s", None),
        ("stale", stale, 3),
        ("unseen", "bindings, policies, limits, queues that no lock file names", None),
    ]
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", broker.management_url)

    declared = cli(*new, "topology", "declare", "--prune")
    assert declared.code == 0
    assert declared.out == (
        "created 'shop orders.retry.1.9s'\n"
        f"kept '{stale}': 3 messages in it, to go home to 'shop orders'\n"
    )
    start_worker(app=new[1]).ready()
    wait_until(lambda: len(done(tmp_path)) == 3)
    assert done(tmp_path) == ["0 2", "1 2", "2 2"]

    pruned = cli(*new, "topology", "declare", "--prune")
    assert (pruned.code, pruned.out) == (0, f"removed '{stale}'\n")
    assert "1 retry queue of older policies to remove; waiting for figures" in pruned.err
    assert cli(*new, "topology", "plan").code == 0
    again = cli(*new, "topology", "declare", "--prune")
    assert (again.code, again.out) == (0, "")
    assert "no retry queue of an older policy is left" in again.err


def done(folder: Path) -> list[str]:
    file = folder / "done"
    return sorted(file.read_text().splitlines()) if file.exists() else []


def test_prune_without_the_management_api_creates_nothing_either(
    cli: Run, shop: Callable[[int], str], broker: Broker, vhost: str
) -> None:
    refused = cli("--app", shop(4), "topology", "declare", "--prune")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.count("\n") == 1
    assert "set RABBIT_TASKS_MANAGEMENT_URL" in refused.err
    assert broker.api("GET", f"/queues/{quote(vhost, safe='')}") == []


def test_prune_beside_a_worker_of_the_older_policy_is_refused_in_one_line(
    cli: Run,
    shop: Callable[[int], str],
    start_worker: Callable[..., WorkerProcess],
    broker: Broker,
    vhost: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = ("--app", shop(4)), ("--app", shop(9))
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", broker.management_url)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli(*old, "topology", "declare").code == 0
    start_worker(app=old[1]).ready()

    def listed() -> list[Any]:
        rows = broker.api("GET", f"/vhosts/{quote(vhost, safe='')}/connections")
        return [row for row in rows if "worker" in row.get("user_provided_name", "")]

    wait_until(listed)
    refused = cli(*new, "topology", "declare", "--prune")
    assert refused.code == 1
    assert "created 'shop orders.retry.1.9s'" in refused.out
    (line,) = [one for one in refused.err.splitlines() if one.startswith("error: ")]
    assert "workers of another topology" in line
    assert line.endswith(
        "stop them or start them anew with this version, then: rabbit-tasks topology declare --prune"
    )


def test_a_lock_file_that_cannot_be_used_is_wrong_usage(
    cli: Run, shop: Callable[[int], str], tmp_path: Path
) -> None:
    app = ("--app", shop(4))
    assert cli(*app, "topology", "plan", "--file", "none.json").code == 2
    (tmp_path / "topology").mkdir()
    (tmp_path / "topology" / "shop.json").write_text("{}")
    refused = cli(*app, "topology", "plan")
    assert refused.code == 2
    assert refused.err.endswith("write it anew: rabbit-tasks topology export\n")


def test_nothing_that_others_named_can_drive_the_terminal_and_the_json_is_json(
    cli: Run,
    shop: Callable[[int], str],
    broker: Broker,
    vhost: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = ("--app", shop(4))
    monkeypatch.setenv("RABBIT_TASKS_MANAGEMENT_URL", broker.management_url)
    assert cli(*app, "topology", "declare").code == 0
    where, bad = quote(vhost, safe=""), "\x1b[2Jbad ‮'\" policy"
    broker.api(
        "PUT", f"/policies/{where}/{quote(bad, safe='')}",
        {"pattern": "^shop", "definition": {"expires": 600_000}, "apply-to": "queues", "priority": 0},
    )  # fmt: skip
    told = cli(*app, "topology", "plan")
    assert told.code == 1
    assert told.out.replace("\n", "").isprintable()
    assert "\\x1b[2Jbad \\u202e" in told.out
    rows = cli(*app, "topology", "plan", "--json").lines
    # On the app's queues, and on the one that replays go through.
    assert [row["name"] for row in rows if row["what"] == "policy"] == [bad, bad]
