"""The conversation so far as its template writes it, with the prompt for the next reply."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.chat.records.conversation import DEFAULT_WEIGHTS, Conversation
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

    @property
    def text(self) -> str:
        """All of it."""
        return self.rendered.text


def render_whole(
    messages: Sequence[JsonObject],
    template: Template,
    tools: tuple[JsonObject, ...] | None,
    variables: JsonMapping,
) -> Whole:
    """The conversation in the form that the template accepts.

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
        if conversation.forms or template.reads_parts:
            conversation = render_form(conversation, template)[0]
        rendered = template.render(
            conversation.messages,
            tools=conversation.tools,
            add_generation_prompt=True,
            **variables,
        )
    except RecordError as error:
        raise ConversationError(
            f"trajectory of {len(messages)} messages, message {len(messages) - 1} the last: {error}"
        ) from error
    parts = RenderedConversation(
        template, rendered, conversation.messages, conversation.tools, variables
    )
    return Whole(rendered, parts, literal_of(rendered))
