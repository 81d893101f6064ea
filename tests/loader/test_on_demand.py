"""Arrays of a step on demand: whoever asks for what in which order, values and dtypes are those of
a loader that fills everything.
"""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.plan.loader.on_demand import DERIVED, StepArrays, derived

torch = pytest.importorskip("torch")
SLOTS, ROWS = 64, 2
FIELDS = ("tokens", "targets", "loss_weights", "positions", "document_ids", "cu_seqlens")
REQUIRED = {"loss_weights": True, "positions": True, "document_ids": True, "cu_seqlens": True}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 150, 60)
    documents = [draw.integers(0, 300, length).astype(np.uint16) for length in lengths]
    return ps.write_dataset(tmp_path_factory.mktemp("data") / "plain", documents, vocab_size=300)


def loader_of(dataset, threads=0, **settings):
    return ps.Loader(
        dataset, sequence_length=SLOTS, rows_per_step=ROWS, threads=threads, seed=3, **settings
    )


def filled(dataset, steps, **settings):
    """The arrays of the first steps, all written by the kernel in int32."""
    loader = loader_of(dataset, **settings)
    loader._filling.fill._demand.wanted = ("int32", DERIVED)
    taken = [step for step, _ in zip(loader, range(steps), strict=False)]
    assert all(array.size for step in taken for array in step._rows._arrays[:5])
    return [{name: step.arrays()[name].copy() for name in FIELDS} for step in taken]


def test_nothing_is_filled_that_nobody_asked_for(dataset):
    steps = iter(loader_of(dataset))
    sizes = []
    for asked in ([], ["positions"], [], ["loss_weights", "document_ids"], []):
        step = next(steps)
        sizes.append([array.size > 0 for array in step._rows._arrays[2:5]])
        for name in asked:
            _ = step.torch()[name]
    # Weights, positions, document ids: filled from the step after the one in which they were asked
    # for.
    nothing, positions, all_three = [False] * 3, [False, True, False], [True] * 3
    assert sizes == [nothing, nothing, positions, positions, all_three]


def test_torch_takes_the_buffers_themselves_from_the_second_step_on(dataset):
    steps = iter(loader_of(dataset))
    next(steps).torch()
    second = next(steps)
    for place, name in enumerate(("tokens", "targets")):
        address = second._rows._arrays[place].ctypes.data
        assert second.torch()[name].data_ptr() == address
    assert second.arrays()["tokens"].dtype == np.int32
    assert second.torch("cpu")["tokens"].dtype == torch.int64


def test_required_dtypes_stay(dataset):
    for dtype in ("int32", "int64"):
        need = ps.InputRequirements(dtype=dtype, **REQUIRED)
        for step, _ in zip(loader_of(dataset, requirements=need), range(3), strict=False):
            assert step.torch()["tokens"].dtype == torch.int64
            assert step.torch()["document_ids"].dtype == getattr(torch, dtype)
            arrays = step.arrays()
            assert {arrays[name].dtype.name for name in FIELDS if name not in REQUIRED} == {dtype}
            assert arrays["document_ids"].dtype == step[0].document_ids.dtype == dtype
            assert step._rows._arrays[0].dtype == dtype


CONSUMERS = {
    "arrays": lambda step, name: step.arrays()[name],
    "torch": lambda step, name: step.torch()[name].numpy(),
    "rows": lambda step, name: np.stack([getattr(row, name) for row in step]),
}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(sorted(CONSUMERS)), st.sampled_from(FIELDS[:-1]))),
        min_size=4,
        max_size=4,
    ),
    st.sampled_from(["best_fit", "concat"]),
    st.sampled_from([0, 1]),
    st.sampled_from([1, 3]),
)
def test_history_changes_nothing(dataset, asked, packing, threads, distances):
    need = ps.InputRequirements(target_distances=distances, **REQUIRED)
    expected = filled(dataset, len(asked), packing=packing, requirements=need)
    loader = loader_of(dataset, threads, packing=packing, requirements=need)
    for step, wishes, arrays in zip(loader, asked, expected, strict=False):
        for consumer, name in wishes:
            found = CONSUMERS[consumer](step, name)
            wide = consumer == "torch" and name in ("tokens", "targets", "positions")
            assert found.dtype == (np.int64 if wide else arrays[name].dtype)
            np.testing.assert_array_equal(found, arrays[name])
        for name in FIELDS:
            np.testing.assert_array_equal(step.arrays()[name], arrays[name])


def test_what_a_consumer_writes_is_not_read_for_other_arrays(dataset):
    [expected] = filled(dataset, 1)
    batch = next(iter(loader_of(dataset))).torch()
    batch["targets"][:] = -100
    np.testing.assert_array_equal(batch["loss_weights"].numpy(), expected["loss_weights"])


def test_weights_of_data_are_always_filled(dataset, tmp_path):
    """They are in the shards, which a step does not hold."""
    weighted = ps.write_dataset(
        tmp_path / "weighted",
        [np.arange(20, dtype=np.uint16)] * 8,
        spans=[[(3, 9, 0.5)]] * 8,
        vocab_size=300,
    )
    step = next(iter(loader_of(weighted)))
    assert [array.size > 0 for array in step._rows._arrays[2:5]] == [True, False, False]
    weights = step.arrays()["loss_weights"]
    assert set(np.unique(weights)) == {0, np.float32(0.5)}


def test_derived_is_what_is_written_slot_by_slot(dataset):
    plan = loader_of(dataset)._planner.next()
    made = {
        name: derived(name, plan.pieces, plan.row_starts, (2, SLOTS)) for name in sorted(DERIVED)
    }
    for row in range(ROWS):
        slot = 0
        for number, piece in enumerate(
            plan.pieces[plan.row_starts[row] : plan.row_starts[row + 1]]
        ):
            for i in range(piece["length"]):
                assert made["positions"][row, slot] == i
                assert made["document_ids"][row, slot] == number
                for d in range(2):
                    has_target = i + d + 1 < piece["total"] - piece["begin"]
                    assert made["loss_weights"][row, d, slot] == has_target
                slot += 1


def test_a_step_behaves_like_a_dict(dataset):
    made = []
    fields = StepArrays(make=lambda name: made.append(name) or len(name))
    assert "tokens" in fields
    assert "token" not in fields
    assert made == []
    assert (fields["tokens"], fields["tokens"], made) == (6, 6, ["tokens"])
    with pytest.raises(KeyError, match="token"):
        _ = fields["token"]
    fields["tokens"] = 1
    del fields["reach"]
    whole = dict(fields)
    assert (whole["tokens"], len(whole)) == (1, len(fields))
    assert "reach" not in whole
    assert fields == whole == {**fields} == StepArrays(whole)
    assert repr(fields) == repr(whole)
    step = next(iter(loader_of(dataset)))
    arrays = step.arrays()
    copy = pickle.loads(pickle.dumps(arrays))
    np.testing.assert_array_equal(copy["positions"], arrays["positions"])
