"""One extension of a cache of keys and values: where the new tokens of each row are, and what
recurrent layers carry on from.

All that the host knows of it goes to the device in one copy, which the host does not wait for.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Array
from penstock.media.prompts import PromptImages
from penstock.media.rows import RowMedia
from penstock.models.attention import AttentionLayer
from penstock.models.recurrent.borders import Borders
from penstock.plan.inputs.torch_tensors import on_device

States = dict[int, tuple[Tensor, ...]]
"""Recurrent layer → its states, [sequences, …] each."""


class Growth(ABC):
    """New tokens at the ends of sequences.

    Args:
        held: int64 [sequences] on the CPU: stored tokens of each sequence of the cache; `done`
            counts the new ones.
        states: Those of the cache.
        sequences: int64 [B] on the CPU: the sequence of each row.
        lengths: int64 [B] on the CPU: new tokens of each row.
        width: n, that of the rows with their padding.
        device: Of the cache.
        more: Whole numbers that the cache needs on the device, too; as int64 in `sent`.
    """

    keeps = True

    def __init__(
        self,
        held: Tensor,
        states: States,
        sequences: Tensor,
        lengths: Tensor,
        width: int,
        device: torch.device,
        more: Sequence[Array] = (),
    ) -> None:
        self._held, self._states, self._device = held, states, device
        self._sequences, self._lengths = sequences, lengths
        self._borders: Borders | None = None
        self._starts = held[sequences]
        starts, counts = self._starts.numpy(), lengths.numpy()
        offsets = np.arange(width)
        places = starts[:, None] + offsets
        row, column = np.nonzero(offsets < counts[:, None])
        ends = np.maximum(starts + counts - 1, 0)
        # Padding has the position of the last token: tables of positions end at the capacity, and
        # some rotary frequencies depend on the highest position of the batch.
        positions = np.minimum(places, ends[:, None])
        rows, columns, self.positions, every, last, *self.sent = together(
            [row, column, positions, np.arange(len(counts)), np.maximum(counts - 1, 0), *more],
            device,
        )
        """int64 [B, n]: position of each token in its sequence."""
        self._new = (rows, columns)
        self.last = (every, last)
        """Index of each row's last token in [B, n]."""

    @abstractmethod
    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: store the new keys and values, and attend to all of the sequences."""

    @property
    def borders(self) -> Borders:
        """The new tokens of each row, as a document: this and the following are the `Carried` of
        recurrent blocks.
        """
        if self._borders is None:
            self._borders = Borders([0, *self._lengths.cumsum(0).tolist()], self._device)
        return self._borders

    def row(self, x: Tensor) -> Tensor:
        """[B, n, width] → [T, width], without padding."""
        return x[self._new]

    def back(self, row: Tensor, like: Tensor) -> Tensor:
        """[T, width] → [B, n, width], with zeros in the padding."""
        return torch.zeros_like(like).index_put(self._new, row)

    def state(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """States of the rows' sequences; zeros for those that begin here."""
        states = self._states.get(layer)
        if states is None:
            return None
        begun = on_device(self._starts > 0, self._device)
        inputs, state = (held[self._sequences.to(held.device)] for held in states)
        return inputs * begun[:, None, None], state * begun[:, None, None, None]

    def keep(self, layer: int, state: tuple[Tensor, Tensor]) -> None:
        """Store the states of the rows' sequences."""
        held = self._states.get(layer)
        if held is None:
            count = len(self._held)
            held = tuple(one.new_zeros(count, *one.shape[1:]) for one in state)
            self._states[layer] = held
        for stored, new in zip(held, state, strict=True):
            stored[self._sequences.to(stored.device)] = new

    def parts(self, images: Sequence[PromptImages | None]) -> list[RowMedia | None]:
        """The images among each row's new tokens; None: its prompt has none."""
        rows = zip(images, self._starts.tolist(), self._lengths.tolist(), strict=True)
        return [
            None if one is None else one.part(start, start + count) for one, start, count in rows
        ]

    def done(self) -> None:
        """Count the new tokens, after the last layer."""
        self._held[self._sequences] += self._lengths


def together(arrays: Sequence[Array], device: torch.device) -> list[Any]:
    """Whole numbers of the host as int64 on a device, in one copy that the host does not wait
    for.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(one, np.int64)) for one in arrays]
    ends = np.cumsum([0, *(one.size for one in arrays)])
    flat = on_device(np.concatenate([np.ravel(one) for one in arrays]).astype(np.int64), device)
    parts = zip(pairwise(ends.tolist()), arrays, strict=True)
    return [flat[begin:end].view(one.shape) for (begin, end), one in parts]
