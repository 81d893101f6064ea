"""Packing on its own: lengths in, row numbers out. The loader runs the same kernels inside its
plan.
"""

from numbers import Integral
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike

from penstock.core.arrays import Int32, Int64, UInt64
from penstock.core.errors import ConfigError
from penstock.plan.packing._kernels import pack_best_fit, pack_best_fit_decreasing, pack_next_fit

Packing = Literal["best_fit", "best_fit_decreasing", "next_fit", "concat", "none"]
"""`best_fit`: in stream order, over a window of rows: little padding, and every step keeps the
blend. `best_fit_decreasing`: the window sorted first: least padding, but documents of a kind clump
together. `next_fit`: contiguous documents, one open row. `concat`: documents cut at row edges, no
padding. `none`: one document a row.
"""

PACKINGS: tuple[str, ...] = ("best_fit", "best_fit_decreasing", "next_fit", "concat", "none")


def scratch(
    sequence_length: int, max_rows: int
) -> tuple[
    Annotated[Int32, "free_spaces"],
    Annotated[Int32, "rows"],
    Annotated[UInt64, "bitmap"],
    Annotated[UInt64, "summary"],
]:
    """Working memory of best fit for rows of S slots.

    Returns:
        (first row of each list [S + 1], next row of each row [max_rows], bitmap of the lists that
        are not empty, summary: bitmap of the words of that bitmap that are not 0).
    """
    words = (sequence_length >> 6) + 1
    return (
        np.empty(sequence_length + 1, np.int32),
        np.empty(max_rows, np.int32),
        np.zeros(words, np.uint64),
        np.zeros((words >> 6) + 1, np.uint64),
    )


def left_in_rows(rows: int, document_limit: int) -> Annotated[Int32, "rows"]:
    """Working memory of a limit of documents: room for how many each row has left; next to none
    without a limit.
    """
    return np.empty(rows if document_limit else 1, np.int32)


def check_documents_per_row(limit: object) -> None:
    """Refuse what is no limit of documents.

    Raises:
        ConfigError: It is not a whole number, below 1, or does not fit 31 bits.
    """
    if limit is not None and not (isinstance(limit, Integral) and 1 <= int(limit) < 2**31):
        raise ConfigError(
            f"documents_per_row must be a whole number from 1 to 2^31 − 1, got {limit!r}; "
            "leave it out for no limit"
        )


def pack(
    lengths: ArrayLike,
    sequence_length: int,
    packing: Packing = "best_fit",
    window_rows: int = 1024,
    documents_per_row: int | None = None,
) -> tuple[Annotated[Int64, "documents"], int]:
    """Assign whole documents to rows of `sequence_length` tokens.

    Args:
        lengths: Whole numbers [documents]: tokens of each, 1 … sequence_length, in stream order.
        sequence_length: Token slots of a row.
        packing: `best_fit`, `best_fit_decreasing` (over windows of about `window_rows` rows),
            `next_fit` or `none`.
        window_rows: Rows that are open together.
        documents_per_row: Maximum documents of a row; None: no limit.

    Returns:
        (row of each document, number of rows).

    Raises:
        ConfigError: A length does not fit a row, `packing` does not keep documents whole, or the
            limit of documents is below 1.
    """
    check_documents_per_row(documents_per_row)
    limit = documents_per_row or 0
    lengths = np.ascontiguousarray(lengths, np.int64)
    row_of = np.empty(len(lengths), np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= sequence_length:
        raise ConfigError(
            f"lengths must be 1 … {sequence_length}, got {lengths.min()} … {lengths.max()}; "
            "split or drop them first"
        )
    if packing == "none":
        return np.arange(len(lengths)), len(lengths)
    if packing == "next_fit":
        return row_of, pack_next_fit(lengths, sequence_length, limit, row_of)
    if packing == "best_fit":
        return row_of, pack_best_fit(
            lengths, sequence_length, window_rows, limit, left_in_rows(window_rows, limit), row_of,
            *scratch(sequence_length, window_rows),
        )  # fmt: skip
    if packing != "best_fit_decreasing":
        raise ConfigError(
            f"pack() keeps documents whole: {', '.join(PACKINGS)} without concat; got {packing!r}"
        )
    rows = 0
    window = np.cumsum(lengths) // (window_rows * sequence_length)
    for part in np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(window)) + 1):
        here, order = row_of[part[0] : part[-1] + 1], np.empty(len(part), np.int64)
        counts = np.empty(sequence_length + 2, np.int64)
        used = pack_best_fit_decreasing(
            lengths[part[0] : part[-1] + 1],
            sequence_length,
            limit,
            left_in_rows(len(part), limit),
            here,
            order,
            counts,
            *scratch(sequence_length, len(part)),
        )
        here += rows
        rows += used
    return row_of, rows
