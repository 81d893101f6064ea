"""Loss weights of rendered conversations: first of their characters, then of their tokens.

A trained turn trains what the model must produce of it; the settings and the record's marks take parts of that away.
Of a message that the template writes outside any turn of its own, such as a system message before its loop or inside
the first question, the words are trained and nothing that the template puts around them.
What is decided are strokes, (begin, end, weight) of characters in order, which a kernel paints for a whole batch. A
token has the weight of its last character, because most vocabularies put a space before a word into its token; a
control token that of the last character of its control text.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, final

import numpy as np

from penstock.chat._mask_kernels import paint, weigh_tokens
from penstock.chat.conversation import Conversation, Marks
from penstock.chat.encoded_text import EncodedText
from penstock.chat.knobs import Knobs, Terminators
from penstock.chat.template import Rendered
from penstock.chat.turns import Span, Turn, place_of

Weights = np.ndarray[Any, np.dtype[np.float32]]
Stroke = tuple[int, int, float]
"""Characters [begin, end) and what they weigh from now on."""
_THINKING = re.compile(
    r"<think>.*?</think>\s*|<thinking>.*?</thinking>\s*|<reasoning>.*?</reasoning>\s*|<\|begin_of_thought\|>.*?<\|end_of_thought\|>\s*",
    re.DOTALL,
)

_TAG = re.compile(r"\s*(?:<[^<>\s]+>|\[[^\[\]\s]+\])\s*")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be trained of a conversation."""

    strokes: tuple[Stroke, ...]
    """In order: later ones cover earlier ones."""
    trained: tuple[int, ...]
    """Messages whose turn is trained, rising."""
    terminators: Mapping[int, Span]
    """Characters of the terminator of each turn that has one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """What is trained of a conversation, and why."""

    characters: Weights
    """[characters]."""
    tokens: Weights
    """[tokens]."""
    straddling: np.ndarray[Any, np.dtype[np.bool_]]
    """Tokens that hold characters of different weights, bool [tokens]."""
    owners: np.ndarray[Any, np.dtype[np.int64]]
    """The message that each token belongs to, int64 [tokens]: that of the words it begins in, else that of its turn;
    −1: the template's."""
    generated: np.ndarray[Any, np.dtype[np.bool_]] | None
    """Tokens that end inside the template's `{% generation %}` tags, bool [tokens]; None where it has none."""
    trained: tuple[int, ...]
    terminators: Mapping[int, Span]


def decide(
    conversation: Conversation,
    rendered: Rendered,
    turns: Mapping[int, Turn],
    encoded: EncodedText,
    knobs: Knobs,
    eos_text: str | None,
    stops: Collection[str] = (),
) -> Decision:
    """Decide what is trained of a conversation.

    Args:
        conversation: Messages with their marks.
        rendered, turns, encoded: Its text, turns and tokens.
        knobs: What to train.
        eos_text: The tokenizer's EOS as text: other terminators follow `train_on_eot`.
        stops: See `find_terminators`.
    """
    trained = trained_messages(conversation, knobs)
    replies = {number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"}
    terminators = find_terminators(rendered.text, turns, encoded, stops, replies)
    closing = _closing(conversation, rendered, turns)
    ends = {closing[message]: span for message, span in terminators.items()}
    strokes = [
        *([(0, len(rendered.text), 1.0)] if knobs.train_on_inputs else []),
        *_turn_strokes(conversation, rendered, turns, knobs, trained),
        *_stray_strokes(conversation, rendered, turns, knobs, trained),
        *_terminator_strokes(conversation, rendered.text, ends, knobs, trained, eos_text),
        *_range_strokes(rendered, conversation.marks),
    ]
    return Decision(strokes=tuple(strokes), trained=trained, terminators=terminators)


def weigh(
    decisions: Sequence[Decision],
    turns: Sequence[Mapping[int, Turn]],
    rendered: Sequence[Rendered],
    encoded: Sequence[EncodedText],
) -> list[Mask]:
    """Masks of a batch of conversations.

    Args:
        decisions, turns, rendered, encoded: Of each conversation.
    """
    texts = [made.text for made in rendered]
    bases = [0, *accumulate(map(len, texts))]
    characters, owners = np.zeros(bases[-1], np.float32), np.full(bases[-1], -1, np.int32)
    strokes = [
        (b + base, e + base, w) for made, base in zip(decisions, bases, strict=False) for b, e, w in made.strokes
    ]
    paint(*_columns(strokes, np.float32), characters)
    pieces = [
        (begin + base, end + base, message)
        for found, base in zip(turns, bases, strict=False)
        for message, turn in found.items()
        for begin, end in turn.pieces
    ]
    pieces += [
        (words.begin + base, words.end + base, words.message)
        for made, found, base in zip(rendered, turns, bases, strict=False)
        for words in made.words
        if words.message != words.owner or words.owner not in found
    ]
    paint(*_columns(pieces, np.int32), owners)
    counts = [len(text.ids) for text in encoded]
    shifts = np.repeat(np.array(bases[:-1], np.int64), counts)
    begins = np.concatenate([text.begins for text in encoded]) + shifts
    ends = np.concatenate([_ends_of_control_text(*pair) for pair in zip(texts, encoded, strict=True)]) + shifts
    weights, straddling = np.empty(len(begins), np.float32), np.empty(len(begins), np.bool_)
    token_owners = np.empty(len(begins), np.int64)
    weigh_tokens(begins, ends, characters, owners, weights, straddling, token_owners)
    runs = [run for made in rendered for run in made.runs]
    generated = None
    if any(run[5] for run in runs):
        tagged = np.repeat(np.array([run[5] for run in runs]), np.array([run[0] for run in runs]))
        generated = tagged[ends - 1] & (ends > begins)
    masks = []
    for decision, (low, high), (first, last) in zip(
        decisions, pairwise(bases), pairwise([0, *accumulate(counts)]), strict=True
    ):
        masks.append(
            Mask(
                characters=characters[low:high],
                tokens=weights[first:last],
                straddling=straddling[first:last],
                owners=token_owners[first:last],
                generated=None if generated is None else generated[first:last],
                trained=decision.trained,
                terminators=decision.terminators,
            )
        )
    return masks


def _ends_of_control_text(text: str, encoded: EncodedText) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`encoded.ends`, of control tokens without whitespace that they take along from what follows (Phi-3)."""
    ends = encoded.ends
    for token in np.flatnonzero(encoded.is_control).tolist():
        begin, end = int(encoded.begins[token]), int(encoded.ends[token])
        if begin < end and text[end - 1].isspace():
            ends = ends.copy() if ends is encoded.ends else ends
            ends[token] = begin + (len(text[begin:end].rstrip()) or end - begin)
    return ends


def _columns(strokes: Sequence[tuple[int, int, Any]], dtype: Any) -> tuple[Any, Any, Any]:
    """Begins, ends and values as arrays."""
    if not strokes:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, dtype)
    begins, ends, values = zip(*strokes, strict=True)
    return np.array(begins, np.int64), np.array(ends, np.int64), np.array(values, dtype)


def _turn_strokes(
    conversation: Conversation, rendered: Rendered, turns: Mapping[int, Turn], knobs: Knobs, trained: Sequence[int]
) -> Iterator[Stroke]:
    """Trained turns at their weight, without their reasoning where it is not trained; others at 0."""
    for message, turn in turns.items():
        weight = conversation.marks[message].weight
        if message not in trained:
            if knobs.train_on_inputs:
                yield from ((begin, end, 0.0) for begin, end in turn.pieces)
            continue
        for begin, end in turn.pieces if knobs.train_on_inputs else turn.produced:
            yield begin, end, 1.0 if weight is None else weight
        if not knobs.train_on_reasoning:
            yield from _reasoning_strokes(rendered, turn)


def _stray_strokes(
    conversation: Conversation, rendered: Rendered, turns: Mapping[int, Turn], knobs: Knobs, trained: Sequence[int]
) -> Iterator[Stroke]:
    """Words that stand outside their message's own turn, as the system's often do: they count, and nothing around them.

    A reply needs a turn: its words count only where another reply's turn holds them, into which they were merged.
    """
    roles = [message["role"] for message in conversation.messages]
    for words in rendered.words:
        message = words.message
        place = place_of(words, turns)
        if place == message:
            continue
        merged = place is not None and roles[place] == roles[message]
        weight = conversation.marks[message].weight
        if message in trained and (merged or roles[message] != "assistant"):
            yield words.begin, words.end, 1.0 if weight is None else weight
        elif message not in trained and (merged or knobs.train_on_inputs):
            yield words.begin, words.end, 0.0


def _closing(conversation: Conversation, rendered: Rendered, turns: Mapping[int, Turn]) -> dict[int, int]:
    """The message that ends each turn: its own, or the last of those that were merged into it."""
    closing = {message: message for message in turns}
    roles = [message["role"] for message in conversation.messages]
    for words in rendered.words:
        place = None if words.message in turns else place_of(words, turns)
        if place is not None and roles[place] == roles[words.message]:
            closing[place] = max(closing[place], words.message)
    return closing


def _terminator_strokes(
    conversation: Conversation,
    text: str,
    ends: Mapping[int, Span],
    knobs: Knobs,
    trained: Sequence[int],
    eos_text: str | None,
) -> Iterator[Stroke]:
    known = {text[begin:end] for message, (begin, end) in ends.items() if message in trained}
    # Trained ones last: the marker that ends a reply may be all that there is of the next turn (GLM-4, empty content).
    for message, (begin, end) in sorted(ends.items(), key=lambda item: item[0] in trained):
        # What ends the turns of others may begin a reply ([/INST]).
        if message not in trained and text[begin:end] not in known:
            continue
        if not (knobs.train_on_inputs and message in trained):
            policy = knobs.train_on_eos if text[begin:end] == eos_text else knobs.train_on_eot or knobs.train_on_eos
            own = conversation.marks[message].weight
            yield begin, end, _terminator_weight(policy, message, trained, 1.0 if own is None else own)


def find_terminators(
    text: str, turns: Mapping[int, Turn], encoded: EncodedText, stops: Collection[str], replies: Collection[int]
) -> dict[int, Span]:
    """What ends each turn: a control token after its words, or else all text there; or what begins the next turn.

    In some families the model stops by writing the control token with which the next turn begins (GLM-4: <|user|>), so
    that token ends a reply. It ends no other message.

    Args:
        text, turns, encoded: A conversation.
        stops: Control text that is known to end a generation; it goes before other control text, such as </tool_call>.
        replies: Messages that are the assistant's.
    """
    control = np.flatnonzero(encoded.is_control)
    places = encoded.begins[control].tolist()
    spans = list(zip(places, encoded.ends[control].tolist(), strict=True))
    found = {}
    for message, turn in turns.items():
        last = bisect_left(places, turn.end)
        first = bisect_left(places, max(turn.words_end, turn.pieces[-1][0]))
        own = spans[first:last]
        behind = []
        if message in replies and last < len(spans) and spans[last][0] == turn.pieces[-1][1] == turn.end:
            behind = [spans[last]]
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


def trained_messages(conversation: Conversation, knobs: Knobs) -> tuple[int, ...]:
    """Messages that are trained: what the record says of them goes first, then their role."""
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


def _reasoning_strokes(rendered: Rendered, turn: Turn) -> Iterator[Stroke]:
    """The reasoning of a turn, and the tags around it: what it is written in, and the first tag behind it."""
    at, end = 0, None
    for length, message, field, _, _, _ in rendered.runs:
        at += length
        if message == turn.message and field == "reasoning_content" and turn.pieces[0][0] < at <= turn.end:
            end = at
    if end is not None and turn.produced:
        closing = _TAG.match(rendered.text, end, turn.end)
        yield turn.produced[0][0], closing.end() if closing else end, 0.0
    # The prompt may supply the opening tag.
    for begin, last in turn.pieces:
        for found in _THINKING.finditer(rendered.text, begin, last):
            yield found.start(), found.end(), 0.0


def _range_strokes(rendered: Rendered, marks: Sequence[Marks]) -> Iterator[Stroke]:
    """The weights that a record gives to characters of its messages."""
    if not any(mark.ranges for mark in marks):
        return
    at = 0
    for length, message, field, offset, _, _ in rendered.runs:
        if message >= 0 and offset >= 0:
            for part in marks[message].ranges:
                if part.field == field:
                    begin, end = max(part.begin - offset, 0), min(part.end - offset, length)
                    if begin < end:
                        yield at + begin, at + end, part.weight
        at += length
