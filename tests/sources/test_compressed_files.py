"""Compressed files as the usual programs write them are read whole; others are refused by their
right name.
"""

import bz2
import gzip
import json
import lzma
import shutil
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import ConfigError, DamagedFileError, RecordError
from penstock.data.sources import Fields, open_sources, read_texts
from penstock.data.sources import lines as lines_module
from penstock.data.sources.compression import ARROW_WINDOW

TEXTS = [f"{number} größe" for number in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def compress(suffix, data):
    if suffix in (".zst", ".lz4"):
        return pa.compress(data, {".zst": "zstd", ".lz4": "lz4"}[suffix], asbytes=True)
    return {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(data)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ".lz4"])
@pytest.mark.parametrize("block_bytes", [1, 700, 4 << 20])
def test_each_codec_in_one_stream_or_several(tmp_path, monkeypatch, suffix, block_bytes):
    monkeypatch.setattr(
        lines_module, "BLOCK_BYTES", max(block_bytes, 1 << 12 if suffix == ".bz2" else 1)
    )
    middle = LINES.index(b"\n", len(LINES) // 2) - 7
    small = block_bytes == 1
    data = LINES[:2000] if small else LINES
    pieces = [data] if small else [LINES[:middle], LINES[middle:], b""]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(compress(suffix, piece) for piece in pieces))
    expected = TEXTS[: data.count(b"\n")]
    (part,) = open_sources(path)
    blocks = []
    for block in part.blocks(lambda damage: None if small else pytest.fail(str(damage))):
        blocks += block.texts.to_pylist()
    assert blocks == expected
    if suffix in (".gz", ".xz", ".bz2") and not small:
        path.write_bytes(path.read_bytes() + bytes(1024))
        assert list(read_texts(open_sources(path))) == TEXTS
    (tmp_path / f"b.txt{suffix}").write_bytes(compress(suffix, b"one|two"))
    assert list(read_texts(open_sources(tmp_path / f"b.txt{suffix}", separator="|"))) == [
        "one",
        "two",
    ]


@pytest.mark.parametrize("name", ["gzip", "bzip2", "xz", "zstd", "lz4"])
def test_what_the_programs_write(tmp_path, name):
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    suffix = {"gzip": ".gz", "bzip2": ".bz2", "xz": ".xz", "zstd": ".zst", "lz4": ".lz4"}[name]
    made = subprocess.run([name, "-q", "-c"], input=LINES, capture_output=True, check=True).stdout
    (tmp_path / f"a.jsonl{suffix}").write_bytes(made)
    assert list(read_texts(open_sources(tmp_path / f"a.jsonl{suffix}"))) == TEXTS


def zstd_frame(content, window_log, *, sized):
    """One frame of raw blocks, whatever window it claims to need (RFC 8878)."""
    size = len(content).to_bytes(4, "little") if sized else b""
    header = b"\x28\xb5\x2f\xfd" + bytes([0x80 if sized else 0, window_log - 10 << 3]) + size
    pieces = [content[at : at + 100_000] for at in range(0, len(content), 100_000)]
    blocks = [
        (len(piece) << 3 | (number == len(pieces) - 1)).to_bytes(3, "little") + piece
        for number, piece in enumerate(pieces)
    ]
    return header + b"".join(blocks)


def test_zstd_with_a_long_window(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    for window_log in (27, 28, 31):
        path.write_bytes(zstd_frame(LINES, window_log, sized=True))
        assert list(read_texts(open_sources(path))) == TEXTS
    assert ARROW_WINDOW == 1 << 27
    cure = (
        r"a.jsonl.zst: was compressed with a window of more than 128 MiB, which .*: zstd -dc "
        r"-M2048MB FILE"
    )
    for content in (
        zstd_frame(LINES, 31, sized=False),
        zstd_frame(LINES, 31, sized=True) * 2,
        zstd_frame(LINES, 20, sized=True) + zstd_frame(LINES, 31, sized=True),
    ):
        path.write_bytes(content)
        with pytest.raises(RecordError, match=cure) as found:
            list(read_texts(open_sources(path)))
        assert type(found.value) is RecordError, "a sound file is not damaged"


@pytest.mark.parametrize("size", [1 << 30, 1 << 50, 1 << 62])
def test_a_zstd_header_that_names_too_much(tmp_path, size):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + bytes(20))
    with pytest.raises(DamagedFileError, match=r"claims [\d,]+ bytes.*more than 33"):
        list(read_texts(open_sources(path)))


def test_what_is_not_read_is_named(tmp_path):
    for name in ("a.jsonl.zip", "a.jsonl.br", "a.7z"):
        (tmp_path / name).write_bytes(b"PK")
        with pytest.raises(
            ConfigError,
            match=r"\.\w+ files are not supported; unpack",
        ):
            open_sources(tmp_path / name)
    (tmp_path / "a.tar.gz").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"compressed.*webdataset"):
        open_sources(tmp_path / "a.tar.gz", fields=Fields(whole=True))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    with pytest.raises(ConfigError, match=r"a.parquet.gz.*compressed.*supported"):
        open_sources(tmp_path / "a.parquet.gz")


def test_chats_in_a_compressed_array(tmp_path):
    records = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS[:50]]
    (tmp_path / "a.json.xz").write_bytes(lzma.compress(json.dumps(records).encode()))
    (part,) = open_sources(tmp_path / "a.json.xz", fields=Fields(whole=True))
    assert [record for block in part.objects() for record in block.objects] == records
