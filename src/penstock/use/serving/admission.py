"""Admission: the queue before the batch, and the sequences of one request up to their last token.

Places in the batch are given in the order of arrival. A request takes a place for each of its
sequences, all at once, and releases them one by one as sequences end. A request without places
waits; if too many requests wait, or one waits too long, the client gets a 429 and may retry later.

A place is released when its sequence leaves the batch, not when a slow client has read the tokens.
Unread tokens are bounded by the number of tokens requested.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import final

from penstock.learn.generation import Event, LogProbabilities, Sampling
from penstock.learn.generation.grammar import Compiled
from penstock.media.prompts import PromptImages
from penstock.use.serving.refusals import Refusal
from penstock.use.serving.settings import ServeSettings
from penstock.use.serving.worker import Ended, EngineThread, Stopped, Ticket


@final
class Admission:
    """Places in the batch; used only by the event loop."""

    def __init__(self, settings: ServeSettings) -> None:
        self._free, self._limit, self._seconds = (
            settings.sequences,
            settings.waiting,
            settings.waiting_seconds,
        )
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._line)

    @property
    def closed(self) -> bool:
        """Whether the server is stopping."""
        return self._closed

    def check(self) -> None:
        """Refuse a request early if `enter` would refuse it.

        Raises:
            Refusal: See `enter`.
        """
        if self._closed:
            raise _stopping()
        if len(self._line) >= self._limit and (self._line or not self._free):
            raise self._full()

    async def enter(self, places: int) -> None:
        """Wait for places; `leave` releases them.

        Raises:
            Refusal: 429: the queue is full or too slow; 503: the server is stopping.
        """
        self.check()
        if not self._line and places <= self._free:
            self._free -= places
            return
        if len(self._line) >= self._limit:
            raise self._full()
        turn = (places, asyncio.get_running_loop().create_future())
        self._line.append(turn)
        try:
            async with asyncio.timeout(self._seconds):
                await turn[1]
        except BaseException as error:
            self._give_up(turn)
            if isinstance(error, TimeoutError):
                raise _busy(f"no place within {self._seconds:g} s", self._seconds / 4) from None
            raise

    def leave(self, places: int = 1) -> None:
        """Release places."""
        self._free += places
        self._serve()

    def close(self) -> None:
        """Refuse all new and all waiting requests."""
        self._closed = True
        while self._line:
            _, turn = self._line.popleft()
            if not turn.done():
                turn.set_exception(_stopping())

    def _serve(self) -> None:
        while self._line and (self._line[0][0] <= self._free or self._line[0][1].done()):
            places, turn = self._line.popleft()
            if not turn.done():
                self._free -= places
                turn.set_result(None)

    def _give_up(self, turn: tuple[int, "asyncio.Future[None]"]) -> None:
        """Leave the queue; a request that has just got its places releases them."""
        if turn in self._line:
            self._line.remove(turn)
        elif turn[1].done() and not turn[1].cancelled() and turn[1].exception() is None:
            self._free += turn[0]
        self._serve()

    def _full(self) -> Refusal:
        return _busy(f"{self._limit} requests are already waiting", self._seconds / 4)


def _busy(why: str, seconds: float) -> Refusal:
    return Refusal(
        429,
        f"the server is busy: {why}; retry later",
        code="queue_full",
        retry_after=min(seconds, 10),
    )


def _stopping() -> Refusal:
    return Refusal(
        503,
        "the server is stopping; retry when it runs again",
        code="stopping",
        retry_after=10,
        close=True,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Work of one request for the engine."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    replies: int
    """Number of replies to each prompt."""
    tokens_dropped: int = 0
    images: PromptImages | None = None
    """Of the only prompt; None: there are none."""
    scored: int | None = None
    """Number of alternatives for the log-probabilities of the prompts' own tokens; None: they are
    not asked for.
    """
    is_seeded: bool = True
    """Whether the client gave the seed: then equal prompts get equal replies."""
    writes: bool = True
    """False: only the prompts' own tokens are asked for."""
    schema: Compiled | None = None
    """Of the sampling; held, so that the engine does not compile it again."""

    @property
    def choices(self) -> int:
        """Number of all replies."""
        return len(self.prompts) * self.replies

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; each counts once, as in OpenAI's API."""
        return sum(map(len, self.prompts))


@final
class Cut(Exception):  # noqa: N818
    """The server cancelled a reply because it is stopping or has failed."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__("cut")
        self.error = error


@final
class Generating:
    """The sequences of one request."""

    def __init__(self, ask: Ask, engine: EngineThread, admission: Admission) -> None:
        self.ask, self._engine, self._admission = ask, engine, admission
        self._received: asyncio.Queue[tuple[int, Event | Ended]] = asyncio.Queue()
        self._open: dict[int, Ticket] = {}
        self._finished: set[int] = set()
        self.scores: list[Sequence[LogProbabilities]] = []
        """Of each prompt, if they were asked for."""

    async def enter(self) -> None:
        """Wait for places, then submit the sequences.

        Raises:
            Refusal: There is no place.
        """
        await self._admission.enter(self.ask.choices)
        unused = self.ask.choices
        try:
            if self.ask.scored is not None:
                self.scores = [
                    await self._engine.score(prompt, self.ask.scored) for prompt in self.ask.prompts
                ]
            if self.ask.writes:
                self._submit()
                unused = 0
        except Stopped:
            raise _stopping() from None
        finally:
            # Sequences that were submitted release their places themselves.
            if unused:
                self._admission.leave(unused)

    def _submit(self) -> None:
        for index in range(self.ask.choices):
            prompt, reply = divmod(index, self.ask.replies)
            choice = reply if self.ask.is_seeded else index
            self._open[index] = self._engine.submit(
                self.ask.prompts[prompt],
                self.ask.sampling,
                choice,
                self._listener(index),
                self.ask.images,
            )

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, event) as they come, until every choice is finished.

        Raises:
            Cut: A sequence left the batch before it was finished.
        """
        while self.ask.writes and len(self._finished) < self.ask.choices:
            index, event = await self._received.get()
            if not isinstance(event, Ended):
                if event.finish_reason is not None:
                    self._finished.add(index)
                yield index, event
            elif index not in self._finished:
                raise Cut(event.error)

    def close(self) -> bool:
        """Cancel running sequences; returns whether there were any."""
        for ticket in self._open.values():
            self._engine.cancel(ticket)
        return bool(self._open)

    def _listener(self, index: int) -> Callable[[Event | Ended], None]:
        def listen(event: Event | Ended) -> None:
            self._received.put_nowait((index, event))
            if isinstance(event, Ended):
                del self._open[index]
                self._admission.leave()

        return listen
