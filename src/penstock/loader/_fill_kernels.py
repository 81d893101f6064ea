"""Compiled filling: rows of pieces become tokens and targets, read from mapped shards by address.

What is read is checked as it is read. Nothing is returned of a row in which something is wrong.
"""

import numpy as np
from numba.extending import register_jitable

from penstock.compiled import (
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
)
from penstock.inputs import blank, describe_row, write_tokens
from penstock.loader._document_kernels import (
    CAUSAL,
    FIRST_LINES,
    FOUND_COLUMNS,
    LENGTHS,
    LENGTHS_STRIDE,
    OBJECTIVE,
    OK,
    STAGED,
    TOKEN_BYTES,
    TOKENS_AT,
    WEIGHT_SUMS,
    WEIGHTED,
    WRONG_MEASURE,
    WRONG_SPANS,
    ask_ahead,
    check_piece,
    find_pieces,
    read_spans,
)
from penstock.loader._kernels import SOURCE
from penstock.loader._rewrite_kernels import rewrite_piece, weigh_compiled, weigh_staged, work_space, write_rewritten
from penstock.sampling import BEGIN, DOCUMENT, LENGTH, TOKENS, TOTAL
from penstock.vectors import CACHE_LINE, fill_with

_ROUNDING = 1e-12
"""Of sums of weights, relative; those of whole numbers are exact."""


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
def fill_piece(table, piece, found, place, tokens, targets, weights):
    """Write a piece to the slots from `place` on of a row ([T], [D, T], [D, T or 0]); returns a fault or OK."""
    distances = len(targets)
    begin, count, total = piece[BEGIN], piece[TOKENS], piece[TOTAL]
    status, address = check_piece(table, piece, found, distances), found[TOKENS_AT]
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
def fill_staged(table, piece, found, place, tokens, targets, weights, new, new_weights):
    """Like `fill_piece` for a piece that Python wrote: `new` int32 [slots], `new_weights` float32 [slots]."""
    status = check_piece(table, piece, found, 0)
    if status == OK:
        write_rewritten(new, new_weights, True, np.int64(0), place, tokens, targets, weights)
    return status


@inline_kernel
def fill_compiled(table, piece, found, place, tokens, targets, weights, scratch):
    """Like `fill_piece` for a source with a program; (fault or OK, prefix).

    Where there is no scratch no source has a program, and Numba compiles none of this.
    """
    if scratch is None:
        return np.int64(WRONG_MEASURE), np.int64(0)
    status = np.int64(check_piece(table, piece, found, 0))
    if status != OK:
        return status, np.int64(0)
    slots = piece[LENGTH]
    _, _, new, new_weights, _ = work_space(scratch, slots)
    if tokens.itemsize == 4:
        new = view_i32(np.uint64(tokens[place:].ctypes.data), slots)
    status, weighted, reads, prefix = rewrite_piece(table, piece, found[TOKENS_AT], new, new_weights, scratch)
    if status == OK:
        write_rewritten(new, new_weights, weighted, reads, place, tokens, targets, weights)
    return np.int64(status), prefix


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
        # Added in the same order as when they were written; asked so that infinite and no number are wrong, too.
        if not abs(found - whole) <= _ROUNDING * abs(found):
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
        tables: uint64 [sources, TABLE_COLUMNS].
        pieces, row_starts: The rows' pieces, as in a window; the first row may begin at any piece.
        tokens: [R, T], written.
        distances: D, of targets.
        addresses: uint64 [6]: of `tokens`; of targets [R, D, T], weights [R, D, T], positions and document ids [R, T],
            and whether a slot is in a prefix (bool [R, T]), all written but where the address is 0.
        capacity: Entries of cumulative lengths that a row has, or 0 for two more than the row has pieces.
        notes: int32, written: (tokens, longest document) of each row, source of each piece, prefix of each piece, all
            rows' cumulative lengths, end to end (`note_places`).
        staged: uint64 [4], where Python wrote pieces (`Staged.addresses`); read only where a source is staged.
        scratch: uint64 [scratch_words(T)], or None where no source has a program.

    Returns:
        (fault or OK, index of the piece in which it is or −1).
    """
    tables, pieces, row_starts = bare(tables), bare(pieces), bare(row_starts)
    tokens, notes = bare(tokens), bare(notes)
    rows, slots = tokens.shape
    first, count = row_starts[0], row_starts[rows] - row_starts[0]
    targets = view_array(addresses[1], (rows, distances, slots), tokens.dtype)
    weights = view_array(addresses[2], (rows, distances, slots if addresses[2] else 0), np.float32)
    positions = view_array(addresses[3], (rows, slots if addresses[3] else 0), tokens.dtype)
    document_ids = view_array(addresses[4], (rows, slots if addresses[4] else 0), tokens.dtype)
    prefixes = view_array(addresses[5], (rows, slots if addresses[5] else 0), np.bool_)
    sources, prefix_lengths, cu_seqlens = note_places(rows, count)
    memory = np.empty((count, FOUND_COLUMNS), np.uint64)
    found = bare(memory)
    if rows:
        find_pieces(tables, pieces, first, row_starts[1], found)
        ask_ahead(found, np.int64(0), row_starts[1] - first, FIRST_LINES)
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
            end = place + pieces[p, LENGTH]
            table, prefix = tables[pieces[p, SOURCE]], np.int64(0)
            lines = (end - place) * np.int64(table[TOKEN_BYTES]) // CACHE_LINE + 2
            asked = ask_ahead(found, asked, following, lines)
            if table[OBJECTIVE] == np.uint64(CAUSAL):
                status = fill_piece(table, pieces[p], found[p - first], place, tokens[row], targets[row], weights[row])
            elif table[OBJECTIVE] == np.uint64(STAGED):
                prefix = np.int64(view_i32(staged[3], len(pieces))[p])
                start, width = np.uint64(view_i64(staged[0], len(pieces))[p]) * np.uint64(4), end - place
                status = fill_staged(
                    table, pieces[p], found[p - first], place, tokens[row], targets[row], weights[row],
                    view_i32(staged[1] + start, width), view_f32(staged[2] + start, width),
                )  # fmt: skip
            else:
                status, prefix = fill_compiled(
                    table, pieces[p], found[p - first], place, tokens[row], targets[row], weights[row], scratch,
                )  # fmt: skip
            if status != OK:
                return status, p
            notes[prefix_lengths + p - first] = prefix
            if prefixes.shape[1]:
                fill_with(prefixes[row, place : place + prefix], True)
                fill_with(prefixes[row, place + prefix : end], False)
            describe_row(place, end, number, positions[row], document_ids[row])
            notes[sources + p - first] = pieces[p, SOURCE]
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
    for p in range(len(pieces)):
        piece = pieces[p]
        table = tables[piece[SOURCE]]
        if table[OBJECTIVE] != np.uint64(CAUSAL):
            if table[OBJECTIVE] == np.uint64(STAGED):
                weigh_staged(staged_weights[staged_starts[p] : staged_starts[p] + piece[LENGTH]], sums)
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
