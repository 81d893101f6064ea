"""Sequences in rows of prefix trees: each has its own tokens in its slots, sees just these; shared
ones stand once.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.inputs import AttentionRule, prefix_trees
from penstock.plan.inputs.prefix_trees import pack_trees, tree_rows

SEQUENCES = st.sets(
    st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12
).map(sorted)


@pytest.fixture(autouse=True, scope="module", params=[1, 2, 4])
def least(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_trees, "LEAST_SHARED", request.param)
        yield request.param


@settings(deadline=None, max_examples=200)
@given(SEQUENCES)
def test_a_sequence_sees_itself(least, sequences):
    row, slots = pack_trees(sequences)
    mask = AttentionRule.of(row).dense_mask()
    for one, places in zip(sequences, slots, strict=True):
        assert tuple(row.tokens[places].tolist()) == one
        assert row.positions[places].tolist() == list(range(len(one)))
        for position, slot in enumerate(places.tolist()):
            assert np.flatnonzero(mask[slot]).tolist() == places[: position + 1].tolist()
    assert sorted(set(np.concatenate(slots).tolist())) == list(range(row.num_tokens)), (
        "no slot is left over"
    )
    assert row.cu_seqlens[-1] == row.num_tokens == len(row.tokens)


@settings(deadline=None, max_examples=200)
@given(SEQUENCES)
def test_what_is_shared_stands_once(least, sequences):
    """With any length worth sharing, the slots are those of the trie."""
    row, _ = pack_trees(sequences)
    trie = {one[:end] for one in sequences for end in range(1, len(one) + 1)}
    if least == 1:
        assert row.num_tokens == len(trie)
    assert len(trie) <= row.num_tokens <= sum(map(len, sequences))


@settings(deadline=None, max_examples=200)
@given(SEQUENCES, st.integers(1, 30))
def test_rows_hold_all_sequences_in_their_slots(least, sequences, row_slots):
    rows = list(tree_rows(sequences, row_slots))
    assert [one for row in rows for one in row] == sequences
    for members in rows:
        assert len(members) == 1 or pack_trees(members)[0].num_tokens <= row_slots


def test_one_example(monkeypatch):
    monkeypatch.setattr(prefix_trees, "LEAST_SHARED", 3)
    row, slots = pack_trees([(1, 2, 3, 4), (1, 2, 3, 5, 6), (7,)])
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.cu_seqlens.tolist() == [0, 3, 4, 6, 7]
    assert row.reach.tolist() == [6, 4, 6, 7]
    assert [places.tolist() for places in slots] == [[0, 1, 2, 3], [0, 1, 2, 4, 5], [6]]
