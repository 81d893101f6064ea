"""The rows that the fill has written: views of its arrays, each made when it is asked for."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, final, overload

import numpy as np

from penstock.core.arrays import Array, Int32, Int64, Records
from penstock.core.errors import ConfigError
from penstock.media.rows import RowMedia
from penstock.plan.inputs.joining import joined_reach, shifted
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader._fill_kernels import metadata_offsets
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.buffers import Buffers
from penstock.plan.loader.companion import Accompany
from penstock.plan.loader.extras import StepExtras
from penstock.plan.loader.on_demand import DERIVED, Demand, derived

_BUFFERS = {
    name: place
    for place, name in enumerate(
        ("tokens", "targets", "loss_weights", "positions", "document_ids", "prefix")
    )
}
"""Fields, and their places in `ROW_ARRAYS`."""
_INTEGERS = ("tokens", "targets", "positions")
_OF_BORDERS = ("cu_seqlens", "max_seqlen", "reach")


@final
class FilledRows(Sequence[ModelInput]):
    """The rows of one call of the kernel, side by side; a `ModelInput` of views is made when a row
    is asked for.

    Args:
        need: Which arrays the rows have.
        pieces: Those that `row_starts` counts in.
        row_starts: As in a window, of R rows.
        arrays: tokens [R, T], targets [R, D, T], weights [R, D, T or 0], positions and document ids
            [R, T or 0], whether in a prefix [R, T or 0]. What is required and was not filled is
            derived when it is asked for.
        metadata: As `fill_rows` writes it: (tokens, longest document) of each row, source of each
            document, prefix of each, cumulative lengths of the rows end to end, and of each row.
        extras: Columns, and nodes and paths of trees; None: there are none.
        demand: Counts what is asked for.
    """

    __slots__ = (
        "_arrays",
        "_borders",
        "_companions",
        "_demand",
        "_extras",
        "_made",
        "_metadata",
        "_need",
        "_piece_starts",
        "_pieces",
        "_row_sizes",
        "_row_starts",
        "_whole",
    )

    def __init__(
        self,
        need: InputRequirements,
        pieces: Annotated[Records, PIECE, "pieces"],
        row_starts: Annotated[Int64, "rows+1"],
        arrays: Buffers,
        metadata: Annotated[Int32, "metadata"],
        extras: StepExtras | None,
        demand: Demand,
    ) -> None:
        self._extras = extras
        self._need, self._pieces, self._row_starts, self._arrays, self._metadata = (
            need,
            pieces,
            row_starts,
            arrays,
            metadata,
        )
        self._demand = demand
        self._made: dict[str, Array] = {}
        self._whole: Sequence[Array] | None = None
        self._borders: tuple[Array | None, int | None, Array | None] | None = None
        self._companions: list[Any] | None = None
        self._piece_starts: list[int] = []
        self._row_sizes: list[int] = []

    def accompany(self, make: Accompany, pieces: Annotated[Records, PIECE, "pieces"]) -> None:
        """Let a companion make its part of every row; `pieces` are those that `row_starts` counts
        in.
        """
        starts = self._row_starts
        self._companions = [
            make(row, pieces[starts[i] : starts[i + 1]]) for i, row in enumerate(self)
        ]

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    def widen(self) -> None:
        """Have the next steps filled in int64, unless the requirements name a dtype."""
        self._demand.widen()

    def field(self, name: str) -> Any:
        """All rows of one field of `StepFields`, in the required dtype; see `Step.arrays`."""
        array = self.field_as_filled(name)
        if name in _INTEGERS and array is not None and array.dtype != self._required_dtype:
            array = self._made[name] = array.astype(self._required_dtype)
        return array

    def field_as_filled(self, name: str) -> Any:
        """The same, with tokens, targets and positions in the dtype in which they are there."""
        if name in _BUFFERS:
            return self._array(name)
        if name in _OF_BORDERS:
            if self._borders is None:
                self._borders = self._find_borders()
            return self._borders[_OF_BORDERS.index(name)]
        used = self._used
        if name == "tokens_per_row":
            return used
        if name == "num_tokens":
            return sum(used)
        if name == "columns":
            return {} if self._extras is None else self._extras.columns
        if self._extras is None or self._extras.media is None:
            return None
        slots = self._arrays[0].shape[1]
        documents = np.diff(self._row_starts) + (np.array(used) < slots)
        return RowMedia.join(self._extras.media, slots, documents.tolist())

    @property
    def _required_dtype(self) -> str:
        return self._need.dtype or "int32"

    @property
    def _used(self) -> list[int]:
        """Tokens of each row: a few Python integers, because NumPy would take a microsecond for
        each sum.
        """
        used: list[int] = self._metadata[: 2 * len(self) : 2].tolist()
        return used

    def _array(self, name: str) -> Array | None:
        """[R, …] one of `_BUFFERS`, as it was filled, or made now; None: it is not required, or
        there are no prefixes.
        """
        made = self._made.get(name)
        if made is not None:
            return made
        # A view, not the array of the buffer: what a caller holds must refer to the buffer's block.
        array: Array = self._arrays[_BUFFERS[name]][:]
        if name in DERIVED:
            if not getattr(self._need, name):
                return None
            if not array.size:
                self._demand.add(name)
                shape = self._arrays[1].shape[1:]
                array = derived(name, self._pieces, self._row_starts, shape)
                if name == "document_ids":
                    array = array.astype(self._required_dtype)
        elif name == "prefix" and not array.size:
            return None
        self._made[name] = array
        return array

    def _find_borders(self) -> tuple[Array | None, int | None, Array | None]:
        """cu_seqlens and max_seqlen of all rows end to end, or None where they are not required,
        and `reach`.
        """
        need, used = self._need, self._used
        trees = None if self._extras is None else self._extras.rows
        slots = self._arrays[0].shape[1]
        borders, longest, reach = None, None, None
        if trees is not None:
            ends = [row.cu_seqlens for row in trees]
            reach = joined_reach([row.reach for row in trees], ends, slots)
            borders = shifted([one[:-1] for one in ends], slots, end=True)
            longest = max((row.max_seqlen for row in trees), default=0)
        elif need.cu_seqlens:
            borders = self._cu_seqlens(used)
            longest = max(self._metadata[1 : 2 * len(self) : 2].tolist(), default=0)
        return (borders, longest, reach) if need.cu_seqlens else (None, None, reach)

    @property
    def image_bytes(self) -> int:
        """Bytes of the images' arrays."""
        media = () if self._extras is None else self._extras.media or ()
        return sum(array.nbytes for row in media for array in row.arrays.values())

    def joined(self, rows_per_pass: int) -> Iterator[ModelInput]:
        """The rows, `rows_per_pass` of them end to end in each input; see `Step.joined`."""
        if rows_per_pass < 1:
            raise ConfigError(f"rows_per_pass must be at least 1, got {rows_per_pass}")
        if rows_per_pass == 1:
            yield from self
            return
        borders = (
            None
            if self._extras is None or self._extras.rows is None
            else [row.cu_seqlens for row in self._extras.rows]
        )
        for begin in range(0, len(self), rows_per_pass):
            end = begin + rows_per_pass
            yield ModelInput.join(self[begin:end], None if borders is None else borders[begin:end])

    def _cu_seqlens(self, used: Sequence[int]) -> Annotated[Int32, "borders"]:
        """Cumulative lengths of all rows end to end; the padding of a row is a document of its own.

        Args:
            used: Tokens of each row.
        """
        rows, slots = self._arrays[0].shape
        if self._need.attention == "row":
            # Its documents are joined: a row has one, and its padding.
            begins = [
                slots * row + begin
                for row, end in enumerate(used)
                for begin in sorted({0, end} - {slots})
            ]
            return np.array([*begins, rows * slots], np.int32)
        pieces = self._row_starts.item(-1) - self._row_starts.item(0)
        _, _, begin, _ = metadata_offsets(rows, pieces)
        padded = sum(tokens < slots for tokens in used)
        return self._metadata[begin : begin + pieces + padded + 1]

    @overload
    def __getitem__(self, index: int) -> ModelInput: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ModelInput]: ...
    def __getitem__(self, index: int | slice) -> ModelInput | Sequence[ModelInput]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row, need, metadata, starts = (
            index % len(self),
            self._need,
            self._metadata,
            self._piece_starts,
        )
        if not starts:
            # Once for all rows, when the first is asked for. The starts last: other threads take
            # them as the sign.
            self._row_sizes = metadata[: 2 * len(self)].tolist()
            starts = self._piece_starts = (self._row_starts - self._row_starts[0]).tolist()
        if self._whole is None:
            found = [self.field(name) for name in _BUFFERS]
            self._whole = [
                empty if one is None else one
                for one, empty in zip(found, self._arrays, strict=True)
            ]
        tokens, targets, weights, positions, document_ids, prefix = (
            array[row] for array in self._whole
        )
        begin, end = starts[row], starts[row + 1]
        sources, prefixes, _, borders = metadata_offsets(len(self), starts[-1])
        used, longest = self._row_sizes[2 * row : 2 * row + 2]
        capacity = need.cu_seqlens_capacity
        # As in the kernel: room for a border more than documents, and one for padding.
        first = row * capacity if capacity else begin + 2 * row
        documents = end - begin
        if need.attention == "row":
            first, documents = row * (capacity or 3), min(documents, 1)
        width = capacity or documents + 1 + (used < len(tokens))
        cu_seqlens = metadata[borders + first : borders + first + width]
        source_ids = metadata[sources + begin : sources + end]
        prefix_lengths: Annotated[Int32, "documents"] | None = metadata[
            prefixes + begin : prefixes + end
        ]
        more: dict[str, Any] = {}
        if self._extras is not None:
            more["columns"] = {name: values[row] for name, values in self._extras.columns.items()}
            if self._extras.rows is not None:
                tree = self._extras.rows[row]
                cu_seqlens, longest, source_ids = tree.cu_seqlens, tree.max_seqlen, tree.source_ids
                more["reach"], more["paths"] = tree.reach, tree.paths
                prefix_lengths = tree.prefix_lengths
            if self._extras.media is not None:
                more["media"] = self._extras.media[row]
        return ModelInput(
            tokens=tokens,
            targets=targets,
            loss_weights=weights if need.loss_weights else None,
            positions=positions if need.positions else None,
            document_ids=document_ids if need.document_ids else None,
            cu_seqlens=cu_seqlens if need.cu_seqlens else None,
            max_seqlen=longest if need.cu_seqlens else None,
            num_tokens=used,
            source_ids=source_ids,
            prefix_lengths=prefix_lengths if len(prefix) else None,
            prefix=prefix if len(prefix) else None,
            distillation=None if self._companions is None else self._companions[row],
            **more,
        )
