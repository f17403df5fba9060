"""The broker that tests run against, and how it is stopped and started.

RABBIT_TASKS_TEST_URL        an AMQP URL whose user may administer the broker (guest, as installed)
RABBIT_TASKS_TEST_API        its management API; default: port 15672 of the same host
RABBIT_TASKS_TEST_BROKER     a command that takes `stop`, `start`, `kill`, `freeze`, `thaw`, and `ctl`
                             with the arguments of rabbitmqctl
Without them: testcontainers where Docker has the image or can pull it, else a private rabbitmq-server.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("RABBIT_TASKS_TEST_IMAGE", "rabbitmq:4-management")


class Broker:
    """A running broker: its URL, its management API, and a command that hurts it."""

    def __init__(self, url: str, api: str | None, command: list[str] | None) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "localhost", parts.port or 5672
        self.user, self.password = parts.username or "guest", parts.password or "guest"
        self._api = api
        self._command = command
        self.version: str = self.api("GET", "/overview")["rabbitmq_version"] if api else "?"

    @property
    def can_be_hurt(self) -> bool:
        return self._command is not None

    @property
    def has_api(self) -> bool:
        return self._api is not None

    @property
    def management_url(self) -> str:
        """As RABBIT_TASKS_MANAGEMENT_URL has it."""
        assert self._api is not None
        return self._api

    def ctl(self, *arguments: str) -> bool:
        """Run rabbitmqctl on it; False where there is no way to, or it fails."""
        if self._command is None:
            return False
        done = subprocess.run([*self._command, "ctl", *arguments], capture_output=True, timeout=60)
        return done.returncode == 0

    def hurt(self, verb: str) -> None:
        """stop, start, kill, freeze or thaw; `start` returns when it takes connections."""
        assert self._command is not None
        subprocess.run([*self._command, verb], check=True, capture_output=True, timeout=120)

    def url(self, vhost: str, user: str | None = None, password: str | None = None) -> str:
        who = f"{quote(user or self.user, safe='')}:{quote(password or self.password, safe='')}"
        return f"amqp://{who}@{self.host}:{self.port}/{quote(vhost, safe='')}"

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Call the management API; the decoded answer, None where it has no body."""
        request = urllib.request.Request(
            f"{self._api}/api{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "content-type": "application/json",
                "authorization": "Basic "
                + b64encode(f"{self.user}:{self.password}".encode()).decode(),
            },
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            raw = answer.read()
        return json.loads(raw) if raw else None

    def create_vhost(self, name: str) -> None:
        self.api("PUT", f"/vhosts/{quote(name, safe='')}", {})
        self.allow(name, self.user)

    def delete_vhost(self, name: str) -> None:
        try:
            self.api("DELETE", f"/vhosts/{quote(name, safe='')}")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise

    def create_user(self, name: str, password: str) -> None:
        self.api("PUT", f"/users/{quote(name, safe='')}", {"password": password, "tags": ""})

    def delete_user(self, name: str) -> None:
        self.api("DELETE", f"/users/{quote(name, safe='')}")

    def allow(
        self, vhost: str, user: str, configure: str = ".*", write: str = ".*", read: str = ".*"
    ) -> None:
        self.api(
            "PUT",
            f"/permissions/{quote(vhost, safe='')}/{quote(user, safe='')}",
            {"configure": configure, "write": write, "read": read},
        )

    def delete(self, vhost: str, *path: str) -> None:
        """Behind everybody's back: ("queues", NAME), ("exchanges", NAME), or a binding's path."""
        kind, *names = (quote(part, safe="") for part in path)
        self.api("DELETE", "/".join(["", kind, quote(vhost, safe=""), *names]))

    def close_connections(self, user: str) -> int:
        """As an operator would, every one of that user; how many there were.

        By the user, because the broker knows these at once; in the list of connections, and so by its
        name, there is one only up to 5 s after it was opened (3.10 to 4.3).
        """
        path = f"/connections/username/{quote(user, safe='')}"
        found = len(self.api("GET", path))
        self.api("DELETE", path)
        return found


@contextmanager
def any_broker() -> Iterator[Broker]:
    """The best broker there is; it ends with the block if it began with it."""
    # As Ctrl-C: through every clean-up, so that nothing of ours goes on running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if url := os.environ.get("RABBIT_TASKS_TEST_URL"):
        command = os.environ.get("RABBIT_TASKS_TEST_BROKER")
        yield Broker(url, _api_of(url), shlex.split(command) if command else None)
    elif docker_has_image():
        with _container() as broker:
            yield broker
    else:
        with _private() as broker:
            yield broker


def _api_of(url: str) -> str | None:
    if api := os.environ.get("RABBIT_TASKS_TEST_API"):
        return api.rstrip("/")
    host = urlsplit(url).hostname or "localhost"
    try:
        with socket.create_connection((host, 15672), timeout=2):
            return f"http://{host}:15672"
    except OSError:
        return None


def docker_has_image() -> bool:
    """Whether a Docker engine answers that has the broker's image, or can pull it."""
    return (
        shutil.which("docker") is not None
        and _succeeds("docker", "info")
        and (_succeeds("docker", "image", "inspect", IMAGE) or _succeeds("docker", "pull", IMAGE))
    )


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def _container() -> Iterator[Broker]:
    # Not testcontainers.rabbitmq: it wants pika, and warns when it is imported (4.15).
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.container import DockerContainer

    # The container ends with this block; the one that watches over it is another image to pull.
    testcontainers_config.ryuk_disabled = True
    # Fixed ports: Docker gives a container that is started again others for those it chose itself.
    amqp, api = _free_port(), _free_port()
    with (
        DockerContainer(IMAGE).with_bind_ports(5672, amqp).with_bind_ports(15672, api) as container
    ):
        base = f"http://127.0.0.1:{api}"
        wait_for_api(base)
        command = [
            sys.executable,
            str(Path(__file__).with_name("docker_broker.py")),
            str(container.get_wrapped_container().id),
            base,
        ]
        yield Broker(f"amqp://guest:guest@127.0.0.1:{amqp}/", base, command)


@contextmanager
def _private() -> Iterator[Broker]:
    command = [sys.executable, str(ROOT / "scripts" / "broker.py")]
    up = subprocess.run([*command, "up"], check=True, stdout=subprocess.PIPE, text=True)
    node = json.loads(up.stdout)
    try:
        yield Broker(node["url"], node["api"], [*command, "--folder", node["folder"]])
    finally:
        subprocess.run(
            [*command, "--folder", node["folder"], "rm"], check=True, capture_output=True
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def wait_for_api(base: str) -> None:
    """Wait until the management API in a container says that the broker takes connections."""
    guest = b64encode(b"guest:guest").decode()
    request = urllib.request.Request(
        f"{base}/api/health/checks/port-listener/5672", headers={"authorization": f"Basic {guest}"}
    )
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
