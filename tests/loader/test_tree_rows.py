"""Prefix trees and columns in rows: every path as if it stood alone, whatever the rows, ranks and
passes.
"""

from itertools import islice

import numpy as np
import pytest

from makers.trees import tree_dataset
from penstock import Denoise, InputRequirements, Loader, Source, write_dataset
from penstock.core.errors import ConfigError, CorruptionError, RecordError
from penstock.data.shards import write_side
from penstock.plan.inputs import EVERYTHING, AttentionRule
from penstock.plan.objectives import PrefixLM

SLOTS = 96
TREES = EVERYTHING.merge(InputRequirements(asked_by="the test", trees=True))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tree_dataset(tmp_path_factory.mktemp("trees") / "d", documents=120)


def build(source, **kwargs):
    source = source if isinstance(source, Source) else Source(source, max_epochs=1, name="trees")
    return Loader(
        source,
        **{
            "sequence_length": SLOTS,
            "rows_per_step": 3,
            "threads": 0,
            "requirements": TREES,
            **kwargs,
        },
    )


def check_row(row):
    """Hold a row against its paths; returns them as token lists, without padding."""
    rule = AttentionRule.of(row)
    mask, paths = rule.dense_mask(), []
    np.testing.assert_array_equal(row.document_ids, rule.document_ids)
    np.testing.assert_array_equal(row.positions[: row.num_tokens], rule.positions[: row.num_tokens])
    reached = np.zeros(row.sequence_length, bool)
    for number in range(len(row.paths)):
        slots = row.paths[number]
        reached[slots] = True
        np.testing.assert_array_equal(row.positions[slots], np.arange(len(slots)))
        np.testing.assert_array_equal(row.columns["order"][slots], np.arange(len(slots)))
        for place, query in enumerate(slots):
            np.testing.assert_array_equal(np.flatnonzero(mask[query]), slots[: place + 1])
        targets, tokens = row.targets[0][slots[:-1]], row.tokens[slots]
        trained = row.loss_weights[0][slots[:-1]] != 0
        np.testing.assert_array_equal(targets[trained], tokens[1:][trained])
        assert (targets[~trained] == -100).all()
        paths.append(tokens.tolist())
    assert (row.columns["order"][~reached] == -1).all()
    return paths


@pytest.mark.parametrize("packing", ["best_fit", "next_fit"])
def test_a_limit_of_documents_counts_a_tree_once(data, packing):
    dataset, paths = data
    rows = [row for step in build(dataset, packing=packing, documents_per_row=2) for row in step]
    found = [path for row in rows for path in check_row(row)]
    expected = [path for some in paths for path in some]
    assert sorted(path for path in found if len(path) > 1) == sorted(
        path for path in expected if len(path) > 1
    )
    assert max(row.paths.documents.max(initial=-1) for row in rows) == 1
    free = [row for step in build(dataset, packing=packing) for row in step]
    assert max(row.paths.documents.max(initial=-1) for row in free) > 1


@pytest.mark.parametrize("rows_per_pass", [1, 2, 3])
@pytest.mark.parametrize("packing", ["best_fit", "next_fit", "none"])
def test_every_path_is_there_once(data, rows_per_pass, packing):
    dataset, paths = data
    found, units, tokens = [], 0, 0
    for step in build(dataset, packing=packing):
        units += step.units["paths"]
        tokens += step.units["path_tokens"]
        for row in step.joined(rows_per_pass):
            found += check_row(row)
    expected = [path for some in paths for path in some]
    assert sorted(p for p in found if p and len(p) > 1) == sorted(p for p in expected if len(p) > 1)
    assert units == sum(len(some) for some in paths if len(some) > 1)
    assert tokens == sum(len(path) for some in paths if len(some) > 1 for path in some)


def test_steps_are_whole_over_ranks_and_resumed(data):
    dataset, _ = data
    whole = list(build(dataset, rows_per_step=4))
    for rank in range(2):
        mine = build(dataset, rows_per_step=4, data_parallel=(rank, 2))
        for step, expected in zip(mine, whole, strict=True):
            assert step.units == expected.units
            # The last step may be filled up with empty rows.
            for row, other in zip(step, expected[len(step) * rank :], strict=False):
                np.testing.assert_array_equal(row.tokens, other.tokens)
                np.testing.assert_array_equal(row.cu_seqlens, other.cu_seqlens)
                np.testing.assert_array_equal(row.paths.slots, other.paths.slots)
    again = build(dataset, rows_per_step=4, threads=2)
    again.load_state_dict(whole[1].resume_state)
    for step, expected in zip(again, whole[2:], strict=True):
        arrays, others = step.arrays(), expected.arrays()
        np.testing.assert_array_equal(arrays["cu_seqlens"], others["cu_seqlens"])
        np.testing.assert_array_equal(arrays["columns"]["order"], others["columns"]["order"])
        assert (arrays["reach"] is None) == (others["reach"] is None)


def test_arrays_and_tensors_of_a_step(data):
    step = next(iter(build(data[0])))
    arrays, tensors = step.arrays(), step.torch()
    (whole,) = step.joined(len(step))
    np.testing.assert_array_equal(arrays["cu_seqlens"], whole.cu_seqlens)
    np.testing.assert_array_equal(arrays["reach"], whole.reach)
    assert arrays["max_seqlen"] == whole.max_seqlen
    assert tensors["columns"]["order"].shape == (3, SLOTS)


def test_paths_that_share_nothing_are_documents_to_all(tmp_path):
    dataset, paths = tree_dataset(tmp_path / "d", share=False)
    found = []
    for step in build(dataset, requirements=EVERYTHING, sequence_length=160):
        for row in step:
            assert row.reach is None
            found += check_row(row)
    assert sorted(p for p in found if len(p) > 1) == sorted(
        p for some in paths for p in some if len(p) > 1
    )


def test_a_value_that_was_not_given_is_nan(data):
    row = next(iter(build(data[0])))[0]
    of_chains = np.isnan(row.paths.value("rank", "the test"))
    counts = np.bincount(row.paths.documents)
    assert (counts[row.paths.documents[of_chains]] == 1).all()
    with pytest.raises(ConfigError, match="advantage"):
        row.paths.value("advantage", "the test")


def test_a_tree_longer_than_a_row_is_dropped_and_counted(data):
    loader = build(data[0], sequence_length=24)
    assert list(loader)
    assert loader.dropped["trees"] > 0
    with pytest.raises(RecordError, match="too_long"):
        list(build(Source(data[0], max_epochs=1, too_long="error"), sequence_length=24))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"requirements": EVERYTHING}, "does not say that it honours them"),
        ({"requirements": EVERYTHING.merge(InputRequirements(trees=False))}, "cannot honour them"),
        ({"requirements": TREES.merge(InputRequirements(target_distances=2))}, "prediction_heads"),
        ({"packing": "concat"}, "best_fit"),
        ({"attention": "row"}, "joins documents"),
        (
            {"requirements": TREES.merge(InputRequirements(cu_seqlens_capacity=50))},
            "cu_seqlens_capacity",
        ),
        ({"too_long": "split"}, "would cut prefix trees"),
        ({"too_long": "truncate"}, "would cut prefix trees"),
        ({"too_long": "keep_end"}, "would cut prefix trees"),
        ({"objective": Denoise([PrefixLM(mode=None)], sentinels=[80])}, "rewrites documents"),
    ],
)
def test_what_trees_exclude_is_refused(data, change, reason):
    source = {name: change.pop(name) for name in ("too_long", "objective") if name in change}
    with pytest.raises(ConfigError, match=reason):
        next(iter(build(Source(data[0], max_epochs=1, **source), **change)))


def test_columns_without_trees_and_in_one_source_only(tmp_path):
    rows = [np.arange(1, n) for n in range(2, 60)]
    valued = write_dataset(
        tmp_path / "v", rows, columns={"ids": rows}, fills={"ids": -7}, vocab_size=99
    )
    plain = write_dataset(tmp_path / "p", rows, vocab_size=99)
    # Longer documents are split, and their columns with them.
    loader = Loader([valued, plain], sequence_length=32, rows_per_step=4, threads=0)
    some = 0
    for step in islice(loader, 12):
        for row in step:
            of_valued = np.zeros(32, bool)
            for source, begin, end in zip(
                row.source_ids, row.cu_seqlens, row.cu_seqlens[1:], strict=False
            ):
                of_valued[begin:end] = source == 0
            np.testing.assert_array_equal(row.columns["ids"], np.where(of_valued, row.tokens, -7))
            some += of_valued.sum()
    assert some
    with pytest.raises(ConfigError, match="rewrites documents"):
        Loader(
            Source(valued, objective=Denoise([PrefixLM(mode=None)], sentinels=[80])),
            sequence_length=32,
            rows_per_step=1,
        )
    other = write_dataset(
        tmp_path / "o", rows, columns={"ids": [row * 0.5 for row in rows]}, vocab_size=99
    )
    with pytest.raises(ConfigError, match="make them agree"):
        Loader([valued, other], sequence_length=32, rows_per_step=1)


def test_a_side_dataset_has_more_columns(tmp_path):
    rows = [np.arange(1, n) for n in range(2, 60)]
    main = write_dataset(tmp_path / "m", rows, columns={"ids": rows}, vocab_size=99)
    write_side(main, tmp_path / "s", {"half": [row / 2 for row in rows]}, fills={"half": -3})
    source = Source(main, sides=[tmp_path / "s"])
    loader = Loader(source, sequence_length=32, rows_per_step=4, threads=0)
    for step in islice(loader, 5):
        for row in step:
            half = np.where(np.arange(32) < row.num_tokens, row.tokens / 2, -3)
            np.testing.assert_array_equal(row.columns["half"], half)
    with pytest.raises(ConfigError, match="in two of its datasets"):
        Loader(
            Source(main, sides=[tmp_path / "s", tmp_path / "s"]),
            sequence_length=32,
            rows_per_step=4,
        )
    other = write_dataset(tmp_path / "o", rows[::-1], vocab_size=99)
    with pytest.raises(ConfigError, match="is no side dataset of"):
        Loader(Source(other, sides=[tmp_path / "s"]), sequence_length=32, rows_per_step=4)
    with pytest.raises(ConfigError, match="sides must be a list"):
        Source(main, sides=str(tmp_path / "s"))
    with pytest.raises(ConfigError, match="2 numbers for 1 tokens"):
        write_side(main, tmp_path / "w", {"half": [np.zeros(len(row) + 1) for row in rows]})


def test_damage_stops_the_step(tmp_path):
    dataset, _ = tree_dataset(tmp_path / "d", documents=30)
    path = dataset.table.paths[0]
    lists = dataset.extras._lists[0]
    for extra in range(2):
        data = bytearray(path.read_bytes())
        place = (
            int(lists[0, extra] - dataset.table.shard_addresses[0].astype(np.int64)) + 8 * 31 + 8
        )
        data[place] ^= 1
        (tmp_path / "copy").mkdir(exist_ok=True)
        for file in path.parent.iterdir():
            (tmp_path / "copy" / file.name).write_bytes(data if file == path else file.read_bytes())
        with pytest.raises(CorruptionError, match="document"):
            list(build(tmp_path / "copy"))


def test_trainers_of_others_refuse_forked_trees(data):
    """transformers' Trainer and JAX know nothing of `reach`; answers apart are ordinary documents
    to them.
    """
    from penstock.models.theirs.tensors import REQUIREMENTS

    with pytest.raises(ConfigError, match="cannot honour them"):
        next(iter(build(data[0], requirements=REQUIREMENTS)))
