"""A conversation as text: in the form that the template accepts, with its turns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.masks.masks import trained_messages
from penstock.chat.records.conversation import Conversation
from penstock.chat.render.choosing import render_form
from penstock.chat.render.excerpts import find_turns
from penstock.chat.render.structure import find_lost
from penstock.chat.render.template import Rendered, Template
from penstock.chat.render.traced_text import Traced
from penstock.chat.render.turns import RenderedConversation, Turn
from penstock.core.errors import ConversationError, RecordError


class Draft(NamedTuple):
    """A conversation as text, before it has tokens."""

    conversation: Conversation
    rendered: Rendered
    trained: tuple[int, ...]
    """Messages to train."""
    turns: dict[int, Turn]


def render_draft(
    conversation: Conversation,
    template: Template,
    settings: MaskSettings,
    stops: Collection[str],
    *,
    prompted: bool = False,
) -> Draft:
    """Render a conversation, and find its turns.

    Args:
        conversation: The conversation.
        template: The chat template.
        settings: Which messages are trained.
        stops: Control text that ends a generation.
        prompted: With the prompt for the last turn before that turn.

    Raises:
        ConversationError: The template refuses it; names its origin.
    """
    try:
        conversation, rendered = render_form(conversation, template, stops)
        trained = trained_messages(conversation, settings)
        turns = _turns(conversation, template, rendered, trained)
        if prompted:
            rendered = _as_prompted(conversation, rendered, turns, template)
            lost = tuple(find_lost(conversation.messages, rendered, stops))
            rendered = replace(rendered, lost=lost)
            turns = _turns(conversation, template, rendered, trained)
    except ValueError as error:
        raise ConversationError(f"{conversation.origin or 'conversation'}: {error}") from error
    return Draft(conversation, rendered, trained, turns)


def _turns(
    conversation: Conversation, template: Template, rendered: Rendered, trained: Sequence[int]
) -> dict[int, Turn]:
    messages = conversation.messages
    replies = [number for number in trained if messages[number]["role"] == "assistant"]
    whole = RenderedConversation(
        template, rendered, messages, conversation.tools, conversation.variables
    )
    return find_turns(whole, replies)


def _as_prompted(
    conversation: Conversation, rendered: Rendered, turns: Mapping[int, Turn], template: Template
) -> Rendered:
    """The rendered conversation, with the text before its last turn replaced by the prompt for that
    turn.
    """
    turn = turns.get(len(conversation.messages) - 1)
    if turn is None or turn.supplied != turn.opening:
        return rendered
    before = conversation.messages[: turn.message]
    try:
        prompt = template.render(
            before, tools=conversation.tools, add_generation_prompt=True, **conversation.variables
        )
    except RecordError:
        return rendered
    opening = rendered.text[turn.pieces[0][0] : turn.begin]
    context = Traced(prompt.text, prompt.runs).removesuffix(opening)
    begin = turn.begin - len(opening)
    if context == rendered.text[:begin]:
        return rendered
    whole = Traced(rendered.text, rendered.runs)
    return Rendered(
        text=str.__add__(context, whole[begin:]), runs=Traced(context)._runs + whole[begin:]._runs
    )
