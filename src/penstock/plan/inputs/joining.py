"""How each field of rows that are put end to end is joined: `ModelInput` says which rule a field
has.

A rule gets the field's value in each row. Rows of one step lie one after another in memory; their
arrays are joined without a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.core.arrays import Array, Int32
from penstock.media.rows import RowMedia
from penstock.plan.inputs.paths import RowPaths

RULE = "join"
"""Where the metadata of a field have its rule."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows:
    """What rules know of the rows."""

    slots: int
    """Of each row."""
    padded: Sequence[bool]
    """Whether a row ends in padding, which becomes a document of the joined row."""
    documents: Sequence[int]
    """Documents of each row, its padding among them; a prefix tree counts once."""
    borders: "Sequence[Annotated[Int32, 'borders'] | None]"
    """`cu_seqlens` of each row."""


Rule = Callable[[Sequence[object], JoinedRows], object]


def rule(join: Callable[..., object]) -> Mapping[str, Rule]:
    """Metadata of a field; it is None if it is None in all rows."""

    def joined(values: Sequence[object], rows: JoinedRows) -> object:
        return None if all(one is None for one in values) else join(values, rows)

    return {RULE: joined}


def stacked(values: Sequence[Array]) -> Array:
    """[R, …] R arrays of one shape: a view if they lie one after another in one block of memory,
    else a copy.
    """
    first = values[0]
    begin, size = first.ctypes.data, first.nbytes
    for number, one in enumerate(values):
        if (
            one.base is not first.base
            or one.ctypes.data != begin + number * size
            or not one.flags.c_contiguous
        ):
            return np.stack(values)
    if first.base is None:
        return first.reshape(1, *first.shape)
    block: Array = as_strided(first, (len(values), *first.shape), (size, *first.strides))
    return block


def along_slots(values: Sequence[Array], rows: JoinedRows) -> Array:
    """[R, T] → [R × T]."""
    return stacked(values).reshape(-1)


def by_distance(values: Sequence[Array], rows: JoinedRows) -> Array:
    """[R, D, T] → [D, R × T]: a view of an array for one distance, a copy for several."""
    array = stacked(values)
    of_rows: Array = array.swapaxes(0, 1)
    return of_rows.reshape(array.shape[1], -1)


def numbered(values: Sequence[Array], rows: JoinedRows) -> Array:
    """[R, T] numbers of documents, which go on from row to row."""
    ids = stacked(values)
    counts = ids[:, -1] + 1
    before = np.cumsum(counts) - counts
    joined: Array = (ids + before[:, None]).astype(ids.dtype)
    return joined.reshape(-1)


def borders(values: Sequence[Array], rows: JoinedRows) -> Array:
    """Cumulative lengths; a row's repeated last entries, which only fill up its shape, are left
    out.
    """
    return shifted(
        [one[: int(np.searchsorted(one, rows.slots))] for one in values], rows.slots, end=True
    )


def subtree_ends(values: Sequence[Array | None], rows: JoinedRows) -> Array | None:
    """`reach` of each row."""
    return joined_reach(values, rows.borders, rows.slots)


def joined_reach(
    values: Sequence[Array | None], borders: Sequence[Array | None], slots: int
) -> Annotated[Int32, "nodes"] | None:
    """Ends of the subtrees of rows end to end; a row without any has its documents' ends. None: no
    row has any.
    """
    if all(one is None for one in values):
        return None
    ends = [
        known[1:] if own is None and known is not None else own
        for own, known in zip(values, borders, strict=True)
    ]
    return shifted([end for end in ends if end is not None], slots)


def shifted(values: Sequence[Array], slots: int, *, end: bool = False) -> Annotated[Int32, "_"]:
    """Slots of rows end to end, counted from the first row's begin; `end`: with the end of the last
    row.
    """
    parts = [one + np.int32(number * slots) for number, one in enumerate(values)]
    return np.concatenate([*parts, np.array([len(parts) * slots] if end else [], np.int32)])


def of_documents(padding: int) -> Callable[[Sequence[Array], JoinedRows], Array]:
    """A number of each document; `padding`: that of a row's padding."""

    def join(values: Sequence[Array], rows: JoinedRows) -> Array:
        filled = [np.full(int(padded), padding, np.int32) for padded in rows.padded]
        return np.concatenate([part for pair in zip(values, filled, strict=True) for part in pair])

    return join


def largest(values: Sequence[int], rows: JoinedRows) -> int:
    """The maximum."""
    return max(values)


def all_slots(values: Sequence[int], rows: JoinedRows) -> int:
    """All slots are tokens: padding is documents without targets."""
    return len(values) * rows.slots


def join_columns(values: Sequence[Mapping[str, Array]], rows: JoinedRows) -> dict[str, Array]:
    """Each column along slots."""
    return {name: along_slots([one[name] for one in values], rows) for name in values[0]}


def join_paths(values: Sequence[RowPaths], rows: JoinedRows) -> RowPaths:
    """Paths of the rows."""
    return RowPaths.join(values, rows.slots, rows.documents)


def join_media(values: Sequence[RowMedia], rows: JoinedRows) -> RowMedia:
    """Images of the rows."""
    return RowMedia.join(values, rows.slots, rows.documents)


def together(values: Sequence[object], rows: JoinedRows) -> tuple[object, ...]:
    """One after another, as they are."""
    return tuple(values)
