"""Answers as OpenAI's clients read them: whole ones, and the chunks of a stream.

Source: the API reference of OpenAI, objects `text_completion`, `chat.completion`, `chat.completion.chunk`.
`tokens_dropped`, in answers to chats and in the first chunk of their streams, is ours: tokens of whole turns that did
not fit the window.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from penstock.generation import Event
from penstock.serving.logprobs import Json, as_completion


@final
@dataclass(slots=True)
class Choice:
    """What was said so far in one reply."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[Json] = field(default_factory=list)

    def take(self, event: Event, logprobs: Json | None) -> None:
        """One event more."""
        self.texts.append(event.text)
        self.tokens += 1
        self.finish_reason = event.finish_reason
        if logprobs is not None:
            self.logprobs.append(logprobs)


class Writer(Protocol):
    """Writes one answer."""

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """All at once."""
        ...

    def opening(self, index: int) -> Json | None:
        """The chunk before the first token of a choice, where there is one."""
        ...

    def chunk(self, index: int, event: Event, logprobs: Json | None) -> Json:
        """One event."""
        ...

    def closing(self, usage: Json) -> Json:
        """The chunk that tells the usage."""
        ...


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> Json:
    """What was read and written, in tokens."""
    completion = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


@final
class ChatWriter:
    """Answers of `/v1/chat/completions`."""

    def __init__(self, model: str, tokens_dropped: int) -> None:
        self._dropped = tokens_dropped
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """A `chat.completion`."""
        written = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": _of_chat(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": written, "usage": usage, "tokens_dropped": self._dropped}

    def opening(self, index: int) -> Json:
        """Whose turn it is."""
        opened = self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        return {**opened, "tokens_dropped": self._dropped}

    def chunk(self, index: int, event: Event, logprobs: Json | None) -> Json:
        """A `chat.completion.chunk`."""
        delta = {"content": event.text} if event.text else {}
        return self._chunk(index, delta, None if logprobs is None else [logprobs], event.finish_reason)

    def closing(self, usage: Json) -> Json:
        """No choice, but the usage."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _chunk(self, index: int, delta: Json, logprobs: list[Json] | None, reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": _of_chat(logprobs), "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


@final
class CompletionWriter:
    """Answers of `/v1/completions`."""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """A `text_completion`."""
        written = [
            self._choice(index, "".join(choice.texts), choice.logprobs, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": written, "usage": usage}

    def opening(self, index: int) -> None:
        """Completions have none."""

    def chunk(self, index: int, event: Event, logprobs: Json | None) -> Json:
        """The same object with a piece of the text."""
        tokens = [] if logprobs is None else [logprobs]
        return {**self._head, "choices": [self._choice(index, event.text, tokens, event.finish_reason)]}

    def closing(self, usage: Json) -> Json:
        """No choice, but the usage."""
        return {**self._head, "choices": [], "usage": usage}

    def _choice(self, index: int, text: str, tokens: Sequence[Json], reason: str | None) -> Json:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(token["token"]) for token in tokens)
        logprobs = as_completion(tokens, offset) if tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _of_chat(tokens: Sequence[Json] | None) -> dict[str, Any] | None:
    return {"content": list(tokens), "refusal": None} if tokens else None
