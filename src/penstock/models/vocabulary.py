"""Grows the vocabulary of a model: rows of the embedding and of the head for entries that its tokenizer gained.

New rows begin as the mean of the old ones, so that a new token is at first as likely as an average one, and no logit
of an old token changes (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.models.transformer import Transformer

if TYPE_CHECKING:
    from penstock.models.language_model import LanguageModel


def grow_vocabulary(model: "LanguageModel", size: int) -> int:
    """Give a model embeddings and logits for `size` ids, in place.

    Args:
        model: A `Transformer`, or a model of transformers, without LoRA.
        size: Number of ids, more than it has.

    Returns:
        The number of rows before: the first new one.

    Raises:
        ConfigError: It is a module of your own, or logits of old tokens would change.
    """
    if isinstance(model, Transformer):
        return _grow_transformer(model, size)
    from penstock.models.huggingface_model import HuggingFaceModel

    if not isinstance(model, HuggingFaceModel):
        raise ConfigError(
            f"model: a module of your own has {model.vocab_size} ids, and the data need {size}; give it more rows"
        )
    return model.grow_vocabulary(size)


def _grow_transformer(model: Transformer, size: int) -> int:
    from dataclasses import replace

    tables: list[Any] = [model.embedding, *([] if model.unembedding is None else [model.unembedding])]
    first = len(model.embedding.weight)
    for table in tables:
        old = table.weight
        table.weight = nn.Parameter(with_mean_rows(old.detach(), size), requires_grad=old.requires_grad)
    model.embedding.num_embeddings = size
    if model.unembedding is not None:
        model.unembedding.out_features = size
    model.settings = replace(model.settings, vocab_size=size)
    return first


def with_mean_rows(weight: Tensor, size: int) -> Tensor:
    """A matrix [rows, …], or a vector [rows], with rows up to `size`, which are the mean of the others."""
    return torch.cat([weight, mean_row(weight).expand(size - len(weight), *weight.shape[1:])])


def mean_row(weight: Tensor) -> Tensor:
    """[1, …]: the mean of all rows, summed in float64 on the CPU: the same on every device."""
    mean = weight.detach().cpu().sum(0, keepdim=True, dtype=torch.float64) / len(weight)
    return mean.to(weight.device, weight.dtype)
