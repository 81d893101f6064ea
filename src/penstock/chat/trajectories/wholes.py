"""The conversation so far as its template writes it, with the prompt for the next reply."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.chat.records.conversation import DEFAULT_WEIGHTS, Conversation, Form
from penstock.chat.render.choosing import render_form
from penstock.chat.render.forms import forms_of
from penstock.chat.render.template import Rendered, Template
from penstock.chat.render.turns import RenderedConversation
from penstock.chat.trajectories.tails import literal_of
from penstock.core.arrays import Bool
from penstock.core.errors import ConversationError, RecordError
from penstock.core.json_values import JsonMapping, JsonObject


class Whole(NamedTuple):
    """A conversation as text."""

    rendered: Rendered
    conversation: RenderedConversation
    literal: Bool
    """Which characters the template wrote, bool [characters]."""
    form: tuple[Form, ...]
    """Changes of messages that the template needed."""

    @property
    def text(self) -> str:
        """All of it."""
        return self.rendered.text


def render_whole(
    messages: Sequence[JsonObject],
    template: Template,
    tools: tuple[JsonObject, ...] | None,
    variables: JsonMapping,
    likely: tuple[Form, ...] = (),
) -> Whole:
    """The conversation in the form that the template accepts, with the prompt at its end.

    Args:
        messages: All so far.
        template: The template.
        tools: What may be called.
        variables: Of the template.
        likely: Changes of messages that the template needed before.

    Raises:
        ConversationError: The template refuses it.
    """
    plain = tuple({"content": None, **message} for message in messages)
    conversation = Conversation(
        messages=plain,
        message_weights=(DEFAULT_WEIGHTS,) * len(plain),
        forms=forms_of(plain, True, True),
        tools=tools,
        variables=variables,
    )
    try:
        conversation, rendered = render_form(conversation, template, prompted=True, likely=likely)
    except RecordError as error:
        raise ConversationError(
            f"trajectory of {len(messages)} messages, message {len(messages) - 1} the last: {error}"
        ) from error
    parts = RenderedConversation(
        template, rendered, conversation.messages, conversation.tools, variables
    )
    return Whole(rendered, parts, literal_of(rendered), conversation.changed)
