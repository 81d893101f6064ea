"""The model's log-probabilities of a text that is there already."""

from collections.abc import Sequence

import numpy as np

from penstock.core.errors import ConfigError
from penstock.learn.generation.sampling import log_probabilities
from penstock.learn.generation.settings import LogProbabilities
from penstock.models import LanguageModel
from penstock.plan.inputs.model_input import pack_documents

SCORED = 256
"""Tokens whose logits are held at the same time."""


def score(
    model: LanguageModel, prompt: Sequence[int], most: int, longest: int
) -> list[LogProbabilities]:
    """Log-probabilities of all tokens of a text but the first, each after those before it.

    Args:
        model: The model.
        prompt: Ids that it knows.
        most: Number of alternatives for each.
        longest: Maximum number of ids.

    Raises:
        ConfigError: There is no id, or too many.
    """
    ids = np.array(prompt, np.int32)
    if not 1 <= len(ids) <= longest:
        raise ConfigError(f"a text of {len(ids)} tokens cannot be scored; give 1 to {longest}")
    row, _ = pack_documents([ids], [0])
    tensors = model.tensors(row)
    hidden, next_tokens = model(tensors)[0, : len(ids) - 1], tensors.tokens[1 : len(ids)]
    found = []
    for states, after in zip(hidden.split(SCORED), next_tokens.split(SCORED), strict=True):
        own, values, likeliest = (
            x.tolist() for x in log_probabilities(model.logits(states), after, most)
        )
        found += [
            LogProbabilities(own[at], tuple(zip(likeliest[at], values[at], strict=True)))
            for at in range(len(after))
        ]
    return found
