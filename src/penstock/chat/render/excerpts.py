"""The turns of long conversations, found in excerpts, so that the cost grows with the length and not with its square.

Each reply needs the text that prompts for it, and the text that ends with it: renders of all messages before it. In a
trace of an agent with hundreds of calls these would cost more than everything else. So a long conversation is cut into
excerpts: its beginning, some replies with those before them, a few messages that follow, and its last question with
what is answered to it. Turns are found in each excerpt and moved to where they are in the whole.

That is right if the template writes a turn in an excerpt as it does in the whole. The text of each turn is compared; a
few replies are also found in the whole, and compared. If anything differs, or the template refuses an excerpt, all
turns are found in the whole.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.chat.render.turns import RenderedConversation, Span, Turn, are_astray, cut_turns
from penstock.core.errors import RecordError

LONG = 48
"""Replies from which on excerpts are used."""
_REPLIES = 16
"""Replies that are found in one excerpt."""
_BEFORE, _AFTER = 8, 2
"""Replies before and after them."""
_COMPARED = 3
"""Replies that are also found in the whole."""


class _Excerpt(NamedTuple):
    """Some messages of a conversation."""

    messages: Sequence[int]
    """Their numbers, ascending."""
    replies: Sequence[int]
    """Numbers of those whose turns are found here."""


def find_turns(whole: RenderedConversation, prompted: Sequence[int]) -> dict[int, Turn]:
    """The turn of each message that was written.

    Args:
        whole: The conversation.
        prompted: Numbers of the messages that the template prompts for: the trained ones of the assistant.
    """
    if len(prompted) >= LONG:
        turns = _in_excerpts(whole, prompted)
        if turns is not None:
            return turns
    return cut_turns(whole, prompted)


def _in_excerpts(whole: RenderedConversation, prompted: Sequence[int]) -> dict[int, Turn] | None:
    """The turns, found in excerpts; None if the template does not write these as it writes the whole."""
    astray = are_astray(whole, set(prompted))
    unprompted = cut_turns(whole, ())
    found: dict[int, Turn] = {}
    for excerpt in _cut(whole, prompted):
        turns = _turns_of(whole, excerpt, unprompted, astray=astray)
        if turns is None:
            return None
        found |= turns
    step = max(len(prompted) // _COMPARED, 1)
    for message in prompted[step - 1 :: step]:
        if not _is_same(found.get(message), cut_turns(whole, (message,)).get(message)):
            return None
    if astray:
        return found
    return {message: found.get(message, turn) for message, turn in unprompted.items()}


def _cut(whole: RenderedConversation, prompted: Sequence[int]) -> Iterator[_Excerpt]:
    roles = [message.get("role") for message in whole.messages]
    first = roles.index("assistant")
    questions = [number for number, role in enumerate(roles) if role == "user"]
    last = questions[-1] if questions else len(roles)
    starts = [n for n in range(first, len(roles)) if roles[n] == "assistant" and roles[n - 1] != "assistant"]
    for begin in range(0, len(prompted), _REPLIES):
        replies = prompted[begin : begin + _REPLIES]
        low = prompted[max(begin - _BEFORE, 0)]
        low = max((start for start in starts if start <= low), default=first)
        following = begin + len(replies) + _AFTER
        high = prompted[following] if following < len(prompted) else len(roles)
        tail = range(max(last, high), min(_end_of_answer(roles, last), len(roles)))
        yield _Excerpt([*range(first), *range(low, high), *tail], replies)


def _end_of_answer(roles: Sequence[object], question: int) -> int:
    """One after the first reply to a question."""
    return next((n + 1 for n in range(question, len(roles)) if roles[n] == "assistant"), len(roles))


def _turns_of(
    whole: RenderedConversation, excerpt: _Excerpt, unprompted: dict[int, Turn], *, astray: bool
) -> dict[int, Turn] | None:
    """The turns of the replies of an excerpt, moved to the whole; None if they differ there."""
    messages = [whole.messages[number] for number in excerpt.messages]
    try:
        rendered = whole.template.render(messages, tools=whole.tools, **whole.variables)
    except RecordError:
        return None
    part = RenderedConversation(whole.template, rendered, messages, whole.tools, whole.variables)
    places = {number: place for place, number in enumerate(excerpt.messages)}
    wanted = [places[number] for number in excerpt.replies]
    if are_astray(part, set(wanted)) != astray:
        return None
    found = cut_turns(part, wanted)
    turns = {}
    for number in excerpt.replies:
        turn = found.get(places[number])
        begin = _first_words(whole, number, unprompted)
        if turn is None or begin is None:
            if turn is not None or begin is not None:
                return None
            continue
        own = _first_words(part, places[number], found)
        moved = None if own is None else _moved(turn, part, whole, begin - own, number)
        if moved is None:
            return None
        turns[number] = moved
    return turns


def _first_words(whole: RenderedConversation, message: int, turns: dict[int, Turn]) -> int | None:
    """The first character of a message's own text, or of its turn if it has none; None: neither was written."""
    begin = whole.rendered.first_words.get(message)
    turn = turns.get(message)
    return begin if begin is not None or turn is None else turn.pieces[0][0]


def _moved(turn: Turn, part: RenderedConversation, whole: RenderedConversation, shift: int, message: int) -> Turn | None:
    """A turn of an excerpt where it is in the whole; None if other text is there."""

    def move(spans: Sequence[Span]) -> tuple[Span, ...]:
        return tuple((begin + shift, end + shift) for begin, end in spans)

    begin, end = min(turn.begin, turn.pieces[0][0]), turn.pieces[-1][1]
    if part.rendered.text[begin:end] != whole.rendered.text[begin + shift : end + shift]:
        return None
    return turn._replace(
        message=message,
        pieces=move(turn.pieces),
        begin=turn.begin + shift,
        produced=move(turn.produced),
        words_end=turn.words_end + shift,
    )


def _is_same(one: Turn | None, other: Turn | None) -> bool:
    """Whether two turns are equal; of differences in other text only that there are any."""
    if one is None or other is None:
        return one is other
    alike = bool(one.rewritten) == bool(other.rewritten) and bool(one.difference) == bool(other.difference)
    return alike and one._replace(rewritten="", difference="") == other._replace(rewritten="", difference="")
