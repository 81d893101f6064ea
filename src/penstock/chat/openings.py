"""What the prompt supplies of a reply: the end of what the template writes when it is asked for that reply.

The template is asked for each reply anew, with the messages before it, so the answer depends on template and
conversation alone. Costs: one plain render for each reply.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.chat.template import LABELS, Template
from penstock.errors import RecordError

BORDERS = frozenset(" \n\t>]}:")
"""Characters behind which a marker or a word has ended."""
_PROBES = (("Q", "A"), ([{"type": "text", "text": "Q"}], [{"type": "text", "text": "A"}]))


class Opening(NamedTuple):
    """How a reply is prompted for."""

    text: str
    """What the generation prompt adds for it to the messages before it."""
    end: int
    """One after the last character of the rendered text that the prompt supplies."""
    difference: str = ""
    """How the prompt differs from what stands before the reply; empty where it does not, or cannot be known."""


class Asked(NamedTuple):
    """One reply in a rendered conversation, and what is before it."""

    template: Template
    text: str
    """The whole conversation."""
    begin: int
    """Where the template begins to write the reply, its header included."""
    words: int
    """Where its first word is, or its end."""
    end: int
    floor: int
    """One after the last word of the messages before it."""
    before: Sequence[Mapping[str, Any]]
    """Those messages."""
    tools: Sequence[Any] | None
    variables: Mapping[str, Any]


def find_opening(asked: Asked) -> Opening:
    """How one reply is prompted for, and what of that stands in the text."""
    text, begin, end = asked.text, asked.begin, asked.end
    prompt = render_prompt(asked.template, asked.before, asked.tools, asked.variables)
    if prompt is None:
        opening = usual_opening(asked.template, asked.tools, asked.variables)
        return Opening(opening, begin + supplied(text[begin : asked.words], opening))
    if asked.floor <= len(prompt) < begin and text.startswith(prompt) and text[len(prompt) : begin].isspace():
        return Opening("", len(prompt))
    opening = prompt[begin:] if prompt[:begin] == text[:begin] else _tail(asked, prompt)
    # A template that knows no generation prompt may write one at the end of every text, or none.
    if "add_generation_prompt" not in asked.template.source and not supplied(text[begin:end], opening):
        opening = _written_before(asked.template, asked.variables)
    if not text.startswith(opening, begin, end):
        opening = _longest_end(prompt, text[begin : asked.words]) or opening
    last = begin + (len(opening) if text.startswith(opening, begin, end) else supplied(text[begin:end], opening))
    return Opening(opening, last, _difference_before(prompt.removesuffix(opening), prompt, text, begin))


def render_prompt(
    template: Template, before: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
) -> str | None:
    """The text that prompts for a reply after some messages; None where the template refuses those."""
    try:
        return template.render_plain(before, tools=tools, add_generation_prompt=True, **variables)
    except RecordError:
        return None


def usual_opening(template: Template, tools: Sequence[Any] | None, variables: Mapping[str, Any]) -> str:
    """What the generation prompt adds to a plain question; where it adds nothing, what stands before a plain answer."""
    for question, _ in _PROBES:
        messages = [{"role": "user", "content": question}]
        prompt = render_prompt(template, messages, tools, variables)
        if prompt is not None:
            whole = template.render_plain(messages, tools=tools, **variables)
            return prompt.removeprefix(whole) if prompt != whole else _written_before(template, variables)
    return ""


def supplied(text: str, opening: str) -> int:
    """How many characters of a turn the opening supplies: all of it but for whitespace, or the markers both have."""
    same = _same_but_for_space(text, opening)
    if same is not None:
        return same
    same = common_length(text, opening)
    # "<" may be the beginning of a marker on both sides; whole markers and words are supplied, or not.
    while same and text[same - 1] not in BORDERS:
        same -= 1
    return same


def common_length(one: str, other: str) -> int:
    """How many characters two texts both begin with."""
    shorter = min(len(one), len(other))
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), shorter)


def difference(one: str, other: str) -> str:
    """Where two texts part."""
    same = common_length(one, other)
    return f"{one[same : same + 30]!r} where it now writes {other[same : same + 30]!r}"


def _difference_before(context: str, prompt: str, text: str, begin: int) -> str:
    return "" if context == text[:begin] else difference(prompt, text)


def _longest_end(prompt: str, turn: str) -> str:
    """The longest end of a prompt with which a turn begins; empty where that is nothing but whitespace."""
    for length in range(min(len(prompt), len(turn)), 0, -1):
        if turn.startswith(prompt[-length:]):
            return prompt[-length:] if prompt[-length:].strip() else ""
    return ""


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


def _tail(asked: Asked, prompt: str) -> str:
    """What the prompt writes behind all turns, where the text before the reply is not that of the prompt."""
    rendered = asked.template.render(asked.before, tools=asked.tools, add_generation_prompt=True, **asked.variables)
    at = end = 0
    for length, _, _, _, owner, _ in rendered.runs:
        at += length
        end = at if owner is not None and owner >= 0 else end
    return prompt[end:]


def _written_before(template: Template, variables: Mapping[str, Any]) -> str:
    """What a template without generation prompt writes between a question and the words of the answer."""
    for question, answer in _PROBES:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            rendered = template.render(messages, **variables)
        except RecordError:
            continue
        header, at = "", 0
        for length, message, field, _, owner, _ in rendered.runs:
            if owner == 1 and message == 1 and field not in LABELS:
                return header if header.strip() else ""
            header += rendered.text[at : at + length] if owner == 1 else ""
            at += length
    return ""
