"""Vector loops against NumPy: any place, any length, any pair of dtypes; nothing else is
touched.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.errors import TypingError

from penstock.core.compiled import address_of, kernel
from penstock.core.vectors import (
    CACHE_LINE,
    copy_ahead,
    copy_into,
    copy_line,
    count_ahead,
    count_up,
    dot_words,
    fill_ahead,
    fill_with,
    find_bytes,
    largest_u16,
    largest_u32,
)

Array = np.ndarray[Any, Any]
SIZE = 200
PAIRS = [
    "uint16 int32",
    "uint16 int64",
    "uint32 int32",
    "uint32 int64",
    "int32 int64",
    "int64 int32",
    "uint8 uint8",
]
PLACES = st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 130))


@kernel
def _copy(source: Array, first: int, out: Array, begin: int, count: int) -> None:
    copy_into(source[first:], out[begin : begin + count])


@kernel
def _fill(out: Array, begin: int, count: int, value: Any) -> None:
    fill_with(out[begin : begin + count], value)


@kernel
def _count(out: Array, begin: int, count: int) -> None:
    count_up(out[begin : begin + count])


@kernel
def _copy_ahead(source: Array, out: Array, count: int) -> None:
    copy_ahead(source, out, count)


@kernel
def _fill_ahead(out: Array, value: Any, count: int) -> None:
    fill_ahead(out, value, count)


@kernel
def _count_ahead(out: Array, count: int) -> None:
    count_ahead(out, count)


@kernel
def _copy_line(source: Any, out: Any) -> None:
    copy_line(source, out)


@kernel
def _find(source: Any, below: Any, one: Any, other: Any) -> Any:
    return find_bytes(source, below, one, other)


@kernel
def _copy_every_other(source: Array, out: Array) -> None:
    copy_into(source[::2], out)


def _random(dtype: str, seed: int) -> Array:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, SIZE, dtype, endpoint=True)


@pytest.mark.parametrize("pair", PAIRS)
@settings(deadline=None)
@given(PLACES, st.integers(0, 9))
def test_integers_are_copied_and_converted_as_numpy_does(
    pair: str, places: tuple[int, int, int], seed: int
) -> None:
    read, written = pair.split()
    first, begin, count = places
    source, out = _random(read, seed), _random(written, seed + 1)
    due = out.copy()
    due[begin : begin + count] = source[first : first + count].astype(written)
    _copy(source, first, out, begin, count)
    np.testing.assert_array_equal(out, due)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
@settings(deadline=None)
@given(PLACES)
def test_what_is_not_an_integer_is_copied_too(dtype: str, places: tuple[int, int, int]) -> None:
    first, begin, count = places
    source, out = (np.arange(SIZE) % 7 / 3).astype(dtype), np.zeros(SIZE, dtype)
    due = out.copy()
    due[begin : begin + count] = source[first : first + count]
    _copy(source, first, out, begin, count)
    np.testing.assert_array_equal(out, due)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", -100),
        ("int64", -100),
        ("uint16", 9),
        ("float32", 1),
        ("float32", 0.25),
        ("bool", True),
        ("bool", False),
    ],
)
@settings(deadline=None)
@given(PLACES)
def test_every_item_is_set(dtype: str, value: Any, places: tuple[int, int, int]) -> None:
    _, begin, count = places
    out = (np.arange(SIZE) % 2).astype(dtype)
    due = out.copy()
    due[begin : begin + count] = value
    _fill(out, begin, count, value)
    np.testing.assert_array_equal(out, due)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@settings(deadline=None)
@given(PLACES)
def test_counting_begins_with_0(dtype: str, places: tuple[int, int, int]) -> None:
    _, begin, count = places
    out = np.full(SIZE, -1, dtype)
    due = out.copy()
    due[begin : begin + count] = np.arange(count)
    _count(out, begin, count)
    np.testing.assert_array_equal(out, due)


def _check_ahead(out: Array, before: Array, begin: int, room: int, due: Array, more: Array) -> None:
    """`due` is written from `begin` on; behind it, up to a vector of `more` where `room` items are
    enough for it, or nothing.
    """
    count, lanes = len(due), CACHE_LINE // out.itemsize
    np.testing.assert_array_equal(out[begin : begin + count], due)
    whole = -(-count // lanes) * lanes
    if whole <= room and whole - count <= len(more):
        before[begin + count : begin + whole] = more[: whole - count]
    before[begin : begin + count] = due
    np.testing.assert_array_equal(out, before)


ROOMS = st.tuples(st.integers(0, 70), st.integers(0, 40), st.integers(0, 40))


@pytest.mark.parametrize("pair", PAIRS)
@settings(deadline=None)
@given(PLACES, ROOMS, st.integers(0, 9))
def test_copying_ahead_stays_in_both_arrays(
    pair: str, places: tuple[int, int, int], rooms: tuple[int, int, int], seed: int
) -> None:
    read, written = pair.split()
    first, begin, count = places[0], places[1], rooms[0]
    readable, room = count + rooms[1], count + rooms[2]
    source, out = _random(read, seed), _random(written, seed + 1)
    before, converted = out.copy(), source[first : first + readable].astype(written)
    _copy_ahead(source[first : first + readable], out[begin : begin + room], count)
    _check_ahead(out, before, begin, room, converted[:count], converted[count:])


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@settings(deadline=None)
@given(PLACES, ROOMS)
def test_filling_and_counting_ahead_stay_in_the_array(
    dtype: str, places: tuple[int, int, int], rooms: tuple[int, int, int]
) -> None:
    begin, count = places[1], rooms[0]
    room = count + rooms[2]
    out = np.full(SIZE, -1, dtype)
    _fill_ahead(out[begin : begin + room], 7, count)
    sevens = np.full(SIZE, 7, dtype)
    _check_ahead(out, np.full(SIZE, -1, dtype), begin, room, sevens[:count], sevens)
    if dtype == "float32":
        return
    out = np.full(SIZE, -1, dtype)
    _count_ahead(out[begin : begin + room], count)
    numbers = np.arange(SIZE, dtype=dtype)
    _check_ahead(out, np.full(SIZE, -1, dtype), begin, room, numbers[:count], numbers[count:])


def test_strides_and_other_conversions_do_not_compile() -> None:
    with pytest.raises(TypingError, match="contiguous"):
        _copy_every_other(np.arange(10), np.arange(5))
    with pytest.raises(TypingError, match="cannot copy float64 into int64"):
        _copy(np.arange(10.0), 0, np.arange(10), 0, 5)


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(0, 70), st.integers(0, 9))
def test_a_line_is_copied_from_any_place_to_any(first: int, begin: int, seed: int) -> None:
    source, out = _random("uint8", seed), _random("uint8", seed + 1)
    due = out.copy()
    due[begin : begin + CACHE_LINE] = source[first : first + CACHE_LINE]
    _copy_line(np.uint64(address_of(source) + first), np.uint64(address_of(out) + begin))
    np.testing.assert_array_equal(out, due)


@settings(deadline=None)
@given(
    st.integers(0, 70),
    st.integers(0, 9),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 255),
)
def test_bytes_of_a_line_are_found(first: int, seed: int, below: int, one: int, other: int) -> None:
    source = _random("uint8", seed)
    line = source[first : first + CACHE_LINE]
    due = np.packbits((line < below) | (line == one) | (line == other), bitorder="little").view(
        np.uint64
    )[0]
    assert _find(np.uint64(address_of(source) + first), below, one, other) == due


@kernel
def _dot(words: Array, first: int, count: int, factors: Array) -> Any:
    return dot_words(words[first : first + count], factors)


@kernel
def _largest(words: Array, first: int, count: int) -> Any:
    return largest_u16(words[first : first + count]), largest_u32(words[first : first + count])


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(0, 130), st.integers(0, 9))
def test_words_are_summed_and_compared_as_numpy_does(first: int, count: int, seed: int) -> None:
    words, factors = _random("uint32", seed), _random("uint32", seed + 1)
    mine = words[first : first + count].copy()
    due = np.sum(mine.astype(np.uint64) * factors[:count].astype(np.uint64), dtype=np.uint64)
    assert _dot(words, first, count, factors) == due
    found = _largest(words, first, count)
    assert found == (mine.view(np.uint16).max(initial=0), mine.max(initial=0))
