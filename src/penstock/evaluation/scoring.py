"""Log-probabilities of many short sequences: packed into rows, documents apart, in few passes.

What is fed of a pair is its context and its continuation but for the last token, which is only predicted. Pairs that
feed the same tokens, as the letters of a multiple choice do, are run once. Longest first, so that a row is filled by
sequences of a length. Only the slots that predict a continuation reach the head, in blocks.

Costs: one pass over all tokens that are fed. Contexts that begin alike, as with solved problems before each, are
computed each time anew: with five of them a question of MMLU takes several times the tokens of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from penstock.inputs import ModelInput, pack_documents
from penstock.models import LanguageModel

ELEMENTS = 1 << 24
"""Logits that exist at once, about."""

Ids = tuple[int, ...]
Int64 = np.ndarray[Any, np.dtype[np.int64]]


@final
@dataclass(frozen=True, slots=True)
class Scored:
    """How likely a model finds a continuation."""

    log_probability: float
    """Natural logarithm, summed over its tokens."""
    is_greedy: bool
    """Whether each token is the likeliest."""


@torch.no_grad()
def score_pairs(
    model: LanguageModel, pairs: Sequence[tuple[Ids, Ids]], *, row_tokens: int, vocab_size: int
) -> list[Scored]:
    """Log-probabilities of continuations, in the order of the pairs.

    Args:
        model: In evaluation mode.
        pairs: (context, continuation), none of either empty.
        row_tokens: Slots of a row, as many as `most_packed` allows; a longer sequence has a row of its own.
        vocab_size: Of the tokenizer: logits beyond are no tokens and left out.

    Raises:
        IsolationError: Sequences would see each other in rows of this length.
    """
    owners: dict[Ids, list[int]] = {}
    for place, (context, continuation) in enumerate(pairs):
        owners.setdefault((*context, *continuation[:-1]), []).append(place)
    sums = np.zeros(len(pairs))
    greedy = np.ones(len(pairs), np.bool_)
    for members in _rows(sorted(owners, key=lambda fed: (-len(fed), fed)), row_tokens):
        slots, targets, of = _wanted(members, owners, pairs)
        hidden = model(model.tensors(packed(members)))[0]
        places, inverse = np.unique(slots, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        inverse, targets, of = inverse[order], targets[order], of[order]
        block = max(16, ELEMENTS // model.vocab_size)
        for begin in range(0, len(places), block):
            end = begin + block
            index = torch.from_numpy(places[begin:end]).to(hidden.device)
            logits = model.logits(hidden.index_select(0, index))[:, :vocab_size]
            some = slice(*np.searchsorted(inverse, (begin, end)))
            rows = torch.from_numpy(inverse[some] - begin).to(hidden.device)
            chosen = torch.from_numpy(targets[some]).to(hidden.device)
            logs = logits.log_softmax(-1)[rows, chosen].double().cpu().numpy()
            likeliest = (logits.argmax(-1)[rows] == chosen).cpu().numpy()
            np.add.at(sums, of[some], logs)
            np.logical_and.at(greedy, of[some], likeliest)
    return [Scored(float(one), bool(same)) for one, same in zip(sums, greedy, strict=True)]


def packed(documents: Sequence[Sequence[int]]) -> ModelInput:
    """One row of documents, apart, without padding."""
    row, _ = pack_documents([np.array(ids, np.int32) for ids in documents], np.zeros(len(documents), np.int32))
    return row


def _rows(sequences: Sequence[Ids], row_tokens: int) -> Iterator[list[Ids]]:
    """Sequences in order, as many to a row as it holds."""
    row: list[Ids] = []
    used = 0
    for one in sequences:
        if row and used + len(one) > row_tokens:
            yield row
            row, used = [], 0
        row.append(one)
        used += len(one)
    if row:
        yield row


def _wanted(
    members: Sequence[Ids], owners: dict[Ids, list[int]], pairs: Sequence[tuple[Ids, Ids]]
) -> tuple[Int64, Int64, Int64]:
    """Of each token to be scored in a row: the slot that predicts it, its id, and the pair it belongs to."""
    slots: list[int] = []
    targets: list[int] = []
    of: list[int] = []
    begin = 0
    for fed in members:
        for pair in owners[fed]:
            context, continuation = pairs[pair]
            first = begin + len(context) - 1
            slots += range(first, first + len(continuation))
            targets += continuation
            of += [pair] * len(continuation)
        begin += len(fed)
    return np.array(slots, np.int64), np.array(targets, np.int64), np.array(of, np.int64)
