"""attention="row": documents of a row see each other, and nothing else changes."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import assert_exact_resume
from makers.datasets import random_documents
from penstock import InputRequirements, Loader, Source, write_dataset
from penstock.core.errors import ConfigError
from penstock.plan.inputs import EVERYTHING
from penstock.plan.packing import PACKINGS

SLOTS = 48


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    documents = random_documents(90, 1, 60)
    spans = [None if i % 3 else [(len(d) // 2, len(d), 0.5)] for i, d in enumerate(documents)]
    return write_dataset(tmp_path_factory.mktemp("attention") / "d", documents, spans=spans)


def build(dataset, **kwargs):
    return Loader(
        Source(dataset, max_epochs=2),
        **{"sequence_length": SLOTS, "rows_per_step": 4, "threads": 0, **kwargs},
    )


def slow_row(row):
    """What describes a row of which all tokens are one document, and its padding, if any,
    another.
    """
    borders, positions = [0], []
    for slots in (row.num_tokens, SLOTS - row.num_tokens):
        if slots:
            positions += range(slots)
            borders.append(len(positions))
    return positions, borders, max(np.diff(borders))


@settings(deadline=None, max_examples=40)
@given(
    packing=st.sampled_from(PACKINGS),
    distances=st.integers(1, 3),
    dtype=st.sampled_from(["int32", "int64"]),
    capacity=st.sampled_from([None, 3, 7]),
    rank=st.sampled_from([(0, 1), (1, 2), (3, 4)]),
)
def test_rows_equal_their_twin(dataset, packing, distances, dtype, capacity, rank):
    need = EVERYTHING.merge(InputRequirements(target_distances=distances, dtype=dtype))
    lean = need.merge(InputRequirements(cu_seqlens_capacity=capacity))
    kwargs = {"packing": packing, "data_parallel": rank}
    apart = build(dataset, requirements=need, **kwargs)
    for mine, theirs in zip(
        build(dataset, requirements=lean, attention="row", **kwargs), apart, strict=True
    ):
        assert mine.resume_state == theirs.resume_state
        assert mine.loss_denominators == theirs.loss_denominators
        for row, other in zip(mine, theirs, strict=True):
            for name in ("tokens", "targets", "loss_weights", "document_ids", "source_ids"):
                np.testing.assert_array_equal(
                    getattr(row, name), getattr(other, name), err_msg=name
                )
            positions, borders, longest = slow_row(row)
            np.testing.assert_array_equal(row.positions, positions)
            assert row.positions.dtype == np.dtype(dtype)
            full = borders + [SLOTS] * ((capacity or len(borders)) - len(borders))
            assert row.cu_seqlens.tolist() == full
            assert row.cu_seqlens.dtype == np.int32
            assert row.max_seqlen == longest


def test_some_rows_hold_several_documents_with_and_without_padding(dataset):
    """Else the comparison above says nothing."""
    rows = [
        row for step in build(dataset, attention="row") for row in step if row.num_documents > 1
    ]
    assert {row.num_tokens == SLOTS for row in rows} == {True, False}


def test_resume_is_exact(dataset):
    assert_exact_resume(lambda: build(dataset, attention="row"), 40)


def test_a_state_of_either_fits_the_other(dataset):
    """It changes no plan, so it is no part of a state."""
    state = next(iter(build(dataset))).resume_state
    loader = build(dataset, attention="row")
    loader.load_state_dict(state)
    (step,) = islice(loader, 1)
    assert step.index == 1


def test_rows_without_positions_or_borders(dataset):
    need = InputRequirements(asked_by="a model", loss_weights=True, attention="row")
    for step in build(dataset, requirements=need):
        assert all(row.positions is None and row.cu_seqlens is None for row in step)


def test_a_capacity_counts_joined_documents_once(dataset):
    tight = EVERYTHING.merge(InputRequirements(cu_seqlens_capacity=2))
    with pytest.raises(ConfigError, match=r"cu_seqlens_capacity.*2.*needs 3"):
        list(build(dataset, requirements=tight, attention="row"))


def test_a_model_that_needs_documents_apart_disagrees(dataset):
    mask = EVERYTHING.merge(
        InputRequirements(asked_by="a mask of document_ids", attention="document")
    )
    with pytest.raises(ConfigError, match=r"document_ids.*attention='row'\)"):
        build(dataset, requirements=mask, attention="row")
    with pytest.raises(ConfigError, match=r"attention.*document.*'causal'"):
        build(dataset, attention="causal")
