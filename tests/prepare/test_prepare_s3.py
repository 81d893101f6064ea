"""From an S3 store, a server on this machine, prepare gives what it gives from files; killed, it
goes on.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_cases import contents, slowly

from makers.datasets import prepare_here
from makers.processes import child_environment
from patience import wait_for
from penstock import Dataset, load_tokenizer
from penstock.core.errors import RecordError
from penstock.data.sources import open_sources

BUCKET = "s3://penstock-tests"


@pytest.fixture(scope="module")
def server():
    """URL of an S3 server; the environment says where it is, as a user's would."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    patch = pytest.MonkeyPatch()
    use(patch, f"http://{host}:{port}")
    s3fs.S3FileSystem.clear_instance_cache()  # another module's, or an earlier server of this one
    # The buckets of an earlier server of this process are still there: modules may be run in two
    # parts.
    s3fs.S3FileSystem().makedirs(BUCKET, exist_ok=True)
    yield f"http://{host}:{port}"
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()
    patch.undo()


def use(patch, url):
    """Make `url` the store of this process and of its children, with one attempt a request."""
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        patch.setenv(name, value)


@pytest.fixture
def bucket(server, corpus, request):
    """The corpus as JSONL, as .jsonl.zst and as Parquet, on the disk and in the store; (folder,
    URL).
    """
    import s3fs

    for path in sorted(corpus.glob("*.jsonl")):
        (corpus / f"{path.name}.zst").write_bytes(
            pa.compress(path.read_bytes(), "zstd", asbytes=True)
        )
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        pq.write_table(
            pa.Table.from_pylist(rows), corpus / f"{path.stem}.parquet", row_group_size=200
        )
    (corpus / ".hidden.jsonl").write_text("not JSON")
    url = f"{BUCKET}/{request.node.name}"
    store = s3fs.S3FileSystem()
    store.put(f"{corpus}/*", f"{url}/")
    store.put(f"{corpus}/.hidden.jsonl", f"{url}/.hidden.jsonl")
    store.pipe(f"{url}/", b"")  # what consoles put for an empty folder
    return corpus, url


prepare_parts = partial(prepare_here, part_bytes=12_000, processes=None)


@pytest.mark.parametrize(
    "files", ["", "/*.jsonl", "/*.zst", "/*.parquet", "/2.jsonl", "/**/0*", "/1.parquet"]
)
def test_the_same_dataset_as_from_local_files(tmp_path, bucket, tokenizer, files):
    folder, url = bucket
    local = prepare_parts(f"{folder}{files}", tokenizer, tmp_path / "local", processes=1)
    remote = prepare_parts(f"{url}{files}", tokenizer, tmp_path / "remote", processes=1)
    assert remote.splits[""].fingerprint == local.splits[""].fingerprint
    assert (remote.documents, remote.tokens, remote.parts) == (
        local.documents,
        local.tokens,
        local.parts,
    )
    assert remote.raw_bytes == local.raw_bytes
    origins = [
        [
            (Path(document.origin.file).name, document.origin.line)
            for document in Dataset.open(tmp_path / name)
        ]
        for name in ("local", "remote")
    ]
    assert origins[0] == origins[1]


def test_parquet_asks_for_the_columns_of_its_row_groups_only(bucket, tmp_path, monkeypatch):
    import s3fs

    rows = pa.table(
        {"text": [str(n) for n in range(3000)], "bulk": [os.urandom(200) for _ in range(3000)]}
    )
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=1000)
    s3fs.S3FileSystem().put(str(tmp_path / "a.parquet"), f"{bucket[1]}/wide.parquet")
    asked = []
    fetch = s3fs.core.S3File._fetch_range

    def watched(self, start, end):
        asked.append(end - start)
        return fetch(self, start, end)

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", watched)
    part = open_sources(f"{bucket[1]}/wide.parquet", part_bytes=1000)[1]
    assert [text for block in part.blocks() for text in block.texts.to_pylist()] == [
        str(n) for n in range(1000, 2000)
    ]
    assert 0 < sum(asked) < (tmp_path / "a.parquet").stat().st_size / 4


def test_a_file_that_another_program_replaces_is_another_input(bucket):
    import s3fs

    def versions(spec):
        return [
            file.version for part in open_sources(f"{bucket[1]}/{spec}") for file in part.sources
        ]

    before = versions("*.jsonl")
    assert versions("0.jsonl") == before[:1]
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    other.pipe(
        f"{bucket[1]}/0.jsonl", other.cat(f"{bucket[1]}/0.jsonl").replace(b"water", b"wheel")
    )
    after = versions("*.jsonl")
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_what_is_not_there_or_goes_away_is_named(tmp_path, bucket, tokenizer):
    import s3fs

    _, url = bucket
    for missing in (f"{url}/absent.jsonl", f"{url}/absent*.jsonl", "s3://no-such-bucket/a.jsonl"):
        with pytest.raises(RecordError, match=r"^s3://\S+: no such file"):
            prepare_parts(missing, tokenizer, tmp_path / "out")

    gone = []

    def vanish(record):
        if not gone:
            gone.append(s3fs.S3FileSystem().rm(f"{url}/2.jsonl"))
        return record

    with pytest.raises(RecordError, match=r"input changed.*s3://.*2.jsonl is gone"):
        prepare_parts(
            f"{url}/*.jsonl",
            tokenizer,
            tmp_path / "out",
            processes=1,
            transform=vanish,
            on_error="skip",
        )


@pytest.mark.parametrize(
    ("status", "due"), [(403, "PermissionError"), (503, "OSError|ServiceUnavailable|SlowDown")]
)
def test_a_server_that_refuses_is_named(tmp_path, tokenizer, monkeypatch, status, due):
    s3fs = pytest.importorskip("s3fs")

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        use(monkeypatch, f"http://127.0.0.1:{refusing.server_port}")
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        try:
            with pytest.raises(
                RecordError,
                match=rf"^{BUCKET}/a.jsonl: .*({due}).*cred",
            ):
                prepare_parts(f"{BUCKET}/a.jsonl", tokenizer, tmp_path / "out")
        finally:
            refusing.shutdown()
            s3fs.S3FileSystem.clear_instance_cache()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_while_it_reads_from_the_store_it_goes_on(tmp_path, bucket, tokenizer):
    _, url = bucket
    tokenizer.save(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")  # the manifest has its name
    words = [
        "-t",
        tmp_path / "tokenizer",
        "-o",
        tmp_path / "out",
        "--part-bytes",
        12_000,
        "--processes",
        2,
    ]
    command = [sys.executable, "-m", "penstock", "prepare", f"{url}/*.jsonl", *map(str, words)]
    command += ["--transform", "prepare_cases:slowly"]
    environment = child_environment(STOP_AT=f"{tmp_path / 'out'}:3")
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list((tmp_path / "out/.prepare").glob("part-*.json"))) >= 3, child)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    report = prepare_parts(
        f"{url}/*.jsonl", tokenizer, tmp_path / "out", processes=1, transform=slowly
    )
    assert 3 <= report.parts_resumed < report.parts
    prepare_parts(f"{url}/*.jsonl", tokenizer, tmp_path / "whole", processes=1, transform=slowly)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
