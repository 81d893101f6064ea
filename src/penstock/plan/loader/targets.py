"""Which pieces of documents have a target, and those that have none left out of a source's stream.

A piece of a document has a target if one of the tokens that its slots predict has a loss weight.
For whole documents the lengths file says so; for those that were cut, their loss-weight spans are
read. So it is exact, the same on every rank, and costs nothing where no document with loss weights
is longer than a row.
"""

from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Bool, Int64, Records
from penstock.core.errors import ConfigError
from penstock.data.shards import Corpus
from penstock.data.shards.format._kernels import OK
from penstock.data.shards.tables.holder import SPANS
from penstock.data.shards.tables.lengths import for_kernel
from penstock.plan.loader._target_kernels import UNTRAINED, find_weights, leave_out
from penstock.plan.loader.mixture import CUTTING, Source
from penstock.plan.loader.plan_settings import PlanSettings
from penstock.plan.loader.rewriting import Rewriting
from penstock.plan.loader.source_records import corruption, source_records
from penstock.plan.sampling._kernels import ENTRY

_NARROW: np.dtype[Any] = np.dtype(np.int32)

Documents = Annotated[Int64, "pieces"]


@final
class Targets:
    """Finds the pieces of one source that have a target.

    Args:
        dataset: Its documents.
        rewriting: Its objective. Of a document that is rewritten, all tokens with a loss weight may
            be targets.
        distances: Target distances: the last slots of a part predict tokens of the next one.
    """

    def __init__(self, dataset: Corpus, rewriting: Rewriting, distances: int) -> None:
        self._dataset, self._rewriting, self._distances = dataset, rewriting, distances
        self._weighted = dataset.table.has_spans
        self._record = source_records([dataset], [rewriting], _NARROW) if self._weighted else None

    def of(self, pieces: Annotated[Records, "pieces"]) -> Annotated[Bool, "pieces"]:
        """Whether each piece (of a plan, or entry of a buffer) has a target.

        Raises:
            CorruptionError: Loss weights that are read are damaged.
        """
        documents = np.ascontiguousarray(pieces["document"])
        stored = self._dataset.table.lengths[documents]
        firsts, stops = self._reach(pieces)
        found: Annotated[Bool, "pieces"] = firsts < stops
        if not self._weighted:
            return found
        whole, known = pieces["tokens"] == stored[:, 0], stored[:, 1] > 0
        # Loss weights, except that of the first token, which only an objective may make a target.
        found[whole] = known[whole]
        asked = ~whole if self._rewriting.is_causal else ~(whole & known)
        found[asked] = self.weighted(documents[asked], firsts[asked], stops[asked])
        return found

    def _reach(self, pieces: Annotated[Records, "pieces"]) -> tuple[Documents, Documents]:
        """First token that a piece may have as a target, and the one after the last."""
        begins, ends = pieces["begin"], pieces["begin"] + pieces["tokens"]
        if self._rewriting.is_causal:
            return begins + 1, np.minimum(ends + self._distances, pieces["total"])
        return begins.copy(), ends

    def of_documents(self, documents: Documents) -> Annotated[Bool, "documents"]:
        """Whether documents have a target if they are not cut, or split."""
        stops = self._dataset.table.lengths[documents, 0].astype(np.int64)
        return self.weighted(documents, np.full_like(stops, int(self._rewriting.is_causal)), stops)

    def weighted(
        self, documents: Documents, firsts: Documents, stops: Documents
    ) -> Annotated[Bool, "documents"]:
        """Whether some token of firsts[i] … stops[i] − 1 of documents[i] has a loss weight."""
        assert self._record is not None
        found = np.zeros(len(documents), np.bool_)
        if not len(documents):
            return found
        table = self._dataset.table
        for_kernel(table.lengths, documents)
        record = self._record.view(np.uint64)

        def find() -> None:
            fault, at = find_weights(record, documents, firsts, stops, found)
            if fault != OK:
                raise corruption(self._dataset, int(documents[at]), fault)

        table.with_held(documents, (SPANS,), find)
        return found


@final
class UntrainedParts:
    """Leaves cut documents without a target, and such parts of them, out of what one source draws.

    Args:
        source: Its settings.
        dataset: Its documents.
        rewriting: Its objective.
        too_long: What happens to its documents that are too long.
        distances: Target distances.
    """

    def __init__(
        self, source: Source, dataset: Corpus, rewriting: Rewriting, too_long: str, distances: int
    ) -> None:
        self._targets, self._dataset = Targets(dataset, rewriting, distances), dataset
        self._where, self._split = f"source {source.name!r}", too_long == "split"
        self.depends_on = distances if self._split and rewriting.is_causal else 1
        """Number of target distances, if what is left out depends on it; else 1."""

    def leave_out(
        self,
        entries: Annotated[Records, ENTRY, "entries"],
        untrained: Annotated[Records, UNTRAINED, "entries"],
    ) -> int:
        """Leave out entries that were cut and have no target; the last entry counts what was
        skipped at the end.

        Returns:
            Entries that are left, the last one not counted.
        """
        drawn = entries[:-1]
        stored = self._dataset.table.lengths[drawn["document"], 0].astype(np.int64)
        cut = np.flatnonzero(drawn["tokens"] != stored)
        kept = np.ones(len(drawn), np.bool_)
        kept[cut] = self._targets.of(drawn[cut])
        truncated = np.zeros_like(stored) if self._split else stored - drawn["tokens"]
        last = np.ones(len(drawn), np.bool_)
        if self._split:
            ends = ~kept & (drawn["begin"] + drawn["tokens"] == stored)
            last[:] = False
            last[ends] = ~self._targets.of_documents(np.ascontiguousarray(drawn["document"][ends]))
        return int(leave_out(entries, untrained, kept, truncated, last))

    def refuse(self, documents: int) -> ConfigError:
        """The error for a source of which nothing is left in a whole epoch."""
        return ConfigError(
            f"{self._where}: nothing can be trained: each of its {documents} documents is "
            "empty, or longer than a row (or max_document_tokens) without a trained token in "
            "what is left of it; raise them, set too_long to split, or leave the source out"
        )


def untrained_parts(
    source: Source,
    dataset: Corpus,
    rewriting: Rewriting,
    too_long: str,
    settings: PlanSettings,
    distances: int,
) -> UntrainedParts | None:
    """What leaves untrained parts out of a source; None: it has none, or keeps them."""
    if not source.drop_untrained or settings.packing == "concat" or too_long not in CUTTING:
        return None
    # Only a dataset with loss weights is asked for its longest document, which some formats must
    # search for.
    if not dataset.table.has_spans or dataset.longest <= rewriting.limit:
        return None
    return UntrainedParts(source, dataset, rewriting, too_long, distances)
