"""The published kernels on a CUDA device, against our operations in float64 on the CPU."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from makers.recurrences import delta_inputs, numbers, space_inputs
from penstock.models import ModelSettings, use_recurrent
from penstock.models.building import build_model
from penstock.models.recurrent import Borders, Operations
from penstock.models.recurrent.choice import recurrent_operations
from penstock.models.recurrent.operations import TORCH
from penstock.models.settings import BlockSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [130, 1, 0, 64, 65, *[3] * 20, 300]
TOTAL = sum(LENGTHS)
CU_SEQLENS = np.concatenate([[0], np.cumsum(LENGTHS)])
Run = Callable[..., list[Any]]


def delta(by: Operations, borders: Borders, *x: Any) -> list[Any]:
    return list(by.gated_delta_rule(*x[:5], borders, x[5]))


def fresh_delta(by: Operations, borders: Borders, *x: Any) -> list[Any]:
    return [by.gated_delta_rule(*x[:5], borders)[0]]


def convolution(by: Operations, borders: Borders, *x: Any) -> list[Any]:
    return [by.causal_convolution(*x[:3], borders)]


def carried_convolution(by: Operations, borders: Borders, *x: Any) -> list[Any]:
    return [by.causal_convolution(*x[:3], borders, x[3])]


def scan(by: Operations, borders: Borders, x: Any, dt: Any, b: Any, c: Any, a: Any) -> list[Any]:
    return [by.state_space_scan(x, dt, a, b, c, borders, keeps=False)[0]]


def selective(by: Operations, borders: Borders, *x: Any) -> list[Any]:
    return [by.selective_scan(*x, borders, keeps=False)[0]]


def convolved() -> list[torch.Tensor]:
    return [
        numbers(1, TOTAL, 32),
        numbers(2, 32, 4),
        numbers(3, 32),
        numbers(4, len(LENGTHS), 3, 32),
    ]


def selected() -> list[torch.Tensor]:
    return [
        numbers(1, TOTAL, 32),
        numbers(2, TOTAL, 32).exp(),
        -numbers(3, 32, 16).exp(),
        numbers(4, TOTAL, 16),
        numbers(5, TOTAL, 16),
    ]


CASES: list[tuple[str, Run, Callable[[], list[torch.Tensor]]]] = [
    ("fla", delta, lambda: delta_inputs(TOTAL, len(LENGTHS), 1.0, False)),
    ("fla", delta, lambda: delta_inputs(TOTAL, len(LENGTHS), 1.0, True)),
    ("fla", fresh_delta, lambda: delta_inputs(TOTAL, len(LENGTHS), 30.0, False)[:5]),
    ("fla", convolution, lambda: convolved()[:3]),
    ("fla", carried_convolution, convolved),
    ("causal_conv1d", convolution, lambda: convolved()[:3]),
    ("causal_conv1d", carried_convolution, convolved),
    ("mamba_ssm", scan, lambda: space_inputs(TOTAL, len(LENGTHS))[:5]),
    ("mamba_ssm", selective, selected),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("backend", "run", "make"), CASES)
def test_kernels_are_our_operations(backend: str, run: Run, make: Any, dtype: torch.dtype) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    by, results = Operations.of([backend], device="cuda", dtype=dtype), []
    for one, device, kind in ((by, "cuda", torch.float32), (TORCH, "cpu", torch.float64)):
        # Rounded to the same values first, so that only the arithmetic differs.
        leaves = [x.to(dtype).to(device, kind).requires_grad_() for x in make()]
        found = run(one, Borders(CU_SEQLENS, device), *leaves)
        loss = sum((x * numbers(9, *x.shape).to(x)).sum() for x in found)
        results.append([*found, *torch.autograd.grad(loss, leaves, retain_graph=True)])
        if one is by:
            begin, end = CU_SEQLENS[3:5]
            for reach in torch.autograd.grad(found[0][begin:end].sum(), leaves, allow_unused=True):
                if reach is not None and len(reach) == TOTAL:
                    assert not reach[:begin].any()
                    assert not reach[end:].any()
    # float32 may use TF32 inside Triton's kernels.
    tolerance = 1e-2 if dtype == torch.float32 else 5e-2
    for mine, due in zip(*results, strict=True):
        assert (mine.double().cpu() - due).abs().max() <= tolerance * due.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("mixer", "backends"),
    [("gated_delta", ["fla"]), ("kimi_delta", ["fla"]), ("mamba", ["mamba_ssm", "causal_conv1d"])],
)
def test_a_model_takes_them(mixer: Any, backends: list[str], dtype: Any) -> None:
    """The trial of `use_recurrent` compares rows, documents and gradients between them."""
    if missing := [name for name in backends if find_spec(name) is None]:
        pytest.skip(f"needs {missing[0]}")
    blocks = {"recurrent": BlockSettings(mixer=mixer, state_width=16), "full": BlockSettings()}
    settings = ModelSettings(
        layers=2, width=64, heads=4, dtype=dtype, blocks=blocks, pattern=("recurrent", "full")
    )
    model = build_model(settings, vocab_size=61, device="cuda")
    use_recurrent(model, backends)
    assert recurrent_operations(model).idle == []
