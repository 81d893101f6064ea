"""A prepared dataset, opened by mapping: any document at once, nothing read before it is needed."""

import json
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from penstock.compiled import address_of
from penstock.errors import CorruptionError
from penstock.shards.document import Document, Origin
from penstock.shards.files import check_size, checksum, map_file, map_numbers
from penstock.shards.manifest import BATCHES, FILES, LENGTHS, WEIGHT_SUMS, Manifest, TokenizerInfo
from penstock.shards.table import DocumentTable

Array = np.ndarray[Any, np.dtype[Any]]


@final
class Dataset:
    """A folder that `penstock prepare` made; `len(dataset)` documents, `dataset[i]` one of them.

    Open it with `Dataset.open`. Pickling keeps the path alone and opens it again.
    """

    def __init__(self, path: Path, manifest: Manifest, table: DocumentTable) -> None:
        self.path, self.manifest, self.table = path, manifest, table
        self._files: list[str] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map a dataset: O(shards), and O(documents / 1024) for the batch table, which is checked because addresses
        come from it. Other contents are checked as they are used, and all by `penstock verify`.

        Raises:
            FormatError: Not a dataset, unfinished, or of another format version.
            CorruptionError: A file is missing, has another size than it should, or the batch table is damaged.
        """
        path = Path(path)
        manifest = Manifest.load(path)
        for shard in manifest.shards:
            check_size(path / shard.file, shard.bytes)
        table = _table(path, manifest)
        if checksum(table.batches) != manifest.checksums[BATCHES]:
            raise CorruptionError(f"{path / BATCHES}: differs from its checksum; copy it again, or prepare again")
        return cls(path, manifest, table)

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset.open, (self.path,)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.resolve().name

    @property
    def fingerprint(self) -> str:
        """Hash of its tokens and loss weights; the same for any spread over shards."""
        return self.manifest.fingerprint

    @property
    def tokenizer(self) -> TokenizerInfo:
        """The tokenizer that made it."""
        return self.manifest.tokenizer

    @property
    def files(self) -> list[str]:
        """Names of the files that the documents came from; read on first use."""
        if self._files is None:
            try:
                self._files = json.loads((self.path / FILES).read_bytes())
            except (OSError, ValueError) as error:
                raise CorruptionError(f"{self.path / FILES}: {error}; copy it again, or prepare again") from None
        return self._files

    def __len__(self) -> int:
        return self.table.num_documents

    def __getitem__(self, document: int) -> Document:
        """One document, its tokens and spans checked against their checksums.

        Raises:
            CorruptionError: They are not what was written; names the shard.
        """
        if not -len(self) <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        document = int(document) % len(self)
        shard, batch, row = self.table.locate(document)
        tokens = self.table.read(document, document + 1).values
        stored = _read_batch(self.table, shard, batch)
        weights = np.ones(len(tokens), np.float32)
        spans = stored["spans"][row].as_py() if self.table.has_spans else None
        if spans is not None:
            weights[:] = 0
            for span in spans:
                weights[span["begin"] : span["end"]] = span["loss_weight"]
        origin = stored["origin"][row].as_py()
        file = self.files[origin["file"]] if 0 <= origin["file"] < len(self.files) else ""
        text = stored["text"][row].as_py() if self.manifest.has_text else None
        return Document(tokens=tokens, loss_weights=weights, origin=Origin(file=file, line=origin["line"]), text=text)


def _read_batch(table: DocumentTable, shard: int, batch: int) -> Any:
    """A record batch of a mapped shard, without copying."""
    import pyarrow as pa

    try:
        file = pa.ipc.open_file(pa.py_buffer(table.mappings[shard]))
        return file.get_batch(batch - int(table.shard_first_batch[shard]))
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(f"{table.paths[shard]}: not a sound Arrow IPC file: {error}; copy it again") from None


def _table(path: Path, manifest: Manifest) -> DocumentTable:
    mappings = [map_file(path / shard.file) for shard in manifest.shards]
    documents, batches = ([getattr(shard, name) for shard in manifest.shards] for name in ("documents", "batches"))
    return DocumentTable(
        num_documents=manifest.documents,
        lengths=map_numbers(path / LENGTHS, "<u4", (manifest.documents, 2)),
        weight_sums=(
            map_numbers(path / WEIGHT_SUMS, "<f8", (manifest.documents,)) if manifest.fractional_weights else None
        ),
        token_bytes=manifest.token_bytes,
        documents_per_batch=manifest.documents_per_batch,
        shard_starts=np.cumsum([0, *documents], dtype=np.int64),
        shard_first_batch=np.cumsum([0, *batches], dtype=np.int64),
        shard_addresses=np.array([address_of(mapping) for mapping in mappings], np.uint64),
        shard_bytes=np.array([len(mapping) for mapping in mappings], np.uint64),
        batches=map_numbers(path / BATCHES, "<u8", (sum(batches), 9)),
        offset_bytes=manifest.token_bytes,
        has_checksums=True,
        has_spans=manifest.has_spans,
        paths=[path / shard.file for shard in manifest.shards],
        mappings=mappings,
    )
