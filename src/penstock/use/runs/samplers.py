"""What samples the replies of trajectories: our engine, or a server (`remote_sampler`)."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, final

from penstock.learn.generation import Engine
from penstock.learn.generation.engine import collect
from penstock.learn.generation.settings import Event, Generated, Sampling

Outcome = Generated | BaseException
"""A reply, or why there is none."""


class Sampler(Protocol):
    """Samples replies to prompts of ids; several at the same time."""

    context_length: int
    """Maximum tokens of a prompt and its reply."""

    def submit(self, ids: Sequence[int], sampling: Sampling) -> int:
        """Ask for a reply; returns its number."""

    def done(self) -> list[tuple[int, Outcome]]:
        """Replies that are finished; does a part of the work if it is done here."""

    def pending(self) -> Collection[Future[Any]]:
        """Futures of replies that others compute, to wait for; empty: `done` does the work."""

    def close(self) -> None:
        """End what goes on; nothing is asked for any more."""


@final
class EngineSampler:
    """Our own engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.context_length = engine, engine.context_length
        self._events: dict[int, list[Event]] = {}

    def submit(self, ids: Sequence[int], sampling: Sampling) -> int:
        """See `Sampler`."""
        number = self._engine.submit(ids, sampling)
        self._events[number] = []
        return number

    def done(self) -> list[tuple[int, Outcome]]:
        """See `Sampler`: one step of the engine."""
        finished: list[tuple[int, Outcome]] = []
        if self._events:
            for event in self._engine.step():
                events = self._events[event.sequence]
                events.append(event)
                if event.error is not None or event.finish_reason is not None:
                    del self._events[event.sequence]
                    finished.append((event.sequence, event.error or collect(events)))
        return finished

    def pending(self) -> Collection[Future[Any]]:
        """See `Sampler`: none."""
        return ()

    def close(self) -> None:
        """See `Sampler`."""
        for number in self._events:
            self._engine.cancel(number)
        self._events.clear()
