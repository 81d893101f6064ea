"""The turns of long conversations, found in excerpts, so that the cost grows with the length and
not with its square.

Each reply needs the text that prompts for it, and the text that ends with it: renders of all
messages before it. In a trace of an agent with hundreds of calls these would cost more than
everything else. So a long conversation is cut into excerpts: its beginning, some replies with those
before them, a few messages that follow, and its last question with what is answered to it. Turns
are found in each excerpt and moved to where they are in the whole.

That is right if the template writes a turn in an excerpt as it does in the whole. The text of each
turn is compared, apart from numbers, which a template may count; a few replies are also found in
the whole. If anything differs, or the template refuses an excerpt, all turns are found in the
whole.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
_NUMBERS = re.compile(r"(\d+)")


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
        prompted: Numbers of the messages that the template prompts for: the trained ones of the
            assistant.
    """
    if len(prompted) >= LONG:
        turns = _in_excerpts(whole, prompted)
        if turns is not None:
            return turns
    return cut_turns(whole, prompted)


def _in_excerpts(whole: RenderedConversation, prompted: Sequence[int]) -> dict[int, Turn] | None:
    """The turns, found in excerpts; None if the template does not write these as it writes the
    whole.
    """
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
    spoken = [number for number, role in enumerate(roles) if role == "assistant"]
    ends = _ends(whole, questions[-1:], spoken[-1])
    starts = [number for number in spoken if roles[number - 1] != "assistant"]
    for begin in range(0, len(prompted), _REPLIES):
        replies = prompted[begin : begin + _REPLIES]
        low = spoken[max(bisect_left(spoken, replies[0]) - _BEFORE, 0)]
        at = bisect_right(starts, low)
        low = starts[at - 1] if at else first
        following = bisect_left(spoken, replies[-1]) + 1 + _AFTER
        high = spoken[following] if following < len(spoken) else len(roles)
        tail = [number for number in ends if number >= high]
        if tail and roles[tail[0]] == roles[high - 1] == "assistant":
            tail = []
        if tail and roles[tail[0]] == roles[high - 1] == "user":
            high -= 1  # many templates want questions and answers in turn
        elif tail and roles[tail[0]] == "user" != roles[high - 1]:
            answer = spoken[bisect_left(spoken, questions[bisect_left(questions, high)]) - 1]
            tail = [*([answer] if answer >= high else []), *tail]
        yield _Excerpt([*range(first), *range(low, high), *tail], replies)


def _ends(whole: RenderedConversation, question: Sequence[int], last: int) -> Sequence[int]:
    """The messages for which templates look ahead: the last question, and the answer at the end;
    if the last reply is a call, the first reply to that question.

    Args:
        whole: The conversation.
        question: Number of the last question; empty: there is none.
        last: Number of the last reply.
    """
    messages = whole.messages
    if not messages[last].get("tool_calls") and all(number < last for number in question):
        return [*question, *range(last, len(messages))]
    following = range(question[0] if question else len(messages), len(messages))
    reply = next((n for n in following if messages[n].get("role") == "assistant"), len(messages))
    return following[: reply - following.start + 1]


def _turns_of(
    whole: RenderedConversation, excerpt: _Excerpt, unprompted: Mapping[int, Turn], *, astray: bool
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
    found, turns = cut_turns(part, wanted), {}
    for number in excerpt.replies:
        turn, same = found.get(places[number]), unprompted.get(number)
        if turn is None and (same is None or astray):
            continue
        spans = (
            None
            if turn is None
            else _spans_by_words(turn, part, whole, number)
            if astray
            else _spans_of(same)
        )
        moved = (
            None
            if turn is None or spans is None
            else _moved(turn, rendered.text, whole.rendered.text, spans, number)
        )
        if moved is None:
            return None
        turns[number] = moved
    return turns


def _spans_of(turn: Turn | None) -> Sequence[Span] | None:
    """The pieces of a turn that the template's loop wrote."""
    return None if turn is None else turn.pieces


def _spans_by_words(
    turn: Turn, part: RenderedConversation, whole: RenderedConversation, message: int
) -> Sequence[Span] | None:
    """Where the pieces of a turn are in the whole, as far from the message's own text as in the
    excerpt.
    """
    here, there = (
        part.rendered.first_words.get(turn.message),
        whole.rendered.first_words.get(message),
    )
    if here is None or there is None:
        return None
    return [(begin + there - here, end + there - here) for begin, end in turn.pieces]


def _moved(turn: Turn, here: str, there: str, spans: Sequence[Span], message: int) -> Turn | None:
    """A turn of an excerpt where it is in the whole; None if other text is there.

    Args:
        turn: In the excerpt.
        here, there: Texts of excerpt and whole.
        spans: The pieces of the turn in the whole.
        message: Its number in the whole.
    """
    places: dict[int, int] = {}
    if len(spans) != len(turn.pieces):
        return None
    for (begin, end), (first, last) in zip(turn.pieces, spans, strict=True):
        if not _align(here[begin:end], there[first:last], begin, first, places):
            return None
    before = turn.pieces[0][0] - turn.begin
    if before > 0:  # the prompt ends before what the template's loop writes
        if here[turn.begin : turn.pieces[0][0]] != there[spans[0][0] - before : spans[0][0]]:
            return None
        places[turn.begin] = spans[0][0] - before
    needed = {turn.begin, turn.words_end, *(place for span in turn.produced for place in span)}
    if not needed <= places.keys():
        return None
    supplied = there[spans[0][0] : places[turn.begin]]
    header = there[
        places[turn.begin] : places.get(turn.begin + len(turn.header), places[turn.begin])
    ]
    return turn._replace(
        message=message,
        header=header,
        pieces=tuple(spans),
        opening=supplied if turn.opening == turn.supplied else turn.opening,
        supplied=supplied,
        begin=places[turn.begin],
        produced=tuple((places[begin], places[end]) for begin, end in turn.produced),
        words_end=places[turn.words_end],
    )


def _align(one: str, other: str, begin: int, first: int, places: dict[int, int]) -> bool:
    """Whether two texts are equal but for numbers, which templates may count; `places` gets place →
    place.
    """
    pieces, others = _NUMBERS.split(one), _NUMBERS.split(other)
    if len(pieces) != len(others) or any(
        a != b for a, b in zip(pieces[::2], others[::2], strict=True)
    ):
        return False
    at, there = begin, first
    for piece, same in zip(pieces, others, strict=True):
        if piece == same:
            places.update(
                zip(range(at, at + len(piece)), range(there, there + len(same)), strict=True)
            )
        else:
            places[at] = there
        at, there = at + len(piece), there + len(same)
    places[at] = there
    return True


def _is_same(one: Turn | None, other: Turn | None) -> bool:
    """Whether two turns are equal; of differences in other text only that there are any."""
    if one is None or other is None:
        return one is other
    alike = bool(one.rewritten) == bool(other.rewritten) and bool(one.difference) == bool(
        other.difference
    )
    return alike and one._replace(rewritten="", difference="") == other._replace(
        rewritten="", difference=""
    )
