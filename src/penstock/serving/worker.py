"""The one thread that runs the engine, and how tokens get from there to the event loop without either waiting.

Orders go in by a queue and are carried out between two steps, so a sequence that is cancelled leaves the batch within
one. What a step brought goes out in one call to the event loop. Each sequence's last word is `Ended`, however it ends.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from penstock.generation import Event, Sampling
from penstock.serving.door import BatchEngine

_log = logging.getLogger("penstock.serving")


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has left the batch."""

    error: BaseException | None = None
    """Why, where it was a fault of ours."""


Listener = Callable[[Event | Ended], None]
"""Called in the event loop."""


@final
class Ticket:
    """A sequence that was ordered."""

    __slots__ = ("listener", "sequence")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.sequence: int | None = None


@final
class EngineThread:
    """Runs an engine; `submit` and `cancel` are for the event loop in which it was started."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[int, Ticket] = {}
        self._open = True
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    def start(self) -> None:
        """Begin, for the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, prompt: Sequence[int], sampling: Sampling, choice: int, listener: Listener) -> Ticket:
        """Let a sequence join at the next step."""
        ticket = Ticket(listener)
        self._orders.put(lambda: self._add(ticket, prompt, sampling, choice))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Let it leave before the next step."""
        self._orders.put(lambda: self._cancel(ticket))

    def cancel_all(self) -> None:
        """Let all leave before the next step."""
        self._orders.put(lambda: self._fail(None))

    async def close(self) -> None:
        """Cancel all, and end the thread."""
        self._orders.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while self._open:
            try:
                self._obey()
                if self._running:
                    self._step()
            except Exception as error:
                _log.exception("the engine failed; %d sequences end by it", len(self._running))
                self._fail(error)
        self._fail(None)

    def _obey(self) -> None:
        """Carry out the orders that are there; without a sequence, wait for one."""
        try:
            order = self._orders.get(block=not self._running)
            while True:
                order()
                order = self._orders.get_nowait()
        except queue.Empty:
            pass

    def _step(self) -> None:
        told: list[tuple[Ticket, Event | Ended]] = []
        for event in self._engine.step():
            ticket = self._running.get(event.sequence)
            if ticket is None:
                continue
            told.append((ticket, event))
            if event.finish_reason is not None:
                del self._running[event.sequence]
                told.append((ticket, Ended()))
        self._tell(told)

    def _add(self, ticket: Ticket, prompt: Sequence[int], sampling: Sampling, choice: int) -> None:
        try:
            ticket.sequence = self._engine.submit(prompt, sampling, choice=choice)
        except Exception as error:
            _log.exception("the engine took no sequence of %d tokens", len(prompt))
            self._tell([(ticket, Ended(error))])
            return
        self._running[ticket.sequence] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.sequence is None or self._running.pop(ticket.sequence, None) is None:
            return
        try:
            self._engine.cancel(ticket.sequence)
        finally:
            self._tell([(ticket, Ended())])

    def _stop(self) -> None:
        self._open = False

    def _fail(self, error: BaseException | None) -> None:
        """End all sequences, by a fault or because the server stops; the engine goes on empty."""
        tickets = list(self._running.values())
        self._running.clear()
        for ticket in tickets:
            try:
                assert ticket.sequence is not None
                self._engine.cancel(ticket.sequence)
            except Exception:
                _log.exception("a sequence could not be cancelled")
        self._tell([(ticket, Ended(error)) for ticket in tickets])

    def _tell(self, told: list[tuple[Ticket, Event | Ended]]) -> None:
        if not told:
            return
        try:
            self._loop.call_soon_threadsafe(_deliver, told)
        except RuntimeError:
            _log.debug("the event loop has ended; nobody hears %d events", len(told))


def _deliver(told: list[tuple[Ticket, Event | Ended]]) -> None:
    for ticket, word in told:
        ticket.listener(word)
