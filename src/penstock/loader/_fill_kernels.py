"""Compiled filling: rows of pieces become tokens and targets, read from mapped shards by address.

Bytes are checked as they are read. On the first fault the call stops, and the caller discards all rows.
"""

import numpy as np
from numba.extending import register_jitable

from penstock.core.compiled import (
    bare,
    inline_kernel,
    keep_alive,
    kernel,
    view_array,
    view_f32,
    view_f64,
    view_i32,
    view_i64,
    view_u16,
    view_u32,
    viewer,
)
from penstock.core.vectors import CACHE_LINE, fill_with
from penstock.inputs._kernels import blank, describe_row, write_tokens
from penstock.loader._document_kernels import (
    CAUSAL,
    FIRST_LINES,
    FOUND,
    OK,
    STAGED,
    WRONG_MEASURE,
    WRONG_SPANS,
    check_piece,
    find_pieces,
    prefetch_ahead,
    read_spans,
    stored_tokens,
    tables_of,
)
from penstock.loader._rewrite_kernels import rewrite_piece, weigh_compiled, weigh_staged, work_space, write_rewritten

_ROUNDING = 1e-12
"""Of sums of weights, relative; those of whole numbers are exact."""

ROW_ARRAYS = np.dtype(
    [
        ("tokens", np.uint64),  # [R, T]
        ("targets", np.uint64),  # [R, D, T], of the dtype of the tokens
        ("weights", np.uint64),  # float32 [R, D, T]
        ("positions", np.uint64),  # [R, T], of the dtype of the tokens
        ("document_ids", np.uint64),  # [R, T], of the dtype of the tokens
        ("prefix", np.uint64),  # bool [R, T], whether the slot is in a prefix
    ],
    align=True,
)
"""Addresses of the arrays that R rows of T slots are written to; 0: the array is not wanted."""

_view_row_arrays = viewer(ROW_ARRAYS)

STAGED_ARRAYS = np.dtype(
    [
        ("starts", np.uint64),  # int64 [P], first slot of each piece in the next two
        ("tokens", np.uint64),  # int32 [slots]
        ("weights", np.uint64),  # float32 [slots]
        ("prefixes", np.uint64),  # int32 [P], tokens of each piece's prefix
    ],
    align=True,
)
"""Addresses of the arrays that Python objectives wrote for the P pieces of a step."""

_view_staged_arrays = viewer(STAGED_ARRAYS)


@inline_kernel
def write_span_weights(targets, weights, first, count, number, begins, ends, values):
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
    if piece.begin != 0 or piece.tokens != stored_tokens(table, piece.document):
        return -1.0
    if not table.has_spans:
        return float(piece.tokens - 1)
    if table.weight_sums != np.uint64(0):
        return view_f64(table.weight_sums + np.uint64(piece.document * 8), 1)[0]
    return float(view_u32(table.lengths + np.uint64(piece.document) * table.lengths_stride, 2)[1])


@inline_kernel
def weigh_spans(first, stop, number, begins, ends, values):
    """Sum of the weights of the tokens [first, stop) of a document."""
    total = 0.0
    for span in range(number):
        covered = min(np.int64(ends[span]), stop) - max(np.int64(begins[span]), first)
        total += max(covered, 0) * np.float64(values[span])
    return total


@inline_kernel
def fill_piece(table, piece, found, place, tokens, targets, weights):
    """Write a piece to the slots from `place` on of a row ([T], [D, T], [D, T or 0]); returns a fault or OK."""
    distances = len(targets)
    begin, count, total = piece.begin, piece.tokens, piece.total
    status = check_piece(table, piece, found, distances)
    if status != OK:
        return status
    if table.token_bytes == 2:
        write_tokens(view_u16(found.tokens, total), begin, count, total, place, tokens, targets)
    else:
        write_tokens(view_u32(found.tokens, total), begin, count, total, place, tokens, targets)
    if weights.shape[1]:
        for d in range(distances):
            known = place + max(min(count, total - begin - d - 1), 0)
            fill_with(weights[d, place:known], 1)
            fill_with(weights[d, known : place + count], 0)
    if table.has_spans:
        return apply_spans(table, piece, place, targets, weights)
    return OK


@inline_kernel
def fill_staged(table, piece, found, place, tokens, targets, weights, new, new_weights):
    """Like `fill_piece` for a piece that Python wrote: `new` int32 [slots], `new_weights` float32 [slots]."""
    status = check_piece(table, piece, found, 0)
    if status == OK:
        write_rewritten(new, new_weights, True, np.int64(0), place, tokens, targets, weights)
    return status


@inline_kernel
def fill_compiled(table, piece, found, place, tokens, targets, weights, scratch):
    """Like `fill_piece` for a source with a program; (fault or OK, prefix).

    If `scratch` is None, no source has a compiled objective, and Numba drops this branch.
    """
    if scratch is None:
        return np.int64(WRONG_MEASURE), np.int64(0)
    status = np.int64(check_piece(table, piece, found, 0))
    if status != OK:
        return status, np.int64(0)
    slots = piece.length
    _, _, new, new_weights, _ = work_space(scratch, slots)
    if tokens.itemsize == 4:
        new = view_i32(np.uint64(tokens[place:].ctypes.data), slots)
    status, weighted, reads, prefix = rewrite_piece(table, piece, found.tokens, new, new_weights, scratch)
    if status == OK:
        write_rewritten(new, new_weights, weighted, reads, place, tokens, targets, weights)
    return np.int64(status), prefix


@inline_kernel
def apply_spans(table, piece, place, targets, weights):
    """Set targets outside the document's spans to −100 and write the spans' weights. Returns a fault or OK."""
    status, number, begins, ends, values = read_spans(table, piece.document)
    if status != OK:
        return status
    whole = whole_weight(table, piece)
    if whole >= 0.0:
        # What the plan counted for the loss denominator must be what is trained.
        found = float(piece.total - 1) if number < 0 else weigh_spans(1, piece.total, number, begins, ends, values)
        # Added in the same order as when they were written; asked so that infinite and no number are wrong, too.
        if not abs(found - whole) <= _ROUNDING * abs(found):
            return WRONG_SPANS
    if number < 0:
        return OK
    end = place + piece.tokens
    for d in range(len(targets)):
        row_weights = weights[d, place:end] if weights.shape[1] else weights[d]
        write_span_weights(
            targets[d, place:end], row_weights, piece.begin + d + 1, piece.tokens, number, begins, ends, values
        )
    return OK


@register_jitable
def note_places(rows, count):
    """Where in the notes on `rows` with `count` pieces sources, prefixes and cumulative lengths begin."""
    return 2 * rows, 2 * rows + count, 2 * rows + 2 * count


@kernel
def fill_rows(
    tables, pieces, row_starts, pad_id, tokens, distances, addresses, capacity, notes, staged, scratch,
):  # fmt: skip
    """Write rows from mapped shards, checking every chunk of tokens that is read.

    Unpacking an array costs Numba a tenth of a microsecond, so arrays that are kept between calls come by address.

    Args:
        tables: uint64, records `TABLE` [sources] as words.
        pieces, row_starts: The rows' pieces (`PIECE`), as in a window; the first row may begin at any piece.
        tokens: [R, T], written.
        distances: D, of targets.
        addresses: uint64, a record `ROW_ARRAYS` as words; what they lead to is written.
        capacity: Entries of cumulative lengths that a row has, or 0 for two more than the row has pieces.
        notes: int32, written: (tokens, longest document) of each row, source of each piece, prefix of each piece, all
            rows' cumulative lengths, end to end (`note_places`).
        staged: uint64, a record `STAGED_ARRAYS` as words: what Python wrote; read only where a source is staged.
        scratch: uint64 [scratch_words(T)], or None where no source has a program.

    Returns:
        (fault or OK, index of the piece in which it is or −1).
    """
    tables, pieces, row_starts = tables_of(tables), bare(pieces), bare(row_starts)
    tokens, notes = bare(tokens), bare(notes)
    rows, slots = tokens.shape
    first, count = row_starts[0], row_starts[rows] - row_starts[0]
    at = _view_row_arrays(np.uint64(addresses.ctypes.data), 1)[0]
    written = _view_staged_arrays(np.uint64(staged.ctypes.data), 1)[0]
    targets = view_array(at.targets, (rows, distances, slots), tokens.dtype)
    weights = view_array(at.weights, (rows, distances, slots if at.weights else 0), np.float32)
    positions = view_array(at.positions, (rows, slots if at.positions else 0), tokens.dtype)
    document_ids = view_array(at.document_ids, (rows, slots if at.document_ids else 0), tokens.dtype)
    prefixes = view_array(at.prefix, (rows, slots if at.prefix else 0), np.bool_)
    sources, prefix_lengths, cu_seqlens = note_places(rows, count)
    memory = np.empty(count, FOUND)
    found = bare(memory)
    if rows:
        find_pieces(tables, pieces, first, row_starts[1], found)
        prefetch_ahead(found, np.int64(0), row_starts[1] - first, FIRST_LINES)
    for row in range(rows):
        # The pieces of the next row, found and asked for while this one is written.
        asked = row_starts[row + 1] - first
        following = row_starts[min(row + 2, rows)] - first
        find_pieces(tables, pieces, first + asked, first + following, found[asked:])
        cu_begin, cu_end = row_starts[row] - first + 2 * row, row_starts[row + 1] - first + 2 * row + 2
        if capacity:
            cu_begin, cu_end = row * capacity, (row + 1) * capacity
        cu = notes[cu_seqlens + cu_begin : cu_seqlens + cu_end]
        place, longest, number = np.int64(0), np.int64(0), np.int64(0)
        for p in range(row_starts[row], row_starts[row + 1]):
            piece, prefix = pieces[p], np.int64(0)
            table, end = tables[piece.source], place + piece.length
            lines = piece.length * table.token_bytes // CACHE_LINE + 2
            asked = prefetch_ahead(found, asked, following, lines)
            if table.objective == CAUSAL:
                status = fill_piece(table, piece, found[p - first], place, tokens[row], targets[row], weights[row])
            elif table.objective == STAGED:
                prefix = np.int64(view_i32(written.prefixes, len(pieces))[p])
                start = np.uint64(view_i64(written.starts, len(pieces))[p]) * np.uint64(4)
                status = fill_staged(
                    table, piece, found[p - first], place, tokens[row], targets[row], weights[row],
                    view_i32(written.tokens + start, piece.length), view_f32(written.weights + start, piece.length),
                )  # fmt: skip
            else:
                status, prefix = fill_compiled(
                    table, piece, found[p - first], place, tokens[row], targets[row], weights[row], scratch,
                )  # fmt: skip
            if status != OK:
                return status, p
            notes[prefix_lengths + p - first] = prefix
            if prefixes.shape[1]:
                fill_with(prefixes[row, place : place + prefix], True)
                fill_with(prefixes[row, place + prefix : end], False)
            describe_row(place, end, number, positions[row], document_ids[row])
            notes[sources + p - first] = piece.source
            cu[number] = place
            longest = max(longest, end - place)
            place, number = end, number + 1
        notes[2 * row] = place
        cu[number] = place
        if place < slots:
            fill_with(tokens[row, place:], pad_id)
            for d in range(targets.shape[1]):
                blank(targets[row, d], weights[row, d], place, slots)
            if prefixes.shape[1]:
                fill_with(prefixes[row, place:], False)
            describe_row(place, slots, number, positions[row], document_ids[row])
            longest, number = max(longest, slots - place), number + 1
        fill_with(cu[number:], slots)
        notes[2 * row + 1] = longest
    keep_alive(memory)
    return OK, np.int64(-1)


@kernel
def weigh_rows(tables, pieces, sums, staged_starts, staged_weights, scratch):
    """Add the loss weights of all targets of `pieces` to `sums` (float64 [D]), one for each distance.

    Whole documents cost a look at the lengths file, which the fill holds against the spans that it reads; parts of
    documents with spans have their spans read. `staged_starts` (int64 [pieces], or [0]) says where in `staged_weights`
    (float32) Python wrote a piece's. The rest is as in `fill_rows`, and so is what it returns.
    """
    tables = tables_of(tables)
    for p in range(len(pieces)):
        piece = pieces[p]
        table = tables[piece.source]
        if table.objective != CAUSAL:
            if table.objective == STAGED:
                weigh_staged(staged_weights[staged_starts[p] : staged_starts[p] + piece.length], sums)
                continue
            status = weigh_compiled(table, piece, scratch, sums)
            if status != OK:
                return status, p
            continue
        whole = whole_weight(table, piece)
        if whole >= 0.0:
            sums[0] += whole
            if len(sums) == 1:
                continue
        number = np.int64(-1)
        if table.has_spans:
            status, number, begins, ends, values = read_spans(table, piece.document)
            if status != OK:
                return status, p
        for d in range(1 if whole >= 0.0 else 0, len(sums)):
            first = piece.begin + d + 1
            stop = min(first + piece.tokens, piece.total)
            if number >= 0:
                sums[d] += weigh_spans(first, stop, number, begins, ends, values)
            else:
                sums[d] += max(stop - first, 0)
    return OK, np.int64(-1)
