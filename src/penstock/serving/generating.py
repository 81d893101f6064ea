"""The sequences of one request, from the queue to the last token.

`enter` waits for places, `events` yields what comes, `close` cancels what still runs. Places are given back as
sequences leave the batch, not when a slow client has read their tokens. What waits to be read is bounded by the number
of tokens that were asked for.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import final

from penstock.generation import Event, Sampling
from penstock.serving.admission import Admission
from penstock.serving.worker import Ended, EngineThread, Ticket


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Prompts with a sampling for each reply, choice by choice."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    replies: int
    """To each prompt; told apart by their number."""
    tokens_dropped: int = 0

    @property
    def choices(self) -> int:
        """Replies in all."""
        return len(self.prompts) * self.replies

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, as OpenAI counts."""
        return sum(map(len, self.prompts))


@final
class Cut(Exception):  # noqa: N818
    """The server cancelled a reply: it is stopping, or failed."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__("cut")
        self.error = error


@final
class Generating:
    """One request's sequences."""

    def __init__(self, ask: Ask, engine: EngineThread, admission: Admission) -> None:
        self.ask, self._engine, self._admission = ask, engine, admission
        self._words: asyncio.Queue[tuple[int, Event | Ended]] = asyncio.Queue()
        self._open: dict[int, Ticket] = {}
        self._finished: set[int] = set()

    async def enter(self) -> None:
        """Wait for places, and begin.

        Raises:
            Refusal: There is no place.
        """
        await self._admission.enter(self.ask.choices)
        for index in range(self.ask.choices):
            prompt, choice = self.ask.prompts[index // self.ask.replies], index % self.ask.replies
            self._open[index] = self._engine.submit(prompt, self.ask.sampling, choice, self._listener(index))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, event) as they come, until every choice is finished.

        Raises:
            Cut: A sequence left the batch before it was finished.
        """
        while len(self._finished) < self.ask.choices:
            index, word = await self._words.get()
            if not isinstance(word, Ended):
                if word.finish_reason is not None:
                    self._finished.add(index)
                yield index, word
            elif index not in self._finished:
                raise Cut(word.error)

    def close(self) -> bool:
        """Cancel what still runs; whether anything did."""
        for ticket in self._open.values():
            self._engine.cancel(ticket)
        return bool(self._open)

    def _listener(self, index: int) -> Callable[[Event | Ended], None]:
        def listen(word: Event | Ended) -> None:
            self._words.put_nowait((index, word))
            if isinstance(word, Ended):
                del self._open[index]
                self._admission.leave()

        return listen
