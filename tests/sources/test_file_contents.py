"""First bytes decide where they are certain: whatever its name, a file is read as what it is, or
refused as that.
"""

import bz2
import gzip
import io
import json
import lzma
import sqlite3
import tarfile
import zipfile

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from makers.secret_server import SIGNATURE, secret_server
from penstock.core.errors import ConfigError, DamagedFileError, RecordError
from penstock.data.sources import Fields, open_sources, read_texts
from penstock.data.sources.signatures import HEAD_BYTES, is_text, recognise

TEXTS = [f"{number} größe" for number in range(300)]
ROWS = [{"text": text} for text in TEXTS]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
CODECS = {
    "gzip": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
    "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
    "lz4": lambda data: pa.compress(data, "lz4", asbytes=True),
}  # fmt: skip
ENDINGS = {"gzip": ".gz", "bz2": ".bz2", "xz": ".xz", "zstd": ".zst", "lz4": ".lz4"}


def table_as(kind):
    out, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
    if kind == "parquet":
        pq.write_table(table, out)
    else:
        new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with new(out, table.schema) as writer:
            writer.write_table(table)
    return out.getvalue()


def tar_of(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


CONTENTS = {
    "lines": LINES, **{name: compress(LINES) for name, compress in CODECS.items()},
    **{kind: table_as(kind) for kind in ("parquet", "arrow", "stream")},
}  # fmt: skip
NAMES = [
    "a.jsonl",
    "a.json",
    "a.parquet",
    "a.arrow",
    "a.tar",
    "a.txt",
    "a",
    "a.0",
    "a.jsonl.gz",
    "a.jsonl.zst",
    "a.gz",
]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", NAMES)
def test_any_content_under_any_name(tmp_path, content, name):
    """But for a text file that holds JSON, which is text."""
    (tmp_path / name).write_bytes(CONTENTS[content])
    notices = []
    parts = open_sources(tmp_path / name, notice=notices.append)
    assert len(notices) <= 1
    texts = list(read_texts(parts))
    if name == "a.txt" and (content in CODECS or content == "lines"):
        assert texts == [LINES.decode()]
    else:
        assert texts == TEXTS
    agrees = (
        content == "lines" and name in ("a.jsonl", "a.json", "a.txt")
    ) or name == f"a.{content}"
    agrees |= (content, name) in {
        ("stream", "a.arrow"),
        ("gzip", "a.jsonl.gz"),
        ("zstd", "a.jsonl.zst"),
    }
    assert bool(notices) == (not agrees)
    assert all(notice.startswith(f"{tmp_path / name}: ") for notice in notices)
    (tmp_path / name).rename(tmp_path / "again")
    assert recognise(CONTENTS[content][:HEAD_BYTES]) == recognise(
        CONTENTS[content][:HEAD_BYTES] + bytes(9)
    )


def test_names_that_agree_are_cut_as_ever(tmp_path):
    """Identities of parts do not change, so what was prepared stays."""
    for name, content in (
        ("a.jsonl", "lines"),
        ("b.jsonl.gz", "gzip"),
        ("c.parquet", "parquet"),
        ("d.arrow", "stream"),
    ):
        (tmp_path / name).write_bytes(CONTENTS[content])
    notices = []
    identities = [
        part.identity for part in open_sources(tmp_path, part_bytes=4000, notice=notices.append)
    ]
    sizes = {name: (tmp_path / name).stat().st_size for name in ("a.jsonl", "b.jsonl.gz")}
    assert identities == [
        *(f"{tmp_path}/a.jsonl bytes {begin}:{min(begin + 4000, sizes['a.jsonl'])}"
          for begin in range(0, sizes["a.jsonl"], 4000)),
        f"{tmp_path}/b.jsonl.gz bytes 0:{sizes['b.jsonl.gz']}",
        f"{tmp_path}/c.parquet row groups 0:1 from row 0",
        f"{tmp_path}/d.arrow",
    ]  # fmt: skip
    assert notices == []


def test_one_notice_for_many(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_bytes(CONTENTS["gzip"])
    (tmp_path / "6.jsonl").write_bytes(CONTENTS["parquet"])
    notices = []
    assert len(list(read_texts(open_sources(tmp_path, notice=notices.append)))) == 6 * len(TEXTS)
    assert [notice.replace(str(tmp_path), "") for notice in notices] == [
        (
            "/0.jsonl: is gzip, although its name says it is not compressed; read as what it is; "
            "so are 4 more files"
        ),
        "/6.jsonl: is Parquet, although its name says jsonl; read as what it is",
    ]


def test_folders_without_any_known_name(tmp_path):
    """As Spark writes text: parts without extension, and an empty file that marks the end."""
    for number in range(3):
        (tmp_path / f"part-0000{number}").write_bytes(LINES)
    (tmp_path / "_SUCCESS").write_bytes(b"")
    notices = []
    assert list(read_texts(open_sources(tmp_path, notice=notices.append))) == TEXTS * 3
    assert "skipped 1 files of unknown format, such as" in notices[0]
    (tmp_path / "b.jsonl").write_bytes(LINES)
    assert list(read_texts(open_sources(tmp_path))) == TEXTS, (
        "where names are known, other files are no input"
    )


def test_chats_in_files_without_a_name(tmp_path):
    records = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS[:20]]
    for content in (
        json.dumps(records),
        json.dumps(records, indent=1),
        "\n".join(map(json.dumps, records)),
        gzip.compress(json.dumps(records).encode()),
    ):
        (tmp_path / "chats").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
        parts = open_sources(tmp_path / "chats", fields=Fields(whole=True))
        assert [
            record for part in parts for block in part.objects() for record in block.objects
        ] == records
    (tmp_path / "shard").write_bytes(tar_of({"1.json": json.dumps(records[0]).encode()}))
    (part,) = open_sources(tmp_path / "shard", fields=Fields(whole=True))
    assert [record for block in part.objects() for record in block.objects] == records[:1]
    with pytest.raises(ConfigError, match=r"shard.*shards.*records.*images"):
        open_sources(tmp_path / "shard")


def others():
    """Name → the beginning of a file that is not read, as its program writes it."""
    made = {
        "an image": b"\x89PNG\r\n\x1a\n" + bytes(50),
        "a PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.jsonl", LINES)
    made["a zip archive"] = buffer.getvalue()
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(3))
    made["a zip archive "] = buffer.getvalue()
    buffer = io.BytesIO()
    np.save(buffer, np.arange(99))
    made["a NumPy array"] = buffer.getvalue()
    buffer = io.BytesIO()
    pa.orc.write_table(pa.Table.from_pylist(ROWS), buffer)
    made["ORC"] = buffer.getvalue()
    database = sqlite3.connect(":memory:")
    database.execute("create table a (text)")
    made["a SQLite database"] = database.serialize()
    database.close()
    made["a pointer of Git LFS"] = (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    )
    made["a 7z archive"] = b"7z\xbc\xaf\x27\x1c\0\x04" + bytes(30)
    made["a RAR archive"] = b"Rar!\x1a\x07\x01\0" + bytes(30)
    made["Avro"] = b"Obj\x01\x04\x14avro.codec" + bytes(30)
    made["Snappy"] = b"\xff\x06\0\0sNaPpY" + bytes(30)
    return made


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a", "a.gz", "a.bin"])
def test_what_is_not_read_is_refused_as_what_it_is(tmp_path, name):
    for what, content in others().items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}: is {what.strip()}\b.*, .*read;"):
            open_sources(tmp_path / name)
    (tmp_path / "a.jsonl").write_bytes(b"<!DOCTYPE html>\n<html><body>Sign in</body></html>")
    with pytest.raises(ConfigError, match=r"a.jsonl.*HTML.*servers.*login"):
        open_sources(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_bytes(
        b"<!DOCTYPE html>\n<html><body>A page as a text.</body></html>"
    )
    assert len(list(read_texts(open_sources(tmp_path / "a.txt")))) == 1


def test_a_setting_that_the_content_contradicts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(CONTENTS["parquet"])
    due = r"a.jsonl: is Parquet, but format is jsonl; leave format out, or set it to parquet"
    with pytest.raises(ConfigError, match=due):
        open_sources(tmp_path / "a.jsonl", format="jsonl")
    assert list(read_texts(open_sources(tmp_path / "a.jsonl", format="parquet"))) == TEXTS
    (tmp_path / "b.xyz").write_bytes(CONTENTS["zstd"])
    assert list(read_texts(open_sources(tmp_path / "b.xyz", format="jsonl"))) == TEXTS
    assert list(read_texts(open_sources(tmp_path / "b.xyz", format="text"))) == [LINES.decode()]
    with pytest.raises(ConfigError, match=r"b.xyz.*unknown.*extension.*'.xyz'"):
        open_sources(tmp_path / "b.xyz")


@pytest.mark.parametrize(
    "text",
    [b"PAR1 is a name", b"ORC tales\n", b"BZh91AY&SY", b"{curly", b"[section]\na = 1", b"Rar!"],
)
def test_a_text_may_begin_as_anything(tmp_path, text):
    (tmp_path / "a.txt").write_bytes(text)
    assert list(read_texts(open_sources(tmp_path / "a.txt"))) == [text.decode()]
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(ConfigError, match=r"unknown.*extension.*''"):
        open_sources(tmp_path / "a")


def test_a_damaged_compressed_file_is_not_taken_for_a_plain_one(tmp_path):
    for content in (
        bytes(64) + CONTENTS["gzip"],
        b"\x1f\x8c" + CONTENTS["gzip"],
        "grün".encode("latin-1") + b"\x07",
    ):
        (tmp_path / "a.jsonl.gz").write_bytes(content)
        with pytest.raises(DamagedFileError, match=r"its compressed data are damaged"):
            list(read_texts(open_sources(tmp_path / "a.jsonl.gz")))
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"it is empty, and no compressed file is"):
        list(read_texts(open_sources(tmp_path / "a.jsonl.gz")))


@given(st.binary(max_size=600) | st.text(max_size=300).map(str.encode))
def test_no_first_bytes_fail(head):
    found = recognise(head)
    assert found is None or bool(found.codec or found.format or found.cure)
    if is_text(head):
        assert found is None or head.startswith(b"version https://git-lfs")
        head[: len(head) // 4 * 3].decode(errors="ignore")
    assert not is_text(b"\xff" + head)


@pytest.fixture
def memory(request, monkeypatch):
    """A store in memory: a function that puts a file and returns its URL, and the byte ranges that
    are asked for.
    """
    folder, asked = f"/contents/{request.node.name}", []
    fsspec.filesystem("memory").makedirs(folder, exist_ok=True)
    read, cat = fsspec.implementations.memory.MemoryFile.read, MemoryFileSystem.cat_file

    def put(name, content):
        fsspec.filesystem("memory").pipe(f"{folder}/{name}", content)
        return f"memory:/{folder}/{name}"

    def watched_read(self, amount=-1):
        asked.append(amount)
        return read(self, amount)

    def watched_cat(self, path, start=None, end=None, **options):
        asked.append(end - start)
        return cat(self, path, start=start, end=end, **options)

    monkeypatch.setattr(
        fsspec.implementations.memory.MemoryFile, "read", watched_read, raising=False
    )
    monkeypatch.setattr(MemoryFileSystem, "cat_file", watched_cat)
    yield put, asked
    fsspec.filesystem("memory").rm("/contents", recursive=True)


@pytest.mark.parametrize("content", [*CODECS, "lines"])
def test_remote_files_whose_names_say_something_are_not_looked_at(memory, content):
    """Reading one as a whole notices what it is; in pieces, an error says so."""
    put, asked = memory
    url = put("a.jsonl", CONTENTS[content])
    parts = open_sources(url)
    assert asked == []
    assert list(read_texts(parts)) == TEXTS
    if content != "lines":
        parts = open_sources(url, part_bytes=100)
        due = (
            r"a.jsonl: is \w+, which its name does not say; set part_bytes to at least its size, "
            r"\d+, to read it"
        )
        with pytest.raises(RecordError, match=due):
            list(parts[0].blocks())
        assert list(read_texts(open_sources(url, part_bytes=len(CONTENTS[content])))) == TEXTS


def test_remote_files_without_a_name_cost_one_small_read(memory):
    put, asked = memory
    for content in ("lines", "parquet", "stream"):
        url = put(content, CONTENTS[content])
        asked.clear()
        parts = open_sources(url, notice=lambda _: None)
        assert asked[0] <= HEAD_BYTES
        assert content == "parquet" or len(asked) == 1
        assert list(read_texts(parts)) == TEXTS
    url = put("packed", CONTENTS["gzip"])
    assert list(read_texts(open_sources(url))) == TEXTS


def test_remote_files_of_other_kinds(memory):
    put, _ = memory
    url = put("a.jsonl", CONTENTS["parquet"])
    with pytest.raises(RecordError, match=r"a.jsonl.*Parquet.*format.*parquet"):
        list(read_texts(open_sources(url)))
    assert list(read_texts(open_sources(url, format="parquet"))) == TEXTS
    for name, due in (
        ("a.parquet", "not a whole Parquet file .*; it is gzip"),
        ("a.arrow", "not sound Arrow: .*; it is gzip"),
    ):
        with pytest.raises(DamagedFileError, match=due):
            list(read_texts(open_sources(put(name, CONTENTS["gzip"]))))
    with pytest.raises(RecordError, match=r"b.jsonl.*archive.*unpack.*first"):
        list(read_texts(open_sources(put("b.jsonl", others()["a zip archive"]))))


def test_lines_of_another_file_are_explained(tmp_path, memory):
    """Where neither name nor first bytes were asked: the reject of the first line says what the
    file is.
    """
    put, _ = memory
    for fields in (Fields(), Fields(whole=True)):
        parts = open_sources(
            put("a.txt", CONTENTS["gzip"]), format="jsonl", fields=fields, part_bytes=10
        )
        assert parts
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (part,) = open_sources(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(CONTENTS["gzip"][: len(LINES)].ljust(len(LINES), b"\n"))
    with pytest.raises(RecordError, match=r"a.jsonl.*gzip.*does"):
        list(part.blocks())


pytest.importorskip("aiohttp")


def test_signed_addresses(tmp_path, monkeypatch):
    """Extension and compression are those of the path, whatever the query holds; or what the first
    bytes say.
    """
    with secret_server(tmp_path, monkeypatch) as server:
        for content, ending in ENDINGS.items():
            (tmp_path / f"a.jsonl{ending}").write_bytes(CONTENTS[content])
            assert list(read_texts(open_sources(server.signed(f"a.jsonl{ending}")))) == TEXTS
        for content in ("lines", "gzip", "parquet"):
            (tmp_path / "download.file.parquet").write_bytes(CONTENTS[content])
            url = f"{server.open('download')}?id=file.parquet&token={SIGNATURE}"
            assert list(read_texts(open_sources(url))) == TEXTS
        (tmp_path / "a.parquet").write_bytes(CONTENTS["parquet"])
        assert (
            list(
                read_texts(
                    open_sources(server.signed("a.parquet", more="response-content-type=x.jsonl&"))
                )
            )
            == TEXTS
        )
