"""Documents that are prefix trees: each path gives what it gives alone, with every backend that
does not refuse it.
"""

from typing import Any

import numpy as np
import pytest
import torch
from attention_makers import THREE, attention_of, forests, make_rule, paths_of, random_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from makers.models import tiny_model
from penstock.core.errors import ConfigError
from penstock.models.attention import BACKENDS, attend
from penstock.models.attention.calls import prepare_calls
from penstock.models.attention.flex import BLOCK, block_mask, ranges_mask_mod, tree_mask_mod
from penstock.plan.inputs import AttentionRule

CPU = torch.device("cpu")
PAIR = AttentionRule(np.array([[0, 0, 3], [3, 3, 5], [5, 5, 9]]), np.array([9, 5, 9]))
"""A prompt of three tokens, and two answers."""


def with_gradients(out: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@settings(deadline=None, max_examples=80)
@given(forests())
def test_the_rule_is_its_definition(rule: AttentionRule) -> None:
    mask, positions = rule.dense_mask(), rule.positions
    for path, (begin, _, end) in zip(paths_of(rule), rule.pieces.tolist(), strict=True):
        for slot in range(begin, end):
            seen = [other for other in path if other <= slot]
            assert np.flatnonzero(mask[slot]).tolist() == seen
            assert positions[slot] == len(seen) - 1
    assert rule.forked == (len(paths_of(rule)) > len({path[0] for path in paths_of(rule)}))


@settings(deadline=None, max_examples=60)
@given(forests(), st.sampled_from(["per_document", "calls", "dense"]))
def test_each_path_is_what_it_is_alone(rule: AttentionRule, how: str) -> None:
    q, k, v = random_heads(rule.num_slots)
    call = prepare_calls(rule, CPU, torch.float64) if how == "calls" else None
    out = attend(q, k, v, rule, how) if call is None else call(q, k, v)
    for path, (begin, _, end) in zip(paths_of(rule), rule.pieces.tolist(), strict=True):
        alone = attend(*(x[path] for x in (q, k, v)), make_rule([(len(path), 0)]), "dense")
        torch.testing.assert_close(out[begin:end], alone[begin - end :], rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(forests(), st.sampled_from([1, 2, 4]))
def test_gradients_are_those_of_the_mask(rule: AttentionRule, kv_heads: int) -> None:
    found = []
    for how in ("per_document", "calls", "dense"):
        q, k, v = random_heads(rule.num_slots, kv_heads=kv_heads, gradients=True)
        call = (
            prepare_calls(rule, CPU, torch.float64)
            if how == "calls"
            else lambda *x, how=how: attend(*x, rule, how)
        )
        found.append(with_gradients(call(q, k, v), q, k, v))
    for mine in found[:2]:
        for one, expected in zip(mine, found[2], strict=True):
            torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=10)
@given(forests())
def test_flex_is_dense(rule: AttentionRule) -> None:
    q, k, v = random_heads(rule.num_slots)
    torch.testing.assert_close(
        attend(q, k, v, rule, "flex"), attend(q, k, v, rule, "dense"), rtol=0, atol=1e-12
    )


@settings(deadline=None, max_examples=40)
@given(forests(), st.integers(1, 60))
def test_blocks_are_those_of_torch(rule: AttentionRule, stretch: int) -> None:
    """Nodes as long as blocks, and longer."""
    long = AttentionRule(rule.pieces * stretch, rule.ends * stretch)
    mask_mod = tree_mask_mod(torch.from_numpy(long.ends)[torch.from_numpy(long.document_ids)])
    found = block_mask(long, mask_mod, CPU)
    expected = create_block_mask(
        mask_mod, None, None, long.num_slots, long.num_slots, device="cpu", BLOCK_SIZE=BLOCK
    )
    for side in ("kv", "q", "full_kv", "full_q"):
        for part in ("num_blocks", "indices"):
            name = f"{side}_{part}"
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_rounding_in_low_precision_is_that_of_a_document() -> None:
    """Parts are joined before they are rounded."""
    made = random_heads(PAIR.num_slots)
    exact = attend(*made, PAIR, "dense")
    rounded = attend(*(x.bfloat16() for x in made), PAIR, "per_document")
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=0.03)


@pytest.mark.parametrize("window", [1, 2, 4, 6])
def test_windows_go_by_positions(window: int) -> None:
    q, k, v = random_heads(PAIR.num_slots)
    out = attention_of(PAIR, window, device=CPU, dtype=torch.float64)(q, k, v)
    for path, (begin, _, end) in zip(paths_of(PAIR), PAIR.pieces.tolist(), strict=True):
        alone = attention_of(
            make_rule([(len(path), 0)]), window, device=CPU, dtype=torch.float64, backend="dense"
        )
        torch.testing.assert_close(
            out[begin:end], alone(*(x[path] for x in (q, k, v)))[begin - end :], rtol=0, atol=1e-12
        )


@settings(deadline=None, max_examples=15)
@given(forests())
def test_logits_and_gradients_of_a_model(rule: AttentionRule) -> None:
    """A loss over all paths: the tree computes each shared slot once, and separate documents once
    for each path.
    """
    model = tiny_model(60, dtype=torch.float64)
    tokens = torch.randint(0, 60, (rule.num_slots,), generator=torch.Generator().manual_seed(0))
    paths = paths_of(rule)

    def logits(ids: torch.Tensor, of: AttentionRule) -> torch.Tensor:
        found: torch.Tensor = model.logits(
            model.run(
                ids, torch.from_numpy(of.positions), lambda layer, q, k, v: attend(q, k, v, of)
            )[0]
        )
        return found

    def loss(scores: list[torch.Tensor]) -> torch.Tensor:
        # Not linear in a path's scores, as preference losses are.
        return torch.stack([one.log_softmax(-1)[:, 3].sum().sigmoid() for one in scores]).sum()

    whole = logits(tokens, rule)
    shared = [whole[path] for path in paths]
    separate = [logits(tokens[path], make_rule([(len(path), 0)])) for path in paths]
    for mine, alone in zip(shared, separate, strict=True):
        torch.testing.assert_close(mine, alone, rtol=0, atol=1e-12)
    parameters = list(model.parameters())
    for mine, alone in zip(
        torch.autograd.grad(loss(shared), parameters),
        torch.autograd.grad(loss(separate), parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("pieces", "reach"),
    [
        ([[0, 0, 3], [3, 3, 5]], [5]),
        ([[0, 0, 3], [3, 3, 5]], [2, 5]),
        ([[0, 0, 3], [3, 3, 5], [5, 5, 6]], [5, 6, 6]),
        ([[0, 0, 3], [3, 3, 5]], [4, 5]),
        ([[0, 0, 3], [3, 3, 5]], [6, 5]),
    ],
    ids=["too few", "before the piece ends", "crossing", "inside a piece", "behind the row"],
)
def test_damaged_trees(pieces: list[list[int]], reach: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"attention.*piece's.*subtree"):
        AttentionRule(np.array(pieces), np.array(reach))


@settings(deadline=None, max_examples=80)
@given(forests(prefixes=True))
def test_nodes_may_have_prefixes(rule: AttentionRule) -> None:
    """A slot sees its path up to itself, and the prefix of its own node if it is in it."""
    mask, positions = rule.dense_mask(), rule.positions
    first, last = rule.seen_by
    for path, (begin, prefix, end) in zip(paths_of(rule), rule.pieces.tolist(), strict=True):
        for slot in range(begin, end):
            seen = [other for other in path if other <= slot or slot < prefix > other]
            assert np.flatnonzero(mask[slot]).tolist() == seen
            assert positions[slot] == sum(other <= slot for other in path) - 1
    slots = np.arange(rule.num_slots)
    assert ((first <= slots[:, None]) & (slots[:, None] < last)).tolist() == mask.tolist()


@settings(deadline=None, max_examples=60)
@given(forests(prefixes=True), st.sampled_from([1, 2, 4]))
def test_gradients_with_prefixes_are_those_of_the_mask(rule: AttentionRule, kv_heads: int) -> None:
    found = []
    for how in ("per_document", "calls", "dense"):
        q, k, v = random_heads(rule.num_slots, kv_heads=kv_heads, gradients=True)
        call = (
            prepare_calls(rule, CPU, torch.float64)
            if how == "calls"
            else lambda *x, how=how: attend(*x, rule, how)
        )
        found.append(with_gradients(call(q, k, v), q, k, v))
    for mine in found[:2]:
        for one, expected in zip(mine, found[2], strict=True):
            torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)
    flexed = attend(*random_heads(rule.num_slots, kv_heads=kv_heads), rule, "flex")
    torch.testing.assert_close(flexed, found[2][0].detach(), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(forests(prefixes=True), st.integers(1, 60))
def test_blocks_with_prefixes_are_those_of_torch(rule: AttentionRule, stretch: int) -> None:
    long = AttentionRule(rule.pieces * stretch, rule.ends * stretch)
    mask_mod = ranges_mask_mod(*map(torch.from_numpy, long.seen_by))
    found = block_mask(long, mask_mod, CPU)
    slots = long.num_slots
    expected = create_block_mask(mask_mod, None, None, slots, slots, device="cpu", BLOCK_SIZE=BLOCK)
    for side in ("kv", "q", "full_kv", "full_q"):
        for part in ("num_blocks", "indices"):
            name = f"{side}_{part}"
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_varlen_refuses_trees() -> None:
    cuda: Any = torch.device("cuda")
    assert "has no attention over prefix trees" in str(
        BACKENDS["varlen"].refusal(PAIR, cuda, torch.bfloat16)
    )
    assert "prefix trees" not in str(
        BACKENDS["varlen"].refusal(make_rule(THREE), cuda, torch.bfloat16)
    )
    with pytest.raises(ConfigError, match=r"'per_document'.*'dense'"):
        attention_of(PAIR, 2, device=CPU, dtype=torch.float64, backend="per_document")
