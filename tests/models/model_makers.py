"""Tiny models for the tests of models, and their logits."""

from typing import Any

import torch

from makers.models import tiny_huggingface, tiny_model
from penstock import ModelInput
from penstock.models import LanguageModel

VOCABULARY = 61


def tiny(dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any) -> Any:
    """A tiny model in double precision that knows the tokens of `random_row`."""
    return tiny_model(VOCABULARY, dtype=dtype, seed=seed, **settings)


def reading_ids_only(kind: str, **settings: Any) -> Any:
    """A tiny model of transformers that takes no embeddings, so that documents cannot run as a
    batch.
    """
    inner = tiny_huggingface(kind, **settings)

    def refuse(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        if given.get("inputs_embeds") is not None:
            raise ValueError("reads ids only")

    inner.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    return inner


def logits_of(model: LanguageModel, row: ModelInput, backend: str = "auto") -> torch.Tensor:
    """[D, T, vocabulary], without gradients."""
    with torch.no_grad():
        return model.logits(model(model.tensors(row, backend)))
