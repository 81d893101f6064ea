"""Control text that a message spells in its own words, such as `<tool_call>` typed into a reply: text, or a token?

In messages of system, user and tool it always stays text: only the template may write control tokens there.
In messages of a trained role, such as the assistant, the two readings train different things: as text, the model learns
to spell the marker with ordinary tokens; as control tokens, it learns the marker itself, as transformers encodes it.
`Knobs.trained_control_text` says which; where it does not, a conversation in which the readings differ is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import numpy as np

from penstock.chat.certificate import Problem
from penstock.chat.conversation import Conversation, will_train
from penstock.chat.encoded_text import BoolArray, EncodedText
from penstock.chat.knobs import Knobs
from penstock.chat.template import Rendered
from penstock.chat.traced import LITERAL

INPUT_ROLES = frozenset(("system", "developer", "user", "tool"))
"""Roles whose messages others write: their control text stays text, whether they are trained or not."""


@final
@dataclass(frozen=True, slots=True)
class Authors:
    """Who wrote the characters of a rendered conversation; both bool [characters]."""

    template: BoolArray
    """The template itself; names of roles count as its own."""
    trained: BoolArray
    """A message of a trained role that is not one of `INPUT_ROLES`."""

    def may_be_control(self, knobs: Knobs) -> BoolArray:
        """Characters of which control text may become control tokens, bool [characters]."""
        return self.template | self.trained if knobs.trained_control_text == "as_control_tokens" else self.template


def find_authors(conversation: Conversation, rendered: Rendered, knobs: Knobs) -> Authors:
    """Who wrote each character of `rendered`."""
    roles = [message["role"] for message in conversation.messages]
    trained_roles = {
        role
        for role, message, marks in zip(roles, conversation.messages, conversation.marks, strict=True)
        if role in knobs.roles_to_train or will_train(message, marks, ())
    } - INPUT_ROLES
    lengths = np.array([run[0] for run in rendered.runs], np.int64)
    by_template = [run[1] == LITERAL or run[2] == "role" for run in rendered.runs]
    by_trained = [run[1] >= 0 and run[2] != "role" and roles[run[1]] in trained_roles for run in rendered.runs]
    return Authors(*(np.repeat(np.array(flags, np.bool_), lengths) for flags in (by_template, by_trained)))


def check_control_text(
    rendered: Rendered, encoded: EncodedText, authors: Authors, roles: Sequence[str], knobs: Knobs
) -> Iterator[Problem]:
    """Report control text that stayed text; in a message of a trained role it is an error where no setting decides.

    Args:
        rendered, encoded, authors: A conversation's text, tokens, and who wrote its characters.
        roles: Role of each message.
        knobs: The settings.
    """
    undecided: dict[int, list[str]] = {}
    for at, control in encoded.forged:
        inside = slice(at, at + len(control))
        by_trained = (authors.template | authors.trained)[inside].all() and authors.trained[inside].any()
        if by_trained and knobs.trained_control_text == "error":
            place = at + int(authors.trained[inside].argmax())
            undecided.setdefault(_message_at(rendered, place), []).append(control)
        else:
            yield Problem("forged", -1, f"{control!r} at character {at} stays text")
    for message, found in undecided.items():
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        yield Problem(
            "control_text",
            message,
            f"its own words ({roles[message]}) hold {found[0]!r}{more}, which is control text of this tokenizer; "
            "choose how to encode it: trained_control_text: as_text, or as_control_tokens, as transformers does",
        )


def find_typed(rendered: Rendered, encoded: EncodedText, authors: Authors) -> tuple[tuple[int, str], ...]:
    """(character, text) of control tokens that not the template alone wrote."""
    places = np.flatnonzero(encoded.is_control).tolist()
    spans = [(int(encoded.begins[token]), int(encoded.ends[token])) for token in places]
    return tuple(
        (begin, rendered.text[begin:end]) for begin, end in spans if not authors.template[begin : max(end, begin)].all()
    )


def _message_at(rendered: Rendered, character: int) -> int:
    """The message that wrote a character."""
    ends = accumulate(run[0] for run in rendered.runs)
    return next(run[1] for run, end in zip(rendered.runs, ends, strict=True) if character < end)
