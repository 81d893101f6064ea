"""Checks before the first step: whether settings, data and model fit together.

They write nothing. Each covers all sources, whatever their shares are at the first step: a source
with a share only from step 10,000 on is refused now. `penstock train` and its `--dry-run` run the
same checks.
"""

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.learn.training.settings import TrainSettings
from penstock.learn.training.tensor_logs import check_patterns
from penstock.models import LanguageModel
from penstock.models.four_bits import has_four_bits
from penstock.models.isolation.lengths import asks_for_router_loss
from penstock.models.ours.micro_sequences import check_cuts
from penstock.models.ours.transformer import Transformer
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader.loader import Loader

if TYPE_CHECKING:
    from penstock.learn.distillation.distiller import Distiller
    from penstock.learn.training.own import LossOfOwn

_TRIAL = 4
"""Tokens of each document in the row on which attention is tried."""


def check_writers(settings: TrainSettings) -> None:
    """Refuse trackers that are not installed.

    Raises:
        MissingExtraError: One is requested and not installed.
    """
    for name in settings.trackers:
        if name not in sys.modules and find_spec(name) is None:
            raise MissingExtraError(name, name)


def check_fit(
    model: LanguageModel,
    loader: Loader,
    settings: TrainSettings,
    distiller: "Distiller | None",
    own_loss: "LossOfOwn | None" = None,
) -> None:
    """Refuse now what some step of training would refuse, for every source.

    Raises:
        ConfigError: Attention, micro-sequences, token ids, teachers or tensor logs do not fit the
            model and the data, or the model asks for a loss of its routers.
    """
    if model.lora is None and has_four_bits(model):
        raise ConfigError(
            "model: its matrices are in 4 bits, which cannot be trained; train LoRA next to them "
            "(training.lora), or take the float32 or bfloat16 folder that it was made from"
        )
    check_ids(model, loader)
    _check_router_loss(model)
    row = trial_row(loader)
    # As in training: a backend that does not work on this device raises.
    tensors = model.tensors(row, settings.attention)
    if settings.attention != "auto" and tensors.attention.device.type == "cpu":
        q = torch.zeros(len(row.tokens), 1, 16, dtype=model.compute_dtype, requires_grad=True)
        tensors.attention(q, q, q)
    if settings.micro_sequences > 1 and loader.blank_image is not None:
        raise ConfigError(
            "micro_sequences cut rows into parts, which data with images do not allow yet; set 1"
        )
    if settings.micro_sequences > 1:
        _check_parts(model, loader, settings.micro_sequences, tensors.window)
    if settings.context_parallel > 1:
        _check_shared_rows(loader, distiller)
    _check_distillation(distiller, settings, loader)
    if own_loss is not None:
        # The row has no targets; a run may meet such a row at any step.
        own_loss.try_on(model, tensors)
    check_patterns(_module(model), settings.tensor_logs)


def freeze(model: LanguageModel, patterns: Sequence[str]) -> None:
    """Train no weight with a name that one of the patterns fits.

    Raises:
        ConfigError: A pattern fits no weight, or all weights are frozen.
    """
    weights = dict(_module(model).named_parameters())
    for pattern in patterns:
        found = [name for name in weights if fnmatchcase(name, pattern)]
        if not found:
            names = list(weights)
            raise ConfigError(
                f"training.frozen: {pattern!r} fits no weight; there are, among others, "
                f"{', '.join(names[:: max(1, len(names) // 6)])}"
            )
        for name in found:
            weights[name].requires_grad_(False)
    if patterns and not any(one.requires_grad for one in weights.values()):
        raise ConfigError(f"training.frozen: {', '.join(patterns)} leaves nothing to train")


def check_ids(model: LanguageModel, loader: Loader) -> None:
    """Refuse objectives that write token ids outside the model's vocabulary.

    Raises:
        ConfigError: One does; the message names its source.
    """
    for source, largest in loader.added_tokens.items():
        if largest >= model.vocab_size:
            raise ConfigError(
                f"source {source!r}: its objective writes token id {largest}, and the model "
                f"knows ids below {model.vocab_size}; give the objective other ids, or raise "
                "model.vocab_size"
            )


def _check_router_loss(model: LanguageModel) -> None:
    if asks_for_router_loss(model):
        raise ConfigError(
            "model: its config.json asks for an auxiliary router loss (output_router_logits), "
            "which the loss of a step does not include; set it to false there"
        )


def trial_row(loader: Loader) -> ModelInput:
    """Two documents, or one if rows hold one document each; with prefixes if any source's objective
    makes them.
    """
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
    """Refuse micro-sequences if some row could not be cut into them."""
    if (planted := _planted(loader)) is not None:
        raise ConfigError(
            f"training.micro_sequences is {parts}, and source {planted!r} has prefix trees, "
            "which cannot be cut; set micro_sequences to 1"
        )
    if (source := loader.bidirectional_source) is not None:
        raise ConfigError(
            f"training.micro_sequences is {parts}, and the objective of source {source!r} "
            "makes prefixes with attention in both directions, which cannot be cut; set "
            "micro_sequences to 1, or give the objective bidirectional: false"
        )
    if not model.divisible_rows:
        raise ConfigError(
            "training.micro_sequences: this model cannot process a row in parts, as it uses "
            "its own attention code; set micro_sequences to 1"
        )
    if isinstance(model, Transformer) and (
        model.settings.has_experts or model.settings.is_stochastic
    ):
        raise ConfigError(
            "training.micro_sequences: experts have a loss of whole documents, and stochastic "
            "blocks draw for whole rows; set micro_sequences to 1"
        )
    check_cuts(loader.settings.sequence_length, parts, window)
    if any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in _module(model).modules()):
        raise ConfigError(
            "training.micro_sequences computes each part twice, and dropout would differ "
            "between the two; set the model's dropout to 0, or micro_sequences to 1"
        )


def _check_shared_rows(loader: Loader, distiller: "Distiller | None") -> None:
    """Refuse context parallelism for what needs whole rows; a model refuses when it gets a part of
    one.
    """
    if distiller is not None:
        raise ConfigError(
            "training.context_parallel and teacher cannot be combined; set context_parallel to 1"
        )
    if loader.blank_image is not None:
        raise ConfigError(
            "training.context_parallel: rows with images cannot be shared; set "
            "context_parallel to 1"
        )


def _planted(loader: Loader) -> str | None:
    """The first source whose documents may be prefix trees; None: there is none."""
    return next(
        (source for source, values in loader.path_values.items() if values is not None), None
    )


def _check_distillation(
    distiller: "Distiller | None", settings: TrainSettings, loader: Loader
) -> None:
    """Refuse settings and data that do not work with teachers."""
    if distiller is None:
        return
    if (planted := _planted(loader)) is not None:
        raise ConfigError(
            f"teacher: source {planted!r} has prefix trees, which teachers cannot read; "
            "prepare with answers: best"
        )
    if (source := loader.own_targets_source) is not None:
        raise ConfigError(
            f"teacher: the objective of source {source!r} writes targets of its own, and a "
            "teacher's answers belong to the tokens behind slots; take another objective"
        )
    if settings.loss is not None:
        raise ConfigError("training.loss and teacher cannot be combined; choose one")
    if settings.micro_sequences > 1:
        raise ConfigError(
            "training.micro_sequences and teacher cannot be combined: a teacher's chunks "
            "cross the borders of the parts; set micro_sequences to 1"
        )
    if (settings.rows_per_pass or 1) > 1:
        raise ConfigError(
            "training.rows_per_pass and teacher cannot be combined: teachers answer row by "
            "row; leave rows_per_pass out"
        )
    if settings.shard and any(one.settings.learn_projection for one in distiller.teachers):
        raise ConfigError("training.shard and learn_projection cannot be combined; choose one")


def _module(model: LanguageModel) -> torch.nn.Module:
    assert isinstance(model, torch.nn.Module)
    return model
