"""The model behind a server, and how requests become prompts for its engine."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, final

from penstock.chat import Template
from penstock.core.errors import PenstockError
from penstock.core.json_values import JsonMapping
from penstock.learn.generation.engine import Engine
from penstock.learn.generation.grammar import Compiled, Grammars
from penstock.learn.generation.images import ImageReader
from penstock.learn.generation.schema_limits import check_schema
from penstock.learn.generation.session import DoesNotFitError, Prompt, begin_ids, fit_chat
from penstock.learn.generation.settings import Sampling
from penstock.media.layout import NOUNS
from penstock.tokenizers import Tokenizer
from penstock.use.serving.admission import Ask
from penstock.use.serving.refusals import Refusal, bad_request
from penstock.use.serving.requests import ChatRequest, CompletionRequest
from penstock.use.serving.settings import ServeSettings
from penstock.use.serving.worker import BatchEngine

Result = TypeVar("Result")
COMPLETION_TOKENS = 16
"""Default `max_tokens` of completions, as in OpenAI's API."""
COMPILE_SECONDS = 10.0
"""Maximum time for compiling the schema of a request."""
COMPILED_AT_ONCE = 2
"""Schemas that are compiled at the same time."""


@final
@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that a server serves. Only one thread at a time makes prompts."""

    name: str
    engine: BatchEngine
    tokenizer: Tokenizer
    template: Template | None
    """None: chats are refused."""
    context_length: int
    """Maximum tokens of prompt and reply together."""
    begin_ids: tuple[int, ...] | None = None
    """The ids before the text of a completion; None: as the tokenizer's own encoding has them."""
    sampling: JsonMapping = field(default_factory=dict)
    """The model's own defaults of sampling, for what a request leaves out
    (`generation.settings.sampling_defaults`).
    """
    images: ImageReader | None = None
    """Reads the images of messages; None: they are refused."""
    parameters: int | None = None
    """Number of weights, which the chat page shows; None: unknown."""
    created: int = field(default_factory=lambda: int(time.time()))

    def described(self) -> dict[str, object]:
        """The entry in `/v1/models`; the last five fields are our additions."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "penstock",
            "context_length": self.context_length,
            "parameters": self.parameters,
            "has_chat": self.template is not None,
            "sampling": dict(self.sampling),
            "reads_images": self.images is not None and self.images.processor.medium == "image",
        }

    def check_name(self, name: str) -> None:
        """Refuse requests for another model."""
        if name != self.name:
            raise Refusal(
                404,
                f"no model {name[:80]!r} here, only {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def completion(self, request: CompletionRequest, settings: ServeSettings) -> Ask:
        """The prompts of a completion.

        Raises:
            Refusal: 400: a prompt is empty or too long, or a number is too large.
        """
        most = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        if most == 0 and not request.echo:
            raise bad_request("max_tokens is 0, which needs echo: true", "max_tokens")
        _check_numbers(len(request.prompt), request.n, most, "max_tokens", settings)
        prompts = [self._ids(prompt) for prompt in request.prompt]
        longest = max(map(len, prompts))
        if longest + (1 if request.max_tokens is None else most) > self.context_length:
            raise bad_request(
                f"the prompt has {longest:,} tokens and max_tokens is {most:,}, together more "
                f"than the context of {self.context_length:,}; reduce one of them",
                "prompt" if longest >= self.context_length else "max_tokens",
                "context_length_exceeded",
            )
        self._check_ids(request)
        # Each prompt's own room limits its reply, too.
        sampling = self._sampling(request, max(1, most), request.logprobs)
        return Ask(
            prompts=prompts,
            sampling=sampling,
            replies=request.n,
            is_seeded=request.seed is not None,
            scored=request.logprobs if request.echo else None,
            writes=most > 0,
        )

    def _sampling(self, request: CompletionRequest | ChatRequest, *given: Any) -> Sampling:
        """Settings of the request, else the model's defaults, else those of the API."""
        own = {
            name: value
            for name, value in self.sampling.items()
            if name != "max_tokens"
            and (name not in request.model_fields_set or getattr(request, name) is None)
        }
        return replace(request.sampling(*given), **own)

    def _check_ids(self, request: CompletionRequest | ChatRequest) -> None:
        stops = self.engine.stop_ids if isinstance(self.engine, Engine) else frozenset()
        if other := [one for one in request.stop_token_ids if one not in stops]:
            raise bad_request(
                f"stop_token_ids has {other[0]}, which ends no reply of {self.name}; leave it out",
                "stop_token_ids",
                "unsupported_value",
            )
        if (largest := max(request.logit_bias, default=0)) >= self.tokenizer.vocab_size:
            raise bad_request(
                f"logit_bias has id {largest}, but ids must be below {self.tokenizer.vocab_size}",
                "logit_bias",
            )

    def echo(self, request: CompletionRequest, ask: Ask) -> list[str]:
        """The text of each prompt, as it is given back."""
        return [
            prompt if isinstance(prompt, str) else self.tokenizer.decode(ids)
            for prompt, ids in zip(request.prompt, ask.prompts, strict=True)
        ]

    def chat(self, request: ChatRequest, settings: ServeSettings) -> Ask:
        """The prompt of a conversation: as many whole turns as leave room for a quarter of the
        context or `max_tokens`.

        Raises:
            Refusal: 400: the template refuses the conversation, or the last turn alone is too long.
        """
        if self.template is None:
            raise bad_request(
                f"{self.name} has no chat template; use /v1/completions",
                "model",
                "no_chat_template",
            )
        field_name = (
            "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        )
        _check_numbers(1, request.n, request.most or 1, field_name, settings)
        quarter = max(1, self.context_length // 4)
        room = self.context_length - min(request.most or quarter, quarter)
        self._check_ids(request)
        self._check_format(request)
        prompt = self._prompt(request, room, settings)
        left = self.context_length - len(prompt.ids)
        sampling = self._sampling(
            request,
            min(
                request.most
                or min(self.sampling.get("max_tokens", settings.max_tokens), settings.max_tokens),
                left,
            ),
            (request.top_logprobs or 0) if request.logprobs else None,
            request.schema_text,
        )
        return Ask(
            prompts=[prompt.ids],
            sampling=sampling,
            replies=request.n,
            is_seeded=request.seed is not None,
            tokens_dropped=prompt.tokens_dropped,
            images=prompt.images,
        )

    @cached_property
    def _grammars(self) -> Grammars:
        """The engine's own, so that it finds what is compiled here."""
        return (
            self.engine.grammars
            if isinstance(self.engine, Engine)
            else Grammars(self.tokenizer, ())
        )

    @cached_property
    def _compiling(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(COMPILED_AT_ONCE)

    async def compile(self, schema: str, field_name: str) -> Compiled:
        """Compile a schema, in a thread that nothing else waits for.

        Raises:
            Refusal: 400: llguidance refuses it, or it takes too long.
        """
        try:
            # The others wait, so that the engine keeps its share of the processor.
            async with self._compiling, asyncio.timeout(COMPILE_SECONDS):
                return await asyncio.wrap_future(_apart(lambda: self._grammars.compile(schema)))
        except TimeoutError:
            message = (
                f"json_schema: it takes longer than {COMPILE_SECONDS:g} s to compile; simplify it"
            )
            raise bad_request(f"{field_name}: {message}", field_name) from None
        except PenstockError as error:
            raise bad_request(f"{field_name}: {error}", field_name) from None

    def _check_format(self, request: ChatRequest) -> None:
        if request.offered and self.template is not None and "tools" not in self.template.source:
            raise bad_request(
                f"the chat template of {self.name} has no place for tools", "tools", "no_tools"
            )
        if request.schema_text is not None:
            try:
                check_schema(request.schema_text)
            except PenstockError as error:
                raise bad_request(
                    f"{request.schema_field}: {error}", request.schema_field
                ) from None

    def _prompt(self, request: ChatRequest, room: int, settings: ServeSettings) -> Prompt:
        assert self.template is not None
        count = sum(message.num_images for message in request.messages)
        if count and self.images is None:
            raise bad_request(
                f"{self.name} reads no images or sounds", "messages", "images_not_supported"
            )
        if count > settings.images:
            nouns = f"{NOUNS[self.images.processor.medium]}s" if self.images else "images"
            raise bad_request(
                f"{count} {nouns}, at most {settings.images} are allowed",
                "messages",
                "too_many_images",
            )
        messages = [message.for_template() for message in request.messages]
        try:
            return fit_chat(
                messages,
                self.template,
                self.tokenizer,
                room=room,
                tools=request.offered or None,
                images=self.images,
                ending=request.ending,
                variables=request.chat_template_kwargs,
            )
        except DoesNotFitError as error:
            raise bad_request(str(error), "messages", "context_length_exceeded") from None
        except PenstockError as error:
            raise bad_request(str(error), "messages", "invalid_messages") from None

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            try:
                begin = begin_ids(self.tokenizer) if self.begin_ids is None else self.begin_ids
                ids = [*begin, *self.tokenizer.encode(prompt).tolist()]
            except PenstockError as error:
                raise bad_request(f"prompt: {error}", "prompt") from None
        else:
            ids = prompt
        if not ids:
            raise bad_request("prompt is empty; give some text", "prompt")
        if max(ids) >= self.tokenizer.vocab_size:
            raise bad_request(
                f"prompt has id {max(ids)}, but ids must be below {self.tokenizer.vocab_size}",
                "prompt",
            )
        return ids


def _apart(call: Callable[[], Result]) -> Future[Result]:
    """Call in a thread of its own; nothing can stop llguidance, so a schema may keep it for
    ever.
    """
    found: Future[Result] = Future()

    def run() -> None:
        if sys.platform == "linux":
            # Threads have their own priority there: the engine's goes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        # Whoever waited may have given up.
        with suppress(InvalidStateError):
            try:
                result = call()
            except Exception as error:
                found.set_exception(error)
            else:
                found.set_result(result)

    threading.Thread(target=run, name="penstock-compile", daemon=True).start()
    return found


def _check_numbers(
    prompts: int, n: int, max_tokens: int, name: str, settings: ServeSettings
) -> None:
    most = min(settings.choices, settings.sequences)
    if prompts * n > most:
        message = (
            f"prompts × n = {prompts} × {n} = {prompts * n} replies, at most {most} are allowed "
            "in one request"
        )
        raise bad_request(message, "n" if n > 1 else "prompt", "too_many_choices")
    if max_tokens > settings.max_tokens:
        raise bad_request(
            f"{name} is {max_tokens:,}, at most {settings.max_tokens:,} is allowed", name
        )
