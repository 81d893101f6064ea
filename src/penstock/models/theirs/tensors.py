"""Rows as the arguments of a causal language model of transformers.

transformers keeps the documents of a row apart if positions restart, `use_cache=False`, and there
is no attention mask (a cache, or a mask, even of ones, turns the separation off). Variable-length
attention kernels also take `cu_seq_lens`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ConfigError
from penstock.media.processor import join_arrays
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.inputs.torch_tensors import as_tensors
from penstock.plan.loader import Step

Rows = ModelInput | Sequence[ModelInput] | Step
"""One row, several of the same length, or all rows that this rank has of a step."""

REQUIREMENTS = InputRequirements(
    asked_by="a Hugging Face model",
    loss_weights=True,
    positions=True,
    cu_seqlens=True,
    prefix=False,
    trees=False,
    images=True,
)
"""What a loader must provide for this integration; a loader without requirements provides more than
that.
"""


def model_inputs(
    rows: Rows,
    device: torch.device | str | None = None,
    *,
    labels: bool = False,
    non_blocking: bool = True,
) -> dict[str, Any]:
    """Arguments for the forward of a transformers causal language model: `model(**model_inputs(row,
    "cuda"))`.

    `input_ids` and `position_ids` are int64 [rows, T]; `cu_seq_lens_q/k` (int32) and
    `max_length_q/k` describe all rows end to end, as variable-length kernels see them. The padding
    of a row is a document of its own. If a row holds a single document, or the loader has
    attention="row", the padding joins the document instead, so that such rows are ordinary input
    for every causal model, whether it can separate documents or not. Rows with images also give the
    arrays of their processor, and where these have grids, `position_ids` [4, rows, T]: of the text,
    and in time, height and width.

    Args:
        rows: One row, or several of the same length.
        device: Target device; None: the CPU.
        labels: Also return `labels` for the loss of transformers, **not** shifted. That loss is a
            plain mean, so its denominator differs from `weighted_loss`, and it drops the target of
            a row's last slot (which exists if a document was cut at the edge with its target kept).
            Targets of weight 0 become −100.
        non_blocking: Copy from page-locked memory without waiting.

    Raises:
        ConfigError: The rows have no positions or cu_seqlens, or `labels` is set and some weight is
            not 0 or 1.
    """
    parts = [_in_one_piece(_complete(row)) for row in as_rows(rows)]
    longest = max(part.max_seqlen or 0 for part in parts)
    # One array for each field, so that a GPU gets one copy of each and not one for each row.
    arrays = {
        name: _stack([getattr(part, name) for part in parts]) for name in ("tokens", "positions")
    }
    fields = as_tensors({**arrays, "cu_seqlens": _end_to_end(parts)}, device, non_blocking)
    arguments = {
        "input_ids": fields["tokens"],
        "position_ids": fields["positions"],
        "cu_seq_lens_q": fields["cu_seqlens"],
        "cu_seq_lens_k": fields["cu_seqlens"],
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }
    if any(part.media is not None for part in parts):
        arguments |= _media(parts, device, non_blocking)
    if labels:
        arguments["labels"] = _unshifted(
            *targets_and_weights(rows, device, non_blocking=non_blocking)
        )
    return arguments


def _media(
    rows: Sequence[ModelInput], device: torch.device | str | None, non_blocking: bool
) -> dict[str, Any]:
    """Arrays of the images of rows, and positions if they have grids."""
    media = [row.media for row in rows if row.media is not None]
    if len(media) < len(rows):
        raise ConfigError(
            "some rows have images and others come from a loader without; take rows of one loader"
        )
    if any("aspect_ratio_ids" in one.blank.arrays for one in media):
        raise ConfigError(
            "Llama 3.2 Vision needs a mask of text over images, which these arguments do not "
            "have; train it with ps.train or penstock train (packing none), or with batches "
            "of penstock.huggingface.VisionCollator"
        )
    arrays: dict[str, Any] = dict(join_arrays([one.arrays for one in media if len(one)]))
    positions = [one.positions for one in media if one.positions is not None]
    if positions:
        arrays["position_ids"] = np.concatenate(positions, axis=1)
    return as_tensors(arrays, device, non_blocking)


def targets_and_weights(
    rows: Rows, device: torch.device | str | None = None, *, non_blocking: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets (int64) and loss weights (float32) at distance 1, both [rows, T]; without weights, 1
    for every target.
    """
    parts = as_rows(rows)
    arrays = {"targets": _stack([part.targets[0] for part in parts])}
    weights = [part.loss_weights[0] for part in parts if part.loss_weights is not None]
    if weights:
        arrays["loss_weights"] = _stack(weights)
    fields = as_tensors(arrays, device, non_blocking)
    targets = fields["targets"]
    return targets, fields["loss_weights"] if weights else (targets != IGNORE).float()


def _unshifted(targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if not ((weights == 0) | (weights == 1)).all():
        raise ConfigError(
            "labels=True: the rows have loss weights other than 0 and 1, which labels cannot "
            "express; use penstock.huggingface.loss or Trainer, which weight every target"
        )
    labels = torch.full_like(targets, IGNORE)
    labels[:, 1:] = targets[:, :-1].masked_fill(weights[:, :-1] == 0, IGNORE)
    return labels


def as_rows(rows: Rows) -> Sequence[ModelInput]:
    """One or several rows as a sequence."""
    return [rows] if isinstance(rows, ModelInput) else list(rows)


def _complete(row: ModelInput) -> ModelInput:
    missing = [name for name in ("positions", "cu_seqlens") if getattr(row, name) is None]
    if missing:
        raise ConfigError(
            f"the row has no {' and no '.join(missing)}, so transformers would mix its "
            "documents; make the loader with requirements=penstock.huggingface.REQUIREMENTS, "
            "or merge that into yours"
        )
    if row.reach is not None:
        raise ConfigError(
            "the row has prefix trees, whose branches models of transformers would let see "
            "each other; pass each sequence as a document of its own"
        )
    if row.prefix_lengths is not None and (row.prefix_lengths > 1).any():
        raise ConfigError(
            "the row has documents with bidirectional prefixes, which models of transformers "
            "would read causally; set bidirectional=False in their objective"
        )
    return row


def _in_one_piece(row: ModelInput) -> ModelInput:
    """The row with its padding joined to its document, if it has at most one (or its loader has
    attention="row").

    The padding comes after all targets, so no target sees it.
    """
    assert row.cu_seqlens is not None
    if row.cu_seqlens[1] < row.num_tokens or row.num_tokens == row.sequence_length:
        return row
    slots = row.sequence_length
    # The number of entries stays the same, for models that are compiled for a fixed number.
    borders = np.full_like(row.cu_seqlens, slots)
    borders[0] = 0
    return replace(
        row,
        positions=np.arange(slots, dtype=row.tokens.dtype),
        cu_seqlens=borders,
        max_seqlen=slots,
    )


def _end_to_end(rows: Sequence[ModelInput]) -> Any:
    """Cumulative lengths of all rows, one after another."""
    slots = rows[0].sequence_length
    borders: list[Any] = [row.cu_seqlens for row in rows]
    return np.concatenate(
        [borders[0], *(each[1:] + np.int32(i * slots) for i, each in enumerate(borders[1:], 1))]
    )


def _stack(parts: Sequence[Any]) -> Any:
    return parts[0][None] if len(parts) == 1 else np.stack(parts)
