"""Copies of datasets between folders and stores: complete, checked, resumed, and never half."""

import os
import shutil

import pytest
from shard_data import make_dataset

from makers.object_store import s3_store
from makers.processes import call_penstock
from penstock import Dataset, open_dataset
from penstock.core.errors import ConfigError, CorruptionError, FormatError, OutputError, StoreError
from penstock.data.shards import copy_dataset, verify


@pytest.fixture
def store(tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.data.stores.store.PAUSE_SECONDS", 0.01)
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    with s3_store(tmp_path / "store", monkeypatch) as found:
        yield found


@pytest.fixture
def local(tmp_path):
    return make_dataset(tmp_path / "web", 1500, documents_per_shard=400)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_there_and_back_again(store, local, tmp_path):
    size = sum(len(content) for content in contents(local.path).values())
    assert copy_dataset(local.path, "s3://bucket/web") == size
    assert contents(store.folder / "bucket" / "web") == contents(local.path)
    puts = [path for method, path, _ in store.log if method == "PUT"]
    assert puts[-1] == "bucket/web/manifest.json"
    assert copy_dataset("s3://bucket/web", tmp_path / "back") == size
    assert contents(tmp_path / "back") == contents(local.path)
    assert copy_dataset("s3://bucket/web", "s3://bucket/other") == size
    assert contents(store.folder / "bucket" / "other") == contents(local.path)
    assert copy_dataset(f"{store.endpoint}/bucket/web", tmp_path / "http") == size
    assert verify(tmp_path / "http").sound
    assert not list((tmp_path / "cache").iterdir())


def test_a_finished_copy_is_not_made_again(store, local):
    copy_dataset(local.path, "s3://bucket/web")
    store.forget()
    assert copy_dataset(local.path, "s3://bucket/web") == 0
    assert store.count(method="PUT") == 0


def test_an_interrupted_copy_goes_on(store, local, tmp_path):
    fault = store.fail("403", 1, "00002.arrow", "PUT")
    with pytest.raises(StoreError, match=r"web/00002.arrow.*PermissionError"):
        copy_dataset(local.path, "s3://bucket/web")
    with pytest.raises(FormatError, match=r"s3://bucket/web.*manifest.json"):
        open_dataset("s3://bucket/web")
    fault.times = 0
    store.faults.clear()
    store.forget()
    copy_dataset(local.path, "s3://bucket/web")
    again = {path for method, path, _ in store.log if method == "PUT" and path.endswith(".arrow")}
    # 00003 may not have begun.
    assert (
        {"bucket/web/00002.arrow"} <= again <= {"bucket/web/00002.arrow", "bucket/web/00003.arrow"}
    )
    assert contents(store.folder / "bucket" / "web") == contents(local.path)
    (tmp_path / "back").mkdir()
    shutil.copy(local.path / "00001.arrow", tmp_path / "back")
    store.forget()
    copy_dataset("s3://bucket/web", tmp_path / "back")
    assert store.count("00001.arrow") == 0
    assert contents(tmp_path / "back") == contents(local.path)


def test_an_object_of_an_interrupted_copy_that_changed_is_copied_again(store, local):
    fault = store.fail("403", 1, "lengths.u32", "PUT")
    with pytest.raises(StoreError, match=r"lengths.u32: the store refuses"):
        copy_dataset(local.path, "s3://bucket/web")
    fault.times = 0
    store.faults.clear()
    (store.folder / "bucket" / "web" / "00000.arrow").write_bytes(bytes(10))
    copy_dataset(local.path, "s3://bucket/web")
    assert contents(store.folder / "bucket" / "web") == contents(local.path)


def test_damage_is_not_copied(store, local, tmp_path):
    data = bytearray((local.path / "00001.arrow").read_bytes())
    data[9999] ^= 4
    (local.path / "00001.arrow").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"web/00001.arrow.*differs.*checksum"):
        copy_dataset(local.path, "s3://bucket/web")
    assert not (store.folder / "bucket" / "web" / "manifest.json").exists()
    os.truncate(local.path / "00001.arrow", 100)
    with pytest.raises(CorruptionError, match=r"00001.arrow: .*100 bytes, expected \d+"):
        copy_dataset(local.path, tmp_path / "copy")


def test_what_cannot_be_copied(store, local, tmp_path):
    with pytest.raises(FormatError, match=r"nothing: not a dataset: no manifest.json"):
        copy_dataset(tmp_path / "nothing", "s3://bucket/web")
    with pytest.raises(ConfigError, match="source and target are the same"):
        copy_dataset(local.path, local.path)
    other = make_dataset(tmp_path / "other", 20)
    with pytest.raises(OutputError, match=r"dataset.*place.*remove"):
        copy_dataset(other.path, local.path)
    assert Dataset.open(local.path) == local


@pytest.mark.parametrize(
    "name", ["tokenizer", "tokenizer/tokenizer.json", "00001.arrow", "manifest.json"]
)
def test_links_are_refused_as_by_opening(local, tmp_path, name):
    """They may lead out of the folder; left out, the copy would lack its tokenizer."""
    (local.path / "tokenizer").mkdir()
    (local.path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "notes").write_text("words")
    (local.path / "notes.txt").symlink_to(tmp_path / "notes")
    copy_dataset(local.path, tmp_path / "copy")  # other files are left out, linked or not
    shutil.move(local.path / name, tmp_path / "elsewhere")
    (local.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptionError, match=rf"web/{name}: is a link.*cp -rL"):
        copy_dataset(local.path, tmp_path / "other")
    assert not (tmp_path / "other" / "manifest.json").exists()


def test_splits_and_the_command_line(store, tmp_path):
    for name in ("train", "validation"):
        make_dataset(tmp_path / "both" / name, 50)
    (tmp_path / "both" / "report.json").write_text("{}")
    found = call_penstock("copy", tmp_path / "both", "s3://bucket/both", "--quiet")
    assert found.output.endswith("B copied to s3://bucket/both\n")
    assert contents(store.folder / "bucket" / "both") == contents(tmp_path / "both")
    assert (
        open_dataset("s3://bucket/both/validation")[3]
        == Dataset.open(tmp_path / "both" / "validation")[3]
    )
