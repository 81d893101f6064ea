"""Choose by name what computes the recurrent operations of a model: torch, or packages with
kernels.

A choice is tried before it is used: random documents in one row, with the packages, must give the
logits that each gives alone without them, and gradients of exactly 0 to other documents. What each
operation runs with is logged.
"""

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, IsolationError
from penstock.models.isolation.documents import try_isolation
from penstock.models.isolation.lengths import DOCUMENT_LENGTHS
from penstock.models.isolation.report import CURE, describe
from penstock.models.language_model import LanguageModel
from penstock.models.recurrent.mixers import Mixer
from penstock.models.recurrent.operations import TORCH, Operations
from penstock.plan.inputs.model_input import ModelInput

_log = logging.getLogger("penstock.models")
_TRIAL = 64
"""Slots of a row of a model of transformers that is tried."""


def use_recurrent(model: LanguageModel, backends: str | Sequence[str]) -> None:
    """Compute a model's recurrent operations with the named backends, until it is called again.

    Each operation takes the first backend that provides it, and torch where none does. Where a
    package cannot carry states between the parts of a document (mamba_ssm in generation), torch
    computes that call.

    Args:
        model: A transformer of ours, or a model of transformers, on its device.
        backends: Names of `penstock.models.recurrent.PACKAGES`, or torch.

    Raises:
        ConfigError: A backend is unknown, not installed, cannot compute on the model's device, has
            no operation of this model, or gives other results; says why.
    """
    names = [backends] if isinstance(backends, str) else list(backends)
    operations = Operations.of(names, device=model.device, dtype=model.compute_dtype)
    if not operations.backends:
        _set(model, TORCH)
        return
    try:
        _set(model, operations)
        _try(model, operations)
        if operations.idle:
            raise ConfigError(
                f"recurrent backend {operations.idle[0]!r} would compute nothing: it provides "
                f"no operation of {describe(model)} that an earlier backend does not "
                f"({operations.describe() or 'none at all'}); leave it out"
            )
    except BaseException:
        _set(model, TORCH)
        raise
    _log.info("%s: recurrent operations: %s", describe(model), operations.describe())


@runtime_checkable
class Recurrent(Protocol):
    """A model that chooses itself what computes its recurrences: one of transformers."""

    operations: Operations
    """What does now."""

    def compute_with(self, operations: Operations) -> None:
        """Compute recurrences in rows with these."""


def recurrent_operations(model: LanguageModel) -> Operations:
    """Backends of the recurrent operations of a model."""
    if isinstance(model, Recurrent):
        return model.operations
    return next((module.operations for module in _mixers(model)), TORCH)


def _mixers(model: LanguageModel) -> list[Mixer]:
    return [module for module in model.modules() if isinstance(module, Mixer)]


def _set(model: LanguageModel, operations: Operations) -> None:
    if isinstance(model, Recurrent):
        if model.operations is not operations:
            model.compute_with(operations)
        return
    for mixer in _mixers(model):
        mixer.operations = operations


def _try(model: LanguageModel, operations: Operations) -> None:
    """Compare a row with the packages to its documents without; fills `operations.used`.

    Raises:
        ConfigError: They differ, or a package cannot compute this model's operations.
    """
    if isinstance(model, Recurrent):
        if (reason := model.packing(_TRIAL).reason) is not None:
            raise ConfigError(f"recurrent backends {', '.join(operations.backends)}: {reason}")
        return

    def forward(_: object, row: ModelInput) -> Tensor:
        _set(model, operations if row.num_documents > 1 else TORCH)
        try:
            logits = model.logits(model(model.tensors(row)))[0]
            # What counts as rounding follows from the dtype.
            return logits.to(model.compute_dtype)
        finally:
            _set(model, operations)

    try:
        try_isolation(model, forward, lengths=DOCUMENT_LENGTHS, gradients=torch.is_grad_enabled())
    except IsolationError as error:
        names, found = (
            ", ".join(operations.backends),
            str(error).removesuffix(CURE).removesuffix(" "),
        )
        if model.compute_dtype == torch.float32 and model.device.type == "cuda":
            found += (
                ". Triton's kernels multiply float32 in TF32: set model.dtype: bfloat16, or "
                "TRITON_F32_DEFAULT=ieee in the environment"
            )
        raise ConfigError(
            f"recurrent backends {names}: a row with them differs from its documents in "
            f"torch: {found}"
        ) from None
