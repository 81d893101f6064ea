"""The turns of a rendered conversation: what the prompt supplies of each, and what the model must produce.

A turn is the text that the template wrote while it was at one message. It falls into the opening, which the prompt
supplies (the generation prompt: "<|im_start|>assistant\\n"), what the model produces (its words, the wrappers of tool
calls and thinking, the terminator), and whitespace after it.

The opening is found by rendering: it is what `add_generation_prompt` adds to the messages before the turn. Such a
render is made once for each kind of situation (role of the message before, tools or not), not for each turn. Templates
without generation prompt are asked what they write before the words of an assistant. Costs: a few microseconds a turn.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from penstock.chat.template import Rendered, Template
from penstock.errors import RecordError

Span = tuple[int, int]
_LABELS = ("role", "name", "tool_call_id", "type")
"""Fields of a message that are not its words."""
_BORDERS = frozenset(" \n\t>]}:")


class Turn(NamedTuple):
    """One message as the template wrote it; all positions are characters of the rendered text."""

    message: int
    pieces: tuple[Span, ...]
    """Where it is written; more than one where a template writes other messages in between."""
    produced: tuple[Span, ...]
    """What the model must produce, the terminator included."""
    words_end: int
    """One after the last character of the message's own words; the beginning of what is produced if there are none."""
    opening: str
    """What the generation prompt would supply."""
    supplied: str
    """What of it stands there: the same, or shorter where the template writes turns otherwise than it prompts."""

    @property
    def end(self) -> int:
        """One after the last character that the model produces."""
        return self.produced[-1][1] if self.produced else self.words_end


def find_turns(
    template: Template,
    rendered: Rendered,
    messages: Sequence[Mapping[str, Any]],
    prompted: Sequence[int],
    *,
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> dict[int, Turn]:
    """The turn of each message that was written.

    Args:
        template: What rendered it.
        rendered: The conversation.
        messages: Its messages.
        prompted: Messages before which the template prompts: those of the assistant.
        tools, variables: As in `Template.render`.
    """
    pieces: dict[int, list[Span]] = {}
    words: dict[int, list[Span]] = {}
    at = 0
    for length, message, field, _, owner, _ in rendered.runs:
        if owner is not None and owner >= 0:
            if owner not in pieces:
                pieces[owner], words[owner] = [(at, at + length)], []
            elif pieces[owner][-1][1] == at:
                pieces[owner][-1] = (pieces[owner][-1][0], at + length)
            else:
                pieces[owner].append((at, at + length))
            if message >= 0 and (message != owner or not _is_label(field)):
                words[owner].append((at, at + length))
        at += length
    turns = {}
    for message, spans in pieces.items():
        opening, begin = "", spans[0][0]
        own = words[message]
        if message in prompted:
            opening = _opening(template, rendered.text, begin, messages[:message], tools, variables)
            if rendered.text.startswith(opening, begin, spans[0][1]):
                begin += len(opening)
            else:
                begin += _supplied(rendered.text[begin : spans[0][1]], opening)
        elif own:
            begin = own[0][0]
        turns[message] = _turn(rendered.text, message, spans, own, begin, opening)
    return turns


@cache
def _is_label(field: str) -> bool:
    return field.rpartition(".")[2] in _LABELS


def _turn(text: str, message: int, spans: list[Span], own: list[Span], begin: int, opening: str) -> Turn:
    """Cut a turn that is produced from `begin` on."""
    words_end = max([end for _, end in own if end > begin], default=begin)
    last_begin, last_end = spans[-1]
    end = max(last_begin + len(text[last_begin:last_end].rstrip()), min(words_end, last_end))
    produced = [(max(first, begin), last) for first, last in spans[:-1]] + [(max(last_begin, begin), end)]
    return Turn(
        message=message,
        pieces=tuple(spans),
        produced=tuple((first, last) for first, last in produced if first < last),
        words_end=words_end,
        opening=opening,
        supplied=text[spans[0][0] : begin],
    )


def _supplied(text: str, opening: str) -> int:
    """How many characters of a turn the opening supplies, when it is not all there."""
    same = _same_but_for_space(text, opening)
    if same is not None:
        return same
    same = 0
    while same < min(len(text), len(opening)) and text[same] == opening[same]:
        same += 1
    # "<" may be the beginning of a marker on both sides; whole markers and words are supplied, or not.
    while same and text[same - 1] not in _BORDERS:
        same -= 1
    return same


def _same_but_for_space(text: str, opening: str) -> int | None:
    """Where the opening ends in a text that begins with it, whitespace aside; None when it does not."""
    at = 0
    for character in opening.split():
        at += len(text[at:]) - len(text[at:].lstrip())
        if not text.startswith(character, at):
            return None
        at += len(character)
    for space in opening[len(opening.rstrip()) :]:
        if not text.startswith(space, at):
            break
        at += 1
    return at


def _opening(
    template: Template,
    text: str,
    begin: int,
    before: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
) -> str:
    """What the generation prompt supplies after the messages `before`; `begin`: where the turn begins in `text`."""
    last = before[-1] if before else {}
    situation = (len(before) > 0, last.get("role"), bool(last.get("tool_calls")), tools is not None, repr(variables))
    known = template.openings
    if situation not in known:
        known[situation] = _ask(template, text, begin, before, tools, variables)
    return known[situation]


def _ask(
    template: Template,
    text: str,
    begin: int,
    before: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
) -> str:
    try:
        prompt = template.render(before, tools=tools, add_generation_prompt=True, **variables)
    except RecordError:
        return ""
    opening = prompt.text[begin if prompt.text[:begin] == text[:begin] else _end_of_turns(prompt) :]
    # A template that knows no generation prompt may write one at the end of every text, or none.
    if "add_generation_prompt" not in template.source and not _supplied(text[begin:], opening):
        return _written_before(template, variables)
    return opening


def _end_of_turns(rendered: Rendered) -> int:
    at = end = 0
    for length, _, _, _, owner, _ in rendered.runs:
        at += length
        end = at if owner is not None and owner >= 0 else end
    return end


def _written_before(template: Template, variables: Mapping[str, Any]) -> str:
    """What a template without generation prompt writes between a question and the words of the answer."""
    for question, answer in (("Q", "A"), ([{"type": "text", "text": "Q"}], [{"type": "text", "text": "A"}])):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            rendered = template.render(messages, **variables)
        except RecordError:
            continue
        header, at = "", 0
        for length, message, field, _, owner, _ in rendered.runs:
            if owner == 1 and message == 1 and field not in _LABELS:
                return header if header.strip() else ""
            header += rendered.text[at : at + length] if owner == 1 else ""
            at += length
    return ""
