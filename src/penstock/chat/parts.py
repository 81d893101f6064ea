"""Contents in parts: texts, thinking, tool calls and media, each with its own training weight.

Parts that are all text become one string, because most templates take nothing else, and the weights of the parts become
ranges of that string. A list with an image, a video or a sound stays a list, which the templates of such models take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from penstock.chat.conversation import Range
from penstock.chat.marks import TRAINING_KEYS, part_weight
from penstock.chat.media import MEDIA_TYPES, media_fields
from penstock.chat.tools import read_calls
from penstock.errors import ConversationError

TEXT_TYPES = frozenset(("text", "input_text", "output_text"))
THINKING_TYPES = frozenset(("reasoning", "thinking"))
CALL_TYPES = frozenset(("tool_call", "function_call"))

TEXT_KEYS = ("text", "content", "value")


@final
@dataclass(slots=True)
class Parts:
    """What the parts of one content come to."""

    content: str | list[dict[str, Any]]
    ranges: list[Range] = field(default_factory=list)
    thinking: str | None = None
    thinking_ranges: list[Range] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


def read_parts(parts: Sequence[Any], where: str, *, thinking_key: str, join: bool = True) -> Parts:
    """Sort the parts of one content.

    Args:
        parts: Objects with a `type`, or strings.
        where: File, line and message, for errors.
        thinking_key: The field of thinking ranges.
        join: Whether texts alone become one string.

    Raises:
        ConversationError: a part is neither text nor an object with a `type`, or its weight is out of bounds.
    """
    texts: list[tuple[str, float | None]] = []
    thoughts: list[tuple[str, float | None]] = []
    kept: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    media = False
    for index, part in enumerate(parts):
        place = f"{where}, part {index},"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind, text = _kind_and_text(part, place)
        if kind in CALL_TYPES:
            calls += read_calls(text if text is not None else part.get("tool_call", part), place)
            continue
        weight = part_weight(part, place)
        if text is None:
            media = True
            kept.append({"type": kind, **_without_training(part)})
        elif kind in THINKING_TYPES:
            thoughts.append((text, weight))
        else:
            kept.append({"type": "text", "text": text})
            texts.append((text, weight))
    if not media and join:
        result = Parts(*_join(texts, "content"), calls=calls)
    else:
        result = Parts(kept, _ranges_of_parts(kept, texts), calls=calls)
    if thoughts:
        result.thinking, result.thinking_ranges = _join(thoughts, thinking_key)
    return result


def _kind_and_text(part: Any, where: str) -> tuple[str, str | None]:
    """A part's type, and its text where it is of a type that has one."""
    if not isinstance(part, Mapping):
        raise ConversationError(
            f'{where} is {type(part).__name__}; due an object such as {{"type": "text", "text": …}}'
        )
    kind, media = part.get("type"), list(media_fields(part))
    if kind is None and any(isinstance(part.get(key), str) for key in TEXT_KEYS):
        kind = "text"
    elif kind is None and media:
        kind = media[0]
    if not isinstance(kind, str):
        raise ConversationError(f'{where} has no "type" (its fields: {", ".join(part)}); due text, image, …')
    if kind.startswith(MEDIA_TYPES):
        return kind, None
    if kind not in TEXT_TYPES | THINKING_TYPES | CALL_TYPES:
        # A template would leave it out without a word.
        raise ConversationError(
            f'{where} is of type "{kind}"; due text, reasoning, tool_call, or image, video, audio and the like; '
            "what tools were asked and answered goes into tool_calls and messages of role tool"
        )
    if media:
        raise ConversationError(f'{where} is of type "{kind}" and holds "{media[0]}" too; expected: a part for each')
    for key in (kind, *TEXT_KEYS):
        if isinstance(part.get(key), str):
            return kind, part[key]
    if kind in CALL_TYPES:
        return kind, None
    raise ConversationError(f'{where} is of type "{kind}" and has no text; due it under "text"')


def _without_training(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if value is not None and key not in TRAINING_KEYS}


def _join(texts: list[tuple[str, float | None]], name: str) -> tuple[str, list[Range]]:
    ranges, at = [], 0
    for text, weight in texts:
        if weight is not None and text:
            ranges.append(Range(field=name, begin=at, end=at + len(text), weight=weight))
        at += len(text)
    return "".join(text for text, _ in texts), ranges


def _ranges_of_parts(kept: list[dict[str, Any]], texts: list[tuple[str, float | None]]) -> list[Range]:
    places = [index for index, part in enumerate(kept) if part["type"] == "text"]
    return [
        Range(field=f"content.{index}.text", begin=0, end=len(text), weight=weight)
        for index, (text, weight) in zip(places, texts, strict=True)
        if weight is not None and text
    ]
