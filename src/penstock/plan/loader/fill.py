"""The fill: writes the rows of a step from mapped shards.

Objectives without a compiled form run first, in Python. One kernel call then writes this rank's
rows, and another sums loss weights: those of the whole step, or of this rank's rows if the ranks
add theirs up (`Loader(sum_over_ranks=…)`). Without that, every rank runs Python objectives on the
pieces of all ranks, and their cost does not shrink with more.
"""

from collections.abc import Sequence
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Int64, Records, UInt64
from penstock.core.errors import ConfigError
from penstock.data.shards import Corpus
from penstock.data.shards.format._kernels import BAD_TOKEN_ID, OK
from penstock.data.shards.tables.corpus import location_of
from penstock.data.shards.tables.lengths import LazyNumbers
from penstock.plan.inputs._kernels import join_rows
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader._document_kernels import BAD_MEASURE
from penstock.plan.loader._fill_kernels import ROW_ARRAYS, fill_rows, metadata_offsets, weigh_rows
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader._rewrite_kernels import scratch_size
from penstock.plan.loader.buffers import Allocate, BufferPool, Layout
from penstock.plan.loader.extras import Extras
from penstock.plan.loader.filled_rows import FilledRows
from penstock.plan.loader.on_demand import DERIVED, Demand
from penstock.plan.loader.python_objectives import NO_OUTPUT, PythonOutput, run_python
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.source_records import (
    NARROW_IDS,
    corruption,
    present_sources,
    source_records,
)

_OWN = len(ROW_ARRAYS.names or ())
"""Arrays of a row before its columns."""


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
        # Whatever rows are filled in: what they hold does not depend on who takes them.
        self._required = np.dtype(requirements.dtype or "int32")
        self._sources = source_records(datasets, rewritings, self._required)
        self._raw_sources = self._sources.view(np.uint64)
        self._in_python = np.array([rewriting.runs_in_python for rewriting in rewritings])
        self._any_in_python = bool(self._in_python.any())
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
        self._has_prefixes, self._keep, self._allocate = has_prefixes, keep, allocate
        self._demand = Demand(requirements, _derivable(datasets, requirements, rewritings, extras))
        self._pools: dict[tuple[str, frozenset[str]], BufferPool] = {}
        _require_own_targets(requirements, rewritings)
        if not requirements.loss_weights:
            for dataset in datasets:
                if dataset.table.weight_sums is not None:
                    raise ConfigError(
                        f"{requirements.asked_by} asks for no loss weights, but dataset "
                        f"{dataset.name!r} has weights other than 0 and 1, which would be "
                        "lost; require loss_weights=True"
                    )

    def _pool(self) -> BufferPool:
        """Buffers for what the consumer takes. When that grows, those of before are given up."""
        wanted = self._demand.wanted
        pool = self._pools.get(wanted)
        if pool is None:
            pool = BufferPool(self._layout(*wanted), self._keep, self._allocate)
            self._pools = {wanted: pool}
        return pool

    def _layout(self, integer: str, fields: frozenset[str]) -> Layout:
        """Arrays of a row as they are filled: those of `ROW_ARRAYS`, then columns."""
        slots, narrow_or_wide = self._slots, np.dtype(integer)

        def if_wanted(name: str) -> int:
            return slots if name in fields else 0

        return [
            ((slots,), narrow_or_wide),
            ((self._distances, slots), narrow_or_wide),
            ((self._distances, if_wanted("loss_weights")), np.dtype(np.float32)),
            ((if_wanted("positions"),), narrow_or_wide),
            ((if_wanted("document_ids"),), self._required),
            ((slots if self._has_prefixes else 0,), np.dtype(np.bool_)),
            *(((slots,), np.dtype(column.dtype)) for column in self._extras.columns),
        ]

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
        if not self._any_in_python:
            return NO_OUTPUT
        output = run_python(self._rewritings, self._in_python, pieces)
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
            python_output.denominators,
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
        first, last = row_starts.item(0), row_starts.item(-1)
        count = last - first
        joined = need.attention == "row"
        # Documents that are joined need no room in what the caller gets.
        capacity = 0 if joined else need.cu_seqlens_capacity or 0
        arrays, addresses = self._pool().take(rows)
        _, _, _, borders = metadata_offsets(rows, count)
        metadata = np.empty(borders + (rows * capacity or count + 2 * rows), np.int32)
        if self._lazy_lengths:
            self._need_lengths(pieces[first:last])
        outcome = fill_rows(
            self._raw_sources,
            pieces,
            row_starts,
            self._pad_id,
            arrays[0],
            arrays[4],
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
        extras = None
        if self._extras:
            extras = self._extras.add(
                pieces,
                row_starts,
                arrays[0],
                arrays[3],
                arrays[4],
                arrays[_OWN:],
                addresses[_OWN:],
                metadata[2 * rows + count : 2 * rows + 2 * count],
            )
        return FilledRows(need, pieces, row_starts, arrays[:_OWN], metadata, extras, self._demand)

    def _need_lengths(self, pieces: Annotated[Records, PIECE, "pieces"]) -> None:
        """Have the lengths that a kernel will read; the plan has read those of its pieces, so this
        costs a look.
        """
        if not self._lazy_lengths:
            return
        for number in present_sources(pieces):
            if (lengths := self._lazy_lengths.get(number)) is not None:
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


def _derivable(
    datasets: Sequence[Corpus],
    requirements: InputRequirements,
    rewritings: Sequence[Rewriting],
    extras: Extras,
) -> frozenset[str]:
    """The arrays that follow from the plan alone."""
    if extras.has_trees or extras.has_nodes or requirements.attention == "row":
        return frozenset()
    weighted = any(dataset.table.has_spans for dataset in datasets)
    causal = all(rewriting.is_causal for rewriting in rewritings)
    return DERIVED if causal and not weighted else DERIVED - {"loss_weights"}


def _require_own_targets(requirements: InputRequirements, rewritings: Sequence[Rewriting]) -> None:
    """Refuse objectives with targets of their own where rows cannot have them."""
    makes = next((rewriting for rewriting in rewritings if rewriting.writes_targets), None)
    if makes is None:
        return
    who = f"{makes.where}: objective {makes.objective.name!r} writes targets of its own"
    if (requirements.target_distances or 1) > 1:
        raise ConfigError(
            f"{who}, one for each slot, but {requirements.asked_by} asks for "
            f"{requirements.target_distances} (prediction_heads); set 1"
        )
    if requirements.own_targets is False:
        raise ConfigError(
            f"{who}, but {requirements.asked_by} takes the tokens behind slots; train with "
            "ps.train or ps.loss, or take another objective"
        )
    if not requirements.loss_weights and not makes.runs_in_python:
        raise ConfigError(
            f"{who} with weights, but {requirements.asked_by} asks for no loss weights, so they "
            "would be lost; require loss_weights=True"
        )


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
