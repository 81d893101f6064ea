"""What a run is refused for before it begins: settings, data and model that do not go together, or do not fit here.

Nothing is written. Each check is asked of all sources, whatever their shares are at the first step: a source that gets
its share at step 10,000 is refused now. `penstock train` and its `--dry-run` go through the same checks.
"""

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.errors import ConfigError, MissingExtraError
from penstock.inputs import IGNORE, ModelInput
from penstock.loader import Loader, PlanSettings
from penstock.models import LanguageModel, ModelSettings
from penstock.models.micro_sequences import check_cuts
from penstock.training.settings import TrainSettings
from penstock.training.tensor_logs import check_patterns

if TYPE_CHECKING:
    from penstock.distillation.distiller import Distiller

_TRIAL = 4
"""Tokens of each document of the row that attention is tried on."""


def check_writers(settings: TrainSettings) -> None:
    """Refuse TensorBoard and W&B where they are not installed.

    Raises:
        MissingExtraError: One is asked for and not there.
    """
    for name, wanted in (("tensorboard", settings.tensorboard), ("wandb", settings.wandb is not None)):
        if wanted and name not in sys.modules and find_spec(name) is None:
            raise MissingExtraError(name, name)


def check_memory(
    model: ModelSettings | str,
    vocab_size: int,
    training: TrainSettings,
    plan: PlanSettings,
    *,
    device: torch.device,
    ranks: int,
) -> None:
    """Refuse a model, or a step of rows, that is larger than all memory there is: nothing is allocated yet.

    Raises:
        ConfigError: It is.
    """
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    distances = 1
    if isinstance(model, ModelSettings):
        distances = model.prediction_heads
        count = model.with_vocabulary(vocab_size).num_parameters()
        # Weights alone where LoRA trains next to them, or each rank keeps a part; else gradient and optimiser as well.
        needed = count * (4 if training.lora is not None or training.shard else 16)
        there = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else here
        _compare("model", f"{count:,} parameters", needed, there, "make layers or width smaller")
    slots = -(-plan.rows_per_step // ranks) * plan.sequence_length
    _compare(
        "data.loader",
        f"a step of {plan.rows_per_step:,} rows of {plan.sequence_length:,} slots",
        slots * (12 + 8 * distances),
        here,
        "lower rows_per_step or sequence_length",
    )


def _compare(where: str, what: str, needed: int, there: int, cure: str) -> None:
    if needed > there:
        raise ConfigError(f"{where}: {what} take {needed / 1e9:,.1f} GB, and there are {there / 1e9:,.1f}; {cure}")


def check_fit(model: LanguageModel, loader: Loader, settings: TrainSettings, distiller: "Distiller | None") -> None:
    """Refuse what a step of training would refuse, whichever source it comes from.

    Raises:
        ConfigError: Attention, micro-sequences, ids, teachers or tensor logs do not go with model and data.
    """
    check_ids(model, loader)
    row = _trial_row(loader)
    # As in training: refuses a backend that cannot do this on this device.
    tensors = model.tensors(row, settings.attention)
    if settings.attention != "auto" and tensors.attention.device.type == "cpu":
        q = torch.zeros(len(row.tokens), 1, 16, dtype=model.compute_dtype, requires_grad=True)
        tensors.attention(q, q, q)
    if settings.micro_sequences > 1:
        _check_parts(model, loader, settings.micro_sequences, tensors.window)
    _check_distillation(distiller, settings)
    check_patterns(_module(model), settings.tensor_logs)


def check_ids(model: LanguageModel, loader: Loader) -> None:
    """Refuse objectives that write ids which the model does not know.

    Raises:
        ConfigError: One does; names its source.
    """
    for source, largest in loader.added_tokens.items():
        if largest >= model.vocab_size:
            raise ConfigError(
                f"source {source!r}: its objective writes token id {largest}, and the model knows ids below "
                f"{model.vocab_size}; give the objective other ids, or raise model.vocab_size"
            )


def _trial_row(loader: Loader) -> ModelInput:
    """Two documents, or one where rows hold none apart, with prefixes where any source's objective makes some."""
    documents = 2 if loader.needs_isolation else 1
    slots, prefixes = documents * _TRIAL, loader.bidirectional_source is not None
    positions = np.tile(np.arange(_TRIAL, dtype=np.int32), documents)
    return ModelInput(
        tokens=np.zeros(slots, np.int32),
        targets=np.full((1, slots), IGNORE, np.int32),
        loss_weights=np.zeros((1, slots), np.float32),
        positions=positions,
        document_ids=np.repeat(np.arange(documents, dtype=np.int32), _TRIAL),
        cu_seqlens=np.arange(documents + 1, dtype=np.int32) * _TRIAL,
        max_seqlen=_TRIAL,
        num_tokens=slots,
        source_ids=np.zeros(documents, np.int32),
        prefix_lengths=np.full(documents, _TRIAL // 2, np.int32) if prefixes else None,
        prefix=positions < _TRIAL // 2 if prefixes else None,
    )


def _check_parts(model: LanguageModel, loader: Loader, parts: int, window: int | None) -> None:
    """Refuse micro-sequences that some row could not be cut in."""
    if (source := loader.bidirectional_source) is not None:
        raise ConfigError(
            f"training.micro_sequences is {parts}, and the objective of source {source!r} makes prefixes whose tokens "
            "see each other, which cannot be cut; set micro_sequences to 1, or give the objective bidirectional: false"
        )
    if not getattr(model, "ours", True):
        raise ConfigError(
            "training.micro_sequences: this model of transformers attends by its own code, which cannot go through a "
            "row in parts; set micro_sequences to 1"
        )
    check_cuts(loader.settings.sequence_length, parts, window)
    if any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in _module(model).modules()):
        raise ConfigError(
            "training.micro_sequences computes each part twice, which dropout would do differently each time; set "
            "the model's dropout to 0, or micro_sequences to 1"
        )


def _check_distillation(distiller: "Distiller | None", settings: TrainSettings) -> None:
    """Refuse what does not go together with teachers."""
    if distiller is None:
        return
    if settings.micro_sequences > 1:
        raise ConfigError(
            "training.micro_sequences and teacher do not go together: a teacher's chunks lie across the parts; set "
            "micro_sequences to 1"
        )
    if settings.shard and any(one.settings.learn_projection for one in distiller.teachers):
        raise ConfigError("training.shard and learn_projection do not go together; choose one")


def _module(model: LanguageModel) -> torch.nn.Module:
    assert isinstance(model, torch.nn.Module)
    return model
