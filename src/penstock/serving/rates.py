"""How often one client may ask, and how many requests it may have at a time: a token bucket for each.

Source: the bucket is Turner's leaky bucket as a meter (1986). Clients that came long ago are forgotten, so memory does
not grow with the number of addresses that ever asked.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from penstock.serving.refusals import Refusal
from penstock.serving.settings import ServeSettings

_KEPT = 4096
"""Clients that are remembered before those whose buckets are full again are looked for."""


@final
class Rates:
    """Buckets and counts by client; used by the event loop alone."""

    def __init__(self, settings: ServeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst = settings.requests_per_second, float(settings.burst)
        self._at_once, self._clock = settings.requests_per_client, clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._running: dict[str, int] = {}

    def take(self, client: str) -> None:
        """Count one request.

        Raises:
            Refusal: 429; the client asks too often.
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
                f"more than {self._rate:g} requests per second; come back later",
                code="rate_limit_exceeded",
                retry_after=(1 - left) / self._rate,
            )
        self._buckets[client] = (left - 1, now)
        if len(self._buckets) > _KEPT:
            self._forget(now)

    @contextmanager
    def one_more(self, client: str) -> Iterator[None]:
        """Count a request while it runs.

        Raises:
            Refusal: 429; the client has too many at a time.
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
        """Forget clients whose buckets are full again; where all are in use, the oldest half."""
        full = self._burst / self._rate
        kept = {client: bucket for client, bucket in self._buckets.items() if now - bucket[1] < full}
        self._buckets = dict(sorted(kept.items(), key=lambda item: item[1][1])[-_KEPT // 2 :])
