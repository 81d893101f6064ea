"""The queue before the batch: places for sequences, given in the order of arrival.

A request takes a place for each of its sequences, all at once, and gives them back one by one as sequences end. What
finds no place waits, up to a number of requests and a time; beyond them the client is told to come back.
"""

import asyncio
from collections import deque
from typing import final

from penstock.serving.refusals import Refusal
from penstock.serving.settings import ServeSettings


@final
class Admission:
    """Places in the batch; used by the event loop alone."""

    def __init__(self, settings: ServeSettings) -> None:
        self._free, self._limit, self._seconds = settings.sequences, settings.waiting, settings.waiting_seconds
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._line)

    @property
    def closed(self) -> bool:
        """Whether the server is stopping."""
        return self._closed

    def check(self) -> None:
        """Refuse at once what `enter` would refuse.

        Raises:
            Refusal: As `enter`.
        """
        if self._closed:
            raise _stopping()
        if len(self._line) >= self._limit and (self._line or not self._free):
            raise _busy(f"{self._limit} requests wait already", self._seconds / 4)

    async def enter(self, places: int) -> None:
        """Wait for places; `leave` gives them back.

        Raises:
            Refusal: 429, the queue is full or was too slow; 503, the server is stopping.
        """
        self.check()
        if not self._line and places <= self._free:
            self._free -= places
            return
        if len(self._line) >= self._limit:
            raise _busy(f"{self._limit} requests wait already", self._seconds / 4)
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
        """Give places back."""
        self._free += places
        self._serve()

    def close(self) -> None:
        """Refuse all who come and all who wait."""
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
        """Who leaves the queue may just have been given its places."""
        if turn in self._line:
            self._line.remove(turn)
        elif turn[1].done() and not turn[1].cancelled() and turn[1].exception() is None:
            self._free += turn[0]
        self._serve()


def _busy(why: str, seconds: float) -> Refusal:
    return Refusal(429, f"the server is busy: {why}; come back later", code="queue_full", retry_after=min(seconds, 10))


def _stopping() -> Refusal:
    return Refusal(
        503, "the server is stopping; come back when it runs again", code="stopping", retry_after=10, close=True
    )
