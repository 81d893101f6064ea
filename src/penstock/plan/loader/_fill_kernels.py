"""Compiled filling: rows of pieces become tokens and targets, read from mapped shards by address.

Bytes are checked as they are read. On the first fault the call stops, and the caller discards all
rows.
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
from penstock.core.vectors import CACHE_LINE, fill_ahead, fill_with
from penstock.data.shards.format._kernels import BAD_SPANS, OK
from penstock.plan.inputs._kernels import blank, describe_row, write_tokens
from penstock.plan.loader._document_kernels import (
    BAD_MEASURE,
    CAUSAL,
    FIRST_LINES,
    LOCATION,
    PIECES_AHEAD,
    PYTHON,
    check_piece,
    locate_pieces,
    prefetch_ahead,
    prefetch_length,
    read_spans,
    sources_of,
    stored_tokens,
)
from penstock.plan.loader._rewrite_kernels import (
    rewrite_piece,
    weigh_compiled,
    weigh_written,
    work_space,
    write_own_targets,
    write_rewritten,
)

_ROUNDING = 1e-12
"""Of sums of weights, relative; those of whole numbers are exact."""

ROW_ARRAYS = np.dtype(
    [
        ("tokens", np.uint64),  # [R, T]
        ("targets", np.uint64),  # [R, D, T], of the dtype of the tokens
        ("weights", np.uint64),  # float32 [R, D, T]
        ("positions", np.uint64),  # [R, T], of the dtype of the tokens
        ("document_ids", np.uint64),  # [R, T], int32 or int64
        ("prefix", np.uint64),  # bool [R, T], whether the slot is in a prefix
    ],
    align=True,
)
"""Addresses of the arrays that R rows of T slots are written to; 0: the array is not wanted."""

_view_row_arrays = viewer(ROW_ARRAYS)

PYTHON_ARRAYS = np.dtype(
    [
        ("starts", np.uint64),  # int64 [P], first slot of each piece in the next two
        ("tokens", np.uint64),  # int32 [slots]
        ("weights", np.uint64),  # float32 [slots]
        ("targets", np.uint64),  # int32 [slots], or [0]
        ("prefixes", np.uint64),  # int32 [P], tokens of each piece's prefix
    ],
    align=True,
)
"""Addresses of the arrays that Python objectives wrote for the P pieces of a step: a
`PythonOutput`.
"""

_view_python_arrays = viewer(PYTHON_ARRAYS)


@inline_kernel
def write_span_weights(targets, weights, first, count, number, begins, ends, values):
    """Apply spans to the targets of one piece at one distance.

    `targets` and `weights` are the piece's slots; slot i predicts token `first + i` of the
    document.
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
def whole_weight(source, piece):
    """Sum of weights of the targets at distance 1 of a whole document, from the lengths file; −1
    when it cannot say.
    """
    if piece.begin != 0 or piece.tokens != stored_tokens(source, piece.document):
        return -1.0
    if not source.has_spans:
        return float(piece.tokens - 1)
    if source.weight_sums != np.uint64(0):
        return view_f64(source.weight_sums + np.uint64(piece.document * 8), 1)[0]
    return float(view_u32(source.lengths + np.uint64(piece.document) * source.lengths_stride, 2)[1])


@inline_kernel
def weigh_spans(first, stop, number, begins, ends, values):
    """Sum of the weights of the tokens [first, stop) of a document."""
    total = 0.0
    for span in range(number):
        covered = min(np.int64(ends[span]), stop) - max(np.int64(begins[span]), first)
        total += max(covered, 0) * np.float64(values[span])
    return total


@inline_kernel
def fill_piece(source, piece, location, slot, tokens, targets, weights):
    """Write a piece to the slots from `slot` on of a row ([T], [D, T], [D, T or 0]); returns a
    fault or OK.
    """
    distances = len(targets)
    begin, count, total = piece.begin, piece.tokens, piece.total
    status = check_piece(source, piece, location, distances)
    if status != OK:
        return status
    at, readable = location.tokens, location.readable
    if source.token_bytes == 2:
        write_tokens(view_u16(at, readable), begin, count, total, slot, tokens, targets)
    else:
        write_tokens(view_u32(at, readable), begin, count, total, slot, tokens, targets)
    if weights.shape[1]:
        for d in range(distances):
            known = max(min(count, total - begin - d - 1), 0)
            fill_ahead(weights[d, slot:], 1, known)
            fill_ahead(weights[d, slot + known :], 0, count - known)
    if source.has_spans:
        return apply_spans(source, piece, slot, targets, weights)
    return OK


@inline_kernel
def fill_python(source, piece, location, slot, tokens, targets, weights, written, start):
    """Like `fill_piece` for a piece that Python wrote, from `start` on in `written`
    (`PYTHON_ARRAYS`).
    """
    status = check_piece(source, piece, location, 0)
    if status == OK:
        new = view_i32(written.tokens + start, piece.length)
        new_weights = view_f32(written.weights + start, piece.length)
        if source.own_targets:
            new_targets = view_i32(written.targets + start, piece.length)
            write_own_targets(new, new_targets, new_weights, slot, tokens, targets, weights)
        else:
            write_rewritten(new, new_weights, True, np.int64(0), slot, tokens, targets, weights)
    return status


@inline_kernel
def fill_compiled(source, piece, location, slot, tokens, targets, weights, scratch):
    """Like `fill_piece` for a source with a program; (fault or OK, prefix).

    If `scratch` is None, no source has a compiled objective, and Numba drops this branch.
    """
    if scratch is None:
        return np.int64(BAD_MEASURE), np.int64(0)
    status = np.int64(check_piece(source, piece, location, 0))
    if status != OK:
        return status, np.int64(0)
    slots = piece.length
    _, _, new, new_weights, new_targets, _ = work_space(scratch, slots)
    if tokens.itemsize == 4:
        new = view_i32(np.uint64(tokens[slot:].ctypes.data), slots)
    status, weighted, reads, prefix = rewrite_piece(
        source, piece, location.tokens, new, new_weights, new_targets, scratch
    )
    if status == OK and source.own_targets:
        write_own_targets(new, new_targets, new_weights, slot, tokens, targets, weights)
    elif status == OK:
        write_rewritten(new, new_weights, weighted, reads, slot, tokens, targets, weights)
    return np.int64(status), prefix


@inline_kernel
def apply_spans(source, piece, slot, targets, weights):
    """Set targets outside the document's spans to −100 and write the spans' weights. Returns a
    fault or OK.
    """
    status, number, begins, ends, values = read_spans(source, piece.document)
    if status != OK:
        return status
    whole = whole_weight(source, piece)
    if whole >= 0.0:
        # What the plan counted for the loss denominator must be what is trained.
        found = (
            float(piece.total - 1)
            if number < 0
            else weigh_spans(1, piece.total, number, begins, ends, values)
        )
        # Added in the same order as when they were written; `not <=`, so that infinity and NaN are
        # faults, too.
        if not abs(found - whole) <= _ROUNDING * abs(found):
            return BAD_SPANS
    if number < 0:
        return OK
    end = slot + piece.tokens
    for d in range(len(targets)):
        row_weights = weights[d, slot:end] if weights.shape[1] else weights[d]
        write_span_weights(
            targets[d, slot:end],
            row_weights,
            piece.begin + d + 1,
            piece.tokens,
            number,
            begins,
            ends,
            values,
        )
    return OK


@register_jitable
def metadata_offsets(rows, count):
    """Where in the metadata of `rows` with `count` pieces sources, prefixes and cumulative lengths
    begin.

    First those of all rows end to end, with an entry for each piece, one for the padding of each
    row, and the end; then those of each row.
    """
    return 2 * rows, 2 * rows + count, 2 * rows + 2 * count, 3 * rows + 3 * count + 1


@kernel
def fill_rows(
    sources,
    pieces,
    row_starts,
    pad_id,
    tokens,
    document_ids,
    distances,
    addresses,
    capacity,
    metadata,
    python_output,
    scratch,
):
    """Write rows from mapped shards, checking every chunk of tokens that is read.

    Unpacking an array costs Numba a tenth of a microsecond, so arrays that are kept between calls
    come by address.

    Args:
        sources: uint64, the bytes of `SOURCE_RECORD` [sources].
        pieces, row_starts: The rows' pieces (`PIECE`), as in a window; the first row may begin at
            any piece.
        tokens: [R, T], written.
        document_ids: [R, T], or [R, 0]; an argument because its dtype may be another.
        distances: D, of targets.
        addresses: uint64, the bytes of one `ROW_ARRAYS`; the arrays that it leads to are written.
        capacity: Entries of cumulative lengths that a row has, or 0 for two more than the row has
            pieces.
        metadata: int32, written: (tokens, longest document) of each row, source of each piece,
            prefix of each piece, cumulative lengths of the rows end to end, and of each row
            (`metadata_offsets`).
        python_output: uint64, the bytes of one `PYTHON_ARRAYS`; read only where a source has a
            Python objective.
        scratch: uint64 [scratch_size(T)], or None where no source has a program.

    Returns:
        (fault or OK, index of the piece in which it is or −1).
    """
    sources, pieces, row_starts = sources_of(sources), bare(pieces), bare(row_starts)
    tokens, metadata, document_ids = bare(tokens), bare(metadata), bare(document_ids)
    rows, slots = tokens.shape
    first, count = row_starts[0], row_starts[rows] - row_starts[0]
    at = _view_row_arrays(np.uint64(addresses.ctypes.data), 1)[0]
    written = _view_python_arrays(np.uint64(python_output.ctypes.data), 1)[0]
    targets = view_array(at.targets, (rows, distances, slots), tokens.dtype)
    weights = view_array(at.weights, (rows, distances, slots if at.weights else 0), np.float32)
    positions = view_array(at.positions, (rows, slots if at.positions else 0), tokens.dtype)
    prefixes = view_array(at.prefix, (rows, slots if at.prefix else 0), np.bool_)
    source_ids, prefix_lengths, end_to_end, cu_seqlens = metadata_offsets(rows, count)
    cu_of_all, entries = metadata[end_to_end:cu_seqlens], np.int64(0)
    memory = np.empty(count, LOCATION)
    locations = bare(memory)
    located = row_starts[min(2, rows)]
    locate_pieces(sources, pieces, first, located, locations)
    if rows:
        prefetch_ahead(locations, np.int64(0), row_starts[1] - first, FIRST_LINES)
    for row in range(rows):
        # While this row is written, the pieces of the next are prefetched, and those of the row
        # after that are located.
        prefetched = row_starts[row + 1] - first
        following = row_starts[min(row + 2, rows)] - first
        begin, located = located, row_starts[min(row + 3, rows)]
        locate_pieces(sources, pieces, begin, located, locations[begin - first :])
        cu_begin, cu_end = (
            row_starts[row] - first + 2 * row,
            row_starts[row + 1] - first + 2 * row + 2,
        )
        if capacity:
            cu_begin, cu_end = row * capacity, (row + 1) * capacity
        cu = metadata[cu_seqlens + cu_begin : cu_seqlens + cu_end]
        slot, longest, number = np.int64(0), np.int64(0), np.int64(0)
        for p in range(row_starts[row], row_starts[row + 1]):
            piece, prefix = pieces[p], np.int64(0)
            source, end = sources[piece.source], slot + piece.length
            lines = piece.length * source.token_bytes // CACHE_LINE + 2
            prefetched = prefetch_ahead(locations, prefetched, following, lines)
            if source.objective == CAUSAL:
                status = fill_piece(
                    source,
                    piece,
                    locations[p - first],
                    slot,
                    tokens[row],
                    targets[row],
                    weights[row],
                )
            elif source.objective == PYTHON:
                prefix = np.int64(view_i32(written.prefixes, len(pieces))[p])
                start = np.uint64(view_i64(written.starts, len(pieces))[p]) * np.uint64(4)
                status = fill_python(
                    source,
                    piece,
                    locations[p - first],
                    slot,
                    tokens[row],
                    targets[row],
                    weights[row],
                    written,
                    start,
                )
            else:
                status, prefix = fill_compiled(
                    source,
                    piece,
                    locations[p - first],
                    slot,
                    tokens[row],
                    targets[row],
                    weights[row],
                    scratch,
                )
            if status != OK:
                return status, p
            metadata[prefix_lengths + p - first] = prefix
            if prefixes.shape[1]:
                fill_with(prefixes[row, slot : slot + prefix], True)
                fill_with(prefixes[row, slot + prefix : end], False)
            describe_row(slot, end, number, positions[row], document_ids[row])
            metadata[source_ids + p - first] = piece.source
            cu[number] = slot
            cu_of_all[entries] = row * slots + slot
            longest = max(longest, end - slot)
            slot, number, entries = end, number + 1, entries + 1
        metadata[2 * row] = slot
        cu[number] = slot
        if slot < slots:
            fill_with(tokens[row, slot:], pad_id)
            for d in range(targets.shape[1]):
                blank(targets[row, d], weights[row, d], slot, slots)
            if prefixes.shape[1]:
                fill_with(prefixes[row, slot:], False)
            describe_row(slot, slots, number, positions[row], document_ids[row])
            cu_of_all[entries] = row * slots + slot
            longest, number, entries = max(longest, slots - slot), number + 1, entries + 1
        fill_with(cu[number:], slots)
        metadata[2 * row + 1] = longest
    cu_of_all[entries] = rows * slots
    keep_alive(memory)
    return OK, np.int64(-1)


@kernel
def weigh_rows(sources, pieces, out, python_starts, python_weights, python_denominators, scratch):
    """Write sums of the loss weights of all targets of `pieces`, for each distance, and their
    slots: float64 [D + 1].

    Whole documents cost a look at the lengths file, which the fill holds against the spans that it
    reads; parts of documents with spans have their spans read. `python_weights` (float32) holds the
    weights that Python objectives wrote, those of a piece from its number in `python_starts` (int64
    [pieces], or [0]) on; `python_denominators` (float64, as long) counts where targets are the
    objective's own. The rest is as in `fill_rows`, and so is what it returns.
    """
    sources, out = sources_of(sources), bare(out)
    fill_with(out, 0)
    sums, slots = out[: len(out) - 1], np.int64(0)
    for p in range(len(pieces)):
        if p + PIECES_AHEAD < len(pieces):
            prefetch_length(sources, pieces[p + PIECES_AHEAD])
        piece = pieces[p]
        slots += piece.length
        source = sources[piece.source]
        if source.objective != CAUSAL:
            if source.objective == PYTHON and source.own_targets:
                sums[0] += python_denominators[p]
                continue
            if source.objective == PYTHON:
                weigh_written(
                    python_weights[python_starts[p] : python_starts[p] + piece.length], sums
                )
                continue
            status = weigh_compiled(source, piece, scratch, sums)
            if status != OK:
                return status, p
            continue
        whole = whole_weight(source, piece)
        if whole >= 0.0:
            sums[0] += whole
            if len(sums) == 1:
                continue
        number = np.int64(-1)
        if source.has_spans:
            status, number, begins, ends, values = read_spans(source, piece.document)
            if status != OK:
                return status, p
        for d in range(1 if whole >= 0.0 else 0, len(sums)):
            first = piece.begin + d + 1
            stop = min(first + piece.tokens, piece.total)
            if number >= 0:
                sums[d] += weigh_spans(first, stop, number, begins, ends, values)
            else:
                sums[d] += max(stop - first, 0)
    out[len(out) - 1] = slots
    return OK, np.int64(-1)
