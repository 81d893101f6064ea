"""Compiled writing of model inputs.

What is fast: each output straight from the stored tokens (2 or 4 bytes each, in the first-level
cache after their checksum), in loops over slices that become vector code. Copying targets from the
row's own tokens reads four times the bytes.
"""

from penstock.core.compiled import inline_kernel, kernel
from penstock.core.vectors import copy_ahead, count_ahead, count_up, fill_ahead, fill_with


@inline_kernel
def write_tokens(stored, begin, count, total, slot, tokens, targets):
    """Tokens of a piece, and its targets at distance 1 … D, straight from the stored document.

    The piece is `stored[begin : begin + count]` of the document `stored[:total]`, and goes to the
    slots from `slot` on of a row ([T], [D, T]), whose later slots are written later. A target may
    lie past the piece (a split document goes on), never past the document.
    """
    copy_ahead(stored[begin:], tokens[slot:], count)
    for distance in range(1, targets.shape[0] + 1):
        known = max(min(count, total - begin - distance), 0)
        row = targets[distance - 1, slot:]
        copy_ahead(stored[begin + distance :], row, known)
        fill_ahead(row[known:], -100, count - known)


@inline_kernel
def blank(targets, weights, begin, end):
    """Take [begin, end) of one distance out of the loss; `weights` may be empty."""
    fill_with(targets[begin:end], -100)
    if len(weights):
        fill_with(weights[begin:end], 0)


@inline_kernel
def describe_row(begin, end, number, positions, document_ids):
    """Positions and document number of the slots [begin, end) of a row whose later slots are
    written later; an array that is not wanted is empty.
    """
    if len(positions):
        count_ahead(positions[begin:], end - begin)
    if len(document_ids):
        fill_ahead(document_ids[begin:], number, end - begin)


@kernel
def join_rows(slots, sizes, positions, cu_seqlens):
    """Describe all tokens of each row as one document, and its padding, if any, as another.

    Args:
        slots: Of a row.
        sizes: int32 [R, 2]: tokens; the longer of the two pieces is written.
        positions: [R, slots or 0]; those of the tokens are written, padding has its own already.
        cu_seqlens: int32 [R, 3 or more], or 2 where no row needs a third; written, filled up with
            `slots`.
    """
    for row in range(len(sizes)):
        used = sizes[row, 0]
        if positions.shape[1]:
            count_up(positions[row, :used])
        fill_with(cu_seqlens[row], slots)
        cu_seqlens[row, 0] = 0
        if used > 0:
            cu_seqlens[row, 1] = used
        sizes[row, 1] = max(used, slots - used)
