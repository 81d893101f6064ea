"""Tiny models and random rows for the tests of models."""

from typing import Any

import numpy as np
import torch

from penstock.inputs import IGNORE, ModelInput
from penstock.models import LanguageModel, ModelSettings, build_model

torch.set_num_threads(1)
VOCABULARY = 61
LENGTHS = (7, 1, 12)
"""Documents of a row; padding comes behind."""


def tiny(dtype: torch.dtype = torch.float64, seed: int = 0, **extra: Any) -> Any:
    """Two layers of width 32, with weights large enough that everything depends on everything."""
    settings = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "init_std": 0.2, **extra}
    return build_model(ModelSettings(**settings), vocab_size=VOCABULARY, dtype=dtype, seed=seed)


def make_row(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    padding: int = 3,
    prefixes: tuple[int, ...] | None = None,
    distances: int = 1,
    seed: int = 0,
) -> ModelInput:
    """Documents of random tokens; each predicts its own next tokens, with weights of all sizes."""
    random = np.random.default_rng(seed)
    pieces = [*lengths, padding] if padding else [*lengths]
    slots, used = sum(pieces), sum(lengths)
    tokens = random.integers(0, VOCABULARY, slots)
    ids = np.repeat(np.arange(len(pieces)), pieces)
    targets = np.full((distances, slots), IGNORE)
    for d in range(1, distances + 1):
        same = (ids[d:] == ids[:-d]) & (np.arange(d, slots) < used)
        targets[d - 1, :-d][same] = tokens[d:][same]
    weights = (random.random((distances, slots)) * (targets != IGNORE)).astype(np.float32)
    positions = np.concatenate([np.arange(length) for length in pieces])
    return ModelInput(
        tokens=tokens,
        targets=targets,
        loss_weights=weights,
        positions=positions,
        document_ids=ids,
        cu_seqlens=np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32),
        max_seqlen=max(pieces),
        num_tokens=used,
        source_ids=np.zeros(len(lengths), np.int32),
        prefix_lengths=None if prefixes is None else np.array(prefixes, np.int32),
        prefix=None if prefixes is None else positions < np.repeat([*prefixes, *[0] * bool(padding)], pieces),
    )


def logits_of(model: LanguageModel, row: ModelInput, backend: str = "auto") -> torch.Tensor:
    """[D, T, vocabulary], without gradients."""
    with torch.no_grad():
        return model.logits(model(model.tensors(row, backend)))
