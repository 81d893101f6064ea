"""The fields of requests for completions and chats.

Fields have OpenAI's names, types and ranges; some of vLLM's are added, such as `top_k`, `min_p` and
`return_token_ids`. Three rules hold. A field that neither OpenAI nor we know is refused by name. A
field of OpenAI that would change the answer, but is not supported, is accepted only with a value
that has no effect. A field that never changes the answer (`user`, `metadata`, …) is accepted and
ignored. null means that a field is left out. Types are strict: "0.5" is not a number.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from penstock.chat.calls import forced_schema
from penstock.learn.generation import Sampling
from penstock.learn.generation.session import Ending
from penstock.learn.generation.settings import COLDEST, LEAST_REPETITION, MOST_REPETITION
from penstock.use.serving.messages import MOST_TOOLS, Message, Strict, Tool, ToolChoice, read_choice
from penstock.use.serving.refusals import Refusal, bad_request

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Fields that never change an answer."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not supported, with the values that have no effect."""
OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "self"}
)
"""Names that templates read, or that rendering has, and that are not variables of theirs."""
KINDS = frozenset(
    {
        "text",
        "image_url",
        "input_audio",
        "message",
        "function_call",
        "function_call_output",
        "input_text",
        "output_text",
        "input_image",
    }
)
"""Types of parts of messages, and of items."""
MOST_BIASES, MOST_PROMPTS, MOST_STOPS, LONGEST_STOP = 1024, 128, 4, 256
Parsed = TypeVar("Parsed", bound=Strict)


def _stops(value: object) -> object:
    """A text or texts → texts."""
    if isinstance(value, list) and len(value) > MOST_STOPS:
        raise ValueError(f"{len(value):,} texts, at most {MOST_STOPS} are allowed")
    return [value] if isinstance(value, str) else value


def _prompts(value: object) -> list[object]:
    """A text, texts, ids, or lists of ids → a list of prompts."""
    prompts = (
        [value]
        if isinstance(value, str) or (isinstance(value, list) and _is_id(next(iter(value), None)))
        else value
    )
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("expected a text, token ids, or a list of either")
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"{len(prompts):,} prompts, at most {MOST_PROMPTS} are allowed")
    for prompt in prompts:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and prompt and all(map(_is_id, prompt))
        ):
            raise ValueError(
                "expected prompts of text, or lists of token ids (whole numbers from 0)"
            )
    return prompts


def _biases(value: object) -> object:
    """Ids as JSON's names, which are texts → numbers."""
    if not isinstance(value, dict):
        return value
    if len(value) > MOST_BIASES:
        raise ValueError(f"{len(value):,} ids, at most {MOST_BIASES} are allowed")
    wrong = next((name for name in value if not str(name).isdecimal() or len(str(name)) > 12), None)
    if wrong is not None:
        raise ValueError(f"{str(wrong)[:40]!r} is not a token id")
    return {int(name): bias for name, bias in value.items()}


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _variables(value: dict[str, object]) -> dict[str, object]:
    """Variables of a chat template, without those that are fields of the request."""
    taken = next((name for name in value if name in OWN_VARIABLES), None)
    if taken is not None:
        raise ValueError(
            f"{taken!r} is no variable of a template; give it as a field of the request"
        )
    return value


class JsonSchema(Strict):
    """A schema that the reply must meet."""

    name: str
    schema_: Annotated[dict[str, object], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """A schema is always kept."""


class ResponseFormat(Strict):
    """Required form of the reply: any text, a JSON object, or JSON that meets a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema")
        return self

    @property
    def schema_text(self) -> str | None:
        """The schema as JSON; None: the reply is any text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return '{"type": "object"}' if self.type == "json_object" else None


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Request(Strict):
    """The fields of both kinds of requests."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """0 and −1: all, as without it."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    return_token_ids: bool = False
    """Also give the ids of prompts and replies, as vLLM does."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Of vLLM, too: only those that end replies of the model anyway."""
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
        BeforeValidator(_stops),
    ] = Field(default_factory=list)
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=LEAST_REPETITION, le=MOST_REPETITION)] = 1.0
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_biases)
    ] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, max_tokens: int, logprobs: int | None, json_schema: str | None = None
    ) -> Sampling:
        """The sampling for the engine; without a seed, a random one is used."""
        return Sampling(
            # Clients write 0 as a very small number, too.
            temperature=max(self.temperature, COLDEST) if self.temperature else 0.0,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            repetition_penalty=self.repetition_penalty,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            min_tokens=min(self.min_tokens, max_tokens),
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            logprobs=logprobs,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias,
            json_schema=json_schema,
        )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def schema_field(self) -> str:
        """The field that a schema comes from."""
        return "response_format"


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    """Texts, or token ids."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0: only the prompt comes back, with `echo`."""
    echo: bool = False
    """Give the prompt back before the text, with the log-probabilities of its tokens if these are
    asked for.
    """
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    min_tokens: Annotated[int, Field(ge=0)] = 1
    """1 by default, so that replies are not empty."""
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice, BeforeValidator(read_choice)] = ToolChoice(type="auto")
    parallel_tool_calls: bool = True
    """False: of several calls of a reply, only the first is given back."""
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[dict[str, object], AfterValidator(_variables)] = Field(
        default_factory=dict
    )
    """Variables of the chat template, such as enable_thinking."""
    add_generation_prompt: bool = True
    """Begin the assistant's reply at the end of the prompt."""
    continue_final_message: bool = False
    """Continue the last message, which is the assistant's, instead."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def ending(self) -> Ending:
        """End of the prompt."""
        if self.continue_final_message:
            return "continue"
        return "reply" if self.add_generation_prompt else "message"

    @property
    def most(self) -> int | None:
        """The requested maximum of tokens, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered(self) -> list[dict[str, object]]:
        """The tools that the model may call, as chat templates expect them."""
        return (
            [] if self.tool_choice.type == "none" else [tool.for_template() for tool in self.tools]
        )

    @property
    def callable(self) -> list[dict[str, object]]:
        """The tools of which the reply must call one; empty: it need not."""
        chosen = self.tool_choice.function
        if chosen is not None:
            return [tool.for_template() for tool in self.tools if tool.function.name == chosen.name]
        return self.offered if self.tool_choice.type == "required" else []

    @property
    def schema_text(self) -> str | None:
        """The JSON schema that the reply must meet; None: it is any text."""
        if self.callable:
            single = self.tool_choice.type == "function" or not self.parallel_tool_calls
            return json.dumps(forced_schema(self.callable, 1 if single else None))
        return None if self.response_format is None else self.response_format.schema_text

    @property
    def schema_field(self) -> str:
        """The field that the schema comes from."""
        return "tools" if self.callable else "response_format"

    @model_validator(mode="after")
    def _agree_on_chat(self) -> Self:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError(
                "max_tokens and max_completion_tokens are the same setting; give one of them"
            )
        if (
            self.offered
            and self.response_format is not None
            and self.response_format.schema_text is not None
        ):
            raise ValueError(
                "tools and response_format exclude each other, as a call is no such JSON; give one"
            )
        if self.tool_choice.type in ("required", "function") and not self.callable:
            raise ValueError("tool_choice wants a call, but tools has no such function; add it")
        if len({tool.function.name for tool in self.tools}) < len(self.tools):
            raise ValueError("two tools have the same name")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.continue_final_message:
            self._check_continued()
        return self

    def _check_continued(self) -> None:
        last = self.messages[-1]
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other; give one"
            )
        if last.role != "assistant" or last.tool_calls:
            raise ValueError(
                "continue_final_message needs a last message of the assistant, without tool_calls"
            )


def parse(
    kind: type[Parsed],
    body: dict[str, object],
    most_messages: int,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
) -> Parsed:
    """Parse a body; `neutral`: fields that are not supported, with the values that have no effect.

    Raises:
        Refusal: 400: names the first field at fault.
    """
    for name, value in body.items():
        if name in neutral and value is not None and value not in neutral[name]:
            raise bad_request(
                f"{name} is not supported here; leave it out", name, "unsupported_value"
            )
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > most_messages:
        message = f"{len(messages):,} messages, at most {most_messages} are allowed"
        raise bad_request(message, "messages", "too_many_messages")
    given = {
        name: value for name, value in body.items() if name not in IGNORED and name not in neutral
    }
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, given) from None


def _refusal(error: ValidationError, body: dict[str, object]) -> Refusal:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    place = list(first["loc"])
    # pydantic adds the type by which it chose the kind of a part or an item.
    place = [
        name
        for at, name in enumerate(place)
        if not (at and isinstance(place[at - 1], int) and name in KINDS)
    ]
    path = ".".join(map(str, place))
    if message.startswith("unknown field"):
        name = message.split("'")[1]
        path = f"{path}.{name}" if path else name
    code = {"missing": "missing_required_parameter"}.get(first["type"], "invalid_value")
    return bad_request(f"{path or 'body'}: {message}", path or None, code)
