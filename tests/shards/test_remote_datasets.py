"""Datasets in a store: opened in two round trips, read as from a disk; failures name the URL and
give no other data.
"""

import errno
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from shard_data import make_dataset, make_documents

from makers.datasets import unit_record
from makers.object_store import ObjectStore, s3_store
from makers.processes import call_penstock, run_code
from makers.trees import tree_dataset
from penstock import Dataset, open_dataset
from penstock.core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    OutputError,
    PenstockError,
    StoreError,
)
from penstock.core.folders import cache_folder
from penstock.data.shards import JoinedCorpus, verify
from penstock.data.shards.origins import read_origins

URL = "s3://bucket/web"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.data.stores.store.PAUSE_SECONDS", 0.01)
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with the dataset `web` in a bucket."""
    pytest.importorskip("s3fs")
    (tmp_path / "store").mkdir()
    make_dataset(tmp_path / "store" / "bucket" / "web", 2300, documents_per_shard=900)
    with s3_store(tmp_path / "store", monkeypatch) as found:
        yield found


def local_copy(store: ObjectStore) -> Dataset:
    return Dataset.open(store.folder / "bucket" / "web")


def shard_file(store: ObjectStore, number: int = 1) -> Path:
    return store.folder / "bucket" / "web" / f"{number:05}.arrow"


def test_opening_takes_two_round_trips_and_reads_no_shard(store):
    dataset = open_dataset(URL)
    names = [path.rpartition("/")[2] for _, path, _ in store.log]
    assert sorted(names[:2]) == ["bucket", "manifest.json"]
    assert sorted(names[2:]) == ["batches.u64", "files.json", "lengths.u32", "weight_sums.f64"]
    assert all(method == "GET" for method, *_ in store.log)
    assert (dataset.url, dataset.name, len(dataset)) == (URL, "web", 2300)
    assert dataset == local_copy(store)
    assert sum(os.stat(path).st_blocks for path in dataset.path.glob("*.arrow")) == 0
    assert repr(dataset).startswith("Dataset('s3://bucket/web', 2300 documents")


def test_documents_are_those_of_a_local_copy_and_come_once(store):
    local, remote = local_copy(store), open_dataset(URL)
    assert [remote[n] for n in range(0, 2300, 50)] == [local[n] for n in range(0, 2300, 50)]
    assert remote[-3:] == local[-3:]
    assert pickle.loads(pickle.dumps(remote))[700] == local[700]
    before = store.count(".arrow")
    again = open_dataset(URL)
    assert [again[n] for n in range(0, 2300, 50)] == [local[n] for n in range(0, 2300, 50)]
    assert store.count(".arrow") == before
    for mine, theirs in zip(read_origins(remote), read_origins(local), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    store.forget()
    open_dataset(URL)
    assert len(store.log) == 2


def test_one_process_after_another_uses_the_same_copies(store, cache):
    code = "import penstock as ps, sys; print(ps.open_dataset(sys.argv[1])[5].tokens.sum())"
    outputs = [run_code(code, URL, check=True).stdout for _ in range(2)]
    assert outputs[0] == outputs[1] == f"{local_copy(store)[5].tokens.sum()}\n"
    asked = [span for _, path, span in store.log if path.endswith(".arrow")]
    assert len(asked) == len(set(asked))
    assert [folder.name[:4] for folder in cache.iterdir()] == ["web-"]


def test_the_place_of_copies(monkeypatch, tmp_path):
    assert cache_folder("here") == Path("here")
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "penstock"
    with pytest.raises(ConfigError, match=r"s3://a/b.*URL.*remote.*datasets"):
        cache_folder("s3://a/b")


def test_other_stores_and_lists_of_datasets(store, tmp_path):
    local = local_copy(store)
    for url in (f"{store.endpoint}/bucket/web", f"file://{local.path}", "s3://bucket/web/"):
        remote = open_dataset(url)
        assert [remote[n] for n in (0, 1023, 2299)] == [local[n] for n in (0, 1023, 2299)]
        assert remote.loaded_tokenizer is None
    make_dataset(tmp_path / "other", 300, longest=50)
    parts = [tmp_path / "other", URL]
    joined, mixed = open_dataset([tmp_path / "other", local.path]), open_dataset(parts)
    assert isinstance(mixed, JoinedCorpus)
    assert mixed == joined
    assert [mixed[n] for n in (0, 299, 300, 2599)] == [joined[n] for n in (0, 299, 300, 2599)]
    for mine, theirs in zip(read_origins(mixed), read_origins(joined), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(ConfigError, match=r"s3://bucket/web.*given.*corpus"):
        open_dataset([URL, "s3://bucket/web/"])


def test_trees_and_columns(store, tmp_path):
    local, _ = tree_dataset(store.folder / "bucket" / "trees")
    remote = open_dataset("s3://bucket/trees")
    assert [remote[n] for n in range(len(remote))] == [local[n] for n in range(len(local))]
    assert (
        remote.extras.counts(np.arange(len(local))).tolist()
        == local.extras.counts(np.arange(len(local))).tolist()
    )


def test_the_command_line_takes_urls(store):
    shown = call_penstock("inspect", URL, "--json", "--document", "5").output
    assert f'"path": "{URL}"' in shown
    assert "2300" in shown
    found = call_penstock("verify", URL)
    assert found.exit_code == 0
    assert found.output.endswith("sound\n")
    data = bytearray(shard_file(store).read_bytes())
    data[len(data) // 2] ^= 1
    shard_file(store).write_bytes(data)
    report = verify(URL)
    assert not report.sound
    assert report.path == URL
    assert all(fault.file == f"{URL}/00001.arrow" for fault in report.faults)
    shard_file(store).unlink()
    assert [fault.reason for fault in verify(URL).faults]


@pytest.mark.parametrize("kind", ["500", "503", "reset", "cut"])
def test_failures_that_pass_are_healed(store, kind):
    local, faults = (
        local_copy(store),
        [store.fail(kind, 3, ending) for ending in ("lengths.u32", ".arrow")],
    )
    remote = open_dataset(URL)
    assert [remote[n] for n in range(0, 2300, 300)] == [local[n] for n in range(0, 2300, 300)]
    assert [fault.times for fault in faults] == [0, 0]


def test_failures_that_stay_name_the_url(store):
    remote = open_dataset(URL)
    fault = store.fail("500", 10**6, ".arrow")
    with pytest.raises(StoreError, match=r"web/00000.arrow.*read, 5.*InternalErr"):
        remote[0]
    fault.times = 0
    assert remote[0] == local_copy(store)[0]
    store.fail("403", 1, ".arrow")
    with pytest.raises(StoreError, match=r"00001.arrow.*PermissionError: Access"):
        remote[1200]
    store.faults.clear()
    store.fail("403", 1, "manifest.json")
    with pytest.raises(StoreError, match=r"s3://bucket/web/manifest.json.*check"):
        open_dataset(URL)


def test_objects_that_changed_are_refused(store, cache):
    remote = open_dataset(URL)
    assert len(remote[0].tokens)
    kept = shard_file(store).read_bytes()
    changed = bytearray(kept)
    changed[20_000:400_000] = bytes(380_000)
    shard_file(store).write_bytes(changed)
    with pytest.raises(CorruptionError, match=r"s3://bucket/web/00001.arrow"):
        remote[1000]
    with pytest.raises(CorruptionError, match=r"s3://bucket/web/00001.arrow"):
        open_dataset(URL)
    shutil.rmtree(cache)
    # Nobody has seen it before, so only its checksums can tell.
    with pytest.raises(CorruptionError, match=r"s3://bucket/web/00001.arrow.*9\d\d"):
        open_dataset(URL)[1000]
    shard_file(store).write_bytes(kept[:-10])
    with pytest.raises(CorruptionError, match=r"00001.arrow: \d+ bytes, expected \d+"):
        open_dataset(URL)
    shard_file(store).unlink()
    with pytest.raises(CorruptionError, match=r"s3://bucket/web/00001.arrow.*upload"):
        open_dataset(URL)
    with pytest.raises(StoreError, match=r"web/00001.arrow.*FileNotFoundError"):
        remote[1001]


def test_tables_that_changed_are_refused(store):
    lengths = store.folder / "bucket" / "web" / "lengths.u32"
    data = bytearray(lengths.read_bytes())
    data[8] ^= 1
    lengths.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"s3://bucket/web/lengths.u32"):
        open_dataset(URL)


def test_another_dataset_under_the_same_url_is_opened_afresh(store):
    assert len(open_dataset(URL)) == 2300
    shutil.rmtree(store.folder / "bucket" / "web")
    other = make_dataset(store.folder / "bucket" / "web", 500, longest=90)
    remote = open_dataset(URL)
    assert [remote[n] for n in (0, 499)] == [other[n] for n in (0, 499)]


def test_what_is_no_dataset_says_so(store):
    with pytest.raises(FormatError, match="s3://bucket/nothing"):
        open_dataset("s3://bucket/nothing")
    (store.folder / "bucket" / "half").mkdir()
    shutil.copy(shard_file(store), store.folder / "bucket" / "half" / "0.arrow")
    with pytest.raises(FormatError, match=r"s3://bucket/half.*manifest.json"):
        open_dataset("s3://bucket/half")
    shutil.copytree(store.folder / "bucket" / "web", store.folder / "bucket" / "both" / "train")
    with pytest.raises(FormatError, match=r"s3://bucket/both.*s3://bucket/both/train"):
        open_dataset("s3://bucket/both")
    with pytest.raises(PenstockError, match=r"abc://x/y: .*pip.*'penstock\[cloud\]'"):
        open_dataset("abc://x/y")


def test_a_full_disk_names_the_url_and_the_cure(store, monkeypatch):
    remote = open_dataset(URL)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.data.shards.remote.residency.os.pwrite", full)
    with pytest.raises(OutputError, match=r"s3://bucket/web.*cache_byt"):
        remote[0]
    monkeypatch.undo()


def test_after_a_restart_of_the_machine_what_is_here_is_checked(store):
    documents = make_documents(1500)
    from penstock import write_dataset

    write_dataset(store.folder / "bucket" / "plain", documents)
    remote = open_dataset("s3://bucket/plain")
    remote.table.read(0, 1500)
    holder = remote.table.holder
    path, record = Path(holder._shards.paths[0]), unit_record(holder)
    record.header["boot"] = 12345
    run = holder.units.unit(2).fetched[0]
    with open(path, "r+b") as file:
        file.seek(run.begin)
        file.write(bytes(4096))  # pages that had not reached the disk
    del remote, holder, record
    store.forget()
    again = open_dataset("s3://bucket/plain")
    assert np.array_equal(again.table.read(0, 1500).values, np.concatenate(documents))
    spans = [span for _, path, span in store.log if path.endswith(".arrow")]
    assert f"bytes={run.begin}-{run.end - 1}" in spans
    assert len(spans) <= 2


def test_a_killed_process_leaves_nothing_that_counts(store, cache):
    """Killed in the middle of a request, then started again."""
    local, fault = local_copy(store), store.fail("slow", 1, "00001.arrow")
    code = """
        import os, signal, sys, threading, time, penstock as ps
        from makers.datasets import unit_record
        data = ps.open_dataset(sys.argv[1])
        data.table.read(0, 700)
        record = unit_record(data.table.holder)
        threading.Thread(target=lambda: data[1500], daemon=True).start()
        while record.header["begun"][0] == 0:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_code(code, URL).returncode == -9
    fault.times = 0
    fault.gate.set()
    remote = open_dataset(URL)
    holder = remote.table.holder
    present = np.flatnonzero(unit_record(holder).states).tolist()
    assert present
    assert holder.size == sum(holder._shards.size(unit) for unit in present)
    before = store.count(".arrow")
    assert np.array_equal(remote.table.read(0, 512).values, local.table.read(0, 512).values)
    assert store.count(".arrow") == before
    assert remote[1500] == local[1500]
