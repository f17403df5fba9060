"""The broker's management API, where it is reachable: it tells what AMQP does not.

Names of queues, bindings, policies, alarms. Everything here is a question; nothing is changed.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from rabbit_tasks.errors import ManagementError
from rabbit_tasks.settings import Settings
from rabbit_tasks.text import one_line

TIMEOUT: Final = 10.0
"""Seconds in which an answer must begin, and go on."""


class Management:
    """Questions to one management API, for one virtual host."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        address = settings.addresses()[0]
        self.vhost = address.vhost
        parts = urlsplit(url)
        self.host = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{self.host}{parts.path.rstrip('/')}/api"
        """Where the paths begin; without the login."""
        user, password = settings.management_login()
        login = base64.b64encode(f"{user}:{password}".encode()).decode()
        self.ahead: timedelta | None = None
        """How far its clock was ahead of ours at its last answer, to a second or two."""
        self._headers = {"authorization": f"Basic {login}", "accept": "application/json"}

    @classmethod
    def of(cls, settings: Settings) -> Management | None:
        """The one that RABBIT_TASKS_MANAGEMENT_URL names; None where it is not set."""
        return cls(settings, settings.management_url) if settings.management_url else None

    async def get(self, *path: str, **query: str) -> Any:
        """What stands at a path, given in parts as they are, decoded; None where there is nothing.

        ManagementError where it does not answer, or not to us.
        """
        asked = "/".join(quote(part, safe="") for part in path)
        if query:
            asked += f"?{urlencode(query)}"
        # A thread, because the standard library's client waits; it ends by itself after TIMEOUT.
        return await asyncio.to_thread(self._get, asked)

    async def rows(self, *path: str, **query: str) -> list[dict[str, Any]]:
        """The list that stands at a path; empty where there is nothing. Errors as `get`."""
        found = await self.get(*path, **query)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise ManagementError(f"{self._where('/'.join(path))} gave no list")
        return found

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}/{path}", headers=self._headers)
        ways: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if (tls := self._tls()) is not None:
            ways.append(urllib.request.HTTPSHandler(context=tls))
        try:
            with urllib.request.build_opener(*ways).open(request, timeout=TIMEOUT) as answer:
                with suppress(ValueError, TypeError):  # no date, or none that can be compared
                    self.ahead = parsedate_to_datetime(answer.headers["date"]) - datetime.now(UTC)
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise ManagementError(f"{self._where(path)} said {error.code}: {_why(error)}") from None
        except TimeoutError:
            raise ManagementError(
                f"{self._where(path)} did not answer within {TIMEOUT:g} s"
            ) from None
        except ValueError:
            raise ManagementError(
                f"{self._where(path)} gave no JSON (is it RabbitMQ's, or a page before it?)"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            said = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(said, ssl.SSLCertVerificationError):
                raise ManagementError(
                    f"the management API at {self.host} (RABBIT_TASKS_MANAGEMENT_URL) has a "
                    f"certificate we do not trust: {one_line(said.verify_message)} "
                    "(RABBIT_TASKS_TLS_CA, RABBIT_TASKS_TLS_CHECK_HOST)"
                ) from None
            if isinstance(said, TimeoutError):
                said = f"no connection within {TIMEOUT:g} s"
            raise ManagementError(
                f"{self._where(path)} gave no answer: {one_line(str(said) or repr(said))} (is the "
                "management plugin enabled? rabbitmq-plugins enable rabbitmq_management)"
            ) from None

    def _where(self, path: str) -> str:
        return f"the management API at {self.host} (RABBIT_TASKS_MANAGEMENT_URL), asked for {path},"

    def _tls(self) -> ssl.SSLContext | None:
        return self._settings.tls() if self.url.startswith("https:") else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The password is for this host alone; the standard library would send it on."""

    def redirect_request(self, *_: object) -> None:
        return None


def _why(error: urllib.error.HTTPError) -> str:
    """Why it said no, with the next step; in its own words where it has any."""
    said = str(error.reason)
    with suppress(OSError, ValueError, http.client.HTTPException):
        told = json.loads(error.read(65_536))
        if isinstance(told, dict):
            said = str(told.get("reason") or said)
    step = {
        301: "it is somewhere else", 302: "it is somewhere else",
        307: "it is somewhere else", 308: "it is somewhere else",
        401: "it does not know this user or password, or gives it no management tag: "
        "rabbitmqctl set_user_tags USER monitoring",
        403: "it does not let this user see that: rabbitmqctl set_user_tags USER monitoring",
    }.get(error.code)  # fmt: skip
    said = one_line(said)
    return f"{step} ({said})" if step else said
