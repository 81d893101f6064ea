"""Rows as tensors: prefixes travel with the other fields."""

import numpy as np
import torch

from makers.rows import make_row
from penstock import ModelInput
from penstock.plan.inputs.torch_tensors import to_torch


def row_with_prefixes(prefix_lengths: list[int] | None) -> ModelInput:
    """A row of 4 and 2 tokens and one of padding."""
    fields = {"tokens": np.arange(7, dtype=np.int32), "positions": None, "document_ids": None}
    if prefix_lengths is not None:
        fields |= {"prefix_lengths": np.array(prefix_lengths, np.int32), "prefix": np.arange(7) < 3}
    return make_row((4, 2), 1, **fields)


def test_prefixes_are_carried() -> None:
    tensors = to_torch(row_with_prefixes([3, 0]))
    assert isinstance(tensors["prefix"], torch.Tensor)
    assert tensors["prefix"].dtype == torch.bool
    assert tensors["prefix"].tolist() == [True, True, True, False, False, False, False]
    assert isinstance(tensors["prefix_lengths"], torch.Tensor)
    assert tensors["prefix_lengths"].tolist() == [3, 0]


def test_rows_without_prefixes_say_none() -> None:
    tensors = to_torch(row_with_prefixes(None))
    assert tensors["prefix"] is None
    assert tensors["prefix_lengths"] is None
