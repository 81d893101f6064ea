"""Which slots of a rewritten document have the document's own tokens (*words*), and what the other
slots are for: read back from a row.

It goes by position, not by id: the objective's own `restore` gives the slot of each word, so words
that look like sentinels are not mistaken for them. Only added tokens are named by their ids, which
no two roles share. Infilling at characters encodes the words again, and fragments are found by
their separators, so there ids decide. Where an objective writes targets of its own, a slot that has
one predicts it. Of other objectives of the user, only the prefix is known. Costs one restoration
per document, a few microseconds per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.objectives.denoise import Denoise
from penstock.plan.objectives.diffusion import BlockDiffusion, MaskedDiffusion
from penstock.plan.objectives.fragments import WrittenFragment
from penstock.plan.objectives.infill import ORDERS, Infill
from penstock.plan.objectives.objective import NO_TARGET

TEXT = "text"
WORD_ROLES = frozenset(
    {
        *("input", "target", TEXT, "prefix", "suffix", "middle", "prefix and middle"),
        *("kept", "clean", "predicts"),
    }
)
"""Roles of the document's own tokens; all other roles are of tokens that the objective or the
loader added.
"""
STANDING = frozenset({"masked", "replaced"})
"""Roles of tokens in place of a word: a mask, or a wrong word. Their targets are that word."""
PREDICTING = STANDING | {"kept", "predicts"}
"""Roles of slots with a target of their own; *kept* shows the word that it predicts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Adjacent slots of a row with one purpose."""

    begin: int
    """First slot."""
    end: int
    """One after the last slot."""
    part: str
    """Part of the rewritten document: inputs, targets; prefix, suffix, middle; text if it has only
    one part.
    """
    role: str
    """Role of each token: input, target, sentinel (in place of a span, and before the span), mode,
    input end, …
    """
    span: int = -1
    """Number, from 0, of the span that the sentinel or words belong to; −1: none."""
    word: int = -1
    """Number of its first token among the document's words; −1: it has no words."""
    block: int = -1
    """Number of its block; −1: the document is not cut into blocks."""
    level: float | None = None
    """Level of noise of its block or document; None: it is not noised, or nothing is masked."""

    @property
    def is_added(self) -> bool:
        """Whether the tokens are not the document's own."""
        return self.role not in WORD_ROLES


def in_order(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The stretches with words, in the order of the document."""
    return sorted((each for each in stretches if each.word >= 0), key=lambda each: each.word)


def stretches_of(
    rewriting: Rewriting,
    piece: Any,
    tokens: Array,
    begin: int,
    prefix: int,
    *,
    targets: Array | None = None,
    controls: frozenset[int] = frozenset(),
) -> tuple[Stretch, ...]:
    """The stretches of one document in a row, in order; none if it is unchanged.

    Args:
        rewriting: The rewriting of its source.
        piece: Its line in the plan.
        tokens: [slots] its tokens in the row.
        begin: Its first slot.
        prefix: Number of its first slots that see each other in both directions.
        targets: [slots] its targets, if the objective writes them.
        controls: Ids that no text has.
    """
    if rewriting.is_causal:
        return ()
    head, tail, length = (int(part[0]) for part in rewriting.framing(piece[None]))
    if not length:
        return ()
    # EOS comes before tokens that only fill the document up, which only objectives in Python add.
    filling = rewriting.write(piece).padding if rewriting.runs_in_python else 0
    eos = len(tokens) - tail - filling

    def inside(values: Array) -> Array:
        return np.delete(np.asarray(values), slice(eos, eos + tail))[head:]

    key = int(rewriting.keys(piece[None])[0])
    if targets is None:
        found = _read(rewriting.objective, inside(tokens), length, key, prefix - head, filling)
    else:
        found = _read_targets(
            rewriting, piece, inside(tokens), inside(targets), key, filling, controls
        )
    if not found:
        return ()
    found = [replace(each, begin=each.begin + head, end=each.end + head) for each in found]
    behind = [
        replace(each, begin=each.begin + tail, end=each.end + tail)
        for each in found
        if each.begin >= eos
    ]
    before = [each for each in found if each.begin < eos]
    first = "BOS" if rewriting.makes_nodes else found[0].part
    parts = [
        *([Stretch(begin=0, end=1, part=first, role="BOS")] if head else []),
        *before,
        *([Stretch(begin=eos, end=eos + 1, part=before[-1].part, role="EOS")] if tail else []),
        *behind,
    ]
    return tuple(replace(each, begin=each.begin + begin, end=each.end + begin) for each in parts)


def _read(
    objective: object, tokens: Array, length: int, key: int, prefix: int, filling: int
) -> list[Stretch]:
    if isinstance(objective, Denoise):
        return _read_denoised(objective, tokens, length, key)
    if isinstance(objective, Infill):
        return _read_infilled(objective, tokens, length, key, filling)
    if prefix <= 0:
        return []
    end = len(tokens) - filling
    rest = [Stretch(begin=prefix, end=end, part="rest", role=TEXT)] if prefix < end else []
    return [
        Stretch(begin=0, end=prefix, part="prefix", role="prefix"),
        *rest,
        *_filled_up(end, tokens, "rest"),
    ]


def _filled_up(end: int, tokens: Array, part: str) -> list[Stretch]:
    return (
        [Stretch(begin=end, end=len(tokens), part=part, role="filling")]
        if end < len(tokens)
        else []
    )


def _read_denoised(objective: Denoise, tokens: Array, length: int, key: int) -> list[Stretch]:
    words, owners = np.full((2, len(tokens)), -1)
    places = objective.restore(np.arange(len(tokens), dtype=np.int32), length, key)
    words[places] = np.arange(length)
    spans = objective.spans(length, key)
    for number, (begin, end) in enumerate(spans):
        owners[places[begin:end]] = number
    roles = np.where(owners >= 0, "target", "input" if spans else TEXT).astype(object)
    names = _names_of(objective)
    for slot in np.flatnonzero(words < 0).tolist():
        roles[slot], owners[slot] = names[int(tokens[slot])]
    if not spans:
        return _grouped(words, roles, owners, np.full(len(tokens), TEXT, object))
    if objective.final_sentinel:
        roles[-1], owners[-1] = "final sentinel", -1
    bar = int(np.flatnonzero(roles == "target")[0])
    bar -= int(roles[bar - 1] == "sentinel")
    return _grouped(
        words, roles, owners, np.where(np.arange(len(tokens)) < bar, "inputs", "targets")
    )


def _names_of(objective: Denoise) -> dict[int, tuple[str, int]]:
    """Role of each added id, and the span that a sentinel represents."""
    named = [(task.mode, ("mode", -1)) for task in objective.tasks]
    named.append((objective.input_end, ("input end", -1)))
    named += [
        (sentinel, ("sentinel", number))
        for number, sentinel in enumerate(objective.sentinels or ())
    ]
    return {token: role for token, role in named if isinstance(token, int)}


def _grouped(words: Array, roles: Array, owners: Array, parts: Array) -> list[Stretch]:
    """Stretches of slots with the same properties and consecutive words."""
    breaks = (roles[1:] != roles[:-1]) | (owners[1:] != owners[:-1]) | (parts[1:] != parts[:-1])
    breaks |= (words[1:] >= 0) & (words[1:] != words[:-1] + 1)
    breaks |= (words[1:] < 0) & (words[:-1] >= 0)
    begins = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    return [
        Stretch(
            begin=begin,
            end=end,
            part=str(parts[begin]),
            role=str(roles[begin]),
            span=int(owners[begin]),
            word=int(words[begin]),
        )
        for begin, end in zip(begins, [*begins[1:], len(words)], strict=True)
    ]


def _read_infilled(
    objective: Infill, tokens: Array, length: int, key: int, filling: int
) -> list[Stretch]:
    order = objective.task(length, key)
    if order == "causal":
        return []
    end = len(tokens) - filling
    if objective.program() is None:
        found = _read_fragments(objective, tokens[:end], key)
        return [*found, *_filled_up(end, tokens, found[-1].part)]
    _, middle_id, suffix_id, *_ = objective.tokens or ()
    added = np.ones(len(tokens), bool)
    added[objective.restore(np.arange(len(tokens), dtype=np.int32), length, key)] = False
    suffix, middle = (
        int(np.flatnonzero(added & (tokens == token))[0]) for token in (suffix_id, middle_id)
    )
    return _sections(
        WrittenFragment(begin=0, end=end, order=ORDERS.index(order), suffix=suffix, middle=middle),
        word=0,
        span=0,
    )


def _read_fragments(objective: Infill, tokens: Array, key: int) -> list[Stretch]:
    """The stretches of a document that is infilled in fragments; separators are text."""
    found: list[Stretch] = []
    word = span = 0
    for fragment in objective.fragments(tokens, key):
        begin, after = fragment.begin, min(fragment.end + 1, len(tokens))
        size = sum(section.stop - section.start for section in fragment.sections)
        if ORDERS[fragment.order] != "causal":
            found += _sections(fragment, word=word, span=span)
            begin, span = fragment.end, span + 1
            word, size = word + size, 0
        size += after - fragment.end
        if begin < after:
            text = Stretch(begin=begin, end=after, part=TEXT, role=TEXT, word=word)
            if found and found[-1].role == TEXT:
                text = replace(text, begin=found[-1].begin, word=found.pop().word)
            found.append(text)
        word += size
    return found


def _sections(fragment: WrittenFragment, *, word: int, span: int) -> list[Stretch]:
    """The stretches of a fragment that begins with this word of its document."""
    begin, end, suffix, middle = fragment.begin, fragment.end, fragment.suffix, fragment.middle
    first, last = suffix - begin - 1, end - middle - 1
    if ORDERS[fragment.order] == "PSM":
        words = [
            ("prefix", begin, begin + 1, suffix, 0, -1),
            ("suffix", suffix, suffix + 1, middle, first + last, -1),
        ]
        words.append(("middle", middle, middle + 1, end, first, span))
    else:
        # The row does not show where the prefix ends and the middle begins, and the model does not
        # see it either.
        words = [("prefix", begin, begin + 1, begin + 1, 0, -1)]
        words.append(("suffix", suffix, suffix + 1, middle, last, -1))
        words.append(("prefix and middle", middle, middle + 1, end, 0, -1))
    found = []
    for role, at, start, stop, place, number in words:
        token = "middle token" if at == middle else f"{role} token"
        found.append(Stretch(begin=at, end=start, part=role, role=token, span=number))
        if start < stop:
            found.append(
                Stretch(begin=start, end=stop, part=role, role=role, span=number, word=word + place)
            )
    return found


# -- targets of an objective's own
# --------------------------------------------------------------------------------------------------


def _read_targets(
    rewriting: Rewriting,
    piece: Any,
    tokens: Array,
    targets: Array,
    key: int,
    filling: int,
    controls: frozenset[int],
) -> list[Stretch]:
    """The stretches of a document whose targets are the objective's own.

    Args:
        rewriting: The rewriting of its source.
        piece: Its line in the plan.
        tokens: [slots] what the model reads, without BOS and EOS that the loader put around it.
        targets: [slots] what it must predict; −100: nothing.
        key: The key of the document.
        filling: Number of trailing slots that only fill it up.
        controls: Ids that no text has.
    """
    objective, words = rewriting.objective, rewriting.words(piece)
    places = _word_of_slots(objective, tokens, targets, words, len(tokens) - filling)
    eos = rewriting.words_end_with_eos(piece) & (places == len(words) - 1)
    places[eos] = -1
    predicted = targets != NO_TARGET
    masks = np.isin(tokens, [*controls, *rewriting.added_tokens])
    known = bool((places >= 0).any())
    roles = np.full(len(tokens), "input", object)
    roles[predicted] = "predicts"
    if known:
        roles[predicted] = np.where(masks[predicted], "masked", "replaced")
        roles[predicted & (tokens == targets)] = "kept"
    if isinstance(objective, MaskedDiffusion | BlockDiffusion):
        roles[predicted] = "masked"
    roles[~predicted & (places < 0) & known] = "filling"
    roles[~predicted & eos] = "EOS"
    parts, blocks = np.full(len(tokens), TEXT, object), np.full(len(tokens), -1)
    if isinstance(objective, BlockDiffusion):
        blocks, clean = _blocks(objective, len(tokens))
        roles[clean] = "clean"
        parts = np.array(
            [f"block {b}{', clean copy' * bool(c)}" for b, c in zip(blocks, clean, strict=True)],
            object,
        )
    return _with_levels(
        objective, _grouped(places, roles, _runs(predicted, parts), parts), blocks, words, key
    )


def _with_levels(
    objective: object, stretches: list[Stretch], blocks: Array, words: Array, key: int
) -> list[Stretch]:
    """Stretches with their blocks, and with the levels of those in which something is masked."""
    levels: Array = np.empty(0)
    if isinstance(objective, MaskedDiffusion | BlockDiffusion):
        levels = objective.levels(len(words), key)
    masked = {each.part for each in stretches if each.role == "masked"}
    found = []
    for each in stretches:
        block = int(blocks[each.begin])
        has = each.part in masked and len(levels) > 0
        level = float(levels[max(block, 0)]) if has else None
        found.append(replace(each, block=block, level=level))
    return found


def _word_of_slots(
    objective: object, tokens: Array, targets: Array, words: Array, end: int
) -> Array:
    """[slots] number of the word that each slot holds or stands for; −1: none, or unknown."""
    places = np.arange(len(tokens))
    if isinstance(objective, BlockDiffusion):
        blocks, clean = _blocks(objective, len(tokens))
        places = np.where(clean, -1, blocks * objective.block + places % objective.block)
    places[(places >= len(words)) | (np.arange(len(tokens)) >= end)] = -1
    restored = np.where(targets == NO_TARGET, tokens, targets)[places >= 0]
    # Of an objective of the user, slots stand for words only if they give all of them back.
    return places if np.array_equal(restored, words) else np.full(len(tokens), -1)


def _blocks(objective: BlockDiffusion, slots: int) -> tuple[Array, Array]:
    """[slots] number of the block of each, and whether it is of a clean copy."""
    halves = np.arange(slots) // objective.block
    if objective.form == "prefix":
        return halves, np.zeros(slots, bool)
    return halves // 2, halves % 2 == 1


def _runs(predicted: Array, parts: Array) -> Array:
    """[slots] number of the run of predicting slots that each is in, within a part; −1: none."""
    begins = predicted & ~np.append(False, predicted[:-1] & (parts[1:] == parts[:-1]))
    return np.where(predicted, np.cumsum(begins) - 1, -1)
