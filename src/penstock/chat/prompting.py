"""Is what is trained what will be prompted? Each reply is held against plain renders of the messages before it.

Two things can differ: a reply may be written otherwise once more follows (a template strips earlier thinking), and the
text before it may not be what the model is given when it is asked for that reply (a template writes a newline after
the results of tools when more follows). Both are told, and `as_prompted` makes a document without. Costs: two plain
renders for each trained reply, one for the last, until the template has proved itself in the same situation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.chat.certificate import Problem
from penstock.chat.conversation import Conversation
from penstock.chat.template import Rendered, Template
from penstock.chat.traced import Traced
from penstock.chat.turns import Turn
from penstock.errors import RecordError

_TRIALS = 16
"""Times that a template is asked in one situation whether it writes a reply, and the text before it, as when asked."""


def check_prompts(
    conversation: Conversation, text: str, turns: Mapping[int, Turn], trained: Sequence[int], template: Template
) -> Iterator[Problem]:
    """Would each trained reply, when it was the last, have been written, and prompted, as it is written here?

    Rendered for each reply until the template has passed `_TRIALS` times in the same situation: what kind of reply it
    is, what kinds of messages are before it, and what comes next.

    Args:
        conversation, text, turns: A conversation, its text, and its turns there.
        trained: Messages whose turns are trained.
        template: What rendered it.
    """
    kinds = [_kind(message) for message in conversation.messages]
    for message in trained:
        turn = turns.get(message)
        if turn is None or kinds[message][0] != "assistant":
            continue
        before, after = kinds[:message], kinds[message + 1 :]
        situation = (
            kinds[message],
            frozenset(before),
            tuple(before[-1:]),
            tuple(after[:1]),
            frozenset(after),
            bool(conversation.tools),
        )
        if template.trials[situation] >= _TRIALS:
            continue
        problem = _rewritten(conversation, text, turn, template) if after else None
        problem = problem or _context_differs(conversation, text, turn, template)
        if problem is None:
            template.trials[situation] += 1
        else:
            yield problem


def as_prompted(
    conversation: Conversation, rendered: Rendered, turns: Mapping[int, Turn], template: Template
) -> Rendered:
    """The rendered conversation with the text before its last turn as the template prompts for that turn."""
    turn = turns.get(len(conversation.messages) - 1)
    if turn is None or turn.supplied != turn.opening:
        return rendered
    before, begin = conversation.messages[: turn.message], turn.pieces[0][0]
    try:
        prompt = template.render(before, tools=conversation.tools, add_generation_prompt=True, **conversation.variables)
    except RecordError:
        return rendered
    context = Traced(prompt.text, prompt.runs).removesuffix(turn.opening)
    if context == rendered.text[:begin]:
        return rendered
    whole = Traced(rendered.text, rendered.runs)
    return Rendered(text=str.__add__(context, whole[begin:]), runs=Traced(context)._runs + whole[begin:]._runs)


def _rewritten(conversation: Conversation, text: str, turn: Turn, template: Template) -> Problem | None:
    """Told where a reply, or anything before it, is written otherwise once more follows."""
    alone = _render_head(conversation, turn.message + 1, template)
    if alone is None or alone[: turn.end] == text[: turn.end]:
        return None
    return Problem(
        "rewritten",
        turn.message,
        f"when this reply was the last, the template wrote {_difference(alone, text)}; "
        "on_rewrite: split trains each reply as it is prompted",
    )


def _context_differs(conversation: Conversation, text: str, turn: Turn, template: Template) -> Problem | None:
    """Told where the text before a reply is not what the model is given when it is asked for that reply."""
    prompt = _render_head(conversation, turn.message, template, add_generation_prompt=True)
    context = text[: turn.pieces[0][0]]
    # What the opening supplies is compared for itself ("opening_differs").
    if prompt is None or prompt.removesuffix(turn.opening) == context:
        return None
    return Problem(
        "context_differs",
        turn.message,
        f"when this reply is prompted for, the template writes {_difference(prompt, text)} before it; "
        "on_rewrite: split trains each reply as it is prompted",
    )


def _difference(one: str, other: str) -> str:
    """Where two texts part."""
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    return f"{one[same : same + 30]!r} where it now writes {other[same : same + 30]!r}"


def _kind(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a template may look at to write a message in another way."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    reasoning = message.get("reasoning_content") or message.get("thinking")
    return (
        message["role"], isinstance(content, str), bool(text.strip()), "</think>" in text, bool(reasoning),
        bool(message.get("tool_calls")),
    )  # fmt: skip


def _render_head(
    conversation: Conversation, length: int, template: Template, *, add_generation_prompt: bool = False
) -> str | None:
    """The first messages alone; None where the template refuses them."""
    head = conversation.head(length)
    try:
        return template.render_plain(
            head.messages, tools=head.tools, add_generation_prompt=add_generation_prompt, **head.variables
        )
    except RecordError:
        return None
