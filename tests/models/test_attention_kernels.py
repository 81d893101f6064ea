"""Which kernel of torch runs: tables, no kernel that makes all scores unseen, FlashAttention 3."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_makers import make_rule, random_heads
from torch.nn import functional

from makers.rows import random_row
from makers.trees import random_forest
from penstock.learn.training import determinism
from penstock.learn.training.settings import TrainSettings
from penstock.models.attention import RowAttend, RowAttention, choose, kernels, varlen
from penstock.models.attention.calls import Scores
from penstock.models.attention.kernels import attend_heads, kernels_for, only_math, sdpa
from penstock.plan.inputs import AttentionRule

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64

DOCUMENTS, PREFIXES = make_rule([(7, 0), (3, 0)]), make_rule([(7, 4)])
TREES = AttentionRule.of(random_forest(3))
WINDOW, CAP = Scores(window=3), Scores(softcap=30.0)


@pytest.mark.parametrize(
    ("rule", "scores", "half", "single", "elsewhere"),
    [
        (DOCUMENTS, Scores(), "varlen", "per_document", "per_document"),
        (DOCUMENTS, WINDOW, "varlen", "per_document", "per_document"),
        (DOCUMENTS, Scores(window=100), "varlen", "per_document", "per_document"),
        (PREFIXES, Scores(), "flex", "per_document", "per_document"),
        (TREES, Scores(), "flex", "flex", "per_document"),
        (TREES, WINDOW, "flex", "flex", "dense"),
        (DOCUMENTS, CAP, "flex", "flex", "per_document"),
        (DOCUMENTS, Scores(3, 30.0), "flex", "flex", "per_document"),
        (PREFIXES, CAP, "flex", "flex", "per_document"),
        (TREES, CAP, "flex", "flex", "per_document"),
    ],
)
def test_the_table_of_backends(
    rule: AttentionRule, scores: Scores, half: str, single: str, elsewhere: str
) -> None:
    """That of the docstring of `row_attention`."""
    assert TREES.forked
    assert choose(rule, CUDA, HALF, scores) == choose(rule, CUDA, torch.float16, scores) == half
    assert choose(rule, CUDA, SINGLE, scores) == single
    for device in (CPU, MPS):
        for dtype in (HALF, SINGLE):
            assert choose(rule, device, dtype, scores) == elsewhere


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "due"),
    [
        ("cuda", HALF, False, ("flash", "efficient")),
        ("cuda", HALF, True, ("efficient",)),
        ("cuda", SINGLE, False, ("efficient",)),
        ("cuda", SINGLE, True, ("efficient",)),
        ("cuda", DOUBLE, False, ("math",)),
        ("cpu", SINGLE, True, ("flash",)),
        ("cpu", DOUBLE, False, ("flash",)),
        ("mps", SINGLE, False, ("math",)),
    ],
)
def test_the_table_of_kernels(
    device: str, dtype: torch.dtype, masked: bool, due: tuple[str, ...]
) -> None:
    assert kernels_for(device, dtype, masked=masked) == due


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_torch_agrees_with_the_table(dtype: torch.dtype, masked: bool, kv_heads: int) -> None:
    q, k, v = (
        torch.randn(kv_heads, heads, 40, 64, device="cuda", dtype=dtype)
        for heads in (8 // kv_heads, 1, 1)
    )
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    mask = torch.ones(40, 40, device="cuda", dtype=torch.bool).tril() if masked else None
    due = kernels_for("cuda", dtype, masked=masked)
    assert only_math(q, k, v, mask) == (due == ("math",))


@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE])
@pytest.mark.parametrize("way", ["causal", "all", "mask", "rows"])
def test_key_heads_as_the_batch_give_the_bits_of_grouped_heads(
    dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, n, m = (3, 1, 50) if way == "rows" else (1, 40, 40)
    q, k, v = (
        torch.randn(rows, heads, count, 16, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads, count in ((8, n), (2, m), (2, m))
    )
    mask = None
    if way == "mask":
        mask = torch.ones(n, m, dtype=torch.bool).tril()
    if way == "rows":
        mask = (torch.arange(m) < torch.tensor([[20], [50], [31]]))[:, None, None]
    torchs = functional.scaled_dot_product_attention
    due = torchs(q, k, v, attn_mask=mask, is_causal=way == "causal", enable_gqa=True)
    seen = []

    def watched(q: Any, k: Any, v: Any, **given: Any) -> Any:
        seen.append((k.shape, k.stride(1), given.get("enable_gqa", False)))
        return torchs(q, k, v, **given)

    monkeypatch.setattr(kernels, "scaled_dot_product_attention", watched)
    found = sdpa(q, k, v, mask=mask, causal=way == "causal")
    assert torch.equal(found, due)
    # The keys of a group are the same memory, and the kernel knows no grouped heads.
    assert seen == [((rows * 2, 4, m, 16), 0, False)]
    results = (torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (found, due))
    for mine, expected in zip(*results, strict=True):
        scale = float(expected.abs().max())
        atol = {HALF: 2e-2, SINGLE: 1e-6, DOUBLE: 1e-14}[dtype] * scale
        torch.testing.assert_close(mine, expected, rtol=0, atol=atol)


def test_no_call_of_ours_asks_torch_for_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with windows and prefixes, caches, and parts of rows, on any device but the CPU."""
    from model_makers import tiny

    from penstock.models.attention.calls import prepare_calls

    torchs, seen = functional.scaled_dot_product_attention, []

    def watched(q: Any, k: Any, v: Any, **given: Any) -> Any:
        assert not given.get("enable_gqa")
        assert q.shape[1] == k.shape[1]
        seen.append(q.shape)
        return torchs(q, k, v, **given)

    monkeypatch.setattr(kernels, "scaled_dot_product_attention", watched)
    for rule, scores in ((DOCUMENTS, WINDOW), (PREFIXES, Scores()), (TREES, Scores())):
        q, k, v = random_heads(rule.num_slots)
        prepare_calls(rule, CPU, q.dtype, scores)(q, k, v)
    model, before = tiny(), len(seen)
    cache = model.new_cache(2, 12)
    for width in (4, 3, 1, 1):
        tokens = torch.ones(2, width, dtype=torch.int64)
        model.extend(tokens, torch.tensor([width, 1]), cache)
    assert before > 3
    assert len(seen) > before + 4


@pytest.mark.parametrize("left", [True, False])
def test_a_slow_kernel_is_said_once(
    left: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch is asked; here in its place."""
    monkeypatch.setattr(kernels, "_asked", set())
    cuda = SimpleNamespace(
        SDPAParams=lambda *given: given,
        can_use_flash_attention=lambda given: False,
        can_use_efficient_attention=lambda given: not left,
    )
    monkeypatch.setattr(torch.backends, "cuda", cuda)
    q, k, v = (x[None] for x in random_heads(4, kv_heads=4, dim=20))
    with caplog.at_level(logging.WARNING, "penstock.models"):
        for _ in range(3):
            kernels._warn_of_math(q, k, v, None, True)
    assert caplog.text.count("torch's slow kernel") == int(left)
    assert not left or "float64 with heads of width 20 runs on" in caplog.text


def test_one_function_for_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for one that no document reaches: else a compiled block would change from row to row."""
    given = []

    def watched(*_: Any, window_size: Any, enable_gqa: bool = False) -> torch.Tensor:
        given.append((window_size, enable_gqa))
        return torch.zeros(1)

    rule = AttentionRule.of(random_row((9, 4)))
    bounds = varlen.Bounds.of(rule.cu_seqlens, rule.cu_seqlens, CPU)
    for window in (None, 1, 4, 1000):
        for kv_heads in (2, 4):
            varlen.prepare_varlen(watched, bounds, window)(*random_heads(16, kv_heads=kv_heads))
    sizes = [(-1, 0), (0, 0), (3, 0), (999, 0)]
    assert given == [(size, grouped) for size in sizes for grouped in (True, False)]


@pytest.mark.parametrize(
    ("active", "package", "major", "due"),
    [
        (None, True, 9, "FlashAttention 3"),
        (None, True, 8, "FlashAttention 2"),
        (None, False, 9, "FlashAttention 2"),
        ("FA4", True, 9, "FlashAttention 4"),
    ],
)
def test_flash_3_is_switched_on_where_it_is(
    active: str | None, package: bool, major: int, due: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, switched = pytest.importorskip("torch.nn.attention"), []
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: active)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", switched.append)
    monkeypatch.setattr(varlen, "find_spec", lambda _: object() if package else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    assert varlen.flash_name.__wrapped__("cuda") == due
    assert switched == (["FA3"] if due == "FlashAttention 3" else [])
    assert varlen.flash_name.__wrapped__("cpu") == ""


@pytest.mark.parametrize(
    ("flash", "due"),
    [("", "auto"), ("FlashAttention 2", "auto"), ("FlashAttention 3", "auto (FlashAttention 3)")],
)
def test_a_resumed_run_knows_its_flash(
    flash: str, due: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version rounds otherwise."""
    monkeypatch.setattr(determinism, "flash_name", lambda _: flash)
    bits = determinism.bit_settings(TrainSettings(), CPU, 1, 1, "bfloat16", None)
    assert bits.attention == due


def test_heads_without_groups_are_as_they_were() -> None:
    q, k, v = random_heads(12, kv_heads=4)
    due = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True
    )
    assert torch.equal(attend_heads(q, k, v, causal=True), due[0].transpose(0, 1))


def test_what_runs_is_said() -> None:
    rule = make_rule([(7, 0)])
    for windows, due in (
        ((), "per_document"),
        ((4,), "per_document, windows of 4"),
        ((9, None, 4, None), "per_document, windows of 4 and 9 and all"),
    ):
        attend = RowAttend.of(
            windows, lambda one: RowAttention.of(rule, device=CPU, dtype=SINGLE, window=one)
        )
        assert attend.describe() == due
