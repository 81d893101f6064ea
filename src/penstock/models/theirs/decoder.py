"""The part of a model of transformers that returns hidden states, found by a trial."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from penstock.models.theirs.attention import trial_tokens, values_alone
from penstock.models.without_dropout import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECODERS: dict[str, Callable[[Any], Any]] = {
    "base_model": lambda inner: inner.base_model,
    "get_decoder": lambda inner: inner.get_decoder(),
}
"""Ways to the part of a model that returns hidden states; for some models, one of them is the whole
model.
"""


def find_decoder(inner: "PreTrainedModel", ours: bool) -> str | None:
    """The way to hidden states that the output matrix alone turns into logits; None: there is none.

    Logits must be equal to the last bit, because a soft cap hardly changes small logits.

    Args:
        inner: A model of transformers.
        ours: Whether our attention replaces its own.
    """
    head = inner.get_output_embeddings()
    given: dict[str, Any] = {"input_ids": trial_tokens(inner)[None, :2], "use_cache": False}
    if ours:
        given["penstock_attend"] = values_alone
    with evaluating(inner):
        truth = inner(**given).logits
        for name, decoder in DECODERS.items():
            try:
                if torch.equal(head(decoder(inner)(**given).last_hidden_state), truth):
                    return name
            except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
                continue
    return None
