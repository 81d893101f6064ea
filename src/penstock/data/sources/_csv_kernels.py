"""Finds where the records of a CSV file end: at newlines outside of quoted cells, at gigabytes per
second.

A quote opens a quoted cell only as the first character of a cell, as RFC 4180 has it, and two
quotes in it are one. Whether the cells of a record are well formed is decided elsewhere, record by
record.
"""

from penstock.core.compiled import kernel, view_u8

CELL, UNQUOTED, QUOTED, CLOSED = range(4)
"""Where a scan is: before a cell, in one without quotes, in a quoted one, or behind a quote in
that.
"""

_QUOTE, _NEWLINE = b'"\n'


@kernel
def record_ends(source, size, delimiter, state, ends):
    """Find the ends of records.

    Args:
        source: Address of `size` bytes of a file.
        delimiter: The byte between cells.
        state: Where the bytes before left off; `CELL` at the beginning of a record.
        ends: int64 [n], written: where each record ends, after its newline; n is at least the
            number of newlines.

    Returns:
        Number of ends, and the state after the last byte.
    """
    data = view_u8(source, size)
    count = 0
    for at in range(size):
        character = data[at]
        if state == QUOTED:
            if character == _QUOTE:
                state = CLOSED
        elif character == delimiter:
            state = CELL
        elif character == _NEWLINE:
            ends[count] = at + 1
            count += 1
            state = CELL
        elif character == _QUOTE and state != UNQUOTED:
            # The first character of a cell, or the second of two quotes in one.
            state = QUOTED
        else:
            state = UNQUOTED
    return count, state
