"""The broker's management API, where it is reachable: it tells what AMQP does not.

Names of queues, bindings, policies, alarms. Everything here is a question; nothing is changed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urlsplit

from rabbit_tasks.errors import ManagementError
from rabbit_tasks.settings import Settings

TIMEOUT: Final = 10.0
"""Seconds for one answer."""


class Management:
    """Questions to one management API, for one virtual host."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        address = settings.addresses()[0]
        self.vhost = address.vhost
        parts = urlsplit(url)
        self.host = parts.netloc.rpartition("@")[2]
        self._root = f"{parts.scheme}://{self.host}{parts.path.rstrip('/')}/api"
        user, password = settings.management_login()
        login = base64.b64encode(f"{user}:{password}".encode()).decode()
        self.ahead: timedelta | None = None
        """How far its clock was ahead of ours at its last answer, to a second or two."""
        self._headers = {"authorization": f"Basic {login}", "accept": "application/json"}

    @classmethod
    def of(cls, settings: Settings) -> Management | None:
        """The one that RABBIT_TASKS_MANAGEMENT_URL names; None where it is not set."""
        return cls(settings, settings.management_url) if settings.management_url else None

    async def get(self, *path: str) -> Any:
        """What stands at a path, given in parts as they are, decoded; None where there is nothing.

        ManagementError where it does not answer, or not to us.
        """
        # A thread, because the standard library's client waits; it ends by itself within TIMEOUT.
        return await asyncio.to_thread(self._get, "/".join(quote(part, safe="") for part in path))

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self._root}/{path}", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT, context=self._tls()) as answer:
                with suppress(ValueError, TypeError):  # no date, or none that can be compared
                    self.ahead = parsedate_to_datetime(answer.headers["date"]) - datetime.now(UTC)
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            why = {
                401: "it does not know this user or password, or gives it no management tag; "
                "rabbitmqctl set_user_tags USER monitoring",
                403: "it does not let this user see that",
            }.get(error.code, error.reason)
            raise ManagementError(f"{self._where(path)} said {error.code}: {why}") from None
        except (OSError, ValueError) as error:
            said = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ManagementError(
                f"{self._where(path)} gave no answer: {said} (is the management plugin enabled? "
                "rabbitmq-plugins enable rabbitmq_management)"
            ) from None

    def _where(self, path: str) -> str:
        return f"the management API at {self.host} (RABBIT_TASKS_MANAGEMENT_URL), asked for {path},"

    def _tls(self) -> ssl.SSLContext | None:
        return self._settings.tls() if self._root.startswith("https:") else None
