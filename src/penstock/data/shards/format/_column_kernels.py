"""Kernels of columns: checksums of documents' columns, and the copy of pieces into rows, checked as
they are read.

A column of a document is checked in chunks of `CHUNK_TOKENS` values, as its tokens are. Addresses
and counts come from an `ExtraTable`, which has checked that they are inside the mapped file.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel, view_i64, view_u32, view_u64
from penstock.core.randomness import mix
from penstock.data.shards.format._kernels import CHUNK_TOKENS, OK, locate, num_chunks
from penstock.data.stores._kernels import sum_words

BAD_COLUMN = 32
"""A fault next to those of `_kernels`: a column's values are not what was written."""

DOCUMENT, BEGIN, TOKENS, LENGTH, SOURCE = 1, 2, 3, 5, 6
"""The fields of the loader's `PIECE`, by number."""

_4 = np.uint64(4)
_COLUMN_SHIFT, _CHUNK_SHIFT = np.uint64(48), np.uint64(12)


@inline_kernel
def column_checksum(address, column, chunk, count):
    """Checksum of one chunk of a column of a document.

    Args:
        address: uint64, of the document's first value.
        column: Number of the column in its dataset.
        chunk: Which chunk of the document, from 0.
        count: Values in the chunk, at most `CHUNK_TOKENS`.
    """
    begin = address + np.uint64(chunk * CHUNK_TOKENS) * _4
    key = (
        (np.uint64(column) << _COLUMN_SHIFT) ^ (np.uint64(chunk) << _CHUNK_SHIFT) ^ np.uint64(count)
    )
    return mix(sum_words(begin, np.uint64(count) * _4), key)


@kernel
def checksum_columns(addresses, offsets, starts, words):
    """Checksums of all documents of a batch.

    Args:
        addresses: uint64 [columns], of the first value of each.
        offsets: int64 [documents + 1], in values.
        starts: int64 [documents + 1], first checksum of each document.
        words: uint64 [starts[-1]], written: of each document, its columns one after another.
    """
    for document in range(len(offsets) - 1):
        at = starts[document]
        size = offsets[document + 1] - offsets[document]
        for column in range(len(addresses)):
            begin = addresses[column] + np.uint64(offsets[document]) * _4
            for chunk in range(num_chunks(size)):
                words[at] = column_checksum(
                    begin, column, chunk, min(size - chunk * CHUNK_TOKENS, CHUNK_TOKENS)
                )
                at += 1


@inline_kernel
def find_column(lists, row, extra, stored):
    """Address of the values of a list, or 0 where its length is not `stored`.

    Args:
        lists: int64 [2, extras], addresses of the offsets of one batch, and how many values each
            has; then rows.
        row: Row of the document in its batch.
        extra: Which list.
        stored: The length that it must have.
    """
    address, rows = np.uint64(lists[0, extra]), lists[2, extra]
    offsets = view_i64(address, rows + 1)
    begin, end = offsets[row], offsets[row + 1]
    if begin < 0 or end > lists[1, extra] or end - begin != stored:
        return np.uint64(0), begin
    return address + np.uint64(8 * (rows + 1)), begin


@kernel
def blank_columns(pieces, row_starts, slots, known, fills, addresses):
    """Write the fill value to padding, and to the pieces of sources that lack a column.

    Args:
        pieces: int64 [pieces, 7], the fields of `PIECE`.
        row_starts: int64 [rows + 1].
        slots: Slots of a row.
        known: bool [sources, columns]: whether the source has the column.
        fills: uint32 [columns], the bytes of each fill value.
        addresses: uint64 [columns], of arrays of [rows, slots] 32-bit numbers, written.
    """
    for c in range(len(fills)):
        out = view_u32(addresses[c], (len(row_starts) - 1) * slots)
        for row in range(len(row_starts) - 1):
            at = row * slots
            for p in range(row_starts[row], row_starts[row + 1]):
                end = at + pieces[p, LENGTH]
                if not known[pieces[p, SOURCE], c]:
                    for i in range(at, end):
                        out[i] = fills[c]
                at = end
            for i in range(at, (row + 1) * slots):
                out[i] = fills[c]


@kernel
def copy_columns(
    pieces,
    row_starts,
    slots,
    source,
    tables,
    starts,
    first_batches,
    per_batch,
    lengths,
    wanted,
    first,
    addresses,
):
    """Copy the columns of the pieces of one source to their slots.

    Args:
        pieces: int64 [pieces, 7], the fields of `PIECE`.
        row_starts: int64 [rows + 1].
        slots: Slots of a row.
        source: Pieces of other sources are left alone.
        tables: int64 [batches, 3, extras]: addresses of offsets, numbers of values, numbers of
            rows.
        starts: int64 [shards + 1], first document of each shard.
        first_batches: int64 [shards + 1].
        per_batch: Documents of a batch.
        lengths: uint32 [documents, ...], tokens of each document.
        wanted: int64 [columns]: which column of the dataset each is; −1: the dataset does not have
            it.
        first: Number of the first column among the extras; the checksums stand behind the columns.
        addresses: uint64 [columns], of arrays of [rows, slots] 32-bit numbers, written.

    Returns:
        (a fault or OK, piece).
    """
    checksums = tables.shape[2] - 1
    for row in range(len(row_starts) - 1):
        at = row * slots
        for p in range(row_starts[row], row_starts[row + 1]):
            place = at
            at += pieces[p, LENGTH]
            if pieces[p, SOURCE] != source:
                continue
            document, begin, count = pieces[p, DOCUMENT], pieces[p, BEGIN], pieces[p, TOKENS]
            stored = np.int64(lengths[document, 0])
            if begin < 0 or count < 0 or begin + count > stored:
                return BAD_COLUMN, p
            _, batch, line = locate(document, starts, first_batches, per_batch)
            lists = tables[batch]
            chunks = num_chunks(stored)
            words, offset = find_column(lists, line, checksums, chunks * (checksums - first))
            if words == np.uint64(0):
                return BAD_COLUMN, p
            words += np.uint64(8 * offset)
            for c in range(len(wanted)):
                if wanted[c] < 0:
                    continue
                values, offset = find_column(lists, line, first + wanted[c], stored)
                if values == np.uint64(0):
                    return BAD_COLUMN, p
                address = values + np.uint64(offset) * _4
                known = view_u64(words + np.uint64(8 * wanted[c] * chunks), chunks)
                if count:
                    for chunk in range(
                        begin // CHUNK_TOKENS, (begin + count - 1) // CHUNK_TOKENS + 1
                    ):
                        size = min(stored - chunk * CHUNK_TOKENS, CHUNK_TOKENS)
                        if known[chunk] != column_checksum(address, wanted[c], chunk, size):
                            return BAD_COLUMN, p
                source_values = view_u32(address, stored)
                target = view_u32(addresses[c] + np.uint64(place) * _4, count)
                for i in range(count):
                    target[i] = source_values[begin + i]
    return OK, -1
