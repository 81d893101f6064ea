"""Tries whether our attention can replace that of a model of transformers, by its logits."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.isolation.report import describe
from penstock.models.on_meta import all_on_meta
from penstock.models.theirs.attention import (
    UnfitAttentionError,
    distance,
    one_line,
    rounding,
    take_attention,
    trial_tokens,
    use_attention,
)
from penstock.models.theirs.interface import TheirModel
from penstock.models.without_dropout import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERTS = "_experts_implementation"
"""Attribute of transformers' settings: how its experts compute."""


def fit_attention(model: TheirModel, truth: Tensor | None) -> None:
    """Replace a model's attention by ours if that gives the same logits; `model.fit` says which.

    Args:
        model: The model.
        truth: Its own logits of the trial tokens; None: it has no weights yet.

    Raises:
        ConfigError: It has no weights, and no twin.
    """
    trial, fit = model.trial_model, model.fit
    if trial is model and truth is None:
        raise ConfigError(
            f"{describe(model)}: its layers cannot be told apart, so it cannot be tried before "
            "its weights are there; train it without shard"
        )
    try:
        if trial is model and truth is not None:
            fit.shape = take_attention(model.inner)
            _compare(model, truth)
        elif trial.uses_our_attention:
            # Of all its layers; the twin has fewer.
            with _on_meta(model.inner) if model.is_on_meta else nullcontext():
                fit.shape = take_attention(model.inner)
        else:
            raise UnfitAttentionError(trial.fit.reason)
    except UnfitAttentionError as reason:
        fit.shape, fit.reason = None, str(reason)
        use_attention(model.inner, fit.own)


@contextmanager
def _on_meta(inner: "PreTrainedModel") -> Iterator[None]:
    """Let a model without weights run, on nothing but shapes."""
    configs = {id(one): one for one in (inner.config, inner.config.get_text_config())}
    before = {key: getattr(one, _EXPERTS, None) for key, one in configs.items()}
    # The other ways of experts count the tokens of each, or know no meta device in float32.
    for one in configs.values():
        setattr(one, _EXPERTS, "batched_mm")
    try:
        with all_on_meta(inner):
            yield
    finally:
        for key, one in configs.items():
            setattr(one, _EXPERTS, before[key])


def _compare(model: TheirModel, truth: Tensor) -> None:
    """Compare what a model gives with our attention with its own logits.

    Raises:
        UnfitAttentionError: Our attention gives other results; says why.
    """
    tokens, allowed = trial_tokens(model.inner), rounding(model)
    try:
        with evaluating(model.inner):
            whole, steps = model.logits(model.document(tokens))[0], model.generation.steps(tokens)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnfitAttentionError(
            f"our attention cannot replace its own ({one_line(error)})"
        ) from None
    if not (far := distance(whole, truth)) <= allowed:
        raise UnfitAttentionError(
            f"with our attention its logits are {far:.2g} standard deviations off"
        )
    if not (far := distance(steps, truth[-len(steps) :])) <= allowed:
        raise UnfitAttentionError(
            f"after a prompt and single steps through our cache its logits are {far:.2g} "
            "standard deviations off, so it needs more of a text than keys, values and "
            "positions"
        )
