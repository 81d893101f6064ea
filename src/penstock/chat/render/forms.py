"""Forms of a conversation: changes to its messages that a template may need before it can render
them.

Chat templates accept different inputs. For a message with only tool calls, some want a null
content, others an empty text. Some want the arguments of tool calls as text, others as objects;
some a list of parts (LLaVA), others one text. `choosing.py` decides which changes are made.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from penstock.chat.records.conversation import Conversation, Form, MessageWeights, Range
from penstock.core.json_values import JsonMapping, JsonObject, JsonValue

Message = JsonObject
_Change = Callable[[Message, MessageWeights], tuple[Message, MessageWeights]]
_USUAL: tuple[Form, ...] = ("empty_content", "decode_arguments", "join_text_parts")
"""Changes after which most templates render a conversation."""
_APART = (
    {"empty_content", "null_content"},
    {"decode_arguments", "encode_arguments"},
    {"encode_arguments", "encode_values"},
)
"""Changes of which at most one is made."""


def forms_of(
    messages: Sequence[JsonMapping], decode_arguments: bool, join_text_parts: bool
) -> tuple[Form, ...]:
    """Changes that apply to any of the messages and that the settings allow."""
    forms: list[Form] = []
    if any(message["content"] is None for message in messages):
        forms.append("empty_content")
    given = list(arguments_of(messages))
    if decode_arguments and any(isinstance(arguments, str) for arguments in given):
        forms.append("decode_arguments")
    if join_text_parts and any(is_text_parts(message["content"]) for message in messages):
        forms.append("join_text_parts")
    if any(message["content"] == "" and message.get("tool_calls") for message in messages):
        forms.append("null_content")
    if decode_arguments and any(isinstance(arguments, Mapping) for arguments in given):
        forms.append("encode_arguments")
    if decode_arguments and any(
        not isinstance(value, str) for one in given for value in _values(decoded(one))
    ):
        forms.append("encode_values")
    if any(message["role"] == "tool" and _is_data(message["content"]) for message in messages):
        forms.append("encode_results")
    return tuple(forms)


def normalise(conversation: Conversation) -> Conversation:
    """The conversation in the form that most templates accept."""
    return changed(conversation, [form for form in conversation.forms if form in _USUAL])


def choices(forms: Sequence[Form]) -> Iterator[tuple[Form, ...]]:
    """All sets of changes that may be made together, those of the fewest first."""
    for count in range(len(forms) + 1):
        for chosen in combinations(forms, count):
            if not any(len(apart.intersection(chosen)) > 1 for apart in _APART):
                yield chosen


def changed(conversation: Conversation, chosen: Sequence[Form]) -> Conversation:
    """The conversation after some changes."""
    if not chosen:
        return conversation
    messages, weights = list(conversation.messages), list(conversation.message_weights)
    for form in chosen:
        pairs = [
            _CHANGES[form](message, own) for message, own in zip(messages, weights, strict=True)
        ]
        messages, weights = [message for message, _ in pairs], [own for _, own in pairs]
    return replace(
        conversation,
        messages=tuple(messages),
        message_weights=tuple(weights),
        forms=(),
        changed=tuple(chosen),
    )


def is_text_parts(content: object) -> bool:
    """Whether a content is a list with only text parts."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def is_text(message: JsonMapping) -> bool:
    """Whether a message's content is one text that says something."""
    content = message["content"]
    return isinstance(content, str) and not content.isspace() and bool(content)


def arguments_of(messages: Iterable[JsonMapping]) -> Iterator[Any]:
    """The arguments of all calls, in order."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return ((call.get("function") or {}).get("arguments") for call in calls)


def decoded(arguments: object) -> JsonValue:
    """The object in a JSON text; the text itself if it holds none."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def list_ranges(weights: MessageWeights, content: Sequence[JsonMapping]) -> MessageWeights:
    """Weights with the ranges of one text as ranges of the parts that it was joined from."""
    ranges = []
    for one in weights.ranges:
        if one.field != "content":
            ranges.append(one)
            continue
        for place, begin, end in _places(content):
            low, high = max(one.begin, begin) - begin, min(one.end, end) - begin
            if low < high:
                ranges.append(
                    Range(field=f"content.{place}.text", begin=low, end=high, weight=one.weight)
                )
    return replace(weights, ranges=tuple(sorted(ranges, key=lambda one: (one.field, one.begin))))


def _empty_content(message: Message, weights: MessageWeights) -> tuple[Message, MessageWeights]:
    return ({**message, "content": ""} if message["content"] is None else message), weights


def _null_content(message: Message, weights: MessageWeights) -> tuple[Message, MessageWeights]:
    if message["content"] == "" and message.get("tool_calls"):
        return {**message, "content": None}, weights
    return message, weights


def _with_arguments(change: Callable[[Any], Any]) -> _Change:
    """A change of the arguments of all calls."""

    def apply(message: Message, weights: MessageWeights) -> tuple[Message, MessageWeights]:
        if not message.get("tool_calls"):
            return message, weights
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": change(call["function"].get("arguments")),
                },
            }
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}, weights

    return apply


def _encoded(value: object) -> Any:
    """An object or list as JSON text."""
    return (
        json.dumps(value, ensure_ascii=False)
        if isinstance(value, Mapping | list | tuple)
        else value
    )


def _with_texts(arguments: object) -> object:
    """Arguments with JSON text for each value that is no text."""
    given = decoded(arguments)
    if not isinstance(given, Mapping):
        return arguments
    others = {key: value for key, value in given.items() if not isinstance(value, str)}
    return {
        **given,
        **{key: json.dumps(value, ensure_ascii=False) for key, value in others.items()},
    }


def _values(arguments: object) -> Iterable[Any]:
    return arguments.values() if isinstance(arguments, Mapping) else ()


def _encode_results(message: Message, weights: MessageWeights) -> tuple[Message, MessageWeights]:
    if message["role"] == "tool" and _is_data(message["content"]):
        return {**message, "content": _encoded(message["content"])}, weights
    return message, weights


def _is_data(content: object) -> bool:
    """Whether a content is an object or a list that is not one of parts."""
    if isinstance(content, list | tuple):
        return not all(
            isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content
        )
    return isinstance(content, Mapping)


def _join_text_parts(message: Message, weights: MessageWeights) -> tuple[Message, MessageWeights]:
    content = message["content"]
    if not is_text_parts(content):
        return message, weights
    begins = {f"content.{place}.text": begin for place, begin, _ in _places(content)}
    ranges = [
        one
        if one.field not in begins
        else replace(
            one,
            field="content",
            begin=one.begin + begins[one.field],
            end=one.end + begins[one.field],
        )
        for one in weights.ranges
    ]
    ranges.sort(key=lambda one: (one.field, one.begin))
    joined = {**message, "content": "".join(part["text"] for part in content)}
    return joined, replace(weights, ranges=tuple(ranges)) if weights.ranges else weights


def _wrap_text(message: Message, weights: MessageWeights) -> tuple[Message, MessageWeights]:
    if not is_text(message):
        return message, weights
    wrapped = {**message, "content": [{"type": "text", "text": message["content"]}]}
    ranges = [
        replace(one, field="content.0.text") if one.field == "content" else one
        for one in weights.ranges
    ]
    return wrapped, replace(weights, ranges=tuple(ranges)) if ranges else weights


def _places(content: Sequence[JsonMapping]) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) of each part in the joined text."""
    at = 0
    for place, part in enumerate(content):
        yield place, at, at + len(part["text"])
        at += len(part["text"])


_CHANGES: Mapping[Form, _Change] = {
    "empty_content": _empty_content,
    "null_content": _null_content,
    "decode_arguments": _with_arguments(decoded),
    "encode_arguments": _with_arguments(_encoded),
    "encode_values": _with_arguments(_with_texts),
    "encode_results": _encode_results,
    "join_text_parts": _join_text_parts,
    "wrap_text": _wrap_text,
}
