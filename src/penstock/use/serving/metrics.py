"""The server's metrics, as Prometheus reads them.

Labels come from fixed lists, so the number of lines does not grow with what clients send.
"""

from collections.abc import Callable, Iterator
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histograms' buckets."""


@final
class Metrics:
    """All counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_requests",
            "Requests by path and code; 499: the client left.",
            ("path", "code"),
            registry=self._registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.completion_tokens = self._counter("completion_tokens", "Tokens that were generated.")
        self.dropped_tokens = self._counter(
            "dropped_tokens", "Tokens of whole turns that did not fit the context."
        )
        self.cancelled = self._counter(
            "cancelled", "Requests that were cancelled during generation."
        )
        self.in_flight = self._gauge("requests_in_flight", "Requests that are being answered.")
        self.request_seconds = self._histogram(
            "request_seconds", "From a request to the end of its answer."
        )
        self.first_token_seconds = self._histogram(
            "first_token_seconds", "From a request to its first token."
        )

    def watch(self, name: str, text: str, current: Callable[[], int]) -> None:
        """Add a gauge whose value is asked for when the metrics are read."""
        self._gauge(name, text).set_function(current)

    def text(self) -> bytes:
        """All metrics in the text format 0.0.4."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics without the times at which they were made, which the library adds to each."""
        for metric in self._registry.collect():
            metric.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield metric

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"penstock_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"penstock_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"penstock_{name}", text, buckets=SECONDS, registry=self._registry)
