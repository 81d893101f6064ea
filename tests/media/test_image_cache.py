"""The cache of processed images loses nothing, notices damage, and keeps its budget."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import penstock as ps
from makers.image_data import model_folder, prepare, write_records
from penstock.core.errors import ConfigError
from penstock.plan.loader.image_cache import ImageCache

floats = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, float("nan"), float("inf")]),
    st.just(1.5),
)


@settings(max_examples=60, deadline=None)
@given(
    few=arrays(np.float32, st.tuples(st.integers(0, 40), st.integers(1, 30)), elements=floats),
    whole=arrays(np.int64, st.tuples(st.integers(0, 5), st.just(3))),
    mask=arrays(np.bool_, st.integers(0, 9)),
)
def test_arrays_come_back_bit_for_bit(tmp_path_factory, few, whole, mask):
    folder = tmp_path_factory.mktemp("bits")
    made = {"pixel_values": few, "image_grid_thw": whole, "mask": mask}
    for _ in range(2):
        found = ImageCache(folder, "k").get(b"digest", lambda: made)
        assert found.keys() == made.keys()
        for name, array in made.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tobytes() == array.tobytes()
            assert found[name].flags.writeable


@pytest.mark.parametrize("values", [200, 700, 5000, 100_000])
def test_few_values_take_fewer_bytes(tmp_path, values):
    pixels = np.random.default_rng(0).standard_normal(values).astype(np.float32)
    array = np.random.default_rng(1).choice(pixels, (300, 400))
    cache = ImageCache(tmp_path, "k")
    cache.get(b"a", lambda: {"pixel_values": array})
    [entry] = tmp_path.glob("??/*")
    bytes_each = entry.stat().st_size / array.size
    assert bytes_each < {200: 1.1, 700: 2.1, 5000: 2.3, 100_000: 4.1}[values]
    again = cache.get(b"a", lambda: pytest.fail("it is there"))
    np.testing.assert_array_equal(again["pixel_values"], array)
    assert (cache.hits, cache.misses) == (1, 1)


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-5], lambda data: data[:10], lambda data: data[:40] + b"\1" + data[41:]],
)
def test_a_damaged_entry_is_made_again(tmp_path, damage):
    cache, made = ImageCache(tmp_path, "k"), {"a": np.arange(100, dtype=np.float32) % 7}
    cache.get(b"a", lambda: made)
    [entry] = tmp_path.glob("??/*")
    entry.write_bytes(damage(entry.read_bytes()))
    np.testing.assert_array_equal(cache.get(b"a", lambda: made)["a"], made["a"])
    assert cache.misses == 2
    np.testing.assert_array_equal(
        cache.get(b"a", lambda: pytest.fail("it was made again"))["a"], made["a"]
    )


def test_other_settings_are_other_entries(tmp_path):
    first, second = ImageCache(tmp_path, "one"), ImageCache(tmp_path, "two")
    first.get(b"a", lambda: {"x": np.zeros(1)})
    assert second.get(b"a", lambda: {"x": np.ones(1)})["x"] == 1


def test_the_budget_is_kept_and_the_least_used_goes(tmp_path):
    array = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    cache = ImageCache(tmp_path, "k", 50_000)
    for number in range(40):
        cache.get(bytes([number]), lambda: {"x": array})
        os.utime(cache._path(bytes([number])), (number, number))
    size = sum(path.stat().st_size for path in tmp_path.glob("??/*"))
    assert 20_000 < size <= 50_000
    assert cache._path(bytes([39])).exists()
    assert not cache._path(bytes([0])).exists()
    assert ImageCache(tmp_path, "k", 50_000)._size == size


def test_threads_may_share_it(tmp_path):
    cache = ImageCache(tmp_path, "k", 30_000)

    def use(seed):
        for number in np.random.default_rng(seed).integers(0, 20, 200).tolist():
            found = cache.get(
                bytes([number]), lambda number=number: {"x": np.full(500, number, np.float32)}
            )
            assert (found["x"] == number).all()

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.hits + cache.misses == 800


def test_rows_are_the_same_with_a_cache(tmp_path):
    source = write_records(tmp_path / "raw", 12)
    prepare(source, model_folder(tmp_path, "qwen2_vl"), tmp_path / "data")

    def rows(**more):
        loader = ps.Loader(
            ps.Source(tmp_path / "data", max_epochs=1), sequence_length=256, rows_per_step=2, **more
        )
        return [row for step in loader for row in step], loader

    plain, _ = rows()
    for _ in range(2):
        cached, loader = rows(image_cache=tmp_path / "cache", threads=2)
        for left, right in zip(plain, cached, strict=True):
            for name, array in left.media.arrays.items():
                np.testing.assert_array_equal(array, right.media.arrays[name])
    [cache] = {id(one): one for one in loader._extras.media._caches}.values()
    assert cache.misses == 0
    assert cache.hits == sum(len(row.media) for row in plain)


def test_a_budget_below_one_byte_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="budget"):
        ImageCache(tmp_path, "k", 0)
