"""A row as torch tensors with its attention prepared: the input of a model's forward pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.models.attention import RowAttend, RowAttention, slice_attention
from penstock.plan.inputs import IGNORE, AttentionRule, RowSlice
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.torch_tensors import on_device, to_torch, unknown_id


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTensors:
    """One row on a device. T slots, D target distances.

    Of a row that several ranks share, it has the T slots of this rank; `rule` and `source` are then
    those of the whole.
    """

    tokens: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], position of each token in its document."""
    targets: Tensor
    """int64 [D, T], already shifted; −100: none."""
    loss_weights: Tensor
    """float32 [D, T], 0 without a target."""
    attend: RowAttend
    """What layers call: attention with the window of each."""
    rule: AttentionRule
    """Which slots each slot sees, without the sliding window."""
    source: ModelInput
    """The row itself."""
    part: RowSlice | None = None
    """This rank's part of a row that several ranks share; None: the row is whole."""
    places: tuple[Tensor, ...] | None = None
    """D times int64 [n]: the slots with a target and a loss weight other than 0. Found on the host,
    so that no device is asked for their number; None: unknown.
    """

    @property
    def attention(self) -> RowAttention:
        """(q, k, v) → the heads' outputs; documents are kept apart, prefixes are bidirectional.
        With `window`.
        """
        return self.attend.by_window[self.window]

    @property
    def window(self) -> int | None:
        """Maximum tokens that a token sees, including itself, in the layers with the smallest
        window; None: all before it.
        """
        return self.attend.window

    @classmethod
    def of(
        cls,
        row: ModelInput,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "auto",
        window: int | None = None,
        windows: tuple[int | None, ...] = (),
        softcap: float | None = None,
        vocab_size: int | None = None,
    ) -> Self:
        """Move a row to a device; a model's `tensors(row)` fills in the rest.

        Args:
            row: A row of a loader, with positions and `cu_seqlens` or `document_ids`.
            device: The model's device.
            dtype: The model's compute dtype.
            backend: Attention backend, a name of `penstock.models.attention.BACKENDS`, or auto.
            window: Maximum tokens that a token sees, including itself; None: all before it.
            windows: That of each layer, if they differ; takes the place of `window`.
            softcap: Scores of attention are kept within ± this number; None: they are as they come.
            vocab_size: Number of known ids; None: ids are not checked.

        Raises:
            ConfigError: The row lacks positions or has an unknown id, or the backend does not
                support the row.
        """
        _check_row(row, vocab_size)
        rule = AttentionRule.of(row)

        place = torch.device(device)

        def attention(window: int | None) -> RowAttention:
            return RowAttention.of(
                rule, device=place, dtype=dtype, backend=backend, window=window, softcap=softcap
            )

        return cls(
            **_moved(to_torch(row, place)),
            attend=RowAttend.of(windows or (window,), attention),
            places=_places(row, place),
            rule=rule,
            source=row,
        )

    @classmethod
    def of_slice(
        cls,
        part: RowSlice,
        group: object = None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "auto",
        windows: tuple[int | None, ...] = (),
        softcap: float | None = None,
        vocab_size: int | None = None,
    ) -> Self:
        """Move this rank's part of a row to a device; a model's `slice_tensors(part, group)` fills
        in the rest.

        Args:
            part: What `RowSlice.of` gives, of a row as for `of`.
            group: The ranks that share the row: a process group, or a `DeviceMesh` of one
                dimension; None: all ranks.
            device: The model's device.
            dtype: The model's compute dtype.
            backend: Attention backend of `slice_attention`.
            windows: Maximum tokens that a token sees in each layer, None: all before it; empty: all
                in all layers.
            softcap: As for `of`.
            vocab_size: As for `of`.

        Raises:
            ConfigError: As for `of`.
            DistributedError: The group is not the one that the row was split for.
        """
        _check_row(part.source, vocab_size)

        def attention(window: int | None) -> RowAttention:
            return slice_attention(
                part,
                group,
                device=device,
                dtype=dtype,
                backend=backend,
                window=window,
                softcap=softcap,
            )

        moved = _moved(part.torch(torch.device(device)))
        return cls(
            **moved,
            attend=RowAttend.of(windows, attention),
            rule=part.rule,
            source=part.source,
            part=part,
            places=_places(part, torch.device(device)),
        )


def _moved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that a model reads."""
    weights, targets = fields["loss_weights"], fields["targets"]
    return {
        "tokens": fields["tokens"],
        "positions": fields["positions"],
        "targets": targets,
        "loss_weights": weights if isinstance(weights, Tensor) else (targets != IGNORE).float(),
    }


def _places(row: ModelInput | RowSlice, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(on_device(found, device) for found in target_places(row))


def target_places(row: ModelInput | RowSlice) -> list[Int64]:
    """[n] for each distance: the slots with a target and a loss weight other than 0."""
    targets, weights = row.targets, row.loss_weights
    trained = targets != IGNORE if weights is None else (targets != IGNORE) & (weights != 0)
    return [np.flatnonzero(one) for one in trained]


def _check_row(row: ModelInput, vocab_size: int | None) -> None:
    if vocab_size is not None:
        _check_ids(row, vocab_size)
    if row.positions is None:
        raise ConfigError(
            "the row has no positions; make the loader with the model's requirements()"
        )


def _check_ids(row: ModelInput, vocab_size: int) -> None:
    """Refuse unknown ids; torch's own error says neither where they are nor, on a GPU, what is
    wrong.
    """
    if found := unknown_id(row, vocab_size):
        raise ConfigError(
            f"{found}, but the model knows ids below {vocab_size}; the data were prepared "
            "with another tokenizer: prepare them with the model's, or set model.vocab_size"
        )
