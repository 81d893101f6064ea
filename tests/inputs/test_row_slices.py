"""Slices of a row: each slot on one rank, whom it sees is what the rule says, and ranks have about
as much to do.
"""

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.rows import make_row, random_row
from makers.trees import random_forest
from penstock import ModelInput
from penstock.core.errors import ConfigError
from penstock.plan.inputs import IGNORE, AttentionRule, RowSlice
from penstock.plan.inputs.row_slices import _assign


def all_slices(row: ModelInput, size: int, **how: Any) -> list[RowSlice]:
    return [RowSlice.of(row, rank, size, **how) for rank in range(size)]


@st.composite
def rows(draw: st.DrawFn) -> ModelInput:
    """Rows of documents, with prefixes or trees or neither, with and without padding."""
    seed, padding = draw(st.integers(0, 10**6)), draw(st.integers(0, 5))
    kind = draw(st.sampled_from(["causal", "prefixes", "trees"]))
    if kind == "trees":
        return random_forest(seed, padding)
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    prefixes = None
    if kind == "prefixes":
        prefixes = [draw(st.integers(0, length)) for length in lengths]
    return random_row(
        lengths, padding=padding, prefixes=prefixes, distances=draw(st.integers(1, 2)), seed=seed
    )


def padded_mask(row: ModelInput, slots: int) -> np.ndarray:
    """Who sees whom, with the padding that rounds the row up, pair by pair."""
    own, used = AttentionRule.of(row).dense_mask(), row.sequence_length
    mask = np.zeros((slots, slots), bool)
    mask[:used, :used] = own
    for query in range(used, slots):
        mask[query, used : query + 1] = True
    return mask


@settings(deadline=None)
@given(row=rows(), size=st.integers(1, 5), chunks=st.integers(1, 4))
def test_slices_see_what_the_rule_says(row: ModelInput, size: int, chunks: int) -> None:
    parts = all_slices(row, size, chunks=chunks)
    slots = len(parts[0].order)
    mask = padded_mask(row, slots)
    for part in parts:
        np.testing.assert_array_equal(part.dense_mask(), mask[part.index])
        assert part.loads.tolist() == [int(mask[other.index].sum()) for other in parts]
        seen = np.zeros_like(part.dense_mask(), int)
        for begin, end, first, last in [*part.runs.tolist(), *part.full_runs.tolist()]:
            assert 0 <= begin < end <= len(part.index)
            assert 0 <= first < last <= slots
            square = np.ones((end - begin, last - first), int)
            causal = [begin, end, first, last] in part.runs.tolist()
            seen[begin:end, first:last] += (
                np.tril(square, last - first - end + begin) if causal else square
            )
        assert seen.max() == 1, "no pair is in two runs"


@settings(deadline=None)
@given(row=rows(), size=st.integers(1, 5), chunks=st.integers(1, 4))
def test_slots_of_all_slices_are_the_row(row: ModelInput, size: int, chunks: int) -> None:
    parts = all_slices(row, size, chunks=chunks)
    used, slots = row.sequence_length, len(parts[0].order)
    assert slots % (size * chunks) == 0
    assert used <= slots < used + size * chunks
    assert {len(part.index) for part in parts} == {slots // size}
    assert all((np.diff(part.index) > 0).all() for part in parts)
    for name in ("tokens", "targets", "loss_weights", "positions", "document_ids"):
        whole = np.concatenate([getattr(part, name) for part in parts], axis=-1)[
            ..., parts[-1].order
        ]
        np.testing.assert_array_equal(whole[..., :used], getattr(row, name))
        assert whole.dtype == getattr(row, name).dtype
    gathered = np.concatenate([part.index for part in parts])
    np.testing.assert_array_equal(gathered[parts[0].order], np.arange(slots))
    padding = np.concatenate([part.index >= used for part in parts])
    assert (np.concatenate([part.targets for part in parts], axis=1)[:, padding] == IGNORE).all()
    if slots > used:
        ids = np.concatenate([part.document_ids for part in parts])
        assert set(ids[padding]).isdisjoint(ids[~padding])


@settings(deadline=None)
@given(row=rows(), size=st.integers(1, 4))
def test_one_call_of_variable_length_is_all_attention(row: ModelInput, size: int) -> None:
    """What a varlen kernel computes from the lengths, causal and aligned at the end, is the
    rule.
    """
    for part in all_slices(row, size, chunks=2):
        if len(part.full_runs):
            with pytest.raises(ConfigError, match="takes more than one causal call"):
                _ = part.lengths
            continue
        queries, keys = part.lengths
        assert queries[-1] == len(part.index)
        assert keys[-1] == len(part.keys)
        mask = np.zeros_like(part.dense_mask())
        for run in range(len(queries) - 1):
            n, m = queries[run + 1] - queries[run], keys[run + 1] - keys[run]
            for i in range(n):
                mask[queries[run] + i, part.keys[keys[run] : keys[run] + m - n + i + 1]] = True
        np.testing.assert_array_equal(mask, part.dense_mask())


def lognormal_row(random: np.random.Generator, slots: int, mean: int) -> ModelInput:
    lengths: list[int] = []
    while sum(lengths) < slots:
        lengths.append(
            int(np.clip(random.lognormal(np.log(mean) - 0.5, 1.0), 8, slots - sum(lengths)))
        )
    return make_row(lengths)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("slots", "mean"), [(8192, 1000), (32768, 2000), (32768, 30000)])
def test_ranks_have_about_as_much_to_do(size: int, slots: int, mean: int) -> None:
    random = np.random.default_rng(size + slots + mean)
    for _ in range(20):
        loads = RowSlice.of(lognormal_row(random, slots, mean), 0, size).loads
        assert loads.max() <= 1.02 * loads.mean()


def test_one_document_is_balanced_too() -> None:
    for size in (2, 4, 8, 16):
        loads = RowSlice.of(make_row([4096]), 0, size).loads
        assert loads.max() <= 1.01 * loads.mean()


@pytest.mark.parametrize("seed", range(20))
def test_few_chunks_are_divided_nearly_as_well_as_possible(seed: int) -> None:
    pairs = np.random.default_rng(seed).integers(1, 100, 8)
    owners = _assign(pairs, 2)
    assert np.bincount(owners).tolist() == [4, 4]
    best = min(
        max(pairs[list(some[:4])].sum(), pairs[list(some[4:])].sum())
        for some in permutations(range(8))
    )
    assert np.bincount(owners, pairs).max() <= 1.03 * best


def test_fields_that_are_absent_stay_absent() -> None:
    row = replace(random_row(), positions=None, document_ids=None, loss_weights=None)
    part = RowSlice.of(row, 1, 2)
    assert part.positions is None
    assert part.document_ids is None
    assert part.loss_weights is None
    assert repr(part).startswith("RowSlice(1 of 2: 16 of 32 slots, ")


def test_columns_are_cut_with_the_row() -> None:
    row = replace(
        random_row((12, 8), padding=0), columns={"scores": np.arange(20, dtype=np.float32)}
    )
    parts = all_slices(row, 2, chunks=2)
    whole = np.concatenate([part.columns["scores"] for part in parts])[parts[0].order]
    np.testing.assert_array_equal(whole, np.arange(20))


def test_tensors_of_a_slice() -> None:
    torch = pytest.importorskip("torch")
    part = RowSlice.of(random_row(), 0, 2)
    tensors = part.torch()
    assert (
        tensors["tokens"].dtype == tensors["targets"].dtype == tensors["order"].dtype == torch.int64
    )
    np.testing.assert_array_equal(tensors["loss_weights"], part.loss_weights)
    np.testing.assert_array_equal(tensors["index"], part.index)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "rank must be 0 … 1, got 2 of 2"),
        ((-1, 2), "rank must be a whole number of 0 or more, got -1"),
        ((0, 0), "size must be a whole number of 1 or more"),
        ((0.0, 2), "rank must be a whole number"),
    ],
)
def test_impossible_ranks_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RowSlice.of(random_row(), *arguments)
    with pytest.raises(ConfigError, match=r"chunks.*number.*1.*got.*0"):
        RowSlice.of(random_row(), 0, 2, chunks=0)


@pytest.mark.parametrize(
    ("field", "message"), [("media", "rows with images"), ("distillation", "what a companion .*")]
)
def test_what_has_no_slices_is_refused(field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message} cannot be shared by ranks"):
        RowSlice.of(replace(random_row(), **{field: object()}), 0, 2)


def test_rows_must_say_where_documents_are() -> None:
    with pytest.raises(ConfigError, match="does not say where its documents are"):
        RowSlice.of(replace(random_row(), document_ids=None, cu_seqlens=None), 0, 2)
