"""Answers in OpenAI's format: whole, or as server-sent events while they are generated.

`tokens_dropped`, in answers to chats and in the first chunk of their streams, is our addition: the
number of tokens of whole turns that did not fit the context. A client that leaves is noticed at any
time, and its sequences are cancelled. If the server must cut a stream, it ends with an error event
and without `[DONE]`, so no client takes it as complete.

Sources: OpenAI's API reference, objects `text_completion`, `chat.completion`,
`chat.completion.chunk`; a stream ends with `data: [DONE]`. Server-sent events: the HTML standard,
section 9.2.
"""

import asyncio
import secrets
import string
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.chat.calls import Call, Family, Splitter, Tools
from penstock.core.errors import ConfigError
from penstock.learn.generation import Event
from penstock.use.serving.admission import Cut, Generating
from penstock.use.serving.metrics import Metrics
from penstock.use.serving.refusals import (
    ClientLeft,
    JsonResponse,
    Refusal,
    bad_request,
    internal_error,
    json_bytes,
)
from penstock.use.serving.token_texts import Json, Offsets, TokenTexts, as_chat, as_completion

_LETTERS = string.ascii_letters + string.digits
Result = TypeVar("Result")


@final
@dataclass(slots=True)
class Choice:
    """One reply so far."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Json] = field(default_factory=list)

    def take(self, event: Event, logprobs: Json | None) -> None:
        """Add an event."""
        self.texts.append(event.text)
        self.ids.append(event.token)
        self.finish_reason = event.finish_reason
        if logprobs is not None:
            self.logprobs.append(logprobs)


class Writer(Protocol):
    """Formats one answer."""

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """The whole answer."""

    sends_all: bool
    """Whether events without new text are sent, too, such as for their ids."""

    def opening(self, index: int) -> list[Json]:
        """The chunks before the first token of a choice."""

    def chunk(self, index: int, event: Event, logprobs: Json | None) -> list[Json]:
        """The chunks of one event."""

    def closing(self, usage: Json) -> list[Json]:
        """The chunks after all choices, with the usage."""

    def error(self, refusal: Refusal) -> Json:
        """The chunk that ends a stream early."""

    def framed(self, chunk: Json) -> bytes:
        """A chunk as a server-sent event."""

    end: bytes
    """Bytes after the last chunk."""


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> Json:
    """The numbers of tokens read and generated."""
    completion = sum(len(choice.ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


class Chunks:
    """How chats and completions are streamed."""

    end = b"data: [DONE]\n\n"

    def error(self, refusal: Refusal) -> Json:
        """The error as it would be a whole answer."""
        return dict(refusal.body)

    def framed(self, chunk: Json) -> bytes:
        """An event without a name."""
        return b"data: " + json_bytes(chunk) + b"\n\n"


@final
class ChatWriter(Chunks):
    """Answers of `/v1/chat/completions`."""

    def __init__(
        self,
        model: str,
        tokens_dropped: int,
        family: Family | None = None,
        tools: Tools = (),
        most_calls: int | None = None,
        prompt: Sequence[int] | None = None,
    ) -> None:
        """Args: `family`: how the model writes calls of `tools`; None: nothing is taken for a call;
        `prompt`: its ids, if ids are given back.
        """
        self._prompt, self.sends_all = prompt, prompt is not None
        self._dropped, self._new_splitter = (
            tokens_dropped,
            lambda: Splitter(family, tools, most_calls),
        )
        self._splitters: defaultdict[int, Splitter] = defaultdict(self._new_splitter)
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """A `chat.completion`."""
        written = []
        for index, choice in enumerate(choices):
            splitter = self._new_splitter()
            content = "".join(map(splitter.push, choice.texts))
            rest, calls = splitter.finish()
            message: Json = {"role": "assistant", "content": content + rest, "refusal": None}
            if calls:
                message |= {
                    "content": message["content"] or None,
                    "tool_calls": [as_tool_call(one) for one in calls],
                }
            logprobs, reason = _of_chat(choice.logprobs), _reason(choice.finish_reason, calls)
            ids = {} if self._prompt is None else {"token_ids": choice.ids}
            written.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": reason,
                    **ids,
                }
            )
        head = {**self._head, "object": "chat.completion"}
        return {
            **head,
            "choices": written,
            "usage": usage,
            "tokens_dropped": self._dropped,
            **self._prompt_ids(),
        }

    def opening(self, index: int) -> list[Json]:
        """The chunk with the role, and `tokens_dropped`."""
        opened = self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        return [{**opened, "tokens_dropped": self._dropped, **self._prompt_ids()}]

    def chunk(self, index: int, event: Event, logprobs: Json | None) -> list[Json]:
        """A `chat.completion.chunk`."""
        splitter = self._splitters[index]
        text = splitter.push(event.text)
        calls: list[Call] = []
        if event.finish_reason is not None:
            rest, calls = splitter.finish()
            text += rest
        delta: Json = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [
                {"index": place, **as_tool_call(one)} for place, one in enumerate(calls)
            ]
        reason = _reason(event.finish_reason, calls)
        ids = [event.token] if self.sends_all else None
        return [self._chunk(index, delta, None if logprobs is None else [logprobs], reason, ids)]

    def closing(self, usage: Json) -> list[Json]:
        """The chunk with the usage and without choices."""
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}]

    def _prompt_ids(self) -> Json:
        return {} if self._prompt is None else {"prompt_token_ids": list(self._prompt)}

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: list[Json] | None,
        reason: str | None,
        ids: list[int] | None = None,
    ) -> Json:
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": _of_chat(logprobs),
            "finish_reason": reason,
        }
        if ids is not None:
            choice["token_ids"] = ids
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


@final
class CompletionWriter(Chunks):
    """Answers of `/v1/completions`."""

    def __init__(
        self,
        model: str,
        echo: Sequence[str] = (),
        replies: int = 1,
        writes: bool = True,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Args: `echo`: the text of each prompt, if it comes before its replies; `replies`: to each
        prompt; `writes`: whether anything follows the prompts; `prompts`: ids of each, if ids are
        given back.
        """
        self._prompts, self.sends_all = prompts, prompts is not None
        self.echo, self._replies, self._writes = echo, replies, writes
        self._scored: list[list[Json]] = []
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, Offsets] = {}
        self._lengths: dict[int, int] = {}
        """Characters of each choice so far."""

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """A `text_completion`."""
        written = []
        for index, choice in enumerate(choices):
            before = self._prompt(index)
            reply = self._choice(
                index, "".join(choice.texts), choice.logprobs, choice.finish_reason or "length"
            )
            text, logprobs = (
                before["text"] + reply["text"],
                _joined(before["logprobs"], reply["logprobs"]),
            )
            if logprobs is not None:
                # What a stop string cut off is not in the text.
                logprobs["text_offset"] = [
                    min(place, len(text)) for place in logprobs["text_offset"]
                ]
            ids = {**self._ids(choice.ids), **self._prompt_ids(index)}
            written.append({**reply, "text": text, "logprobs": logprobs, **ids})
        return {**self._head, "choices": written, "usage": usage}

    def opening(self, index: int) -> list[Json]:
        """The chunk with the prompt, if it is given back, or its ids are."""
        if not self.echo and self._prompts is None:
            return []
        opened = {**self._prompt(index), "finish_reason": None if self._writes else "length"}
        self._lengths[index] = len(opened["text"])
        return [{**self._head, "choices": [{**opened, **self._ids([]), **self._prompt_ids(index)}]}]

    def scored(self, prompts: Sequence[list[Json]]) -> None:
        """Take the log-probabilities of the prompts' tokens."""
        self._scored = list(prompts)

    def _prompt(self, index: int) -> Json:
        """The prompt that comes before a choice, with log-probabilities of its tokens; empty
        without echo.
        """
        number = index // self._replies
        text, tokens = (
            self.echo[number] if self.echo else "",
            self._scored[number] if self._scored else [],
        )
        found = self._choice(index, text, tokens, None)
        self._offsets[index] = Offsets(len(text))
        return found

    def chunk(self, index: int, event: Event, logprobs: Json | None) -> list[Json]:
        """A `text_completion` with a piece of the text."""
        tokens = [] if logprobs is None else [logprobs]
        choice = self._choice(index, event.text, tokens, event.finish_reason)
        self._lengths[index] = self._lengths.get(index, 0) + len(event.text)
        if event.finish_reason is not None and choice["logprobs"] is not None:
            # What a stop string cut off is not in the text.
            offsets, most = choice["logprobs"]["text_offset"], self._lengths[index]
            choice["logprobs"]["text_offset"] = [min(place, most) for place in offsets]
        return [{**self._head, "choices": [{**choice, **self._ids([event.token])}]}]

    def closing(self, usage: Json) -> list[Json]:
        """The chunk with the usage and without choices."""
        return [{**self._head, "choices": [], "usage": usage}]

    def _ids(self, ids: Sequence[int]) -> Json:
        return {} if self._prompts is None else {"token_ids": list(ids)}

    def _prompt_ids(self, index: int) -> Json:
        return (
            {}
            if self._prompts is None
            else {"prompt_token_ids": list(self._prompts[index // self._replies])}
        )

    def _choice(self, index: int, text: str, tokens: Sequence[Json], reason: str | None) -> Json:
        offsets = self._offsets.setdefault(index, Offsets())
        logprobs = as_completion(tokens, offsets) if tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _joined(before: Json | None, after: Json | None) -> Json | None:
    """The log-probabilities of a prompt and of its reply."""
    if before is None or after is None:
        return before or after
    return {name: [*values, *after[name]] for name, values in before.items()}


def as_tool_call(call: Call) -> Json:
    """A call in the format of chats, with an id of its own."""
    # Nine letters and digits, which templates of Mistral insist on.
    made = "".join(secrets.choice(_LETTERS) for _ in range(9))
    return {
        "id": made,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _reason(reason: str | None, calls: Sequence[Call]) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason


def _of_chat(tokens: Sequence[Json] | None) -> dict[str, object] | None:
    return {"content": as_chat(tokens), "refusal": None} if tokens else None


@final
class Answering:
    """The answer to one request while it is generated."""

    def __init__(
        self, generating: Generating, writer: Writer, names: TokenTexts, metrics: Metrics
    ) -> None:
        self._generating, self._writer, self._names, self._metrics = (
            generating,
            writer,
            names,
            metrics,
        )
        self._choices = [Choice() for _ in range(generating.ask.choices)]
        self._begun = time.perf_counter()

    async def whole(self, request: Request) -> Response:
        """The answer after everything is generated.

        Raises:
            Refusal: The server cut a reply.
            ClientLeft: The client closed its connection.
        """
        try:
            return await unless_left(request, self._whole())
        finally:
            self.close()

    def stream(self, *, include_usage: bool) -> Response:
        """The answer as a stream of events."""
        return _EventStream(self, self._events(include_usage))

    def close(self) -> None:
        """Cancel running sequences, and count the request as cancelled if there were any."""
        if self._generating.close():
            self._metrics.cancelled.inc()

    async def _whole(self) -> Response:
        try:
            async for _ in self._taken():
                pass
        except Cut as cut:
            raise refusal_of(cut) from None
        self._take_scores()
        return JsonResponse(self._writer.whole(self._choices, self._usage()))

    async def _events(self, include_usage: bool) -> AsyncIterator[bytes]:
        self._take_scores()
        for index in range(len(self._choices)):
            for chunk in self._writer.opening(index):
                yield self._writer.framed(chunk)
        try:
            async for index, event, logprobs in self._taken():
                if event.text or event.finish_reason or logprobs or self._writer.sends_all:
                    for chunk in self._writer.chunk(index, event, logprobs):
                        yield self._writer.framed(chunk)
        except Cut as cut:
            yield self._writer.framed(self._writer.error(refusal_of(cut)))
            return
        if include_usage:
            for chunk in self._writer.closing(self._usage()):
                yield self._writer.framed(chunk)
        yield self._writer.end

    async def _taken(self) -> AsyncIterator[tuple[int, Event, Json | None]]:
        """All events as (choice, event, log-probabilities); counted, and added to their choices."""
        self._metrics.prompt_tokens.inc(self._generating.ask.prompt_tokens)
        self._metrics.dropped_tokens.inc(self._generating.ask.tokens_dropped)
        first = True
        async for index, event in self._generating.events():
            if first:
                self._metrics.first_token_seconds.observe(time.perf_counter() - self._begun)
                first = False
            self._metrics.completion_tokens.inc()
            logprobs = self._names.logprobs_of(event)
            self._choices[index].take(event, logprobs)
            yield index, event, logprobs

    def _take_scores(self) -> None:
        if isinstance(self._writer, CompletionWriter):
            asked = zip(
                self._generating.ask.prompts,
                self._generating.scores,
                self._writer.echo,
                strict=False,
            )
            self._writer.scored([self._names.of_prompt(*each) for each in asked])

    def _usage(self) -> dict[str, object]:
        return usage(self._generating.ask.prompt_tokens, self._choices)


@final
class _EventStream(StreamingResponse):
    """A stream that cancels its sequences however it ends, even if it never began."""

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
    """Await work, and cancel it if the client leaves. The request's body must have been read.

    Raises:
        ClientLeft: The client left.
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
    """The answer for a reply that the server cut."""
    if isinstance(cut.error, ConfigError):
        return bad_request(str(cut.error), None)
    if cut.error is not None:
        return internal_error()
    return Refusal(
        503, "the server is stopping and cut the reply", code="stopping", retry_after=10, close=True
    )


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
