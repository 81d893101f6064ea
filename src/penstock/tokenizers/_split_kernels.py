"""Kernels that cut text into pieces by automata, and find the ids of pieces in a hash table."""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel
from penstock.tokenizers._piece_kernels import INDEX, _character, find_run, hash_run

NONE = -1
LONG = -1
"""The entry of a piece that is too long to be kept."""


@inline_kernel
def _size(data, at, bytewise):
    """The bytes of the character at a place."""
    first = data[at]
    if bytewise or first < 0x80:
        return 1
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4


@inline_kernel
def _match_end(data, at, end, classes, table, width, bytewise):
    """Where the match that begins at `at` ends; `NONE` if there is none."""
    found = NONE
    state = width
    while at < end:
        first = np.int64(data[at])
        if bytewise or first < 0x80:
            step = table[state + classes[first]]
            size = 1
        else:
            character, size = _character(data, at)
            step = table[state + classes[character]]
        if step & 1:
            found = at
        state = step >> 1
        if state == 0:
            return found
        at += size
    # Class 0 is the end of the text.
    return at if table[state] & 1 else found


@kernel
def cut_pieces(data, begins, ends, rows, classes, table, width, bytewise, joins, drops, cut):
    """Cut pieces further, each at the matches of an automaton.

    Args:
        data: UTF-8 bytes, uint8.
        begins: Where each piece begins, int32 [pieces].
        ends: Where each ends, int32 [pieces].
        rows: The first piece of each text, int32 [texts + 1]; rewritten.
        classes: The class of each character, or of each byte, uint8.
        table: Of `Automaton`, int32; likewise `width`.
        bytewise: Whether a byte is a character, as in the alphabet of byte-level vocabularies.
        joins: Bit 2 a + b: a stretch of kind b continues the piece of one of kind a before it. Kinds:
            0 between matches, 1 a match.
        drops: Bit b: stretches of kind b are dropped.
        cut: The new pieces' begins and ends, int32 [2, room]; room for all bytes suffices.

    Returns:
        Their number.
    """
    new_begins, new_ends = cut[0], cut[1]
    count = piece = 0
    for row in range(len(rows) - 1):
        while piece < rows[row + 1]:
            begin, end = np.int64(begins[piece]), np.int64(ends[piece])
            at = begin
            previous = NONE
            while begin < end:
                stop = NONE
                while at < end:
                    stop = _match_end(data, at, end, classes, table, width, bytewise)
                    if stop != NONE:
                        break
                    at += _size(data, at, bytewise)
                # First what lies before the match, then the match.
                for kind in range(2):
                    low, high = (begin, at) if kind == 0 else (at, stop)
                    if low >= high:
                        continue
                    if previous != NONE and joins >> (2 * previous + kind) & 1:
                        new_ends[count - 1] = high
                    elif not drops >> kind & 1:
                        new_begins[count] = low
                        new_ends[count] = high
                        count += 1
                    previous = kind
                begin = at = max(at, stop)
            piece += 1
        rows[row + 1] = count
    return count


@kernel
def find_entries(
    data, begins, ends, at, longest, words, offsets, slots, size, most, entries
):
    """Find the entries of pieces in a hash table; unknown pieces become entries.

    Args:
        data: Bytes, uint8.
        begins: Where each piece begins, int32 [pieces]; likewise `ends`.
        at: The piece to begin with.
        longest: Longer pieces are not kept.
        words: The bytes of entries, one after another.
        offsets: Where each begins in `words`, and after them where the last ends, int64.
        slots: Hash table of the entries.
        size: Number of entries so far.
        most: Number of entries that there may be.
        entries: The entry of each piece, int32 [pieces]; of a long one `LONG`.

    Returns:
        The piece where it stopped, after the last one or for want of room; the number of entries.
    """
    while at < len(begins):
        begin, end = np.int64(begins[at]), np.int64(ends[at])
        if end - begin > longest:
            entries[at] = LONG
            at += 1
            continue
        value = hash_run(data, begin, end)
        place = find_run(slots, value, data, begin, end, words, offsets)
        if slots[place] == 0:
            to = offsets[size]
            if size == most or to + end - begin > len(words):
                break
            for step in range(end - begin):
                words[to + step] = data[begin + step]
            size += 1
            offsets[size] = to + end - begin
            slots[place] = value & ~INDEX | np.uint64(size)
        entries[at] = np.int64(slots[place] & INDEX) - 1
        at += 1
    return at, size


@kernel
def spell_pieces(data, begins, ends, alphabet, separator, spelled):
    """Write pieces as characters that stand for bytes, each followed by a separator.

    Args:
        data: Bytes, uint8.
        begins: Where each piece begins; likewise `ends`.
        alphabet: The character of each byte, uint16 [256].
        separator: A character.
        spelled: The characters, uint16, exactly as many as are needed.
    """
    count = 0
    for piece in range(len(begins)):
        for at in range(begins[piece], ends[piece]):
            spelled[count] = alphabet[data[at]]
            count += 1
        spelled[count] = separator
        count += 1


@kernel
def count_ids(entries, begin, end, offsets, bounds):
    """Write where the ids of pieces end, when they are joined.

    Args:
        entries: The entry of each piece, int32.
        begin: The first piece.
        end: The piece after the last.
        offsets: Where the ids of each entry begin, int64 [entries + 1].
        bounds: Where those of each piece begin, int64 [pieces + 1], known up to `begin`; rewritten
            from there up to `end`.
    """
    total = bounds[begin]
    for piece in range(begin, end):
        entry = entries[piece]
        total += offsets[entry + 1] - offsets[entry]
        bounds[piece + 1] = total


@kernel
def join_ids(entries, begin, end, offsets, ids, joined):
    """Join the ids of pieces.

    Args:
        entries: The entry of each piece, int32.
        begin: The first piece.
        end: The piece after the last.
        offsets: Where the ids of each entry begin, int64 [entries + 1].
        ids: The ids of entries, uint32.
        joined: The ids of the pieces, uint32, exactly as many as there are.
    """
    count = 0
    for piece in range(begin, end):
        entry = entries[piece]
        for at in range(offsets[entry], offsets[entry + 1]):
            joined[count] = ids[at]
            count += 1


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
