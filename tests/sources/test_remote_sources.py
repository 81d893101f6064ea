"""Remote files are cut and read as local ones are, in ranges; a store that fails is not taken for
the end of a file.
"""

import gzip
import json
import random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.core.errors import ConfigError, DamagedFileError, RecordError
from penstock.data.sources import open_sources
from penstock.data.sources.json_files import number_lines
from penstock.data.stores.file_systems import STAMPS
from penstock.data.stores.remote_files import find_remote


@pytest.fixture
def store(request):
    """An empty folder of a store in memory: its file system, and its URL."""
    folder = f"/remote/{request.node.name}"
    filesystem = fsspec.filesystem("memory")
    filesystem.makedirs(folder, exist_ok=True)
    yield filesystem, f"memory:/{folder}"
    filesystem.rm("/remote", recursive=True)


def put(store, name, content):
    filesystem, url = store
    filesystem.pipe(f"{url}/{name}", content)
    return f"{url}/{name}"


def make_lines(count, longest=60, seed=1):
    noise = random.Random(seed)
    texts = ("ü水 " * noise.randint(0, longest) + str(number) for number in range(count))
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def read(spec, **options):
    """(text, line) and rejects of each part."""
    parts = []
    for part in number_lines(open_sources(spec, **options)):
        blocks = list(part.blocks())
        texts = [
            text
            for block in blocks
            for text in zip(block.texts.to_pylist(), block.lines.tolist(), strict=True)
        ]
        rejects = [(reject.line, reject.reason) for block in blocks for reject in block.rejects]
        parts.append((texts, rejects, sum(block.size_bytes for block in blocks), part.size_bytes))
    return parts


def test_ranges_of_a_remote_file_are_those_of_the_same_local_file(tmp_path, store):
    lines = make_lines(300)
    for name, content in (
        ("plain", lines),
        ("bom", b"\xef\xbb\xbf" + lines[:-1]),
        ("bad", lines + b"{broken\n" + lines),
    ):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
        url = put(store, f"{name}.jsonl", content)
        for part_bytes in (100, 4096, 30_000, 1 << 20):
            local = read(tmp_path / f"{name}.jsonl", part_bytes=part_bytes)
            assert read(url, part_bytes=part_bytes) == local
            assert len(local) == max(-(-len(content) // part_bytes), 1)
            numbers = [
                line
                for texts, rejects, *_ in local
                for line in [n for _, n in texts] + [n for n, _ in rejects]
            ]
            assert sorted(numbers) == list(range(1, 301 if name != "bad" else 602))


def test_only_the_bytes_of_a_range_are_asked_for(store, monkeypatch):
    lines = make_lines(20_000)
    asked = watch_requests(monkeypatch)
    parts = open_sources(put(store, "a.jsonl", lines), part_bytes=1 << 20)
    assert len(parts) > 2
    number_lines(parts)
    assert sum(end - begin for begin, end in asked) <= len(lines)
    asked.clear()
    list(number_lines(parts)[1].blocks())
    used = asked[len(parts) :]
    assert sum(end - begin for begin, end in used) < 1.3 * (1 << 20)


def watch_requests(monkeypatch):
    """The byte ranges that the store is asked for from now on."""
    asked = []
    cat_file = MemoryFileSystem.cat_file

    def watched(self, path, start=None, end=None, **options):
        asked.append((start, end))
        return cat_file(self, path, start=start, end=end, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", watched)
    return asked


def test_parquet_reads_the_asked_columns_of_its_row_groups_only(tmp_path, store, monkeypatch):
    rows = 4000
    noise = random.Random(2)
    table = pa.table(
        {
            "text": [f"t{n}" for n in range(rows)],
            "bulk": [noise.randbytes(100) for _ in range(rows)],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    content = (tmp_path / "a.parquet").read_bytes()
    url = put(store, "a.parquet", content)
    parts = open_sources(url, part_bytes=1000)
    assert len(parts) == 4
    taken = []
    read_file = fsspec.implementations.memory.MemoryFile.read

    def watched(self, amount=-1):
        data = read_file(self, amount)
        taken.append(len(data))
        return data

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "read", watched, raising=False)
    texts = [text for block in parts[2].blocks() for text in block.texts.to_pylist()]
    assert texts == [f"t{n}" for n in range(2000, 3000)]
    assert sum(taken) < len(content) / 3
    assert [part[0] for part in read(url, part_bytes=1000)] == [
        part[0] for part in read(tmp_path / "a.parquet", part_bytes=1000)
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet", "whole.jsonl"])
def test_a_store_that_fails_midway_stops_and_loses_nothing(tmp_path, store, monkeypatch, name):
    """Taken for a cut file, it would become one reject, and `--on-error skip` would go on without
    the rest.
    """
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    content = {
        "a.jsonl.gz": gzip.compress(make_lines(3000)),
        "a.parquet": (tmp_path / "a.parquet").read_bytes(),
    }.get(name, make_lines(3000))
    url = put(store, name, content)
    parts = open_sources(url, part_bytes=10_000 if name == "a.jsonl" else None)

    def fail(*arguments, **options):
        raise ConnectionResetError("the line went dead")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "read", fail, raising=False)
    due = (
        rf"/{name}: the store cannot be read: ConnectionResetError: the line went dead; .*run it "
        rf"again"
    )
    with pytest.raises(RecordError, match=due):
        list(parts[-1].blocks())


def test_a_store_that_gives_no_ranges_or_changed(store, monkeypatch):
    url = put(store, "a.jsonl", make_lines(300))
    parts = open_sources(url, part_bytes=5000)
    put(store, "a.jsonl", make_lines(300)[:7000])
    due = (
        r"a.jsonl:\d+: the file cannot be read further: it has fewer than [\d,]+ bytes now, so it "
        r"changed"
    )
    with pytest.raises(DamagedFileError, match=due):
        list(parts[2].blocks())
    store[0].rm(url)
    with pytest.raises(RecordError, match=r"a.jsonl: is not in the store"):
        list(parts[2].blocks())
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: bytes(10_000))
    with pytest.raises(
        RecordError,
        match=(r"\d+ bytes, .* sent 10000.*part_bytes"),
    ):
        list(parts[0].blocks())


def test_finding_in_a_store(store):
    for name in ("b/2.jsonl", "b/1.jsonl", "a.jsonl", "b/.c/3.jsonl", ".d.jsonl", "b/notes.xyz"):
        put(store, name, b'{"text": "a"}\n')
    url, notices = store[1], []
    parts = open_sources(url, notice=notices.append)
    names = [part.name.partition("test_finding_in_a_store/")[2] for part in parts]
    assert names == ["a.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert "skipped 1 files of unknown format" in notices[0]
    assert len(open_sources(f"{url}/**/*.jsonl")) == 3
    assert len(open_sources(f"{url}/b/.c/*.jsonl")) == 1
    with pytest.raises(ConfigError, match=r"unknown extension '.xyz'"):
        open_sources(f"{url}/b/*")
    with pytest.raises(RecordError, match=r"absent.jsonl.*file.*file.*matches"):
        open_sources(f"{url}/absent.jsonl")


def test_a_store_that_cannot_be_listed_is_no_missing_file(store, monkeypatch):
    def fail(*arguments, **options):
        raise PermissionError("no key")

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    with pytest.raises(RecordError, match=r"a.jsonl.*PermissionError.*credentials"):
        open_sources(f"{store[1]}/a.jsonl")
    with pytest.raises(RecordError, match=r"nonesuch://a.*'penstock\[cloud\]'"):
        open_sources("nonesuch://a.jsonl")


def test_the_stamp_is_the_same_from_a_listing_and_from_one_file(store, monkeypatch):
    url = put(store, "a.jsonl", b'{"text": "a"}\n')
    info = MemoryFileSystem.info

    def talkative(self, path, **options):
        told = info(self, path, **options)
        return {**told, "ETag": "x", "seen": random.random()} if told["type"] == "file" else told

    monkeypatch.setattr(MemoryFileSystem, "info", talkative)
    assert find_remote(url)[0][2] == "x" == find_remote(url)[0][2]
    monkeypatch.undo()
    (before,) = find_remote(url)
    put(store, "a.jsonl", b'{"text": "b"}\n')
    assert find_remote(url)[0][2] != before[2]
    assert STAMPS[0] == "ETag"
