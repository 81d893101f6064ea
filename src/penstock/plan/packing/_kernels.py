"""Compiled packing: which row takes the next document.

Best fit needs, for a document of n tokens, the open row with the least free space that is still at
least n. Rows are kept in one list per free space; two levels of bitmaps say which lists are not
empty, so a look-up is a few instructions whatever the number of open rows. Among rows of equal free
space the last one touched is taken.

A row may have a maximum number of documents (`document_limit`, 0 for none). A row that has reached
it is full: it goes into no list, whatever space it has left.
"""

import numpy as np

from penstock.core.compiled import bare, inline_kernel, keep_alive, kernel, trailing_zeros

_ONE = np.uint64(1)
_SIX = np.uint64(6)
_LOW = np.uint64(63)
_ZERO = np.uint64(0)


@inline_kernel
def _first_at_least(free, bitmap, summary):
    """Smallest free space ≥ `free` that some open row has, −1 when none has."""
    word = free >> 6
    rest = bitmap[word] >> (np.uint64(free) & _LOW)
    if rest != _ZERO:
        return free + np.int64(trailing_zeros(rest))
    word += 1
    if word >= len(bitmap):
        return -1
    group = word >> 6
    rest = (summary[group] >> (np.uint64(word) & _LOW)) << (np.uint64(word) & _LOW)
    while rest == _ZERO:
        group += 1
        if group >= len(summary):
            return -1
        rest = summary[group]
    word = (group << 6) + np.int64(trailing_zeros(rest))
    return (word << 6) + np.int64(trailing_zeros(bitmap[word]))


@inline_kernel
def clear_open_rows(bitmap, summary):
    """Forget all open rows."""
    bitmap[:] = _ZERO
    summary[:] = _ZERO


@inline_kernel
def _take_out(row, before, free, heads, nexts, bitmap, summary):
    """Take a row out of the list of `free`; `before` is the row before it there, −1 if it is the
    first.
    """
    if before >= 0:
        nexts[before] = nexts[row]
        return
    heads[free] = nexts[row]
    if heads[free] < 0:
        bitmap[free >> 6] &= ~(_ONE << (np.uint64(free) & _LOW))
        if bitmap[free >> 6] == _ZERO:
            summary[free >> 12] &= ~(_ONE << ((np.uint64(free) >> _SIX) & _LOW))


@inline_kernel
def _put_first(row, free, heads, nexts, bitmap, summary):
    """Put a row first in the list of `free`; a full row goes into none."""
    if free == 0:
        return
    word = free >> 6
    if (bitmap[word] >> (np.uint64(free) & _LOW)) & _ONE:
        nexts[row] = heads[free]
    else:
        nexts[row] = -1
        bitmap[word] |= _ONE << (np.uint64(free) & _LOW)
        summary[word >> 6] |= _ONE << (np.uint64(word) & _LOW)
    heads[free] = row


@inline_kernel
def _count_document(row, new, free, document_limit, documents_left):
    """Count one more document of a row; returns `free`, or 0 if the row may have no more."""
    if document_limit == 0:
        return free
    if new:
        documents_left[row] = document_limit
    documents_left[row] -= 1
    return free if documents_left[row] > 0 else 0


@inline_kernel
def place_best_fit(
    length,
    sequence_length,
    rows,
    max_rows,
    document_limit,
    documents_left,
    heads,
    nexts,
    bitmap,
    summary,
):
    """Row for a document of `length` tokens: an open one, `rows` for a new one, −1 when no new one
    may be opened.

    `documents_left` (int32 [max_rows]) is what each row has left of `document_limit`; not read
    without a limit.
    """
    free = _first_at_least(length, bitmap, summary)
    if free < 0:
        if rows == max_rows:
            return -1
        row, free = rows, sequence_length
    else:
        row = heads[free]
        _take_out(row, -1, free, heads, nexts, bitmap, summary)
    left = _count_document(row, row == rows, free - length, document_limit, documents_left)
    _put_first(row, left, heads, nexts, bitmap, summary)
    return row


@inline_kernel
def place_within(
    length,
    patches,
    sequence_length,
    patch_limit,
    rows,
    max_rows,
    document_limit,
    documents_left,
    heads,
    nexts,
    bitmap,
    summary,
    patches_left,
):
    """As `place_best_fit`, among the rows that also have room for the patches of a document's
    images.

    `patches_left` (int64 [max_rows]) is what each row has left of `patch_limit`. Costs a look at
    every open row with room for the tokens, if none of them has room for the patches.
    """
    row, before = np.int64(-1), np.int64(-1)
    free = _first_at_least(length, bitmap, summary)
    while free >= 0:
        row, before = heads[free], -1
        while row >= 0 and patches_left[row] < patches:
            before, row = row, nexts[row]
        if row >= 0:
            break
        free = _first_at_least(free + 1, bitmap, summary) if free < sequence_length else -1
    if row < 0:
        if rows == max_rows:
            return -1
        row, free = rows, sequence_length
        patches_left[row] = patch_limit
    else:
        _take_out(row, before, free, heads, nexts, bitmap, summary)
    patches_left[row] -= patches
    left = _count_document(row, row == rows, free - length, document_limit, documents_left)
    _put_first(row, left, heads, nexts, bitmap, summary)
    return row


@inline_kernel
def order_longest_first(lengths, order, counts):
    """Write the indices of `lengths` into `order`, longest first, equal lengths in order (counting
    sort).

    `counts` is scratch of max(lengths) + 2 entries, int64.
    """
    counts[:] = 0
    top = len(counts) - 1
    for i in range(len(lengths)):
        counts[top - lengths[i]] += 1
    total = np.int64(0)
    for i in range(len(counts)):
        here = counts[i]
        counts[i] = total
        total += here
    for i in range(len(lengths)):
        slot = top - lengths[i]
        order[counts[slot]] = i
        counts[slot] += 1


@inline_kernel
def place_best_fit_decreasing(
    lengths,
    sequence_length,
    document_limit,
    documents_left,
    row_of,
    order,
    counts,
    heads,
    nexts,
    bitmap,
    summary,
):
    """Pack all of `lengths`, longest first, into as many rows as it takes; returns the number of
    rows.
    """
    order_longest_first(lengths, order, counts)
    clear_open_rows(bitmap, summary)
    rows = 0
    for i in range(len(lengths)):
        document = order[i]
        row = place_best_fit(
            lengths[document],
            sequence_length,
            rows,
            len(lengths),
            document_limit,
            documents_left,
            heads,
            nexts,
            bitmap,
            summary,
        )
        rows += row == rows
        row_of[document] = row
    return rows


@inline_kernel
def place_next_fit(length, sequence_length, rows, max_rows, document_limit, free, documents):
    """Row for a document when only the last row is open.

    `free` (int64 [1]) is the space that the last row has left, 0 when it may have no more
    documents; `documents` (int64 [1]) is how many it has.
    """
    row = rows - 1
    if rows > 0 and length <= free[0]:
        free[0] -= length
        documents[0] += 1
    elif rows == max_rows:
        return -1
    else:
        row = rows
        free[0], documents[0] = sequence_length - length, 1
    if documents[0] == document_limit:
        free[0] = 0
    return row


@kernel
def pack_best_fit(
    lengths,
    sequence_length,
    max_rows,
    document_limit,
    documents_left,
    row_of,
    heads,
    nexts,
    bitmap,
    summary,
):
    """Best fit in order, in windows of `max_rows` rows; returns the number of rows."""
    lengths, row_of, documents_left = bare(lengths), bare(row_of), bare(documents_left)
    heads, nexts, bitmap, summary = bare(heads), bare(nexts), bare(bitmap), bare(summary)
    base = rows = 0
    clear_open_rows(bitmap, summary)
    for i in range(len(lengths)):
        row = place_best_fit(
            lengths[i],
            sequence_length,
            rows,
            max_rows,
            document_limit,
            documents_left,
            heads,
            nexts,
            bitmap,
            summary,
        )
        if row < 0:
            base += rows
            rows = 0
            clear_open_rows(bitmap, summary)
            row = place_best_fit(
                lengths[i],
                sequence_length,
                rows,
                max_rows,
                document_limit,
                documents_left,
                heads,
                nexts,
                bitmap,
                summary,
            )
        rows += row == rows
        row_of[i] = base + row
    return base + rows


@kernel
def pack_best_fit_decreasing(
    lengths,
    sequence_length,
    document_limit,
    documents_left,
    row_of,
    order,
    counts,
    heads,
    nexts,
    bitmap,
    summary,
):
    """Best fit, longest first, over all of `lengths`; returns the number of rows."""
    lengths, row_of, documents_left = bare(lengths), bare(row_of), bare(documents_left)
    order, counts = bare(order), bare(counts)
    heads, nexts, bitmap, summary = bare(heads), bare(nexts), bare(bitmap), bare(summary)
    return place_best_fit_decreasing(
        lengths,
        sequence_length,
        document_limit,
        documents_left,
        row_of,
        order,
        counts,
        heads,
        nexts,
        bitmap,
        summary,
    )


@kernel
def pack_next_fit(lengths, sequence_length, document_limit, row_of):
    """Next fit: a document goes into the last row or opens a new one; returns the number of
    rows.
    """
    memory = np.zeros(2, np.int64)
    lengths, row_of, free, documents = (
        bare(lengths),
        bare(row_of),
        bare(memory[:1]),
        bare(memory[1:]),
    )
    rows = 0
    for i in range(len(lengths)):
        row = place_next_fit(
            lengths[i], sequence_length, rows, len(lengths), document_limit, free, documents
        )
        rows += row == rows
        row_of[i] = row
    keep_alive(memory)
    return rows
