"""Attention of slices: all slices together are attention over the whole row, with its gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_makers import random_heads
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.rows import random_row
from makers.trees import random_forest
from penstock import ModelInput
from penstock.core.errors import ConfigError, DistributedError
from penstock.models.attention import slice_attention, slices
from penstock.models.attention.slices import prepare_slice
from penstock.models.attention.softcap import capped_attention
from penstock.plan.inputs import RowSlice

CPU = torch.device("cpu")


def row_of(kind: str, seed: int) -> ModelInput:
    if kind == "trees":
        return random_forest(seed, padding=seed % 4)
    if kind == "blocks":
        return with_prefixes(random_forest(seed, padding=seed % 4), seed)
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 20, random.integers(1, 6)).tolist()
    prefixes = (
        [int(random.integers(0, length + 1)) for length in lengths] if kind == "prefixes" else None
    )
    return random_row(lengths, padding=seed % 4, prefixes=prefixes, seed=seed)


def with_prefixes(row: ModelInput, seed: int) -> ModelInput:
    """Nodes of trees whose first slots see each other, as those of blocks do."""
    assert row.cu_seqlens is not None
    sizes = np.diff(row.cu_seqlens)
    lengths = np.random.default_rng(seed).integers(0, sizes + 1).astype(np.int32)
    nodes = len(sizes) - (row.num_tokens < row.sequence_length)
    lengths[nodes:] = 0
    ends = np.repeat(row.cu_seqlens[:-1] + lengths, sizes)
    return replace(
        row,
        source_ids=np.zeros(nodes, np.int32),
        prefix_lengths=lengths[:nodes],
        prefix=np.arange(row.sequence_length) < ends,
    )


def slow(
    part: RowSlice, q: Any, k: Any, v: Any, window: int | None, softcap: float | None
) -> torch.Tensor:
    """The obvious way: all pairs, of which the rule takes some."""
    mask = torch.from_numpy(part.rule.dense_mask())
    if window is not None:
        positions = torch.from_numpy(part.rule.positions)
        mask &= positions[:, None] - positions < window
    heads = (x.transpose(0, 1) for x in (q, k, v))
    # A limit so high changes nothing that float64 holds to 1e-9.
    return capped_attention(*heads, mask, softcap or 1e5).transpose(0, 1)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["causal", "prefixes", "trees", "blocks"]),
    seed=st.integers(0, 10**6),
    size=st.integers(1, 4),
    chunks=st.integers(1, 3),
    backend=st.sampled_from(["per_document", "dense", "masked"]),
    window=st.sampled_from([None, None, 1, 3, 9]),
    softcap=st.sampled_from([None, None, 2.0]),
)
def test_slices_attend_as_the_row(
    kind: str,
    seed: int,
    size: int,
    chunks: int,
    backend: str,
    window: int | None,
    softcap: float | None,
) -> None:
    row = row_of(kind, seed)
    parts = [RowSlice.of(row, rank, size, chunks=chunks) for rank in range(size)]
    q, k, v = random_heads(len(parts[0].order), gradients=True)
    if kind in ("prefixes", "blocks") and parts[0].rule.bidirectional:
        window = None
    due = slow(parts[0], q, k, v, window, softcap)
    found = torch.empty_like(due)
    for part in parts:
        if backend == "masked":
            attend = slices._masked(
                list(slices._stretches(part, window)), part, CPU, window, softcap
            )
        else:
            how = {"window": window, "softcap": softcap}
            name, attend = prepare_slice(part, device=CPU, dtype=q.dtype, backend=backend, **how)
            assert name == backend
        found = found.index_copy(0, torch.from_numpy(part.index), attend(q[part.index], k, v))
    weights = torch.linspace(-1, 1, due.numel(), dtype=due.dtype).view_as(due)
    results = (
        [one, *torch.autograd.grad((one * weights).sum(), (q, k, v))] for one in (found, due)
    )
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-8 if softcap is None else 1e-11)


@pytest.mark.parametrize("kind", ["causal", "prefixes", "trees", "blocks"])
def test_the_operation_is_exact(kind: str) -> None:
    """Against the dense backend, whose arithmetic is torch's own."""
    for seed in range(10):
        part = RowSlice.of(row_of(kind, seed), 1, 2, chunks=2)
        q, k, v = random_heads(len(part.order), gradients=True)
        results = []
        for backend in ("per_document", "dense"):
            how: Any = {"device": CPU, "dtype": q.dtype, "window": None, "softcap": None}
            out = prepare_slice(part, backend=backend, **how)[1](q[part.index], k, v)
            weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
            results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
        for mine, due in zip(*results, strict=True):
            torch.testing.assert_close(mine, due, rtol=0, atol=1e-13)


def test_the_operation_keeps_the_contracts_of_torch() -> None:
    part = RowSlice.of(random_row((20, 5, 7)), 0, 2, chunks=2)
    q, k, v = random_heads(len(part.order), gradients=True)
    calls = torch.from_numpy(slices._calls(part))
    torch.library.opcheck(
        slices.attend_runs, (q[part.index].detach().requires_grad_(), k, v, calls)
    )


def test_half_precision_is_near() -> None:
    part = RowSlice.of(random_row((40, 5, 17)), 1, 2)
    q, k, v = random_heads(len(part.order), dtype=torch.bfloat16)
    how: Any = {"device": CPU, "window": None, "softcap": None}
    found = prepare_slice(part, dtype=q.dtype, backend="auto", **how)[1](q[part.index], k, v)
    due = prepare_slice(part, dtype=torch.float64, backend="dense", **how)[1](
        *(x.double() for x in (q[part.index], k, v))
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), due, rtol=0, atol=0.02)


def test_one_rank_needs_no_process_group() -> None:
    row = random_row((9, 4), padding=3)
    part = RowSlice.of(row, 0, 1)
    attention = slice_attention(part, device="cpu", dtype=torch.float64)
    q, k, v = random_heads(len(part.index), gradients=True)
    out = attention(q, k, v)
    due = slow(part, q, k, v, None, None)
    torch.testing.assert_close(out, due, rtol=0, atol=1e-8)
    for mine, expected in zip(
        *(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, due)), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-8)
    assert attention.backend == "per_document"
    assert attention.slots == len(part.index)


def test_a_slice_of_another_place_is_refused() -> None:
    with pytest.raises(DistributedError, match=r"rank.*1.*2.*process.*without.*rank.*1"):
        slice_attention(RowSlice.of(random_row(), 1, 2), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"backend": "flex"},
            "'flex' knows no slices of rows; take auto, per_document, varlen, dense",
        ),
        (
            {"backend": "varlen"},
            "'varlen' runs in float16 and bfloat16 on cuda only, .* take per_document or dense",
        ),
        ({"window": 4}, "sliding window of 4 tokens and a bidirectional prefix exclude each other"),
    ],
)
def test_what_is_not_supported_is_refused(given: dict[str, Any], message: str) -> None:
    part = RowSlice.of(random_row((12, 8), prefixes=(5, 3)), 0, 1)
    with pytest.raises(ConfigError, match=message):
        slice_attention(part, device="cpu", dtype=torch.float32, **given)


def test_auto_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs; only the choice."""
    monkeypatch.setattr(slices, "_varlen", lambda *_: None)
    monkeypatch.setattr(slices, "_masked", lambda *_: None)
    cuda, how = torch.device("cuda"), {"backend": "auto", "window": None, "softcap": None}
    plain, forked = RowSlice.of(random_row((12, 8)), 0, 2), RowSlice.of(random_forest(3), 0, 2)
    assert len(forked.full_runs)
    for part, dtype, more, due in (
        (plain, torch.bfloat16, {}, "varlen"),
        (plain, torch.bfloat16, {"window": 3}, "varlen"),
        (plain, torch.bfloat16, {"softcap": 30.0}, "per_document"),
        (plain, torch.float32, {}, "per_document"),
        (forked, torch.bfloat16, {}, "per_document"),
    ):
        assert prepare_slice(part, device=cuda, dtype=dtype, **(how | more))[0] == due


def test_varlen_gets_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the kernel, with a slow twin in its place."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def twin(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, window_size: Any
    ) -> Any:
        out = torch.zeros_like(q)
        assert max_q == int(cu_q.diff().max())
        assert max_k == int(cu_k.diff().max())
        for (a, b), (c, d) in zip(
            cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True
        ):
            queries, keys = torch.arange(b - a)[:, None] + (d - c) - (b - a), torch.arange(d - c)
            mask = keys <= queries + window_size[1]
            if window_size[0] >= 0:
                mask &= keys >= queries - window_size[0]
            heads = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
            out[a:b] = capped_attention(*heads, mask, 1e5).transpose(0, 1)
        return out

    monkeypatch.setattr(varlen, "varlen_attn", twin)
    row = random_row((30, 1, 13, 9), padding=4)
    for window in (None, 1, 5):
        for rank in range(3):
            part = RowSlice.of(row, rank, 3, chunks=2)
            q, k, v = random_heads(len(part.order))
            found = slices._varlen(part, CPU, window)(q[part.index], k, v)
            due = slow(part, q, k, v, window, None)[part.index]
            torch.testing.assert_close(found, due, rtol=0, atol=1e-12)
