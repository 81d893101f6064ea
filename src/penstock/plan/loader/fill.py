"""The fill: writes the rows of a step from mapped shards.

Objectives without a compiled form run first, in Python. One kernel call then writes this rank's
rows, and another sums loss weights: those of the whole step, or of this rank's rows if the ranks
add theirs up (`Loader(sum_over_ranks=…)`). Without that, every rank runs Python objectives on the
pieces of all ranks, and their cost does not shrink with more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, final, overload

import numpy as np

from penstock.core.arrays import Array, Float32, Int32, Int64, Records, UInt64
from penstock.core.compiled import address_of
from penstock.core.errors import ConfigError
from penstock.data.shards import Corpus
from penstock.data.shards.format._kernels import BAD_TOKEN_ID, OK
from penstock.data.shards.tables.corpus import location_of
from penstock.data.shards.tables.lengths import LazyNumbers
from penstock.media.rows import RowMedia
from penstock.plan.inputs._kernels import join_rows
from penstock.plan.inputs.joining import joined_reach, shifted
from penstock.plan.inputs.model_input import ModelInput, StepFields
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader._document_kernels import BAD_MEASURE
from penstock.plan.loader._fill_kernels import (
    PYTHON_ARRAYS,
    ROW_ARRAYS,
    fill_rows,
    metadata_offsets,
    weigh_rows,
)
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader._rewrite_kernels import scratch_size
from penstock.plan.loader.buffers import Allocate, BufferPool, Buffers
from penstock.plan.loader.companion import Accompany
from penstock.plan.loader.extras import Extras, StepExtras
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.source_records import NARROW_IDS, corruption, source_records


@final
class Fill:
    """Writes rows of pieces into arrays.

    Args:
        datasets: One for each source.
        sequence_length: Token slots of a row.
        requirements: Which arrays, in what form.
        pad_id: What padding holds.
        rewritings: The objective of each source.
        extras: Columns and trees of the sources.
        keep: Maximum number of buffer sets kept for reuse, per number of rows.
        allocate: Where buffers come from.

    Raises:
        ConfigError: The requested dtype, weights or prefixes cannot represent what a dataset or
            objective produces.
    """

    def __init__(
        self,
        datasets: Sequence[Corpus],
        sequence_length: int,
        requirements: InputRequirements,
        pad_id: int,
        rewritings: Sequence[Rewriting],
        extras: Extras,
        *,
        keep: int,
        allocate: Allocate,
    ) -> None:
        self._extras = extras
        self._datasets, self._requirements, self._rewritings = datasets, requirements, rewritings
        self._pad_id, self._slots = pad_id, sequence_length
        integer, floating = np.dtype(requirements.dtype or "int32"), np.dtype(np.float32)
        self._sources = source_records(datasets, rewritings, integer)
        self._raw_sources = self._sources.view(np.uint64)
        self._lazy_lengths = {
            number: dataset.table.lengths
            for number, dataset in enumerate(datasets)
            if isinstance(dataset.table.lengths, LazyNumbers)
        }
        self._require_narrow_vocabularies()
        compiled = any(
            not rewriting.is_causal and not rewriting.runs_in_python for rewriting in rewritings
        )
        self._scratch_size = scratch_size(sequence_length) if compiled else 0
        has_prefixes = _has_prefixes(requirements, rewritings)
        self._distances = requirements.target_distances or 1
        layout = {
            "tokens": ((sequence_length,), integer),
            "targets": ((self._distances, sequence_length), integer),
            "weights": (
                (self._distances, sequence_length if requirements.loss_weights else 0),
                floating,
            ),
            "positions": ((sequence_length if requirements.positions else 0,), integer),
            "document_ids": ((sequence_length if requirements.document_ids else 0,), integer),
            "prefix": ((sequence_length if has_prefixes else 0,), np.dtype(np.bool_)),
        }
        columns = [((sequence_length,), np.dtype(column.dtype)) for column in extras.columns]
        self._pool = BufferPool(
            [*(layout[name] for name in ROW_ARRAYS.names or ()), *columns], keep, allocate
        )
        if not requirements.loss_weights:
            for dataset in datasets:
                if dataset.table.weight_sums is not None:
                    raise ConfigError(
                        f"{requirements.asked_by} asks for no loss weights, but dataset "
                        f"{dataset.name!r} has weights other than 0 and 1, which would be "
                        "lost; require loss_weights=True"
                    )

    def _require_narrow_vocabularies(self) -> None:
        """Refuse vocabularies with too high ids; where none is known, pieces are checked as they
        are read.
        """
        for number, dataset in enumerate(self._datasets):
            info = dataset.tokenizer
            if (
                info is not None
                and info.vocab_size > NARROW_IDS
                and self._sources["id_limit"][number] == NARROW_IDS
            ):
                cure = self._cure_of_wide_ids(number)
                raise ConfigError(
                    f"dataset {dataset.name!r} has a vocabulary of {info.vocab_size} ids; {cure}"
                )

    def _cure_of_wide_ids(self, source: int) -> str:
        rewriting = self._rewritings[source]
        if not rewriting.is_causal:
            return (
                f"objective {rewriting.objective.name!r} works on ids below 2^31 only: give ids "
                "below that"
            )
        return (
            "int32 rows hold ids below 2^31: give ids below that, or require "
            'InputRequirements(dtype="int64")'
        )

    def run_python(self, pieces: Annotated[Records, PIECE, "pieces"]) -> "PythonOutput":
        """Rewrite the pieces of a step that have a Python objective.

        Raises:
            ConfigError: An objective does not write what it measured, or writes weights that are
                not required.
        """
        output = run_python(self._rewritings, pieces)
        if (
            len(output.weights)
            and not self._requirements.loss_weights
            and not np.isin(output.weights, (0, 1)).all()
        ):
            raise ConfigError(
                f"{self._requirements.asked_by} asks for no loss weights, but an objective "
                "writes some that are neither 0 nor 1, which would be lost; require "
                "loss_weights=True"
            )
        return output

    def weigh(
        self, pieces: Annotated[Records, PIECE, "pieces"], python_output: "PythonOutput"
    ) -> tuple[tuple[float, ...], int]:
        """Sum of loss weights over all targets of the pieces, for each distance; and the slots that
        they fill.

        Raises:
            CorruptionError: As `rows`, also for a piece of another rank.
            ConfigError: As `rows`.
        """
        sums = np.empty(self._distances + 1)
        self._need_lengths(pieces)
        outcome = weigh_rows(
            self._raw_sources,
            pieces,
            sums,
            python_output.starts,
            python_output.weights,
            self._scratch(),
        )
        self._check(outcome, pieces)
        *weights, slots = sums.tolist()
        return tuple(weights), int(slots)

    def _scratch(self) -> Annotated[UInt64, "scratch"] | None:
        """Working memory to rewrite a piece; each thread needs its own.

        None if no source has a compiled objective: then Numba leaves them all out, which halves the
        time to compile.
        """
        return np.empty(self._scratch_size, np.uint64) if self._scratch_size else None

    def rows(
        self,
        pieces: Annotated[Records, PIECE, "pieces"],
        row_starts: Annotated[Int64, "rows+1"],
        python_output: "PythonOutput",
    ) -> "FilledRows":
        """Model inputs of len(row_starts) − 1 rows.

        Raises:
            CorruptionError: Stored bytes are not what was written; names dataset and document.
            ConfigError: A token id does not fit int32, and the dataset does not know its
                vocabulary; or an objective's program writes another number of slots than the
                objective measured.
        """
        rows, need = len(row_starts) - 1, self._requirements
        count = row_starts.item(-1) - row_starts.item(0)
        joined = need.attention == "row"
        # Documents that are joined need no room in what the caller gets.
        capacity = 0 if joined else need.cu_seqlens_capacity or 0
        arrays, addresses = self._pool.take(rows)
        _, _, _, borders = metadata_offsets(rows, count)
        metadata = np.empty(borders + (rows * capacity or count + 2 * rows), np.int32)
        self._need_lengths(pieces[row_starts.item(0) : row_starts.item(-1)])
        outcome = fill_rows(
            self._raw_sources,
            pieces,
            row_starts,
            self._pad_id,
            arrays[0],
            self._distances,
            addresses,
            capacity,
            metadata,
            python_output.addresses,
            self._scratch(),
        )
        self._check(outcome, pieces)
        if joined:
            cu_seqlens = np.empty((rows, need.cu_seqlens_capacity or 3), np.int32)
            join_rows(self._slots, metadata[: 2 * rows].reshape(rows, 2), arrays[3], cu_seqlens)
            metadata = np.concatenate([metadata[:borders], cu_seqlens.ravel()])
        own = len(ROW_ARRAYS.names or ())
        extras = self._extras.add(
            pieces, row_starts, arrays[0], arrays[3], arrays[4], arrays[own:], addresses[own:]
        )
        return FilledRows(need, row_starts, arrays[:own], metadata, extras)

    def _need_lengths(self, pieces: Annotated[Records, PIECE, "pieces"]) -> None:
        """Have the lengths that a kernel will read; the plan has read those of its pieces, so this
        costs a look.
        """
        for number, lengths in self._lazy_lengths.items():
            lengths.for_kernel(pieces["document"][pieces["source"] == number])

    def check_capacity(
        self, pieces: Annotated[Records, PIECE, "pieces"], row_starts: Annotated[Int64, "rows+1"]
    ) -> None:
        """Refuse a step, on all ranks alike, in which a row has more borders than
        `cu_seqlens_capacity`.
        """
        capacity = self._requirements.cu_seqlens_capacity
        if capacity is None:
            return
        ends = np.concatenate([[0], np.cumsum(pieces["length"])])[row_starts]
        documents = np.diff(row_starts)
        if self._requirements.attention == "row":
            documents = np.minimum(documents, 1)
        borders = documents + 1 + (np.diff(ends) < self._slots)
        if borders.max(initial=0) > capacity:
            raise ConfigError(
                f"cu_seqlens_capacity is {capacity}, but a row needs {borders.max()} entries; "
                "raise it"
            )

    def _check(self, outcome: tuple[int, int], pieces: Annotated[Records, PIECE, "pieces"]) -> None:
        """Raise what a kernel found."""
        fault, index = outcome
        if fault == OK:
            return
        source, number = int(pieces["source"][index]), int(pieces["document"][index])
        dataset, document = self._datasets[source].part_of(number)
        if fault == BAD_MEASURE:
            rewriting, piece = self._rewritings[source], pieces[index]
            raise ConfigError(
                f"{rewriting.where}: objective {rewriting.objective.name!r} measured "
                f"{piece['tokens']} tokens of document {document} of dataset {dataset.name!r} "
                f"as {piece['length']} slots, but its program writes another number: a bug in "
                "the objective, not in the data; penstock.objectives.check_objective tests it"
            )
        if fault == BAD_TOKEN_ID and dataset.table.vocab_size is None:
            raise ConfigError(
                f"dataset {dataset.name!r} ({location_of(dataset)}): document {document} has "
                f"a token id of 2^31 or more; {self._cure_of_wide_ids(source)}"
            )
        raise corruption(self._datasets[source], number, fault)


@final
class FilledRows(Sequence[ModelInput]):
    """The rows of one call of the kernel, side by side; a `ModelInput` of views is made when a row
    is asked for.

    Args:
        need: Which arrays the rows have.
        row_starts: As in a window, of R rows.
        arrays: tokens [R, T], targets [R, D, T], weights [R, D, T or 0], positions and document ids
            [R, T or 0], whether in a prefix [R, T or 0].
        metadata: As `fill_rows` writes it: (tokens, longest document) of each row, source of each
            document, prefix of each, cumulative lengths of the rows end to end, and of each row.
        extras: Columns, and nodes and paths of trees; None: there are none.
    """

    __slots__ = (
        "_arrays",
        "_companions",
        "_extras",
        "_metadata",
        "_need",
        "_piece_starts",
        "_row_sizes",
        "_row_starts",
    )

    def __init__(
        self,
        need: InputRequirements,
        row_starts: Annotated[Int64, "rows+1"],
        arrays: Buffers,
        metadata: Annotated[Int32, "metadata"],
        extras: StepExtras | None = None,
    ) -> None:
        self._extras = extras
        self._need, self._row_starts, self._arrays, self._metadata = (
            need,
            row_starts,
            arrays,
            metadata,
        )
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

    def arrays(self) -> StepFields[Array]:
        """All rows in one array for each field; see `Step.arrays`."""
        need = self._need
        # A few Python integers: NumPy would take a microsecond for each sum.
        sizes = self._metadata[: 2 * len(self)].tolist()
        used = sizes[::2]
        # Views, not the arrays of the buffer: what a caller holds must refer to the buffer's block.
        tokens, targets, weights, positions, document_ids, prefix = (
            array[:] for array in self._arrays
        )
        trees = None if self._extras is None else self._extras.rows
        slots = tokens.shape[1]
        borders, longest, reach = None, None, None
        if trees is not None:
            ends = [row.cu_seqlens for row in trees]
            reach = joined_reach([row.reach for row in trees], ends, slots)
            borders = shifted([one[:-1] for one in ends], slots, end=True)
            longest = max((row.max_seqlen for row in trees), default=0)
        elif need.cu_seqlens:
            borders, longest = self._cu_seqlens(used), max(sizes[1::2], default=0)
        media = None
        if self._extras is not None and self._extras.media is not None:
            documents = np.diff(self._row_starts) + (np.array(used) < slots)
            media = RowMedia.join(self._extras.media, slots, documents.tolist())
        return {
            "tokens": tokens,
            "targets": targets,
            "loss_weights": weights if need.loss_weights else None,
            "positions": positions if need.positions else None,
            "document_ids": document_ids if need.document_ids else None,
            "prefix": prefix if prefix.size else None,
            "cu_seqlens": borders if need.cu_seqlens else None,
            "max_seqlen": longest if need.cu_seqlens else None,
            "reach": reach,
            "columns": {} if self._extras is None else self._extras.columns,
            "media": media,
            "num_tokens": sum(used),
            "tokens_per_row": used,
        }

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
        tokens, targets, weights, positions, document_ids, prefix = (
            array[row] for array in self._arrays
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
        more: dict[str, Any] = {}
        if self._extras is not None:
            more["columns"] = {name: values[row] for name, values in self._extras.columns.items()}
            if self._extras.rows is not None:
                tree = self._extras.rows[row]
                cu_seqlens, longest, source_ids = tree.cu_seqlens, tree.max_seqlen, tree.source_ids
                more["reach"], more["paths"] = tree.reach, tree.paths
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
            prefix_lengths=metadata[prefixes + begin : prefixes + end] if len(prefix) else None,
            prefix=prefix if len(prefix) else None,
            distillation=None if self._companions is None else self._companions[row],
            **more,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PythonOutput:
    """What Python objectives wrote for the P pieces of a step, concatenated; other pieces take no
    space.
    """

    starts: Annotated[Int64, "pieces"]
    """[P] first slot of each piece in `tokens` and `weights`; [0] where no source has a Python
    objective.
    """
    tokens: Annotated[Int32, "slots"]
    weights: Annotated[Float32, "slots"]
    prefixes: Annotated[Int32, "pieces"]
    """[P] prefix of each piece; as `starts`."""
    addresses: Annotated[UInt64, "4"] = field(init=False)
    """Where each of the arrays above begins: the bytes of one `PYTHON_ARRAYS`."""

    def __post_init__(self) -> None:
        arrays = [getattr(self, name) for name in PYTHON_ARRAYS.names or ()]
        object.__setattr__(
            self, "addresses", np.array([address_of(array) for array in arrays], np.uint64)
        )


_NO_OUTPUT = PythonOutput(
    starts=np.empty(0, np.int64),
    tokens=np.empty(0, np.int32),
    weights=np.empty(0, np.float32),
    prefixes=np.empty(0, np.int32),
)


def run_python(
    rewritings: Sequence[Rewriting], pieces: Annotated[Records, PIECE, "pieces"]
) -> PythonOutput:
    """Rewrite the pieces of sources whose objective has no compiled form (`program()` is absent or
    None).
    """
    if not any(rewriting.runs_in_python for rewriting in rewritings):
        return _NO_OUTPUT
    prefixes = np.zeros(len(pieces), np.int32)
    in_python = np.array([rewriting.runs_in_python for rewriting in rewritings])[pieces["source"]]
    lengths = np.where(in_python, pieces["length"], 0)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    tokens, weights = np.empty(total, np.int32), np.empty(total, np.float32)
    for p in np.flatnonzero(in_python).tolist():
        written = rewritings[pieces["source"][p]].write(pieces[p])
        tokens[starts[p] : ends[p]], weights[starts[p] : ends[p]] = written.tokens, written.weights
        prefixes[p] = written.prefix
    return PythonOutput(starts=starts, tokens=tokens, weights=weights, prefixes=prefixes)


def _has_prefixes(requirements: InputRequirements, rewritings: Sequence[Rewriting]) -> bool:
    """Whether rows have bidirectional prefixes; refused where they would not be honoured."""
    makes = next((rewriting for rewriting in rewritings if rewriting.bidirectional), None)
    if makes is None:
        return False
    who = f"{makes.where}: objective {makes.objective.name!r} makes bidirectional prefixes"
    if requirements.prefix is not True:
        cannot = (
            "cannot honour them"
            if requirements.prefix is False
            else "does not say that it honours them"
        )
        raise ConfigError(
            f"{who}, but {requirements.asked_by} {cannot}; use attention that does and "
            "require prefix=True, or give the objective bidirectional=False"
        )
    if requirements.attention == "row":
        raise ConfigError(
            f'{who}, which attention="row" ({requirements.asked_by}) would join; take '
            f'attention="document", or give '
            "the objective bidirectional=False"
        )
    return True
