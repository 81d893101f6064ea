"""Backends on a CUDA device, against the dense one in float64 on the CPU."""

import pytest
import torch
from attention_makers import make_rule, random_heads

from makers.rows import random_row
from penstock.models.attention import RowAttention, attend
from penstock.models.attention.slices import prepare_slice
from penstock.plan.inputs import RowSlice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PREFIXES = [(300, 130), (1, 1), (170, 170), (400, 0), (153, 0)]
CAUSAL = [(length, 0) for length, _ in PREFIXES]


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(
    ("backend", "documents", "dtype"),
    [
        ("varlen", CAUSAL, torch.bfloat16),
        ("varlen", CAUSAL, torch.float16),
        ("flex", CAUSAL, torch.bfloat16),
        ("flex", PREFIXES, torch.bfloat16),
        ("flex", PREFIXES, torch.float32),
        ("per_document", PREFIXES, torch.bfloat16),
        ("per_document", PREFIXES, torch.float32),
        ("dense", PREFIXES, torch.float32),
    ],
)
def test_cuda_is_dense(
    backend: str, documents: list[tuple[int, int]], dtype: torch.dtype, kv_heads: int
) -> None:
    rule = make_rule(documents)
    results = []
    for name, kind, device in ((backend, dtype, "cuda"), ("dense", torch.float64, "cpu")):
        # Rounded to the same values first, so that only the arithmetic differs.
        made = random_heads(rule.num_slots, kv_heads=kv_heads, dim=64, dtype=dtype)
        q, k, v = (x.to(device, kind).requires_grad_() for x in made)
        out = attend(q, k, v, rule, name)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
        results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    # float32 may use TF32 inside FlexAttention.
    tolerance = 1e-2 if dtype == torch.float32 else 5e-2
    for mine, due in zip(*results, strict=True):
        torch.testing.assert_close(mine.double().cpu(), due, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("backend", "documents"), [("varlen", CAUSAL), ("flex", PREFIXES), ("per_document", PREFIXES)]
)
def test_gradients_between_documents_are_exactly_zero(
    backend: str, documents: list[tuple[int, int]]
) -> None:
    rule = make_rule(documents)
    made = random_heads(rule.num_slots, dim=64, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.requires_grad_() for x in made)
    attention = RowAttention.of(rule, device="cuda", dtype=torch.bfloat16, backend=backend)
    out = attention(q, k, v)
    for begin, _, end in rule.pieces.tolist():
        for reach in torch.autograd.grad(
            out[begin:end].float().sum(), (q, k, v), retain_graph=True
        ):
            assert not reach[:begin].any()
            assert not reach[end:].any()


@pytest.mark.parametrize(
    ("backend", "prefixes", "dtype", "window"),
    [
        ("varlen", False, torch.bfloat16, None),
        ("varlen", False, torch.float16, 50),
        ("per_document", False, torch.float32, 50),
        ("per_document", True, torch.bfloat16, None),
    ],
)
def test_slices_on_cuda_are_dense(
    backend: str, prefixes: bool, dtype: torch.dtype, window: int | None
) -> None:
    lengths, of_prefixes = zip(*PREFIXES, strict=True)
    row = random_row(lengths, padding=0, prefixes=of_prefixes if prefixes else None)
    for rank in range(2):
        part, results = RowSlice.of(row, rank, 2), []
        for name, kind, device in ((backend, dtype, "cuda"), ("dense", torch.float64, "cpu")):
            made = random_heads(len(part.order), dim=64, dtype=dtype)
            q, k, v = (x.to(device, kind).requires_grad_() for x in made)
            place = torch.device(device)
            _, attend = prepare_slice(
                part, device=place, dtype=kind, backend=name, window=window, softcap=None
            )
            out = attend(q[torch.from_numpy(part.index).to(place)], k, v)
            weights = (
                torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
            )
            results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
        for mine, due in zip(*results, strict=True):
            torch.testing.assert_close(mine.double().cpu(), due, rtol=5e-2, atol=5e-2)


def test_auto_takes_the_fast_ones() -> None:
    for documents, due in ((CAUSAL, "varlen"), (PREFIXES, "flex")):
        assert (
            RowAttention.of(make_rule(documents), device="cuda", dtype=torch.bfloat16).backend
            == due
        )


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("backend", "documents", "window", "softcap", "dtype"),
    [
        ("varlen", CAUSAL, None, None, torch.bfloat16),
        ("varlen", CAUSAL, 50, None, torch.bfloat16),
        ("flex", CAUSAL, 50, None, torch.bfloat16),
        ("flex", CAUSAL, 50, 3.0, torch.bfloat16),
        ("flex", PREFIXES, None, 3.0, torch.bfloat16),
        ("flex", PREFIXES, None, 3.0, torch.float32),
        ("per_document", CAUSAL, 50, None, torch.float32),
        ("per_document", PREFIXES, None, 3.0, torch.bfloat16),
    ],
)
def test_windows_limits_and_sinks_on_cuda_are_dense(
    backend: str,
    documents: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    sinks: bool,
) -> None:
    rule, results = make_rule(documents), []
    for name, kind, device in ((backend, dtype, "cuda"), ("dense", torch.float64, "cpu")):
        made = random_heads(rule.num_slots, dim=64, dtype=dtype)
        given = [x.to(device, kind).requires_grad_() for x in made]
        if sinks:
            numbers = torch.tensor([-3.0, 0.5, 2.0, 5.0], device=device, dtype=kind)
            given.append(numbers.requires_grad_())
        attention = RowAttention.of(
            rule, device=device, dtype=kind, backend=name, window=window, softcap=softcap
        )
        out = attention(*given)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
        results.append([out, *torch.autograd.grad((out * weights).sum(), given)])
    for mine, due in zip(*results, strict=True):
        scale = max(1.0, float(due.detach().abs().max()))
        torch.testing.assert_close(mine.double().cpu(), due, rtol=5e-2, atol=5e-2 * scale)
