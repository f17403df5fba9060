"""Questions to a management API that answers well, badly, late or not at all."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from rabbit_tasks import Settings, management
from rabbit_tasks.errors import ManagementError
from rabbit_tasks.management import Management

URL = "amqp://us%40er:secret@broker/my%2Fhost"


class Api(ThreadingHTTPServer):
    """Answers every request with one status and body, and remembers what was asked."""

    daemon_threads = True

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.status, self.body, self.more = status, body, headers
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def port(self) -> int:
        return self.server_port


class _Answer(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["authorization"]))
        self.send_response_only(self.server.status)
        for name, value in self.server.more.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def api(
    status: int = 200,
    body: bytes = b"[]",
    *,
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Iterator[Api]:
    server = Api(status, body, headers)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def of(where: str, **more: str | Path | bool) -> Management:
    found = Management.of(Settings(url=URL, management_url=where, **more))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_without_its_url_there_is_none() -> None:
    assert Management.of(Settings(url=URL)) is None


async def test_parts_of_a_path_and_a_query_go_as_they_are_with_the_brokers_login() -> None:
    with api(body=b'[{"name": "a"}]') as server:
        asking = of(f"http://127.0.0.1:{server.port}/behind/")
        assert await asking.get("queues", asking.vhost, "a b?/é%", columns="name,x y") == [
            {"name": "a"}
        ]
        assert asking.host == f"127.0.0.1:{server.port}"
    ((path, login),) = server.asked
    assert path == "/behind/api/queues/my%2Fhost/a%20b%3F%2F%C3%A9%25?columns=name%2Cx+y"
    assert login == "Basic " + base64.b64encode(b"us@er:secret").decode()


async def test_a_login_of_its_own_is_taken_from_its_url() -> None:
    with api() as server:
        await of(f"http://viewer:p%3Aw@127.0.0.1:{server.port}").get("overview")
    assert server.asked[0][1] == "Basic " + base64.b64encode(b"viewer:p:w").decode()


async def test_what_is_not_there_is_none_and_no_rows() -> None:
    with api(404, b'{"error": "Object Not Found"}') as server:
        assert await of(f"http://127.0.0.1:{server.port}").get("queues", "v", "gone") is None
        assert await of(f"http://127.0.0.1:{server.port}").rows("queues", "gone") == []


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, b'{"error":"not_authorised","reason":"Not management user"}',
         ("said 401: it does not know this user or password, or gives it no management tag: "
          "rabbitmqctl set_user_tags USER monitoring (Not management user)")),
        (401, b"no json", "rabbitmqctl set_user_tags USER monitoring (Unauthorized)"),
        (403, b"[1]", "said 403: it does not let this user see that: rabbitmqctl set_user_tags"),
        (500, b'{"reason": "down\\u001b[2J"}', "said 500: down\\x1b[2J"),
        (503, b"", "said 503: Service Unavailable"),
        (200, b"<html>", "gave no JSON (is it RabbitMQ's, or a page before it?)"),
        (200, b"\xff\xfe\xfd", "gave no JSON"),
    ],
)  # fmt: skip
async def test_a_no_is_one_line_with_the_next_step_and_no_password(
    status: int, body: bytes, told: str
) -> None:
    with api(status, body) as server, pytest.raises(ManagementError) as refused:
        await of(f"http://127.0.0.1:{server.port}").get("queues", "my/host")
    line = str(refused.value)
    assert told in line
    assert line.startswith(
        f"the management API at 127.0.0.1:{server.port} (RABBIT_TASKS_MANAGEMENT_URL), asked for "
        "queues/my%2Fhost, "
    )
    assert "secret" not in line
    assert line.isprintable()


@pytest.mark.parametrize("body", [b'{"a": 1}', b"[1]", b'"text"', b"null"])
async def test_rows_that_are_none_are_told(body: bytes) -> None:
    with api(body=body) as server:
        asking = of(f"http://127.0.0.1:{server.port}")
        assert await asking.get("x") == json.loads(body)
        if body == b"null":
            assert await asking.rows("x") == []
        else:
            with pytest.raises(ManagementError, match="asked for x, gave no list"):
                await asking.rows("x")


async def test_the_password_is_not_sent_on_to_where_it_redirects() -> None:
    with (
        api() as other,
        api(302, b"", location=f"http://localhost:{other.port}/api/x") as server,
        pytest.raises(ManagementError, match="said 302: it is somewhere else"),
    ):
        await of(f"http://127.0.0.1:{server.port}").get("x")
    assert other.asked == []


@contextmanager
def listening(answer: bytes = b"", *, ends: bool = False) -> Iterator[int]:
    """The port of something that is no HTTP server: it says this, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    taken, _ = server.accept()
                    taken.recv(65_536)
                    taken.sendall(answer)
                    if ends:
                        taken.close()
                    held.append(taken)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in held:
            one.close()


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n[1,"])
async def test_one_that_does_not_answer_is_given_up(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(management, "TIMEOUT", 0.2)
    late = r"asked for x, did not answer within 0\.2 s$"
    with listening(begun) as port, pytest.raises(ManagementError, match=late):
        await of(f"http://127.0.0.1:{port}").get("x")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"AMQP\x00\x00\x09\x01", "gave no answer"),
        (b"", "gave no answer: Remote end closed connection without response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n[1,", "gave no answer"),
    ],
    ids=["the port of AMQP", "nothing", "half an answer"],
)
async def test_what_is_no_management_api_is_one_line(answer: bytes, told: str) -> None:
    with listening(answer, ends=True) as port, pytest.raises(ManagementError) as refused:
        await of(f"http://127.0.0.1:{port}").get("x")
    assert told in str(refused.value)
    assert str(refused.value).isprintable()
    assert "rabbitmq-plugins enable rabbitmq_management" in str(refused.value)


async def test_a_port_where_nobody_listens_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ManagementError, match=r"gave no answer: .*Connection refused"):
        await of(f"http://127.0.0.1:{port}").get("x")


async def test_https_trusts_whom_the_settings_trust(tmp_path: Path) -> None:
    authority, foreign = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    ours, theirs = tmp_path / "ours.pem", tmp_path / "theirs.pem"
    authority.cert_pem.write_to_path(ours)
    foreign.cert_pem.write_to_path(theirs)
    with api(tls=context) as server:
        where = f"https://localhost:{server.port}"
        assert await of(where, tls_ca=ours).get("x") == []
        with pytest.raises(
            ManagementError, match=r"a certificate we do not trust: unable .*TLS_CA"
        ):
            await of(where, tls_ca=theirs).get("x")
        other = f"https://127.0.0.1:{server.port}"
        with pytest.raises(ManagementError, match=r"we do not trust: .*TLS_CHECK_HOST"):
            await of(other, tls_ca=ours).get("x")
        assert await of(other, tls_ca=ours, tls_check_host=False).get("x") == []
    assert [path for path, _ in server.asked] == ["/api/x"] * 2


async def test_its_clock_is_read_from_its_answers() -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with api(date=format_datetime(later, usegmt=True)) as server:
        asking = of(f"http://127.0.0.1:{server.port}")
        await asking.get("x")
        assert asking.ahead is not None
        assert abs(asking.ahead - timedelta(hours=1)) < timedelta(seconds=10)
