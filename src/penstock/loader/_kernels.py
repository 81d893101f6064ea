"""The compiled heart of the loader: planning a window of rows, and filling rows from mapped shards.

A piece is what lies in a row without a break: some tokens of one document. Pieces are int64 rows of
`PIECE_COLUMNS`; columns up to `LENGTH` are the sampling room's, then the number of the source.
"""

import numpy as np

from penstock.compiled import kernel
from penstock.packing import place_best_fit, place_best_fit_decreasing, place_next_fit
from penstock.sampling import BEGIN, COLUMNS, EMPTY, LENGTH, POSITION, TOKENS, TOTAL, charge, pick

SOURCE = LENGTH + 1
PIECE_COLUMNS = SOURCE + 1

FINISHED, WINDOW_FULL, PIECES_FULL = -1, -2, -3
BEST_FIT, BEST_FIT_DECREASING, NEXT_FIT, CONCAT, NONE = range(5)


@kernel
def plan_window(
    packing, sequence_length, max_rows, max_pieces, shares, credits, heads, ends, entries, unit, skipped, cursors,
    pieces, row_of, progress, best_fit_heads, best_fit_nexts, words, summary,
):  # fmt: skip
    """Take documents from the sources' buffers, one by one, and give each a row.

    Goes on from `progress` (int64 [3]: pieces, rows, free slots of the last row) and returns why it stopped:
    WINDOW_FULL, PIECES_FULL, FINISHED (no source has anything left), or the number of a source whose buffer
    is empty. A document that no longer fits the window is not taken: it stays first of its source. `cursors`
    (int64 [sources, 2]) is kept just behind the last piece taken of each source: position, first token.
    """
    count, rows = progress[0], progress[1]
    free = progress[2:3]
    while True:
        source = pick(shares, credits, heads, ends, entries, unit)
        if source < 0:
            progress[0], progress[1] = count, rows
            return FINISHED if source == -1 else -2 - source
        if count >= max_pieces:
            progress[0], progress[1] = count, rows
            return PIECES_FULL
        entry = entries[heads[source]]
        length = entry[LENGTH]
        if packing == BEST_FIT:
            row = place_best_fit(
                length, sequence_length, rows, max_rows, best_fit_heads, best_fit_nexts, words, summary
            )
        elif packing == CONCAT:
            length = min(length, free[0]) if rows > 0 and free[0] > 0 else min(length, sequence_length)
            row = place_next_fit(length, sequence_length, rows, max_rows, free)
        elif packing == NEXT_FIT:
            row = place_next_fit(length, sequence_length, rows, max_rows, free)
        elif packing == BEST_FIT_DECREASING:
            # Rows are given when the window is known; until then count its tokens.
            row = 0 if free[0] + length <= max_rows * sequence_length else -1
            free[0] += length
        else:
            row = rows if rows < max_rows else -1
        if row < 0:
            progress[0], progress[1] = count, rows
            return WINDOW_FULL
        rows = max(rows, row + 1)
        pieces[count, :SOURCE] = entry[:SOURCE]
        pieces[count, SOURCE] = source
        row_of[count] = row
        skipped[source] += entry[EMPTY:COLUMNS]
        charge(shares, credits, source, length, unit)
        if length < entry[LENGTH]:
            pieces[count, TOKENS] = length
            pieces[count, LENGTH] = length
            entry[BEGIN] += length
            entry[TOKENS] -= length
            entry[LENGTH] -= length
            entry[EMPTY:] = 0
        else:
            heads[source] += 1
        begin = pieces[count, BEGIN] + pieces[count, TOKENS]
        cursors[source, 0] = pieces[count, POSITION] + (begin >= pieces[count, TOTAL])
        cursors[source, 1] = 0 if begin >= pieces[count, TOTAL] else begin
        count += 1


@kernel
def sort_by_row(pieces, row_of, num_rows, sorted_pieces, row_starts):
    """Order pieces by row, keeping the stream order inside a row (counting sort); fills `row_starts` [rows + 1]."""
    row_starts[:] = 0
    for i in range(len(row_of)):
        row_starts[row_of[i] + 1] += 1
    for row in range(num_rows):
        row_starts[row + 1] += row_starts[row]
    place = row_starts.copy()
    for i in range(len(row_of)):
        sorted_pieces[place[row_of[i]]] = pieces[i]
        place[row_of[i]] += 1


@kernel
def pack_window(lengths, sequence_length, row_of, heads, nexts, words, summary):
    """Best fit over a whole window, longest first; returns the number of rows."""
    order = np.empty(len(lengths), np.int64)
    counts = np.empty(sequence_length + 2, np.int64)
    return place_best_fit_decreasing(lengths, sequence_length, row_of, order, counts, heads, nexts, words, summary)


SHARD_STARTS, NUM_SHARDS, FIRST_BATCHES, ADDRESSES, BATCHES, PER_BATCH, OFFSET_BYTES, TOKEN_BYTES = range(8)
CHECKED, WEIGHTED, LENGTHS, LENGTHS_STRIDE, WEIGHT_SUMS, SHARD_BYTES = range(8, 14)
TABLE_COLUMNS = 14
"""Columns of a source's line in `tables` (uint64): addresses and numbers of its `DocumentTable`."""

OK, WRONG_LENGTH, WRONG_CHECKSUM, WRONG_SPANS = range(4)


@inline_kernel
def locate(table, document):
    """(shard address, address of its line in the batch table, row in the batch) of a document."""
    starts = view_i64(table[SHARD_STARTS], np.int64(table[NUM_SHARDS]) + 1)
    low, high = np.int64(0), np.int64(table[NUM_SHARDS]) - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if starts[middle] <= document:
            low = middle
        else:
            high = middle - 1
    inside = document - starts[low]
    per_batch = np.int64(table[PER_BATCH])
    batch = view_i64(table[FIRST_BATCHES], low + 1)[low] + inside // per_batch
    address = view_u64(table[ADDRESSES], low + 1)[low]
    return address, table[BATCHES] + np.uint64(batch * 72), inside % per_batch


@inline_kernel
def open_piece(table, piece, reach):
    """Find a piece's tokens and check what will be read of them, `reach` tokens past its end included.

    Returns:
        (fault or OK, address of the document's first token, shard address, batch line address, row in the batch).
    """
    document = piece[DOCUMENT]
    shard, line, row = locate(table, document)
    batch = view_u64(line, 9)
    stored = view_i64(shard + batch[0] + np.uint64(row * 8), 2)
    length = np.int64(view_u32(table[LENGTHS] + np.uint64(document) * table[LENGTHS_STRIDE], 1)[0])
    address = shard + batch[1] + np.uint64(stored[0]) * table[OFFSET_BYTES]
    if table[CHECKED] == np.uint64(0):
        return OK, address, shard, line, row
    if stored[1] - stored[0] != length:
        return WRONG_LENGTH, address, shard, line, row
    sums = view_i64(shard + batch[2] + np.uint64(row * 8), 2)
    chunks = (length + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    if sums[1] - sums[0] != chunks + np.int64(table[WEIGHTED]):
        return WRONG_CHECKSUM, address, shard, line, row
    words = view_u64(shard + batch[3] + np.uint64(sums[0] * 8), sums[1] - sums[0])
    first = piece[BEGIN] // CHUNK_TOKENS
    last = (min(piece[BEGIN] + piece[TOKENS] + reach, length) - 1) // CHUNK_TOKENS
    for chunk in range(first, last + 1):
        count = min(CHUNK_TOKENS, length - chunk * CHUNK_TOKENS)
        if token_checksum(address, np.int64(table[TOKEN_BYTES]), chunk, count) != words[chunk]:
            return WRONG_CHECKSUM, address, shard, line, row
    return OK, address, shard, line, row


@inline_kernel
def spans_of(table, shard, line, row):
    """A document's spans: (has spans, number, begins, ends, weights); without spans every weight is 1."""
    batch = view_u64(line, 9)
    some = table[WEIGHTED] != np.uint64(0)
    if some and batch[4] != np.uint64(0):
        some = (view_u8(shard + batch[4], (row >> 3) + 1)[row >> 3] >> (row & 7)) & 1 == 1
    first = last = np.int64(0)
    if some:
        bounds = view_i64(shard + batch[5] + np.uint64(row * 8), 2)
        first, last = bounds[0], bounds[1]
    skip = np.uint64(first * 4)
    return (
        some,
        last - first,
        view_u32(shard + batch[6] + skip, last - first),
        view_u32(shard + batch[7] + skip, last - first),
        view_f32(shard + batch[8] + skip, last - first),
    )


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


@kernel
def fill_rows(
    tables, pieces, row_starts, pad_id, tokens, targets, weights, positions, document_ids,
    cu_seqlens, cu_starts, max_seqlens, num_tokens, fault,
):  # fmt: skip
    """Write rows from mapped shards, checking every chunk of tokens that is read.

    Args:
        tables: uint64 [sources, TABLE_COLUMNS].
        pieces, row_starts: The rows' pieces, as in a window.
        tokens [R, T], targets [R, D, T], weights [R, D, T or 0], positions and document_ids [R, T or 0]: written.
        cu_seqlens, cu_starts: All rows' cumulative lengths end to end (int32), and where each row's begin [R + 1].
        max_seqlens, num_tokens: int64 [R].
        fault: int64 [2], written when something is wrong: which, and the index of the piece.
    """
    slots = tokens.shape[1]
    distances = targets.shape[1]
    most = 0
    for row in range(len(tokens)):
        most = max(most, row_starts[row + 1] - row_starts[row])
    addresses = np.empty(most, np.uint64)
    shards = np.empty(most, np.uint64)
    lines = np.empty(most, np.uint64)
    batch_rows = np.empty(most, np.int64)
    for row in range(len(tokens)):
        row_tokens, row_targets, row_weights = tokens[row], targets[row], weights[row]
        begin_piece, end_piece = row_starts[row], row_starts[row + 1]
        cu = cu_seqlens[cu_starts[row] : cu_starts[row + 1]]
        place = np.int64(0)
        longest = np.int64(0)
        for p in range(begin_piece, end_piece):
            piece = pieces[p]
            table = tables[piece[SOURCE]]
            k = p - begin_piece
            status, addresses[k], shards[k], lines[k], batch_rows[k] = open_piece(table, piece, distances)
            if status != OK:
                fault[0], fault[1] = status, p
                return
            count = piece[TOKENS]
            if table[TOKEN_BYTES] == np.uint64(2):
                source_16 = view_u16(addresses[k] + np.uint64(piece[BEGIN] * 2), count)
                for i in range(count):
                    row_tokens[place + i] = source_16[i]
            else:
                source_32 = view_u32(addresses[k] + np.uint64(piece[BEGIN] * 4), count)
                for i in range(count):
                    row_tokens[place + i] = source_32[i]
            cu[k] = place
            describe_row(place, place + count, k, positions[row], document_ids[row])
            longest = max(longest, count)
            place += count
        num_tokens[row] = place
        cu[end_piece - begin_piece] = place
        if place < slots:
            for i in range(place, slots):
                row_tokens[i] = pad_id
            describe_row(place, slots, end_piece - begin_piece, positions[row], document_ids[row])
            longest = max(longest, slots - place)
        for i in range(end_piece - begin_piece + (place < slots), len(cu)):
            cu[i] = slots
        max_seqlens[row] = longest
        shift_targets(row_tokens, row_targets)
        if row_weights.shape[1]:
            row_weights[:] = np.float32(1.0)
        place = 0
        for p in range(begin_piece, end_piece):
            piece = pieces[p]
            table = tables[piece[SOURCE]]
            k = p - begin_piece
            count = piece[TOKENS]
            end = piece[BEGIN] + count
            for d in range(distances):
                distance_targets, distance_weights = row_targets[d], row_weights[d]
                # The last d + 1 slots predict past the piece: the next part of a split document, or nothing.
                for i in range(max(count - d - 1, 0), count):
                    ahead = piece[BEGIN] + i + d + 1
                    if ahead < piece[TOTAL]:
                        if table[TOKEN_BYTES] == np.uint64(2):
                            distance_targets[place + i] = view_u16(addresses[k] + np.uint64(ahead * 2), 1)[0]
                        else:
                            distance_targets[place + i] = view_u32(addresses[k] + np.uint64(ahead * 4), 1)[0]
                    else:
                        blank(distance_targets, distance_weights, place + i, place + i + 1)
            if table[WEIGHTED] != np.uint64(0):
                some, number, begins, ends, values = spans_of(table, shards[k], lines[k], batch_rows[k])
                if some:
                    if not spans_are_right(table, shards[k], lines[k], batch_rows[k]):
                        fault[0], fault[1] = WRONG_SPANS, p
                        return
                    for d in range(distances):
                        weigh_targets(
                            row_targets[d, place : place + count],
                            row_weights[d, place : place + count] if row_weights.shape[1] else row_weights[d],
                            piece[BEGIN] + d + 1, count, number, begins, ends, values,
                        )  # fmt: skip
            place += count
        for d in range(distances):
            blank(row_targets[d], row_weights[d], place, slots)


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


@kernel
def weigh_rows(tables, pieces, sums):
    """Add the loss weights of all targets of `pieces` to `sums` (float64 [D]), one for each distance.

    Whole documents cost a look at the lengths file, which the fill holds against the spans that it reads; parts of
    documents with spans have their spans read.
    """
    for p in range(len(pieces)):
        piece = pieces[p]
        table = tables[piece[SOURCE]]
        some = False
        for d in range(len(sums)):
            whole = whole_weight(table, piece) if d == 0 else -1.0
            if whole >= 0.0:
                sums[d] += whole
                continue
            first = piece[BEGIN] + d + 1
            stop = min(first + piece[TOKENS], piece[TOTAL])
            if table[WEIGHTED] != np.uint64(0):
                shard, line, row, _ = locate(table, piece[DOCUMENT])
                some, number, begins, ends, values = spans_of(table, shard, line, row)
                if some:
                    sums[d] += weigh_spans(first, stop, number, begins, ends, values)
                    continue
            sums[d] += max(stop - first, 0)
