"""Sources as kernels see them, and the error for what a kernel finds damaged in one."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from penstock.core.arrays import Records
from penstock.core.compiled import address_of
from penstock.core.errors import CorruptionError, FormatError
from penstock.data.shards import Corpus
from penstock.data.shards.format._kernels import BAD_LENGTH, BAD_SPANS, BAD_TOKEN_ID, BAD_TOKENS
from penstock.data.shards.tables.corpus import location_of
from penstock.data.shards.tables.lengths import places_of
from penstock.plan.loader._document_kernels import SOURCE_RECORD
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.rewriting import Rewriting

_FAULTS = {
    BAD_LENGTH: "its length in the shard is not that of the lengths file",
    BAD_TOKENS: "its tokens differ from their checksum",
    BAD_SPANS: "its loss weights differ from their checksum or from the lengths file",
    BAD_TOKEN_ID: "a token id lies outside the vocabulary",
}
NARROW_IDS = 2**31
"""Ids from here on are negative in int32."""


def source_records(
    datasets: Sequence[Corpus], rewritings: Sequence[Rewriting], integer: np.dtype[Any]
) -> Annotated[Records, SOURCE_RECORD, "sources"]:
    """Document tables and objectives of the sources, for kernels; the caller keeps alive what the
    addresses lead to.

    Rows are of `integer`; objectives always rewrite in int32.
    """
    found: list[dict[str, Any]] = []
    for dataset, rewriting in zip(datasets, rewritings, strict=True):
        record: dict[str, Any] = {"program": 0, "program_length": 0}
        found.append(record)
        rewriting.describe(record)
        table = dataset.table
        if table.has_spans and not table.has_checksums:
            raise FormatError(
                f"dataset {dataset.name!r} has loss weights but no checksums: unknown format"
            )
        for name in (
            "shard_starts",
            "shard_first_batch",
            "shard_addresses",
            "shard_bytes",
            "batches",
        ):
            record[name] = address_of(getattr(table, name))
        record["lengths"], record["lengths_stride"] = places_of(table.lengths)
        for name in (
            "documents_per_batch",
            "token_bytes",
            "offset_bytes",
            "has_checksums",
            "has_spans",
        ):
            record[name] = getattr(table, name)
        record["num_shards"] = len(table.shard_starts) - 1
        record["weight_sums"] = 0 if table.weight_sums is None else places_of(table.weight_sums)[0]
        narrow = integer.itemsize == 4 or not rewriting.is_causal
        id_limit = min(table.vocab_size or 2**32, NARROW_IDS if narrow else 2**32)
        record["id_limit"] = 0 if id_limit >= 2 ** (8 * table.token_bytes) else id_limit
    records = np.zeros(len(datasets), SOURCE_RECORD)
    # A field of all at once: to write one field of one record costs a microsecond.
    for name in SOURCE_RECORD.names or ():
        records[name] = [record[name] for record in found]
    return records


def present_sources(pieces: Annotated[Records, PIECE, "pieces"]) -> list[int]:
    """Numbers of the sources that some pieces are from, rising."""
    found: list[int] = np.flatnonzero(np.bincount(pieces["source"])).tolist()
    return found


def corruption(dataset: Corpus, document: int, fault: int) -> CorruptionError:
    """The error for a fault that a kernel found in a document."""
    dataset, document = dataset.part_of(document)
    where = location_of(dataset)
    return CorruptionError(
        f"dataset {dataset.name!r} ({where}): document {document}: {_FAULTS[fault]}; the step "
        f"was not returned. `penstock verify {where}` names all that is damaged; prepare it "
        "again or restore a copy"
    )
