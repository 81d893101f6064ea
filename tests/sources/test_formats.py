"""Parquet, Arrow, saved datasets, plain text and Python records: the same rules and places as
JSONL.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import ConfigError, DamagedFileError, RecordError
from penstock.data.sources import Fields, open_records, open_sources, read_texts
from penstock.data.sources.records import WEIGHTS_TYPE


def read(parts: Any) -> tuple[list[tuple[str, int, str]], list[str]]:
    texts, rejects = [], []
    for part in parts:
        for block in part.blocks():
            names = [Path(part.files[number]).name for number in block.files]
            texts += zip(names, block.lines.tolist(), block.texts.to_pylist(), strict=True)
            rejects += [str(reject).rsplit("/", 1)[-1] for reject in block.rejects]
    return texts, rejects


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_parquet_text_types_nulls_and_row_groups(tmp_path, kind):
    values = [f"text {number}" for number in range(100)]
    values[7], values[60] = None, ""
    pq.write_table(
        pa.table({"id": range(100), "text": pa.array(values, kind)}),
        tmp_path / "a.parquet",
        row_group_size=10,
    )
    texts, rejects = read(open_sources(tmp_path, part_bytes=1))
    assert texts == [("a.parquet", row, value) for row, value in enumerate(values) if value]
    assert [reject.split(":")[1] for reject in rejects] == ["7", "60"]
    assert len(open_sources(tmp_path, part_bytes=1)) == 10
    assert len(open_sources(tmp_path)) == 1


def test_parquet_strings_that_are_not_utf8(tmp_path):
    broken = pa.array([b"good", b"b\xffd", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    texts, rejects = read(open_sources(tmp_path))
    assert [text for _, _, text in texts] == ["good", "fine"]
    assert "byte 1 is not UTF-8" in rejects[0]


def test_parquet_weights_and_columns(tmp_path):
    ranges = pa.array(
        [[{"begin": 0, "end": 1, "weight": 1.0}], None, [{"begin": 0, "end": 9, "weight": 1.0}]],
        WEIGHTS_TYPE,
    )
    table = pa.table(
        {"text": ["ab", "cd", "ef"], "w": ranges, "score": pa.array([1, 2, 3], pa.int32())}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (part,) = open_sources(tmp_path, fields=Fields(weights="w", columns={"score": "float64"}))
    (block,) = part.blocks()
    assert block.weights is not None
    assert block.weights.present.tolist() == [True, False]
    assert block.columns["score"].to_pylist() == [1.0, 2.0]
    assert "inside the text of 2 characters" in block.rejects[0].reason


def test_parquet_without_the_column(tmp_path):
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(RecordError, match=r"'text'.*set text_field"):
        open_sources(tmp_path)
    pq.write_table(pa.table({"content": [1]}), tmp_path / "a.parquet")
    with pytest.raises(RecordError, match=r"'content'.*int64.*string"):
        open_sources(tmp_path, fields=Fields(text="content"))


def test_cut_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedFileError, match=r"a.parquet:0.*further.*Parquet"):
        open_sources(path)


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_files(tmp_path, new):
    table = pa.table({"text": ["a", None, "c"]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    texts, rejects = read(open_sources(tmp_path))
    assert texts == [("a.arrow", 0, "a"), ("a.arrow", 2, "c")]
    assert rejects == ["a.arrow:1: field 'text' is null; expected: text"]


def saved_folder(folder: Path) -> None:
    """What `datasets.Dataset.save_to_disk` leaves, as far as we read it."""
    folder.mkdir()
    names = []
    for number, texts in enumerate((["a", "b"], ["c"])):
        names.append({"filename": f"data-{number:05}-of-00002.arrow"})
        table = pa.table({"text": texts})
        with (
            pa.OSFile(str(folder / names[-1]["filename"]), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_indices_files": None}))
    (folder / "dataset_info.json").write_text("{}")


def test_saved_datasets_folder(tmp_path):
    saved_folder(tmp_path / "train")
    texts, _ = read(open_sources(tmp_path / "train"))
    assert [text for _, _, text in texts] == ["a", "b", "c"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(RecordError, match=r"holds 2.*train, .*test"):
        open_sources(tmp_path)
    (tmp_path / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(RecordError, match=r"data-00001-of-00002.arrow'"):
        open_sources(tmp_path / "train")


def test_folder_really_saved_by_datasets(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    assert list(read_texts(open_sources(tmp_path / "saved"))) == ["a", "b"]


def test_plain_text_files_are_documents(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "a.md").write_bytes("ä\n".encode())
    (tmp_path / "c.txt").write_bytes(b"good\nbad \xff")
    (tmp_path / "d.txt").write_bytes(b"")
    (tmp_path / ".hidden.txt").write_bytes(b"no")
    texts, rejects = read(open_sources(tmp_path))
    assert texts == [("a.md", 1, "ä\n"), ("b.txt", 1, "one\r\ntwo\n")]
    assert rejects == [
        "c.txt:1: byte 0xff on line 2 is not UTF-8 (invalid start byte)",
        "d.txt:1: the document is empty; expected: at least one character",
    ]
    assert len(open_sources(tmp_path, part_bytes=6)) == 4


@pytest.mark.parametrize("block_bytes", [1, 3, 1000])
def test_separator(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr("penstock.data.sources.text.BLOCK_BYTES", block_bytes)
    (tmp_path / "a.txt").write_text("one\nmore<|end|>two<|end|><|end|>three\n<|end|>")
    texts, rejects = read(open_sources(tmp_path, separator="<|end|>"))
    assert texts == [("a.txt", 1, "one\nmore"), ("a.txt", 2, "two"), ("a.txt", 2, "three\n")]
    assert rejects == ["a.txt:2: the document is empty; expected: at least one character"]


def test_python_records():
    records = ["a", "", {"text": "b", "id": 1}, {"id": 2}, 3, "\ud800", {"text": "c"}]
    texts, rejects = read(open_records(iter(records), part_bytes=2))
    assert texts == [("<python>", 0, "a"), ("<python>", 2, "b"), ("<python>", 6, "c")]
    assert [reject.split(":")[1] for reject in rejects] == ["1", "3", "4", "5"]
    first, again = (next(iter(open_records(iter(records)))).identity for _ in range(2))
    assert first == again


def test_order_globs_folders_and_mistakes(tmp_path):
    for name in ("b/2.jsonl", "b/1.jsonl", "a.jsonl", "b/.c/3.jsonl", "b/notes.xyz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    notices: list[str] = []
    folder = [text for _, _, text in read(open_sources(tmp_path, notice=notices.append))[0]]
    assert folder == ["a.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert "skipped 1 files of unknown format" in notices[0]
    assert [text for _, _, text in read(open_sources(f"{tmp_path}/**/*.jsonl"))[0]] == folder
    assert [
        text for _, _, text in read(open_sources([tmp_path / "b/2.jsonl", tmp_path / "a.jsonl"]))[0]
    ] == [
        folder[2],
        folder[0],
    ]
    with pytest.raises(RecordError, match="no such file, and no file matches it"):
        open_sources(f"{tmp_path}/*.txt")
    (tmp_path / "d" / ".git").mkdir(parents=True)
    with pytest.raises(RecordError, match=r"d.*folder.*file.*hidden"):
        open_sources(tmp_path / "d")
    with pytest.raises(RecordError, match="pass an iterator: iter"):
        open_sources(["a text and not a path"])
    with pytest.raises(ConfigError, match="given twice"):
        open_sources([tmp_path / "a.jsonl", f"{tmp_path}/*.jsonl"])
    with pytest.raises(ConfigError, match=r"unknown extension '.xyz'"):
        open_sources(tmp_path / "b/notes.xyz")
    with pytest.raises(ConfigError, match="format 'xml' is unknown"):
        open_sources(tmp_path, format="xml")
    assert [
        text for _, _, text in read(open_sources(tmp_path / "b/notes.xyz", format="jsonl"))[0]
    ] == ["b/notes.xyz"]


def test_memory_store(tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(10))
    for name, content in (
        ("1.jsonl", lines),
        ("2.jsonl.zst", pa.compress(lines, "zstd", asbytes=True)),
        ("3.txt", b"x"),
    ):
        with store.open(f"/penstock/{name}", "wb") as stream:
            stream.write(content)
    pq.write_table(pa.table({"text": ["p"]}), tmp_path / "p.parquet")
    store.put(str(tmp_path / "p.parquet"), "/penstock/p.parquet")
    texts, _ = read(open_sources("memory://penstock"))
    assert len(texts) == 22
    assert texts[-1] == ("p.parquet", 0, "p")
    assert len(read(open_sources("memory://penstock/*.jsonl*"))[0]) == 20
    with pytest.raises(RecordError, match="no such file"):
        open_sources("memory://penstock/absent*")


def test_identity_follows_the_content(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    before = open_sources(path)[0].identity
    path.write_text('{"text": "abc"}\n')
    assert open_sources(path)[0].identity != before


@pytest.mark.real_data
def test_real_files(real_data):
    for spec in ("text/c4_demo.jsonl", "text/code", "text/dolma_c4", "formats", "text/wikitext-2"):
        texts, rejects = read(open_sources(real_data / spec))
        assert texts
        assert not rejects


def test_large_blocks_take_the_columns_in_step(tmp_path):
    noise = random.Random(3)
    rows = [{"text": "x" * noise.randint(0, 3) * 50, "id": number} for number in range(3000)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    for part in open_sources(path, fields=Fields(columns={"id": "int64"})):
        for block in part.blocks():
            assert np.array_equal(block.lines, np.asarray(block.columns["id"]) + 1)
            assert [reject.line - 1 for reject in block.rejects] == [
                row["id"] for row in rows if not row["text"]
            ]
