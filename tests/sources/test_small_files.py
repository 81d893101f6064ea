"""An input of many small files has few parts, and reads as each file alone does."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data.sources import Fields, open_sources, small_files
from penstock.data.sources.finding import find_files
from penstock.data.sources.json_files import number_lines
from penstock.data.sources.small_files import SmallFiles, join_small


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Inputs of more than four files are put together."""
    monkeypatch.setattr(small_files, "FEW_FILES", 4)


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


class Sized(small_files.FilePart):
    size_bytes = 1 << 17


def test_another_file_changes_the_groups_near_it(tmp_path, monkeypatch):
    ends = (
        small_files._ends_group
    )  # of the name alone: where groups end does not depend on the folder of the test
    monkeypatch.setattr(small_files, "_ends_group", lambda key: ends(Path(key).name))
    for number in range(400):
        (tmp_path / f"{number:04}.jsonl").write_text('{"text": "a"}\n')
    parts = [Sized(file) for file in find_files(str(tmp_path))]

    def groups(some):
        joined = list(join_small(some, [part.size_bytes for part in some], 64 << 20))
        return {tuple(part.files) for part in joined}

    whole = groups(parts)
    assert 400 // 128 <= len(whole) <= 400 // 25
    changed = [len(groups(parts[:one] + parts[one + 1 :]) - whole) for one in range(0, 400, 7)]
    assert np.mean(changed) < 2
