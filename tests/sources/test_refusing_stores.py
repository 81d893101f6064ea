"""A store that cannot be reached, or refuses, is named as that."""

import socket

import pytest

from makers.web_server import serving
from penstock.core.errors import RecordError
from penstock.data.sources import open_sources


@pytest.fixture
def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_refused_connection_is_no_missing_file(closed_port, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    due = (
        r"a.jsonl: the store cannot be read: \w*Connect\w*: .*check the address, the credentials "
        r"and the network"
    )
    with pytest.raises(RecordError, match=due):
        open_sources(f"http://127.0.0.1:{closed_port}/a.jsonl")


@pytest.mark.parametrize(
    ("status", "due"),
    [
        (401, "the store cannot be read: ClientResponseError: 401"),
        (403, "the store cannot be read: ClientResponseError: 403"),
        (503, "the store cannot be read: ClientResponseError: 503"),
        (404, "no such file, and no file matches it"),
    ],
)
def test_what_a_web_server_says(status, due):
    with serving(lambda _: (status, {}, b"")) as url, pytest.raises(RecordError, match=due):
        open_sources(f"{url}/a.jsonl")


def test_an_s3_store_that_is_not_there(closed_port, monkeypatch):
    s3fs = pytest.importorskip("s3fs")
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{closed_port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(RecordError, match=r"^s3://bucket/a.jsonl: .*[Cc]onnect"):
            open_sources("s3://bucket/a.jsonl")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("cause", "due"),
    [
        (ConnectionRefusedError("refused"), "the store cannot be read: ConnectionRefusedError"),
        (TimeoutError("too slow"), "the store cannot be read: TimeoutError"),
        (PermissionError("no key"), "the store cannot be read: PermissionError"),
        (FileNotFoundError("not there"), "no such file"),
        (ValueError("a library's own words"), "no such file"),
    ],
)
def test_the_cause_behind_a_missing_file(monkeypatch, cause, due):
    from fsspec.implementations.memory import MemoryFileSystem

    def fail(*_, **__):
        raise FileNotFoundError("a.jsonl") from cause

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    with pytest.raises(RecordError, match=due):
        open_sources("memory://a.jsonl")
