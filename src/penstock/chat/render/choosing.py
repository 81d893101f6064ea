"""Chooses the form of a conversation for a template: the first in which everything is written as it is.

A template first gets what the record has. If it raises, or loses or changes something (`structure.py`: calls, their
arguments, results, empty contents; here: texts in parts), other forms are tried, those with the fewest changes first.
The choice depends only on conversation and template. If no form is right, the one with the least loss is taken, and the
certificate reports what is lost.

Arguments as text need more: a template may print them as they are where an object would be written in another syntax
(`call:weather{{"city": "Oslo"}}`). So text is taken only where the object would give the same apart from JSON's white
space, or where the template prints an object as Python does, or raises on one. The same holds for values as text.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.chat.records.conversation import Conversation, Form
from penstock.chat.render.forms import arguments_of, changed, choices, decoded, is_text, is_text_parts
from penstock.chat.render.structure import Lost, find_lost
from penstock.chat.render.template import Rendered, Template
from penstock.chat.render.template_output import path_of
from penstock.core.errors import RecordError

_FORMS: Mapping[str, frozenset[Form]] = {
    **dict.fromkeys(("content", "stop"), frozenset[Form](("empty_content", "null_content"))),
    "arguments": frozenset(("decode_arguments", "encode_arguments", "encode_values")),
    "result": frozenset(("encode_results",)),
    "parts": frozenset(("join_text_parts", "wrap_text")),
}
"""What may be lost → changes that may help."""
_NAMES: Mapping[Form, str] = {
    "empty_content": "an empty content for null",
    "null_content": "a null content for an empty one",
    "encode_arguments": "arguments as JSON text",
    "encode_values": "values as JSON text",
    "encode_results": "results as JSON text",
    "wrap_text": "texts as parts",
}
_OUTSIDE_TEXTS = re.compile(r'("(?:\\.|[^"\\])*")|\s+')
_DECODER = json.JSONDecoder()


@final
@dataclass(frozen=True, slots=True)
class _Try:
    """A form that the template rendered."""

    conversation: Conversation
    rendered: Rendered
    loses_texts: bool

    @property
    def kinds(self) -> list[str]:
        """What is lost."""
        return [lost.where for lost in self.rendered.lost] + ["parts"] * self.loses_texts

    @property
    def rank(self) -> int:
        """Smaller is better."""
        return sum(1 + 2 * lost.is_whole for lost in self.rendered.lost) + self.loses_texts


def render_form(
    conversation: Conversation, template: Template, stops: Collection[str] = ()
) -> tuple[Conversation, Rendered]:
    """The form of a conversation that the template accepts, and its text, with what is lost in it.

    Args:
        conversation: As read.
        template: The template.
        stops: Texts that end a generation.

    Raises:
        RecordError: The template accepts none; names the settings that may help.
    """
    if template.reads_parts and (texts := [n for n, one in enumerate(conversation.messages) if is_text(one)]):
        if not conversation.forms and (rendered := _all_written(conversation, template, texts)) is not None:
            return conversation, _with_lost(conversation, rendered, stops)
        conversation = replace(conversation, forms=(*conversation.forms, "wrap_text"))
    best: _Try | None = None
    helpful: set[Form] = set()
    failures: list[RecordError] = []
    for chosen in choices(conversation.forms):
        if best is not None and not helpful.issuperset(chosen):
            continue
        form = changed(conversation, chosen)
        try:
            rendered = _render(form, template)
        except RecordError as error:
            failures.append(error)
            continue
        rendered = _with_lost(form, rendered, stops, of_objects=_as_objects(conversation, form, template))
        found = _Try(
            replace(form, forms=()) if form.forms else form, rendered, _loses_texts(form, rendered, template.reads_parts)
        )
        if not found.kinds:
            return found.conversation, rendered
        best = found if best is None or found.rank < best.rank else best
        helpful.update(chosen, *(_FORMS[kind] for kind in found.kinds))
    if best is not None:
        return best.conversation, best.rendered
    raise RecordError(f"{failures[0]}{_tried(conversation, failures)}{_cures(conversation, failures)}") from failures[0]


def _render(conversation: Conversation, template: Template) -> Rendered:
    return template.render(conversation.messages, tools=conversation.tools, **conversation.variables)


def _with_lost(
    conversation: Conversation, rendered: Rendered, stops: Collection[str], of_objects: str | None = None
) -> Rendered:
    """The text with what is lost in it; `of_objects`: what the template writes of arguments that are objects."""
    lost = tuple(find_lost(conversation.messages, rendered, stops))
    if of_objects is not None and not lost:
        lost = tuple(_unlike_objects(conversation, rendered, of_objects))
    return replace(rendered, lost=lost) if lost else rendered


def _all_written(conversation: Conversation, template: Template, texts: Sequence[int]) -> Rendered | None:
    """The text of a conversation as it is, if the template writes the content of these messages: nearly always."""
    try:
        rendered = _render(conversation, template)
    except RecordError:
        return None
    written = {run[1] for run in rendered.runs if run[2] == "content"}
    return rendered if written.issuperset(texts) else None


def _as_objects(conversation: Conversation, form: Conversation, template: Template) -> str | None:
    """What the template writes where arguments are objects, if those of a form are texts.

    None: it raises on objects, or Jinja escapes what it writes of them.
    """
    texts = any(isinstance(arguments, str) for arguments in arguments_of(form.messages))
    if not (texts and "decode_arguments" in conversation.forms) and not {"encode_arguments", "encode_values"} & set(
        form.changed
    ):
        return None
    others: list[Form] = [one for one in form.changed if one not in _FORMS["arguments"]]
    objects = changed(replace(conversation, changed=()), ["decode_arguments", *others])
    try:
        if not template.may_escape:
            return template.render_plain(objects.messages, tools=objects.tools, **objects.variables)
        rendered = _render(objects, template)
    except RecordError:
        return None
    return None if rendered.escaped else rendered.text


def _unlike_objects(conversation: Conversation, rendered: Rendered, of_objects: str) -> Iterator[Lost]:
    """Arguments as text that are not what the template writes for the same arguments as objects."""
    texts = _texts_of_arguments(conversation)
    at = other = 0
    text = rendered.text
    for begin, end, message, value in _places(rendered, texts):
        literal = text[at:begin]
        after = _end_of(value, text[begin:end], of_objects, other + len(literal))
        if not of_objects.startswith(literal, other) or after is None:
            yield Lost(message, "arguments", "the template writes arguments that are text in another way than objects")
            return
        at, other = end, after
    if text[at:] != of_objects[other:]:
        message = next(iter(texts))[0]
        yield Lost(message, "arguments", "the template writes arguments that are text in another way than objects")


def _texts_of_arguments(conversation: Conversation) -> dict[tuple[int, str], Any]:
    """(message, field) → what the text stands for, of all arguments, or values of arguments, that are JSON text."""
    found: dict[tuple[int, str], Any] = {}
    for number, message in enumerate(conversation.messages):
        for place, call in enumerate(message.get("tool_calls") or ()):
            arguments, path = call["function"].get("arguments"), f"tool_calls.{place}.function.arguments"
            if isinstance(arguments, str):
                found[number, path] = decoded(arguments)
            elif "encode_values" in conversation.changed:
                found |= {(number, path_of(path, key)): value for key, value in arguments.items()}
    return found


def _places(rendered: Rendered, fields: Mapping[tuple[int, str], Any]) -> Iterator[tuple[int, int, int, Any]]:
    """(begin, end, message, value) of each field that is written as one stretch."""
    at = 0
    for length, message, field, offset, _, _ in rendered.runs:
        if offset == 0 and (message, field) in fields:
            yield at, at + length, message, fields[message, field]
        at += length


def _end_of(value: Any, written: str, text: str, at: int) -> int | None:
    """Where a value ends that begins at `at`: as written, as JSON with other white space, or as Python prints it."""
    for spelling in (written, str(value)):
        if text.startswith(spelling, at):
            return at + len(spelling)
    try:
        _, end = _DECODER.raw_decode(text, at)
    except ValueError:
        return None
    return end if _compact(text[at:end]) == _compact(written) else None


def _compact(text: str) -> str:
    return _OUTSIDE_TEXTS.sub(lambda found: found[1] or "", text)


def _loses_texts(conversation: Conversation, rendered: Rendered, reads_parts: bool) -> bool:
    """Whether a template left out a text that may be given in another form: alone or as a part."""
    if not reads_parts and not any(is_text_parts(message["content"]) for message in conversation.messages):
        return False
    written = {run[1:3] for run in rendered.runs}
    for number, message in enumerate(conversation.messages):
        if reads_parts and is_text(message):
            if (number, "content") not in written:
                return True
            continue
        parts = message["content"] if is_text_parts(message["content"]) else ()
        if any(part["text"].strip() and (number, f"content.{i}.text") not in written for i, part in enumerate(parts)):
            return True
    return False


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
    arguments = list(arguments_of(conversation.messages))
    cures = []
    if any(isinstance(one, str) for one in arguments) and "decode_arguments" not in conversation.forms:
        cures.append("decode_arguments: true gives it the arguments of tool calls as objects")
    parts = any(is_text_parts(message.get("content")) for message in conversation.messages)
    if parts and "join_text_parts" not in conversation.forms:
        cures.append("join_text_parts: true gives it one text for the parts of a content")
    return "".join(f"; {cure}" for cure in cures)
