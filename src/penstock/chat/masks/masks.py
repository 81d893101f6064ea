"""Loss weights of rendered conversations: first of their characters, then of their tokens.

A trained turn trains what the model must produce; settings and the record's weights exclude parts
of it. A message outside any turn of its own, such as a system message that the template writes
before its loop or in the first question, trains only its own text, and nothing that the template
writes around it.

`decide` lists strokes (begin, end, weight) over characters; a kernel paints them in order, for a
whole batch. A token has the weight of its last character, because most vocabularies put the space
before a word into its token. A control token has the weight of the last character of its control
text.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, final

import numpy as np

from penstock.chat.masks._kernels import paint, weigh_tokens
from penstock.chat.masks.mask_settings import MaskSettings, Terminators
from penstock.chat.records.conversation import Conversation, MessageWeights
from penstock.chat.render.template import Rendered
from penstock.chat.render.turns import Span, Turn, place_of
from penstock.chat.tokens.encoding import EncodedText
from penstock.core.arrays import Bool, Float32, Int64

Weights = Float32
Stroke = tuple[int, int, float]
"""Characters [begin, end) and their new weight."""
_THINKING = re.compile(
    r"<think>.*?</think>\s*|<thinking>.*?</thinking>\s*|<reasoning>.*?</reasoning>\s*|<\|begin_of_thought\|>.*?<\|end_of_thought\|>\s*",
    re.DOTALL,
)

HISTORY = "an earlier reply, and only the last one is trained (mask_history, or on_rewrite: split)"
"""Why a message is not trained, although its role is."""

_TAG = re.compile(r"\s*(?:<[^<>\s]+>|\[[^\[\]\s]+\])\s*")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which parts of a conversation are to be trained."""

    strokes: tuple[Stroke, ...]
    """In order: later ones cover earlier ones."""
    trained: tuple[int, ...]
    """Messages with trained turns, ascending."""
    terminators: Mapping[int, Span]
    """Message → characters of its turn's terminator, where it has one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Loss weights of a conversation, and what they are based on."""

    characters: Weights
    """float32 [characters]."""
    tokens: Weights
    """float32 [tokens]."""
    straddling: Bool
    """Tokens with characters of different weights, bool [tokens]."""
    owners: Int64
    """Message of each token, int64 [tokens]: of its first character, or of the turn around it; −1:
    the template's.
    """
    generated: Bool | None
    """Tokens that end inside the template's `{% generation %}` tags, bool [tokens]; None: it has no
    such tags.
    """
    trained: tuple[int, ...]
    terminators: Mapping[int, Span]


class _Whole(NamedTuple):
    """One conversation, as the functions that list strokes need it."""

    rendered: Rendered
    turns: Mapping[int, Turn]
    settings: MaskSettings
    trained: frozenset[int]
    weights: Sequence[float]
    """Weight of each message if it is trained."""


def decide(
    conversation: Conversation,
    rendered: Rendered,
    turns: Mapping[int, Turn],
    trained: tuple[int, ...],
    encoded: EncodedText,
    settings: MaskSettings,
    eos_text: str | None,
    stops: Collection[str] = (),
) -> Decision:
    """Decide which parts of a conversation are trained.

    Args:
        conversation: Messages with their weights.
        rendered, turns, encoded: Its text, turns and tokens.
        trained: Messages to train (`trained_messages`).
        settings: What to train.
        eos_text: Text of the tokenizer's EOS; other terminators follow `train_on_eot`.
        stops: See `find_terminators`.
    """
    weights = [own.weight for own in conversation.message_weights]
    whole = _Whole(
        rendered,
        turns,
        settings,
        frozenset(trained),
        [1.0 if weight is None else weight for weight in weights],
    )
    roles = [message["role"] for message in conversation.messages]
    replies = {number for number, role in enumerate(roles) if role == "assistant"}
    terminators = find_terminators(rendered.text, turns, encoded, stops, replies)
    closing = closing_messages(rendered, turns, roles)
    ends = {closing[message]: span for message, span in terminators.items()}
    strokes = [
        *([(0, len(rendered.text), 1.0)] if settings.train_on_inputs else []),
        *_turn_strokes(whole),
        *_stray_strokes(whole, roles),
        *_terminator_strokes(whole, ends, eos_text),
        *range_strokes(rendered, conversation.message_weights),
    ]
    return Decision(strokes=tuple(strokes), trained=trained, terminators=terminators)


def weigh(
    decisions: Sequence[Decision],
    turns: Sequence[Mapping[int, Turn]],
    rendered: Sequence[Rendered],
    encoded: Sequence[EncodedText],
) -> list[Mask]:
    """Masks of a batch of conversations; each argument has one entry per conversation."""
    texts = [made.text for made in rendered]
    bases = [0, *accumulate(map(len, texts))]
    characters, owners = np.zeros(bases[-1], np.float32), np.full(bases[-1], -1, np.int32)
    strokes = [
        (b + base, e + base, w)
        for made, base in zip(decisions, bases, strict=False)
        for b, e, w in made.strokes
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
    ends = (
        np.concatenate([ends_of_control_text(*pair) for pair in zip(texts, encoded, strict=True)])
        + shifts
    )
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


def ends_of_control_text(text: str, encoded: EncodedText) -> Int64:
    """`encoded.ends`, but without the whitespace that some control tokens include after their text
    (Phi-3).
    """
    control = np.flatnonzero(encoded.is_control & (encoded.begins < encoded.ends))
    # The hundreds of tokens of an image have one end.
    blank = [end for end in np.unique(encoded.ends[control]).tolist() if text[end - 1].isspace()]
    if not blank:
        return encoded.ends
    ends = encoded.ends.copy()
    for token in control[np.isin(ends[control], blank)].tolist():
        begin, end = int(encoded.begins[token]), int(ends[token])
        ends[token] = begin + (len(text[begin:end].rstrip()) or end - begin)
    return ends


def _columns(strokes: Sequence[tuple[int, int, Any]], dtype: Any) -> tuple[Any, Any, Any]:
    """Begins, ends and values as arrays."""
    if not strokes:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, dtype)
    begins, ends, values = zip(*strokes, strict=True)
    return np.array(begins, np.int64), np.array(ends, np.int64), np.array(values, dtype)


def _turn_strokes(whole: _Whole) -> Iterator[Stroke]:
    """Trained turns at their weight, without untrained reasoning; other turns at 0."""
    for message, turn in whole.turns.items():
        if message not in whole.trained:
            if whole.settings.train_on_inputs:
                yield from ((begin, end, 0.0) for begin, end in turn.pieces)
            continue
        for begin, end in turn.pieces if whole.settings.train_on_inputs else turn.produced:
            yield begin, end, whole.weights[message]
        if not whole.settings.train_on_reasoning:
            yield from reasoning_strokes(whole.rendered, turn)


def _stray_strokes(whole: _Whole, roles: Sequence[str]) -> Iterator[Stroke]:
    """Text outside the turn of its own message, as of many system messages: it counts, and nothing
    around it.

    A reply needs a turn: its text counts only if it was merged into the turn of another reply.
    """
    for words in whole.rendered.words:
        message = words.message
        place = place_of(words, whole.turns)
        if place == message:
            continue
        merged = place is not None and roles[place] == roles[message]
        if message in whole.trained and (merged or roles[message] != "assistant"):
            yield words.begin, words.end, whole.weights[message]
        elif message not in whole.trained and (merged or whole.settings.train_on_inputs):
            yield words.begin, words.end, 0.0


def closing_messages(
    rendered: Rendered, turns: Mapping[int, Turn], roles: Sequence[str]
) -> dict[int, int]:
    """The message that ends each turn: its own, or the last one that was merged into it."""
    closing = {message: message for message in turns}
    for words in rendered.words:
        place = None if words.message in turns else place_of(words, turns)
        if place is not None and roles[place] == roles[words.message]:
            closing[place] = max(closing[place], words.message)
    return closing


def _terminator_strokes(
    whole: _Whole, ends: Mapping[int, Span], eos_text: str | None
) -> Iterator[Stroke]:
    text, settings, trained = whole.rendered.text, whole.settings, whole.trained
    known = {text[begin:end] for message, (begin, end) in ends.items() if message in trained}
    # Trained ones last: the marker that ends a reply may be the whole next turn (GLM-4, empty
    # content).
    for message, (begin, end) in sorted(ends.items(), key=lambda item: item[0] in trained):
        # The end of another role's turn may begin a reply ([/INST]).
        if message not in trained and text[begin:end] not in known:
            continue
        if not (settings.train_on_inputs and message in trained):
            _, policy = terminator_policy(settings, text[begin:end] == eos_text)
            yield begin, end, _terminator_weight(policy, message, trained, whole.weights[message])


def terminator_policy(settings: MaskSettings, is_eos: bool) -> tuple[str, Terminators]:
    """The setting that decides about a terminator, and its value."""
    if is_eos or settings.train_on_eot is None:
        return "train_on_eos", settings.train_on_eos
    return "train_on_eot", settings.train_on_eot


def find_terminators(
    text: str,
    turns: Mapping[int, Turn],
    encoded: EncodedText,
    stops: Collection[str],
    replies: Collection[int],
) -> dict[int, Span]:
    """Characters of the terminator of each turn: a control token after its text, or else all other
    text there.

    In some families the model stops by writing the control token that begins the next turn (GLM-4:
    <|user|>), so that token ends a reply. It ends no other message.

    Args:
        text, turns, encoded: A conversation.
        stops: Control text that is known to end a generation; preferred to other control text, such
            as </tool_call>.
        replies: Messages of the assistant.
    """
    control = np.flatnonzero(encoded.is_control)
    places = encoded.begins[control].tolist()
    spans = list(zip(places, encoded.ends[control].tolist(), strict=True))
    found = {}
    for message, turn in turns.items():
        end = turn.end
        last = bisect_left(places, end)
        first = bisect_left(places, max(turn.words_end, turn.pieces[-1][0]))
        own = spans[first:last]
        behind = []
        if message in replies and last < len(spans) and spans[last][0] == turn.pieces[-1][1] == end:
            behind = [spans[last]]
        known = [
            span for span in [*reversed(own), *behind] if text[span[0] : span[1]].strip() in stops
        ]
        tail = text[turn.words_end : end]
        if known:
            found[message] = known[0]
        elif own:
            found[message] = own[-1]
        elif tail.strip():
            found[message] = (turn.words_end + len(tail) - len(tail.lstrip()), end)
        elif behind:
            found[message] = behind[0]
    return found


def trained_messages(conversation: Conversation, settings: MaskSettings) -> tuple[int, ...]:
    """Messages to train: the record's keys decide first, then the role."""
    chosen = []
    for message, weights in enumerate(conversation.message_weights):
        verdict = weights.verdict
        if verdict is None:
            verdict = (
                settings.train_on_inputs
                or conversation.messages[message]["role"] in settings.roles_to_train
            )
        if verdict:
            chosen.append(message)
    return tuple(chosen[-1:] if settings.mask_history else chosen)


def why_not(conversation: Conversation, message: int, settings: MaskSettings) -> str:
    """Why a message that is not trained is not."""
    weights, role = conversation.message_weights[message], conversation.messages[message]["role"]
    if weights.train is False:
        return "the record says not to train this message"
    if weights.weight == 0:
        return "the record gives this message weight 0"
    if weights.verdict or role in settings.roles_to_train or settings.train_on_inputs:
        return HISTORY
    return f"role {role} is not in roles_to_train"


def _terminator_weight(
    policy: Terminators, message: int, trained: Collection[int], weight: float
) -> float:
    if policy == "none":
        return 0.0
    if policy == "all":
        return weight if message in trained else 1.0
    if policy == "last":
        return weight if message == max(trained, default=-1) else 0.0
    return weight if message in trained else 0.0


def reasoning_strokes(rendered: Rendered, turn: Turn) -> Iterator[Stroke]:
    """The reasoning of a turn at 0, with the tags around it."""
    ends = rendered.reasoning_ends.get(turn.message, ())
    end = next((at for at in reversed(ends) if turn.pieces[0][0] < at <= turn.end), None)
    if end is not None and turn.produced:
        closing = _TAG.match(rendered.text, end, turn.end)
        yield turn.produced[0][0], closing.end() if closing else end, 0.0
    # The prompt may supply the opening tag.
    for begin, last in turn.pieces:
        for found in _THINKING.finditer(rendered.text, begin, last):
            yield found.start(), found.end(), 0.0


def range_strokes(rendered: Rendered, weights: Sequence[MessageWeights]) -> Iterator[Stroke]:
    """The weights that a record gives to characters of its messages."""
    if not any(own.ranges for own in weights):
        return
    at = 0
    for length, message, field, offset, _, _ in rendered.runs:
        if message >= 0 and offset >= 0:
            for part in weights[message].ranges:
                if part.field == field:
                    begin, end = max(part.begin - offset, 0), min(part.end - offset, length)
                    if begin < end:
                        yield at + begin, at + end, part.weight
        at += length
