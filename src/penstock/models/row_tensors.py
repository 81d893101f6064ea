"""A row as torch tensors with its attention made ready: what a model's forward takes."""

from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.inputs import IGNORE, AttentionRule, ModelInput
from penstock.integrations.torch_tensors import to_torch
from penstock.models.attention import RowAttention
from penstock.models.windows import attention_of


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTensors:
    """One row on a device. T slots, D target distances."""

    tokens: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], of each token in its document."""
    targets: Tensor
    """int64 [D, T], already shifted; −100 = none."""
    loss_weights: Tensor
    """float32 [D, T], 0 where there is no target."""
    attention: RowAttention
    """(q, k, v) → the heads' outputs; documents apart, prefixes honoured."""
    rule: AttentionRule
    """Whom each slot sees, but for a sliding window."""
    window: int | None
    """Tokens that a token sees, itself among them; None: all before it."""
    source: ModelInput
    """The row itself."""

    @classmethod
    def of(
        cls,
        row: ModelInput,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "auto",
        window: int | None = None,
        vocab_size: int | None = None,
    ) -> Self:
        """Move a row to a device; a model's `tensors(row)` fills in the rest.

        Args:
            row: What a loader gave, with positions and `cu_seqlens` or `document_ids`.
            device: Where the model is.
            dtype: What the model computes in.
            backend: Of attention, a name of `penstock.models.attention.BACKENDS`, or auto.
            window: Tokens that a token sees, itself among them; None: all before it.
            vocab_size: Ids below it are known; None: not looked at.

        Raises:
            ConfigError: The row lacks positions or has an unknown id, or the backend cannot do this.
        """
        if vocab_size is not None:
            _check_ids(row, vocab_size)
        if row.positions is None:
            raise ConfigError("the row has no positions; make the loader with the model's requirements()")
        rule = AttentionRule.of(row)
        device = torch.device(device)
        moved = to_torch(row, device)
        targets = moved["targets"]
        assert isinstance(targets, Tensor)
        weights = moved["loss_weights"]
        return cls(
            tokens=moved["tokens"],  # type: ignore[arg-type]
            positions=moved["positions"],  # type: ignore[arg-type]
            targets=targets,
            loss_weights=weights if isinstance(weights, Tensor) else (targets != IGNORE).float(),
            attention=attention_of(rule, window, device=device, dtype=dtype, backend=backend),
            rule=rule,
            window=window,
            source=row,
        )


def _check_ids(row: ModelInput, vocab_size: int) -> None:
    """Here, because torch does not say where, and on a GPU not even what."""
    slot = int(row.tokens.argmax())
    if row.tokens[slot] >= vocab_size:
        what = "padding (the loader's pad_id)" if slot >= row.num_tokens else f"slot {slot} of a row"
        raise ConfigError(
            f"token id {int(row.tokens[slot])} in {what}, but the model knows ids below {vocab_size}; the data were "
            "made with another tokenizer: prepare them with the model's, or set model.vocab_size"
        )
