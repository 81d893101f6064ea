"""Is what is trained what will be prompted? Each reply is held against plain renders of the messages before it.

Two things can differ: a reply may be written otherwise once more follows (a template strips earlier thinking), and the
text before it may not be what the model is given when it is asked for that reply (a template writes a newline after
the results of tools when more follows). Both are reported, and `as_prompted` makes a document without. Costs: a plain
render for each trained reply but the last; every conversation is checked, because a template may look at anything.
"""

from collections.abc import Iterator, Mapping, Sequence

from penstock.chat.certificate import Problem
from penstock.chat.conversation import Conversation
from penstock.chat.openings import difference
from penstock.chat.template import Rendered, Template
from penstock.chat.traced import Traced
from penstock.chat.turns import Turn
from penstock.errors import RecordError


def check_prompts(
    conversation: Conversation, text: str, turns: Mapping[int, Turn], trained: Sequence[int], template: Template
) -> Iterator[Problem]:
    """Would each trained reply, when it was the last, have been written, and prompted, as it is written here?

    Args:
        conversation, text, turns: A conversation, its text, and its turns there.
        trained: Messages whose turns are trained.
        template: What rendered it.
    """
    for message in trained:
        turn = turns.get(message)
        if turn is None or conversation.messages[message]["role"] != "assistant":
            continue
        problem = _rewritten(conversation, text, turn, template) or _context_differs(turn)
        if problem is not None:
            yield problem


def as_prompted(
    conversation: Conversation, rendered: Rendered, turns: Mapping[int, Turn], template: Template
) -> Rendered:
    """The rendered conversation with the text before its last turn as the template prompts for that turn."""
    turn = turns.get(len(conversation.messages) - 1)
    if turn is None or turn.supplied != turn.opening:
        return rendered
    before = conversation.messages[: turn.message]
    try:
        prompt = template.render(before, tools=conversation.tools, add_generation_prompt=True, **conversation.variables)
    except RecordError:
        return rendered
    opening = rendered.text[turn.pieces[0][0] : turn.begin]
    context = Traced(prompt.text, prompt.runs).removesuffix(opening)
    begin = turn.begin - len(opening)
    if context == rendered.text[:begin]:
        return rendered
    whole = Traced(rendered.text, rendered.runs)
    return Rendered(text=str.__add__(context, whole[begin:]), runs=Traced(context)._runs + whole[begin:]._runs)


def _rewritten(conversation: Conversation, text: str, turn: Turn, template: Template) -> Problem | None:
    """Reported where a reply, or anything before it, is written otherwise once more follows."""
    head = conversation.head(turn.message + 1)
    if len(head.messages) == len(conversation.messages):
        return None
    try:
        alone = template.render_plain(head.messages, tools=head.tools, **head.variables)
    except RecordError:
        return None
    if alone[: turn.end] == text[: turn.end]:
        return None
    return Problem(
        "rewritten",
        turn.message,
        f"when this reply was the last, the template wrote {difference(alone, text)}; "
        "on_rewrite: split trains each reply as it is prompted",
    )


def _context_differs(turn: Turn) -> Problem | None:
    """Reported where the text before a reply is not what the model is given when it is asked for that reply."""
    if not turn.difference:
        return None
    return Problem(
        "context_differs",
        turn.message,
        f"when this reply is prompted for, the template writes {turn.difference} before it; "
        "on_rewrite: split trains each reply as it is prompted",
    )
