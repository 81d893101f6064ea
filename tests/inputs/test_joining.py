"""Rows end to end: `ModelInput.join`."""

from dataclasses import replace

import numpy as np

import penstock as ps
from penstock.plan.inputs.joining import stacked


def rows_of(*documents):
    return [
        ps.inputs.pack_documents(
            [np.arange(n, dtype=np.int32) for n in row], [0] * len(row), multiple=8
        )[0]
        for row in documents
    ]


def test_rows_of_their_own_arrays():
    rows = rows_of([3, 2], [8], [1])
    joined = ps.ModelInput.join(rows)
    assert joined.cu_seqlens.tolist() == [0, 3, 5, 8, 16, 17, 24]
    assert joined.document_ids.tolist() == [0] * 3 + [1] * 2 + [2] * 3 + [3] * 8 + [4] + [5] * 7
    assert joined.source_ids.tolist() == [0, 0, -1, 0, 0, -1]
    assert joined.tokens.tolist() == [one for row in rows for one in row.tokens.tolist()]
    assert joined.targets.tolist() == [[one for row in rows for one in row.targets[0].tolist()]]
    assert (joined.num_tokens, joined.max_seqlen, joined.loss_weights, joined.reach) == (
        24,
        8,
        None,
        None,
    )


def test_entries_that_only_fill_up_a_shape_are_left_out():
    (row,) = rows_of([3, 2])
    padded = replace(row, cu_seqlens=np.append(row.cu_seqlens, [8, 8]).astype(np.int32))
    assert ps.ModelInput.join([padded, padded]).cu_seqlens.tolist() == [0, 3, 5, 8, 11, 13, 16]


def test_neighbours_in_one_block_are_a_view_and_others_are_not():
    block = np.arange(24).reshape(4, 6)
    assert np.shares_memory(stacked([block[1], block[2], block[3]]), block)
    for rows in (
        [block[2], block[1]],
        [block[0], block[2]],
        [block[0], block[1].copy()],
        [block[0, ::2], block[1, ::2]],
    ):
        made = stacked(rows)
        assert not np.shares_memory(made, block)
        np.testing.assert_array_equal(made, np.stack(rows))
