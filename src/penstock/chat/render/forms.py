"""Forms of a conversation: first as the record has it, then others if the template cannot render that.

Chat templates accept different inputs. For a message with only tool calls, some want a null content, others a text.
Some want the arguments of tool calls as text, others as objects; some a list of parts (LLaVA), others one text.
A template first gets what the record has. If it raises or changes what it was given (a list in Python's notation,
arguments as a quoted JSON string, the word None, nothing at all), other forms are tried, those with the fewest changes
first. The choice depends only on conversation and template. A conversation with one form costs nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from penstock.chat.records.conversation import Conversation, Form, MessageWeights, Range
from penstock.chat.render.template import Rendered, Template
from penstock.chat.render.traced_text import LITERAL
from penstock.core.errors import RecordError

_Message = dict[str, Any]


def forms_of(messages: Sequence[Mapping[str, Any]], decode_arguments: bool, join_text_parts: bool) -> tuple[Form, ...]:
    """Changes that apply to any of the messages and that the settings allow."""
    forms: list[Form] = []
    if any(message["content"] is None for message in messages):
        forms.append("empty_content")
    if decode_arguments and any(isinstance(arguments, str) for arguments in _arguments(messages)):
        forms.append("decode_arguments")
    if join_text_parts and any(is_text_parts(message["content"]) for message in messages):
        forms.append("join_text_parts")
    return tuple(forms)


def normalise(conversation: Conversation) -> Conversation:
    """The conversation in the form that most templates accept: with all its possible changes made."""
    return _changed(conversation, conversation.forms)


def render_form(conversation: Conversation, template: Template) -> tuple[Conversation, Rendered]:
    """The form of a conversation that the template accepts, and its text.

    Raises:
        RecordError: The template accepts none; names the settings that may help.
    """
    if template.reads_parts and (texts := [n for n, one in enumerate(conversation.messages) if _is_text(one)]):
        if not conversation.forms and (rendered := _all_written(conversation, template, texts)) is not None:
            return conversation, rendered
        conversation = replace(conversation, forms=(*conversation.forms, "wrap_text"))
    first: tuple[Conversation, Rendered] | None = None
    failures: list[RecordError] = []
    for chosen in _choices(conversation.forms):
        form = _changed(conversation, chosen)
        try:
            rendered = template.render(form.messages, tools=form.tools, **form.variables)
        except RecordError as error:
            failures.append(error)
            continue
        taken = replace(form, forms=()) if form.forms else form
        if not conversation.forms or _is_faithful(form, rendered, strings=template.reads_parts):
            return taken, rendered
        first = first or (taken, rendered)
    if first is not None:
        return first
    raise RecordError(f"{failures[0]}{_tried(conversation, failures)}{_cures(conversation, failures)}") from failures[0]


def _all_written(conversation: Conversation, template: Template, texts: Sequence[int]) -> Rendered | None:
    """The text of a conversation as it is, if the template writes the content of these messages: nearly always."""
    try:
        rendered = template.render(conversation.messages, tools=conversation.tools, **conversation.variables)
    except RecordError:
        return None
    written = {run[1] for run in rendered.runs if run[2] == "content"}
    return rendered if written.issuperset(texts) else None


def is_text_parts(content: Any) -> bool:
    """Whether a content is a list with only text parts."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def list_ranges(weights: MessageWeights, content: Sequence[Mapping[str, Any]]) -> MessageWeights:
    """Weights with the ranges of one text as ranges of the parts that it was joined from."""
    ranges = []
    for one in weights.ranges:
        if one.field != "content":
            ranges.append(one)
            continue
        for place, begin, end in _places(content):
            low, high = max(one.begin, begin) - begin, min(one.end, end) - begin
            if low < high:
                ranges.append(Range(field=f"content.{place}.text", begin=low, end=high, weight=one.weight))
    return replace(weights, ranges=tuple(sorted(ranges, key=lambda one: (one.field, one.begin))))


def _choices(forms: Sequence[Form]) -> Iterator[tuple[Form, ...]]:
    for count in range(len(forms) + 1):
        yield from combinations(forms, count)


def _changed(conversation: Conversation, chosen: Sequence[Form]) -> Conversation:
    if not chosen:
        return conversation
    messages, weights = list(conversation.messages), list(conversation.message_weights)
    for form in chosen:
        pairs = [_CHANGES[form](message, own) for message, own in zip(messages, weights, strict=True)]
        messages, weights = [message for message, _ in pairs], [own for _, own in pairs]
    return replace(
        conversation, messages=tuple(messages), message_weights=tuple(weights), forms=(), changed=tuple(chosen)
    )


def _empty_content(message: _Message, weights: MessageWeights) -> tuple[_Message, MessageWeights]:
    return ({**message, "content": ""} if message["content"] is None else message), weights


def _decode_arguments(message: _Message, weights: MessageWeights) -> tuple[_Message, MessageWeights]:
    if not any(isinstance(arguments, str) for arguments in _arguments([message])):
        return message, weights
    calls = [
        {**call, "function": {**call["function"], "arguments": _decoded(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}, weights


def _join_text_parts(message: _Message, weights: MessageWeights) -> tuple[_Message, MessageWeights]:
    content = message["content"]
    if not is_text_parts(content):
        return message, weights
    begins = {f"content.{place}.text": begin for place, begin, _ in _places(content)}
    ranges = [
        one
        if one.field not in begins
        else replace(one, field="content", begin=one.begin + begins[one.field], end=one.end + begins[one.field])
        for one in weights.ranges
    ]
    ranges.sort(key=lambda one: (one.field, one.begin))
    joined = {**message, "content": "".join(part["text"] for part in content)}
    return joined, replace(weights, ranges=tuple(ranges)) if weights.ranges else weights


def _wrap_text(message: _Message, weights: MessageWeights) -> tuple[_Message, MessageWeights]:
    if not _is_text(message):
        return message, weights
    wrapped = {**message, "content": [{"type": "text", "text": message["content"]}]}
    ranges = [replace(one, field="content.0.text") if one.field == "content" else one for one in weights.ranges]
    return wrapped, replace(weights, ranges=tuple(ranges)) if ranges else weights


def _is_text(message: Mapping[str, Any]) -> bool:
    """Whether a message's content is one text that says something."""
    content = message["content"]
    return isinstance(content, str) and not content.isspace() and bool(content)


_CHANGES: Mapping[Form, Callable[[_Message, MessageWeights], tuple[_Message, MessageWeights]]] = {
    "empty_content": _empty_content,
    "decode_arguments": _decode_arguments,
    "join_text_parts": _join_text_parts,
    "wrap_text": _wrap_text,
}
_NAMES: Mapping[Form, str] = {"empty_content": "an empty content for null", "wrap_text": "texts as parts"}


def _arguments(messages: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return ((call.get("function") or {}).get("arguments") for call in calls)


def _decoded(arguments: Any) -> Any:
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


def _places(content: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) of each part in the joined text."""
    at = 0
    for place, part in enumerate(content):
        yield place, at, at + len(part["text"])
        at += len(part["text"])


def _is_faithful(conversation: Conversation, rendered: Rendered, *, strings: bool) -> bool:
    """Whether a template wrote what it was given, for everything that has another form; `strings`: texts have one."""
    nulls = {number for number, message in enumerate(conversation.messages) if message["content"] is None}
    written: dict[tuple[int, str], bool] = {}
    at = 0
    for length, message, field, offset, owner, _ in rendered.runs:
        if message == LITERAL and owner in nulls and "None" in rendered.text[at : at + length]:
            return False
        key = message, field
        written[key] = written.get(key, True) and offset >= 0
        at += length
    return all(
        _texts_written(number, message, written, strings) and _calls_written(number, message, written)
        for number, message in enumerate(conversation.messages)
    )


def _texts_written(number: int, message: _Message, written: Mapping[tuple[int, str], bool], strings: bool) -> bool:
    if strings and _is_text(message):
        return (number, "content") in written
    parts = message["content"] if is_text_parts(message["content"]) else ()
    return all(not part["text"].strip() or (number, f"content.{i}.text") in written for i, part in enumerate(parts))


def _calls_written(number: int, message: _Message, written: Mapping[tuple[int, str], bool]) -> bool:
    """Whether tool calls were written, and arguments that are text unchanged; an empty one cannot be checked."""
    called = any(key[0] == number and key[1].startswith("tool_calls") for key in written)
    return (called or not message.get("tool_calls")) and all(
        # A template that expects an object writes nothing of a text.
        written.get((number, f"tool_calls.{place}.function.arguments"), not arguments.strip("{} \n"))
        for place, arguments in enumerate(_arguments([message]))
        if isinstance(arguments, str)
    )


def _tried(conversation: Conversation, failures: Sequence[RecordError]) -> str:
    """Error text about the other forms; the last failure is the form with all changes."""
    if not conversation.forms:
        return ""
    names = " and ".join(_NAMES.get(form, form) for form in conversation.forms)
    if str(failures[0]) == str(failures[-1]):
        return f"; with {names} as well"
    return f"; with {names}: {str(failures[-1]).partition(': ')[2]}"


def _cures(conversation: Conversation, failures: Sequence[RecordError]) -> str:
    """Error text about the settings that may help."""
    arguments = list(_arguments(conversation.messages))
    cures = []
    if any(isinstance(one, str) for one in arguments) and "decode_arguments" not in conversation.forms:
        cures.append("decode_arguments: true gives it the arguments of tool calls as objects")
    if any(isinstance(one, dict) for one in arguments) and '"dict"' in str(failures[-1]):
        cures.append("the arguments of tool calls are objects; if the template wants text, give them as JSON text")
    parts = any(is_text_parts(message.get("content")) for message in conversation.messages)
    if parts and "join_text_parts" not in conversation.forms:
        cures.append("join_text_parts: true gives it one text for the parts of a content")
    return "".join(f"; {cure}" for cure in cures)
