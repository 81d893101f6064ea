"""Compiled filling: rows of pieces become tokens and targets, read from mapped shards by address.

What is read is checked as it is read: the length against the lengths file, every chunk of tokens against its
checksum, spans against theirs. Nothing is returned of a row in which something is wrong.
"""

import numpy as np

from penstock.compiled import (
    bare,
    inline_kernel,
    kernel,
    prefetch,
    view_f32,
    view_f64,
    view_i64,
    view_u16,
    view_u32,
    view_u64,
)
from penstock.inputs import blank, describe_row, fill_with, write_tokens
from penstock.loader._kernels import SOURCE
from penstock.sampling import BEGIN, DOCUMENT, TOKENS, TOTAL
from penstock.shards._kernels import (
    BATCH_COLUMNS,
    CHUNK_TOKENS,
    has_span_list,
    locate,
    null_spans_checksum,
    num_chunks,
    offsets_of,
    spans_checksum,
    token_checksum,
)

SHARD_STARTS, NUM_SHARDS, FIRST_BATCHES, ADDRESSES, BATCHES, PER_BATCH, OFFSET_BYTES, TOKEN_BYTES = range(8)
CHECKED, WEIGHTED, LENGTHS, LENGTHS_STRIDE, WEIGHT_SUMS, SHARD_BYTES = range(8, 14)
TABLE_COLUMNS = 14
"""Columns of a source's line in `tables` (uint64): addresses and numbers of its `DocumentTable`."""

AHEAD_LINES = 128
"""Cache lines of a piece that are asked for ahead, at most: 8 KiB, which stays near while one row is written."""

OK, WRONG_LENGTH, WRONG_CHECKSUM, WRONG_SPANS = range(4)


@inline_kernel
def find(table, document):
    """(shard address, shard size, address of its line in the batch table, row in the batch) of a document."""
    num_shards = np.int64(table[NUM_SHARDS])
    shard, batch, row = locate(
        document,
        view_i64(table[SHARD_STARTS], num_shards + 1),
        view_i64(table[FIRST_BATCHES], num_shards + 1),
        np.int64(table[PER_BATCH]),
    )
    base = view_u64(table[ADDRESSES], num_shards)[shard]
    size = view_u64(table[SHARD_BYTES], num_shards)[shard]
    return base, size, table[BATCHES] + np.uint64(batch * BATCH_COLUMNS * 8), row


@inline_kernel
def find_tokens(table, document):
    """(fault or OK, address of the document's first token, of its first checksum or 0, its length in tokens).

    Nothing outside the shard's mapping is ever read, whatever stands in its offsets.
    """
    base, size, line, row = find(table, document)
    batch = view_u64(line, BATCH_COLUMNS)
    length = np.int64(view_u32(table[LENGTHS] + np.uint64(document) * table[LENGTHS_STRIDE], 1)[0])
    if table[CHECKED] == np.uint64(0):
        first = view_i64(base + batch[0] + np.uint64(row * 8), 1)[0]
        address = base + batch[1] + np.uint64(first) * table[OFFSET_BYTES]
        status = OK if address - base + np.uint64(length) * table[TOKEN_BYTES] <= size else WRONG_LENGTH
        return status, address, np.uint64(0), length
    first, last = offsets_of(base, line, 0, row)
    address = base + batch[1] + np.uint64(first) * table[OFFSET_BYTES]
    if last - first != length or address - base + np.uint64(length) * table[TOKEN_BYTES] > size:
        return WRONG_LENGTH, address, np.uint64(0), length
    first, last = offsets_of(base, line, 2, row)
    checksums = base + batch[3] + np.uint64(first) * np.uint64(8)
    words = num_chunks(length) + np.int64(table[WEIGHTED])
    if last - first != words or checksums - base + np.uint64(words * 8) > size:
        return WRONG_CHECKSUM, address, checksums, length
    return OK, address, checksums, length


@inline_kernel
def look_ahead(tables, pieces, row_starts, row, found):
    """Find the documents of a row that is not yet written, and ask for their first bytes.

    Documents lie anywhere, so finding one waits for memory some five times; side by side, and while another row is
    written, the waits overlap. `found` (uint64 [pieces of all rows, 4]): fault, address, checksums, length.
    """
    for p in range(row_starts[row], row_starts[row + 1]):
        table = tables[pieces[p, SOURCE]]
        status, address, checksums, length = find_tokens(table, pieces[p, DOCUMENT])
        here = p - row_starts[0]
        found[here, 0], found[here, 1] = np.uint64(status), address
        found[here, 2], found[here, 3] = checksums, np.uint64(length)
        begin = address + np.uint64(pieces[p, BEGIN]) * table[TOKEN_BYTES]
        prefetch(checksums)
        lines = (np.uint64(pieces[p, TOKENS]) * table[TOKEN_BYTES]) // np.uint64(64) + np.uint64(1)
        for ahead in range(min(np.int64(lines), AHEAD_LINES)):
            prefetch(begin + np.uint64(ahead * 64))


@inline_kernel
def check_piece(table, piece, found, here, reach):
    """Check what will be read of a piece's document, `reach` tokens past the piece included; a fault or OK."""
    status, address, length = np.int64(found[here, 0]), found[here, 1], np.int64(found[here, 3])
    if status == OK and table[CHECKED] != np.uint64(0):
        words = view_u64(found[here, 2], num_chunks(length))
        size = np.int64(table[TOKEN_BYTES])
        last = min(piece[BEGIN] + piece[TOKENS] + reach, length)
        for chunk in range(piece[BEGIN] // CHUNK_TOKENS, num_chunks(last)):
            count = min(CHUNK_TOKENS, length - chunk * CHUNK_TOKENS)
            if token_checksum(address, size, chunk, count) != words[chunk]:
                status = WRONG_CHECKSUM
    return status


@inline_kernel
def read_spans(table, document):
    """A document's spans, checked: (fault or OK, number or −1 when all weights are 1, begins, ends, weights)."""
    base, size, line, row = find(table, document)
    batch = view_u64(line, BATCH_COLUMNS)
    status, _, checksums, tokens = find_tokens(table, document)
    first, last = offsets_of(base, line, 5, row)
    at, count = np.uint64(first) * np.uint64(4), last - first
    begins, ends, values = base + batch[6] + at, base + batch[7] + at, base + batch[8] + at
    if status == OK and (count < 0 or values - base + np.uint64(count) * np.uint64(4) > size):
        status = WRONG_SPANS
    number = count
    if status == OK:
        stored = view_u64(checksums + np.uint64(num_chunks(tokens) * 8), 1)[0]
        if has_span_list(base, line, row):
            found = spans_checksum(begins, ends, values, np.uint64(count))
        else:
            found, number = null_spans_checksum(), np.int64(-1)
        if found != stored:
            status = WRONG_SPANS
    if status != OK:
        count = np.int64(0)
    return status, number, view_u32(begins, count), view_u32(ends, count), view_f32(values, count)


@inline_kernel
def weigh_targets(targets, weights, first, count, number, begins, ends, values):
    """Apply spans to the targets of one piece at one distance.

    `targets` and `weights` are the piece's slots; slot i predicts token `first + i` of the document.
    """
    done = np.int64(0)
    for span in range(number):
        begin = min(max(np.int64(begins[span]) - first, done), count)
        end = min(max(np.int64(ends[span]) - first, done), count)
        if values[span] == np.float32(0.0):
            continue
        blank(targets, weights, done, begin)
        if len(weights):
            for i in range(begin, end):
                if targets[i] != -100:
                    weights[i] = values[span]
        done = end
    blank(targets, weights, done, count)


@inline_kernel
def whole_weight(table, piece):
    """Sum of weights of the targets at distance 1 of a whole document, from the lengths file; −1 when it cannot say."""
    entry = view_u32(table[LENGTHS] + np.uint64(piece[DOCUMENT]) * table[LENGTHS_STRIDE], 2)
    if piece[BEGIN] != 0 or piece[TOKENS] != np.int64(entry[0]):
        return -1.0
    if table[WEIGHTED] == np.uint64(0):
        return float(piece[TOKENS] - 1)
    if table[WEIGHT_SUMS] != np.uint64(0):
        return view_f64(table[WEIGHT_SUMS] + np.uint64(piece[DOCUMENT] * 8), 1)[0]
    return float(entry[1])


@inline_kernel
def weigh_spans(first, stop, number, begins, ends, values):
    """Sum of the weights of the tokens [first, stop) of a document."""
    total = 0.0
    for span in range(number):
        covered = min(np.int64(ends[span]), stop) - max(np.int64(begins[span]), first)
        total += max(covered, 0) * np.float64(values[span])
    return total


@inline_kernel
def fill_piece(table, piece, found, here, place, tokens, targets, weights):
    """Write a piece to the slots from `place` on of a row ([T], [D, T], [D, T or 0]); returns a fault or OK."""
    distances = len(targets)
    begin, count, total = piece[BEGIN], piece[TOKENS], piece[TOTAL]
    status, address = check_piece(table, piece, found, here, distances), found[here, 1]
    if status != OK:
        return status
    if table[TOKEN_BYTES] == np.uint64(2):
        write_tokens(view_u16(address, total), begin, count, total, place, tokens, targets)
    else:
        write_tokens(view_u32(address, total), begin, count, total, place, tokens, targets)
    if weights.shape[1]:
        for d in range(distances):
            known = place + max(min(count, total - begin - d - 1), 0)
            fill_with(weights[d, place:known], 1)
            fill_with(weights[d, known : place + count], 0)
    if table[WEIGHTED] != np.uint64(0):
        return apply_spans(table, piece, place, targets, weights)
    return OK


@inline_kernel
def apply_spans(table, piece, place, targets, weights):
    """Take out of a piece's targets what its document's spans leave out; returns a fault or OK."""
    status, number, begins, ends, values = read_spans(table, piece[DOCUMENT])
    if status != OK:
        return status
    whole = whole_weight(table, piece)
    if whole >= 0.0:
        # What the plan counted for the loss denominator must be what is trained.
        found = float(piece[TOTAL] - 1) if number < 0 else weigh_spans(1, piece[TOTAL], number, begins, ends, values)
        if abs(found - whole) > 1e-6 * (whole + 1.0):
            return WRONG_SPANS
    if number < 0:
        return OK
    end = place + piece[TOKENS]
    for d in range(len(targets)):
        row_weights = weights[d, place:end] if weights.shape[1] else weights[d]
        weigh_targets(
            targets[d, place:end], row_weights, piece[BEGIN] + d + 1, piece[TOKENS], number, begins, ends, values
        )
    return OK


@kernel
def fill_rows(
    tables, pieces, row_starts, pad_id, tokens, targets, weights, positions, document_ids,
    cu_seqlens, capacity, facts, source_ids,
):  # fmt: skip
    """Write rows from mapped shards, checking every chunk of tokens that is read.

    Args:
        tables: uint64 [sources, TABLE_COLUMNS].
        pieces, row_starts: The rows' pieces, as in a window; the first row may begin at any piece.
        tokens [R, T], targets [R, D, T], weights [R, D, T or 0], positions and document_ids [R, T or 0]: written.
        cu_seqlens: int32, written: all rows' cumulative lengths end to end, `capacity` entries a row, or, with 0, two
            more than the row has pieces.
        facts: int64 [R, 2], written: tokens, longest document.
        source_ids: int32 [pieces of the rows], written.

    Returns:
        (fault or OK, index of the piece in which it is or −1).
    """
    tables, pieces, row_starts = bare(tables), bare(pieces), bare(row_starts)
    tokens, targets, weights = bare(tokens), bare(targets), bare(weights)
    positions, document_ids, cu_seqlens = bare(positions), bare(document_ids), bare(cu_seqlens)
    rows, slots = tokens.shape
    first = row_starts[0]
    found = np.empty((row_starts[rows] - first, 4), np.uint64)
    if rows:
        look_ahead(tables, pieces, row_starts, 0, found)
    for row in range(rows):
        if row + 1 < rows:
            look_ahead(tables, pieces, row_starts, row + 1, found)
        cu_begin, cu_end = row_starts[row] - first + 2 * row, row_starts[row + 1] - first + 2 * row + 2
        if capacity:
            cu_begin, cu_end = row * capacity, (row + 1) * capacity
        cu = cu_seqlens[cu_begin:cu_end]
        place, longest, number = np.int64(0), np.int64(0), np.int64(0)
        for p in range(row_starts[row], row_starts[row + 1]):
            end = place + pieces[p, TOKENS]
            status = fill_piece(
                tables[pieces[p, SOURCE]], pieces[p], found, p - first, place, tokens[row], targets[row], weights[row]
            )
            if status != OK:
                return status, p
            describe_row(place, end, number, positions[row], document_ids[row])
            source_ids[p - first] = pieces[p, SOURCE]
            cu[number] = place
            longest = max(longest, end - place)
            place, number = end, number + 1
        facts[row, 0] = place
        cu[number] = place
        if place < slots:
            fill_with(tokens[row, place:], pad_id)
            for d in range(targets.shape[1]):
                blank(targets[row, d], weights[row, d], place, slots)
            describe_row(place, slots, number, positions[row], document_ids[row])
            longest, number = max(longest, slots - place), number + 1
        fill_with(cu[number:], slots)
        facts[row, 1] = longest
    return OK, np.int64(-1)


@kernel
def weigh_rows(tables, pieces, sums):
    """Add the loss weights of all targets of `pieces` to `sums` (float64 [D]), one for each distance.

    Whole documents cost a look at the lengths file, which the fill holds against the spans that it reads; parts of
    documents with spans have their spans read. Returns what `fill_rows` does.
    """
    for p in range(len(pieces)):
        piece = pieces[p]
        table = tables[piece[SOURCE]]
        whole = whole_weight(table, piece)
        if whole >= 0.0:
            sums[0] += whole
            if len(sums) == 1:
                continue
        number = np.int64(-1)
        if table[WEIGHTED] != np.uint64(0):
            status, number, begins, ends, values = read_spans(table, piece[DOCUMENT])
            if status != OK:
                return status, p
        for d in range(1 if whole >= 0.0 else 0, len(sums)):
            first = piece[BEGIN] + d + 1
            stop = min(first + piece[TOKENS], piece[TOTAL])
            if number >= 0:
                sums[d] += weigh_spans(first, stop, number, begins, ends, values)
            else:
                sums[d] += max(stop - first, 0)
    return OK, np.int64(-1)
