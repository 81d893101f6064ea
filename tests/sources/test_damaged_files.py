"""A file that cannot be read to its end is no bad record: it stops the work, or what was not read
of it is counted.
"""

import bz2
import gzip
import json
import lzma
import random
import re
import zlib
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import DamagedFileError, RecordError
from penstock.data.sources import Fields, open_sources, read_texts
from penstock.data.sources import lines as lines_module

COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    ".lz4": lambda data: pa.compress(data, "lz4", asbytes=True),
}


def make_lines(count, size=60):
    noise = random.Random(7)
    return "".join(
        json.dumps({"text": noise.randbytes(size).hex()}) + "\n" for _ in range(count)
    ).encode()


def read(parts, **options):
    """Texts, rejects and damage of all parts, and the raw bytes that were reported as read."""
    texts, rejects, damage, size = [], [], [], 0
    for part in parts:
        for block in part.blocks(damage.append):
            texts += block.texts.to_pylist()
            rejects += block.rejects
            size += block.size_bytes
    return texts, rejects, damage, size


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_cut_file_stops_or_gives_its_whole_lines(tmp_path, suffix, share):
    whole = COMPRESS[suffix](make_lines(200))
    path = tmp_path / f"f.jsonl{suffix}"
    path.write_bytes(whole[: int(len(whole) * share)])
    texts, rejects, (damage,), size = read(open_sources(path))
    assert not rejects
    assert damage.line == len(texts) + 1
    assert (damage.file, damage.size_bytes) == (str(path), path.stat().st_size)
    assert size + damage.unread_bytes == path.stat().st_size
    if suffix == ".gz" and share:
        # Every line that the bytes on disk still hold whole; nothing of them was left unread.
        assert len(texts) == zlib.decompressobj(31).decompress(path.read_bytes()).count(b"\n")
        assert damage.unread_bytes == 0
    due = (
        rf"f[.]jsonl[.]\w+:{len(texts) + 1}: the file cannot be read further: .*bytes were read\); .*"  # noqa: E501
        "set on_damaged_file to skip"
    )
    with pytest.raises(DamagedFileError, match=due):
        list(read_texts(open_sources(path)))
    with pytest.raises(DamagedFileError, match="cannot be read further"):
        list(read_texts(open_sources(path), skip=lambda reject: None))


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["f.jsonl", "f.txt"])
def test_of_a_file_whose_data_are_wrong_nothing_is_used(tmp_path, monkeypatch, suffix, name):
    """Where they begin to be wrong is not known: of gzip's, the checksum at the end may be all that
    tells.
    """
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 10_000)
    whole = bytearray(COMPRESS[suffix](make_lines(2000)))
    at, size = (
        len(whole) // 2,
        len(whole) // 2 if suffix == ".zst" else 40,
    )  # Arrow's frames have no checksum
    whole[at : at + size] = b"\xff" * size
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(whole)
    texts, rejects, (damage,), size = read(open_sources(path, separator="|"))
    assert (texts, rejects, size, damage.line) == ([], [], 0, 1)
    assert damage.unread_bytes == damage.size_bytes == len(whole)
    assert re.search(
        r"its compressed data are damaged \(.*\), so none of it is used", damage.reason
    )


@pytest.mark.parametrize("part_bytes", [None, 300])
def test_a_file_that_shrinks(tmp_path, part_bytes):
    path = tmp_path / "f.jsonl"
    path.write_text('{"text": "a"}\n' * 100)
    parts = open_sources(path, part_bytes=part_bytes)
    path.write_text('{"text": "a"}\n' * 50)
    texts, _, damage, size = read(parts)
    assert len(texts) == 50
    assert "it had 1,400 bytes when the work began" in damage[0].reason
    assert sum(one.unread_bytes for one in damage) == 700
    assert size == 700
    text = tmp_path / "f.txt"
    text.write_text("a|b|c")
    parts = open_sources(text, separator="|")
    text.write_text("a|")
    with pytest.raises(DamagedFileError, match=r"f.txt:1.*it.*5.*bytes.*began"):
        list(read_texts(parts))


def test_a_remote_file_that_shrinks():
    store = fsspec.filesystem("memory")
    for name, part_bytes in (("whole.jsonl", None), ("ranges.jsonl", 300), ("a.txt", None)):
        store.pipe(f"/shrinking/{name}", b'{"text": "a"}\n' * 100)
        parts = open_sources(f"memory://shrinking/{name}", part_bytes=part_bytes)
        store.pipe(f"/shrinking/{name}", b'{"text": "a"}\n' * 50)
        _, rejects, damage, _ = read(parts)
        assert not rejects
        assert damage
    store.rm("/shrinking", recursive=True)


def test_other_parts_and_files_are_read_all_the_same(tmp_path):
    for name, content in (("a.txt", "one|two|three"), ("c.txt", "four")):
        (tmp_path / name).write_text(content)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"lost|and gone")[:15])
    texts, _, (damage,), size = read(open_sources(tmp_path, separator="|"))
    assert texts == ["one", "two", "three", "four"]
    assert damage.file.endswith("b.txt.gz")
    assert size == 17 + 15 - damage.unread_bytes
    _, _, (whole,), _ = read(open_sources(tmp_path))
    assert whole.unread_bytes == 15, "a document that is cut gives nothing"


def test_parquet_without_its_end_or_with_a_damaged_page(tmp_path):
    path = tmp_path / "a.parquet"
    noise = random.Random(3)
    rows = [noise.randbytes(40).hex() for _ in range(9000)]
    pq.write_table(
        pa.table({"text": rows}),
        path,
        row_group_size=3000,
        compression="zstd",
        use_dictionary=False,
    )
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DamagedFileError, match=r"a.parquet:0.*further.*Parquet"):
        open_sources(path)
    found = []
    texts, _, damage, size = read(open_sources(path, damaged=found.append))
    assert (texts, size, len(found)) == ([], 0, 1)
    assert damage[0].unread_bytes == damage[0].size_bytes == len(whole) - 20
    group = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(1).column(0)
    begin = group.data_page_offset + group.total_compressed_size // 2
    path.write_bytes(whole[:begin] + bytes(2000) + whole[begin + 2000 :])
    texts, _, (one,), size = read(open_sources(path, part_bytes=1))
    assert texts == rows[:3000] + rows[6000:]
    assert one.line == 3000
    assert one.unread_bytes == one.size_bytes == group.total_compressed_size
    with pytest.raises(DamagedFileError, match=r"a.parquet:3000: .*not sound Parquet"):
        list(read_texts(open_sources(path, part_bytes=1)))


def test_arrow_that_was_cut(tmp_path):
    path = tmp_path / "a.arrow"
    table = pa.table({"text": ["x" * 100] * 3000})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    path.write_bytes(path.read_bytes()[:-50_000])
    texts, _, (damage,), size = read(open_sources(path))
    assert len(texts) == damage.line == 2000
    assert size + damage.unread_bytes == path.stat().st_size
    assert 40_000 < damage.unread_bytes < 60_000


@pytest.mark.parametrize(
    ("content", "line", "reason", "unread"),
    [
        (b'[\n{"a": 1},\n{broken\n]', 3, "not JSON .Expecting property name", 9),
        (b'[\n{"a": 1},\n', 2, "so the file was cut", 0),
        (b'[{"a": "\xff"}]', 1, "byte 8 of the file is not UTF-8", 12),
    ],
)
@pytest.mark.parametrize("part_bytes", [None, 4])
def test_an_array_that_ends_early(tmp_path, content, line, reason, unread, part_bytes):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    damage, size = [], 0
    for part in open_sources(path, fields=Fields(whole=True), part_bytes=part_bytes):
        for block in part.objects(damage.append):
            assert not block.rejects
            size += block.size_bytes
    assert {one.line for one in damage} == {line}
    assert abs(sum(one.unread_bytes for one in damage) - unread) <= 4
    assert size + sum(one.unread_bytes for one in damage) == len(content)
    with pytest.raises(DamagedFileError, match=rf"a.json:{line}: .*{reason}"):
        [
            list(part.objects())
            for part in open_sources(path, fields=Fields(whole=True), part_bytes=part_bytes)
        ]


def test_a_file_that_goes_away_is_no_damage(tmp_path):
    for name, content in (
        ("a.jsonl", b'{"text": "a"}\n'),
        ("a.txt", b"a"),
        ("a.jsonl.gz", gzip.compress(b"{}")),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        parts = open_sources(path)
        path.unlink()
        with pytest.raises(RecordError, match=rf"{name}.*gone.*leave.*again"):
            read(parts)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    parts = open_sources(tmp_path / "a.parquet")
    Path(tmp_path / "a.parquet").unlink()
    with pytest.raises(RecordError, match=r"a.parquet: is gone"):
        read(parts)
