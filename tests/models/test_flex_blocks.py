"""Block masks from pieces are those that FlexAttention finds by asking about each pair."""

import torch
from attention_makers import forests, make_rule, random_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from penstock.models.attention import RowAttention, flex_mask_mod
from penstock.models.attention.calls import Scores
from penstock.models.attention.flex import FLEX, block_mask, window_mask_mod
from penstock.plan.inputs import AttentionRule

LONG = st.lists(
    st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    min_size=1,
    max_size=4,
)
CPU = torch.device("cpu")


@settings(deadline=None, max_examples=60)
@given(LONG)
def test_blocks_are_those_of_torch(documents: list[tuple[int, int]]) -> None:
    rule = make_rule(documents)
    mask_mod = flex_mask_mod(torch.from_numpy(rule.document_ids), torch.from_numpy(rule.prefix))
    found = block_mask(rule, mask_mod, CPU)
    due = create_block_mask(mask_mod, None, None, rule.num_slots, rule.num_slots, device="cpu")
    assert found.seq_lengths == due.seq_lengths
    assert found.BLOCK_SIZE == due.BLOCK_SIZE
    for side in ("kv", "q", "full_kv", "full_q"):
        counts, mine = getattr(found, f"{side}_num_blocks"), getattr(found, f"{side}_indices")
        assert torch.equal(counts, getattr(due, f"{side}_num_blocks")), side
        assert torch.equal(mine, getattr(due, f"{side}_indices")), side
        assert mine.dtype == getattr(due, f"{side}_indices").dtype


def test_a_long_row_is_quick() -> None:
    """It has 4 billion pairs of tokens: none is asked for."""

    def asked(*pair: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a pair was asked for")

    found = block_mask(make_rule([(16_384, 5000)] * 4), asked, CPU)
    assert found.shape[-2:] == (65_536, 65_536)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=4), window=st.integers(1, 400))
def test_blocks_within_a_window_are_those_of_torch(lengths: list[int], window: int) -> None:
    rule = make_rule([(length, 0) for length in lengths])
    mask_mod = flex_mask_mod(torch.from_numpy(rule.document_ids))
    near = window_mask_mod(mask_mod, window, None)
    found = block_mask(rule, near, CPU, window)
    due = create_block_mask(near, None, None, rule.num_slots, rule.num_slots, device="cpu")
    for side in ("kv", "full_kv"):
        for what in ("num_blocks", "indices"):
            name = f"{side}_{what}"
            assert torch.equal(getattr(found, name), getattr(due, name)), name


@settings(deadline=None, max_examples=8)
@given(rule=forests(), window=st.integers(1, 8), scale=st.sampled_from([1, 40]))
def test_windows_in_trees_count_positions(rule: AttentionRule, window: int, scale: int) -> None:
    rule = AttentionRule(rule.pieces * scale, rule.ends * scale)
    q, k, v = random_heads(rule.num_slots)
    found, due = (
        RowAttention.of(rule, device=CPU, dtype=q.dtype, backend="dense", window=window)(q, k, v),
        FLEX.prepare(rule, CPU, q.dtype, Scores(window))(q, k, v),
    )
    torch.testing.assert_close(found, due, rtol=0, atol=1e-6)
