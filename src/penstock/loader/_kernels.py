"""Compiled planning: documents from the sources' buffers into the rows of a window.

A piece is what lies in a row without a break: some tokens of one document. Pieces are int64 rows of
`PIECE_COLUMNS`; columns up to `LENGTH` are the sampling room's, then the number of the source.
"""

import numpy as np

from penstock.compiled import bare, kernel
from penstock.packing import place_best_fit, place_best_fit_decreasing, place_next_fit
from penstock.sampling import BEGIN, COLUMNS, EMPTY, LENGTH, POSITION, TOKENS, TOTAL, charge, pick
from penstock.vectors import copy_into, fill_with

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
    shares, credits, heads, ends, entries = bare(shares), bare(credits), bare(heads), bare(ends), bare(entries)
    skipped, cursors, pieces, row_of = bare(skipped), bare(cursors), bare(pieces), bare(row_of)
    best_fit_heads, best_fit_nexts = bare(best_fit_heads), bare(best_fit_nexts)
    words, summary, progress = bare(words), bare(summary), bare(progress)
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
        piece = pieces[count]
        copy_into(entry, piece[:SOURCE])
        piece[SOURCE] = source
        row_of[count] = row
        for column in range(EMPTY, COLUMNS):
            skipped[source, column - EMPTY] += entry[column]
        charge(shares, credits, source, length, unit)
        if length < entry[LENGTH]:
            piece[TOKENS] = length
            piece[LENGTH] = length
            entry[BEGIN] += length
            entry[TOKENS] -= length
            entry[LENGTH] -= length
            fill_with(entry[EMPTY:], 0)
        else:
            heads[source] += 1
        begin = piece[BEGIN] + piece[TOKENS]
        cursors[source, 0] = piece[POSITION] + (begin >= piece[TOTAL])
        cursors[source, 1] = 0 if begin >= piece[TOTAL] else begin
        count += 1


@kernel
def sort_by_row(pieces, row_of, num_rows, sorted_pieces, row_starts):
    """Order pieces by row, keeping the stream order inside a row (counting sort); fills `row_starts` [rows + 1]."""
    row_of, sorted_pieces, row_starts, pieces = bare(row_of), bare(sorted_pieces), bare(row_starts), bare(pieces)
    fill_with(row_starts, 0)
    for i in range(len(row_of)):
        row_starts[row_of[i] + 1] += 1
    for row in range(num_rows):
        row_starts[row + 1] += row_starts[row]
    place = row_starts.copy()
    for i in range(len(row_of)):
        copy_into(pieces[i], sorted_pieces[place[row_of[i]]])
        place[row_of[i]] += 1


@kernel
def pack_window(lengths, sequence_length, row_of, heads, nexts, words, summary):
    """Best fit over a whole window, longest first; returns the number of rows."""
    order = np.empty(len(lengths), np.int64)
    counts = np.empty(sequence_length + 2, np.int64)
    return place_best_fit_decreasing(lengths, sequence_length, row_of, order, counts, heads, nexts, words, summary)
