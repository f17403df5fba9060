"""Where the broker is, and how patient we are."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypedDict, Unpack
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from rabbit_tasks.durations import duration_of
from rabbit_tasks.errors import ConfigurationError

PREFIX: Final = "RABBIT_TASKS_"
DEFAULT_URL: Final = "amqp://guest:guest@localhost:5672/"
_PORTS: Final = {"amqp": 5672, "amqps": 5671}

# After the limits, so that these are told as "1 second" and not as Python's timedelta.
_READ: Final = BeforeValidator(duration_of)


@dataclass(frozen=True)
class Address:
    """One broker node and who we are there, decoded."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    vhost: str
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


_Duration = timedelta | str | float | None
_Path = Path | str | None


class _Values(TypedDict, total=False):
    """What may be given, for whoever checks types: more than what there is then. None is nothing."""

    url: str | None
    user: str | None
    password: SecretStr | str | None
    vhost: str | None
    tls_ca: _Path
    tls_cert: _Path
    tls_key: _Path
    tls_check_host: bool | None
    heartbeat: _Duration
    connect_timeout: _Duration
    publish_timeout: _Duration
    grace: _Duration
    reconnect_cap: _Duration
    restart_cap: _Duration
    error_stack: bool | None
    worker_name: str | None
    management_url: str | None


class Settings(BaseModel):
    """Read from the environment, `RABBIT_TASKS_<NAME>`, where not given as an argument or None.

    url                 the broker, or several nodes of it separated by commas, tried in an order
                        drawn by lot, so that workers which lost one node spread over the others:
                        amqp://user:password@host:port/vhost, amqps:// for TLS. In a URL, write
                        @ : / % # ? , in passwords and virtual hosts as
                        %40 %3A %2F %25 %23 %3F %2C
    user, password      instead of those in the URL; taken literally, nothing to encode
    vhost               instead of the one in the URL; likewise
    tls_ca              file of certificates that signed the broker's (default: the system's)
    tls_cert, tls_key   this client's own certificate and key, where the broker asks for one
    tls_check_host      False: do not compare the host's name with the broker's certificate
    heartbeat           how often both sides say they are alive; a vanished worker is noticed in
                        about three of them. 1 s to 10 min
    connect_timeout     for one attempt to connect, over all URLs
    publish_timeout     for the broker's answer to a publish
    grace               within which a stopping worker is gone (2 s at least): handlers may finish
                        until its last quarter, 5 s at most, in which their messages are put back
    reconnect_cap       the longest pause between two attempts to connect
    restart_cap         the longest pause before a supervisor replaces a worker that died
    error_stack         False: leave stack traces out of message headers
    worker_name         in logs and histories (default: host name and process id)
    management_url      the broker's management API, http://host:15672 or https://…, for what AMQP
                        does not tell; with the user of `url`, or user:password@ before the host

    Durations are numbers of seconds or texts such as 500ms, 10s, 5m. Raises ConfigurationError,
    naming the variable, and never shows a password.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, Field(repr=False)] = DEFAULT_URL
    user: str | None = None
    password: SecretStr | None = None
    vhost: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_check_host: bool = True
    heartbeat: Annotated[
        timedelta, Field(ge=timedelta(seconds=1), le=timedelta(minutes=10)), _READ
    ] = timedelta(seconds=15)
    connect_timeout: Annotated[timedelta, Field(gt=timedelta()), _READ] = timedelta(seconds=9)
    publish_timeout: Annotated[timedelta, Field(gt=timedelta()), _READ] = timedelta(seconds=30)
    grace: Annotated[timedelta, Field(ge=timedelta()), _READ] = timedelta(seconds=30)
    reconnect_cap: Annotated[timedelta, Field(gt=timedelta()), _READ] = timedelta(seconds=10)
    restart_cap: Annotated[timedelta, Field(gt=timedelta()), _READ] = timedelta(seconds=10)
    error_stack: bool = True
    worker_name: str | None = None
    management_url: Annotated[str | None, Field(repr=False)] = None

    def __init__(self, **values: Unpack[_Values]) -> None:
        given: dict[str, Any] = {name: one for name, one in values.items() if one is not None}
        try:
            super().__init__(**{**self._in_environment(), **given})
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "?"
            text = first["msg"].removeprefix("Value error, ")
            raise ConfigurationError(f"{PREFIX}{name.upper()}: {text}") from None
        self.addresses()
        self.management_login()

    @classmethod
    def _in_environment(cls) -> dict[str, str]:
        """What its variables say, in capitals or not."""
        names = {f"{PREFIX}{name.upper()}": name for name in cls.model_fields}
        return {
            names[variable.upper()]: text
            for variable, text in os.environ.items()
            if variable.upper() in names
        }

    def changed(self, **values: Unpack[_Values]) -> Self:
        """These settings with other values put in."""
        given: dict[str, Any] = {name: one for name, one in values.items() if one is not None}
        return type(self)(**{**self.model_dump(exclude_unset=True), **given})

    def addresses(self) -> tuple[Address, ...]:
        """The nodes to try, in order."""
        urls = [url.strip() for url in self.url.split(",") if url.strip()]
        if not urls:
            raise ConfigurationError(f"{PREFIX}URL is empty; write {DEFAULT_URL}")
        return tuple(self._address(url) for url in urls)

    def _address(self, url: str) -> Address:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            port, parts = None, urlsplit("")
        if parts.query and parts.hostname and "@" not in parts.query:
            raise ConfigurationError(
                f"{PREFIX}URL takes no ?query; set {PREFIX}HEARTBEAT, {PREFIX}CONNECT_TIMEOUT, "
                f"{PREFIX}TLS_CA and their like (or encode a ? as %3F)"
            )
        # An unencoded / or # in a password ends the host part early, an unencoded @ or : moves it.
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment \
                or "@" in unquote(parts.hostname) or parts.netloc.count("@") > 1 \
                or "@" in parts.path:  # fmt: skip
            raise ConfigurationError(
                f"{PREFIX}URL is not amqp://user:password@host:port/vhost; encode @ : / % # ? , in "
                f"passwords and virtual hosts as %40 %3A %2F %25 %23 %3F %2C, or set "
                f"{PREFIX}PASSWORD and {PREFIX}VHOST, which are taken literally"
            )
        password = self.password.get_secret_value() if self.password else None
        return Address(
            host=parts.hostname,
            port=port or _PORTS[parts.scheme],
            user=_first(self.user, parts.username and unquote(parts.username), "guest"),
            password=_first(password, parts.password and unquote(parts.password), "guest"),
            # amqp://host and amqp://host/ both mean the default virtual host, as in every client.
            vhost=_first(self.vhost, unquote(parts.path[1:]), "/"),
            tls=parts.scheme == "amqps",
        )

    def management_login(self) -> tuple[str, str]:
        """User and password for the management API."""
        address = self.addresses()[0]
        try:
            parts = urlsplit(self.management_url or "http://-")
            valid = parts.scheme in ("http", "https") and parts.hostname and not parts.query
            _ = parts.port
        except ValueError:
            valid = False
        if not valid or parts.netloc.count("@") > 1 or "@" in parts.path or parts.fragment:
            raise ConfigurationError(
                f"{PREFIX}MANAGEMENT_URL is not http://host:15672 nor "
                "https://user:password@host:15671 (encode @ : / % # ? in a password as "
                "%40 %3A %2F %25 %23 %3F)"
            )
        return (
            unquote(parts.username) if parts.username else address.user,
            unquote(parts.password) if parts.password else address.password,
        )

    def tls(self) -> ssl.SSLContext:
        """The TLS context for amqps; ConfigurationError for files that cannot be used."""
        for name in ("tls_ca", "tls_cert", "tls_key"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ConfigurationError(f"{PREFIX}{name.upper()}: there is no file {path}")
        if self.tls_key and not self.tls_cert:
            raise ConfigurationError(f"{PREFIX}TLS_KEY needs {PREFIX}TLS_CERT, its certificate")
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
        except OSError as error:
            why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigurationError(
                f"{PREFIX}TLS_CA: {self.tls_ca} holds no certificate in PEM form ({why})"
            ) from None
        context.check_hostname = self.tls_check_host
        if self.tls_cert:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: b"")
            except OSError as error:
                raise ConfigurationError(
                    f"{PREFIX}TLS_CERT: {self.tls_cert} and its key cannot be used ({error})"
                ) from None
        return context


def _first(*choices: str | None) -> str:
    return next(choice for choice in choices if choice)
