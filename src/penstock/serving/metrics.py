"""Counters of the server, as Prometheus reads them (text format 0.0.4).

Labels come from fixed lists, so the number of lines does not grow with what clients send.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import final

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper ends of the histograms' buckets."""


@final
class Histogram:
    """Times, by bucket."""

    def __init__(self) -> None:
        self._buckets, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._buckets[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        """Cumulative, as the format wants them."""
        total = 0
        for end, count in zip((*map(str, SECONDS), "+Inf"), self._buckets, strict=True):
            total += count
            yield f'{name}_bucket{{le="{end}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


@final
class Metrics:
    """What is counted; used by the event loop alone."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By (path, code); 499: the client left first."""
        self.prompt_tokens = self.completion_tokens = self.dropped_tokens = self.cancelled = 0
        self.in_flight = 0
        self.request_seconds, self.first_token_seconds = Histogram(), Histogram()
        self.gauges: dict[str, tuple[str, Callable[[], int]]] = {}
        """name → (help, what tells it)."""

    def text(self) -> str:
        """All of it."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests by path and code; 499: the client left.")
        for (path, code), count in sorted(self.requests.items()):
            yield f'penstock_requests_total{{path="{path}",code="{code}"}} {count}'
        for name, help_text, value in (
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("completion_tokens_total", "Tokens that were generated.", self.completion_tokens),
            ("dropped_tokens_total", "Tokens of whole turns that did not fit the window.", self.dropped_tokens),
            ("cancelled_total", "Requests whose replies were cancelled while they ran.", self.cancelled),
        ):
            yield from _head(name, "counter", help_text)
            yield f"penstock_{name} {value}"
        told = {"requests_in_flight": ("Requests that are being answered.", lambda: self.in_flight), **self.gauges}
        for name, (help_text, tell) in told.items():
            yield from _head(name, "gauge", help_text)
            yield f"penstock_{name} {tell()}"
        for name, help_text, histogram in (
            ("request_seconds", "From a request to the end of its answer.", self.request_seconds),
            ("first_token_seconds", "From a request to its first token.", self.first_token_seconds),
        ):
            yield from _head(name, "histogram", help_text)
            yield from histogram.lines(f"penstock_{name}")


def _head(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP penstock_{name} {help_text}"
    yield f"# TYPE penstock_{name} {kind}"
