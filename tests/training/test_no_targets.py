"""Rows without targets give every trained weight a gradient, so that sharded ranks reduce the same
parameters.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps
from makers.ranks import run_ranks
from penstock.learn.training.losses import row_loss
from penstock.plan.inputs.model_input import ModelInput

SHARDED = """
import os, sys
import torch, penstock as ps
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.sharding import shard
from penstock.learn.training.losses import row_loss
sys.path.insert(0, sys.argv[1])
from test_no_targets import empty_row
with Ranks(torch.device("cpu")) as ranks:
    for tied in (True, False):
        model = ps.build_model(layers=2, width=32, heads=2, vocab_size=1000, tied=tied)
        shard(model, ranks)
        row = empty_row(targets=os.environ["RANK"] == "0")
        row_loss(model, model.tensors(row), 64.0).loss.backward()
print("both")
"""


def empty_row(*, targets: bool = False, slots: int = 64) -> ModelInput:
    wanted = np.full((1, slots), 1 if targets else -100, np.int32)
    return ModelInput(
        tokens=np.ones(slots, np.int32),
        targets=wanted,
        loss_weights=(wanted != -100).astype(np.float32),
        positions=np.arange(slots, dtype=np.int32),
        document_ids=np.zeros(slots, np.int32),
        cu_seqlens=np.array([0, slots], np.int32),
        max_seqlen=slots,
        num_tokens=slots,
        source_ids=np.zeros(1, np.int32),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_has_a_gradient_of_zeros(tied: bool) -> None:
    model = ps.build_model(layers=2, width=32, heads=2, vocab_size=100, tied=tied)
    row_loss(model, model.tensors(empty_row()), 64.0).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert not torch.any(weight.grad), name


def test_a_sharded_rank_without_targets_breaks_no_collective(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    for status, out, err in run_ranks(script, [Path(__file__).parent], 2, tmp_path):
        assert status == 0, err
        assert "both" in out
