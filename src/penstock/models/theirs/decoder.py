"""The part of a model of transformers that returns hidden states, found by a trial, and how they
become logits.

Most models multiply hidden states by the output matrix. Some then divide by a number, or keep the
logits within one (Granite, Cohere, Gemma 2). Where that is known and gives the model's own logits,
a row's hidden states are enough, and a loss makes logits in chunks; elsewhere the whole model runs,
and returns the logits of the whole row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

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

Change = Callable[[Tensor, float], Tensor]
CHANGES: dict[str, Change] = {
    "logits_scaling": lambda logits, number: logits / number,
    "logit_scale": lambda logits, number: logits * number,
    "final_logit_softcapping": lambda logits, number: torch.tanh(logits / number) * number,
}
"""What models do to logits with a number of their settings, in the order in which they do it."""


@final
@dataclass(frozen=True, slots=True)
class Decoder:
    """A way to hidden states, and from them to logits."""

    name: str
    """One of `DECODERS`."""
    changes: tuple[tuple[str, float], ...] = ()
    """Of `CHANGES`, with their numbers, behind the output matrix."""

    def __call__(self, inner: "PreTrainedModel", given: dict[str, Any]) -> Any:
        """The output for arguments of transformers, with hidden states."""
        return DECODERS[self.name](inner)(**given)

    def logits(self, inner: "PreTrainedModel", hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], as the model itself."""
        found: Tensor = inner.get_output_embeddings()(hidden)
        for name, number in self.changes:
            found = CHANGES[name](found, number)
        return found


def find_decoder(inner: "PreTrainedModel", ours: bool) -> Decoder | None:
    """The way to hidden states that the output matrix, and what is known to come behind it, turn
    into logits; None: there is none.

    Logits must be equal to the last bit, because a soft cap hardly changes small logits.

    Args:
        inner: A model of transformers.
        ours: Whether our attention replaces its own.
    """
    given: dict[str, Any] = {"input_ids": trial_tokens(inner)[None, :2], "use_cache": False}
    if ours:
        given["penstock_attend"] = values_alone
    with evaluating(inner):
        truth = inner(**given).logits
        for name in DECODERS:
            for changes in _changes(inner):
                decoder = Decoder(name, changes)
                try:
                    if torch.equal(
                        decoder.logits(inner, decoder(inner, given).last_hidden_state), truth
                    ):
                        return decoder
                except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
                    break
    return None


def _changes(inner: "PreTrainedModel") -> Iterator[tuple[tuple[str, float], ...]]:
    """None, and all of those that its settings name."""
    yield ()
    config = inner.config.get_text_config()
    numbers = ((name, getattr(config, name, None)) for name in CHANGES)
    named = tuple((name, number) for name, number in numbers if isinstance(number, float | int))
    if named:
        yield named
