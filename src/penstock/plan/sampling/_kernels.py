"""Compiled sampling: the permutation, and the draw of one source.

`permute` is a bijection of [0, size), computed for one index at a time from a key: a Feistel
network over the fewest bits that hold `size` (halves may differ by a bit), walked until it lands
inside (Black and Rogaway 2002; fewer than two walks on average). Its round function multiplies
twice, so every input bit reaches every output bit; affine rounds pass parity tests and still leave
neighbours together. Below `SMALL` the network has too few bits to be random; there
`small_permutation` shuffles a table (Fisher and Yates).
"""

import numpy as np

from penstock.core.compiled import bare, inline_kernel, kernel, view_u32
from penstock.core.randomness import mix
from penstock.core.vectors import copy_into, count_up
from penstock.data.shards.format._kernels import RUN_DOCUMENTS

ROUNDS = 6
SMALL = 256
SHUFFLE_NONE, SHUFFLE_FULL, SHUFFLE_BLOCK = 0, 1, 2
TOO_LONG_SPLIT, TOO_LONG_DROP, TOO_LONG_TRUNCATE, TOO_LONG_ERROR, TOO_LONG_KEEP_END = range(5)

SKIPPED = np.dtype(
    [
        ("empty", np.int64),  # documents without tokens
        ("dropped", np.int64),  # documents that were too long
        ("dropped_tokens", np.int64),  # tokens of those
        (
            "truncated_tokens",
            np.int64,
        ),  # tokens cut off the end, or the beginning, of documents that were too long
    ],
    align=True,
)
"""Counts of what a source left out between two documents, or since its beginning."""

ENTRY = np.dtype(
    [
        ("position", np.int64),  # documents of the source's stream before this one, over all epochs
        ("document", np.int64),  # its number in the dataset
        ("begin", np.int64),  # first token of this part of it
        ("tokens", np.int64),  # tokens of this part
        (
            "total",
            np.int64,
        ),  # where the document ends: its tokens, without those that were truncated
        ("length", np.int64),  # row slots that the part takes, as its objective measured it
        ("skipped", SKIPPED),  # what was left out since the entry before it
    ],
    align=True,
)
"""A document, or a part of one, in a source's buffer."""

WINDOW_BLOCKS = 512
"""Runs among which block shuffle mixes documents, by default."""
MODE_BITS = 2
"""The lowest bits of a mode say how documents are shuffled; those above, the runs of a window of
block shuffle.
"""

_ONE = np.uint64(1)
_SHIFT = np.uint64(32)
_MULTIPLIER_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xD6E8FEB86659FD93)
NOT_REFUSED, NOT_HERE = -1, -2
"""Codes of `draw` in place of a refused document: there is none; or the next document's length is
not here yet.
"""


@inline_kernel
def _round(value, key):
    """Uint64 → uint64; its low 32 bits depend on every bit of the low 32 bits of `value`."""
    value = (value ^ key) * _MULTIPLIER_1
    value = (value ^ (value >> _SHIFT)) * _MULTIPLIER_2
    return value >> _SHIFT


@inline_kernel
def key_schedule(size, key):
    """A permutation of [0, size) for `permute`: bits of an index, and a key for each round."""
    bits = np.uint64(1)
    while (_ONE << bits) < np.uint64(size):
        bits += _ONE
    return (
        bits,
        mix(key, np.uint64(0)),
        mix(key, np.uint64(1)),
        mix(key, np.uint64(2)),
        mix(key, np.uint64(3)),
        mix(key, np.uint64(4)),
        mix(key, np.uint64(5)),
    )


@inline_kernel
def _encipher(value, schedule):
    """Image of a number under the schedule's permutation of all numbers with its bits (uint64,
    schedule → uint64).
    """
    bits, key_0, key_1, key_2, key_3, key_4, key_5 = schedule
    low_bits = bits >> _ONE
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << (bits - low_bits)) - _ONE
    low = value & low_mask
    high = value >> low_bits
    high ^= _round(low, key_0) & high_mask
    low ^= _round(high, key_1) & low_mask
    high ^= _round(low, key_2) & high_mask
    low ^= _round(high, key_3) & low_mask
    high ^= _round(low, key_4) & high_mask
    low ^= _round(high, key_5) & low_mask
    return (high << low_bits) | low


@inline_kernel
def permute(index, size, schedule):
    """Image of `index` under the permutation of [0, size) that a key names (int64, int64, its
    schedule → int64).
    """
    value = _encipher(np.uint64(index), schedule)
    while value >= np.uint64(size):
        value = _encipher(value, schedule)
    return np.int64(value)


@inline_kernel
def _permute_block(begin, size, schedule, outside, out):
    """`permute` of begin, begin + 1, …, of as many as `out` has (int64); `outside` (int64) has room
    for twice as many.

    Those that are still outside [0, size) are gathered in `outside`, places and then values, and go
    on together: a branch for each would be guessed wrong every other time, and each wrong guess
    waits for a whole cipher. So the ciphers are loops of their own, which become vector code.
    """
    places, values = outside[: len(out)], outside[len(out) :]
    for i in range(len(out)):
        out[i] = _encipher(np.uint64(begin + i), schedule)
    left = 0
    for i in range(len(out)):
        places[left], values[left] = i, out[i]
        left += out[i] >= size
    while left:
        count, left = left, 0
        for j in range(count):
            values[j] = _encipher(np.uint64(values[j]), schedule)
        for j in range(count):
            out[places[j]] = values[j]
            places[left], values[left] = places[j], values[j]
            left += values[j] >= size


@inline_kernel
def small_permutation(size, key, table):
    """Write a permutation of [0, size), size ≤ SMALL, into `table` (int64): keyed Fisher–Yates."""
    count_up(table[:size])
    for i in range(size - 1, 0, -1):
        j = np.int64(mix(key, np.uint64(i)) % np.uint64(i + 1))
        table[i], table[j] = table[j], table[i]


@inline_kernel
def block_window(block, most):
    """(first run, runs) of the window that a run of an epoch's order is in, int64 each.

    Windows have 1, 2, 4, … runs, and from then on `most`: so the first documents come from few
    runs.
    """
    size = np.int64(1)
    # The windows before the one of `size` runs have size − 1 runs together.
    while size < most and block >= 2 * size - 1:
        size *= 2
    if size < most:
        return size - 1, size
    return size - 1 + (block - size + 1) // most * most, np.int64(most)


@inline_kernel
def block_permute(index, size, key, most):
    """Image of `index` under block shuffle: runs permuted over all, documents mixed in windows of
    `most` runs.
    """
    whole = size // RUN_DOCUMENTS
    first, blocks = block_window(index // RUN_DOCUMENTS, most)
    start = first * RUN_DOCUMENTS
    here = min(blocks * RUN_DOCUMENTS, size - start)
    mixed = start + permute(index - start, here, key_schedule(here, mix(key, np.uint64(first))))
    block = mixed // RUN_DOCUMENTS
    if block < whole:
        block = permute(block, whole, key_schedule(whole, key))
    return block * RUN_DOCUMENTS + mixed % RUN_DOCUMENTS


@inline_kernel
def add_skipped(total, part):
    """Add the counts of `part` to those of `total` (records `SKIPPED`)."""
    total.empty += part.empty
    total.dropped += part.dropped
    total.dropped_tokens += part.dropped_tokens
    total.truncated_tokens += part.truncated_tokens


@inline_kernel
def clear_skipped(counts):
    """Set all counts of a record `SKIPPED` to 0."""
    counts.empty = 0
    counts.dropped = 0
    counts.dropped_tokens = 0
    counts.truncated_tokens = 0


@inline_kernel
def _shuffled(index, size, key, mode, schedule, table, outside, out):
    """Write the documents at index, index + 1, … of an epoch's order into `out` (int64), as
    `permute_range` does.

    `mode` is that of `order.shuffle_mode`. `table` holds the permutation of a small source;
    `outside` is room for `_permute_block`.
    """
    if mode == SHUFFLE_NONE:
        for i in range(len(out)):
            out[i] = index + i
    elif size <= SMALL:
        copy_into(table[index:], out)
    elif mode != SHUFFLE_FULL:
        for i in range(len(out)):
            out[i] = block_permute(index + i, size, key, mode >> MODE_BITS)
    else:
        _permute_block(index, size, schedule, outside, out)


@kernel
def permute_range(begin, size, key, mode, out):
    """Write the images of begin, begin + 1, … into `out` (int64)."""
    schedule, table, outside = (
        key_schedule(size, key),
        np.empty(SMALL, np.int64),
        np.empty(2 * SMALL, np.int64),
    )
    if mode != SHUFFLE_NONE and size <= SMALL:
        small_permutation(size, key, table)
    for i in range(0, len(out), SMALL):
        _shuffled(begin + i, size, key, mode, schedule, table, outside, out[i : i + SMALL])


@inline_kernel
def _known(documents, first, here, range_documents):
    """How many of some documents (int64, counted from `first`), from the first on, have lengths
    that may be read.
    """
    for i in range(len(documents)):
        if here[(documents[i] + first) // range_documents] == 0:
            return i
    return len(documents)


@kernel
def draw(
    position,
    begin,
    last_position,
    size,
    first,
    key,
    mode,
    lengths_address,
    lengths_stride,
    limit,
    too_long,
    entries,
    here,
    range_documents,
):
    """Fill `entries` (`ENTRY` [capacity + 1]) with the next documents of one source.

    Goes on from the cursor (`position`, `begin`): the position counts documents over all epochs,
    `begin` is the first token of the next part, which packing `concat` may have cut anywhere.
    Documents over `limit` tokens are split, dropped, or cut to their first or last `limit` tokens.
    Stops at `last_position` or when `entries` is full. What was skipped is counted in the entry
    after it, so that counts stay exact at every cursor; the caller sets `skipped` of the first
    entry.

    Documents are looked up many at a time: their lengths lie anywhere in memory, and the processor
    waits for several look-ups at once where none depends on another.

    Lengths that come in ranges of `range_documents` documents are read where `here` (uint8
    [ranges]) is not 0; an empty `here` means that all are there. The draw stops at the first
    missing length; call again with the returned cursor.

    Returns:
        (entries written, next position, next begin, number of a document that is refused,
        NOT_REFUSED or NOT_HERE). A document is refused that is too long, or that ends before
        `begin`, which only a damaged state or length can say. The entry after the last one written
        holds what was skipped since.
    """
    entries = bare(entries)
    count = 0
    epoch = np.int64(-1)
    epoch_key = key
    schedule = key_schedule(size, key)
    table, outside = np.empty(SMALL, np.int64), np.empty(2 * SMALL, np.int64)
    documents, totals = np.empty(SMALL, np.int64), np.empty(SMALL, np.int64)
    # Documents that are looked up, and those of them that are used.
    ready = used = 0
    capacity = len(entries) - 1
    while count < capacity and position < last_position:
        if used == ready:
            if position // size != epoch:
                epoch = position // size
                epoch_key = mix(key, np.uint64(epoch))
                schedule = key_schedule(size, epoch_key)
                if mode != SHUFFLE_NONE and size <= SMALL:
                    small_permutation(size, epoch_key, table)
            index = position - epoch * size
            used, ready = 0, min(SMALL, size - index, last_position - position, capacity - count)
            _shuffled(index, size, epoch_key, mode, schedule, table, outside, documents[:ready])
            if len(here) > 0:
                ready = _known(documents[:ready], first, here, range_documents)
                if ready == 0:
                    return count, position, begin, np.int64(NOT_HERE)
            for i in range(ready):
                documents[i] += first
                address = lengths_address + np.uint64(documents[i]) * lengths_stride
                totals[i] = np.int64(view_u32(address, 1)[0])
        document, total = documents[used], totals[used]
        if total == 0:
            entries[count].skipped.empty += 1
            position += 1
            used += 1
            continue
        if total > limit:
            if too_long == TOO_LONG_ERROR:
                return count, position, begin, document
            if too_long == TOO_LONG_DROP:
                entries[count].skipped.dropped += 1
                entries[count].skipped.dropped_tokens += total
                position += 1
                used += 1
                continue
            if too_long != TOO_LONG_SPLIT:
                if begin == 0:
                    entries[count].skipped.truncated_tokens += total - limit
                if too_long == TOO_LONG_TRUNCATE:
                    total = limit
                else:
                    begin = max(begin, total - limit)
        if begin >= total:
            return count, position, begin, document
        part = total - begin
        if total > limit and too_long == TOO_LONG_SPLIT:
            # A part that was begun ends where it would have.
            part = min(part, limit - begin % limit)
        entry = entries[count]
        entry.position = position
        entry.document = document
        entry.begin = begin
        entry.tokens = part
        entry.total = total
        entry.length = part
        count += 1
        clear_skipped(entries[count].skipped)
        begin += part
        if begin >= total:
            position += 1
            used += 1
            begin = 0
    return count, position, begin, np.int64(NOT_REFUSED)
