"""Rows of documents, as a loader would give them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock import ModelInput
from penstock.plan.inputs import IGNORE

LENGTHS = (7, 1, 12)
"""Documents of a row."""


def make_row(lengths: Sequence[int], padding: int = 0, **fields: Any) -> ModelInput:
    """Documents of these lengths, then padding; no token is a target. `fields` replace what follows
    from lengths.
    """
    pieces = [*lengths, padding] if padding else [*lengths]
    slots = sum(pieces)
    derived = {
        "tokens": np.zeros(slots, np.int32),
        "targets": np.full((1, slots), IGNORE, np.int32),
        "loss_weights": None,
        "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in [0, *pieces]]),
        "document_ids": np.repeat(np.arange(len(pieces), dtype=np.int32), pieces),
        "cu_seqlens": np.cumsum([0, *pieces]).astype(np.int32),
        "max_seqlen": max(pieces, default=0),
        "num_tokens": sum(lengths),
        "source_ids": np.zeros(len(lengths), np.int32),
    }
    return ModelInput(**{**derived, **fields})


def random_tokens(
    lengths: Sequence[int] = LENGTHS, *, padding: int = 3, seed: int = 0, below: int = 60
) -> ModelInput:
    """Documents of random tokens; no token is a target."""
    tokens = np.random.default_rng(seed).integers(0, below, sum(lengths) + padding).astype(np.int32)
    return make_row(lengths, padding, tokens=tokens)


def random_row(
    lengths: Sequence[int] = LENGTHS,
    *,
    padding: int = 3,
    prefixes: Sequence[int] | None = None,
    distances: int = 1,
    seed: int = 0,
    below: int = 61,
) -> ModelInput:
    """Documents of random tokens; each predicts its own next tokens, with weights of all sizes."""
    random = np.random.default_rng(seed)
    row = make_row(lengths, padding)
    slots, ids = row.sequence_length, row.document_ids
    tokens = random.integers(0, below, slots)
    targets = np.full((distances, slots), IGNORE)
    for d in range(1, distances + 1):
        same = (ids[d:] == ids[:-d]) & (np.arange(d, slots) < row.num_tokens)
        targets[d - 1, :-d][same] = tokens[d:][same]
    weights = (random.random((distances, slots)) * (targets != IGNORE)).astype(np.float32)
    fields: dict[str, Any] = {"tokens": tokens, "targets": targets, "loss_weights": weights}
    if prefixes is not None:
        ends = np.repeat([*prefixes, *[0] * bool(padding)], np.diff(row.cu_seqlens))
        fields |= {"prefix_lengths": np.array(prefixes, np.int32), "prefix": row.positions < ends}
    return make_row(lengths, padding, **fields)
