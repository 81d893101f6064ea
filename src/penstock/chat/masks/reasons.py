"""Why each token that is only read is not trained.

Reasons are painted on the characters in the order of the strokes of the mask, and each token has
that of its last character, as it has its weight. They are found when they are asked for:
preparation does not pay for them.
"""

from collections.abc import Iterator

import numpy as np

from penstock.chat.masks.evidence import Evidence
from penstock.chat.masks.masks import (
    closing_messages,
    ends_of_control_text,
    range_strokes,
    reasoning_strokes,
    terminator_policy,
    why_not,
)
from penstock.chat.render.turns import place_of

TEMPLATE = "text of the template, outside what the model writes"
SUPPLIED = "the prompt supplies it, so the model never writes it"
BEHIND = "behind the end of the reply, where the model has stopped"
REASONING = "reasoning, and train_on_reasoning is false"
RANGE = "the record gives this part of the message weight 0"
NO_TURN = "its turn was not found in what the template wrote"
IMAGE = "stands for an image"
WRITTEN = "the record, which writes its document out, does not train it"

Painted = Iterator[tuple[int, int, str]]
"""(begin, end, reason) in characters; later ones cover earlier ones."""


def reasons_of(evidence: Evidence, eos_text: str | None) -> list[str]:
    """The reason for each token of a conversation; "" for one that is trained.

    Args:
        evidence: The conversation with everything that was computed from it.
        eos_text: Text of the tokenizer's EOS.
    """
    text, encoded = evidence.rendered.text, evidence.encoded
    known = [TEMPLATE]
    canvas = np.zeros(len(text), np.int64)
    for begin, end, reason in _strokes(evidence, eos_text):
        if reason not in known:
            known.append(reason)
        canvas[begin:end] = known.index(reason)
    ends = ends_of_control_text(text, encoded)
    # A token without characters, such as the later ones of a symbol, has the reason of what is
    # before it.
    numbers = canvas[np.maximum(ends - 1, 0)] if len(text) else np.zeros(len(ends), np.int64)
    return [
        "" if weight else known[number]
        for number, weight in zip(numbers, evidence.mask.tokens, strict=True)
    ]


def _strokes(evidence: Evidence, eos_text: str | None) -> Painted:
    trained, settings = evidence.mask.trained, evidence.settings
    for message, turn in evidence.turns.items():
        for begin, end in turn.pieces:
            if message not in trained:
                yield begin, end, _of(evidence, message)
            else:
                yield begin, end, BEHIND
                yield begin, min(end, turn.begin), SUPPLIED
        if message in trained and not settings.train_on_reasoning:
            for begin, end, _ in reasoning_strokes(evidence.rendered, turn):
                yield begin, end, REASONING
    for words in evidence.rendered.words:
        if place_of(words, evidence.turns) != words.message:
            untrained = words.message not in trained
            yield words.begin, words.end, _of(evidence, words.message) if untrained else NO_TURN
    yield from _terminators(evidence, eos_text)
    for begin, end, weight in range_strokes(
        evidence.rendered, evidence.conversation.message_weights
    ):
        if weight == 0:
            yield begin, end, RANGE


def _terminators(evidence: Evidence, eos_text: str | None) -> Painted:
    """Terminators of trained messages, which a setting leaves out."""
    roles = [message["role"] for message in evidence.conversation.messages]
    closing = closing_messages(evidence.rendered, evidence.turns, roles)
    for message, (begin, end) in evidence.mask.terminators.items():
        if closing[message] in evidence.mask.trained:
            name, policy = terminator_policy(
                evidence.settings, evidence.rendered.text[begin:end] == eos_text
            )
            more = " and this is not the last trained turn" if policy == "last" else ""
            yield begin, end, f"ends a turn, and {name} is {policy}{more}"


def _of(evidence: Evidence, message: int) -> str:
    return why_not(evidence.conversation, message, evidence.settings)
