"""Rows as tensors: prefixes travel with the other fields."""

import numpy as np
import torch

from penstock.inputs import ModelInput
from penstock.integrations.torch_tensors import to_torch


def make_row(prefix_lengths: list[int] | None) -> ModelInput:
    return ModelInput(
        tokens=np.arange(7, dtype=np.int32),
        targets=np.full((1, 7), -100, np.int32),
        loss_weights=None,
        positions=None,
        document_ids=None,
        cu_seqlens=np.array([0, 4, 6, 7], np.int32),
        max_seqlen=4,
        num_tokens=6,
        source_ids=np.zeros(2, np.int32),
        prefix_lengths=None if prefix_lengths is None else np.array(prefix_lengths, np.int32),
        prefix=None if prefix_lengths is None else np.array([1, 1, 1, 0, 0, 0, 0], bool),
    )


def test_prefixes_are_carried() -> None:
    tensors = to_torch(make_row([3, 0]))
    assert isinstance(tensors["prefix"], torch.Tensor)
    assert tensors["prefix"].dtype == torch.bool
    assert tensors["prefix"].tolist() == [True, True, True, False, False, False, False]
    assert isinstance(tensors["prefix_lengths"], torch.Tensor)
    assert tensors["prefix_lengths"].tolist() == [3, 0]


def test_rows_without_prefixes_say_none() -> None:
    tensors = to_torch(make_row(None))
    assert tensors["prefix"] is None
    assert tensors["prefix_lengths"] is None
