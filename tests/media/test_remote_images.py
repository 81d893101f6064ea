"""Images of datasets in stores: rows, states and names are those of a local copy, and each image is
one request.
"""

from itertools import islice

import numpy as np
import pytest

import penstock as ps
from makers.image_data import model_folder, prepare, write_records
from makers.object_store import s3_store
from penstock.core.errors import CorruptionError, StoreError
from penstock.data.shards import copy_dataset

pytest.importorskip("s3fs")
SETTINGS = {"sequence_length": 512, "rows_per_step": 2, "seed": 3}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    prepare(
        write_records(folder / "raw"), model_folder(folder, "qwen2_vl"), folder / "bucket" / "data"
    )
    return folder


@pytest.fixture
def s3(home, monkeypatch):
    with s3_store(home, monkeypatch) as store:
        yield store


def loader(path, **settings):
    return ps.Loader(
        ps.Mixture([ps.Source(path, name="data", shuffle="block")]), **{**SETTINGS, **settings}
    )


def arrays(row):
    media = row.media
    kept = {
        "tokens": row.tokens,
        "slots": media.slots,
        "positions": media.positions,
        **media.arrays,
    }
    return {name: np.array(one) for name, one in kept.items()}, media.digests


def test_rows_states_and_names_are_those_of_a_local_copy(home, s3, tmp_path):
    here, there = loader(home / "bucket" / "data"), loader("s3://bucket/data", cache=tmp_path)
    for mine, theirs in islice(zip(here, there, strict=False), 12):
        for one, other in zip(mine, theirs, strict=True):
            (first, digests), (second, same) = arrays(one), arrays(other)
            assert digests == same
            assert first.keys() == second.keys()
            for name, array in first.items():
                np.testing.assert_array_equal(array, second[name], err_msg=name)
        assert mine.resume_state == theirs.resume_state
    explained = (
        [(one.images, one.text, one.origin) for one in made.explain(2)] for made in (here, there)
    )
    assert next(explained) == next(explained)
    local, remote = (
        ps.open_dataset(home / "bucket" / "data"),
        ps.open_dataset("s3://bucket/data", cache=tmp_path),
    )
    for number in range(8):
        assert [(one.key, one.name, one.read()) for one in remote[number].images] == [
            (one.key, one.name, one.read()) for one in local[number].images
        ]
    assert remote.extras.patches().tolist() == local.extras.patches().tolist()


def test_an_image_is_one_request_and_none_where_its_arrays_are_kept(s3, tmp_path):
    made = loader(
        "s3://bucket/data", cache=tmp_path / "store", image_cache=tmp_path / "arrays", threads=0
    )
    s3.forget()
    images = [image for step in islice(made, 3) for row in step for image in row.media.digests]
    assert 0 < s3.count(".assets") <= len(images)
    again = loader(
        "s3://bucket/data", cache=tmp_path / "store", image_cache=tmp_path / "arrays", threads=0
    )
    s3.forget()
    assert [
        image for step in islice(again, 3) for row in step for image in row.media.digests
    ] == images
    assert s3.count(".assets") == 0


def test_what_is_damaged_replaced_or_gone_is_named(home, tmp_path, monkeypatch):
    with s3_store(tmp_path, monkeypatch) as store:
        copy_dataset(home / "bucket" / "data", "s3://bucket/data")
        [assets] = (tmp_path / "bucket" / "data").glob("*.assets")
        whole = assets.read_bytes()
        url = f"s3://bucket/data/{assets.name}"
        opened = ps.open_dataset("s3://bucket/data", cache=tmp_path / "one")
        assets.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        with pytest.raises(CorruptionError, match=f"{url}: was replaced"):
            [image.read() for one in opened for image in one.images]
        damaged = loader("s3://bucket/data", cache=tmp_path / "two")
        with pytest.raises(CorruptionError, match=f"{url}: the image .* its digest"):
            list(islice(damaged, 40))
        assets.unlink()
        with pytest.raises(StoreError, match=f"{url}: is not in the store"):
            [image.read() for one in opened for image in one.images]
        with pytest.raises(CorruptionError, match=f"{url}: the file is missing"):
            ps.open_dataset("s3://bucket/data", cache=tmp_path / "three")
        assets.write_bytes(whole[:-50])
        with pytest.raises(CorruptionError, match=f"{len(whole) - 50} .*{len(whole)}"):
            ps.open_dataset("s3://bucket/data", cache=tmp_path / "four")
        store.forget()
