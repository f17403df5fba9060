"""Fixtures: a broker for the session, a virtual host per test, real workers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rabbit_tasks.app import App
from rabbit_tasks.broker import Connection, connect
from rabbit_tasks.declare import declare
from rabbit_tasks.publisher import Publisher
from rabbit_tasks.settings import Settings
from tests.support.brokers import Broker, any_broker
from tests.support.inprocess import Running
from tests.support.workers import Runs, WorkerProcess

PASSWORD = "p"

# What is ignored here (nohup, a background job of a shell) would be ignored by every worker we start.
for _number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """What a command that ran in this process made of the logs ends with its test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("aiormq", "rabbit_tasks")}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    logging.captureWarnings(False)


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """The broker of this run: see tests/support/brokers.py for how it is found."""
    with any_broker() as found:
        if not found.has_api:
            pytest.exit("the tests need the broker's management API: set RABBIT_TASKS_TEST_API", 2)
        yield found


@pytest.fixture
def vhost(broker: Broker) -> Iterator[str]:
    """A virtual host of its own, with a slash in its name as every tenth in the wild."""
    name = f"test/{uuid.uuid4().hex[:8]}"
    broker.create_vhost(name)
    yield name
    broker.delete_vhost(name)


@pytest.fixture
def url(broker: Broker, vhost: str) -> str:
    return broker.url(vhost)


@pytest.fixture
def user(broker: Broker, vhost: str) -> Iterator[str]:
    """A user of its own, who may do all in the virtual host; the password is PASSWORD."""
    name = f"user {uuid.uuid4().hex[:8]}"
    broker.create_user(name, PASSWORD)
    broker.allow(vhost, name)
    yield name
    broker.delete_user(name)


@pytest.fixture
def settings(url: str) -> Settings:
    return Settings(url=url, heartbeat=10)


@pytest.fixture
async def connection(settings: Settings) -> AsyncIterator[Connection]:
    opened = await connect(settings, "test")
    yield opened
    await opened.end()


@pytest.fixture
async def publisher(settings: Settings) -> AsyncIterator[Publisher]:
    async with Publisher.open(settings) as opened:
        yield opened


@pytest.fixture
def declared(settings: Settings) -> Callable[[App], Awaitable[None]]:
    """Declare an app in the test's virtual host."""

    async def make(app: App) -> None:
        connection = await connect(settings, "test declare")
        await declare(connection, app.topology)
        await connection.end()

    return make


@pytest.fixture
async def run(
    settings: Settings, declared: Callable[[App], Awaitable[None]]
) -> AsyncIterator[Callable[[App], Awaitable[Running]]]:
    """Declare an app and run a worker of it in this process, until the test ends."""
    started: list[Running] = []

    async def start(app: App) -> Running:
        await declared(app)
        started.append(Running(app, settings))
        return started[-1]

    yield start
    for running in started:
        await running.drop()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """What the obedient handlers of this test's workers wrote down."""
    return Runs(tmp_path / "runs.jsonl")


@pytest.fixture
def start_worker(url: str, tmp_path: Path, runs: Runs) -> Iterator[Callable[..., WorkerProcess]]:
    """Start real worker processes of tests.support.obedient, or of another app."""
    started: list[WorkerProcess] = []

    def start(
        *arguments: str, app: str = "tests.support.obedient:app", **env: str
    ) -> WorkerProcess:
        worker = WorkerProcess(
            url, tmp_path, *arguments, app=app, OBEDIENT_RUNS=str(runs.path), **env
        )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.end()


async def eventually(
    condition: Callable[[], object | Awaitable[object]], within: float = 30
) -> None:
    """Return when the condition, sync or async, holds; AssertionError when it does not in time."""
    deadline = time.monotonic() + within
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"not within {within} s"
        await asyncio.sleep(0.02)
