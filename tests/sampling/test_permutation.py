"""The cipher shuffle: a bijection that looks random, and always the same one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.randomness import MULTIPLIER_1, MULTIPLIER_2, key_for, mix, mix_array
from penstock.plan.sampling import Permutation
from penstock.plan.sampling._kernels import block_window
from penstock.plan.sampling.order import mixed_with

MASK = (1 << 64) - 1


def slow_mix(key: int, value: int) -> int:
    z = (key + (value + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * int(MULTIPLIER_1)) & MASK
    z = ((z ^ (z >> 27)) * int(MULTIPLIER_2)) & MASK
    return z ^ (z >> 31)


def slow_permute(index: int, size: int, key: int) -> int:
    """The cipher in Python integers, written from its description."""
    bits = max(1, (size - 1).bit_length())
    low_bits = bits // 2
    masks = ((1 << low_bits) - 1, (1 << (bits - low_bits)) - 1)
    while True:
        low, high = index & masks[0], index >> low_bits
        for number in range(6):
            round_key = slow_mix(key, number)
            value = ((low if number % 2 == 0 else high) ^ round_key) * 0x9E3779B97F4A7C15 & MASK
            value = ((value ^ (value >> 32)) * 0xD6E8FEB86659FD93 & MASK) >> 32
            if number % 2 == 0:
                high ^= value & masks[1]
            else:
                low ^= value & masks[0]
        index = high << low_bits | low
        if index < size:
            return index


@settings(deadline=None)
@given(st.integers(0, MASK), st.integers(0, MASK))
def test_mix_equals_its_twin(key, value):
    assert int(mix(np.uint64(key), np.uint64(value))) == slow_mix(key, value)
    assert int(mix_array(np.uint64(key), np.array([value], np.uint64))[0]) == slow_mix(key, value)


@settings(deadline=None, max_examples=60)
@given(st.integers(257, 5000), st.integers(0, MASK))
def test_cipher_equals_its_twin(size, key):
    got = Permutation(size=size, key=key).images(0, 40)
    assert got.tolist() == [slow_permute(i, size, key) for i in range(40)]


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 3000),
    st.integers(0, MASK),
    st.sampled_from(["full", "block", "none"]),
    st.integers(1, 9),
)
def test_every_element_once(size, key, shuffle, runs):
    images = Permutation(size=size, key=key, shuffle=shuffle, shuffle_runs=runs).images()
    assert np.array_equal(np.sort(images), np.arange(size))


def slow_block_order(size: int, key: int, runs: int) -> list[int]:
    """Block shuffle written from its description: windows one after another, then where their runs
    lie.
    """
    images, start, sizes, whole = [], 0, [1], size // 256
    while start < size:
        here = min(256 * sizes[-1], size - start)
        window_key = slow_mix(key, start // 256)
        mixed = [start + slow_permute(i, here, window_key) for i in range(here)]
        for place in mixed:
            block = place // 256
            block = slow_permute(block, whole, key) if block < whole else block
            images.append(block * 256 + place % 256)
        start += here
        sizes.append(min(2 * sizes[-1], runs))
    return images


@settings(deadline=None, max_examples=12)
@given(st.integers(257, 6000), st.integers(0, MASK), st.integers(1, 9))
def test_block_shuffle_equals_its_twin(size, key, runs):
    permutation = Permutation(size=size, key=key, shuffle="block", shuffle_runs=runs)
    assert permutation.images().tolist() == slow_block_order(size, key, runs)


def test_the_first_documents_of_block_shuffle_come_from_few_runs():
    images = Permutation(size=1_000_000, key=5, shuffle="block").images(0, 256 * 1023)
    seen = [len(np.unique(images[:count] // 256)) for count in (256, 265, 768, 1792)]
    assert seen[0] == 1
    assert seen[1] <= 3
    assert seen[2:] == [3, 7]
    # The window after 1, 2, … 256 runs has 512, and those after it, too.
    assert len(np.unique(images[256 * 511 :] // 256)) <= 513


def test_a_range_is_a_part_of_the_whole():
    permutation = Permutation(size=200_000, key=3, shuffle="block")
    assert np.array_equal(
        permutation.images(131_000, 131_100), permutation.images()[131_000:131_100]
    )


@pytest.mark.parametrize("size", [1_000_000, 999_983])
def test_the_order_looks_random(size):
    images = Permutation(size=size, key=key_for(1, "test")).images()
    assert np.count_nonzero(np.diff(images) == 1) <= 10
    same_parity = np.mean((images[1:] ^ images[:-1]) & 1 == 0)
    assert abs(same_parity - 0.5) < 0.005
    windows = images[: size // 512 * 512].reshape(-1, 512)
    for marked in (windows & 1, windows >= size // 2, windows % 7 == 0):
        share = marked.mean()
        ideal = np.sqrt(share * (1 - share) / 512)
        assert 0.9 < marked.mean(axis=1).std() / ideal < 1.1


def test_small_sizes_reach_many_orders():
    orders = {tuple(Permutation(size=4, key=key).images()) for key in range(400)}
    assert len(orders) == 24


def test_block_shuffle_keeps_blocks_and_mixes_windows():
    images = Permutation(size=300_000, key=9, shuffle="block").images()
    window = images[256 * 511 : 256 * 1023]
    assert len(np.unique(window // 256)) <= 513
    assert (
        np.mean([len(np.unique(part // 256)) for part in window[: 265 * 400].reshape(400, 265)])
        > 190
    )
    assert np.mean(np.diff(images) == 1) < 0.001


def test_golden_order():
    """The order is part of the format: a change here breaks every saved run."""
    assert Permutation(size=1000, key=key_for(7, "golden")).images(0, 8).tolist() == GOLDEN
    assert Permutation(size=5, key=key_for(7, "golden")).images().tolist() == GOLDEN_SMALL


GOLDEN = [619, 386, 453, 474, 229, 498, 675, 772]
GOLDEN_SMALL = [3, 0, 1, 4, 2]


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        Permutation(size=0, key=1)
    with pytest.raises(ConfigError, match=r"shuffle.*block.*'random'"):
        Permutation(size=5, key=1, shuffle="random")
    with pytest.raises(ConfigError, match=r"shuffle_runs.*1.*1,048,576, got 0"):
        Permutation(size=5, key=1, shuffle="block", shuffle_runs=0)
    with pytest.raises(IndexError, match="not inside"):
        Permutation(size=5, key=1).images(3, 9)


@settings(deadline=None)
@given(st.integers(257, 60_000), st.integers(1, 70), st.data())
def test_documents_are_mixed_with_those_of_their_window(size, runs, data):
    index = data.draw(st.integers(0, size - 1))
    begin, end = mixed_with(index, size, "block", runs)
    first, blocks = block_window(index // 256, runs)
    assert (begin, end) == (256 * first, min(256 * (first + blocks), size))
    # Together they are whole runs, but for what is left at the end.
    images = Permutation(size=size, key=7, shuffle="block", shuffle_runs=runs).images(begin, end)
    counts = np.bincount(images // 256)
    assert (counts[: size // 256][counts[: size // 256] > 0] == 256).all()
    assert mixed_with(index, size, "full") == (0, size)
    assert mixed_with(index, size, "none") == (index, index + 1)
    assert mixed_with(3, 200, "block", runs) == (0, 200)
