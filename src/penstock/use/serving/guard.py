"""The middleware before all routes: access control, rate limits, security headers, and request
counts.

Without API keys the server is only for this machine, but a browser on it also shows pages of
others. Such a page must not reach the server through a name that points to it (DNS rebinding), so
Host must then be a loopback name. It cannot post to the server's address either, because only
`application/json` is read and no CORS header is sent.

Each client has a token bucket and a maximum number of requests at a time. Clients without recent
requests are forgotten, so memory does not grow with the number of addresses. Source: the bucket is
Turner's leaky bucket as a meter (1986).
"""

import asyncio
import ipaddress
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.use.serving.metrics import Metrics
from penstock.use.serving.refusals import ClientLeft, Refusal
from penstock.use.serving.settings import ServeSettings

_MOST_CLIENTS = 4096
"""With more clients, those with full buckets are forgotten."""
PATHS = (
    "/",
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
)
"""Paths that are counted by name."""
LEFT = 499
"""Code for counting requests of clients that left before the answer."""
_LINGER = 1.0
"""Seconds for reading the rest of a refused body; if the connection were closed at once, the answer
could be lost.
"""
SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}


@final
class Rates:
    """Token buckets and running requests by client; used only by the event loop."""

    def __init__(
        self, settings: ServeSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst = settings.requests_per_second, float(settings.burst)
        self._at_once, self._clock = settings.requests_per_client, clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._running: dict[str, int] = {}

    def take(self, client: str) -> None:
        """Count one request.

        Raises:
            Refusal: 429: the client sends requests too often.
        """
        if not self._rate:
            return
        now = self._clock()
        left, before = self._buckets.get(client, (self._burst, now))
        left = min(self._burst, left + (now - before) * self._rate)
        if left < 1:
            self._buckets[client] = (left, now)
            raise Refusal(
                429,
                f"more than {self._rate:g} requests per second; retry later",
                code="rate_limit_exceeded",
                retry_after=(1 - left) / self._rate,
            )
        self._buckets[client] = (left - 1, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._forget(now)

    @contextmanager
    def one_more(self, client: str) -> Iterator[None]:
        """Count a request while it runs.

        Raises:
            Refusal: 429: the client has too many requests at a time.
        """
        if self._running.get(client, 0) >= self._at_once:
            raise Refusal(
                429,
                f"more than {self._at_once} requests at a time; wait for the earlier ones",
                code="concurrency_limit_exceeded",
                retry_after=1,
            )
        self._running[client] = self._running.get(client, 0) + 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]

    def _forget(self, now: float) -> None:
        """Forget clients with full buckets; of the others, keep at most the more recent half of
        `_MOST_CLIENTS`.
        """
        full = self._burst / self._rate
        kept = {
            client: bucket for client, bucket in self._buckets.items() if now - bucket[1] < full
        }
        self._buckets = dict(
            sorted(kept.items(), key=lambda item: item[1][1])[-_MOST_CLIENTS // 2 :]
        )


@final
class Guard:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._rates = Rates(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, code, body_read = time.perf_counter(), 500, False
        self._metrics.in_flight.inc()

        async def tracked() -> Message:
            nonlocal body_read
            message = await receive()
            body_read = (
                body_read or message["type"] == "http.disconnect" or not message.get("more_body")
            )
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
                await self._app(scope, tracked, counted)
        except Refusal as refusal:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER):
                    while not body_read:
                        await tracked()
            await refusal.response()(scope, tracked, counted)
        except (ClientLeft, ClientDisconnect):
            code = LEFT
        finally:
            self._metrics.in_flight.dec()
            path = scope["path"] if scope["path"] in PATHS else "other"
            self._metrics.requests.labels(path, str(code)).inc()
            self._metrics.request_seconds.observe(time.perf_counter() - begun)

    def _let_in(self, scope: Scope, while_running: ExitStack) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if not self._settings.api_keys and not is_loopback_name(headers.get("host", "")):
            raise Refusal(
                403,
                "Host does not name this machine; use http://127.0.0.1",
                param="host",
                code="host_not_allowed",
            )
        if not path.startswith("/v1/") and path != "/metrics":
            return
        key = self._key(headers.get("authorization", ""))
        address = (scope.get("client") or ("unknown", 0))[0]
        client = f"address {address}" if key is None else f"key {key}"
        self._rates.take(client)
        if self._settings.api_keys and key is None:
            raise Refusal(
                401,
                "no valid API key; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                close=True,
            )
        while_running.enter_context(self._rates.one_more(client))

    def _key(self, authorization: str) -> int | None:
        """Number of the sent API key, or None; the comparison takes constant time."""
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
