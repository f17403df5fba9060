#!/usr/bin/env python3
"""A private RabbitMQ node of the installed rabbitmq-server: own ports, own data, gone without a trace.

    broker.py up                        start a node; prints {"url": …, "api": …, "folder": …}
    broker.py --folder FOLDER VERB      stop, start, kill, freeze, thaw; rm ends it and deletes its data
    broker.py --folder FOLDER ctl …     rabbitmqctl on it
    broker.py installed                 exit 0 where there is a rabbitmq-server to start
    broker.py --port PORT answers       wait until a broker there answers in AMQP

It shares nothing with a RabbitMQ that the system runs: not the node's name, not a port, not the cookie,
not even the port mapper of Erlang (epmd), of which it starts its own. Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

VERBS = ("up", "stop", "start", "kill", "freeze", "thaw", "ctl", "rm", "installed", "answers")
STARTUP = 120.0
"""Seconds for a node to accept connections: a busy, small machine takes half of it."""

Node = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where the node's data and its state are")
    parser.add_argument("--port", type=int, help="of the broker that `answers` waits for")
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("arguments", nargs="*", help="of rabbitmqctl")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so through every clean-up
    if args.verb == "installed":
        sys.exit(0 if server() else 1)
    if args.verb == "answers":
        wait_for(lambda: greets(args.port))
        return
    if args.verb == "up":
        node = create(args.folder or Path(tempfile.mkdtemp(prefix="rabbit-tasks-broker-")))
        sys.stdout.write(json.dumps({k: node[k] for k in ("url", "api", "folder")}) + "\n")
        return
    if args.folder is None:
        parser.error(f"{args.verb} needs --folder, as `up` printed it")
    try:
        node = json.loads((args.folder / "node.json").read_text())
    except FileNotFoundError:
        sys.exit(f"there is no node in {args.folder}: broker.py up")
    match args.verb:
        case "start":
            launch(node)
        case "stop":
            end(node, signal.SIGTERM)  # the node closes its queues and says goodbye
        case "kill":
            end(node, signal.SIGKILL)
        case "freeze":
            tell(node, signal.SIGSTOP)
        case "thaw":
            tell(node, signal.SIGCONT)
        case "ctl":
            program = server()
            assert program is not None
            sys.exit(
                subprocess.run(
                    [program.with_name("rabbitmqctl"), "--node", node["name"], *args.arguments],
                    env=environment(node),
                ).returncode
            )
        case "rm":
            remove(node)


def server() -> Path | None:
    """The server's own start script.

    Debian puts a wrapper in front, which runs it as another user with the system's settings: what is
    behind it comes first.
    """
    places = [Path("/usr/lib/rabbitmq/bin")]
    if found := shutil.which("rabbitmq-server"):
        places.append(Path(found).parent)
    places.append(Path("/usr/sbin"))
    if brew := shutil.which("brew"):
        asked = subprocess.run([brew, "--prefix", "rabbitmq"], capture_output=True, text=True)
        places.append(Path(asked.stdout.strip() or "/nowhere") / "sbin")
    scripts = (place / "rabbitmq-server" for place in places)
    return next((script for script in scripts if os.access(script, os.X_OK)), None)


def create(folder: Path) -> Node:
    """Set up a new node in the folder and start it."""
    if server() is None:
        sys.exit(
            "no rabbitmq-server here: apt-get install rabbitmq-server, or brew install rabbitmq"
        )
    folder.mkdir(parents=True, exist_ok=True)
    amqp, api, distribution, epmd = free_ports(4)
    node: Node = {
        "url": f"amqp://guest:guest@127.0.0.1:{amqp}/",
        "api": f"http://127.0.0.1:{api}",
        "folder": str(folder),
        "name": f"rabbit-tasks-{secrets.token_hex(4)}@localhost",
        "amqp": amqp,
        "distribution": distribution,
        "epmd": epmd,
        "pid": 0,
    }
    cookie = folder / ".erlang.cookie"
    cookie.write_text(secrets.token_hex(16))
    cookie.chmod(0o400)
    (folder / "enabled_plugins").write_text("[rabbitmq_management].\n")
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.local = 127.0.0.1:{amqp}\n"
        "management.tcp.ip = 127.0.0.1\n"
        f"management.tcp.port = {api}\n"
    )
    try:
        launch(node)
    except BaseException:
        remove(node)
        raise
    return node


def environment(node: Node) -> dict[str, str]:
    """Everything that would otherwise point into /etc/rabbitmq and /var/lib/rabbitmq."""
    folder = Path(node["folder"])
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RABBITMQ_", "ERL_", "NOTIFY_SOCKET"))
    }
    ours: dict[str, Any] = {
        "HOME": folder,  # of the Erlang cookie
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": node["epmd"],
        "RABBITMQ_NODENAME": node["name"],
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": node["amqp"],
        "RABBITMQ_DIST_PORT": node["distribution"],
        # The second is nothing to Erlang: it is how we recognise the process.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} "
        f"-private_node {node['name']}",
        "RABBITMQ_CONF_ENV_FILE": folder / "none",
        "RABBITMQ_CONFIG_FILE": folder / "rabbitmq.conf",
        "RABBITMQ_CONFIG_FILES": folder / "none",
        "RABBITMQ_ADVANCED_CONFIG_FILE": folder / "none.config",
        "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "enabled_plugins",
        "RABBITMQ_MNESIA_BASE": folder / "data",
        "RABBITMQ_SCHEMA_DIR": folder / "schema",
        "RABBITMQ_GENERATED_CONFIG_DIR": folder / "generated",
        "RABBITMQ_FEATURE_FLAGS_FILE": folder / "feature_flags",
        "RABBITMQ_PID_FILE": folder / "pid",
        "RABBITMQ_LOG_BASE": folder / "log",
        # Makes the script become the node instead of waiting for it: its process id is the node's.
        "RUNNING_UNDER_SYSTEMD": "true",
    }
    # sudo and cron leave out where Debian and Homebrew keep Erlang.
    path = os.pathsep.join((kept.get("PATH", ""), "/usr/sbin", "/usr/bin", "/bin",
                            "/opt/homebrew/bin", "/usr/local/bin"))  # fmt: skip
    return {**kept, "PATH": path, **{name: str(value) for name, value in ours.items()}}


def launch(node: Node) -> None:
    """Start the node on its data and wait until it takes connections."""
    script, folder = server(), Path(node["folder"])
    assert script is not None
    with (folder / "console.log").open("ab") as console:
        process = subprocess.Popen(
            [script], cwd=folder, env=environment(node), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=console, stderr=console,
        )  # fmt: skip
    node["pid"] = process.pid
    (folder / "node.json").write_text(json.dumps(node))
    try:
        wait_for(lambda: process.poll() is not None or (greets(node["amqp"]) and administers(node)))
        if process.poll() is not None:
            said = (folder / "console.log").read_text(errors="replace").strip().splitlines()
            sys.exit("\n".join(["the private RabbitMQ node did not start:", *said[-20:]]))
    except BaseException:
        process.kill()
        raise


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; exit 1 when it does not in time."""
    deadline = time.monotonic() + STARTUP
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"RabbitMQ does not answer after {STARTUP:g} s")
        time.sleep(0.1)


def greets(port: int) -> bool:
    """Whether somebody answers in AMQP."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"AMQP\0\0\x09\x01")
            return connection.recv(1) == b"\x01"  # a method: Connection.Start
    except OSError:
        return False


def administers(node: Node) -> bool:
    """Whether its management API lets the guest in."""
    guest = base64.b64encode(b"guest:guest").decode()
    request = urllib.request.Request(
        f"{node['api']}/api/overview", headers={"authorization": f"Basic {guest}"}
    )
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except (OSError, urllib.error.URLError):
        return False
    return True


def is_running(node: Node) -> bool:
    """Whether the node's process is there, and not another one that got its number."""
    pid = str(node["pid"])
    if Path("/proc/self").exists():  # a small Debian has no ps, macOS has no /proc
        try:
            words = Path("/proc", pid, "cmdline").read_text(errors="replace")
        except OSError:
            return False
    else:
        asked = ["ps", "-ww", "-o", "command=", "-p", pid]
        words = subprocess.run(asked, capture_output=True, text=True).stdout
    return node["name"] in words  # a zombie has no words


def tell(node: Node, number: int) -> None:
    """Send the node's process a signal."""
    if is_running(node):
        with suppress(ProcessLookupError):
            os.kill(node["pid"], number)


def end(node: Node, number: int) -> None:
    """Send the node a signal that ends it, and see it go."""
    tell(node, number)
    tell(node, signal.SIGCONT)  # a frozen one would not hear of it
    deadline = time.monotonic() + 60
    while is_running(node):
        if time.monotonic() > deadline:
            sys.exit(f"the node did not end within 60 s: process {node['pid']}")
        time.sleep(0.02)


def remove(node: Node) -> None:
    """End the node at once, and its port mapper, and delete all of it."""
    end(node, signal.SIGKILL)
    end_epmd(node["epmd"])
    shutil.rmtree(node["folder"], ignore_errors=True)


def end_epmd(port: int) -> None:
    """Ask the port mapper to go; it does once it has noticed that its node is gone."""
    for _ in range(50):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as epmd:
                epmd.sendall(b"\0\x01k")
                if epmd.recv(2) == b"OK":
                    return
        except ConnectionRefusedError:
            return
        except OSError:
            pass
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now, each another one."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    main()
