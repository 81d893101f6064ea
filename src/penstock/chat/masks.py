"""Loss weights of a rendered conversation: first of its characters, then of its tokens.

A trained turn trains what the model must produce of it; the settings and the record's marks take parts of that away. A
token has the weight of its last character, because most vocabularies put a space before a word into its token. Costs:
some microseconds a turn.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.chat.conversation import Conversation, Marks
from penstock.chat.encoded_text import EncodedText
from penstock.chat.knobs import Knobs, Terminators
from penstock.chat.template import Rendered
from penstock.chat.turns import Span, Turn

Weights = np.ndarray[Any, np.dtype[np.float32]]
_THINKING = re.compile(
    r"<think>.*?</think>\s*|<reasoning>.*?</reasoning>\s*|<\|begin_of_thought\|>.*?<\|end_of_thought\|>\s*", re.DOTALL
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """What is trained of a conversation, and why."""

    characters: Weights
    """[characters]."""
    tokens: Weights
    """[tokens]."""
    trained: tuple[int, ...]
    """Messages whose turn is trained, rising."""
    terminators: Mapping[int, Span]
    """Characters of the terminator of each turn that has one."""


def weigh(
    conversation: Conversation,
    rendered: Rendered,
    turns: Mapping[int, Turn],
    encoded: EncodedText,
    knobs: Knobs,
    eos_text: str | None,
    stops: Collection[str] = (),
) -> Mask:
    """Loss weights of a conversation.

    Args:
        conversation: Messages with their marks.
        rendered, turns, encoded: Its text, turns and tokens.
        knobs: What to train.
        eos_text: The tokenizer's EOS as text: other terminators follow `train_on_eot`.
        stops: See `find_terminators`.
    """
    text = rendered.text
    characters = np.full(len(text), 1.0 if knobs.train_on_inputs else 0.0, np.float32)
    trained = _trained(conversation, turns, knobs)
    terminators = find_terminators(text, turns, encoded, stops)
    for message, turn in turns.items():
        marks = conversation.marks[message]
        weight = 1.0 if marks.weight is None else marks.weight
        if message in trained:
            spans = turn.pieces if knobs.train_on_inputs else turn.produced
            for begin, end in spans:
                characters[begin:end] = weight
            if not knobs.train_on_reasoning:
                _mask_reasoning(rendered, turn, characters)
        else:
            for begin, end in turn.pieces:
                characters[begin:end] = 0.0
    for message, (begin, end) in terminators.items():
        if not (knobs.train_on_inputs and message in trained):
            policy = knobs.train_on_eos if text[begin:end] == eos_text else knobs.train_on_eot or knobs.train_on_eos
            own = conversation.marks[message].weight
            characters[begin:end] = _terminator_weight(policy, message, trained, 1.0 if own is None else own)
    _apply_ranges(rendered, conversation.marks, characters)
    return Mask(
        characters=characters,
        tokens=token_weights(characters, encoded),
        trained=trained,
        terminators=terminators,
    )


def token_weights(characters: Weights, encoded: EncodedText) -> Weights:
    """The weight of each token's last character; of a token without characters, 0."""
    if not len(characters):
        return np.zeros(len(encoded.ids), np.float32)
    weights: Weights = np.where(encoded.ends > encoded.begins, characters[encoded.ends - 1], np.float32(0))
    return weights


def find_straddling(characters: Weights, encoded: EncodedText) -> tuple[int, ...]:
    """Tokens that hold characters of different weights."""
    changes = np.flatnonzero(np.diff(characters)) + 1
    first = np.searchsorted(changes, encoded.begins, "right")
    inside = first < np.searchsorted(changes, encoded.ends, "left")
    return tuple(np.flatnonzero(inside).tolist())


def find_terminators(
    text: str, turns: Mapping[int, Turn], encoded: EncodedText, stops: Collection[str] = ()
) -> dict[int, Span]:
    """What ends each turn: a control token after its words, or else all text there; or what begins the next turn.

    In some families the model stops by writing the control token with which the next turn begins (GLM-4: <|user|>).

    Args:
        text, turns, encoded: A conversation.
        stops: Control text that is known to end a generation; it goes before other control text, such as </tool_call>.
    """
    control = np.flatnonzero(encoded.is_control)
    begins = encoded.begins[control]
    spans = list(zip(begins.tolist(), encoded.ends[control].tolist(), strict=True))
    found = {}
    for message, turn in turns.items():
        last = int(np.searchsorted(begins, turn.end, "left"))
        first = int(np.searchsorted(begins, max(turn.words_end, turn.pieces[-1][0]), "left"))
        own = spans[first:last]
        behind = [spans[last]] if last < len(spans) and spans[last][0] == turn.pieces[-1][1] == turn.end else []
        known = [span for span in [*reversed(own), *behind] if text[span[0] : span[1]].strip() in stops]
        tail = text[turn.words_end : turn.end]
        if known:
            found[message] = known[0]
        elif own:
            found[message] = own[-1]
        elif tail.strip():
            found[message] = (turn.words_end + len(tail) - len(tail.lstrip()), turn.end)
        elif behind:
            found[message] = behind[0]
    return found


def _trained(conversation: Conversation, turns: Mapping[int, Turn], knobs: Knobs) -> tuple[int, ...]:
    """Messages whose turns are trained: the record's word first, then the role."""
    chosen = []
    for message, marks in enumerate(conversation.marks):
        verdict = marks.verdict
        if verdict is None:
            verdict = knobs.train_on_inputs or conversation.messages[message]["role"] in knobs.roles_to_train
        if verdict:
            chosen.append(message)
    return tuple(chosen[-1:] if knobs.mask_history else chosen)


def _terminator_weight(policy: Terminators, message: int, trained: Sequence[int], weight: float) -> float:
    if policy == "none":
        return 0.0
    if policy == "all":
        return weight if message in trained else 1.0
    if policy == "last":
        return weight if trained and message == trained[-1] else 0.0
    return weight if message in trained else 0.0


def _mask_reasoning(rendered: Rendered, turn: Turn, characters: Weights) -> None:
    """Take the reasoning of a turn, and the tags around it, out of its weights."""
    at, thinking = 0, False
    after = turn.produced[0][0] if turn.produced else 0
    for length, message, field, _, _, _ in rendered.runs:
        if message == turn.message and turn.pieces[0][0] <= at < turn.end:
            if field == "reasoning_content":
                thinking = True
            elif thinking and not field.startswith(("role", "name")):
                characters[after:at] = 0.0
                break
        at += length
    else:
        if thinking:
            characters[after : turn.words_end] = 0.0
    for begin, end in turn.produced:
        for found in _THINKING.finditer(rendered.text, begin, end):
            characters[found.start() : found.end()] = 0.0


def _apply_ranges(rendered: Rendered, marks: Sequence[Marks], characters: Weights) -> None:
    """Write the weights that a record gives to characters of its messages."""
    if not any(mark.ranges for mark in marks):
        return
    at = 0
    for length, message, field, offset, _, _ in rendered.runs:
        if message >= 0 and offset >= 0:
            for part in marks[message].ranges:
                if part.field == field:
                    begin, end = max(part.begin - offset, 0), min(part.end - offset, length)
                    if begin < end:
                        characters[at + begin : at + end] = part.weight
        at += length
