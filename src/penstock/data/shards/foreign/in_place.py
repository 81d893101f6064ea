"""A corpus of another program's format, read where it lies: its documents, and the table over its
files.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.compiled import address_of
from penstock.data.shards.format import _kernels as k
from penstock.data.shards.tables.corpus import documents_at
from penstock.data.shards.tables.document import Document, Origin
from penstock.data.shards.tables.table import DocumentTable
from penstock.data.stores.files import checksum


@final
class InPlaceCorpus:
    """Documents of a Megatron or `.npy` corpus; made by `open_megatron` and `open_npy`.

    These formats have no checksums and no loss weights: every token except a document's first is
    trained, and damage to tokens cannot be detected. The fingerprint covers the files' sizes, the
    borders of all documents and a sample of the tokens.

    Args:
        kind: Name of the format.
        name: Short name, for messages.
        table: Where the bytes are.
        fingerprint: Changes when the content does.
        reopen: A function and its arguments that open it again, for pickling.
        ends_with_eos: Whether every document ends with EOS, which objectives then do not rewrite.
    """

    url = tokenizer = loaded_tokenizer = chat = media = processor = extras = text_bytes = None
    """Nothing of this is known of other programs' formats: they are files of tokens."""
    sampling: Mapping[str, object] = MappingProxyType({})

    def __init__(
        self,
        kind: str,
        name: str,
        table: DocumentTable,
        fingerprint: str,
        reopen: tuple[Callable[..., Any], tuple[Any, ...]],
        *,
        ends_with_eos: bool = False,
    ) -> None:
        self.kind, self.name, self.table, self.fingerprint = kind, name, table, fingerprint
        self._reopen, self._ends_with_eos = reopen, ends_with_eos

    def __reduce__(self) -> tuple[object, ...]:
        return self._reopen

    @property
    def path(self) -> Path:
        """Its (first) file of tokens."""
        return Path(self.table.paths[0])

    @property
    def longest(self) -> int:
        """Length of the longest document in tokens; reads all lengths."""
        return int(self.table.lengths[:, 0].max(initial=0))

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents; reads all lengths."""
        return int(self.table.lengths[:, 0].sum(dtype=np.int64))

    @property
    def framed(self) -> tuple[bool, bool]:
        """Whether all documents begin with BOS (these formats do not say), and whether all end with
        EOS.
        """
        return False, self._ends_with_eos

    @property
    def files(self) -> list[str]:
        """Its files of tokens."""
        return [str(path) for path in self.table.paths]

    @property
    def parts(self) -> "tuple[InPlaceCorpus]":
        """As in `Corpus`: itself."""
        return (self,)

    def part_of(self, document: int) -> "tuple[InPlaceCorpus, int]":
        """As in `Corpus`: itself."""
        return self, document

    def __len__(self) -> int:
        return self.table.num_documents

    __getitem__ = documents_at

    def _read(self, document: int) -> Document:
        tokens = self.table.read(document, document + 1).values
        shard = self.table.locate(document)[0]
        origin = Origin(
            file=str(self.table.paths[shard]), line=document - int(self.table.shard_starts[shard])
        )
        return Document(tokens=tokens, loss_weights=np.ones(len(tokens), np.float32), origin=origin)


def in_place_table(
    paths: list[Path],
    tokens: list[Array],
    offsets: list[Array],
    lengths: Array,
    documents: list[int],
    *,
    token_bytes: int,
    offset_bytes: int,
    begin: int = 0,
) -> DocumentTable:
    """A table over files of bare tokens: each file is one shard with one batch.

    Args:
        paths: The files.
        tokens: Their bytes, uint8 each.
        offsets: Where each document of each file begins: int64 in units of `offset_bytes`, any
            alignment.
        lengths: uint32 [N, 1], of all files.
        documents: Number of documents in each file.
        token_bytes: 2 or 4.
        offset_bytes: Bytes per unit of the offsets.
        begin: Bytes before the first token of each file.
    """
    addresses = np.array([address_of(data) for data in tokens], np.uint64)
    batches = np.zeros(len(paths), k.BATCH)
    batches["token_offsets"] = (
        np.array([address_of(array) for array in offsets], np.uint64) - addresses
    )
    batches["tokens"] = begin
    return DocumentTable(
        num_documents=sum(documents),
        lengths=lengths,
        weight_sums=None,
        token_bytes=token_bytes,
        documents_per_batch=max(1, *documents),
        shard_starts=np.cumsum([0, *documents], dtype=np.int64),
        shard_first_batch=np.arange(len(paths) + 1, dtype=np.int64),
        shard_addresses=addresses,
        shard_bytes=np.array([len(data) for data in tokens], np.uint64),
        batches=batches,
        offset_bytes=offset_bytes,
        has_checksums=False,
        has_spans=False,
        vocab_size=None,
        paths=paths,
        mappings=[*tokens, *offsets],
    )


def sample_checksum(data: Array) -> int:
    """Checksum of a file's first and last 64 kB and of 64 blocks of 4 kB between: enough to
    distinguish corpora.
    """
    if len(data) <= 2**19:
        return checksum(data)
    starts = np.linspace(0, len(data) - 4096, 66, dtype=np.int64)[1:-1]
    parts = [data[: 2**16], *(data[start : start + 4096] for start in starts), data[-(2**16) :]]
    sample = np.concatenate(parts)
    return checksum(sample)
