"""Requests to a server with an OpenAI-compatible API, over the standard library's HTTP.

A request that does not reach the server, or is refused for now (429, 503, …), is tried again, with
pauses that double. Each request has a connection of its own, so closing the client ends requests of
other threads at once, and the server stops working on them. Proxies of the environment are not
used. The key comes from the environment variable PENSTOCK_API_KEY, and no message shows it.
"""

import http.client
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, final
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError, reason_of
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.urls import shown_url

KEY = "PENSTOCK_API_KEY"
"""Environment variable with the server's key."""
AGAIN = (408, 425, 429, 502, 503, 504)
"""Statuses of requests that may be sent again."""
CONNECT_SECONDS = 10.0
PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first repetition, and at most."""
MOST_BYTES = 256 << 20
"""Maximum size of an answer."""
_SAID = 300
"""Maximum characters of a server's message in ours."""
_log = logging.getLogger("penstock.runs")


class ClosedError(Exception):
    """The client was closed while a request went on."""


class _AgainError(Exception):
    """The request may be sent again; `after`: seconds that the server asks for."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class _Answer(NamedTuple):
    status: int
    after: float
    content: bytes


@final
class EngineClient:
    """One server; requests may come from several threads.

    Args:
        url: `http://host:port/v1`, or without `/v1`.
        seconds: Maximum time that an answer takes, and that a request is tried again.

    Raises:
        ConfigError: The URL is no address of a server, or holds a secret.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self._seconds = shown_url(url), seconds
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"engine is {self.url!r}; expected the address of a server, such as "
                "http://localhost:8000/v1"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                f"engine {self.url}: has a user, a query or a fragment; give the address alone, "
                f"and a key in the environment variable {KEY}"
            )
        try:
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(f"engine {self.url}: {error}; correct the port") from None
        self._host, self._is_safe = parts.hostname, parts.scheme == "https"
        self._path = parts.path.rstrip("/") or "/v1"
        self._key = os.environ.get(KEY, "")
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._reached = self._failing = False

    def get(self, path: str) -> JsonObject | None:
        """The object at a path below the address; None: there is none (404).

        Raises:
            ConfigError: As `post`.
        """
        return self._object("GET", path, None)

    def post(self, path: str, body: JsonMapping) -> JsonObject:
        """The server's answer to an object.

        Raises:
            ConfigError: The server cannot be reached, refuses the request, or answers with
                something else than a JSON object; or the answer takes too long.
            ClosedError: The client was closed.
        """
        found = self._object("POST", path, body)
        if found is None:
            raise ConfigError(
                f"engine {self.url}: has nothing at {self._path}{path} (404); give the address of "
                "an OpenAI-compatible API, and a model that it serves (engine_model)"
            )
        return found

    def close(self) -> None:
        """End all requests."""
        self._closed.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _object(self, method: str, path: str, body: JsonMapping | None) -> JsonObject | None:
        content = None if body is None else json.dumps(body).encode()
        answer = self._answered(method, path, content)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise ConfigError(self._refusal(answer))
        try:
            found = json.loads(answer.content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(
                f"engine {self.url}: {method} {path} gave no JSON object; expected an "
                "OpenAI-compatible API there"
            )
        return found

    def _answered(self, method: str, path: str, content: bytes | None) -> _Answer:
        """The first answer that does not ask for another try."""
        end, pause = 0.0, PAUSE
        while True:
            try:
                answer = self._once(method, path, content)
                if answer.status not in AGAIN:
                    self._reached, self._failing = True, False
                    return answer
                reason = _AgainError(self._said(answer), answer.after)
            except _AgainError as error:
                reason = error
            end = end or time.monotonic() + self._seconds
            self._pause(reason, pause, end - time.monotonic())
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _pause(self, reason: _AgainError, pause: float, left: float) -> None:
        """Wait before another try.

        Raises:
            ConfigError: There was time enough.
            ClosedError: The client was closed.
        """
        if left <= 0:
            raise ConfigError(
                f"engine {self.url}: {reason}, for {self._seconds:g} s; see whether it runs, then "
                "call again: what is over is kept (engine_seconds says how long it is tried)"
            )
        if not self._failing:
            # Of many requests, one says it.
            self._failing = True
            _log.warning("engine %s: %s; trying again", self.url, reason)
        if self._closed.wait(min(max(pause, reason.after), left)):
            raise ClosedError

    def _once(self, method: str, path: str, content: bytes | None) -> _Answer:
        """One request.

        Raises:
            _AgainError: There is no answer, but there may be one later.
            ConfigError: There is none, and will be none.
            ClosedError: The client was closed.
        """
        try:
            with self._connection() as connection:
                headers = {"Accept": "application/json", "Connection": "close"}
                if content is not None:
                    headers["Content-Type"] = "application/json"
                if self._key:
                    headers["Authorization"] = f"Bearer {self._key}"
                connection.request(method, self._path + path, content, headers)
                # It holds the socket, and closes it by itself only where all of it is read.
                with connection.getresponse() as response:
                    found = response.read(MOST_BYTES + 1)
                    return _Answer(response.status, _seconds_of(response), found[:MOST_BYTES])
        except TimeoutError:
            raise ConfigError(
                f"engine {self.url}: no answer within {self._seconds:g} s; raise engine_seconds, "
                "or lower max_tokens"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if self._closed.is_set():
                raise ClosedError from None
            raise self._missed(f"no answer: {reason_of(error)}") from None

    def _missed(self, reason: str) -> Exception:
        """The error of a request without an answer: a server that was there may come back."""
        if self._reached:
            return _AgainError(reason)
        return ConfigError(f"engine {self.url}: {reason}; start the server, or correct the address")

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        """A connection, which `close` ends.

        Raises:
            _AgainError, ConfigError: The server cannot be reached.
        """
        kind = http.client.HTTPSConnection if self._is_safe else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        with self._lock:
            self._open.add(connection)
        try:
            self._connect(connection)
            if self._closed.is_set():
                raise ClosedError
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except OSError as error:
            raise self._missed(f"cannot be reached: {reason_of(error)}") from None
        assert connection.sock is not None
        connection.sock.settimeout(self._seconds)

    def _refusal(self, answer: _Answer) -> str:
        cures = {401: f"; set {KEY} to its key", 403: f"; set {KEY} to a key that may do this"}
        if 300 <= answer.status < 400:
            return (
                f"engine {self.url}: sends its clients to another address ({answer.status}); give "
                "that one"
            )
        return f"engine {self.url}: {self._said(answer)}{cures.get(answer.status, '')}"

    def _said(self, answer: _Answer) -> str:
        """Status and message of a refusal, without the key."""
        text = _message_of(answer.content)
        if self._key:
            text = text.replace(self._key, "***")
        return f"refuses with {answer.status}{': ' if text else ''}{text}"


def _message_of(content: bytes) -> str:
    """The message of an error, as OpenAI, vLLM or FastAPI write it."""
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        found = {}
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    text = found.get("message") or found.get("detail") if isinstance(found, dict) else ""
    return " ".join(str(text or "").split())[:_SAID]


def _seconds_of(response: http.client.HTTPResponse) -> float:
    """How long the server asks to wait; a date is not read."""
    given = response.getheader("Retry-After", "")
    return min(float(given), 10 * LONGEST_PAUSE) if given.isdecimal() else 0.0
