"""Philox against the published vectors, and against its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.compiled import kernel
from penstock.core.randomness import below, philox, philox_rounds


@kernel
def _rounds(counter, key):
    return philox_rounds(counter[0], counter[1], counter[2], counter[3], key[0], key[1])


@kernel
def _philox(block, purpose, key):
    return philox(block, purpose, key)


@kernel
def _below(word, bound):
    return below(word, bound)


def slow_philox(counter, key):
    """The definition of the paper, on Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high1, low1 = divmod(c0 * 0xD2511F53, 1 << 32)
        high2, low2 = divmod(c2 * 0xCD9E8D57, 1 << 32)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high1 ^ c3 ^ k1, low1
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


# Random123's kat_vectors, philox4x32 10 rounds.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_published_vectors(counter, key, words):
    assert slow_philox(counter, key) == words
    assert _rounds(np.array(counter, np.uint64), np.array(key, np.uint64)) == words


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_counter_and_key_are_where_they_are_said_to_be(block, purpose, key):
    due = slow_philox((block, purpose, 0, 0), (key % 2**32, key >> 32))
    assert _philox(np.uint64(block), np.uint64(purpose), np.uint64(key)) == due


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 2**32))
def test_below_is_a_multiplication(word, bound):
    assert _below(np.uint64(word), np.uint64(bound)) == word * bound >> 32
