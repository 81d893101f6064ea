"""Requests of `/v1/responses`: OpenAI's Responses API for text and functions, as requests of a
chat.

Items of `input` become messages of one conversation: `instructions` a system message, calls that
follow a reply a part of it. The rules for fields are those of `requests.py`. Nothing is stored, so
`previous_response_id` and `conversation` are refused: a client sends the whole conversation.
"""

import re
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.use.serving.messages import MOST_PARTS, MOST_TOOLS, Strict
from penstock.use.serving.refusals import Refusal, bad_request
from penstock.use.serving.requests import ChatRequest, parse
from penstock.use.serving.settings import ServeSettings

NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "max_tool_calls": (),
    "context_management": ([],),
    "moderation": (),
}
"""Fields that are not supported, with the values that have no effect."""
_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Fields of a chat → those of a response."""
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "chat_template_kwargs",
)
"""Fields that are those of a chat; of most OpenAI's API has only two here."""


class InputText(Strict):
    """Text that the model reads."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(Strict):
    """Text of an earlier reply."""

    type: Literal["output_text"]
    text: str
    annotations: list[object] = Field(default_factory=list)
    logprobs: list[object] = Field(default_factory=list)


class InputImage(Strict):
    """An image that the model reads."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "high"] = "auto"


Part = Annotated[InputText | OutputText | InputImage, Field(discriminator="type")]


def _parts(value: object) -> object:
    """Text is one part."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class MessageItem(Strict):
    """A message, or a message of an earlier answer."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], BeforeValidator(_parts), Field(max_length=MOST_PARTS)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(Strict):
    """Result of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[list[InputText], BeforeValidator(_parts), Field(max_length=MOST_PARTS)]
    id: str | None = None
    status: str | None = None


def _items(value: object) -> object:
    """A text is the user's message; a message may leave out its type."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **one} if isinstance(one, dict) and "role" in one else one
        for one in value
    ]


Item = Annotated[MessageItem | CallItem | ResultItem, Field(discriminator="type")]


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class TextFormat(Strict):
    """Required form of the reply; a schema has a name."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, object] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Strict):
    """Options of the reply's text."""

    format: TextFormat | None = None


class Obfuscation(Strict):
    """Options of a stream."""

    include_obfuscation: bool = False


class ResponsesRequest(Strict):
    """`POST /v1/responses`."""

    model: str
    input: Annotated[list[Item], BeforeValidator(_items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, default_factory=list)]
    tool_choice: str | dict[str, object] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    """auto: whole turns that do not fit are left out; disabled: they are refused."""
    stream: bool = False
    stream_options: Obfuscation | None = None
    temperature: object = None
    top_p: object = None
    top_k: object = None
    min_p: object = None
    min_tokens: object = None
    seed: object = None
    stop: object = None
    frequency_penalty: object = None
    presence_penalty: object = None
    repetition_penalty: object = None
    logit_bias: object = None
    chat_template_kwargs: object = None

    include_usage: ClassVar[bool] = True
    schema_field: ClassVar[str] = "text.format"

    @cached_property
    def chat(self) -> ChatRequest:
        """The same as a request of a chat.

        Raises:
            Refusal: 400: names the first field at fault, of the chat; see `renamed`.
        """
        messages = self._messages()
        body: dict[str, object] = {name: getattr(self, name) for name in _SAMPLING}
        body |= {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.tools:
            functions = (
                tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools
            )
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        body["tool_choice"], body["parallel_tool_calls"] = self._choice(), self.parallel_tool_calls
        if self.text is not None and self.text.format is not None:
            body["response_format"] = _format(self.text.format)
        if "message.output_text.logprobs" in self.include:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return parse(ChatRequest, body, len(messages))

    def _choice(self) -> object:
        if not isinstance(self.tool_choice, dict) or "name" not in self.tool_choice:
            return self.tool_choice
        rest = {name: value for name, value in self.tool_choice.items() if name != "name"}
        return {**rest, "function": {"name": self.tool_choice["name"]}}

    def _messages(self) -> list[dict[str, object]]:
        messages: list[dict[str, object]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if isinstance(item, CallItem):
                _add_call(messages, item)
            elif isinstance(item, ResultItem):
                content = "".join(part.text for part in item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            else:
                messages.append(
                    {"role": item.role, "content": [_part(part) for part in item.content]}
                )
        return messages


def _add_call(messages: list[dict[str, object]], item: CallItem) -> None:
    """A call is a part of the reply before it, or begins one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.name, "arguments": item.arguments}
    calls = messages[-1].setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append({"id": item.call_id, "type": "function", "function": function})


def _part(part: InputText | OutputText | InputImage) -> dict[str, object]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
    return {"type": "text", "text": part.text}


def _format(given: TextFormat) -> dict[str, object]:
    fields = {
        "name": given.name,
        "description": given.description,
        "schema": given.schema_,
        "strict": given.strict,
    }
    schema = {name: value for name, value in fields.items() if value is not None}
    return {"type": given.type, **({"json_schema": schema} if schema else {})}


def parse_response(body: dict[str, object], settings: ServeSettings) -> ResponsesRequest:
    """Parse a body of `/v1/responses`.

    Raises:
        Refusal: 400: names the first field at fault.
    """
    items = body.get("input")
    if isinstance(items, list) and len(items) > settings.messages:
        message = f"{len(items):,} items of input, at most {settings.messages} are allowed"
        raise bad_request(message, "input", "too_many_messages")
    if isinstance(items, list) and not items:
        raise bad_request("input is empty; give at least one message", "input")
    return parse(ResponsesRequest, body, settings.messages, NEUTRAL)


def renamed(refusal: Refusal) -> Refusal:
    """A refusal of a chat, with the fields as they are called here."""

    def name(text: str) -> str:
        # Items and messages are not numbered alike.
        text = re.sub(r"\bmessages\.\d+(\.[a-z_0-9.]*[a-z_0-9])?", "input", text)
        return re.sub(
            "|".join(rf"\b{name}\b" for name in _NAMES), lambda found: _NAMES[found[0]], text
        )

    param = None if refusal.param is None else name(refusal.param)
    return Refusal(refusal.status, name(str(refusal)), param=param, code=refusal.code)
