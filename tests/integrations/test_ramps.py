"""Batch ramps in other people's loops: they work where a step may have any number of rows, else
they are refused.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from tiny_models import make_loader, make_model

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.integrations.accelerate import AcceleratorSteps

RAMP: Any = {0: 2, 3: 6}
REFUSED = (
    r"takes as many rows in every step, and rows_per_step changes \(2, then 6 from step 3 on\); "
    r"give one number"
)


def test_accelerate_goes_through_the_rows_of_each_step(counting: Path) -> None:
    data = AcceleratorSteps(Accelerator(cpu=True), make_loader(counting, rows=RAMP))
    passes = []
    for step in islice(data, 5):
        passes.append([len(part) for part in data.rows(step, rows_per_pass=4)])
        data.trained(step)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    assert passes == [[2], [2], [2], [4, 2], [4, 2]]


def test_transformers(tmp_path: Path, counting: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match="Trainer: " + REFUSED):
        ps.huggingface.Trainer(make_model(), args, loader=make_loader(counting, rows=RAMP))


def test_megatron(counting: Path) -> None:
    with pytest.raises(ConfigError, match="Megatron: " + REFUSED):
        ps.megatron.Batches(make_loader(counting, rows=RAMP))


def test_jax(counting: Path) -> None:
    pytest.importorskip("jax")
    from penstock.integrations import jax as of_jax

    loader = make_loader(counting, rows=RAMP)
    with pytest.raises(ConfigError, match="JAX: " + REFUSED):
        of_jax.batches(loader)


def test_torchtitan(counting: Path) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-integrations")
    config = ps.torchtitan.DataLoader.Config(dataset_path=str(counting), rows_per_step=RAMP)
    with pytest.raises(ConfigError, match=r"torchtitan.*takes"):
        ps.torchtitan.DataLoader(config, dp_world_size=1, dp_rank=0, seq_len=32, local_batch_size=2)
