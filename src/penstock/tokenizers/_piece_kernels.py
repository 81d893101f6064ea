"""Kernels that count the distinct pieces of text, those of `SPLIT_PATTERN`, in a hash table, and
one that cuts text at digits.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel, kernel_part

OTHER, LETTER, DIGIT, SPACE, LINE_END, UNKNOWN = range(6)
"""Classes of characters. `SPACE` has no line ends; `UNKNOWN`: never seen before."""

_APOSTROPHE, _BLANK, _LONG_S = (ord(character) for character in "' ſ")
_S, _T, _M, _D, _R, _V, _E, _L = b"stmdrvel"
_LOWER = 0x20

PRIME = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
INDEX = np.uint64(0xFFFFFFFF)
"""A slot of a hash table holds the upper half of a hash, and 1 + the index of an entry; 0:
empty.
"""

_NONE = -1


@inline_kernel
def _character(data, at):
    """The character that begins at byte `at` of sound UTF-8, and its bytes."""
    first = np.int64(data[at])
    if first < 0x80:
        return first, 1
    if first < 0xE0:
        return (first & 0x1F) << 6 | np.int64(data[at + 1]) & 0x3F, 2
    two = (np.int64(data[at + 1]) & 0x3F) << 6 | np.int64(data[at + 2]) & 0x3F
    if first < 0xF0:
        return (first & 0xF) << 12 | two, 3
    return (first & 7) << 18 | two << 6 | np.int64(data[at + 3]) & 0x3F, 4


@kernel
def find_unknown(data, classes, found):
    """Lists characters of class `UNKNOWN` in `found`, makes them `OTHER`, and returns how many;
    stops if it is full.
    """
    at = count = 0
    while at < len(data):
        if data[at] < 0x80:
            at += 1
            continue
        character, size = _character(data, at)
        if classes[character] == UNKNOWN:
            if count == len(found):
                break
            classes[character] = OTHER
            found[count] = character
            count += 1
        at += size
    return count


@inline_kernel
def _run(data, at, end, classes, kind):
    """Where the run of characters of a class that begins at `at` ends."""
    while at < end:
        character, size = _character(data, at)
        if classes[character] != kind:
            break
        at += size
    return at


@kernel_part
def _contraction(data, at, end):
    """Where 's, 't, 're, 've, 'm, 'll or 'd in any case ends, whose apostrophe is at `at`; `at` if
    there is none.
    """
    if at + 1 >= end:
        return at
    first, size = _character(data, at + 1)
    if first == _LONG_S:
        return at + 1 + size
    if size > 1:
        return at
    first |= _LOWER
    if first in (_S, _T, _M, _D):
        return at + 2
    if at + 2 < end:
        second = np.int64(data[at + 2]) | _LOWER
        if (second == _E and first in (_R, _V)) or (second == _L and first == _L):
            return at + 3
    return at


@kernel_part
def _space_end(data, at, end, classes):
    """Where a piece that begins with white space ends, if neither letters nor other characters
    belong to it.
    """
    begin, last, after_line_end = at, at, at
    while at < end:
        character, size = _character(data, at)
        kind = classes[character]
        if kind != SPACE and kind != LINE_END:
            break
        last = at
        at += size
        if kind == LINE_END:
            after_line_end = at
    if after_line_end > begin:
        return after_line_end
    # The last space belongs to what follows.
    return at if at == end or last == begin else last


@kernel_part
def piece_end(data, at, end, classes):
    """Where the piece of `SPLIT_PATTERN` that begins at `at` ends."""
    character, size = _character(data, at)
    kind = classes[character]
    if kind == LETTER:
        return _run(data, at + size, end, classes, LETTER)
    if kind == DIGIT:
        return at + size
    if character == _APOSTROPHE:
        after = _contraction(data, at, end)
        if after > at:
            return after
    begin = at if kind == OTHER else _NONE
    if kind != LINE_END and at + size < end:
        second, more = _character(data, at + size)
        if classes[second] == LETTER:
            return _run(data, at + size + more, end, classes, LETTER)
        if character == _BLANK and classes[second] == OTHER:
            begin = at + size
    if begin != _NONE:
        return _run(data, _run(data, begin, end, classes, OTHER), end, classes, LINE_END)
    return _space_end(data, at, end, classes)


@inline_kernel
def hash_run(data, begin, end):
    value = PRIME
    for at in range(begin, end):
        value = (value ^ np.uint64(data[at])) * PRIME
        value ^= value >> HALF
    return value


@inline_kernel
def equal_bytes(a, begin, b, other, length):
    for place in range(length):
        if a[begin + place] != b[other + place]:
            return False
    return True


@inline_kernel
def find_run(slots, value, data, begin, end, words, offsets):
    """The slot of a run of bytes among `words`, or the empty one where it belongs."""
    mask = np.uint64(len(slots) - 1)
    place = value & mask
    while slots[place] != 0:
        if slots[place] >> HALF == value >> HALF:
            entry = np.int64(slots[place] & INDEX) - 1
            if offsets[entry + 1] - offsets[entry] == end - begin:
                if equal_bytes(data, begin, words, offsets[entry], end - begin):
                    break
        place = (place + np.uint64(1)) & mask
    return place


@kernel
def count_pieces(data, ends, text, at, classes, words, offsets, counts, slots, size):
    """Count the pieces of texts.

    Args:
        data: The texts, one after another, uint8.
        ends: Where each ends in `data`.
        text: The text to begin with.
        at: The byte to begin with.
        classes: The class of each character.
        words: The distinct pieces so far, one after another; has room for all bytes of `data`.
        offsets: Where each begins in `words`, and after them where the last ends.
        counts: How often each occurred.
        slots: Hash table of the pieces.
        size: Number of distinct pieces so far.

    Returns:
        Text, byte and size where it stopped: after the last text, or because half of `slots` are
        taken.
    """
    while text < len(ends):
        while at < ends[text]:
            if 2 * size >= len(slots):
                return text, at, size
            end = piece_end(data, at, ends[text], classes)
            value = hash_run(data, at, end)
            place = find_run(slots, value, data, at, end, words, offsets)
            if slots[place] == 0:
                begin = offsets[size]
                for step in range(end - at):
                    words[begin + step] = data[at + step]
                counts[size] = 0
                size += 1
                offsets[size] = begin + end - at
                slots[place] = value & ~INDEX | np.uint64(size)
            counts[np.int64(slots[place] & INDEX) - 1] += 1
            at = end
        text += 1
    return text, at, size


@kernel
def hash_pieces(words, offsets, size, slots):
    """Fill an empty hash table."""
    for entry in range(size):
        value = hash_run(words, offsets[entry], offsets[entry + 1])
        place = find_run(slots, value, words, offsets[entry], offsets[entry + 1], words, offsets)
        slots[place] = value & ~INDEX | np.uint64(entry + 1)


@kernel
def cut_at_digits(data, offsets, is_digit, each, ends, rows):
    """Cut texts before and after their digits.

    Args:
        data: UTF-8 bytes, uint8.
        offsets: Where each text begins, int64 [texts + 1].
        is_digit: Of each code point up to the last digit, bool.
        each: Whether every digit is a stretch of its own, or only a run of digits.
        ends: Where each stretch ends, int64 [stretches]; empty: only count.
        rows: How many stretches there are up to the end of each text, int64 [texts].

    Returns:
        The number of stretches.
    """
    count = 0
    for row in range(len(offsets) - 1):
        at, end = offsets[row], offsets[row + 1]
        was_digit = False
        begin = at
        while at < end:
            first = data[at]
            if first < 0x80:
                character, size = np.int64(first), 1
            else:
                character, size = _character(data, at)
            digit = character < len(is_digit) and is_digit[character]
            if at > begin and (digit != was_digit or (digit and each)):
                if len(ends):
                    ends[count] = at
                count += 1
            was_digit = digit
            at += size
        if end > begin:
            if len(ends):
                ends[count] = end
            count += 1
        rows[row] = count
    return count
