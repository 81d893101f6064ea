"""A store that cannot be reached, or refuses, is named as that."""

import os
import socket

import pytest

from makers.processes import run_code
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


def test_a_name_that_the_hub_has_not_is_one_sentence():
    """The Hub answers 401 for what is not there, which is no refusal of credentials, and no reason
    to ask five times.
    """
    asked, online = [], {"HF_HUB_OFFLINE": "0"}

    def answer(handler):
        asked.append(handler.path)
        return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}, b""

    with serving(answer) as url:
        done = run_code(
            """
            import penstock as ps
            from penstock.data.sources import open_sources
            for use in (
                lambda: ps.Loader("hf://datasets/no/none", sequence_length=16, rows_per_step=2),
                lambda: open_sources("hf://datasets/no/none"),
            ):
                try:
                    use()
                except ps.PenstockError as error:
                    print(error)
            """,
            env={**os.environ, "HF_ENDPOINT": url, "NO_PROXY": "127.0.0.1", **online},
        )
    said = done.stdout.splitlines()
    assert len(said) == 2, (done.stdout, done.stderr)
    for line in said:
        assert "the hub has nothing by that name, or it is private" in line
        assert "Request ID" not in line
        assert "Error" not in line
    assert len(asked) <= 8
