"""HTTP connections that cannot be held open by sending headers slowly.

uvicorn times out a connection between two requests, but not while a request's headers trickle in. Source: RFC 9112,
section 9.5, on timeouts of connections.
"""

from asyncio import BaseTransport, TimerHandle
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def bounded_protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, which closes a connection whose next request takes longer than this to arrive."""

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
            """The clock runs from the first byte, or the connection, until the headers are complete."""
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
