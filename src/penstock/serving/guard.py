"""What stands before every route: who may come in, security headers, and what is counted.

Without API keys the server is for this machine alone, but a browser on it is a door to the world: pages of others must
not reach the server by a name that they let point to it (DNS rebinding), so Host must then be a loopback name; and as
only `application/json` is read and no CORS header is sent, they cannot post to it by address either.
"""

import asyncio
import ipaddress
import secrets
import time
from contextlib import ExitStack, suppress
from typing import final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serving.metrics import Metrics
from penstock.serving.rates import Rates
from penstock.serving.refusals import ClientLeft, Refusal
from penstock.serving.settings import ServeSettings

PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")
"""Paths that are counted by name."""
LEFT = 499
_LINGER = 1.0
"""Seconds in which the rest of a refused body is read: a connection closed on it would lose the answer on its way."""
SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}


@final
class Guard:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._rates = Rates(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, code, body_read = time.perf_counter(), 500, False
        self._metrics.in_flight += 1

        async def noted() -> Message:
            nonlocal body_read
            message = await receive()
            body_read = body_read or message["type"] == "http.disconnect" or not message.get("more_body")
            return message

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            with ExitStack() as while_running:
                self._let_in(scope, while_running)
                await self._app(scope, noted, counted)
        except Refusal as refusal:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER):
                    while not body_read:
                        await noted()
            await refusal.response()(scope, noted, counted)
        except (ClientLeft, ClientDisconnect):
            code = LEFT
        finally:
            self._metrics.in_flight -= 1
            path = scope["path"] if scope["path"] in PATHS else "other"
            self._metrics.requests[path, code] += 1
            self._metrics.request_seconds.observe(time.perf_counter() - begun)

    def _let_in(self, scope: Scope, while_running: ExitStack) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if not self._settings.api_keys and not is_loopback_name(headers.get("host", "")):
            raise Refusal(
                403, "Host is no name of this machine; use http://127.0.0.1", param="host", code="host_not_allowed"
            )
        if not path.startswith("/v1/") and path != "/metrics":
            return
        key = self._key(headers.get("authorization", ""))
        address = (scope.get("client") or ("unknown", 0))[0]
        client = f"address {address}" if key is None else f"key {key}"
        self._rates.take(client)
        if self._settings.api_keys and key is None:
            raise Refusal(
                401, "no valid API key; send the header Authorization: Bearer KEY", code="invalid_api_key", close=True
            )
        while_running.enter_context(self._rates.one_more(client))

    def _key(self, authorization: str) -> int | None:
        """Number of the API key that was sent; the time tells nothing about the others."""
        kind, _, given = authorization.partition(" ")
        if kind.lower() != "bearer":
            return None
        sent = given.strip().encode("utf-8", "surrogateescape")
        same = [secrets.compare_digest(sent, key.encode()) for key in self._settings.api_keys]
        return same.index(True) if any(same) else None


def is_loopback_name(host: str) -> bool:
    """Whether a Host header names this machine, with or without a port."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
