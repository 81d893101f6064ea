"""The turns of a rendered conversation: what the prompt supplies of each, and what the model must produce.

A turn is the text that the template wrote while it was at one message. It falls into the opening, which the prompt
supplies (the generation prompt: "<|im_start|>assistant\\n"), what the model produces (its words, the wrappers of tool
calls and thinking, the terminator), and whitespace after it. `openings.py` finds the opening by rendering.

A template may write messages where they cannot be followed, such as from a list of texts that it made before. Then the
words of a reply stand in the turn of somebody else, or in none, and the replies are cut out by prompts instead: from
what prompts for a reply to the end of what is written with it. Messages other than replies then have no turn.

All of it is a function of template and conversation; nothing is kept. Costs: one plain render for each reply, and some
microseconds; where replies are cut by prompts, three.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.chat.openings import BORDERS, Asked, common_length, find_opening, render_prompt, usual_opening
from penstock.chat.template import Rendered, Template, Words, is_label
from penstock.errors import RecordError

Span = tuple[int, int]


class Turn(NamedTuple):
    """One message as the template wrote it; all positions are characters of the rendered text."""

    message: int
    pieces: tuple[Span, ...]
    """Where it is written; more than one where a template writes other messages in between."""
    begin: int
    """Where what the model must produce begins."""
    produced: tuple[Span, ...]
    """What the model must produce, the terminator included."""
    words_end: int
    """One after the last character of the message's own words; the beginning of what is produced if there are none."""
    opening: str
    """What the generation prompt would supply."""
    supplied: str
    """What of it stands there: the same, or shorter where the template writes turns otherwise than it prompts."""
    header: str = ""
    """The header of the turn, where the prompt does not supply it."""
    difference: str = ""
    """How the text that prompts for the turn differs from what is before it."""

    @property
    def end(self) -> int:
        """One after the last character that the model produces."""
        return self.produced[-1][1] if self.produced else self.words_end


class Conversed(NamedTuple):
    """A rendered conversation."""

    template: Template
    rendered: Rendered
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    variables: Mapping[str, Any]


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
        prompted: Messages before which the template prompts: those of the assistant, as far as they are trained.
        tools, variables: As in `Template.render`.
    """
    whole = Conversed(template, rendered, messages, tools, variables)
    return _cut_by_prompts(whole, prompted) or _cut_by_loop(whole, prompted)


def place_of(words: Words, turns: Mapping[int, Turn]) -> int | None:
    """The message in which turn some words stand: their own, another's, or None."""
    likely = [turns[message] for message in (words.message, words.owner) if message is not None and message in turns]
    for turn in [*likely, *turns.values()]:
        if any(begin <= words.begin < end for begin, end in turn.pieces):
            return turn.message
    return None


def _cut_by_loop(whole: Conversed, prompted: Sequence[int]) -> dict[int, Turn]:
    """Turns as the template went over the messages."""
    pieces: dict[int, list[Span]] = {}
    words: dict[int, list[Span]] = {}
    roles: dict[int, int] = {}
    floors: dict[int, int] = {}
    at = floor = 0
    for length, message, field, _, owner, _ in whole.rendered.runs:
        is_word = message >= 0 and (message != owner or not is_label(field))
        if owner is not None and owner >= 0:
            if owner not in pieces:
                pieces[owner], words[owner], floors[owner] = [(at, at + length)], [], floor
            elif pieces[owner][-1][1] == at:
                pieces[owner][-1] = (pieces[owner][-1][0], at + length)
            else:
                pieces[owner].append((at, at + length))
            if is_word:
                words[owner].append((at, at + length))
            elif field == "role" and not words[owner]:
                roles[owner] = at
        at += length
        floor = at if is_word else floor
    turns = {}
    for message, spans in pieces.items():
        own = words[message]
        if message in prompted:
            first = own[0][0] if own else spans[0][1]
            asked = _asked(whole, message, spans[0], first, floors[message])
            opening = find_opening(asked)
            turn = _turn(whole.rendered.text, message, spans, own, opening.end, opening.text)
            header = _unsupplied_header(asked, turn, roles.get(message))
            turns[message] = turn._replace(header=header, difference=opening.difference)
        else:
            begin = own[0][0] if own else spans[0][0]
            turns[message] = _turn(whole.rendered.text, message, spans, own, begin, "")
    return turns


def _asked(whole: Conversed, message: int, piece: Span, words: int, floor: int) -> Asked:
    text, before = whole.rendered.text, whole.messages[:message]
    return Asked(whole.template, text, *piece[:1], words, piece[1], floor, before, whole.tools, whole.variables)


def _unsupplied_header(asked: Asked, turn: Turn, role: int | None) -> str:
    """What the template writes before the words of a reply that a prompt should supply, and does not."""
    head = asked.text[turn.begin : max(asked.words, turn.begin)]
    if not head.strip():
        return ""
    if role is not None and role >= turn.begin:
        return head
    if turn.supplied.strip():
        return ""
    usual = usual_opening(asked.template, asked.tools, asked.variables).strip()
    return head if turn.opening.strip() or (usual and usual in head) else ""


def _turn(text: str, message: int, spans: Sequence[Span], own: Sequence[Span], begin: int, opening: str) -> Turn:
    """Cut a turn that is produced from `begin` on."""
    words_end = max([end for _, end in own if end > begin], default=begin)
    last_begin, last_end = spans[-1]
    end = max(last_begin + len(text[last_begin:last_end].rstrip()), min(words_end, last_end))
    produced = [(max(first, begin), last) for first, last in spans[:-1]] + [(max(last_begin, begin), end)]
    if begin < spans[0][0]:
        produced[0] = (begin, produced[0][1])
    return Turn(
        message=message,
        pieces=tuple(spans),
        begin=begin,
        produced=tuple((first, last) for first, last in produced if first < last),
        words_end=words_end,
        opening=opening,
        supplied=text[spans[0][0] : begin],
    )


def _cut_by_prompts(whole: Conversed, prompted: Sequence[int]) -> dict[int, Turn] | None:
    """Turns of the replies as they are prompted for, where the template's loop does not hold them; None elsewhere."""
    replies = {message for message, told in enumerate(whole.messages) if told.get("role") == "assistant"}
    words: dict[int, list[Span]] = {message: [] for message in prompted}
    astray = False
    for begin, end, message, _, owner in whole.rendered.words:
        if message in words:
            words[message].append((begin, end))
            astray = astray or owner not in replies
    if not astray:
        return None
    turns = {}
    for message, own in words.items():
        turn = _cut_by_prompt(whole, message, own) if own else None
        if own and turn is None:
            return None
        if turn is not None:
            turns[message] = turn
    return turns


def _cut_by_prompt(whole: Conversed, message: int, own: Sequence[Span]) -> Turn | None:
    """The turn of one reply; None where the text does not begin with what prompts for it."""
    text, before = whole.rendered.text, whole.messages[:message]
    prompt = render_prompt(whole.template, before, whole.tools, whole.variables)
    end = _end_by_prompt(whole, message)
    if prompt is None or end is None or not text.startswith(prompt) or own[0][0] < len(prompt) or own[-1][1] > end:
        return None
    try:
        unprompted = whole.template.render_plain(before, tools=whole.tools, **whole.variables)
    except RecordError:
        unprompted = prompt
    begin = len(unprompted) if prompt.startswith(unprompted) else len(prompt)
    return _turn(text, message, [(begin, end)], own, len(prompt), prompt[begin:])


def _end_by_prompt(whole: Conversed, message: int) -> int | None:
    """Where a reply ends: with the text of the conversation up to it, as far as that is the same."""
    text, head = whole.rendered.text, whole.messages[: message + 1]
    if len(head) == len(whole.messages):
        return len(text)
    try:
        alone = whole.template.render_plain(head, tools=whole.tools, **whole.variables)
    except RecordError:
        return None
    end = common_length(alone, text)
    while end < len(alone) and end and text[end - 1] not in BORDERS:
        end -= 1
    return end
