"""From a server on this machine that counts what it sends: a preparation requests each byte of its
input once.
"""

import errno
import gzip
import json
import os
import random
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from makers.datasets import prepare_here
from penstock.core.errors import RecordError
from penstock.data.sources import lines, open_sources, read_texts
from penstock.data.stores.copies import BEGINNING, GRANULE, Copied, Copies

PIECE = 1 << 16
"""Bytes of a request in these tests, so that small files take many."""


class CountingServer(ThreadingHTTPServer):
    """Serves `files` and counts, for each of their bytes, how often it was sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.sent, self.has_ranges = {}, {}, True

    def put(self, name, content):
        self.files[name], self.sent[name] = content, np.zeros(len(content), np.int64)
        return f"http://127.0.0.1:{self.server_port}/{name}"

    @property
    def most(self):
        """How often the byte was sent that was sent most often."""
        return max(int(counts.max()) for counts in self.sent.values())

    @property
    def share(self):
        """Bytes sent over bytes of all files."""
        return sum(int(counts.sum()) for counts in self.sent.values()) / sum(
            map(len, self.files.values())
        )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name = self.path.lstrip("/")
        content = self.server.files[name]
        begin, end = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.server.has_ranges:
            begin, end = int(asked[1]), min(int(asked[2] or end) + 1, end)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes" if self.server.has_ranges else "none")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "GET":
            self.server.sent[name][begin:end] += 1
            self.wfile.write(content[begin:end])

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with CountingServer() as counting:
        threading.Thread(target=counting.serve_forever, daemon=True).start()
        yield counting
        counting.shutdown()


def records(count, seed=0):
    noise = random.Random(seed)
    return [
        {"text": f"{number} " + noise.randbytes(noise.randrange(200)).hex()}
        for number in range(count)
    ]


def json_lines(count, seed=0):
    return "".join(json.dumps(record) + "\n" for record in records(count, seed)).encode()


def parquet(folder, count):
    rows = pa.Table.from_pylist(records(count))
    pq.write_table(
        rows.append_column("bulk", pa.array([b"x" * 99] * count)),
        folder / "a.parquet",
        row_group_size=500,
    )
    return (folder / "a.parquet").read_bytes()


def corpus(kind, folder):
    """Name → content of some files of one kind."""
    if kind == "parquet":
        return {"a.parquet": parquet(folder, 6000)}
    packs = {
        "jsonl": bytes,
        "gz": gzip.compress,
        "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    }
    ending, pack = "" if kind == "jsonl" else f".{kind}", packs[kind]
    return {
        f"{number}.jsonl{ending}": pack(json_lines(2000 + 3000 * number, number))
        for number in range(3)
    }


KINDS = ("jsonl", "gz", "zst", "parquet")


@pytest.mark.parametrize(
    ("kind", "on_error", "processes"),
    [
        *product(KINDS, ("stop", "skip"), (1,)),
        *zip(KINDS, ("stop", "skip") * 2, (2,) * 4, strict=True),
    ],
)
def test_each_byte_is_sent_once(
    tmp_path, server, tokenizer, monkeypatch, kind, on_error, processes
):
    monkeypatch.setattr(lines, "REMOTE_BLOCK_BYTES", PIECE)
    files = corpus(kind, tmp_path)
    urls = [server.put(name, content) for name, content in files.items()]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    options = {"part_bytes": 200_000, "on_error": on_error}
    local = prepare_here(
        [tmp_path / name for name in files], tokenizer, tmp_path / "local", processes=1, **options
    )
    remote = prepare_here(urls, tokenizer, tmp_path / "remote", processes=processes, **options)
    assert remote.splits[""].fingerprint == local.splits[""].fingerprint
    assert local.parts > len(files) or kind in ("gz", "zst")
    assert (server.most, server.share <= 1) == (1, True)
    assert not list((tmp_path / "remote").rglob("*.data"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_conversations_are_sent_once(tmp_path, server, chat_tokenizer, name):
    chats = [
        {
            "messages": [
                {"role": "user", "content": one["text"]},
                {"role": "assistant", "content": "so"},
            ]
        }
        for one in records(4000)
    ]
    content = (
        json.dumps(chats)
        if name == "a.json"
        else "".join(json.dumps(chat) + "\n" for chat in chats)
    )
    options = {"template": "chatml", "part_bytes": 200_000}
    report = prepare_here(
        server.put(name, content.encode()), chat_tokenizer, tmp_path / "out", **options
    )
    assert (report.documents, report.parts > 3) == (4000, True)
    assert (server.most, server.share) == (1, 1)


def test_only_the_columns_of_parquet_are_sent(tmp_path, server, tokenizer):
    noise = random.Random(1)
    bulk = pa.table(
        {"text": [str(n) for n in range(9000)], "bulk": [noise.randbytes(400) for _ in range(9000)]}
    )
    pq.write_table(
        bulk, tmp_path / "a.parquet", row_group_size=3000, compression="none", use_dictionary=False
    )
    url = server.put("a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert prepare_here(url, tokenizer, tmp_path / "out", part_bytes=1000).documents == 9000
    assert server.most == 1
    assert server.share < 0.1


def test_reading_texts_in_order_requests_ranges_once(server):
    content = json_lines(3000) + b"{broken\n" + json_lines(3000)
    parts = open_sources(server.put("a.jsonl", content), part_bytes=100_000)
    rejects = []
    texts = list(read_texts(parts, skip=rejects.append))
    assert (len(parts) > 5, len(texts), [reject.line for reject in rejects]) == (True, 6000, [3001])
    assert (server.most, server.share) == (1, 1)
    assert list(read_texts(parts[1:3])) == [
        text for part in parts[1:3] for block in part.blocks() for text in block.texts.to_pylist()
    ]


def test_a_server_that_sends_only_whole_files(tmp_path, server, tokenizer):
    server.has_ranges = False
    files = {"a.jsonl": json_lines(900), "b.jsonl.gz": gzip.compress(json_lines(900, 1))}
    urls = [server.put(name, content) for name, content in files.items()]
    assert prepare_here(urls, tokenizer, tmp_path / "out").documents == 1800


def test_without_room_for_copies_bytes_are_sent_again(
    tmp_path, server, tokenizer, monkeypatch, capsys
):
    content = json_lines(4000)
    (tmp_path / "a.jsonl").write_bytes(content)
    local = prepare_here(tmp_path / "a.jsonl", tokenizer, tmp_path / "local", part_bytes=100_000)

    def full(*_):
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(os, "pwrite", full)
    url = server.put("a.jsonl", content)
    remote = prepare_here(url, tokenizer, tmp_path / "remote", part_bytes=100_000)
    monkeypatch.undo()
    free = shutil.disk_usage(tmp_path)._replace(free=len(content) // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    again = prepare_here(url, tokenizer, tmp_path / "again", part_bytes=100_000, progress=True)
    assert "reading remote files more than once: " in capsys.readouterr().err
    assert {report.splits[""].fingerprint for report in (local, remote, again)} == {
        local.splits[""].fingerprint
    }
    assert server.share > 4


def test_copies_of_a_killed_run_are_not_used(tmp_path, server, tokenizer):
    url = server.put("a.jsonl", json_lines(4000))
    expected = prepare_here(url, tokenizer, tmp_path / "first")
    (file,) = open_sources(url)[0].sources
    folder = tmp_path / "out" / ".prepare" / "remote"
    folder.mkdir(parents=True)
    name = Copied(file.path, file.size_bytes, file.version, Copies()).name
    (folder / f"{name}.data").write_bytes(
        bytes(file.size_bytes)
    )  # a power cut may lose what was written
    (folder / f"{name}.there").write_bytes(b"\1" * (file.size_bytes // GRANULE + 1))
    found = prepare_here(url, tokenizer, tmp_path / "out")
    assert found.splits[""].fingerprint == expected.splits[""].fingerprint


def test_nothing_is_left_after_a_failure(tmp_path, server, tokenizer):
    url = server.put("a.jsonl", json_lines(4000) + b"{broken\n")
    with pytest.raises(RecordError, match=r"a.jsonl:4001: "):
        prepare_here(url, tokenizer, tmp_path / "out", part_bytes=100_000)
    assert not (tmp_path / "out" / ".prepare" / "remote").exists()


@pytest.mark.parametrize("on_disk", [False, True])
def test_copies_give_the_bytes_of_the_file(tmp_path, server, on_disk):
    content = random.Random(3).randbytes(20 * GRANULE + 77)
    copies, noise = Copies(), random.Random(4)
    file = Copied(server.put("a.jsonl", content), len(content), "1", copies)
    for step in range(200):
        if on_disk and step == 5:
            copies.move_to(tmp_path / "copies")
        begin = noise.randrange(len(content))
        amount = noise.randrange(min(len(content) - begin, 5 * GRANULE) + 1)
        assert (
            copies.read(file, begin, amount, noise.choice([0, 4 * GRANULE]))
            == content[begin : begin + amount]
        )
    assert (server.most, server.share) == (1, 1)
    copies.forget(file.name)
    assert file.read(0, len(content)) == content
    assert server.most == (2 if on_disk else 1)
    assert server.sent["a.jsonl"][: BEGINNING * GRANULE].max() == 1
