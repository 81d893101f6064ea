"""An input of many small files has few parts, and reads as each file alone does."""

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.sources import Fields, open_sources, small_files
from penstock.data.sources.files import FilePart, SourceFile
from penstock.data.sources.json_files import number_lines
from penstock.data.sources.small_files import SmallFiles, group_ends, join_small
from penstock.data.sources.text import TextPart


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Inputs of more than four files are put together, in groups of up to 1 MiB."""
    monkeypatch.setattr(small_files, "FEW_FILES", 4)
    monkeypatch.setattr(small_files, "SMALLEST", 1 << 20)


def write(folder, form, number):
    rows = [
        {"text": f"file {number} row {row}", "w": [{"begin": 0, "end": 2, "weight": 0.5}]}
        for row in range(3)
    ]
    rows[1].pop("w")
    path = folder / f"{number:03}.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n")
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif form == "csv":
        path.write_text("text,w\n" + "".join(f"{row['text']},\n" for row in rows))
    return path


def seen(parts, whole):
    found = []
    for part in number_lines(parts):
        for block in part.objects() if whole else part.blocks():
            names = [part.files[number] for number in block.files]
            texts = block.objects if whole else block.texts.to_pylist()
            weights = [None] * len(block) if whole or block.weights is None else [
                (one.present[row], *(getattr(one, name)[slice(*one.offsets[row : row + 2])].tolist()
                                     for name in ("begin", "end", "weight")))
                for one in [block.weights] for row in range(len(block))
            ]  # fmt: skip
            found += list(zip(names, block.lines.tolist(), texts, weights, strict=True))
            found += [(one.file, one.line, one.reason, "rejected") for one in block.rejects]
    return sorted(found, key=repr)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
def test_they_read_as_each_alone(tmp_path, form, whole):
    paths = [str(write(tmp_path, form, number)) for number in range(9)]
    fields = Fields(whole=True) if whole else Fields(weights="w")
    parts = open_sources(str(tmp_path), fields=fields)
    assert [type(part) for part in parts] == [SmallFiles]
    alone = [part for path in paths for part in open_sources(path, fields=fields)]
    assert seen(parts, whole) == seen(alone, whole)
    assert parts[0].size_bytes == sum(part.size_bytes for part in alone)
    assert parts[0].extents() == tuple(extent for part in alone for extent in part.extents())


def test_few_files_and_large_ones_stay_alone(tmp_path):
    for number in range(4):
        write(tmp_path, "jsonl", number)
    assert len(open_sources(str(tmp_path))) == 4
    write(tmp_path, "jsonl", 4)
    (tmp_path / "002.jsonl").write_text('{"text": "long"}\n' * 100_000)
    parts = open_sources(str(tmp_path))
    assert [len(part.files) for part in parts] == [2, 1, 2]
    ranges = open_sources(str(tmp_path), part_bytes=1 << 20)
    assert [len(part.files) for part in ranges] == [2, 1, 1, 2]


def test_formats_are_kept_apart(tmp_path):
    for number, form in enumerate(["csv", "csv", "jsonl", "jsonl", "parquet", "parquet"]):
        write(tmp_path, form, number)
    assert [len(part.files) for part in open_sources(str(tmp_path), fields=Fields())] == [2, 2, 2]


def test_texts_are_put_together_even_if_they_are_few(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text {number}\nEND\nmore {number}")
    (part,) = open_sources(str(tmp_path), separator="\nEND\n")
    assert isinstance(part, TextPart)
    texts = [one[2] for one in seen([part], False)]
    assert texts == [f"{word} {number}" for number in range(3) for word in ("text", "more")]
    (tmp_path / "1.txt").write_text("long" * (1 << 18))
    assert [len(part.files) for part in open_sources(str(tmp_path))] == [1, 1, 1]


@dataclass(frozen=True, slots=True)
class Sized(FilePart):
    @property
    def size_bytes(self):
        return self.file.size_bytes


def sized(sizes):
    return [Sized(SourceFile(f"{n:05}.jsonl", size, "")) for n, size in enumerate(sizes)]


def slow_groups(parts, limit):
    """The groups, by the rule as it is written."""
    rest = list(range(len(parts)))
    while sum(parts[n].size_bytes for n in rest) > limit:
        sums = [sum(parts[n].size_bytes for n in rest[: k + 1]) for k in range(len(rest))]
        fit = [k for k, total in enumerate(sums) if total <= limit]
        late = [k for k in fit if sums[k] >= limit // 2] or fit[-1:]
        end = min(late, key=lambda k: small_files._hash(parts[rest[k]].file.key))
        yield rest[0], rest[end] + 1
        rest = rest[end + 1 :]
    yield rest[0], len(parts)


@given(st.lists(st.integers(0, 19), min_size=1, max_size=60), st.integers(20, 60))
def test_where_groups_end(sizes, limit):
    parts = sized(sizes)
    groups = list(group_ends(parts, limit))
    assert groups == list(slow_groups(parts, limit))
    assert [n for begin, end in groups for n in range(begin, end)] == list(range(len(parts)))
    assert all(sum(sizes[begin:end]) <= limit for begin, end in groups)


def groups_of(parts):
    joined = join_small(parts, [part.size_bytes for part in parts], 64 << 20)
    return {tuple(part.files) for part in joined}


def test_another_file_changes_the_groups_near_it():
    parts = sized([*(1 << 17, 1 << 12, 0), *(1 << 14,) * 5] * 250)
    whole = groups_of(parts)
    total = sum(part.size_bytes for part in parts)
    assert total / (1 << 20) <= len(whole) <= 2 * total / (1 << 20) + 1
    changed = [len(groups_of(parts[:n] + parts[n + 1 :]) - whole) for n in range(0, 2000, 61)]
    assert max(changed) < len(whole) / 2
    assert np.mean(changed) < 2.5


def test_more_input_changes_few_groups():
    parts = sized([1 << 15] * 6000)
    whole = groups_of(parts[:5900])
    assert len(whole) > 64
    assert len(groups_of(parts) - whole) < len(whole) / 3
