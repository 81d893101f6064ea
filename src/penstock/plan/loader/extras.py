"""What documents have besides tokens and loss weights: columns, images, and branches and paths of
prefix trees.

The plan knows nothing of either: a tree is a document of as many tokens as it stores. Rows are
filled as always, and then corrected: positions, document ids and cumulative lengths follow the
nodes of trees, and columns are copied. A source without columns and trees costs nothing here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Array, Int32, Int64, Records, UInt64
from penstock.core.errors import ConfigError
from penstock.data.shards import Corpus
from penstock.data.shards.extend import open_side
from penstock.data.shards.format._column_kernels import blank_columns
from penstock.data.shards.format.layout import Column
from penstock.data.shards.format.trees import ANSWER, TEMPERATURE, TRUNCATED, UNITS, Tree
from penstock.data.shards.tables.columns import ExtraTable
from penstock.media.rows import RowMedia
from penstock.plan.inputs.paths import RowPaths
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.media import MediaRows
from penstock.plan.loader.mixture import CUTTING, TOO_LONG, Source
from penstock.plan.loader.node_rows import node_row, nodes_of
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.row_extras import RowExtras
from penstock.plan.loader.source_records import present_sources

_FACTS = (ANSWER, TEMPERATURE, TRUNCATED)
"""Values of paths that do not say which answer is better."""
_TRIED = 1000
"""Documents that are looked at for values, before the first step."""


def extras_of(dataset: Corpus) -> ExtraTable | None:
    """Trees and columns of a corpus; None: it has neither."""
    return dataset.extras


def too_long_of(source: Source, dataset: Corpus) -> str:
    """What happens to documents longer than a row.

    Raises:
        ConfigError: Trees or images would be cut.
    """
    extras = extras_of(dataset)
    if extras is None or not (extras.has_trees or extras.has_images):
        return source.too_long or TOO_LONG[0]
    if source.too_long in CUTTING and extras.has_images:
        raise ConfigError(
            f"source {source.name!r}: too_long={source.too_long!r} would cut images; take "
            "drop (the default for images: counted) or error, or prepare with max_tokens and "
            "too_long: truncate, which keeps turns that fit"
        )
    if source.too_long in CUTTING:
        raise ConfigError(
            f"source {source.name!r}: too_long={source.too_long!r} would cut prefix trees, "
            "whose paths would lose their beginnings or ends; take drop (the default for "
            "trees: counted) or error"
        )
    return source.too_long or "drop"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepExtras:
    """What the rows of one step have besides their arrays."""

    rows: Sequence[RowExtras] | None
    """None: no source has trees."""
    columns: dict[str, Array] = field(default_factory=dict)
    """Name → [R, T]."""
    media: Sequence[RowMedia] | None = None
    """None: no source has images."""


@final
class Extras:
    """Columns and trees of the sources of one loader.

    Raises:
        ConfigError: A setting and a source's trees or columns exclude each other; names both.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        datasets: Sequence[Corpus],
        rewritings: Sequence[Rewriting],
        requirements: InputRequirements,
        packing: str,
        sequence_length: int,
        image_cache: tuple[str | Path | None, int] = (None, 1),
    ) -> None:
        self._tables = [extras_of(dataset) for dataset in datasets]
        self._sides = [
            [open_side(side, dataset).extras for side in source.sides]
            for source, dataset in zip(sources, datasets, strict=True)
        ]
        self._need, self._names = requirements, [source.name for source in sources]
        self.columns = _common_columns(self._names, self._tables, self._sides)
        self._column_names = [column.name for column in self.columns]
        self._slots = sequence_length
        self._fills = np.array(
            [np.array(column.fill, column.dtype).view(np.uint32) for column in self.columns],
            np.uint32,
        )
        self._known = np.zeros((len(sources), len(self.columns)), np.bool_)
        self._copied: list[tuple[int, ExtraTable, Annotated[Int64, "columns"]]] = []
        """Source, one of its tables, and which of its columns each column is; −1: none."""
        for number in range(len(sources)):
            for table in self._of(number):
                wanted = table.numbers_of([column.name for column in self.columns])
                self._known[number] |= wanted >= 0
                self._copied += [(number, table, wanted)] if (wanted >= 0).any() else []
        self.has_trees = any(table is not None and table.has_trees for table in self._tables)
        self._rewritings = rewritings
        self.has_nodes = any(rewriting.makes_nodes for rewriting in rewritings)
        self._value_names = list(
            dict.fromkeys(name for names in self.path_values for name in names or ())
        )
        self.media = None
        if any(table is not None and table.has_images for table in self._tables):
            self.media = MediaRows(self._names, datasets, self._tables, *image_cache)
        if self.has_nodes:
            self._check_nodes()
        for number, (source, rewriting) in enumerate(zip(sources, rewritings, strict=True)):
            for table in self._of(number):
                self._check(source, table, rewriting, packing)

    def _of(self, source: int) -> list[ExtraTable]:
        """The tables of a source: its own, and those of its sides."""
        return [
            table for table in (self._tables[source], *self._sides[source]) if table is not None
        ]

    @property
    def columns_lacked(self) -> list[tuple[str, str]]:
        """(source, column) of each source that lacks a column of another."""
        return [
            (self._names[source], self._column_names[column])
            for source, column in np.argwhere(~self._known).tolist()
        ]

    @property
    def path_values(self) -> list[tuple[str, ...] | None]:
        """Of each source: names of the values of paths; None: it has no trees."""
        return [
            table.path_values if table is not None and table.has_trees else None
            for table in self._tables
        ]

    def has_compared(self, source: int, documents: int) -> bool:
        """Whether any of the first documents of a source has a path with a value that compares
        answers; those that only describe them do not.
        """
        table = self._tables[source]
        trees = (
            None if table is None else table.tree(number)
            for number in range(min(documents, _TRIED))
        )
        return any(
            tree is not None
            and not all(
                np.isnan(tree.value(name)).all() for name in tree.names if name not in _FACTS
            )
            for tree in trees
        )

    def _check(self, source: Source, table: ExtraTable, rewriting: Rewriting, packing: str) -> None:
        where, need = f"source {source.name!r}", self._need
        what = f"columns ({', '.join(column.name for column in table.columns)})"
        what = "prefix trees" if table.has_trees else "images" if table.has_images else what
        if not rewriting.is_causal:
            raise ConfigError(
                f"{where}: objective {rewriting.objective.name!r} rewrites documents, and "
                f"cannot say where their {what} go; take the causal objective"
            )
        if table.has_images:
            self._check_images(where, packing)
        if not table.has_trees:
            return
        if (need.target_distances or 1) > 1:
            raise ConfigError(
                f"{where}: its documents are prefix trees, where a slot has one target; "
                f"{need.asked_by} asks for {need.target_distances} (prediction_heads): set 1, "
                "or prepare with answers: separate"
            )
        if packing == "concat":
            raise ConfigError(
                f"{where}: packing 'concat' cuts documents, which prefix trees do not allow; "
                "use best_fit"
            )
        if need.attention == "row":
            raise ConfigError(
                f'{where}: attention="row" joins documents, and prefix trees with them; take '
                '"document"'
            )
        if need.cu_seqlens_capacity is not None:
            raise ConfigError(
                f"{where}: cu_seqlens_capacity is not supported for prefix trees; leave it out"
            )

    def _check_nodes(self) -> None:
        """Refuse what objectives that cut documents into parts exclude."""
        number = next(n for n, one in enumerate(self._rewritings) if one.makes_nodes)
        need, objective = self._need, self._rewritings[number].objective.name
        where = f"source {self._names[number]!r}: objective {objective!r}"
        if need.trees is not True:
            cannot = "cannot honour" if need.trees is False else "does not say that it honours"
            raise ConfigError(
                f"{where} cuts documents into blocks that see each other by a tree, which "
                f"{need.asked_by} {cannot}; use a model that does (InputRequirements(trees=True)), "
                "or whole documents (masked_diffusion)"
            )
        if need.cu_seqlens_capacity is not None:
            raise ConfigError(f"{where}: cu_seqlens_capacity is not supported; leave it out")
        if self.has_trees or self.media is not None:
            what = "prefix trees" if self.has_trees else "images"
            raise ConfigError(f"{where}: another source has {what}; train them apart")

    def _check_images(self, where: str, packing: str) -> None:
        need = self._need
        if need.images is not True:
            cannot = "cannot see them" if need.images is False else "does not say that it sees them"
            raise ConfigError(
                f"{where}: documents have images, but {need.asked_by} {cannot}; use a model "
                "with vision (InputRequirements(images=True)), or prepare without them "
                "(media: drop)"
            )
        if packing == "concat":
            raise ConfigError(
                f"{where}: packing 'concat' cuts documents, which images do not allow; use best_fit"
            )
        if need.attention == "row":
            raise ConfigError(
                f'{where}: attention="row" joins documents, and with them their images; take '
                '"document"'
            )

    def units(self, pieces: Annotated[Records, PIECE, "pieces"]) -> dict[str, int]:
        """Sums over the documents of a step, by the names of `UNITS`."""
        if not self.has_trees:
            return {}
        total = np.zeros(len(UNITS), np.int64)
        for source in present_sources(pieces):
            if (table := self._tables[source]) is not None and table.has_trees:
                total += table.counts(pieces["document"][pieces["source"] == source]).sum(0)
        return dict(zip(UNITS, total.tolist(), strict=True))

    def trees(self, pieces: Annotated[Records, PIECE, "pieces"]) -> list[Tree | None]:
        """The tree of each piece's document."""
        found: list[Tree | None] = []
        for source, document in zip(
            pieces["source"].tolist(), pieces["document"].tolist(), strict=True
        ):
            table = self._tables[source]
            found.append(None if table is None else table.tree(document))
        return found

    def __bool__(self) -> bool:
        """Whether there is anything to add."""
        return bool(self.columns) or self.has_trees or self.has_nodes or self.media is not None

    def add(
        self,
        pieces: Annotated[Records, PIECE, "pieces"],
        row_starts: Annotated[Int64, "rows+1"],
        tokens: Array,
        positions: Array,
        document_ids: Array,
        columns: Sequence[Array],
        addresses: Annotated[UInt64, "columns"],
        prefix_lengths: Annotated[Int32, "pieces"],
    ) -> StepExtras:
        """Make the extras of filled rows, of which there are some, and correct positions and
        document ids ([R, T], or [R, 0]) in place.

        Args:
            pieces: Of the step.
            row_starts: The pieces of each row.
            tokens: As the fill wrote them.
            positions: As the fill wrote them.
            document_ids: As the fill wrote them.
            columns: [R, T] each, to be written.
            addresses: Where they begin.
            prefix_lengths: Of each piece in these rows, as the fill wrote them.

        Raises:
            CorruptionError: Stored bytes are not what was written.
            ConfigError: A tree forks, and the requirements do not say that their model honours
                that.
        """
        if self.columns:
            self._write_columns(pieces, row_starts, addresses)
        whole, pieces = pieces, pieces[row_starts[0] : row_starts[-1]]
        trees = self.trees(pieces) if self.has_trees else [None] * len(pieces)
        media = None if self.media is None else self.media.rows(whole, row_starts, tokens, trees)
        rows = None
        if self.has_nodes:
            nodes = nodes_of(self._rewritings, pieces)
            bounds = (row_starts - row_starts[0]).tolist()
            rows = [
                node_row(
                    pieces[begin:end],
                    nodes[begin:end],
                    positions[row],
                    document_ids[row],
                    prefix_lengths[begin:end],
                    self._slots,
                )
                for row, (begin, end) in enumerate(pairwise(bounds))
            ]
        elif self.has_trees:
            bounds = (row_starts - row_starts[0]).tolist()
            rows = [
                self._row(
                    pieces[begin:end],
                    trees[begin:end],
                    self._slots,
                    positions[row],
                    document_ids[row],
                )
                for row, (begin, end) in enumerate(pairwise(bounds))
            ]
        # Views, not the arrays of the buffer: what a caller holds must refer to the buffer's block.
        return StepExtras(
            rows=rows,
            media=media,
            columns=dict(zip(self._column_names, (one[:] for one in columns), strict=True)),
        )

    def _write_columns(
        self,
        pieces: Annotated[Records, PIECE, "pieces"],
        row_starts: Annotated[Int64, "rows+1"],
        addresses: Annotated[UInt64, "columns"],
    ) -> None:
        numbers = pieces.view(np.int64).reshape(len(pieces), -1)
        blank_columns(numbers, row_starts, self._slots, self._known, self._fills, addresses)
        present = set(present_sources(pieces[row_starts[0] : row_starts[-1]]))
        for source, table, wanted in self._copied:
            if source not in present:
                continue
            table.copy(numbers, row_starts, self._slots, source, wanted, addresses)

    def _row(
        self,
        pieces: Annotated[Records, PIECE, "documents"],
        trees: Sequence[Tree | None],
        slots: int,
        positions: Array,
        document_ids: Array,
    ) -> RowExtras:
        borders: list[int] = []
        reach: list[int] = []
        counts: list[int] = []
        path_slots = []
        documents: list[int] = []
        valued = [(number, tree) for number, tree in enumerate(trees) if tree is not None]
        at = 0
        for number, (tree, length) in enumerate(zip(trees, pieces["length"].tolist(), strict=True)):
            if tree is None:
                counts.append(1)
                borders.append(at)
                reach.append(at + length)
                path_slots.append(np.arange(at, at + length))
                documents.append(number)
            else:
                if tree.forked and self._need.trees is not True:
                    self._refuse(int(pieces["source"][number]))
                begins, ends, of_slots = tree.nodes(length)
                counts.append(len(begins))
                borders += [at + begin for begin in begins]
                reach += [at + end for end in ends]
                if len(positions):
                    positions[at : at + length] = of_slots
                path_slots += [at + tree.slots(path) for path in range(len(tree.paths))]
                documents += [number] * len(tree.paths)
            at += length
        forked = any(tree.forked for _, tree in valued)
        if at < slots:
            borders.append(at)
            reach.append(slots)
        borders.append(slots)
        sizes = np.diff(borders)
        if len(document_ids):
            document_ids[:] = np.repeat(np.arange(len(sizes)), sizes)
        values = {name: np.full(len(documents), np.nan) for name in self._value_names}
        per_document = np.array(documents, np.int64)
        for number, tree in valued:
            for name in tree.names:
                values[name][per_document == number] = tree.value(name)
        return RowExtras(
            cu_seqlens=np.array(borders, np.int32),
            max_seqlen=int(sizes.max(initial=0)),
            source_ids=np.repeat(pieces["source"], counts).astype(np.int32),
            reach=np.array(reach, np.int32) if forked else None,
            prefix_lengths=None,
            paths=RowPaths(
                slots=np.concatenate(path_slots) if path_slots else np.empty(0, np.int64),
                starts=np.cumsum([0, *map(len, path_slots)], dtype=np.int64),
                documents=per_document,
                values=values,
            ),
            documents=len(trees),
        )

    def _refuse(self, source: int) -> None:
        need = self._need
        cannot = (
            "cannot honour them" if need.trees is False else "does not say that it honours them"
        )
        raise ConfigError(
            f"source {self._names[source]!r}: documents are prefix trees, whose branches must "
            f"not see each other, but {need.asked_by} {cannot}; use a model that does "
            "(InputRequirements(trees=True)), or prepare the data with answers: separate, "
            "which stores each path by itself"
        )


def _common_columns(
    names: Sequence[str],
    tables: Sequence[ExtraTable | None],
    sides: Sequence[Sequence[ExtraTable | None]],
) -> list[Column]:
    """The columns of all sources; those of the same name must be alike, and a source has each
    once.
    """
    found: dict[str, tuple[str, Column]] = {}
    for source, table, more in zip(names, tables, sides, strict=True):
        mine = [column for one in (table, *more) if one is not None for column in one.columns]
        if twice := [
            column.name for column in mine if sum(column.name == one.name for one in mine) > 1
        ]:
            raise ConfigError(
                f"source {source!r}: column {twice[0]!r} is in two of its datasets; leave one "
                "side out"
            )
        for column in mine:
            other, known = found.setdefault(column.name, (source, column))
            if known != column:
                raise ConfigError(
                    f"column {column.name!r} is {known.dtype} with fill {known.fill:g} in "
                    f"source {other!r}, but {column.dtype} with fill {column.fill:g} in "
                    f"{source!r}; make them agree"
                )
    return [column for _, column in found.values()]
