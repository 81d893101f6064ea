"""Compiled planning: documents from the sources' buffers into the rows of a window.

A piece is what lies in a row without a break: some tokens of one document.
"""

import numpy as np

from penstock.core.compiled import bare, keep_alive, kernel
from penstock.core.vectors import fill_with
from penstock.plan.loader._target_kernels import add_untrained
from penstock.plan.packing._kernels import (
    place_best_fit,
    place_best_fit_decreasing,
    place_next_fit,
    place_within,
)
from penstock.plan.sampling._choice_kernels import charge, choose
from penstock.plan.sampling._kernels import add_skipped, clear_skipped

PIECE = np.dtype(
    [
        (
            "position",
            np.int64,
        ),  # documents of the source's stream before its document, over all epochs
        ("document", np.int64),  # the document's number in the dataset
        ("begin", np.int64),  # first token of the document that is here
        ("tokens", np.int64),  # tokens of the document that are here
        (
            "total",
            np.int64,
        ),  # where the document ends: its tokens, without those that were truncated
        ("length", np.int64),  # row slots that it takes, as its objective measured it
        ("source", np.int64),  # number of the source in the mixture
    ],
    align=True,
)
"""Tokens of one document that lie side by side in a row."""

CURSOR = np.dtype(
    [
        ("position", np.int64),  # documents taken, over all epochs
        ("begin", np.int64),  # first token of the next part, of a document that was split
    ],
    align=True,
)
"""How far into its stream a source is."""

PROGRESS = np.dtype(
    [
        ("pieces", np.int64),  # pieces in the window
        ("rows", np.int64),  # rows in it
        (
            "free",
            np.int64,
            (1,),
        ),  # free slots of the last row; with BEST_FIT_DECREASING slots taken in the window
        ("documents", np.int64, (1,)),  # pieces in the last row, counted by NEXT_FIT and CONCAT
        ("elapsed", np.int64),  # tokens that every source has still to earn its share of
        ("placed", np.int64),  # sources that the trees of `choose` have a place for
        ("taken", np.int64),  # source of the last piece, if it has no new place yet; else −1
    ],
    align=True,
)
"""How full a window is."""

FINISHED, WINDOW_FULL, PIECES_FULL = -1, -2, -3
BEST_FIT, BEST_FIT_DECREASING, NEXT_FIT, CONCAT, NONE = range(5)


@kernel
def plan_window(
    packing,
    sequence_length,
    max_rows,
    max_pieces,
    shares,
    credits,
    due,
    free_again,
    heads,
    ends,
    entries,
    unit,
    skipped,
    cursors,
    pieces,
    row_of,
    progress,
    entry_untrained,
    untrained,
    document_limit,
    documents_left,
    patch_limit,
    entry_patches,
    patches_left,
    best_fit_heads,
    best_fit_nexts,
    bitmap,
    summary,
):
    """Take documents from the sources' buffers, one by one, and give each a row.

    Goes on from `progress` (`PROGRESS` [1]) and returns why it stopped: WINDOW_FULL, PIECES_FULL,
    FINISHED (no source has anything left), or the number of a source that has an empty buffer. A
    document that no longer fits the window is not taken: it stays first of its source. `cursors`
    (`CURSOR` [sources]) stands right after the last piece taken of each source, `skipped`
    (`SKIPPED` [sources]) counts what was left out before it; so does `untrained` (`UNTRAINED`
    [sources]) from `entry_untrained`, of each entry; both are empty where no source leaves parts
    out. `credits` of each source still lack its share of the `elapsed` tokens. With a
    `document_limit` above 0, a row has at most that many pieces. With a `patch_limit`
    above 0, best fit also keeps the patches of a row's images (`entry_patches`, of each entry)
    within it.
    """
    shares, credits, heads, ends, entries = (
        bare(shares),
        bare(credits),
        bare(heads),
        bare(ends),
        bare(entries),
    )
    skipped, cursors, pieces, row_of = bare(skipped), bare(cursors), bare(pieces), bare(row_of)
    best_fit_heads, best_fit_nexts = bare(best_fit_heads), bare(best_fit_nexts)
    bitmap, summary, progress = bare(bitmap), bare(summary), bare(progress)
    entry_patches, patches_left, documents_left = (
        bare(entry_patches),
        bare(patches_left),
        bare(documents_left),
    )
    entry_untrained, untrained = bare(entry_untrained), bare(untrained)
    due, free_again = bare(due), bare(free_again)
    window = progress[0]
    count, rows, free, documents = window.pieces, window.rows, window.free, window.documents
    most = max_rows * document_limit if document_limit > 0 else max_pieces
    while True:
        source = choose(shares, credits, heads, ends, entries, unit, window, due, free_again)
        if source < 0:
            window.pieces, window.rows = count, rows
            return FINISHED if source == -1 else -2 - source
        if count >= max_pieces:
            window.pieces, window.rows = count, rows
            return PIECES_FULL
        entry = entries[heads[source]]
        length = entry.length
        if packing == BEST_FIT and patch_limit > 0:
            row = place_within(
                length,
                entry_patches[heads[source]],
                sequence_length,
                patch_limit,
                rows,
                max_rows,
                document_limit,
                documents_left,
                best_fit_heads,
                best_fit_nexts,
                bitmap,
                summary,
                patches_left,
            )
        elif packing == BEST_FIT:
            row = place_best_fit(
                length,
                sequence_length,
                rows,
                max_rows,
                document_limit,
                documents_left,
                best_fit_heads,
                best_fit_nexts,
                bitmap,
                summary,
            )
        elif packing == CONCAT:
            length = (
                min(length, free[0]) if rows > 0 and free[0] > 0 else min(length, sequence_length)
            )
            row = place_next_fit(
                length, sequence_length, rows, max_rows, document_limit, free, documents
            )
        elif packing == NEXT_FIT:
            row = place_next_fit(
                length, sequence_length, rows, max_rows, document_limit, free, documents
            )
        elif packing == BEST_FIT_DECREASING:
            # Rows are given when the window is known; until then count its tokens and documents.
            row = 0 if free[0] + length <= max_rows * sequence_length and count < most else -1
            free[0] += length
        else:
            row = rows if rows < max_rows else -1
        if row < 0:
            window.pieces, window.rows = count, rows
            return WINDOW_FULL
        rows = max(rows, row + 1)
        piece = pieces[count]
        piece.position = entry.position
        piece.document = entry.document
        piece.begin = entry.begin
        piece.tokens = entry.tokens
        piece.total = entry.total
        piece.length = length
        piece.source = source
        row_of[count] = row
        add_skipped(skipped[source], entry.skipped)
        if len(untrained) > 0:
            add_untrained(untrained[source], entry_untrained[heads[source]])
        charge(credits, source, length, unit, window)
        if length < entry.length:
            piece.tokens = length
            entry.begin += length
            entry.tokens -= length
            entry.length -= length
            clear_skipped(entry.skipped)
        else:
            heads[source] += 1
        begin = piece.begin + piece.tokens
        cursors[source].position = piece.position + (begin >= piece.total)
        cursors[source].begin = 0 if begin >= piece.total else begin
        count += 1


@kernel
def sort_by_row(pieces, row_of, num_rows, sorted_pieces, row_starts):
    """Order pieces by row, keeping the stream order inside a row (counting sort); fills
    `row_starts` [rows + 1].
    """
    row_of, sorted_pieces, row_starts, pieces = (
        bare(row_of),
        bare(sorted_pieces),
        bare(row_starts),
        bare(pieces),
    )
    fill_with(row_starts, 0)
    for i in range(len(row_of)):
        row_starts[row_of[i] + 1] += 1
    for row in range(num_rows):
        row_starts[row + 1] += row_starts[row]
    cursor = row_starts.copy()
    for i in range(len(row_of)):
        sorted_pieces[cursor[row_of[i]]] = pieces[i]
        cursor[row_of[i]] += 1


@kernel
def pack_window(
    lengths, sequence_length, document_limit, documents_left, row_of, heads, nexts, bitmap, summary
):
    """Best fit over a whole window, longest first; returns the number of rows."""
    lengths, row_of, documents_left = bare(lengths), bare(row_of), bare(documents_left)
    heads, nexts, bitmap, summary = bare(heads), bare(nexts), bare(bitmap), bare(summary)
    order_memory, counts_memory = (
        np.empty(len(lengths), np.int64),
        np.empty(sequence_length + 2, np.int64),
    )
    rows = place_best_fit_decreasing(
        lengths,
        sequence_length,
        document_limit,
        documents_left,
        row_of,
        bare(order_memory),
        bare(counts_memory),
        heads,
        nexts,
        bitmap,
        summary,
    )
    keep_alive(order_memory)
    keep_alive(counts_memory)
    return rows
