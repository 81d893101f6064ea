"""Kernels that cut text into pieces by automata."""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel
from penstock.tokenizers._piece_kernels import _character

NONE = -1
COLUMNS = 256
"""Of a row of an automaton's table: bytes; in text, from `WIDE` on classes of characters."""
WIDE = 0x80
MATCH, STOP = np.uint32(1), np.uint32(2)
"""Flags of a transition, below the row that it leads to: a match ends before the character; no way
on.
"""
START = np.uint64(COLUMNS)

_ROW = ~np.uint64(COLUMNS - 1)
_STATE = np.uint64(8)
_WIDE = np.uint64(WIDE)
_ONE = np.uint64(1)


@inline_kernel
def _transition(data, at, plain, classes, table, row):
    """The transition by the character at a place, and the bytes of that character."""
    first = np.uint64(data[at])
    if first < plain:
        return table[row | first], _ONE
    character, size = _character(data, np.int64(at))
    return table[row | _WIDE | np.uint64(classes[np.uint64(character)])], np.uint64(size)


@inline_kernel
def _match_end(data, at, end, plain, classes, table, finals):
    """Where the match that begins at a place ends; `NONE` if there is none."""
    found = NONE
    row = START
    at, end = np.uint64(at), np.uint64(end)
    while at < end:
        step, size = _transition(data, at, plain, classes, table, row)
        if step & MATCH:
            found = np.int64(at)
        if step & STOP:
            return found
        after = np.uint64(step) & _ROW
        at += size
        if after == row:
            # Runs, as of letters: no transition has to wait for the one before it.
            begin = at
            while at < end and np.uint64(data[at]) < plain:
                if table[row | np.uint64(data[at])] != step:
                    break
                at += _ONE
            if step & MATCH and at > begin:
                found = np.int64(at) - 1
        row = after
    return np.int64(at) if finals[row >> _STATE] else found


@inline_kernel
def _next_begin(data, at, end, plain, classes, table):
    """The first place from `at` on where a match may begin, or `end`."""
    at, end = np.uint64(at), np.uint64(end)
    while at < end:
        step, size = _transition(data, at, plain, classes, table, START)
        if not step & STOP:
            break
        at += size
    return np.int64(at)


@kernel
def cut_pieces(data, begins, ends, rows, plain, classes, table, finals, joins, drops, cut):
    """Cut pieces further, each at the matches of an automaton.

    Args:
        data: UTF-8 bytes, uint8.
        begins: Where each piece begins, int32 [pieces].
        ends: Where each ends, int32 [pieces].
        rows: The first piece of each text, int32 [texts + 1]; rewritten.
        plain: Bytes below this are characters: 0x80; 0x100 if each stands for one of the alphabet
            of byte-level vocabularies.
        classes: The class of each character, uint8.
        table: For each state and each column the row of the next state, and flags, uint32.
        finals: Whether a match ends where a state meets the end of its piece, bool [states].
        joins: Bit 2 a + b: a stretch of kind b continues the piece of one of kind a before it.
            Kinds: 0 between matches, 1 a match.
        drops: Bit b: stretches of kind b are dropped.
        cut: The new pieces' begins and ends, int32 [2, room]; room for all bytes suffices.

    Returns:
        Their number.
    """
    new_begins, new_ends = cut[0], cut[1]
    plain = np.uint64(plain)
    last = len(data)
    # No match begins before it. It is looked for without regard to pieces, so that those without a
    # match cost little.
    next_begin = np.int64(0)
    count = piece = 0
    for row in range(len(rows) - 1):
        while piece < rows[row + 1]:
            begin, end = np.int64(begins[piece]), np.int64(ends[piece])
            at = begin
            previous = NONE
            while begin < end:
                stop = NONE
                while at < end:
                    if next_begin <= at:
                        stop = _match_end(data, at, end, plain, classes, table, finals)
                        if stop != NONE:
                            break
                        at += np.int64(_transition(data, at, plain, classes, table, START)[1])
                        next_begin = _next_begin(data, at, last, plain, classes, table)
                    at = min(next_begin, end)
                # First what lies before the match, then the match.
                if begin < at:
                    if previous != NONE and joins >> (2 * previous) & 1:
                        new_ends[count - 1] = at
                    elif not drops & 1:
                        new_begins[count] = begin
                        new_ends[count] = at
                        count += 1
                    previous = 0
                if stop != NONE:
                    if previous != NONE and joins >> (2 * previous + 1) & 1:
                        new_ends[count - 1] = stop
                    elif not drops & 2:
                        new_begins[count] = at
                        new_ends[count] = stop
                        count += 1
                    previous = 1
                    at = stop
                begin = at
            piece += 1
        rows[row + 1] = count
    return count


@kernel
def texts_with(data, offsets, marked, found):
    """Mark the texts that have a marked character.

    Args:
        data: UTF-8 bytes, uint8.
        offsets: Where each text begins, int64 [texts + 1].
        marked: Of each code point, bool [0x110000].
        found: Of each text, bool [texts]; rewritten.
    """
    for row in range(len(offsets) - 1):
        at, end = offsets[row], offsets[row + 1]
        while at < end:
            if data[at] < 0x80:
                at += 1
                continue
            character, size = _character(data, at)
            if marked[character]:
                break
            at += size
        found[row] = at < end
