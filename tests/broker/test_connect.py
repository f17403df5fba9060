"""To connect: strange names, wrong ones, silent ports, several nodes, TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme

from rabbit_tasks import ConfigurationError, Settings
from rabbit_tasks.broker import connect, connected
from rabbit_tasks.errors import ConnectError
from tests.support.brokers import Broker
from tests.support.tls import tls_proxy

SECRET = "s3cret@:/%# ,ü"


@pytest.fixture
def user(broker: Broker) -> Iterator[str]:
    name = f"us@r:{uuid.uuid4().hex[:6]}/%#"
    broker.create_user(name, SECRET)
    yield name
    broker.delete_user(name)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def refused(settings: Settings) -> ConnectError:
    """The error, after making sure that it is one line and shows no password anywhere."""
    with pytest.raises(ConnectError) as raised:
        await connect(settings, "test")
    everything = "".join(traceback.format_exception(raised.value)) + repr(settings)
    for secret in (SECRET, quote(SECRET, safe=""), "s3cret"):
        assert secret not in everything
    assert len(str(raised.value).splitlines()) == 1
    return raised.value


@pytest.mark.parametrize("vhost", ["a/b", "100%", "with space", "#", "a@b:c?d=e&f", "ü,v", "%zz"])
async def test_strange_passwords_and_virtual_hosts_connect(
    vhost: str, user: str, broker: Broker
) -> None:
    vhost = f"{vhost} {uuid.uuid4().hex[:6]}"
    broker.create_vhost(vhost)
    try:
        broker.allow(vhost, user)
        encoded = Settings(url=broker.url(vhost, user, SECRET))
        literal = Settings(
            url=f"amqp://{broker.host}:{broker.port}", user=user, password=SECRET, vhost=vhost
        )
        for settings in (encoded, literal):
            async with connected(settings, "test") as connection:
                channel = await connection.open()
                await channel.queue_declare("here", durable=True)
        assert [q["name"] for q in broker.api("GET", f"/queues/{quote(vhost, safe='')}")] == [
            "here"
        ]
    finally:
        broker.delete_vhost(vhost)


async def test_a_wrong_password_names_the_settings_and_is_for_good(
    broker: Broker, vhost: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    error = await refused(Settings(url=broker.url(vhost, "guest", SECRET)))
    assert error.permanent
    assert "refused user 'guest' or its password" in str(error)
    assert "RABBIT_TASKS_PASSWORD" in str(error)
    assert "s3cret" not in caplog.text


async def test_a_password_is_in_no_log_line_of_a_connection_that_works(
    user: str, broker: Broker, vhost: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    broker.allow(vhost, user)
    async with connected(Settings(url=broker.url(vhost, user, SECRET)), "test") as connection:
        await connection.open()
    assert caplog.text
    assert "s3cret" not in caplog.text


async def test_a_missing_virtual_host_says_how_to_create_it(broker: Broker) -> None:
    error = await refused(Settings(url=broker.url("not here/'x")))
    assert error.permanent
    assert "no virtual host" in str(error)
    assert "RABBIT_TASKS_VHOST" in str(error)
    assert """rabbitmqctl add_vhost 'not here/'"'"'x'""" in str(error)


async def test_a_virtual_host_that_is_closed_to_the_user_says_how_to_open_it(
    user: str, broker: Broker, vhost: str
) -> None:
    error = await refused(Settings(url=broker.url(vhost, user, SECRET)))
    assert error.permanent
    assert f"rabbitmqctl set_permissions -p {vhost} '{user}' '.*' '.*' '.*'" in str(error)


async def test_nobody_listening_names_the_url(free_port: int) -> None:
    error = await refused(Settings(url=f"amqp://u:s3cret@127.0.0.1:{free_port}/"))
    assert not error.permanent
    assert f"127.0.0.1:{free_port} cannot be reached" in str(error)
    assert "RABBIT_TASKS_URL" in str(error)


async def test_an_unknown_host_names_the_url() -> None:
    error = await refused(Settings(url="amqp://u:s3cret@no-such-host.invalid/", connect_timeout=3))
    assert "no-such-host.invalid:5672" in str(error)
    assert "RABBIT_TASKS_URL" in str(error)


@asynccontextmanager
async def listener(answer: bytes | None) -> AsyncIterator[int]:
    """A port that answers with these bytes and closes, or never answers."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if answer is not None:
            await reader.read(8)
            writer.write(answer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for writer in writers:
        writer.transport.abort()


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
async def test_a_port_that_never_answers_is_given_up_in_time(scheme: str) -> None:
    assert Settings().connect_timeout.total_seconds() < 10
    loop = asyncio.get_running_loop()
    async with listener(None) as port:
        began = loop.time()
        error = await refused(
            Settings(url=f"{scheme}://u:s3cret@127.0.0.1:{port}/", connect_timeout=0.5)
        )
        assert 0.4 < loop.time() - began < 2
    assert "did not answer within 0.5 s (RABBIT_TASKS_URL" in str(error)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n",
        b"AMQP\x00\x01\x00\x00", b"\x15\x03\x01\x00\x02\x02\x16", b"",
    ],
    ids=["http", "ssh", "amqp 1.0", "tls alert", "nothing"],
)  # fmt: skip
async def test_a_port_that_speaks_something_else_names_the_url(answer: bytes) -> None:
    async with listener(answer) as port:
        error = await refused(Settings(url=f"amqp://u:s3cret@127.0.0.1:{port}/", connect_timeout=3))
    assert f"127.0.0.1:{port}" in str(error)
    assert "RABBIT_TASKS_URL" in str(error)


async def test_several_nodes_are_tried_in_turn(url: str, free_port: int) -> None:
    async with listener(None) as silent:
        dead = f"amqp://u:p@127.0.0.1:{free_port}/,amqp://u:p@127.0.0.1:{silent}/"
        async with connected(
            Settings(url=f"{dead},{url}", connect_timeout=3), "test"
        ) as connection:
            await connection.open()
        error = await refused(Settings(url=dead, connect_timeout=1))
    assert f":{free_port} cannot be reached" in str(error)
    assert f":{silent} did not answer" in str(error)


async def test_a_node_that_refuses_does_not_hide_one_that_lets_us_in(
    broker: Broker, url: str, vhost: str
) -> None:
    both = f"{broker.url(vhost, 'guest', 'wrong')},{url}"
    async with connected(Settings(url=both), "test") as connection:
        await connection.open()


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


def amqps(broker: Broker, vhost: str, port: int, host: str = "localhost") -> str:
    return f"amqps://{broker.user}:{broker.password}@{host}:{port}/{quote(vhost, safe='')}"


async def test_tls_with_our_authority_and_the_right_host_connects(
    broker: Broker, vhost: str, authority: trustme.CA, ca_file: Path
) -> None:
    async with tls_proxy(broker, authority) as port:
        settings = Settings(url=amqps(broker, vhost, port), tls_ca=ca_file)
        async with connected(settings, "test") as connection:
            channel = await connection.open()
            await channel.queue_declare("here", durable=True)


async def test_an_unknown_authority_is_refused(
    broker: Broker, vhost: str, authority: trustme.CA, tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    async with tls_proxy(broker, authority) as port:
        for settings in (
            Settings(url=amqps(broker, vhost, port), tls_ca=other),
            Settings(url=amqps(broker, vhost, port)),  # the system's
            Settings(url=amqps(broker, vhost, port), tls_ca=other, tls_check_host=False),
        ):
            error = await refused(settings)
            assert error.permanent
            assert "RABBIT_TASKS_TLS_CA" in str(error)


async def test_another_hosts_certificate_is_refused_unless_told_not_to_look(
    broker: Broker, vhost: str, authority: trustme.CA, ca_file: Path
) -> None:
    async with tls_proxy(broker, authority, "elsewhere.example") as port:
        url = amqps(broker, vhost, port)
        error = await refused(Settings(url=url, tls_ca=ca_file))
        assert error.permanent
        assert "RABBIT_TASKS_TLS_CHECK_HOST" in str(error)
        assert "localhost" in str(error)
        settings = Settings(url=url, tls_ca=ca_file, tls_check_host=False)
        async with connected(settings, "test") as connection:
            await connection.open()


async def test_an_address_is_checked_like_a_name(
    broker: Broker, vhost: str, authority: trustme.CA, ca_file: Path
) -> None:
    async with tls_proxy(broker, authority, "127.0.0.1") as port:
        settings = Settings(url=amqps(broker, vhost, port, "127.0.0.1"), tls_ca=ca_file)
        async with connected(settings, "test") as connection:
            await connection.open()


async def test_a_client_certificate_is_given_where_it_is_asked_for(
    broker: Broker, vhost: str, authority: trustme.CA, ca_file: Path, tmp_path: Path
) -> None:
    mine = authority.issue_cert("client@example.org")
    chain, key = tmp_path / "client.pem", tmp_path / "client.key"
    mine.cert_chain_pems[0].write_to_path(str(chain))
    mine.private_key_pem.write_to_path(str(key))
    stranger = trustme.CA().issue_cert("client@example.org")
    strange = tmp_path / "strange.pem"
    stranger.private_key_and_cert_chain_pem.write_to_path(str(strange))
    async with tls_proxy(broker, authority, clients=authority) as port:
        given = Settings(
            url=amqps(broker, vhost, port), tls_ca=ca_file, tls_cert=chain, tls_key=key
        )
        async with connected(given, "test") as connection:
            await connection.open()
        for without in (
            Settings(url=amqps(broker, vhost, port), tls_ca=ca_file),
            Settings(url=amqps(broker, vhost, port), tls_ca=ca_file, tls_cert=strange),
        ):
            assert "RABBIT_TASKS_TLS_CERT" in str(await refused(without))


async def test_tls_to_a_plain_port_and_plain_to_a_tls_port_name_the_url(
    broker: Broker, vhost: str, authority: trustme.CA, ca_file: Path
) -> None:
    error = await refused(
        Settings(url=amqps(broker, vhost, broker.port, broker.host), tls_ca=ca_file)
    )
    assert "RABBIT_TASKS_URL" in str(error)
    async with tls_proxy(broker, authority) as port:
        error = await refused(Settings(url=f"amqp://u:s3cret@localhost:{port}/"))
        assert "RABBIT_TASKS_URL" in str(error)


def test_files_that_are_none_name_their_setting(tmp_path: Path, ca_file: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for name, settings in (
        ("TLS_CA", Settings(tls_ca=empty)),
        ("TLS_CA", Settings(tls_ca=tmp_path / "absent")),
        ("TLS_CERT", Settings(tls_cert=ca_file)),
        ("TLS_KEY", Settings(tls_key=ca_file)),
    ):
        with pytest.raises(ConfigurationError, match=f"RABBIT_TASKS_{name}"):
            settings.tls()


def test_the_tls_context_is_a_strict_one_by_default() -> None:
    context = Settings(url="amqps://localhost").tls()
    assert context.check_hostname
    assert context.verify_mode == ssl.CERT_REQUIRED
