"""All backends compute the same attention, and refuse by name what they cannot do."""

import pytest
import torch
from attention_makers import DOCUMENTS, THREE, make_rule, random_heads
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_mask

from penstock.core.errors import ConfigError
from penstock.models.attention import BACKENDS, RowAttention, attend, choose, flex_mask_mod
from penstock.models.attention.backends import causal_settings

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@settings(deadline=None, max_examples=50)
@given(DOCUMENTS)
def test_per_document_is_dense_with_its_gradients(documents: list[tuple[int, int]]) -> None:
    rule = make_rule(documents)
    results = []
    for backend in ("per_document", "dense"):
        q, k, v = random_heads(rule.num_slots, gradients=True)
        out = attend(q, k, v, rule, backend)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    for mine, due in zip(*results, strict=True):
        torch.testing.assert_close(mine, due, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(DOCUMENTS)
def test_mask_mod_is_the_rule(documents: list[tuple[int, int]]) -> None:
    rule = make_rule(documents)
    ids, prefix = torch.from_numpy(rule.document_ids), torch.from_numpy(rule.prefix)
    mask = create_mask(flex_mask_mod(ids, prefix), None, None, len(ids), len(ids), device="cpu")
    assert mask[0, 0].tolist() == rule.dense_mask().tolist()
    causal = create_mask(flex_mask_mod(ids), None, None, len(ids), len(ids), device="cpu")
    assert causal[0, 0].tolist() == make_rule([(n, 0) for n, _ in documents]).dense_mask().tolist()


@pytest.mark.parametrize(
    ("documents", "kv_heads"), [(THREE, 1), ([(n, 0) for n, _ in THREE], 2), ([(300, 130)], 4)]
)
def test_flex_is_dense_on_the_cpu(documents: list[tuple[int, int]], kv_heads: int) -> None:
    rule = make_rule(documents)
    q, k, v = random_heads(rule.num_slots, kv_heads=kv_heads)
    torch.testing.assert_close(
        attend(q, k, v, rule, "flex"), attend(q, k, v, rule, "dense"), rtol=0, atol=1e-12
    )


def test_flex_refuses_gradients_on_the_cpu() -> None:
    rule = make_rule(THREE)
    q, k, v = random_heads(rule.num_slots, gradients=True)
    with pytest.raises(ConfigError, match=r"'flex'.*CPU.*'per_document'.*'dense'"):
        attend(q, k, v, rule, "flex")
    with torch.no_grad():
        assert attend(q, k, v, rule, "flex").shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_document_in_lower_precision(dtype: torch.dtype) -> None:
    rule = make_rule(THREE)
    exact = attend(*random_heads(rule.num_slots), rule, "dense")
    found = attend(*random_heads(rule.num_slots, dtype=dtype), rule, "per_document")
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), exact, rtol=0, atol={torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    )


@pytest.mark.parametrize(
    ("prefix", "device", "dtype", "due"),
    [
        (0, CPU, torch.float32, "per_document"),
        (3, CPU, torch.bfloat16, "per_document"),
        (0, CUDA, torch.bfloat16, "varlen"),
        (1, CUDA, torch.float16, "varlen"),
        (3, CUDA, torch.bfloat16, "flex"),
        (3, CUDA, torch.float32, "per_document"),
        (0, MPS, torch.float16, "per_document"),
    ],
)
def test_auto_says_what_it_takes(
    prefix: int, device: torch.device, dtype: torch.dtype, due: str
) -> None:
    rule = make_rule([(7, prefix)])
    assert choose(rule, device, dtype) == due
    if device == CPU:
        assert RowAttention.of(rule, device=device, dtype=dtype).backend == due


def test_auto_without_varlen_takes_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.models.attention.backends._find_varlen", lambda: None)
    assert choose(make_rule([(7, 0)]), CUDA, torch.bfloat16) == "flex"
    reason = BACKENDS["varlen"].refusal(make_rule([(7, 0)]), CUDA, torch.bfloat16)
    assert reason is not None
    assert (
        f"needs torch.nn.attention.varlen, which torch {torch.__version__} does not have" in reason
    )


@pytest.mark.parametrize(
    ("backend", "prefix", "device", "dtype", "message"),
    [
        (
            "flash",
            0,
            CPU,
            torch.float32,
            r"'flash' is unknown; known: auto, per_document, varlen, flex, dense$",
        ),
        (
            "varlen",
            0,
            CPU,
            torch.float16,
            r"'varlen' runs in .* on cuda only, not in float16 on cpu; .* take per_document",
        ),
        (
            "varlen",
            0,
            CUDA,
            torch.float32,
            r"'varlen' runs in .* on cuda only, not in float32 on cuda; ",
        ),
        (
            "varlen",
            3,
            CUDA,
            torch.bfloat16,
            r"'varlen' supports causal .* prefixes; for this row take per_document or flex ",
        ),
        (
            "flex",
            3,
            MPS,
            torch.float16,
            r"'flex' runs on cuda .* not on mps; for this row take per_document or dense$",
        ),
    ],
)
def test_refused_by_name(
    backend: str, prefix: int, device: torch.device, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RowAttention.of(make_rule([(7, prefix)]), device=device, dtype=dtype, backend=backend)


def test_causal_words_of_varlen_versions() -> None:
    assert causal_settings(lambda query, max_k, is_causal=False: None) == {"is_causal": True}
    assert causal_settings(lambda query, max_k, *, window_size=(-1, -1): None) == {
        "window_size": (-1, 0)
    }
    with pytest.raises(ConfigError, match=r"window_size.*is_causal.*max_k\)"):
        causal_settings(lambda query, max_k: None)


def test_the_varlen_of_this_torch_can_be_asked() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    assert causal_settings(varlen.varlen_attn)


def test_unfit_tensors_are_refused() -> None:
    rule = make_rule(THREE)
    attention = RowAttention.of(rule, device="cpu", dtype=torch.float64)
    q, k, v = random_heads(rule.num_slots)
    with pytest.raises(ConfigError, match=r"23.*slots.*needs.*\[22.*4.*16\]"):
        attention(q[1:], k, v)
    with pytest.raises(ConfigError, match=r"a divisor of heads.* k \[23, 3, 16\]"):
        attention(q, *(torch.cat([x, x[:, :1]], 1) for x in (k, v)))
    with pytest.raises(ConfigError, match=r"torch.float64.*torch.float32"):
        attention(q.float(), k.float(), v.float())
