"""The thread that runs the engine, and its exchange with the event loop, in which neither waits for
the other.

Orders come through a queue and are carried out between two steps, so a cancelled sequence leaves
the batch within one step. The events of a step go to the event loop in one call. The last event of
each sequence is `Ended`, however it ends.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from penstock.learn.generation import Event, LogProbabilities, Sampling
from penstock.media.prompts import PromptImages

_log = logging.getLogger("penstock.serving")


class BatchEngine(Protocol):
    """Interface of an engine for serving, such as `penstock.generation.Engine`; it belongs to one
    thread.
    """

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        choice: int,
        images: PromptImages | None = None,
    ) -> int:
        """Add a sequence, which joins at the next step; returns its number."""

    def cancel(self, sequence: int) -> None:
        """Remove a sequence; nothing happens if it has ended."""

    def score(self, prompt: Sequence[int], most: int) -> Sequence[LogProbabilities]:
        """Log-probabilities of a prompt's tokens but the first, with this number of
        alternatives.
        """

    def step(self) -> Sequence[Event]:
        """Generate a token for each running sequence; a sequence's last event has a
        finish_reason.
        """


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has left the batch."""

    error: BaseException | None = None
    """Cause of an early end: the engine's error, or a ConfigError if its own settings are at
    fault.
    """


@final
class Stopped(Exception):  # noqa: N818
    """The engine's thread has ended."""


Listener = Callable[[Event | Ended], None]
"""Called in the event loop."""


@final
class Ticket:
    """A submitted sequence."""

    __slots__ = ("listener", "sequence")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.sequence: int | None = None


@final
class EngineThread:
    """Runs an engine; call `submit` and `cancel` from the event loop in which it was started."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[int, Ticket] = {}
        self._open = True
        self._scores: set[asyncio.Future[Sequence[LogProbabilities]]] = set()
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Number of sequences in the batch."""
        return len(self._running)

    def start(self) -> None:
        """Start the thread, for the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        choice: int,
        listener: Listener,
        images: PromptImages | None = None,
    ) -> Ticket:
        """Add a sequence, which joins at the next step."""
        ticket = Ticket(listener)
        self._orders.put(lambda: self._add(ticket, prompt, sampling, choice, images))
        return ticket

    async def score(self, prompt: Sequence[int], most: int) -> Sequence[LogProbabilities]:
        """Log-probabilities of a prompt's tokens, computed between two steps.

        Raises:
            Exception: The engine's error; or the thread ends first.
        """
        found = self._loop.create_future()
        self._scores.add(found)
        found.add_done_callback(self._scores.discard)
        self._orders.put(lambda: self._score(found, prompt, most))
        scores: Sequence[LogProbabilities] = await found
        return scores

    def cancel(self, ticket: Ticket) -> None:
        """Remove a sequence before the next step."""
        self._orders.put(lambda: self._cancel(ticket))

    def cancel_all(self) -> None:
        """Remove all sequences before the next step."""
        self._orders.put(lambda: self._fail(None))

    async def close(self) -> None:
        """Cancel all sequences, and end the thread."""
        self._orders.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while self._open:
            try:
                self._carry_out_orders()
                if self._running:
                    self._step()
            except Exception as error:
                _log.exception("the engine failed; this ends %d sequences", len(self._running))
                self._fail(error)
        self._fail(None)
        self._in_loop(self._stop_scores)

    def _carry_out_orders(self) -> None:
        """Carry out all orders in the queue; if no sequence runs, wait for an order."""
        try:
            order = self._orders.get(block=not self._running)
            while True:
                order()
                order = self._orders.get_nowait()
        except queue.Empty:
            pass

    def _step(self) -> None:
        events: list[tuple[Ticket, Event | Ended]] = []
        for event in self._engine.step():
            ticket = self._running.get(event.sequence)
            if ticket is None:
                continue
            if event.error is None:
                events.append((ticket, event))
            if event.finish_reason is not None or event.error is not None:
                del self._running[event.sequence]
                events.append((ticket, Ended(event.error)))
        self._send(events)

    def _add(
        self,
        ticket: Ticket,
        prompt: Sequence[int],
        sampling: Sampling,
        choice: int,
        images: PromptImages | None,
    ) -> None:
        given = {} if images is None else {"images": images}
        try:
            ticket.sequence = self._engine.submit(prompt, sampling, choice=choice, **given)
        except Exception as error:
            _log.exception("the engine refused a sequence of %d tokens", len(prompt))
            self._send([(ticket, Ended(error))])
            return
        self._running[ticket.sequence] = ticket

    def _score(
        self, found: "asyncio.Future[Sequence[LogProbabilities]]", prompt: Sequence[int], most: int
    ) -> None:
        # The client may have left while this waited.
        if found.done():
            return
        result: Sequence[LogProbabilities] | Exception
        try:
            result = self._engine.score(prompt, most)
        except Exception as error:
            _log.exception("the engine could not score a prompt of %d tokens", len(prompt))
            result = error
        self._in_loop(lambda: _settle(found, result))

    def _stop_scores(self) -> None:
        for found in list(self._scores):
            _settle(found, Stopped())

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.sequence is None or self._running.pop(ticket.sequence, None) is None:
            return
        try:
            self._engine.cancel(ticket.sequence)
        finally:
            self._send([(ticket, Ended())])

    def _stop(self) -> None:
        self._open = False

    def _fail(self, error: BaseException | None) -> None:
        """End all sequences because of an error or because the server stops; the engine stays
        usable.
        """
        tickets = list(self._running.values())
        self._running.clear()
        for ticket in tickets:
            try:
                assert ticket.sequence is not None
                self._engine.cancel(ticket.sequence)
            except Exception:
                _log.exception("a sequence could not be cancelled")
        self._send([(ticket, Ended(error)) for ticket in tickets])

    def _send(self, events: list[tuple[Ticket, Event | Ended]]) -> None:
        if events:
            self._in_loop(lambda: _deliver(events))

    def _in_loop(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            _log.debug("the event loop has ended; an answer is dropped")


def _settle(found: "asyncio.Future[Any]", result: object) -> None:
    if found.done():
        return
    if isinstance(result, Exception):
        found.set_exception(result)
    else:
        found.set_result(result)


def _deliver(events: list[tuple[Ticket, Event | Ended]]) -> None:
    for ticket, event in events:
        ticket.listener(event)
