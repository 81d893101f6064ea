"""Runs the application until it is told to stop.

SIGTERM or Ctrl-C: no new connections, requests in the queue are refused with 503, running replies have
`grace_seconds` to end and are then cut; a second Ctrl-C ends at once.
"""

import socket
from collections.abc import Callable
from typing import final

import uvicorn

from penstock.errors import ConfigError
from penstock.serving.app import Service
from penstock.serving.connections import bounded_protocol
from penstock.serving.served_model import ServedModel
from penstock.serving.settings import ServeSettings

KEEP_ALIVE = 15
"""Seconds that a connection may be idle between requests."""
CONNECTIONS = 1000
HEADERS = 1 << 15
"""Bytes of a request's headers, at most."""


@final
class Server(uvicorn.Server):
    """uvicorn's server, whose shutdown begins with ours: it offers no hook for that.

    Attributes:
        service: What is served.
        address: `http://host:port`, once it is bound.
    """

    def __init__(
        self, model: ServedModel, settings: ServeSettings, *, on_ready: Callable[[str], None] | None = None
    ) -> None:
        """Bind the port.

        Args:
            model: What to serve.
            settings: Where, to whom, and how much.
            on_ready: Called with the address once requests are answered.

        Raises:
            ConfigError: The address cannot be listened on.
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
                # Whoever connects would say who they are.
                proxy_headers=False,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=round(settings.grace_seconds) + 5,
                h11_max_incomplete_event_size=HEADERS,
            )
        )

    def serve_until_stopped(self) -> None:
        """Run; returns when all is shut down."""
        try:
            self.run([self._socket])
        finally:
            self._socket.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to answer."""
        self.service.drain()
        await super().shutdown(sockets)


def _bind(settings: ServeSettings) -> socket.socket:
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"serve.host: {where} is no address ({error.strerror}); give one of this machine") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"{where} cannot be listened on: {error.strerror}; take another --port or --host") from None
    return bound
