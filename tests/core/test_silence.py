"""A store that does not answer is named in the log, with the seconds, and without the secrets of
its URL.
"""

import logging
import re
import threading

import pytest

from makers.object_store import s3_store
from patience import wait_for
from penstock import open_dataset, write_dataset
from penstock.data.stores import silence
from penstock.data.stores.remote_files import read_range
from penstock.data.stores.store import Store


@pytest.fixture
def store(tmp_path, monkeypatch, caplog):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    write_dataset(tmp_path / "store" / "bucket" / "web", [[1, 2, 3]] * 20)
    caplog.set_level(logging.WARNING, "penstock")
    with s3_store(tmp_path / "store", monkeypatch) as found:
        yield found


@pytest.fixture
def soon(monkeypatch):
    """From then on, silence is said after a fifth of a second."""
    return lambda: monkeypatch.setattr(silence, "SILENCE_SECONDS", 0.2)


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def said(caplog):
    return [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]


def test_who_waits_for_a_document_is_told(store, caplog, soon):
    dataset, fault = open_dataset("s3://bucket/web"), store.fail("slow", 10**9, ".arrow")
    soon()
    thread = in_thread(lambda: dataset[5])
    wait_for(lambda: len(said(caplog)) >= 2)
    line = said(caplog)[0]
    assert re.fullmatch(
        r"waiting for s3://bucket/web/00000.arrow since \d+ s(, and for 1 other request)?: the "
        r"store has not an.*",
        line,
    )
    fault.times = 0
    fault.gate.set()
    thread.join()
    assert dataset[5].tokens.tolist() == [1, 2, 3]
    wait_for(lambda: not silence._watch.runs)
    before = len(said(caplog))
    assert silence.waiting_seconds() == 0
    assert len(said(caplog)) == before


def test_what_is_opened_prepared_and_written(store, caplog, soon, tmp_path):
    soon()
    (tmp_path / "file").write_bytes(b"x" * 100)
    faults = [store.fail("slow", 1, "manifest.json"), store.fail("slow", 1, "lengths.u32")]
    faults.append(store.fail("slow", 1, "new", "PUT"))
    threads = [
        in_thread(lambda: open_dataset("s3://bucket/web")),
        in_thread(lambda: read_range("s3://bucket/web/lengths.u32", 0, 8)),
        in_thread(lambda: Store("s3://bucket/other").write("new", tmp_path / "file")),
    ]
    expected = (
        "waiting for s3://bucket/web/manifest.json",
        "waiting for s3://bucket/web/lengths.u32",
        "waiting to write s3://bucket/other/new",
    )
    wait_for(lambda: all(any(line.startswith(one) for line in said(caplog)) for one in expected))
    for fault in faults:
        fault.times = 0
        fault.gate.set()
    for thread in threads:
        thread.join()


def test_secrets_are_not_said(store, caplog, soon):
    soon()
    host = store.endpoint.removeprefix("http://")
    fault = store.fail("slow", 1, "files.json")
    thread = in_thread(
        lambda: read_range(f"http://user:PASSW0RD@{host}/bucket/web/files.json?token=SECRET", 0, 2)
    )
    wait_for(lambda: said(caplog))
    fault.times = 0
    fault.gate.set()
    thread.join()
    assert f"waiting for http://{host}/bucket/web/files.json since" in said(caplog)[0]
    assert "PASSW0RD" not in caplog.text
    assert "SECRET" not in caplog.text
