"""docker-compose.yml, on a real Docker engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.support.brokers import ROOT, docker_has_image
from tests.support.workers import wait_until

PYTHON = os.environ.get("PYTHON_IMAGE", "python:3.13-slim")
NAMES = (["docker", "compose"], ["docker-compose"])

pytestmark = pytest.mark.timeout(600)


class Compose:
    """The services of docker-compose.yml under a project name of their own."""

    def __init__(self, command: list[str], images: Path) -> None:
        self._command = [*command, "--project-name", f"rabbit-tasks-test-{uuid.uuid4().hex[:8]}"]
        self._env = {
            **os.environ,
            "BROKER_PORT": str(_free_port()),
            "BROKER_API_PORT": str(_free_port()),
            "IMAGES": str(images),
            "WORKER_USER": f"{os.getuid()}:{os.getgid()}",
        }

    def run(self, *arguments: str, within: float = 300) -> str:
        """The command's output; AssertionError with all of it where it fails."""
        done = subprocess.run(
            [*self._command, *arguments], cwd=ROOT, env=self._env, timeout=within,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def tasks(self, *arguments: str) -> str:
        """`rabbit-tasks …` in a container of its own; what it prints."""
        return self.run("run", "--rm", "-T", "worker", *arguments)

    def parked(self) -> list[str]:
        lines = self.tasks("parked", "list", "images.resize", "--json").splitlines()
        return [json.loads(line)["reason"] for line in lines if line.startswith("{")]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.fixture
def compose(images: Path) -> Iterator[Compose]:
    if not docker_has_image():
        pytest.skip("Docker does not answer, or has no image of RabbitMQ")
    if not _succeeds("docker", "image", "inspect", PYTHON) and not _succeeds(
        "docker", "pull", PYTHON
    ):
        pytest.skip(f"Docker has no image {PYTHON}")
    command = next((name for name in NAMES if _succeeds(*name, "version")), None)
    if command is None:
        pytest.skip("docker compose is not installed")
    services = Compose(command, images)
    try:
        yield services
    finally:
        services.run("down", "--volumes", "--timeout", "1")


def test_compose_brings_a_broker_declares_and_works_and_its_messages_outlive_the_containers(
    compose: Compose, images: Path
) -> None:
    Image.linear_gradient("L").resize((800, 600)).save(images / "cat.jpg")
    (images / "zero-byte.png").touch()
    compose.run("up", "--detach", "--build")
    compose.tasks(
        "publish", "images.resize",
        '{"path": "/images/cat.jpg"}', '{"path": "/images/zero-byte.png"}',
    )  # fmt: skip
    thumbnail = images / "thumbnails" / "cat.jpg.png"
    wait_until(thumbnail.is_file)
    with Image.open(thumbnail) as made:
        assert made.size == (320, 240)
    reasons = ["zero-byte.png is not an image (0 bytes)"]
    wait_until(lambda: compose.parked() == reasons, 60)

    compose.run("down", "--timeout", "45")
    compose.run("up", "--detach")

    assert compose.parked() == reasons
    thumbnail.unlink()
    compose.tasks("publish", "images.resize", '{"path": "/images/cat.jpg"}')
    wait_until(thumbnail.is_file)
