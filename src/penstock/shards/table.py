"""Where the bytes of every document lie: what the plan and the fill read instead of objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.compiled import address_of
from penstock.errors import CorruptionError
from penstock.ragged import Ragged
from penstock.shards import _kernels as k

Array = np.ndarray[Any, np.dtype[Any]]

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTable:
    """Numbers and mapped arrays that lead to every document of a dataset; it holds the mappings alive.

    Document i of shard s is row `r` of batch `b`, where `local = i - shard_starts[s]`,
    `b = shard_first_batch[s] + local // documents_per_batch`, `r = local % documents_per_batch`. Its tokens begin at
    `shard_addresses[s] + batches[b, 1] + offsets[r] * offset_bytes`, `offsets` (int64) at
    `shard_addresses[s] + batches[b, 0]`; all modulo 2^64, so a table may point into several files.
    """

    num_documents: int
    lengths: Array
    """uint32 [N, 2]: tokens, trained tokens. [N, 1] where every token but the first is trained."""
    weight_sums: Array | None
    """float64 [N], sum of loss weights over tokens[1:]; None when all weights are 0 or 1."""
    token_bytes: int
    """2 or 4."""
    documents_per_batch: int
    shard_starts: Array
    """int64 [S + 1]: first document of each shard, then N."""
    shard_first_batch: Array
    """int64 [S + 1]."""
    shard_addresses: Array
    """uint64 [S]: address of byte 0 of each mapping."""
    shard_bytes: Array
    """uint64 [S]: size of each mapping."""
    batches: Array
    """uint64 [B, 9]: positions of buffers relative to the shard's address: 0 offsets of tokens, 1 tokens, 2 offsets of
    checksums, 3 checksums, 4 bitmap of rows with spans (0: all), 5 offsets of spans, 6 begins, 7 ends, 8 weights. With
    checksums they must pass `wrong_batch`."""
    offset_bytes: int
    """What one unit of the tokens' offsets means, in bytes."""
    has_checksums: bool
    has_spans: bool
    vocab_size: int | None
    """One more than the highest id that a token may have; None where that is not known, and for foreign corpora."""
    paths: Sequence[Path]
    """The shards' files [S], for messages."""
    mappings: Sequence[Array]
    """What the addresses point into; the first S are the shards, uint8 [bytes] each."""

    def locate(self, document: int) -> tuple[int, int, int]:
        """(shard, batch, row in the batch) of a document."""
        shard, batch, row = k.find_document(
            document, self.shard_starts, self.shard_first_batch, self.documents_per_batch
        )
        return int(shard), int(batch), int(row)

    def check_lengths(self, documents: Array) -> None:
        """Check the lengths of documents (int64 [n]) against their shards, as far as the format allows.

        Raises:
            CorruptionError: One is not what was written; names the file and the document.
        """
        self._refuse(k.BAD_LENGTH, k.wrong_length(*self._where, self.lengths, documents))

    @property
    def _where(self) -> tuple[Any, Any, Any]:
        """What the kernels need to find a document."""
        places = (
            self.shard_starts, self.shard_first_batch, self.shard_addresses, self.shard_bytes, self.documents_per_batch,
        )  # fmt: skip
        layout = (self.token_bytes, self.offset_bytes, self.has_checksums, self.has_spans)
        return places, np.uint64(address_of(self.batches)), layout

    def _refuse(self, fault: int, document: int) -> None:
        if document >= 0:
            raise CorruptionError(
                f"{self.paths[self.locate(document)[0]]}: document {document}: {FAULTS[fault]}; copy the file again, "
                "or prepare again; `penstock verify` lists all faults"
            )

    def read(self, first: int, last: int) -> Ragged:
        """The tokens of documents `first` to `last`, uint32, checked as far as the format allows.

        Lengths are checked first, so memory for more tokens than the shards hold is never asked for.

        Raises:
            CorruptionError: They are not what was written; names the file and the document.
        """
        self._refuse(k.BAD_LENGTH, k.wrong_document(*self._where, self.lengths, first, last))
        offsets = np.zeros(last - first + 1, np.int64)
        np.cumsum(self.lengths[first:last, 0], out=offsets[1:])
        tokens = np.empty(offsets[-1], np.uint32)
        vocab_size = 2**32 if self.vocab_size is None else self.vocab_size
        fault, document = k.read_documents(*self._where, vocab_size, first, offsets, tokens)
        self._refuse(fault, document if fault != k.OK else -1)
        return Ragged(tokens, offsets)
