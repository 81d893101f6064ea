"""What is damaged or removed in the cache of a remote dataset comes again, once; if that does not
help, it is named.
"""

import json
import logging
import shutil

import numpy as np
import pytest

from makers.object_store import s3_store
from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer
from penstock import Loader, Source, open_dataset, prepare
from penstock.core.errors import CorruptionError
from penstock.data.shards.origins import read_origins
from penstock.data.shards.remote.sparse_shards import SparseShards

URL = "s3://bucket/chats"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store's folder with a dataset that has texts, origins, loss weights and a tokenizer."""
    root = tmp_path_factory.mktemp("store")
    tiny_tokenizer(root / "tokenizer", make_texts(200), 340)
    lines = [{"text": text} for text in make_texts(900)]
    (root / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    target = root / "store" / "bucket" / "chats"
    prepare(
        root / "a.jsonl",
        tokenizer=root / "tokenizer",
        output=target,
        keep_text=True,
        progress=False,
        part_bytes=20_000,
    )
    return root / "store"


@pytest.fixture
def store(folder, tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.data.stores.store.PAUSE_SECONDS", 0.01)
    with s3_store(folder, monkeypatch) as found:
        yield found


def facts(dataset):
    """All that can be read of a dataset."""
    files, lines = read_origins(dataset)
    return (
        [(one.tokens.tolist(), one.text, str(one.origin)) for one in dataset[::7]],
        dataset.table.read(0, len(dataset)).values.tolist(),
        dataset.table.lengths[:].tolist(), files.tolist(), lines.tolist(), dataset.files,
        dataset.loaded_tokenizer.encode("water flows down").tolist(),
    )  # fmt: skip


def damage(path, kind):
    size = path.stat().st_size
    if kind == "zeroed":
        path.write_bytes(bytes(size))
    elif kind == "cut":
        with open(path, "r+b") as file:
            file.truncate(size // 2)
    elif kind == "removed":
        path.unlink()
    elif kind == "a folder":
        path.unlink()
        path.mkdir()
    elif kind == "a byte":
        data = bytearray(path.read_bytes() or b"?")
        data[len(data) // 2] ^= 255
        path.write_bytes(data)


def first_shard(dataset):
    return min(dataset.path.glob("*.arrow"))


def cached(tmp_path):
    return sorted(file for file in (tmp_path / "cache").rglob("*") if file.is_file())


KINDS = ["zeroed", "cut", "removed", "a folder", "a byte"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_that_is_damaged_between_two_openings(store, folder, tmp_path, kind):
    expected = facts(open_dataset(folder / "bucket" / "chats"))
    assert facts(open_dataset(URL)) == expected
    names = [str(file.relative_to(tmp_path / "cache")) for file in cached(tmp_path)]
    kinds = {
        "manifest.json",
        "lengths.u32",
        "batches.u64",
        "tokenizer.json",
        "units",
        "sums",
        "store.json",
    }
    assert {name.rpartition("/")[2] for name in names} >= kinds
    for name in names:
        damage(tmp_path / "cache" / name, kind)
        assert facts(open_dataset(URL)) == expected, name
    for name in names:
        if (tmp_path / "cache" / name).is_file():
            damage(tmp_path / "cache" / name, kind)
    assert facts(open_dataset(URL)) == expected
    shutil.rmtree(tmp_path / "cache")
    assert facts(open_dataset(URL)) == expected


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "files.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_small_files_that_are_damaged_after_the_opening(store, folder, name, kind):
    expected = facts(open_dataset(folder / "bucket" / "chats"))
    dataset = open_dataset(URL)
    damage(dataset.path / name, kind)
    assert facts(dataset) == expected


@pytest.mark.parametrize("threads", [0, 2])
def test_shards_that_are_damaged_while_they_are_read(store, folder, caplog, threads):
    source = {"name": "chats", "shuffle": "none"}
    here, there = (
        Loader(
            Source(one, **source), sequence_length=128, rows_per_step=4, threads=threads, prefetch=1
        )
        for one in (folder / "bucket" / "chats", URL)
    )
    dataset = there.datasets[0]
    dataset.table.read(0, len(dataset))
    for shard in dataset.path.glob("*.arrow"):
        with open(shard, "r+b") as file:  # in its place, so that it stays mapped
            file.write(bytes(shard.stat().st_size))
    with caplog.at_level(logging.WARNING):
        for number, (mine, theirs) in enumerate(zip(here, there, strict=False)):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
            if number == 30:
                break
    lines = [
        one.getMessage()
        for one in caplog.records
        if "are damaged, and are fetched again" in one.getMessage()
    ]
    assert len(lines) == 1
    assert str(dataset.path.parents[1]) in lines[0]
    assert facts(open_dataset(URL)) == facts(open_dataset(folder / "bucket" / "chats"))


def test_a_copy_that_cannot_be_healed_names_the_folder(store, folder, monkeypatch):
    """What is written does not reach the file, as on a broken disk."""
    dataset = open_dataset(URL)
    dataset.table.read(0, len(dataset))
    shard = first_shard(dataset)
    with open(shard, "r+b") as file:
        file.write(bytes(shard.stat().st_size))
    monkeypatch.setattr(SparseShards, "write", lambda *_: None)
    with pytest.raises(CorruptionError, match=r"fetched again.*chats-[0-9a-f]+; upload"):
        dataset[0]


def test_a_dataset_that_is_wrong_in_the_store_says_so_and_names_the_cache(store, folder, tmp_path):
    """Its checksums fit its bytes, and only the tokens' own meaning is wrong: nothing that is
    fetched again helps.
    """
    target = folder / "bucket" / "wrong"
    shutil.copytree(folder / "bucket" / "chats", target)
    (target / "files.json").write_text('["a", "b", "c", "d", "e", "f", "g", "h", "i"]')
    with pytest.raises(CorruptionError, match=r"wrong/files.json.*checksum.*wrong-"):
        open_dataset("s3://bucket/wrong")
    shutil.rmtree(target)


def test_units_that_have_no_checksums_of_their_own(store, folder, monkeypatch):
    """Texts and origins are compared with what was fetched, by the next process that reads them."""
    expected = open_dataset(folder / "bucket" / "chats")
    dataset = open_dataset(URL)
    assert [dataset[n] for n in range(0, 900, 50)] == [expected[n] for n in range(0, 900, 50)]
    line = dataset.table.batches[0]
    place = (
        int(line["checksum_offsets"]) - 100
    )  # among the lines of origins, before the checksums' offsets
    with open(first_shard(dataset), "r+b") as file:
        file.seek(place)
        file.write(b"\x55" * 100)
    again = open_dataset(URL)
    assert [again[n] for n in range(0, 900, 50)] == [expected[n] for n in range(0, 900, 50)]


def test_the_warm_path_makes_no_requests(store):
    facts(open_dataset(URL))
    store.forget()
    dataset = open_dataset(URL)
    assert len(store.log) == 2
    facts(dataset)
    assert len(store.log) == 2
