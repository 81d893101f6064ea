"""A whole step at once: arrays and tensors equal the rows, and stay what they are while somebody
holds them.
"""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.datasets import random_documents
from penstock import Causal, Denoise, InputRequirements, Loader, Source, to_torch, write_dataset
from penstock.core.errors import ConfigError
from penstock.plan.inputs import EVERYTHING, AttentionRule
from penstock.plan.objectives import PrefixLM
from penstock.plan.packing import PACKINGS

SLOTS = 48
PREFIX = InputRequirements(prefix=True)
ROW_FIELDS = ("tokens", "targets", "loss_weights", "positions", "document_ids", "prefix")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    documents = random_documents(90, 1, 60)
    spans = [None if i % 3 else [(len(d) // 2, len(d), 0.5)] for i, d in enumerate(documents)]
    return write_dataset(tmp_path_factory.mktemp("whole") / "d", documents, spans=spans)


def build(dataset, **kwargs):
    objective = kwargs.pop("objective", Causal())
    options = {"sequence_length": SLOTS, "rows_per_step": 4, "threads": 0, **kwargs}
    return Loader(Source(dataset, max_epochs=2, objective=objective), **options)


def slow_arrays(step):
    """The rows stacked, and their borders moved behind each other."""
    found = {}
    for name in ROW_FIELDS:
        values = [getattr(row, name) for row in step]
        found[name] = None if values[0] is None else np.stack(values)
    borders = []
    for number, row in enumerate(step):
        # Spare entries of a row repeat its end.
        ends = sorted(set(row.cu_seqlens.tolist()))
        borders += [border + number * row.sequence_length for border in ends[:-1]]
    found["cu_seqlens"] = np.array([*borders, len(step) * SLOTS])
    found["max_seqlen"] = max(row.max_seqlen for row in step)
    found["num_tokens"] = sum(row.num_tokens for row in step)
    found["tokens_per_row"] = [row.num_tokens for row in step]
    found["reach"], found["columns"] = None, {}
    return found


def slow_joined(rows):
    """The fields of rows end to end, where the padding of each is a document."""
    found = {}
    for name in ROW_FIELDS:
        values = [getattr(row, name) for row in rows]
        found[name] = None if values[0] is None else np.concatenate(values, axis=-1)
    borders, ids, sources, prefixes, documents = [0], [], [], [], 0
    for number, row in enumerate(rows):
        padded = row.num_tokens < SLOTS
        borders += [border + number * SLOTS for border in sorted(set(row.cu_seqlens.tolist()))[1:]]
        ids.append(row.document_ids + documents)
        documents += row.num_documents + padded
        sources += [*row.source_ids, *[-1] * padded]
        prefixes += [*(row.prefix_lengths if row.prefix_lengths is not None else ()), *[0] * padded]
    found["cu_seqlens"], found["max_seqlen"] = (
        np.array(borders),
        max(row.max_seqlen for row in rows),
    )
    found["document_ids"], found["source_ids"] = np.concatenate(ids), np.array(sources)
    found["prefix_lengths"] = None if rows[0].prefix_lengths is None else np.array(prefixes)
    found["num_tokens"] = len(rows) * SLOTS
    return found


def check_joined(step, rows_per_pass):
    joined = list(step.joined(rows_per_pass))
    rows = [[*step][begin : begin + rows_per_pass] for begin in range(0, len(step), rows_per_pass)]
    assert len(joined) == len(rows)
    for one, several in zip(joined, rows, strict=True):
        for name, value in slow_joined(several).items():
            np.testing.assert_array_equal(getattr(one, name), value, err_msg=name)
            if isinstance(value, np.ndarray) and name in ROW_FIELDS:
                assert getattr(one, name).dtype == getattr(several[0], name).dtype
        AttentionRule.of(one)


@settings(deadline=None, max_examples=40)
@given(
    packing=st.sampled_from(PACKINGS),
    distances=st.integers(1, 3),
    dtype=st.sampled_from(["int32", "int64"]),
    capacity=st.sampled_from([None, SLOTS + 2]),
    rank=st.sampled_from([(0, 1), (1, 2), (3, 4)]),
    attention=st.sampled_from(["document", "row"]),
)
def test_arrays_equal_the_rows(dataset, packing, distances, dtype, capacity, rank, attention):
    need = EVERYTHING.merge(
        InputRequirements(
            target_distances=distances,
            dtype=dtype,
            cu_seqlens_capacity=capacity,
            attention=attention,
        )
    )
    for step in build(dataset, packing=packing, data_parallel=rank, requirements=need):
        arrays, expected = step.arrays(), slow_arrays(step)
        assert arrays.pop("media") is None
        assert arrays.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(arrays[name], value, err_msg=name)
        tensors = step.torch()
        for name in ("tokens", "targets", "positions"):
            assert str(tensors[name].dtype) == "torch.int64"
            np.testing.assert_array_equal(tensors[name].numpy(), expected[name], err_msg=name)
        np.testing.assert_array_equal(tensors["cu_seqlens"].numpy(), expected["cu_seqlens"])
        assert tensors["max_seqlen"] == expected["max_seqlen"]
        for rows_per_pass in (2, 3, 5):
            check_joined(step, rows_per_pass)


def test_prefixes_and_missing_fields(dataset):
    objective = Denoise([PrefixLM(mode=None)], sentinels=[900])
    (step,) = islice(build(dataset, objective=objective, requirements=EVERYTHING.merge(PREFIX)), 1)
    np.testing.assert_array_equal(step.arrays()["prefix"], np.stack([row.prefix for row in step]))
    assert step.torch()["prefix"].sum() > 0
    for rows_per_pass in (2, 3):
        check_joined(step, rows_per_pass)
    (step,) = islice(build(dataset, requirements=InputRequirements(loss_weights=True)), 1)
    arrays = step.arrays()
    assert [name for name, value in arrays.items() if value is None] == [
        "positions", "document_ids", "prefix", "cu_seqlens", "max_seqlen", "reach", "media",
    ]  # fmt: skip


def test_one_row_joined_is_the_row(dataset):
    (step,) = islice(build(dataset, requirements=EVERYTHING), 1)
    for one, row in zip(step.joined(1), step, strict=True):
        np.testing.assert_array_equal(one.tokens, row.tokens)
        assert one.num_tokens == row.num_tokens
    with pytest.raises(ConfigError, match="rows_per_pass must be at least 1, got 0"):
        list(step.joined(0))
    (step,) = islice(build(dataset, requirements=InputRequirements(loss_weights=True)), 1)
    (joined,) = step.joined(4)
    assert joined.cu_seqlens is joined.positions is joined.document_ids is None
    assert joined.max_seqlen is None


def test_joined_rows_share_memory(dataset):
    (step,) = islice(build(dataset, requirements=EVERYTHING), 1)
    (joined,) = step.joined(4)
    for name in ("tokens", "targets", "loss_weights", "positions"):
        assert np.shares_memory(getattr(joined, name), getattr(step[2], name))


def test_held_tensors_are_never_written_again(dataset):
    need = EVERYTHING.merge(InputRequirements(dtype="int64"))
    held, copies = [], []
    for step in build(dataset, requirements=need):
        tensors = step.torch()
        for name in ("tokens", "targets", "loss_weights", "cu_seqlens"):
            held.append(tensors[name])
            copies.append(tensors[name].clone())
        del tensors, step
    assert len(held) > 40
    for tensor, copy in zip(held, copies, strict=True):
        assert tensor.equal(copy)


def test_held_arrays_are_never_written_again(dataset):
    held, copies = [], []
    for step in build(dataset, requirements=EVERYTHING):
        held.append(step.arrays()["tokens"])
        copies.append(held[-1].copy())
        del step
    for array, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_memory_is_shared_and_rows_agree(dataset):
    need = EVERYTHING.merge(InputRequirements(dtype="int64"))
    (step,) = islice(build(dataset, requirements=need), 1)
    tensors = step.torch()
    assert np.shares_memory(tensors["tokens"].numpy(), step[0].tokens)
    row = to_torch(step[1])
    assert row["targets"].equal(tensors["targets"][1])


def test_jax_arrays_equal_the_arrays(dataset):
    pytest.importorskip("jax")
    (step,) = islice(build(dataset, requirements=EVERYTHING), 1)
    arrays, moved = step.arrays(), step.jax()
    for name, value in arrays.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(np.asarray(moved[name]), value, err_msg=name)
        else:
            assert moved[name] == value
