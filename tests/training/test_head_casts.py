"""A pass of a training in bfloat16 casts the output matrix once, whatever its loss."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_makers import make, make_teacher

from penstock.learn.training import Trainer

pytestmark = pytest.mark.usefixtures("plain_torch")


class Casts(TorchDispatchMode):
    """Casts of one weight to bfloat16."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.place, self.count = weight.data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() == self.place:
            self.count += found.dtype == torch.bfloat16
        return found


def casts_of_passes(trainer: Trainer) -> list[int]:
    """Of each pass of a training."""
    gradients, found = trainer._gradients, []
    add: Callable[..., torch.Tensor] = gradients.add

    def watched(*given: Any) -> torch.Tensor:
        with Casts(trainer.model.unembedding.weight) as counted:
            result = add(*given)
        found.append(counted.count)
        return result

    gradients.add = watched
    assert len(list(trainer.train())) == 3
    return found


SHARED = ("training.steps=3", "training.precision=bfloat16", "model.tied=false")
CASES: dict[str, tuple[str, ...]] = {
    "a row a pass": ("training.rows_per_pass=1",),
    "joined rows": ("training.rows_per_pass=4",),
    "further heads": ("model.prediction_heads=3", "training.rows_per_pass=2"),
    "parts of rows": ("training.micro_sequences=2",),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pass_casts_the_head_once(name, data, tmp_path, monkeypatch):
    # Several chunks.
    monkeypatch.setattr("penstock.learn.training.cross_entropy.LEAST_POSITIONS", 8)
    monkeypatch.setattr("penstock.learn.training.cross_entropy.ELEMENTS_CPU", 8)
    trainer = make(data, tmp_path / "run", *SHARED, *CASES[name])
    found = casts_of_passes(trainer)
    assert found == [1] * len(found)
    assert len(found) >= 3


@pytest.mark.parametrize("kind", ["p_kl", "alm"])
def test_with_teachers_too(kind, data, tmp_path, tmp_path_factory):
    teacher = make_teacher(tmp_path_factory.mktemp("teacher"), 4)
    given = {"teachers": [{"model": str(teacher), "loss": {"kind": kind}}] * 2}
    trainer = make(data, tmp_path / "run", *SHARED, f"teacher={json.dumps(given)}")
    found = casts_of_passes(trainer)
    assert found == [1] * len(found)
