"""What a model of transformers says of one document alone, as transformers runs it: the truth that all else is held
against; and how far something is from it. A model that says nothing of use is refused here, when it is loaded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.integrations.isolation import describe, largest_difference, tolerance

Result = TypeVar("Result")
TRIAL, PROMPT = 16, 9
"""Tokens of the document that is tried, and of the beginning of it that is a prompt."""


def trial_tokens(inner: Any) -> Tensor:
    """int64 [TRIAL] on the model's device."""
    weight = inner.get_input_embeddings().weight
    return torch.arange(TRIAL, device=weight.device) * 7 % len(weight)


def true_logits(inner: Any) -> Tensor:
    """[TRIAL, vocabulary]: transformers' own logits of the document that is tried, alone.

    Raises:
        ConfigError: The model cannot be run, its logits are NaN, or it reads later tokens, too.
    """
    with evaluating(inner):
        whole, part = attempt(inner, lambda: [_document(inner, trial_tokens(inner)[:n]) for n in (TRIAL, PROMPT)])
    if bool(whole.isnan().any()):
        raise ConfigError(f"{describe(inner)}: its logits of {TRIAL} tokens are NaN; load it with dtype float32")
    # Most tokens, not the worst: in half precision a mixture of experts may send a token elsewhere.
    far = float((part - whole[:PROMPT]).float().nan_to_num().abs().amax(-1).median()) / spread(whole)
    if not far <= tolerance(whole.dtype):
        raise ConfigError(
            f"{describe(inner)} is no causal language model: logits of a token change by {far:.2g} standard deviations "
            "with the tokens after it, so it can neither be trained nor scored nor write; take another model"
        )
    return whole


def _document(inner: Any, tokens: Tensor) -> Tensor:
    restart_rotary(inner)
    logits: Tensor = inner(input_ids=tokens[None], use_cache=False).logits
    if logits.shape[:2] != (1, len(tokens)):
        raise ValueError(f"logits of shape {list(logits.shape)} for {len(tokens)} tokens")
    return logits[0]


def distance(found: Tensor, truth: Tensor) -> float:
    """Largest difference of logits, in standard deviations of the true ones."""
    return largest_difference(found.to(truth.dtype), truth) / spread(truth)


def rounding(inner: Any) -> float:
    """The largest `distance` that is taken for rounding."""
    return tolerance(next(inner.parameters()).dtype)


def spread(logits: Tensor) -> float:
    """Standard deviation of those that are finite."""
    return max(float(logits[logits.isfinite()].float().std()), 1e-30)


def attempt(inner: Any, run: Callable[[], Result]) -> Result:
    """Run a model whose code is somebody else's.

    Raises:
        ConfigError: Whatever it raised, but for a lack of memory.
    """
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{describe(inner)} cannot be run on tokens alone: {one_line(error)}; install what it asks for, or take a "
            "model that reads only text"
        ) from error


def one_line(error: BaseException) -> str:
    """An error of somebody else's code, short and in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:299]}…"


@contextmanager
def evaluating(inner: Any) -> Iterator[None]:
    """Evaluation mode, without gradients, for a while."""
    training = [(module, module.training) for module in inner.modules()]
    inner.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in training:
            module.training = mode


def restart_rotary(inner: Any) -> None:
    """Rotary frequencies of the type `dynamic` depend on the longest document so far: forget it."""
    for module in inner.modules():
        if "dynamic" not in str(getattr(module, "rope_type", "")):
            continue
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)
        for name, buffer in list(module.named_buffers(recurse=False)):
            original = getattr(module, name.replace("inv_freq", "original_inv_freq"), None)
            if name.endswith("inv_freq") and "original" not in name and original is not None:
                setattr(module, name, original.to(buffer.device))
