"""From a request's prompts to its answer: whole, or as server-sent events while it is written.

A client that leaves is noticed in every phase, and what was generated for it is cancelled. A stream that the server
must cut ends with an event that holds an error and without `[DONE]`, so no client takes it for complete.

Source: server-sent events as in the HTML standard, section 9.2; OpenAI ends a stream with `data: [DONE]`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar, final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.generation import Event
from penstock.serving.answers import Choice, Writer, usage
from penstock.serving.generating import Cut, Generating
from penstock.serving.json_bytes import json_bytes
from penstock.serving.logprobs import Json, TokenTexts
from penstock.serving.metrics import Metrics
from penstock.serving.refusals import ClientLeft, JsonResponse, Refusal, internal_error

Result = TypeVar("Result")


@final
class Answering:
    """One request's answer while it is made."""

    def __init__(self, generating: Generating, writer: Writer, names: TokenTexts, metrics: Metrics) -> None:
        self._generating, self._writer, self._names, self._metrics = generating, writer, names, metrics
        self._choices = [Choice() for _ in range(generating.ask.choices)]
        self._begun = time.perf_counter()

    async def whole(self, request: Request) -> Response:
        """The answer when all is generated.

        Raises:
            Refusal, ClientLeft.
        """
        try:
            return await unless_left(request, self._whole())
        finally:
            self.close()

    def stream(self, *, include_usage: bool) -> Response:
        """The answer as it is generated."""
        return _EventStream(self, self._events(include_usage))

    def close(self) -> None:
        """Cancel what still runs, and count."""
        if self._generating.close():
            self._metrics.cancelled += 1

    async def _whole(self) -> Response:
        try:
            async for _ in self._taken():
                pass
        except Cut as cut:
            raise refusal_of(cut) from None
        return JsonResponse(self._writer.whole(self._choices, self._usage()))

    async def _events(self, include_usage: bool) -> AsyncIterator[bytes]:
        for index in range(len(self._choices)):
            opening = self._writer.opening(index)
            if opening is not None:
                yield _event(opening)
        try:
            async for index, event, logprobs in self._taken():
                if event.text or event.finish_reason or logprobs:
                    yield _event(self._writer.chunk(index, event, logprobs))
        except Cut as cut:
            yield _event(refusal_of(cut).body)
            return
        if include_usage:
            yield _event(self._writer.closing(self._usage()))
        yield b"data: [DONE]\n\n"

    async def _taken(self) -> AsyncIterator[tuple[int, Event, Json | None]]:
        """Every event: choice, event and log-probabilities; counted, and kept for the usage."""
        self._metrics.prompt_tokens += self._generating.ask.prompt_tokens
        self._metrics.dropped_tokens += self._generating.ask.tokens_dropped
        first = True
        async for index, event in self._generating.events():
            if first:
                self._metrics.first_token_seconds.observe(time.perf_counter() - self._begun)
                first = False
            self._metrics.completion_tokens += 1
            logprobs = self._names.tell(event)
            self._choices[index].take(event, logprobs)
            yield index, event, logprobs

    def _usage(self) -> dict[str, Any]:
        return usage(self._generating.ask.prompt_tokens, self._choices)


@final
class _EventStream(StreamingResponse):
    """A stream that cancels what it streams however it ends, even if it never began."""

    def __init__(self, answering: Answering, events: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answering.close()


async def unless_left(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work, which is cancelled when the client leaves.

    The body must have been read.

    Raises:
        ClientLeft: It has.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def refusal_of(cut: Cut) -> Refusal:
    """What the client is told of a reply that the server cut."""
    if cut.error is not None:
        return internal_error()
    return Refusal(503, "the server is stopping; the reply was cut", code="stopping", retry_after=10, close=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"
