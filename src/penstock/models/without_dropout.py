"""Runs a model as in training, but without anything random: dropout, jitter of routers, drawn
mixers.

Where log-probabilities are compared, noise in one of them is a difference that nobody made: with
dropout in the policy and none in the reference, the first step of DPO is not ln 2 (TRL has
`disable_dropout` for this). Gradients flow as always, gradient checkpoints stay, and so does the
balance loss of experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from penstock.models.attention.compiling import uncompiled
from penstock.models.ours.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NOISE = ("drop", "jitter_noise")
"""Parts of the names under which modules keep their rates: attention_dropout, layerdrop,
router_jitter_noise.
"""


def random_parts(model: Any) -> list[str]:
    """What `without_dropout` switches off in a model, each as its name and rate ("attn_dropout
    0.1"), sorted.

    A module of the user's own may call functional dropout with a rate that no attribute holds; that
    is not listed.
    """
    found = {
        f"{name} {rate:g}"
        for path, module in model.named_modules()
        for name, rate in _rates(path, module)
    }
    if isinstance(model, Transformer) and model.settings.is_stochastic:
        found.add("drawn mixers")
    return sorted(found)


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Inside, the model gives the same results each time, and a backward pass must end inside, too.

    Ours stays in training mode, where it has a loss of its own, without drawing mixers. Others are
    in evaluation mode.
    """
    modules: list[nn.Module] = list(model.modules())
    modes = [module.training for module in modules]
    ours = isinstance(model, Transformer)
    draws = ours and model.draws
    kept: list[tuple[nn.Module, str, Any]] = []
    for module in modules:
        if _must_train(module):
            # Its other effect of training mode; it may also drop by itself.
            kept += [(module, name, rate) for name, rate in _rates("", module)]
        else:
            module.training = module.training and ours and not isinstance(module, _DropoutNd)
    for module, name, _ in kept:
        setattr(module, name, 0.0)
    if ours:
        model.draws = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module, name, rate in kept:
            setattr(module, name, rate)
        if ours:
            model.draws = draws


@contextmanager
def evaluating(inner: "PreTrainedModel") -> Iterator[None]:
    """Evaluation mode without gradients or compiled code within the block; each module has its own
    mode again afterwards.
    """
    training = [(module, module.training) for module in inner.modules()]
    inner.eval()
    try:
        with torch.no_grad(), uncompiled():
            yield
    finally:
        for module, mode in training:
            module.training = mode


def _must_train(module: nn.Module) -> bool:
    """Whether a module does something in training mode that is needed: checkpoints, or a backward
    pass of cuDNN.
    """
    return module.training and (
        bool(getattr(module, "gradient_checkpointing", False)) or isinstance(module, nn.RNNBase)
    )


def _rates(path: str, module: nn.Module) -> Iterator[tuple[str, float]]:
    """Rates above 0 that a module keeps: (name, rate)."""
    if isinstance(module, _DropoutNd):
        if module.p > 0:
            parts = path.split(".")
            yield next((part for part in reversed(parts) if "drop" in part), parts[-1]), module.p
        return
    for name, rate in vars(module).items():
        if isinstance(rate, float) and rate > 0 and any(part in name for part in _NOISE):
            yield name, rate
