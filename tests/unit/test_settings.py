"""Where the broker is: URLs, variables, certificates; and no password is ever shown."""

from __future__ import annotations

import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import quote

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from rabbit_tasks import ConfigurationError, Settings
from rabbit_tasks.durations import duration_of
from rabbit_tasks.settings import Address, _Values

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "USER", "PASSWORD", "VHOST", "GRACE", "HEARTBEAT"):
        monkeypatch.delenv(f"RABBIT_TASKS_{name}", raising=False)


def address(url: str, **values: Any) -> Address:
    (one,) = Settings(url=url, **values).addresses()
    return one


# --- URLs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://h", Address("h", 5672, "guest", "guest", "/", tls=False)),
        ("amqp://h/", Address("h", 5672, "guest", "guest", "/", tls=False)),
        ("amqp://h/%2F", Address("h", 5672, "guest", "guest", "/", tls=False)),
        ("amqp://h//", Address("h", 5672, "guest", "guest", "/", tls=False)),
        ("amqps://h", Address("h", 5671, "guest", "guest", "/", tls=True)),
        ("amqp://u:p@h:1234/v", Address("h", 1234, "u", "p", "v", tls=False)),
        ("AMQP://u:p@H:1234/V", Address("h", 1234, "u", "p", "V", tls=False)),
        ("amqp://u@h/v", Address("h", 5672, "u", "guest", "v", tls=False)),
        ("amqp://h/a/b", Address("h", 5672, "guest", "guest", "a/b", tls=False)),
        ("amqp://h/a%2Fb%25", Address("h", 5672, "guest", "guest", "a/b%", tls=False)),
        ("amqp://u%40x:%40%3A%2F%25%23%2C@h", Address("h", 5672, "u@x", "@:/%#,", "/", tls=False)),
        ("amqp://u:100%@h", Address("h", 5672, "u", "100%", "/", tls=False)),
        ("amqp://u:p@[::1]:5/v", Address("::1", 5, "u", "p", "v", tls=False)),
        (" amqp://h \n", Address("h", 5672, "guest", "guest", "/", tls=False)),
    ],
)
def test_a_url_is_read_as_every_client_reads_it(url: str, expected: Address) -> None:
    assert address(url) == expected


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(TEXT, TEXT, TEXT)
def test_an_encoded_url_takes_any_user_password_and_virtual_host(
    user: str, password: str, vhost: str
) -> None:
    url = f"amqp://{quote(user, '')}:{quote(password, '')}@h/{quote(vhost, '')}"
    assert address(url) == Address("h", 5672, user, password, vhost, tls=False)


@given(TEXT, TEXT, TEXT)
def test_user_password_and_virtual_host_of_their_own_are_taken_literally(
    user: str, password: str, vhost: str
) -> None:
    expected = Address("h", 5672, user, password, vhost, tls=False)
    assert address("amqp://a:b@h/c", user=user, password=password, vhost=vhost) == expected


def test_the_environment_is_read_literally_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBIT_TASKS_URL", "amqp://a:b@h/c")
    monkeypatch.setenv("RABBIT_TASKS_USER", "me%40")
    monkeypatch.setenv("RABBIT_TASKS_PASSWORD", "@:/%#%41")
    monkeypatch.setenv("RABBIT_TASKS_VHOST", "a/b%2F")
    monkeypatch.setenv("RABBIT_TASKS_GRACE", "1m")
    settings = Settings()
    (one,) = settings.addresses()
    assert one == Address("h", 5672, "me%40", "@:/%#%41", "a/b%2F", tls=False)
    assert settings.grace == timedelta(minutes=1)
    assert settings.changed(grace="5s", url=None).grace == timedelta(seconds=5)
    assert settings.changed(url="amqp://other").addresses()[0].password == "@:/%#%41"


def test_several_urls_are_nodes_in_their_order() -> None:
    nodes = Settings(url="amqp://a:p%2Cq@one, amqps://two:1,\namqp://[fe80::1],").addresses()
    assert [str(node) for node in nodes] == ["one:5672", "two:1", "[fe80::1]:5672"]
    assert nodes[0].password == "p,q"


def test_without_a_url_it_is_a_broker_on_this_machine() -> None:
    (one,) = Settings().addresses()
    assert one == Address("localhost", 5672, "guest", "guest", "/", tls=False)


@pytest.mark.parametrize(
    "url",
    [
        f"amqp://u:{SECRET}@h:x/", f"amqp://u:{SECRET}/x@h/", f"amqp://u:{SECRET}#x@h/",
        f"amqp://u:{SECRET}@x@h/", f"amqp://u:{SECRET}?x@h/", "amqp://u:5?x@h/", f"amqp://u:1/{SECRET}@h/",
        f"amqp://u:{SECRET},x@h/", f"amqp://u:{SECRET}[@h/", f"amqp://u:{SECRET}@h:70000/",
        f"amqp://u:{SECRET}@/", f"http://u:{SECRET}@h/", f"u:{SECRET}@h", "amqp:///", "h:5672", "5",
        f"amqp://u:{SECRET}@h,http://h",
    ],
)  # fmt: skip
def test_a_bad_url_is_one_line_with_the_variable_and_no_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Settings(url=url)
    text = str(refused.value)
    assert text.startswith("RABBIT_TASKS_URL is not amqp://user:password@host:port/vhost; ")
    assert SECRET not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "url", ["amqp://h/?heartbeat=5", f"amqp://u:{SECRET}@h/v?{SECRET}", "amqps://h?a"]
)
def test_a_query_in_a_url_says_where_its_options_are_set(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Settings(url=url)
    text = str(refused.value)
    assert text.startswith("RABBIT_TASKS_URL takes no ?query; set RABBIT_TASKS_HEARTBEAT, ")
    assert SECRET not in text


def test_whoever_checks_types_knows_every_setting() -> None:
    assert list(get_type_hints(_Values)) == list(Settings.model_fields)


@pytest.mark.parametrize("url", ["", " ", ",", " , "])
def test_an_empty_url_says_what_to_write(url: str) -> None:
    with pytest.raises(ConfigurationError, match="RABBIT_TASKS_URL is empty; write amqp://guest"):
        Settings(url=url)


def test_no_password_is_in_any_text_of_the_settings() -> None:
    settings = Settings(url=f"amqp://u:{SECRET}1@h/", password=f"{SECRET}2")
    for text in (repr(settings), str(settings), f"{settings}", repr(settings.addresses())):
        assert SECRET not in text
    assert str(settings.addresses()[0]) == "h:5672"


# --- durations and the rest ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("500ms", timedelta(milliseconds=500)), ("10s", timedelta(seconds=10)),
        ("10", timedelta(seconds=10)), (" 1.5 h ", timedelta(hours=1.5)),
        ("1d", timedelta(days=1)), (10, timedelta(seconds=10)), (0, timedelta()),
        (0.1 + 0.2, timedelta(milliseconds=300)), (1 / 3, timedelta(microseconds=333_333)),
        (timedelta(seconds=7), timedelta(seconds=7)), ("0.3333333333333333", timedelta(seconds=1) / 3),
    ],
)  # fmt: skip
def test_a_duration_is_seconds_or_has_a_unit(given_: Any, expected: timedelta) -> None:
    assert duration_of(given_) == expected
    assert Settings(grace=given_).grace == expected


@pytest.mark.parametrize(
    "value",
    ["", "x", "10 parsecs", "-1s", "1e3", "inf", "nan", "9" * 40, "999999999999d", "1:00",
     float("inf"), float("nan"), 10**400, [], -1],
)  # fmt: skip
def test_a_bad_duration_is_one_line_with_the_variable(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^RABBIT_TASKS_GRACE: ") as refused:
        Settings(grace=value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"heartbeat": "999ms"}, "RABBIT_TASKS_HEARTBEAT: .*greater than or equal to 1 second$"),
        ({"heartbeat": "11m"}, "RABBIT_TASKS_HEARTBEAT: .*less than or equal to 10 minutes$"),
        ({"connect_timeout": 0}, "RABBIT_TASKS_CONNECT_TIMEOUT: "),
        ({"publish_timeout": 0}, "RABBIT_TASKS_PUBLISH_TIMEOUT: "),
        ({"reconnect_cap": 0}, "RABBIT_TASKS_RECONNECT_CAP: "),
        ({"restart_cap": 0}, "RABBIT_TASKS_RESTART_CAP: "),
        ({"tls_check_host": "perhaps"}, "RABBIT_TASKS_TLS_CHECK_HOST: "),
        ({"management_url": "h:15672"}, "RABBIT_TASKS_MANAGEMENT_URL is not http"),
        ({"management_url": "http://u:p@ss@h"}, "RABBIT_TASKS_MANAGEMENT_URL is not http"),
        ({"management_url": "http://h:port"}, "RABBIT_TASKS_MANAGEMENT_URL is not http"),
        ({"urll": "amqp://h"}, "RABBIT_TASKS_URLL: "),
        ({"password": 5}, "RABBIT_TASKS_PASSWORD: "),
    ],
)
def test_a_bad_setting_is_one_line_with_the_variable(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as refused:
        Settings(**values)
    assert "\n" not in str(refused.value)


def test_none_is_as_if_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBIT_TASKS_GRACE", "7s")
    assert Settings(url=None, grace=None).grace == timedelta(seconds=7)
    assert Settings(grace=9).changed(grace=None).grace == timedelta(seconds=9)


def test_every_setting_has_a_variable_in_capitals_or_not_and_gives_way_to_an_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As text that is read as its type; what else is called RABBIT_TASKS_… is not ours to judge."""
    given = {"tls_ca": Path("ca.pem"), "tls_check_host": False, "error_stack": False,
             "heartbeat": timedelta(minutes=1), "worker_name": "7", "grace": timedelta()}  # fmt: skip
    texts = {"tls_ca": "ca.pem", "TLS_CHECK_HOST": "0", "error_stack": "false", "Heartbeat": "1m",
             "WORKER_NAME": "7", "grace": "0"}  # fmt: skip
    for name, text in texts.items():
        variable = f"RABBIT_TASKS_{name}" if name.isupper() else f"rabbit_tasks_{name}"
        monkeypatch.setenv(variable, text)
    monkeypatch.setenv("RABBIT_TASKS_APP", "no:setting")
    assert Settings().model_dump(include=set(given)) == given
    assert Settings(worker_name="eight", grace=1).model_fields_set == set(given)
    assert Settings(worker_name="eight", grace=1).worker_name == "eight"


def test_a_bad_variable_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBIT_TASKS_GRACE", "soon")
    with pytest.raises(ConfigurationError, match="RABBIT_TASKS_GRACE: 'soon' is no duration; "):
        Settings()


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, client.pem and client.key, other.key, and files that are none of these."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    client, other = authority.issue_cert("client"), authority.issue_cert("other")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    client.cert_chain_pems[0].write_to_path(folder / "client.pem")
    client.private_key_pem.write_to_path(folder / "client.key")
    other.private_key_pem.write_to_path(folder / "other.key")
    client.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    (folder / "text.pem").write_text("no certificate")
    (folder / "empty.pem").write_text("")
    return folder


def test_tls_trusts_the_given_authority_and_checks_the_host(certificates: Path) -> None:
    context = Settings(tls_ca=certificates / "ca.pem").tls()
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_not_checking_the_host_still_checks_the_certificate(certificates: Path) -> None:
    context = Settings(tls_ca=certificates / "ca.pem", tls_check_host=False).tls()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert not context.check_hostname


@pytest.mark.parametrize("files", [("client.pem", "client.key"), ("both.pem", None)])
def test_a_client_certificate_comes_with_its_key(
    certificates: Path, files: tuple[str, str | None]
) -> None:
    cert, key = files
    Settings(tls_cert=certificates / cert, tls_key=certificates / key if key else None).tls()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"tls_ca": "absent.pem"}, "RABBIT_TASKS_TLS_CA: there is no file .*absent.pem"),
        ({"tls_ca": "."}, "RABBIT_TASKS_TLS_CA: there is no file"),
        ({"tls_ca": "text.pem"}, r"RABBIT_TASKS_TLS_CA: .*text.pem holds no certificate in PEM"),
        ({"tls_ca": "empty.pem"}, "RABBIT_TASKS_TLS_CA: .*empty.pem holds no certificate"),
        ({"tls_cert": "absent.pem"}, "RABBIT_TASKS_TLS_CERT: there is no file"),
        ({"tls_cert": "client.pem", "tls_key": "absent"}, "RABBIT_TASKS_TLS_KEY: there is no file"),
        ({"tls_key": "client.key"}, "RABBIT_TASKS_TLS_KEY needs RABBIT_TASKS_TLS_CERT"),
        ({"tls_cert": "client.pem"}, "RABBIT_TASKS_TLS_CERT: .*client.pem and its key cannot be"),
        ({"tls_cert": "client.pem", "tls_key": "other.key"}, "cannot be used .*MISMATCH"),
        ({"tls_cert": "text.pem", "tls_key": "client.key"}, "RABBIT_TASKS_TLS_CERT: .*text.pem"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_with_the_variable(
    certificates: Path, files: dict[str, str], text: str
) -> None:
    given_: dict[str, Any] = {name: certificates / file for name, file in files.items()}
    settings = Settings(**given_)
    with pytest.raises(ConfigurationError, match=text) as refused:
        settings.tls()
    assert "\n" not in str(refused.value)
