"""Experts of ours in one product: as by themselves, without a read, in few graphs."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from model_makers import tiny
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from makers.rows import random_row
from penstock.learn.training.computing import compile_blocks
from penstock.models.lora.lora import add_lora
from penstock.models.lora.settings import LoraSettings
from penstock.models.ours.experts import Experts
from penstock.models.settings import BlockSettings

BFLOAT16 = torch.bfloat16
ASKS = ("_local_scalar_dense", "bincount", "nonzero", "unique", "masked_select")
"""Operations for whose result, or its shape, a host waits."""


def sparse(width: int = 24, computes: torch.dtype = BFLOAT16) -> Any:
    """With weights in float32, or float64."""
    kind = BlockSettings(experts=5, experts_per_token=2, expert_width=width, balance=0.5)
    kept = torch.promote_types(computes, torch.float32)
    made = tiny(layers=3, blocks={"sparse": kind}, pattern=("sparse",), dtype=kept)
    if computes != kept:
        made.compute_in(computes)
    return made.train()


def passed(model: Any, row: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states and all gradients of a pass."""
    model.begin_step(seed=0, number=0, tokens=100)
    model.zero_grad()
    hidden = model(model.tensors(row))
    hidden.float().square().mean().backward()
    return hidden.detach(), [weight.grad for weight in model.blocks.parameters()]


class Asked(TorchDispatchMode):
    """Counts operations that ask a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in ASKS or (name == "index" and any(_is_mask(one) for one in args[1])):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def test_one_product_is_each_expert_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of experts without tokens, whose gradients are zeros."""
    model, row = sparse(), random_row((2, 1), padding=0)
    with Asked() as asked:
        hidden, gradients = passed(model, row)
    assert not asked.found
    monkeypatch.setattr(Experts, "runs_grouped", lambda *_: False)
    with Asked() as asked:
        due, due_gradients = passed(model, row)
    assert asked.found["bincount"] == 3
    torch.testing.assert_close(hidden, due, rtol=2**-7, atol=2**-7)
    for mine, theirs in zip(gradients, due_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=1e-4)
    unused = [
        not expert.gate.weight.grad.any() for block in model.blocks for expert in block.mlp.experts
    ]
    assert any(unused), "each expert had tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_dtypes_run_one_by_one(dtype: torch.dtype) -> None:
    layer = sparse(computes=dtype).blocks[0].mlp
    assert not layer.runs_grouped(dtype, torch.device("cpu"))


def test_lines_that_the_kernel_refuses_run_one_by_one() -> None:
    model = sparse(width=20)
    assert not model.blocks[0].mlp.runs_grouped(BFLOAT16, torch.device("cpu"))
    assert passed(model, random_row())[0].isfinite().all()


def test_lora_of_experts_runs_one_by_one() -> None:
    pytest.importorskip("peft")
    model = sparse()
    add_lora(model, LoraSettings(rank=2))
    assert not model.blocks[0].mlp.runs_grouped(BFLOAT16, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")  # of torch._dynamo itself
def test_rows_of_any_division_need_few_graphs() -> None:
    model, generator = sparse(), np.random.default_rng(0)
    before = Counter(counters["stats"])
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for _ in range(12):
        cuts = np.sort(generator.choice(np.arange(1, 64), generator.integers(1, 8), False))
        lengths = np.diff([0, *cuts.tolist(), 64]).tolist()
        passed(model, random_row(tuple(lengths), padding=0))
    graphs = counters["stats"]["unique_graphs"] - before["unique_graphs"]
    # The first block begins a row's balance, which has no gradients yet.
    assert 0 < graphs <= 4
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore")  # of torch._dynamo itself
@pytest.mark.parametrize(("dtype", "disabled"), [(BFLOAT16, False), (torch.float32, True)])
def test_compiling_leaves_out_experts_one_by_one(dtype: torch.dtype, disabled: bool) -> None:
    model = sparse(computes=dtype)
    compile_blocks(model)
    found = getattr(model.blocks[0].mlp.forward, "_torchdynamo_disable", False)
    assert found == disabled
