"""The table of where the bytes of documents lie, which the plan and the fill read instead of
objects.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, final

import numpy as np

from penstock.core.arrays import Array, Float64, Int64, Records, UInt32, UInt64
from penstock.core.compiled import address_of
from penstock.core.errors import CorruptionError
from penstock.core.ragged import Ragged
from penstock.data.shards.format import _kernels as k
from penstock.data.shards.tables.holder import SPANS, TOKENS, Holder, renewed
from penstock.data.shards.tables.lengths import LazyNumbers, for_kernel

Result = TypeVar("Result")

FAULTS = {
    k.BAD_LENGTH: "its length in the shard is not that of the lengths file",
    k.BAD_TOKENS: "its tokens differ from their checksums",
    k.BAD_SPANS: "its loss-weight spans differ from their checksum",
    k.BAD_TOKEN_ID: "a token id lies outside the vocabulary",
    k.BAD_SPAN_ORDER: "its loss-weight spans overlap, are out of order, or leave the document",
    k.BAD_TRAINED: "its trained tokens are not those of the lengths file",
    k.BAD_CHECKSUM_COUNT: "its number of checksums does not fit its length",
}
"""What is wrong with a document, in words."""

_TOGETHER = 1 << 10
"""Documents whose shards are held together to check them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTable:
    """Numbers and mapped arrays that lead to every document of a dataset; it holds the mappings
    alive.

    Document i of shard s is row `r` of batch `b`, where `local = i - shard_starts[s]`, `b =
    shard_first_batch[s] + local // documents_per_batch`, `r = local % documents_per_batch`. Its
    tokens begin at `shard_addresses[s] + batches[b].tokens + offsets[r] * offset_bytes`, `offsets`
    (int64) at `shard_addresses[s] + batches[b].token_offsets`; all modulo 2^64, so a table may
    point into several files.
    """

    num_documents: int
    lengths: Annotated[UInt32, "documents columns"] | LazyNumbers
    """[N, 2] tokens, trained tokens; [N, 1] where every token but the first is trained. Of a large
    remote dataset they come when they are indexed; kernels take them from
    `penstock.data.shards.tables.lengths.for_kernel`.
    """
    weight_sums: Annotated[Float64, "documents"] | LazyNumbers | None
    """[N] sum of loss weights over tokens[1:]; None when all weights are 0 or 1. As `lengths`."""
    token_bytes: int
    """2 or 4."""
    documents_per_batch: int
    shard_starts: Annotated[Int64, "shards+1"]
    """[S + 1] first document of each shard, then N."""
    shard_first_batch: Annotated[Int64, "shards+1"]
    """[S + 1] first batch of each shard, then B."""
    shard_addresses: Annotated[UInt64, "shards"]
    """[S] address of byte 0 of each mapping."""
    shard_bytes: Annotated[UInt64, "shards"]
    """[S] size of each mapping."""
    batches: Annotated[Records, k.BATCH, "batches"]
    """[B] where the buffers of each batch begin; with checksums they must pass `wrong_batch`."""
    offset_bytes: int
    """Bytes of one unit of the tokens' offsets."""
    has_checksums: bool
    has_spans: bool
    vocab_size: int | None
    """One more than the highest id that a token may have; None where that is not known, and for
    foreign corpora.
    """
    paths: Sequence[Path | str]
    """The shards' files [S], for messages; URLs of a remote dataset."""
    mappings: Sequence[Array]
    """What the addresses point into; the first S are the shards. Some may be mapped only while they
    are held.
    """
    holder: "Holder | None" = None
    """Brings documents to this machine, and has them mapped; None: all are there. Bytes of a shard
    may be read only while they are held.
    """

    def held(
        self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Have some kinds of units of documents on this machine while the block runs.

        Raises:
            StoreError, CorruptionError, OutputError: They cannot be brought; names the URL.
        """
        holder = self.holder
        return nullcontext() if holder is None else holder.held(holder.find(documents, kinds))

    def with_held(
        self,
        documents: Annotated[Int64, "documents"],
        kinds: Sequence[int],
        read: Callable[[], Result],
    ) -> Result:
        """What `read` returns while kinds of units of documents are held; damaged copies are
        fetched again, once.

        Raises:
            StoreError, CorruptionError, OutputError: They cannot be brought; names the URL.
        """
        holder = self.holder
        if holder is None:
            return read()
        units = holder.find(documents, kinds)
        with holder.held(units):
            try:
                return read()
            except CorruptionError as error:
                return renewed([(holder, units)], error, read)

    def locate(self, document: int) -> tuple[int, int, int]:
        """(shard, batch, row in the batch) of a document."""
        shard, batch, row = k.find_document(
            document, self.shard_starts, self.shard_first_batch, self.documents_per_batch
        )
        return int(shard), int(batch), int(row)

    def check_lengths(self, documents: Annotated[Int64, "documents"]) -> None:
        """Check the lengths of documents against their shards, as far as the format allows.

        Raises:
            CorruptionError: One is not what was written; names the file and the document.
        """
        if self.holder is None:
            return self._check_lengths_held(documents)
        # The lengths of remote datasets are checked when they come.
        documents = documents[~self.holder.is_remote(documents)]
        for begin in range(0, len(documents), _TOGETHER):
            some = documents[begin : begin + _TOGETHER]
            with self.held(some, (TOKENS,)):
                self._check_lengths_held(some)
        return None

    def _check_lengths_held(self, documents: Annotated[Int64, "documents"]) -> None:
        self._refuse(
            k.BAD_LENGTH,
            k.wrong_length(*self.kernel_view, for_kernel(self.lengths, documents), documents),
        )

    @property
    def kernel_view(self) -> tuple[Any, Any, Any]:
        """What the kernels need to find a document."""
        places = (
            self.shard_starts,
            self.shard_first_batch,
            self.shard_addresses,
            self.shard_bytes,
            self.documents_per_batch,
        )
        layout = (self.token_bytes, self.offset_bytes, self.has_checksums, self.has_spans)
        return places, np.uint64(address_of(self.batches)), layout

    def _refuse(self, fault: int, document: int) -> None:
        if document >= 0:
            raise CorruptionError(
                f"{self.paths[self.locate(document)[0]]}: document {document}: "
                f"{FAULTS[fault]}; copy the file again, or prepare again; `penstock verify` "
                "lists all faults"
            )

    def read(self, first: int, last: int) -> Ragged:
        """The tokens of documents `first` to `last`, uint32, checked as far as the format allows.

        Lengths are checked first, so memory for more tokens than the shards hold is never asked
        for.

        Raises:
            CorruptionError: They are not what was written; names the file and the document.
        """
        return self.with_held(
            np.arange(first, last), (TOKENS, SPANS), lambda: self._read_held(first, last)
        )

    def _read_held(self, first: int, last: int) -> Ragged:
        lengths = for_kernel(self.lengths, np.arange(first, last))
        self._refuse(k.BAD_LENGTH, k.wrong_document(*self.kernel_view, lengths, first, last))
        offsets = np.zeros(last - first + 1, np.int64)
        np.cumsum(self.lengths[first:last, 0], out=offsets[1:])
        tokens = np.empty(offsets[-1], np.uint32)
        vocab_size = 2**32 if self.vocab_size is None else self.vocab_size
        fault, document = k.read_documents(*self.kernel_view, vocab_size, first, offsets, tokens)
        self._refuse(fault, document if fault != k.OK else -1)
        return Ragged(tokens, offsets)
