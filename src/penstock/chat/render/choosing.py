"""Chooses the form of a conversation for a template: the first in which everything is written as it
is.

A template first gets what the record has. If it raises, or loses or changes something
(`structure.py`: calls, their arguments, results, empty contents; here: texts in parts), other forms
are tried, those with the fewest changes first. The choice depends only on conversation and
template. If no form is right, the one with the least loss is taken, and the certificate reports
what is lost.

Arguments as text need more: a template may print them as they are where an object would be written
in another syntax (`call:weather{{"city": "Oslo"}}`). So text is taken only where the object would
give the same apart from JSON's white space, or where the template prints an object as Python does,
or raises on one. The same holds for values as text.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.chat.records.conversation import Conversation, Form
from penstock.chat.render.forms import arguments_of, changed, choices, is_text, is_text_parts
from penstock.chat.render.refusals import refusal
from penstock.chat.render.structure import find_lost
from penstock.chat.render.template import Lost, Rendered, Template
from penstock.chat.render.traced_text import path_of
from penstock.core.errors import RecordError

_FORMS: Mapping[str, frozenset[Form]] = {
    **dict.fromkeys(("content", "stop"), frozenset[Form](("empty_content", "null_content"))),
    "arguments": frozenset(("decode_arguments", "encode_arguments", "encode_values")),
    "result": frozenset(("encode_results",)),
    "parts": frozenset(("join_text_parts", "wrap_text")),
}
"""Possible loss → changes that may help."""
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
        """The losses."""
        return [lost.where for lost in self.rendered.lost] + ["parts"] * self.loses_texts

    @property
    def rank(self) -> int:
        """Smaller is better."""
        return sum(lost.weight for lost in self.rendered.lost) + self.loses_texts


def render_form(
    conversation: Conversation,
    template: Template,
    stops: Collection[str] = (),
    *,
    prompted: bool = False,
    likely: Sequence[Form] = (),
) -> tuple[Conversation, Rendered]:
    """The form of a conversation that the template accepts, and its text, with what is lost in it.

    Args:
        conversation: As read.
        template: The template.
        stops: Texts that end a generation.
        prompted: Whether the text ends with the prompt for the next reply.
        likely: The changes that were right for a shorter part of the conversation. If nothing is
            lost with them, no other form is rendered.

    Raises:
        RecordError: The template accepts none; names the settings that may help.
    """
    if template.reads_parts and (
        texts := [n for n, one in enumerate(conversation.messages) if is_text(one)]
    ):
        if (
            not conversation.forms
            and (rendered := _all_written(conversation, template, texts, prompted)) is not None
        ):
            return conversation, _with_lost(conversation, rendered, stops)
        conversation = replace(conversation, forms=(*conversation.forms, "wrap_text"))
    best: _Try | None = None
    helpful: set[Form] = set()
    failures: list[RecordError] = []
    for chosen in sorted(choices(conversation.forms), key=lambda one: one != tuple(likely)):
        if best is not None and not helpful.issuperset(chosen):
            continue
        form = changed(conversation, chosen) if chosen else conversation
        try:
            rendered = _render(form, template, prompted)
        except RecordError as error:
            failures.append(error)
            continue
        objects = _as_objects(conversation, form)
        rendered = _with_lost(form, rendered, stops, objects, template, prompted)
        taken = replace(form, forms=()) if form.forms else form
        found = _Try(taken, rendered, _loses_texts(form, rendered, template.reads_parts))
        if not found.kinds:
            return found.conversation, rendered
        best = found if best is None or found.rank < best.rank else best
        helpful.update(chosen, *(_FORMS[kind] for kind in found.kinds))
    if best is not None:
        return best.conversation, best.rendered
    raise RecordError(refusal(conversation, template, failures)) from failures[0]


def _render(conversation: Conversation, template: Template, prompted: bool) -> Rendered:
    return template.render(
        conversation.messages,
        tools=conversation.tools,
        add_generation_prompt=prompted,
        **conversation.variables,
    )


def _with_lost(
    conversation: Conversation,
    rendered: Rendered,
    stops: Collection[str],
    objects: Conversation | None = None,
    template: Template | None = None,
    prompted: bool = False,
) -> Rendered:
    """The text with what is lost in it; `objects`: the same with arguments that are objects, where
    some are texts.
    """
    lost = tuple(find_lost(conversation.messages, rendered, stops))
    if objects is not None and template is not None and not lost:
        lost = tuple(
            _unlike_objects(conversation, rendered, _plain(objects, template, prompted), objects)
        )
    return replace(rendered, lost=lost) if lost else rendered


def _all_written(
    conversation: Conversation, template: Template, texts: Sequence[int], prompted: bool
) -> Rendered | None:
    """The text of a conversation as it is, if the template writes the content of these messages:
    nearly always.
    """
    try:
        rendered = _render(conversation, template, prompted)
    except RecordError:
        return None
    written = {run[1] for run in rendered.runs if run[2] == "content"}
    return rendered if written.issuperset(texts) else None


def _as_objects(conversation: Conversation, form: Conversation) -> Conversation | None:
    """A form with objects for arguments, if some of its arguments, or their values, are JSON text
    instead.
    """
    given = "decode_arguments" in conversation.forms and any(
        isinstance(one, str) for one in arguments_of(form.messages)
    )
    if not given and {"encode_arguments", "encode_values"}.isdisjoint(form.changed):
        return None
    others: list[Form] = [one for one in form.changed if one not in _FORMS["arguments"]]
    return changed(conversation, ["decode_arguments", *others])


def _unlike_objects(
    conversation: Conversation, rendered: Rendered, of_objects: str | None, objects: Conversation
) -> Iterator[Lost]:
    """Arguments as text that are not what the template writes for the same arguments as objects:
    that conversation, and its text.
    """
    values = dict(_values_as_text(conversation, objects))
    if of_objects is None or not values:
        return
    at = other = 0
    text = rendered.text
    for begin, end, field in _places(rendered, values):
        literal = text[at:begin]
        after = _end_of(values[field], text[begin:end], of_objects, other + len(literal))
        if not of_objects.startswith(literal, other) or after is None:
            break
        at, other = end, after
    if text[at:] != of_objects[other:]:
        reason = "the template writes arguments that are JSON text in another way than objects"
        yield Lost(next(iter(values))[0], "arguments", reason, weight=2)


def _plain(conversation: Conversation, template: Template, prompted: bool) -> str | None:
    """The text of a conversation; None if the template raises, or Jinja escapes some of it."""
    try:
        if not template.may_escape:
            return template.render_plain(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=prompted,
                **conversation.variables,
            )
        rendered = _render(conversation, template, prompted)
    except RecordError:
        return None
    return None if rendered.escaped else rendered.text


def _values_as_text(
    form: Conversation, objects: Conversation
) -> Iterator[tuple[tuple[int, str], Any]]:
    """(message, field) and value of all arguments, or values of arguments, that are JSON text in a
    form.
    """
    for number, (message, other) in enumerate(zip(form.messages, objects.messages, strict=True)):
        calls = zip(message.get("tool_calls") or (), other.get("tool_calls") or (), strict=True)
        for place, (call, same) in enumerate(calls):
            path, given = (
                f"tool_calls.{place}.function.arguments",
                call["function"].get("arguments"),
            )
            value = same["function"].get("arguments")
            if isinstance(given, str):
                yield (number, path), value
            elif "encode_values" in form.changed:
                yield from (((number, path_of(path, key)), value[key]) for key in given)


def _places(
    rendered: Rendered, fields: Collection[tuple[int, str]]
) -> Iterator[tuple[int, int, tuple[int, str]]]:
    """(begin, end, field) of each field where it is written."""
    at = 0
    for length, message, field, offset, _, _ in rendered.runs:
        if offset == 0 and (message, field) in fields:
            yield at, at + length, (message, field)
        at += length


def _end_of(value: object, written: str, text: str, at: int) -> int | None:
    """Where a value ends that begins at `at`: as written, as JSON with other white space, or as
    Python prints it.
    """
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
    if not reads_parts and not any(
        isinstance(message["content"], list) for message in conversation.messages
    ):
        return False
    written = {run[1:3] for run in rendered.runs}
    for number, message in enumerate(conversation.messages):
        if reads_parts and is_text(message):
            if (number, "content") not in written:
                return True
            continue
        parts = message["content"] if is_text_parts(message["content"]) else ()
        if any(
            part["text"].strip() and (number, f"content.{i}.text") not in written
            for i, part in enumerate(parts)
        ):
            return True
    return False
