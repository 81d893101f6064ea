"""A corpus of another program's format, read where it lies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, final, overload

import numpy as np

from penstock.compiled import address_of
from penstock.shards import _kernels as k
from penstock.shards.document import Document, Origin, choose
from penstock.shards.files import Array
from penstock.shards.manifest import TokenizerInfo
from penstock.shards.table import DocumentTable


@final
class InPlaceCorpus:
    """Documents of a Megatron or `.npy` corpus; made by `open_megatron` and `open_npy`.

    These formats have no checksums and no loss weights: every token but a document's first is trained, and damage to
    tokens cannot be found. The fingerprint covers the files' sizes, the borders of all documents and a sample of the
    tokens.

    Args:
        kind: Name of the format.
        name: Short name, for messages.
        table: Where the bytes lie.
        fingerprint: Changes when the content does.
        reopen: A function and its arguments that open it again, for pickling.
        ends_with_eos: Whether every document ends with EOS, which is then kept out of what objectives rewrite.
    """

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
        self.tokenizer: TokenizerInfo | None = None
        self._reopen, self._ends_with_eos = reopen, ends_with_eos

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen

    @property
    def path(self) -> Path:
        """Its (first) file of tokens."""
        return self.table.paths[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest document; reads all lengths."""
        return int(self.table.lengths[:, 0].max(initial=0))

    @property
    def framed(self) -> tuple[bool, bool]:
        """Whether all documents begin with BOS (these formats do not say), and whether all end with EOS."""
        return False, self._ends_with_eos

    @property
    def files(self) -> list[str]:
        """Its files of tokens."""
        return [str(path) for path in self.table.paths]

    def __len__(self) -> int:
        return self.table.num_documents

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        """One document, or those of a slice; the origin of each is its number in its file of tokens.

        Raises:
            ConfigError: The index is neither a whole number nor a slice.
        """
        chosen = choose(index, len(self))
        return [self._read(i) for i in chosen] if isinstance(chosen, range) else self._read(chosen)

    def _read(self, document: int) -> Document:
        tokens = self.table.read(document, document + 1).values
        shard = self.table.locate(document)[0]
        origin = Origin(file=str(self.table.paths[shard]), line=document - int(self.table.shard_starts[shard]))
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
    """A table over files of bare tokens: each file is one shard of one batch.

    Args:
        paths: The files.
        tokens: Their bytes, uint8 each.
        offsets: Where each document of each file begins: int64 in units of `offset_bytes`, any alignment.
        lengths: uint32 [N, 1], of all files.
        documents: In each file.
        token_bytes: 2 or 4.
        offset_bytes: What one unit of the offsets means, in bytes.
        begin: Bytes before the first token of each file.
    """
    addresses = np.array([address_of(data) for data in tokens], np.uint64)
    batches = np.zeros((len(paths), k.BATCH_COLUMNS), np.uint64)
    batches[:, 0] = np.array([address_of(array) for array in offsets], np.uint64) - addresses
    batches[:, 1] = begin
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
    """Checksum of the first and last 64 kB of a file and of 64 blocks of 4 kB between: enough to tell corpora apart."""
    if len(data) <= 2**19:
        return int(k.bytes_checksum(np.uint64(address_of(data)), np.uint64(len(data))))
    starts = np.linspace(0, len(data) - 4096, 66, dtype=np.int64)[1:-1]
    parts = [data[: 2**16], *(data[start : start + 4096] for start in starts), data[-(2**16) :]]
    sample = np.concatenate(parts)
    return int(k.bytes_checksum(np.uint64(address_of(sample)), np.uint64(len(sample))))
