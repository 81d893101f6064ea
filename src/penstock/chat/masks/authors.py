"""Authors of the characters of a rendered conversation, and control text in messages.

Control text is text of a control token, such as a `<tool_call>` that is typed into a message. In
messages of system, user and tool it always stays text: only the template may write control tokens
there. In messages of a trained role, such as the assistant, the choice changes what is trained. As
text, the model learns to spell the marker with ordinary tokens; as control tokens, it learns the
marker itself, as in transformers. `MaskSettings.trained_control_text` decides; if it does not, such
a conversation is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import numpy as np

from penstock.chat.masks.certificate import Problem
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.records.conversation import Conversation, will_train
from penstock.chat.render.template import Rendered
from penstock.chat.render.traced_text import LITERAL
from penstock.chat.tokens.encoding import BoolArray, EncodedText

INPUT_ROLES = frozenset(("system", "developer", "user", "tool"))
"""Roles that the model does not play: control text in their messages stays text, trained or not."""


@final
@dataclass(frozen=True, slots=True)
class Authors:
    """Flags for the author of each character of a rendered conversation, bool [characters]."""

    template: BoolArray
    """Written by the template, including names of roles."""
    trained: BoolArray
    """From a message of a trained role that is not in `INPUT_ROLES`."""

    def may_be_control(self, settings: MaskSettings) -> BoolArray:
        """Characters in which control text may become control tokens, bool [characters]."""
        return (
            self.template | self.trained
            if settings.trained_control_text == "as_control_tokens"
            else self.template
        )


def find_authors(conversation: Conversation, rendered: Rendered, settings: MaskSettings) -> Authors:
    """The author of each character of `rendered`."""
    roles = [message["role"] for message in conversation.messages]
    trained_roles = {
        role
        for role, message, weights in zip(
            roles, conversation.messages, conversation.message_weights, strict=True
        )
        if role in settings.roles_to_train or will_train(message, weights, ())
    } - INPUT_ROLES
    lengths = np.array([run[0] for run in rendered.runs], np.int64)
    by_template = [run[1] == LITERAL or run[2] == "role" for run in rendered.runs]
    by_trained = [
        run[1] >= 0 and run[2] != "role" and roles[run[1]] in trained_roles for run in rendered.runs
    ]
    return Authors(
        *(np.repeat(np.array(flags, np.bool_), lengths) for flags in (by_template, by_trained))
    )


def check_control_text(
    rendered: Rendered,
    encoded: EncodedText,
    authors: Authors,
    roles: Sequence[str],
    settings: MaskSettings,
) -> Iterator[Problem]:
    """Report control text that stayed text; in a message of a trained role it is an error, unless a
    setting decides.

    Args:
        rendered, encoded, authors: Text, tokens and authors of a conversation.
        roles: Role of each message.
        settings: Decide what control text in trained messages becomes.
    """
    undecided: dict[int, list[str]] = {}
    for at, control in encoded.forged:
        inside = slice(at, at + len(control))
        by_trained = (authors.template | authors.trained)[inside].all() and authors.trained[
            inside
        ].any()
        if by_trained and settings.trained_control_text == "error":
            place = at + int(authors.trained[inside].argmax())
            undecided.setdefault(_message_at(rendered, place), []).append(control)
        else:
            yield Problem("forged", -1, f"{control!r} at character {at} stays text")
    for message, found in undecided.items():
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        yield Problem(
            "control_text",
            message,
            f"its own text ({roles[message]}) has {found[0]!r}{more}, which is control text "
            "of this tokenizer; choose how to encode it: trained_control_text: as_text, or "
            "as_control_tokens, as transformers does",
        )


def find_typed(
    rendered: Rendered, encoded: EncodedText, authors: Authors
) -> tuple[tuple[int, str], ...]:
    """(character, text) of control tokens that contain text of messages."""
    begins, ends = encoded.begins[encoded.is_control], encoded.ends[encoded.is_control]
    # Characters of messages before each character: an image has hundreds of control tokens.
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(~authors.template)])
    typed = before[np.maximum(begins, ends)] > before[begins]
    spans = zip(begins[typed].tolist(), ends[typed].tolist(), strict=True)
    return tuple((begin, rendered.text[begin:end]) for begin, end in spans)


def _message_at(rendered: Rendered, character: int) -> int:
    """The message that a character comes from."""
    ends = accumulate(run[0] for run in rendered.runs)
    return next(run[1] for run, end in zip(rendered.runs, ends, strict=True) if character < end)
