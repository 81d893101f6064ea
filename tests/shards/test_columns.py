"""Columns and trees in datasets: written, read back, joined, verified, and refused where they do
not fit.
"""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.datasets import tokenizer_info
from makers.trees import tree_dataset
from penstock import Dataset, open_dataset, write_dataset
from penstock.core.errors import ConfigError, CorruptionError
from penstock.core.ragged import Ragged
from penstock.data.shards import ShardLayout, ShardWriter, extend_dataset, finish_dataset
from penstock.data.shards.format.layout import Column
from penstock.data.shards.format.manifest import MANIFEST
from penstock.data.shards.format.tree_building import build_tree
from penstock.data.shards.verify import verify


def write_some(folder, documents=2600, **kwargs):
    generator = np.random.default_rng(3)
    rows = [generator.integers(0, 900, size) for size in generator.integers(0, 600, documents)]
    columns = {
        "advantages": [generator.normal(size=len(row)).astype(np.float32) for row in rows],
        "step": [generator.integers(-9, 9, len(row)) for row in rows],
    }
    return (
        write_dataset(folder, rows, columns=columns, documents_per_shard=1300, **kwargs),
        rows,
        columns,
    )


def test_columns_come_back(tmp_path):
    dataset, rows, columns = write_some(tmp_path / "d")
    assert [column.dtype for column in dataset.manifest.columns] == ["float32", "int32"]
    for number in range(0, len(rows), 13):
        found = dataset[number]
        np.testing.assert_array_equal(found.tokens, rows[number])
        for name, values in columns.items():
            np.testing.assert_array_equal(found.columns[name], values[number])
    assert verify(tmp_path / "d").sound
    assert pickle.loads(pickle.dumps(dataset))[7] == dataset[7] != dataset[8]


def test_a_column_costs_its_bytes(tmp_path):
    with_column, rows, columns = write_some(tmp_path / "a")
    without = write_dataset(tmp_path / "b", rows, documents_per_shard=1300)
    more = sum(one.bytes for one in with_column.manifest.shards) - sum(
        one.bytes for one in without.manifest.shards
    )
    assert more <= 1.2 * len(columns) * 4 * without.num_tokens


def test_the_content_decides_the_fingerprint(tmp_path):
    rows = [[1, 2, 3], [4, 5]]
    prints = {
        write_dataset(
            tmp_path / str(number), rows, columns=columns, documents_per_shard=shard
        ).fingerprint
        for number, (columns, shard) in enumerate(
            [
                (None, 9),
                ({"x": [[0.5, 1, 2], [3.0, 4]]}, 9),
                ({"x": [[0.5, 1, 2], [3.0, 5]]}, 9),
                ({"y": [[0.5, 1, 2], [3.0, 4]]}, 9),
                ({"x": [[0.5, 1, 2], [3.0, 4]]}, 1),
            ]
        )
    }
    # The last differs from the second in its shards alone.
    assert len(prints) == 4


@settings(deadline=None, max_examples=12)
@given(place=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_a_changed_byte_is_found(tmp_path_factory, place, bit):
    folder = tmp_path_factory.mktemp("byte") / "d"
    dataset, _ = tree_dataset(folder, documents=30)
    lists = dataset.extras._lists[0]
    first = int(lists[0, 0] - dataset.table.shard_addresses[0].astype(np.int64))
    path = dataset.table.paths[0]
    data = bytearray(path.read_bytes())
    end = first + 8 * 31 + 4 * int(lists[1, 0])
    place = first + place % (end - first)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    report = verify(folder)
    assert not report.sound
    changed = open_dataset(folder)
    with pytest.raises(CorruptionError, match=r"00000\.arrow: (document|batch) \d+: "):
        changed[:]


def test_verify_names_the_document(tmp_path):
    dataset, _, _ = write_some(tmp_path / "d", documents=40)
    lists = dataset.extras._lists[0]
    begin = int(lists[0, 0] - dataset.table.shard_addresses[0].astype(np.int64)) + 8 * 41
    path = dataset.table.paths[0]
    data = bytearray(path.read_bytes())
    wrong = 4 * int(dataset.table.lengths[:17, 0].sum()) + 4
    data[begin + wrong] ^= 8
    path.write_bytes(data)
    assert (17, "its columns differ from their checksums") in [
        (f.document, f.reason) for f in verify(path.parent).faults
    ]


def test_a_branch_begins_with_the_token_at_its_fork(tmp_path):
    built = build_tree([[1, 2, 3, 4], [1, 2, 3, 5]])
    tokens = built.tokens.copy()
    tokens[built.tree.branches[1, 0]] = 9
    write_dataset(tmp_path / "d", [tokens], spans=[[(1, 4, 1.0)]], trees=[built.tree])
    assert [
        "does not begin with the token" in fault.reason for fault in verify(tmp_path / "d").faults
    ] == [True]


def test_joined_corpora(tmp_path):
    first, _ = tree_dataset(tmp_path / "a", seed=1)
    tree_dataset(tmp_path / "b", seed=2)
    joined = open_dataset([tmp_path / "b", tmp_path / "a"])
    for number in range(len(first)):
        assert joined[len(joined) - len(first) + number] == first[number]
    write_dataset(tmp_path / "plain", [[1, 2]], spans=[None], vocab_size=90)
    with pytest.raises(ConfigError, match="columns"):
        open_dataset([tmp_path / "a", tmp_path / "plain"])


def test_old_manifests_have_neither(tmp_path):
    dataset = write_dataset(tmp_path / "d", [[1, 2]])
    assert dataset.extras is None
    text = (tmp_path / "d" / MANIFEST).read_text()
    assert "columns" not in text
    assert "path_values" not in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"columns": {"x": [[1.0, 2.0]]}}, "1 lists for 2 documents"),
        ({"columns": {"x": [[1.0, 2.0], [1.0]]}}, "document 0: 2 numbers for 3 tokens"),
        ({"columns": {"tokens": [[1.0] * 3, [1.0] * 2]}}, "name must be a word other than"),
        ({"columns": {"x": [["a"] * 3, [1.0] * 2]}}, "flat list of numbers"),
        ({"columns": {"x": [[2**40] * 3, [1] * 2]}}, "do not fit int32"),
        ({"trees": [None]}, "1 trees for 2 documents"),
        ({"trees": [build_tree([[1, 2], [1, 3]]).tree, None]}, "must have weight 0"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        write_dataset(tmp_path / "d", [[1, 2, 3], [4, 5]], **arguments)


def test_a_copy_with_more_columns(tmp_path):
    dataset, _ = tree_dataset(tmp_path / "a", documents=50)
    more = [np.arange(size, dtype=np.float32) for size in dataset.table.lengths[:, 0]]
    extended = extend_dataset(dataset, tmp_path / "b", {"more": more})
    assert verify(tmp_path / "b").sound
    for number, one in enumerate(dataset):
        other = extended[number]
        np.testing.assert_array_equal(other.columns.pop("more"), more[number])
        assert other == one
    with pytest.raises(ConfigError, match="has a column"):
        extend_dataset(dataset, tmp_path / "c", {"order": more})


def test_columns_behind_the_texts_of_a_part_of_a_block(tmp_path):
    """Arrow pads what it writes of a slice, which moved what lies behind it."""
    count = 1500
    layout = ShardLayout(
        vocab_size=1000, has_text=True, columns=(Column(name="score", dtype="float32"),)
    )
    rows = [np.arange(n % 5 + 1) for n in range(count)]
    with ShardWriter(tmp_path, "0.arrow", layout) as writer:
        writer.write(
            Ragged.from_rows(rows, np.int64),
            files=0,
            lines=np.arange(count),
            texts=pa.array([f"text {n} " * (n % 7) for n in range(count)], pa.large_string()),
            columns={"score": Ragged.from_rows([row / 7 for row in rows], np.float32)},
        )
        shard = writer.finish()
    finish_dataset(
        tmp_path,
        shards=[shard],
        layout=layout,
        tokenizer=tokenizer_info(),
        files=["a"],
        configuration="c",
    )
    dataset = Dataset.open(tmp_path)
    for n in (0, 1023, 1024, 1499):
        assert dataset[n].text == f"text {n} " * (n % 7)
        np.testing.assert_allclose(dataset[n].columns["score"], rows[n] / 7, rtol=1e-6)
    assert verify(tmp_path).sound
