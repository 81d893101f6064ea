"""The attention rule of a row is what its definition says of each pair of slots."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.rows import make_row
from penstock import ModelInput
from penstock.core.errors import ConfigError
from penstock.plan.inputs import AttentionRule

DOCUMENTS = st.lists(
    st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=6
)
"""(tokens, tokens of the prefix) of each document."""


def row_with_prefixes(documents: list[tuple[int, int]], padding: int, **fields: Any) -> ModelInput:
    lengths, prefixes = ([document[i] for document in documents] for i in (0, 1))
    flags = [place < prefix for n, prefix in documents for place in range(n)] + [False] * padding
    given = {
        "prefix_lengths": np.array(prefixes, np.int32),
        "prefix": np.array(flags, bool),
        "positions": None,
    }
    return make_row(lengths, padding, **{**given, **fields})


def sees(row: ModelInput, query: int, key: int) -> bool:
    """The definition."""
    assert row.document_ids is not None
    assert row.prefix is not None
    same = row.document_ids[query] == row.document_ids[key]
    return bool(same and (key <= query or (row.prefix[query] and row.prefix[key])))


@settings(deadline=None)
@given(DOCUMENTS, st.integers(0, 4), st.booleans())
def test_rule_is_the_definition(
    documents: list[tuple[int, int]], padding: int, from_ids: bool
) -> None:
    if not documents and not padding:
        return
    row = row_with_prefixes(documents, padding)
    rule = AttentionRule.of(
        row_with_prefixes(documents, padding, cu_seqlens=None) if from_ids else row
    )
    slots = range(row.sequence_length)
    assert rule.dense_mask().tolist() == [
        [sees(row, query, key) for key in slots] for query in slots
    ]
    np.testing.assert_array_equal(rule.document_ids, row.document_ids)
    np.testing.assert_array_equal(rule.prefix, row.prefix)
    np.testing.assert_array_equal(rule.cu_seqlens, row.cu_seqlens)
    assert rule.bidirectional == bool(np.triu(rule.dense_mask(), 1).any())
    assert rule.dense_mask().diagonal().all(), "every slot, padding too, sees itself"


def test_a_row_without_prefixes_is_causal() -> None:
    rule = AttentionRule.of(
        row_with_prefixes([(3, 2), (2, 0)], 2, prefix_lengths=None, prefix=None)
    )
    assert not rule.bidirectional
    assert not rule.prefix.any()
    assert rule.pieces.tolist() == [[0, 0, 3], [3, 3, 5], [5, 5, 7]]


@pytest.mark.parametrize("padding", [0, 2])
def test_entries_that_fill_cu_seqlens_up_are_no_documents(padding: int) -> None:
    row = row_with_prefixes([(3, 2), (2, 0)], padding)
    assert row.cu_seqlens is not None
    filled = row_with_prefixes(
        [(3, 2), (2, 0)], padding, cu_seqlens=np.append(row.cu_seqlens, [5 + padding] * 4)
    )
    assert AttentionRule.of(filled).pieces.tolist() == AttentionRule.of(row).pieces.tolist()


def test_joined_documents_are_one_and_have_no_prefix() -> None:
    joined = {"cu_seqlens": np.array([0, 5, 7], np.int32)}
    rule = AttentionRule.of(row_with_prefixes([(3, 0), (2, 0)], 2, **joined))
    assert rule.pieces.tolist() == [[0, 0, 5], [5, 5, 7]], (
        "attention='row' is followed, whatever document_ids say"
    )
    with pytest.raises(ConfigError, match=r"2.*cu_seqlens say 1.*'document'"):
        AttentionRule.of(row_with_prefixes([(3, 2), (2, 0)], 2, **joined))


def test_a_row_that_does_not_say_where_documents_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cu_seqlens.*InputRequirements\(cu_seq"):
        AttentionRule.of(row_with_prefixes([(3, 0)], 0, cu_seqlens=None, document_ids=None))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([[0, 0, 0]], "hold a token or more"),
        ([[1, 1, 2]], "begin at 0"),
        ([[0, 0, 2], [3, 3, 4]], "follow each other"),
        ([[0, 3, 2]], "prefix inside; got "),
        ([[0, 2]], r"got int64\[1, 2\]"),
    ],
)
def test_impossible_pieces_are_refused(pieces: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionRule(np.array(pieces))
