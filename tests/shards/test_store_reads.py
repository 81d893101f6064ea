"""Ranges of S3 objects: obstore reads what s3fs reads, and s3fs stands in where it cannot."""

import logging
import os

import fsspec
import pytest

from makers.object_store import s3_store
from penstock.core.errors import CorruptionError, StoreError
from penstock.data.stores.store import FastReads, Store

pytest.importorskip("s3fs")
pytest.importorskip("obstore")
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def s3(tmp_path, monkeypatch):
    (tmp_path / "bucket" / "web").mkdir(parents=True)
    (tmp_path / "bucket" / "web" / "a.arrow").write_bytes(CONTENT)
    with s3_store(tmp_path, monkeypatch) as store:
        yield store


@pytest.fixture
def slow(monkeypatch):
    """The requests that s3fs was asked for."""
    asked, whole = [], Store._request

    def request(self, name, begin, end, stamp):
        fast = self._fast
        self._fast = None if fast is None else _Watched(fast, asked)
        try:
            return whole(self, name, begin, end, stamp)
        finally:
            self._fast = fast

    monkeypatch.setattr(Store, "_request", request)
    return asked


class _Watched:
    def __init__(self, fast, asked):
        self._fast, self._asked = fast, asked

    def read(self, path, begin, end, stamp):
        data = self._fast.read(path, begin, end, stamp)
        if data is None:
            self._asked.append((begin, end))
        return data


def test_obstore_reads_the_object_that_was_listed(s3, slow):
    store = Store("s3://bucket/web")
    stamp = store.listing()["a.arrow"].stamp
    assert stamp.startswith('"')
    for given in ("", stamp):
        assert store.read_range("a.arrow", 100, 5000, given) == CONTENT[100:5000]
    assert slow == []
    with pytest.raises(CorruptionError, match="was replaced by another object"):
        store.read_range("a.arrow", 0, 10, '"another"')
    with pytest.raises(StoreError, match="is not in the store"):
        store.read_range("b.arrow", 0, 10)
    assert slow == [(0, 10), (0, 10)], "errors are those of s3fs"


def test_a_request_that_fails_is_made_again_and_a_client_that_keeps_failing_is_given_up(
    s3, slow, caplog
):
    store = Store("s3://bucket/web")
    s3.fail("500")
    assert store.read_range("a.arrow", 0, 10) == CONTENT[:10]
    assert slow == [(0, 10)]
    assert store.read_range("a.arrow", 10, 20) == CONTENT[10:20]
    assert slow == [(0, 10)], "one failure changes nothing"
    store._fast._open = lambda bucket: 1 / 0
    store._fast._stores.clear()
    with caplog.at_level(logging.INFO, "penstock.shards"):
        for begin in range(8):
            assert store.read_range("a.arrow", begin, begin + 1) == CONTENT[begin : begin + 1]
    assert len(slow) == 9
    assert [record.message for record in caplog.records] == [
        (
            "s3://bucket: read by s3fs from now on, because obstore failed: ZeroDivisionError: "
            "division by zero"
        )
    ]


def test_obstore_is_left_alone_where_it_would_be_wrong(s3, slow):
    store = Store("s3://bucket/web")
    store._fast._process = os.getpid() + 1  # as after a fork
    assert store.read_range("a.arrow", 0, 10) == CONTENT[:10]
    assert slow == [(0, 10)]
    assert FastReads.of(fsspec.filesystem("s3", requester_pays=True)) is None
    assert Store("memory://web")._fast is None
