r"""The turns of a rendered conversation: what the prompt supplies of each, and what the model must
produce.

A turn is the text that the template writes for one message. It has three parts: the opening, which
the prompt supplies (the generation prompt: "<|im_start|>assistant\n"); what the model produces (its
text, the wrappers of tool calls and thinking, the terminator); and whitespace after it. The opening
of a reply is the end of the text that the template writes to prompt for it, found by rendering the
messages before it.

Some templates write messages in a way that cannot be followed, for example from a list of texts
that they built before. Then the text of a reply is in the turn of another message, or in none. In
that case replies are cut out by prompts: from the end of the text without the reply's prompt to the
end of the text with the reply. Other messages then have no turn.

Each reply is also compared with what the template writes when it is the last message: a template
may write it differently once more messages follow (it strips earlier thinking).

The result depends only on template and conversation. Costs two plain renders per reply and a few
microseconds; four renders where replies are cut out by prompts. `excerpts.py` keeps that linear in
long conversations.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from penstock.chat.render.template import LABELS, Rendered, Template, Words, is_label
from penstock.core.errors import RecordError
from penstock.core.json_values import JsonMapping

BORDERS = frozenset(" \n\t>]}:")
"""Characters that end a marker or a word."""
_PROBES = (("Q", "A"), ([{"type": "text", "text": "Q"}], [{"type": "text", "text": "A"}]))
Span = tuple[int, int]
"""Characters [begin, end)."""


class Opening(NamedTuple):
    """How the template prompts for a reply."""

    text: str
    """The generation prompt: what the template adds to the messages before the reply."""
    end: int
    """One after the last character of the rendered text that the prompt supplies."""
    difference: str = ""
    """How the prompt differs from the text before the reply; empty if it does not, or if that is
    unknown.
    """


class Reply(NamedTuple):
    """One reply in a rendered conversation, and what comes before it."""

    template: Template
    text: str
    """The whole conversation."""
    begin: int
    """First character that the template writes for the reply, including its header."""
    words: int
    """First character of its own text; its end if there is none."""
    end: int
    floor: int
    """One after the last character of the messages before it."""
    before: Sequence[JsonMapping]
    """The messages before it."""
    tools: Sequence[Any] | None
    variables: JsonMapping


def find_opening(reply: Reply) -> Opening:
    """The opening of one reply, and how much of it is in the text."""
    text, begin, end = reply.text, reply.begin, reply.end
    prompt = render_prompt(reply.template, reply.before, reply.tools, reply.variables)
    if prompt is None:
        opening = usual_opening(reply.template, reply.tools, reply.variables)
        return Opening(opening, begin + supplied(text[begin : reply.words], opening))
    if (
        reply.floor <= len(prompt) < begin
        and text.startswith(prompt)
        and text[len(prompt) : begin].isspace()
    ):
        return Opening("", len(prompt))
    opening = prompt[begin:] if prompt[:begin] == text[:begin] else _tail(reply, prompt)
    # A template without add_generation_prompt may write a prompt at the end of every text, or
    # never.
    if "add_generation_prompt" not in reply.template.source and not supplied(
        text[begin:end], opening
    ):
        opening = _written_before(reply.template, reply.variables)
    if not text.startswith(opening, begin, end):
        opening = _longest_end(prompt, text[begin : reply.words]) or opening
    last = begin + (
        len(opening) if text.startswith(opening, begin, end) else supplied(text[begin:end], opening)
    )
    same = prompt.removesuffix(opening) == text[:begin]
    return Opening(opening, last, "" if same else difference(prompt, text))


def render_prompt(
    template: Template,
    before: Sequence[JsonMapping],
    tools: Sequence[object] | None,
    variables: JsonMapping,
) -> str | None:
    """The text that prompts for a reply after some messages; None if the template refuses them."""
    try:
        return template.render_plain(before, tools=tools, add_generation_prompt=True, **variables)
    except RecordError:
        return None


def usual_opening(
    template: Template, tools: Sequence[object] | None, variables: JsonMapping
) -> str:
    """Text that the generation prompt adds to a plain question; if none, the text before the
    answer.
    """
    for question, _ in _PROBES:
        messages = [{"role": "user", "content": question}]
        prompt = render_prompt(template, messages, tools, variables)
        if prompt is not None:
            whole = template.render_plain(messages, tools=tools, **variables)
            return (
                prompt.removeprefix(whole)
                if prompt != whole
                else _written_before(template, variables)
            )
    return ""


def supplied(text: str, opening: str) -> int:
    """Number of characters of a turn that the opening supplies: all of it except whitespace, or the
    shared markers.
    """
    same = _same_but_for_space(text, opening)
    if same is not None:
        return same
    same = common_length(text, opening)
    # "<" may begin a marker on both sides; only whole markers and words count as supplied.
    while same and text[same - 1] not in BORDERS:
        same -= 1
    return same


def common_length(one: str, other: str) -> int:
    """Length of the common beginning of two texts, in characters."""
    same, different = 0, min(len(one), len(other)) + 1
    while different - same > 1:
        middle = (same + different) // 2
        same, different = (
            (middle, different) if one[same:middle] == other[same:middle] else (same, middle)
        )
    return same


def difference(one: str, other: str) -> str:
    """Error text that shows where two texts begin to differ."""
    same = common_length(one, other)
    return f"{one[same : same + 30]!r} instead of {other[same : same + 30]!r}"


def _longest_end(prompt: str, turn: str) -> str:
    """The longest end of a prompt with which a turn begins; empty if that is only whitespace."""
    for length in range(min(len(prompt), len(turn)), 0, -1):
        if turn.startswith(prompt[-length:]):
            return prompt[-length:] if prompt[-length:].strip() else ""
    return ""


def _same_but_for_space(text: str, opening: str) -> int | None:
    """Where the opening ends in a text that begins with it, apart from whitespace; None if it does
    not.
    """
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


def _tail(reply: Reply, prompt: str) -> str:
    """Text of the prompt after all turns, if the text before the reply differs from the prompt."""
    rendered = reply.template.render(
        reply.before, tools=reply.tools, add_generation_prompt=True, **reply.variables
    )
    at = end = 0
    for length, _, _, _, owner, _ in rendered.runs:
        at += length
        end = at if owner is not None and owner >= 0 else end
    return prompt[end:]


def _written_before(template: Template, variables: JsonMapping) -> str:
    """Text between a question and its answer, of a template without generation prompt."""
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


class Turn(NamedTuple):
    """One message as the template wrote it; all positions are characters of the rendered text."""

    message: int
    pieces: tuple[Span, ...]
    """Where it is written; several if the template writes other messages in between."""
    begin: int
    """First character that the model must produce."""
    produced: tuple[Span, ...]
    """Text that the model must produce, including the terminator."""
    words_end: int
    """One after the last character of the message's own text; `begin` if there is none."""
    opening: str
    """Text that the generation prompt supplies."""
    supplied: str
    """The part of `opening` in the text: shorter if the template does not write turns as it prompts
    for them.
    """
    header: str = ""
    """The header of the turn, if the prompt does not supply it."""
    difference: str = ""
    """How the text that prompts for the turn differs from the text before it."""
    rewritten: str = ""
    """How the template writes the turn, or the text before it, when it is the last one; empty: as
    it is here.
    """

    @property
    def end(self) -> int:
        """One after the last character that the model produces."""
        return self.produced[-1][1] if self.produced else self.words_end


class RenderedConversation(NamedTuple):
    """A rendered conversation."""

    template: Template
    rendered: Rendered
    messages: Sequence[JsonMapping]
    tools: Sequence[Any] | None
    variables: JsonMapping


def cut_turns(whole: RenderedConversation, prompted: Sequence[int]) -> dict[int, Turn]:
    """The turn of each message that was written.

    Args:
        whole: The conversation.
        prompted: Numbers of the messages that the template prompts for: the trained ones of the
            assistant.
    """
    turns = _cut_by_prompts(whole, prompted) or _cut_by_loop(whole, prompted)
    first = min(turns.values(), key=lambda turn: turn.pieces[0][0], default=None)
    if first is not None:
        turns[first.message] = first._replace(
            pieces=(*_without_preamble(whole, first), *first.pieces[1:])
        )
    return turns


def _without_preamble(whole: RenderedConversation, turn: Turn) -> list[Span]:
    """The first piece of the first turn, without text that the template writes on its own, such as
    a system message.

    That is what it writes there and not where a later message of this role begins, before or behind
    the usual text.
    """
    begin, end = turn.pieces[0]
    first = next(iter(whole.rendered.words), None)
    if first is None or first.message != turn.message or not begin <= first.begin < end:
        return [(begin, end)]
    head = whole.rendered.text[begin : first.begin]
    role = str(whole.messages[turn.message]["role"])
    usual = whole.template.usual_head(role)
    if not usual.strip() or head == usual:
        return [(begin, end)]
    if head.endswith(usual):
        return (
            [(first.begin - len(usual), end)]
            if head.removesuffix(usual).strip()
            else [(begin, end)]
        )
    if role == "user" and head.startswith(usual) and head.removeprefix(usual).strip():
        return [(begin, begin + len(usual)), (first.begin, end)]
    return [(begin, end)]


def are_astray(whole: RenderedConversation, messages: Collection[int]) -> bool:
    """Whether text of some replies is outside the turns of all replies, so that they are cut out by
    prompts.
    """
    replies = {
        number
        for number, message in enumerate(whole.messages)
        if message.get("role") == "assistant"
    }
    return any(
        words.message in messages and words.owner not in replies for words in whole.rendered.words
    )


def place_of(words: Words, turns: Mapping[int, Turn]) -> int | None:
    """The message in the turn of which some text is: its own, another one, or None."""
    likely = [
        turns[message]
        for message in (words.message, words.owner)
        if message is not None and message in turns
    ]
    for turn in chain(likely, turns.values()):
        if any(begin <= words.begin < end for begin, end in turn.pieces):
            return turn.message
    return None


def _cut_by_loop(whole: RenderedConversation, prompted: Sequence[int]) -> dict[int, Turn]:
    """Turns as the template's loop over the messages wrote them."""
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
            reply = _reply(whole, message, spans[0], first, floors[message])
            opening = find_opening(reply)
            turn = _turn(whole.rendered.text, message, spans, own, opening.end, opening.text)
            header = _unsupplied_header(reply, turn, roles.get(message))
            rewritten = _rewritten(whole, turn)
            turns[message] = turn._replace(
                header=header, difference=opening.difference, rewritten=rewritten
            )
        else:
            begin = own[0][0] if own else spans[0][0]
            turns[message] = _turn(whole.rendered.text, message, spans, own, begin, "")
    return turns


def _reply(whole: RenderedConversation, message: int, piece: Span, words: int, floor: int) -> Reply:
    text, before = whole.rendered.text, whole.messages[:message]
    return Reply(
        whole.template,
        text,
        *piece[:1],
        words,
        piece[1],
        floor,
        before,
        whole.tools,
        whole.variables,
    )


def _unsupplied_header(reply: Reply, turn: Turn, role: int | None) -> str:
    """Text before the words of a reply that a prompt should supply but does not."""
    head = reply.text[turn.begin : max(reply.words, turn.begin)]
    if not head.strip():
        return ""
    if role is not None and role >= turn.begin:
        return head
    if turn.supplied.strip():
        return ""
    usual = usual_opening(reply.template, reply.tools, reply.variables).strip()
    return head if turn.opening.strip() or (usual and usual in head) else ""


def _turn(
    text: str, message: int, spans: Sequence[Span], own: Sequence[Span], begin: int, opening: str
) -> Turn:
    """The turn of a message, of which the model produces the text from `begin` on."""
    words_end = max([end for _, end in own if end > begin], default=begin)
    last_begin, last_end = spans[-1]
    end = max(last_begin + len(text[last_begin:last_end].rstrip()), min(words_end, last_end))
    produced = [(max(first, begin), last) for first, last in spans[:-1]] + [
        (max(last_begin, begin), end)
    ]
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


def _cut_by_prompts(whole: RenderedConversation, prompted: Sequence[int]) -> dict[int, Turn] | None:
    """Turns of the replies by their prompts, if the template's loop does not contain them;
    otherwise None.
    """
    words: dict[int, list[Span]] = {message: [] for message in prompted}
    if not are_astray(whole, words):
        return None
    for begin, end, message, _, _ in whole.rendered.words:
        if message in words:
            words[message].append((begin, end))
    turns = {}
    for message, own in words.items():
        turn = _cut_by_prompt(whole, message, own) if own else None
        if own and turn is None:
            return None
        if turn is not None:
            turns[message] = turn
    return turns


def _cut_by_prompt(whole: RenderedConversation, message: int, own: Sequence[Span]) -> Turn | None:
    """The turn of one reply; None if the text does not begin with the prompt for it."""
    text, before = whole.rendered.text, whole.messages[:message]
    prompt = render_prompt(whole.template, before, whole.tools, whole.variables)
    end = _end_by_prompt(whole, message)
    if (
        prompt is None
        or end is None
        or not text.startswith(prompt)
        or own[0][0] < len(prompt)
        or own[-1][1] > end
    ):
        return None
    try:
        unprompted = whole.template.render_plain(before, tools=whole.tools, **whole.variables)
    except RecordError:
        unprompted = prompt
    begin = len(unprompted) if prompt.startswith(unprompted) else len(prompt)
    turn = _turn(text, message, [(begin, end)], own, len(prompt), prompt[begin:])
    return turn._replace(rewritten=_rewritten(whole, turn))


def _rewritten(whole: RenderedConversation, turn: Turn) -> str:
    """How the template writes a turn, or the text before it, when it is the last one; empty: as
    here, or not at all.
    """
    head, text = whole.messages[: turn.message + 1], whole.rendered.text
    if len(head) == len(whole.messages):
        return ""
    try:
        alone = whole.template.render_plain(head, tools=whole.tools, **whole.variables)
    except RecordError:
        return ""
    return "" if alone[: turn.end] == text[: turn.end] else difference(alone, text)


def _end_by_prompt(whole: RenderedConversation, message: int) -> int | None:
    """Where a reply ends: at the end of the text that the conversation up to it shares with the
    whole.
    """
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
