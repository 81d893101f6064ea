"""What clients may ask, field by field: OpenAI's names, types and ranges, and `top_k`, `min_p`, `min_tokens` besides.

Three rules. A field that OpenAI does not know and we neither is refused by name. One that OpenAI knows and that would
change the answer, but that we cannot do, is accepted at the value that changes nothing, and refused at others. One
that changes no answer (`user`, `metadata`, …) is accepted and ignored. null is the same as leaving a field out. Types
are strict: "0.5" is no number.
"""

import secrets
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.generation import Sampling
from penstock.serving.refusals import Refusal

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Change nothing about an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "best_of": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Known, but not supported: values with which the answer is what it is without the field."""
MOST_PROMPTS, MOST_PARTS, MOST_STOPS, LONGEST_STOP = 128, 64, 4, 256


def _stops(value: object) -> object:
    """A text or texts → texts."""
    if isinstance(value, list) and len(value) > MOST_STOPS:
        raise ValueError(f"{len(value):,} texts, at most {MOST_STOPS} are taken")
    return [value] if isinstance(value, str) else value


def _prompts(value: object) -> list[Any]:
    """A text, texts, ids, or lists of ids → a list of prompts."""
    prompts = (
        [value] if isinstance(value, str) or (isinstance(value, list) and _is_id(next(iter(value), None))) else value
    )
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("a text, token ids, or a list of either was due")
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"{len(prompts):,} prompts, at most {MOST_PROMPTS} are taken")
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(map(_is_id, prompt))):
            raise ValueError("a prompt is neither text nor a list of token ids, whole numbers from 0")
    return prompts


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _parts(value: object) -> object:
    """Content as text or as parts → parts."""
    if isinstance(value, list) and len(value) > MOST_PARTS:
        raise ValueError(f"{len(value):,} parts, at most {MOST_PARTS} are taken")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        """Nulls are left out; the first unknown name is told, and no more of them."""
        if not isinstance(value, dict):
            return value
        given = {name: item for name, item in value.items() if item is not None}
        unknown = next((name for name in given if name not in cls.model_fields), None)
        if unknown is not None:
            raise ValueError(f"unknown field {unknown[:60]!r}")
        return given


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts)]
    name: str | None = None

    @field_validator("content")
    @classmethod
    def _says_something(cls, content: list[TextPart], given: ValidationInfo) -> list[TextPart]:
        """A user's message has words; a system message or a reply may be empty."""
        if given.data.get("role") == "user" and not "".join(part.text for part in content).strip():
            raise ValueError("the user's message is blank; give some text")
        return content

    def for_template(self) -> dict[str, str]:
        """As templates want it."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": "".join(part.text for part in self.content), **named}


class StreamOptions(_Strict):
    """What comes with a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Wishes(_Strict):
    """What both kinds of requests have."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
        BeforeValidator(_stops),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, logprobs: int | None) -> Sampling:
        """For the engine; without a seed each request has one of its own."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            min_tokens=min(self.min_tokens, max_tokens),
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            logprobs=logprobs,
        )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        return self


class CompletionRequest(_Wishes):
    """`POST /v1/completions`."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    """Texts, or token ids."""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class ChatRequest(_Wishes):
    """`POST /v1/chat/completions`."""

    min_tokens: Annotated[int, Field(ge=0)] = 1
    """One, so that there are no empty replies."""
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def most(self) -> int | None:
        """Tokens that were asked for, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _agree_on_chat(self) -> Self:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("max_tokens and max_completion_tokens are two names of one thing; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: true")
        return self


Kind = TypeVar("Kind", CompletionRequest, ChatRequest)


def parse(kind: type[Kind], body: dict[str, Any], most_messages: int) -> Kind:
    """A request out of a body.

    Raises:
        Refusal: 400; names the first field to blame.
    """
    for name, value in body.items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Refusal(400, f"{name} is not supported here; leave it out", param=name, code="unsupported_value")
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > most_messages:
        raise Refusal(
            400,
            f"{len(messages):,} messages, at most {most_messages} are taken",
            param="messages",
            code="too_many_messages",
        )
    given = {name: value for name, value in body.items() if name not in IGNORED and name not in NEUTRAL}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, given) from None


def _refusal(error: ValidationError, body: dict[str, Any]) -> Refusal:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    path = ".".join(map(str, first["loc"]))
    if message.startswith("unknown field"):
        name = message.split("'")[1]
        path = f"{path}.{name}" if path else name
    code = {"missing": "missing_required_parameter"}.get(first["type"], "invalid_value")
    return Refusal(400, f"{path or 'body'}: {message}", param=path or None, code=code)
