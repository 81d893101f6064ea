"""Messages and tools of requests, with OpenAI's names; types are strict, and unknown fields are
errors.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from penstock.use.serving.refusals import json_kind

MOST_TOOLS, MOST_PARTS = 128, 64


def _parts(value: object) -> object:
    """Content as text or as parts → parts."""
    if isinstance(value, list) and len(value) > MOST_PARTS:
        raise ValueError(f"{len(value):,} parts, at most {MOST_PARTS} are allowed")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Strict(BaseModel):
    """A part of a request: types are strict, and unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        """Leave out nulls, and report the first unknown field."""
        if not isinstance(value, dict):
            return value
        given = {name: item for name, item in value.items() if item is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise ValueError(f"unknown field {unknown[:60]!r}")
        return given


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """Where an image is."""

    url: str
    detail: Literal["auto", "high"] = "auto"
    """Images are always read at the size that the model's processor gives them."""


class ImagePart(Strict):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(Strict):
    """A sound, as base64."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(Strict):
    """A sound of a message."""

    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | ImagePart | AudioPart, Field(discriminator="type")]


class CalledFunction(Strict):
    """The function of a call."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str
    """A JSON object, as text."""

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, arguments: str) -> str:
        try:
            found = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from None
        if not isinstance(found, dict):
            # pydantic takes no TypeError for a fault of the field.
            raise ValueError(f"a JSON {json_kind(found)}, expected an object")  # noqa: TRY004
        return arguments or "{}"


class ToolCall(Strict):
    """A call in a reply that is part of the conversation."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], BeforeValidator(_parts)]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] = []
    tool_call_id: str | None = None
    refusal: None = None
    """In replies that a client sends back; always null here."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant have tool_calls")
        if (self.tool_call_id is None) != (self.role != "tool"):
            raise ValueError("messages of a tool have a tool_call_id, and no others")
        return self

    @model_validator(mode="before")
    @classmethod
    def _without_content(cls, value: object) -> object:
        """A reply may have none, or null, such as one that only calls."""
        if (
            isinstance(value, dict)
            and value.get("role") == "assistant"
            and value.get("content") is None
        ):
            return {**value, "content": []}
        return value

    @field_validator("content")
    @classmethod
    def _says_something(cls, content: list[Part], given: ValidationInfo) -> list[Part]:
        """A user message must have text, an image or a sound; a system message or a reply may be
        empty.
        """
        images = any(not isinstance(part, TextPart) for part in content)
        if given.data.get("role") == "user" and not images and not _text(content).strip():
            raise ValueError("the user's message is blank; give some text")
        return content

    @property
    def num_images(self) -> int:
        """Number of its images and sounds."""
        return sum(not isinstance(part, TextPart) for part in self.content)

    def for_template(self) -> dict[str, object]:
        """The message as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        named: dict[str, object] = {} if self.name is None else {"name": self.name}
        # None of a reply is null, which the template may write otherwise than an empty text.
        content: Any = _text(self.content) if self.content or self.role != "assistant" else None
        if self.num_images:
            content = [_for_template(part) for part in self.content]
        if self.tool_calls:
            content = content or None
            named["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            named["tool_call_id"] = self.tool_call_id
        return {"role": role, "content": content, **named}


def _for_template(part: Part) -> dict[str, object]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, AudioPart):
        return {"type": "audio", "audio": {"base64": part.input_audio.data}}
    return {"type": "image", "image": part.image_url.url}


def _text(content: list[Part]) -> str:
    return "".join(part.text for part in content if isinstance(part, TextPart))


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    """A JSON schema."""
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _are_those_of_an_object(
        cls, parameters: dict[str, object] | None
    ) -> dict[str, object] | None:
        if parameters and parameters.get("type", "object") != "object":
            raise ValueError("the schema of a function's parameters must have type object")
        return parameters


class Tool(Strict):
    """A tool of a request."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, object]:
        """As chat templates expect it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": parameters}}


class ChosenFunction(Strict):
    """The function that a reply must call."""

    name: str


class ToolChoice(Strict):
    """Whether a reply may call tools, must call one, or which."""

    type: Literal["none", "auto", "required", "function"]
    function: ChosenFunction | None = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.type == "function" and self.function is None:
            raise ValueError('type function needs the function\'s name: {"function": {"name": …}}')
        return self


def read_choice(value: object) -> object:
    """A word, or an object that names a function → an object."""
    words = ("none", "auto", "required")
    if isinstance(value, dict) and value.get("type") == "function":
        return value
    if value not in words:
        raise ValueError(f"expected {', '.join(words)}, or a function by its name")
    return {"type": value}
