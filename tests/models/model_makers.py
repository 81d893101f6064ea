"""Tiny models for the tests of models, and their logits."""

from typing import Any

import torch

from makers.models import tiny_model
from penstock import ModelInput
from penstock.models import LanguageModel

VOCABULARY = 61


def tiny(dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any) -> Any:
    """A tiny model in double precision that knows the tokens of `random_row`."""
    return tiny_model(VOCABULARY, dtype=dtype, seed=seed, **settings)


def logits_of(model: LanguageModel, row: ModelInput, backend: str = "auto") -> torch.Tensor:
    """[D, T, vocabulary], without gradients."""
    with torch.no_grad():
        return model.logits(model(model.tensors(row, backend)))
