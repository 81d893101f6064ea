"""Attention whose scores are kept within a number: the formula slot by slot, and models that use
it.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from attention_makers import attention_of, forests, make_rule
from hypothesis import given, settings
from hypothesis import strategies as st
from model_makers import logits_of, tiny
from test_micro_sequences import assert_same, cut, whole

from makers.rows import LENGTHS, random_row
from penstock.core.errors import ConfigError
from penstock.models.attention.calls import Scores
from penstock.models.attention.flex import FLEX
from penstock.models.exporting import export
from penstock.plan.inputs import AttentionRule

CAP = 1.5


def slow(
    q: Any, k: Any, v: Any, rule: AttentionRule, window: int | None, cap: float
) -> torch.Tensor:
    """Query by query, head by head, over the keys that the rule's own mask shows."""
    sees, positions = rule.dense_mask(), rule.positions
    out = torch.empty_like(q)
    for query in range(len(q)):
        near = positions[query] - positions < (window or len(q))
        keys = torch.from_numpy(np.flatnonzero(sees[query] & near))
        for head in range(q.shape[1]):
            group = head * k.shape[1] // q.shape[1]
            scores = k[keys, group] @ q[query, head] / q.shape[2] ** 0.5
            out[query, head] = (cap * torch.tanh(scores / cap)).softmax(0) @ v[keys, group]
    return out


def random_qkv(slots: int, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(slots)
    shapes = [(slots, heads, 6), (slots, kv_heads, 6), (slots, kv_heads, 6)]
    return [3 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def check(rule: AttentionRule, window: int | None, backend: str) -> None:
    qkv = [x.requires_grad_() for x in random_qkv(rule.num_slots)]
    attention = attention_of(
        rule, window, device=torch.device("cpu"), dtype=torch.float64, backend=backend, softcap=CAP
    )
    found, due = attention(*qkv), slow(*qkv, rule, window, CAP)
    torch.testing.assert_close(found, due)
    weights = torch.randn(
        found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    for mine, theirs in zip(
        *(torch.autograd.grad((x * weights).sum(), qkv) for x in (found, due)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@settings(deadline=None, max_examples=30)
@given(
    documents=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 5),
    backend=st.sampled_from(["auto", "per_document", "dense"]),
)
def test_documents_with_prefixes_or_windows(
    documents: list[tuple[int, int]], window: int | None, backend: str
) -> None:
    check(
        make_rule([(n, min(n, prefix) if window is None else 0) for n, prefix in documents]),
        window,
        backend,
    )


@settings(deadline=None, max_examples=30)
@given(rule=forests(), window=st.none() | st.integers(1, 5))
def test_prefix_trees(rule: AttentionRule, window: int | None) -> None:
    check(rule, window, "auto")


def test_a_large_number_changes_nothing() -> None:
    rule, qkv = make_rule([(7, 3), (4, 0)]), random_qkv(11)
    device, dtype = torch.device("cpu"), torch.float64
    plain = attention_of(rule, None, device=device, dtype=dtype)(*qkv)
    capped = attention_of(rule, None, device=device, dtype=dtype, softcap=1e6)(*qkv)
    torch.testing.assert_close(capped, plain, rtol=0, atol=1e-9)
    small = attention_of(rule, None, device=device, dtype=dtype, softcap=1.0)(*qkv)
    assert (small - plain).abs().max() > 0.1


def capped_model(**more: Any) -> Any:
    return tiny(layers=3, init_std=0.5, attention_softcap=CAP, **more)


def test_documents_are_apart_and_the_cache_is_exact() -> None:
    model, row = capped_model(), random_row()
    found = logits_of(model, row)[0]
    assert (found - logits_of(tiny(layers=3, init_std=0.5), row)[0]).abs().max() > 1e-3
    for begin, end in pairwise(np.cumsum([0, *LENGTHS]).tolist()):
        alone = random_row((end - begin,), padding=0)
        alone.tokens[:] = row.tokens[begin:end]
        due = logits_of(model, alone)[0]
        torch.testing.assert_close(found[begin:end], due, rtol=0, atol=1e-9)
        cache, text = model.new_cache(2, end - begin), torch.from_numpy(alone.tokens).long()[None]
        half = (end - begin + 1) // 2
        for first, last in [(0, half), *((place, place + 1) for place in range(half, end - begin))]:
            read = model.extend(
                text[:, first:last], torch.tensor([last - first]), cache, torch.tensor([1])
            )
            torch.testing.assert_close(read[0], due[last - 1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("parts", [2, 5])
def test_rows_in_parts(parts: int) -> None:
    row = random_row((14, 3, 9), padding=4)
    assert_same(cut(capped_model(), row, parts), whole(capped_model(), row))


def test_what_cannot_be_done_is_refused(tmp_path: Any) -> None:
    model = capped_model()
    with pytest.raises(ConfigError, match=r"'flex'.*1\.5.*per_document"):
        model.tensors(random_row(), "flex")
    with pytest.raises(ConfigError, match="attention backend 'fast' is unknown"):
        model.tensors(random_row(), "fast")
    with pytest.raises(ConfigError, match=r"sliding.*3.*bidirectional"):
        capped_model(sliding_window=3).tensors(random_row(prefixes=(5, 0, 0)))
    with pytest.raises(ConfigError, match="attention_softcap has no layout"):
        export(model, tmp_path / "hf")


def test_memory_of_documents_grows_with_their_tokens() -> None:
    """What is kept for the backward pass; scores would grow with the square."""

    def saved(tokens: int) -> int:
        rule, sizes = make_rule([(tokens, 0)]), {}
        device, dtype = torch.device("cpu"), torch.float64
        attention = attention_of(rule, None, device=device, dtype=dtype, softcap=CAP)
        qkv = [x.requires_grad_() for x in random_qkv(tokens)]

        def pack(x: torch.Tensor) -> torch.Tensor:
            sizes[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attention(*qkv)
        return sum(sizes.values())

    assert saved(600) < 2.1 * saved(300)


def test_a_long_document_takes_several_blocks() -> None:
    check(make_rule([(300, 140), (5, 0)]), None, "per_document")
    check(make_rule([(300, 0), (5, 0)]), 150, "per_document")


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("prefix", [0, 200])
def test_flex_keeps_scores_within_the_number(window: int | None, prefix: int) -> None:
    """What CUDA runs; on the CPU without gradients, unfused."""
    rule = make_rule([(300, 0 if window else prefix), (50, 0)])
    qkv = random_qkv(350)
    found = FLEX.prepare(rule, torch.device("cpu"), torch.float64, Scores(window, CAP))(*qkv)
    torch.testing.assert_close(found, slow(*qkv, rule, window, CAP), rtol=0, atol=1e-6)
