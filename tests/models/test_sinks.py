"""Attention sinks: a softmax with one more number for each head, and models that have them."""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from attention_makers import DOCUMENTS, forests, make_rule, random_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from model_makers import logits_of
from test_slice_attention import row_of
from varlen_twin import varlen_on_the_cpu

from makers.models import tiny_huggingface
from makers.rows import LENGTHS, random_row
from penstock.models.attention import RowAttention
from penstock.models.attention.backends import attend_documents
from penstock.models.attention.calls import Scores, prepare_calls
from penstock.models.attention.flex import FLEX
from penstock.models.attention.slices import prepare_slice
from penstock.models.attention.varlen import attend_with_sinks
from penstock.models.ours.micro_sequences import attend_past
from penstock.models.theirs.model import HuggingFaceModel
from penstock.plan.inputs import AttentionRule, RowSlice

CPU = torch.device("cpu")
SINKS = [-30.0, -1.0, 0.5, 4.0]


def slow(q: Any, k: Any, v: Any, sinks: Any, sees: Any, cap: float | None = None) -> torch.Tensor:
    """Head by head over all pairs: the sink is a column of the softmax that is thrown away."""
    out = []
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, group].T / q.shape[2] ** 0.5
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~sees, -torch.inf)
        column = sinks[head].expand(len(scores), 1)
        out.append(torch.cat([scores, column], 1).softmax(1)[:, :-1] @ v[:, group])
    return torch.stack(out, 1)


def mask_of(rule: AttentionRule, window: int | None) -> torch.Tensor:
    sees = torch.from_numpy(rule.dense_mask())
    positions = torch.from_numpy(rule.positions)
    return sees if window is None else sees & (positions[:, None] - positions < window)


def compare(attend: Any, sees: torch.Tensor, *, atol: float = 1e-9, cap: Any = None) -> None:
    """Outputs and all gradients, also those of sinks."""
    given = [*random_heads(sees.shape[1], gradients=True)]
    given.append(torch.tensor(SINKS, dtype=torch.float64, requires_grad=True))
    results = []
    for out in (attend(*given), slow(*given, sees, cap)):
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad((out * weights).sum(), given)])
    for mine, due in zip(*results, strict=True):
        torch.testing.assert_close(mine, due, rtol=0, atol=atol)


@settings(deadline=None, max_examples=40)
@given(
    documents=DOCUMENTS,
    window=st.none() | st.integers(1, 6),
    backend=st.sampled_from(["per_document", "dense", "calls"]),
    cap=st.sampled_from([None, None, 1.5]),
)
def test_documents(documents: Any, window: int | None, backend: str, cap: float | None) -> None:
    if window is not None:
        documents = [(length, 0) for length, _ in documents]
    rule = make_rule(documents)
    if backend == "calls":
        attend: Any = prepare_calls(rule, CPU, torch.float64, Scores(window, cap))
    else:
        attend = RowAttention.of(
            rule, device=CPU, dtype=torch.float64, backend=backend, window=window, softcap=cap
        )
    compare(attend, mask_of(rule, window), cap=cap)


@settings(deadline=None, max_examples=20)
@given(rule=forests(), window=st.none() | st.integers(1, 5))
def test_prefix_trees(rule: AttentionRule, window: int | None) -> None:
    compare(
        RowAttention.of(rule, device=CPU, dtype=torch.float64, window=window),
        mask_of(rule, window),
    )
    if window is None:
        compare(prepare_calls(rule, CPU, torch.float64), mask_of(rule, None))


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 6),
)
def test_varlen(lengths: list[int], window: int | None) -> None:
    """The kernel's own backward pass, given outputs and sums with sinks."""
    rule = make_rule([(length, 0) for length in lengths])
    with pytest.MonkeyPatch.context() as patch, varlen_on_the_cpu(patch):
        attention = RowAttention.of(
            rule, device=CPU, dtype=torch.float64, backend="varlen", window=window
        )
        # Log-sum-exps are in float32, as on a GPU.
        compare(attention, mask_of(rule, window), atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from(["causal", "prefixes", "trees"]),
    seed=st.integers(0, 10**6),
    window=st.sampled_from([None, 2, 5]),
)
def test_slices(kind: str, seed: int, window: int | None) -> None:
    row = row_of(kind, seed)
    parts = [RowSlice.of(row, rank, 2) for rank in range(2)]
    if parts[0].rule.bidirectional:
        window = None

    def attend(q: Any, k: Any, v: Any, sinks: Any) -> torch.Tensor:
        out = torch.zeros_like(q)
        for part in parts:
            how: Any = {"device": CPU, "dtype": q.dtype, "backend": "auto", "softcap": None}
            index = torch.from_numpy(part.index)
            out = out.index_copy(
                0, index, prepare_slice(part, window=window, **how)[1](q[index], k, v, sinks)
            )
        return out

    compare(attend, mask_of(parts[0].rule, window))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("prefix", [0, 4])
def test_flex(window: int | None, prefix: int) -> None:
    """What CUDA runs where rows have prefixes; on the CPU without gradients, unfused."""
    rule = make_rule([(7, 0 if window else prefix), (150, 0), (5, 0)])
    q, k, v = random_heads(rule.num_slots)
    sinks = torch.tensor(SINKS, dtype=torch.float64)
    for cap in (None, 1.5):
        found = FLEX.prepare(rule, CPU, q.dtype, Scores(window, cap))(q, k, v, sinks)
        due = slow(q, k, v, sinks, mask_of(rule, window), cap)
        torch.testing.assert_close(found, due, rtol=0, atol=1e-6)


def test_the_past_of_a_part() -> None:
    past, new = 5, 4
    sees = torch.ones(new, past + new, dtype=torch.bool).tril(past)
    q, k, v = random_heads(past + new)
    sinks = torch.tensor(SINKS, dtype=torch.float64)
    given = [x.requires_grad_() for x in (q[past:].clone(), k, v, sinks)]
    results = []
    for way in ("found", "due"):
        a, b, c, s = given
        if way == "found":
            out = attend_past(a, b[past:], c[past:], b[:past], c[:past], sinks=s)
        else:
            out = slow(a, b, c, s, sees)
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad((out * weights).sum(), given)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)


def test_operations_keep_the_contracts_of_torch(monkeypatch: Any) -> None:
    rule = make_rule([(7, 0), (3, 0)])
    q, k, v = random_heads(10, gradients=True)
    sinks = torch.tensor(SINKS, dtype=torch.float64, requires_grad=True)
    pieces = torch.from_numpy(np.column_stack([rule.pieces, rule.ends]).reshape(-1))
    torch.library.opcheck(attend_documents, (q, k, v, pieces, 4, 1.5, sinks))
    bounds = torch.from_numpy(rule.cu_seqlens)
    with varlen_on_the_cpu(monkeypatch):
        torch.library.opcheck(
            attend_with_sinks,
            (q, k, v, sinks, bounds, bounds, 7, 7, 3),
            # The twin's kernel is not the place for what autograd checks.
            test_utils=("test_schema", "test_faketensor"),
        )


def gpt_oss() -> Any:
    """Windows alternate."""
    inner = tiny_huggingface(
        "gpt_oss",
        attention="eager",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    for layer in inner.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return inner


def test_gpt_oss_takes_our_attention() -> None:
    """Rows and caches give transformers' own logits of each document alone."""
    inner, row = gpt_oss(), random_row()
    documents = [
        torch.from_numpy(tokens)[None] for tokens in np.split(row.tokens, np.cumsum(LENGTHS))[:-1]
    ]
    with torch.no_grad():
        due = [inner(document, use_cache=False).logits[0] for document in documents]
    model = HuggingFaceModel(inner)
    assert model.uses_our_attention, model.fit.reason
    assert model.packing(row.sequence_length).reason is None
    found = logits_of(model, row)[0, : row.num_tokens]
    torch.testing.assert_close(found, torch.cat(due), rtol=0, atol=1e-5 * float(found.std()))
    for (begin, end), logits in zip(pairwise(np.cumsum([0, *LENGTHS]).tolist()), due, strict=True):
        tokens, cache = torch.from_numpy(row.tokens[begin:end])[None], model.new_cache(1, 30)
        cuts = sorted({0, (end - begin) // 2, *range((end - begin) // 2 + 1, end - begin + 1)})
        for first, last in pairwise(cuts):
            read = model.extend(tokens[:, first:last], torch.tensor([last - first]), cache)
            torch.testing.assert_close(
                read[0], logits[last - 1], rtol=0, atol=1e-5 * float(found.std())
            )


def test_sinks_get_the_gradients_of_documents_alone() -> None:
    inner, row = gpt_oss(), random_row()
    model = HuggingFaceModel(copy.deepcopy(inner))
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(row.num_tokens, 61, generator=generator)
    logits = model.logits(model(model.tensors(row)))[0, : row.num_tokens]
    (logits * weights).sum().backward()
    for begin, end in pairwise(np.cumsum([0, *LENGTHS]).tolist()):
        tokens = torch.from_numpy(row.tokens[begin:end])[None]
        (inner(tokens, use_cache=False).logits[0] * weights[begin:end]).sum().backward()
    for mine, due in zip(model.inner.model.layers, inner.model.layers, strict=True):
        found, expected = mine.self_attn.sinks.grad, due.self_attn.sinks.grad
        assert expected.abs().min() > 0
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
