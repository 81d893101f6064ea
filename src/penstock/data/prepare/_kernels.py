"""Compiled loops over documents: framing with BOS and EOS, loss-weight spans, hashes of texts."""

import numpy as np

from penstock.core.compiled import bare, kernel
from penstock.core.randomness import mix
from penstock.core.vectors import copy_into

_ZERO, _EIGHT = np.uint64(0), np.uint64(8)


@kernel
def frame(values, offsets, rows, bos, eos, out, out_offsets):
    """Copy the chosen rows of a ragged array, each with BOS before and EOS after it unless it has
    them.

    Args:
        values: uint32 [tokens]; offsets: int64 [documents + 1].
        rows: int64 [n], which documents, rising.
        bos: Id, or −1: none; eos likewise.
        out: uint16 or uint32 [tokens of the rows + 2 n], written from the start.
        out_offsets: int64 [n + 1], written.
    """
    values, out = bare(values), bare(out)
    at = 0
    out_offsets[0] = 0
    for n in range(len(rows)):
        begin, end = offsets[rows[n]], offsets[rows[n] + 1]
        if bos >= 0 and (begin == end or values[begin] != bos):
            out[at] = bos
            at += 1
        copy_into(values[begin:end], out[at : at + end - begin])
        at += end - begin
        if eos >= 0 and (begin == end or values[end - 1] != eos):
            out[at] = eos
            at += 1
        out_offsets[n + 1] = at


@kernel
def hash_texts(data, offsets, key, out):
    """A 64-bit hash of each text's bytes: data uint8, offsets int64 [n + 1], key uint64 → out
    uint64 [n].
    """
    for row in range(len(out)):
        begin, end = offsets[row], offsets[row + 1]
        value = mix(key, np.uint64(end - begin))
        i = begin
        while i + 8 <= end:
            word = _ZERO
            for b in range(8):
                word |= np.uint64(data[i + b]) << (_EIGHT * np.uint64(b))
            value = mix(value, word)
            i += 8
        word = _ZERO
        b = np.uint64(0)
        while i < end:
            word |= np.uint64(data[i]) << (_EIGHT * b)
            b += np.uint64(1)
            i += 1
        out[row] = mix(value, word)


@kernel
def characters_to_bytes(data, offsets, range_offsets, begin, end, out_begin, out_end):
    """Turn character positions into byte positions within each text; ranges are in order and do not
    overlap.

    Args:
        data: uint8 [bytes], UTF-8; offsets: int64 [documents + 1].
        range_offsets: int64 [documents + 1]; begin, end: int64 [ranges], in characters.
        out_begin: int64 [ranges], written; out_end likewise, in bytes from the start of the text.
    """
    for row in range(len(offsets) - 1):
        position = offsets[row]
        character = 0
        for r in range(range_offsets[row], range_offsets[row + 1]):
            for edge in range(2):
                target = begin[r] if edge == 0 else end[r]
                while character < target:
                    position += 1
                    while position < offsets[row + 1] and (data[position] & 0xC0) == 0x80:
                        position += 1
                    character += 1
                if edge == 0:
                    out_begin[r] = position - offsets[row]
                else:
                    out_end[r] = position - offsets[row]


@kernel
def mark_spans(sizes, ends, offsets, ranges, present, first, extra, out, out_offsets):
    """Loss-weight spans of tokens from byte ranges: a token has the weight of its last byte.

    A token without bytes has the weight of the byte after it; EOS that of the text's last byte; BOS
    has weight 0.

    Args:
        sizes: int64 [documents], bytes of each text.
        ends: int64 [tokens], byte position after each token; offsets: int64 [documents + 1].
        ranges: (offsets int64 [documents + 1], begin int64, end int64, weight float32), in bytes of
            the text.
        present: bool [documents], False: the document has no ranges and counts in full.
        first: int64 [documents], tokens added before the text; extra: int64 [documents], tokens
            added after it.
        out: (begin uint32, end uint32, weight float32), [ranges + documents], written from the
            start.
        out_offsets: int64 [documents + 1], written.

    Returns:
        Number of tokens that hold bytes of different weights.
    """
    range_offsets, range_begin, range_end, range_weight = ranges
    out_begin, out_end, out_weight = out
    at = 0
    straddling = 0
    out_offsets[0] = 0
    for row in range(len(sizes)):
        if present[row]:
            r, start = range_offsets[row], range_offsets[row]
            stop = range_offsets[row + 1]
            open_weight = np.float32(0.0)
            before = 0
            tokens = offsets[row + 1] - offsets[row]
            for t in range(tokens + extra[row]):
                if t < tokens:
                    after = ends[offsets[row] + t]
                    last = after - 1 if after > before else after
                else:
                    after = sizes[row]
                    last = sizes[row] - 1
                    before = last
                    r = max(stop - 1, start)
                while r < stop and range_end[r] <= before:
                    r += 1
                at_first = (
                    range_weight[r] if r < stop and range_begin[r] <= before else np.float32(0.0)
                )
                while r < stop and range_end[r] <= last:
                    r += 1
                weight = range_weight[r] if r < stop and range_begin[r] <= last else np.float32(0.0)
                if at_first != weight:
                    straddling += 1
                place = first[row] + t
                if weight != open_weight:
                    if open_weight != 0:
                        out_end[at - 1] = place
                    if weight != 0:
                        out_begin[at] = place
                        out_weight[at] = weight
                        at += 1
                    open_weight = weight
                before = after
            if open_weight != 0:
                out_end[at - 1] = first[row] + tokens + extra[row]
        out_offsets[row + 1] = at
    return straddling
