"""The server: runs the application until it is stopped, and closes connections that send headers
slowly.

On SIGTERM or Ctrl-C, new connections are refused, requests in the queue get a 503, and running
replies are cut after `grace_seconds`. A second Ctrl-C ends the server at once.

uvicorn times out a connection between two requests, but not while a request's headers arrive
slowly; `bounded_protocol` adds that. Source: RFC 9112, section 9.5, on timeouts of connections.
"""

import socket
from asyncio import BaseTransport, TimerHandle
from collections.abc import Callable
from typing import Any, final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.core.errors import ConfigError
from penstock.use.serving.app import Service
from penstock.use.serving.served_model import ServedModel
from penstock.use.serving.settings import ServeSettings

KEEP_ALIVE = 15
"""Seconds that a connection may be idle between requests."""
CONNECTIONS = 1000
HEADERS = 1 << 15
"""Maximum bytes of a request's headers."""


def bounded_protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, but a connection is closed if the headers of a request take longer than
    this to arrive.
    """

    class Bounded(H11Protocol):
        """A connection."""

        _deadline: TimerHandle | None = None

        def connection_made(self, transport: BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Start the clock at the connection or the first byte; stop it when the headers are
            complete.
            """
            if not self._is_between_requests():
                self._forget()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(seconds, self._expire)

        def _is_between_requests(self) -> bool:
            cycle: Any = self.cycle
            return cycle is None or bool(cycle.response_complete)

        def _expire(self) -> None:
            self._deadline = None
            if self._is_between_requests():
                self.transport.close()

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Bounded


@final
class Server(uvicorn.Server):
    """uvicorn's server, extended by our steps at startup and shutdown, for which it has no hooks.

    Attributes:
        service: The service that it runs.
        address: `http://host:port`, with the bound port.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: ServeSettings,
        *,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """Bind the port.

        Args:
            model: The model to serve.
            settings: Address, API keys and limits.
            on_ready: Called with the address as soon as requests are answered.

        Raises:
            ConfigError: The server cannot listen on the address.
        """
        self.service, self._on_ready = Service(model, settings), on_ready
        self._socket = _bind(settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        super().__init__(
            uvicorn.Config(
                self.service.app,
                http=bounded_protocol(settings.body_seconds),
                ws="none",
                loop="asyncio",
                lifespan="on",
                access_log=False,
                log_level="warning",
                server_header=False,
                # A client could claim any address in such headers.
                proxy_headers=False,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=round(settings.grace_seconds) + 5,
                h11_max_incomplete_event_size=HEADERS,
            )
        )

    def serve_until_stopped(self) -> None:
        """Run until the server has shut down."""
        try:
            self.run([self._socket])
        finally:
            self._socket.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer requests."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop answering requests."""
        self.service.drain()
        await super().shutdown(sockets)


def _bind(settings: ServeSettings) -> socket.socket:
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(
            f"serve.host: {where} is not a valid address ({error.strerror}); give an address "
            "of this machine"
        ) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}; set another port or host"
        ) from None
    return bound
