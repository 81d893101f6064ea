"""A prepared dataset, opened by mapping: any document is available at once, and nothing is read
before it is needed.

`read_origins` reads where all documents came from; it costs a few microseconds per batch of 1,024.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, CorruptionError, PenstockError
from penstock.core.folders import is_url, local_path
from penstock.core.notebook import bars, card
from penstock.core.properties import cached_property
from penstock.core.urls import Address
from penstock.data import reports
from penstock.data.shards.for_datasets import TargetColumn, to_datasets
from penstock.data.shards.format import _kernels as k
from penstock.data.shards.format.images import PROCESSOR_FOLDER, MediaInfo
from penstock.data.shards.format.layout import other_places, read_texts
from penstock.data.shards.format.manifest import (
    BATCHES,
    FILES,
    LENGTHS,
    TOKENIZER_FOLDER,
    WEIGHT_SUMS,
    ChatInfo,
    Manifest,
    TokenizerInfo,
)
from penstock.data.shards.remote.length_ranges import lazy_tables, open_tables
from penstock.data.shards.remote.residency import Residency
from penstock.data.shards.remote.tables import fetch_tables
from penstock.data.shards.remote.units import UnitMap
from penstock.data.shards.tables.columns import ExtraTable
from penstock.data.shards.tables.corpus import documents_at, location_of
from penstock.data.shards.tables.document import Document, Origin, loss_weights_at, numbers_at
from penstock.data.shards.tables.holder import EXTRAS, ORIGINS, SPANS, TOKENS
from penstock.data.shards.tables.lengths import LazyNumbers
from penstock.data.shards.tables.mappings import MappedShards, ShardHolder, addresses_of, map_shards
from penstock.data.shards.tables.table import DocumentTable
from penstock.data.stores.files import check_regular, checksum, map_numbers, read_json, unreadable
from penstock.media.processor import Processor, load_processor
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer

if TYPE_CHECKING:
    import datasets

_NUMBERS = (LENGTHS, WEIGHT_SUMS, BATCHES)
"""Files of numbers that are mapped."""

Result = TypeVar("Result")


class Dataset:
    """A folder that `penstock prepare` made; `len(dataset)` documents, `dataset[i]` one of them,
    `dataset[i:j]` a list.

    Open it with `Dataset.open`. Pickling keeps the path alone and opens it again. Two datasets are
    equal when their fingerprints are: the same tokens and loss weights, wherever they lie.
    """

    kind = "penstock"

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        table: DocumentTable,
        address: Address | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self.path, self.manifest, self.table = path, manifest, table
        self.address = address
        """What opens it, if it is in a store; `path` is then the folder with what is here of it."""
        self._cache = cache
        self._files: list[str] | None = None

    @classmethod
    def open(cls, path: str | Path, *, cache: str | Path | None = None) -> Self:
        """Map a dataset: O(shards), and O(documents / 1024) for the batch table, which is checked
        because addresses come from it. Other contents are checked as they are used, and all by
        `penstock verify`.

        Args:
            path: Its folder, or the URL of a folder in a store (`s3://bucket/folder`): then the
                batch table and the lengths are fetched now (lengths of a large dataset when they
                are needed), and documents when they are read.
            cache: Where copies of a remote dataset are kept; None: the environment's
                `PENSTOCK_CACHE`, else the user's cache folder.

        Raises:
            StoreError: A store cannot be read.
            FormatError: Not a dataset, unfinished, or of another format version.
            CorruptionError: A file is missing, a link, or has another size than it should; or the
                manifest or the batch table is damaged, or contradicts itself.
        """
        if is_url(path):
            return cls._open_remote(path, cache)
        return cls._open_local(local_path(path, "a dataset"))

    @classmethod
    def _open_remote(cls, url: str | Path, cache: str | Path | None) -> Self:
        remote = fetch_tables(url, cache)
        store, folder, kept = remote.store, remote.folder, remote.kept
        with _in_cache(store.url, kept):
            manifest = Manifest.load(folder)
            # Earlier versions have fetched the lengths of all datasets as a whole.
            is_lazy = lazy_tables(manifest) and not (folder / LENGTHS).is_file()
            numbers = open_tables(store, kept, folder, manifest, remote.stamps) if is_lazy else None
            local = cls._open_local(folder, numbers, is_cache=True)
        table = replace(
            local.table, paths=[store.where(shard.file) for shard in local.manifest.shards]
        )
        units = UnitMap(table, local.manifest)
        holder = Residency(store, kept, folder, table, units, remote.stamps)
        holder.forget(remote.lost)
        return cls(folder, local.manifest, replace(table, holder=holder), store.address, cache)

    @classmethod
    def _open_local(
        cls,
        path: Path,
        numbers: tuple[LazyNumbers, LazyNumbers | None] | None = None,
        *,
        is_cache: bool = False,
    ) -> Self:
        """Open a folder; `numbers` are its lengths and weight sums, if they are not in it."""
        manifest = Manifest.load(path)
        files, sizes = (
            [shard.file for shard in manifest.shards],
            [shard.bytes for shard in manifest.shards],
        )
        mappings = map_shards(path, files, sizes, is_cache=is_cache)
        for name in manifest.checksums:
            # Those of numbers are checked when they are mapped, or when they come.
            if name not in _NUMBERS:
                check_regular(f"{path}/{name}")
        try:
            table = _table(path, manifest, mappings, numbers)
        except OSError as error:
            raise unreadable(error.filename or path, error) from None
        if checksum(table.batches) != manifest.checksums[BATCHES]:
            raise CorruptionError(
                f"{path / BATCHES}: differs from its checksum; copy it again, or prepare again"
            )
        check_batches(path, manifest, table.batches)
        return cls(path, manifest, table)

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self.address.full if self.address else self.path, self._cache)

    @property
    def url(self) -> str | None:
        """Where it is, if that is a store, as it is shown."""
        return str(self.address) if self.address else None

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
    def sampling(self) -> Mapping[str, object]:
        """How the responses of its documents were sampled, as far as it was said."""
        return self.manifest.sampling

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return self.manifest.longest

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self.manifest.tokens

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text that the tokens stand for; None where that is not known."""
        return self.manifest.text_bytes or None

    @property
    def framed(self) -> tuple[bool, bool]:
        """Whether all documents begin with the tokenizer's BOS, and whether all end with its
        EOS.
        """
        wanted = (self.tokenizer.bos_id, self.tokenizer.eos_id)
        begins, ends = (
            found == token_id for found, token_id in zip(self.manifest.ends, wanted, strict=True)
        )
        return begins, ends

    @cached_property
    def loaded_tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the dataset's folder, for decoding; None: there is none."""
        return self._small(lambda: load_saved_tokenizer(self.path))

    @cached_property
    def extras(self) -> ExtraTable | None:
        """Its trees and columns; None: it has neither."""
        manifest = self.manifest
        if not manifest.has_extras:
            return None
        return ExtraTable(self.table, manifest.layout, manifest.path_values or ())

    @cached_property
    def media(self) -> MediaInfo | None:
        """How its images became tokens; None: it has no images."""
        return self._small(lambda: MediaInfo.load(self.path)) if self.manifest.has_images else None

    @cached_property
    def processor(self) -> Processor | None:
        """The processor of its images, from its folder; None: it has no images.

        Raises:
            ConfigError: It cannot be loaded, or is another one.
        """
        if self.media is None:
            return None
        found = self._small(lambda: load_processor(self.path / PROCESSOR_FOLDER))
        if found.fingerprint != self.media.fingerprint:
            raise ConfigError(
                f"{self.path / PROCESSOR_FOLDER}: is not the processor that made the dataset, "
                "or another version of transformers reads its settings differently; prepare "
                "again"
            )
        return found

    @cached_property
    def chat(self) -> ChatInfo | None:
        """Template, stop ids and settings of a dataset of chats; None for others."""
        return self._small(lambda: ChatInfo.load(self.path))

    @property
    def files(self) -> list[str]:
        """Names of the files that the documents came from; read on first use."""
        if self._files is None:
            names = self._small(lambda: read_json(self.path / FILES))
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise CorruptionError(
                    f"{self.path / FILES}: expected a list of names; copy it again, or "
                    "prepare again"
                )
            if len(names) != self.manifest.files:
                raise CorruptionError(
                    f"{self.path / FILES}: {len(names)} names, expected "
                    f"{self.manifest.files}; copy it again, or prepare again"
                )
            self._files = names
        return self._files

    def _small(self, read: Callable[[], Result]) -> Result:
        """Read a small file of the folder; of a dataset in a store, a damaged copy is fetched
        again, once.
        """
        if self.address is None:
            return read()
        try:
            return read()
        except PenstockError:
            remote = fetch_tables(self.address.full, self._cache)
            with _in_cache(remote.store.url, remote.kept):
                return read()

    @property
    def report(self) -> "reports.PrepareReport | None":
        """The report of the preparation that made it; None: there is none, or the dataset was
        changed since. Read on first use.
        """
        return self._stored_report

    @cached_property
    def _stored_report(self) -> "reports.PrepareReport | None":
        location = self.address.full if self.address else str(self.path.resolve())
        return reports.PrepareReport.of_dataset(location, self.fingerprint)

    def to_datasets(
        self, targets: TargetColumn = "assistant_masks", *, verify: bool = True
    ) -> "datasets.Dataset":
        """This dataset as a `datasets.Dataset` of Hugging Face: a row for each document, its ids in
        `input_ids`.

        Ids are not copied: they are read from the mapped shards. What is trained becomes one more
        column.

        Args:
            targets: The column that says what is trained: `assistant_masks` (0 or 1; left out where
                everything is), `labels` (the id or −100, not shifted) or `loss_weights`.
            verify: Compare all tokens with their checksums now; where another column is made they
                always are.

        Raises:
            ConfigError: The columns cannot express it: weights other than 0 and 1, several answers,
                images.
            CorruptionError: It is damaged.
            MissingExtraError: `datasets` is not installed.
        """
        return to_datasets(self, targets, verify=verify)

    @property
    def parts(self) -> tuple[Self]:
        """As in `Corpus`: itself."""
        return (self,)

    def part_of(self, document: int) -> tuple[Self, int]:
        """As in `Corpus`: itself."""
        return self, document

    def __len__(self) -> int:
        return self.table.num_documents

    def __eq__(self, other: object) -> bool:
        return (
            self.fingerprint == other.fingerprint if isinstance(other, Dataset) else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Dataset({location_of(self)!r}, {len(self)} documents, {self.manifest.tokens} tokens)"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: totals, and a histogram of the lengths."""
        # The manifest counts numbers of no, one, two, … bits; no token and one token are shown as
        # one.
        bits = np.trim_zeros(np.array(self.manifest.histogram), "b")
        counts = [int(bits[:2].sum()), *bits[2:].tolist()]
        facts = [
            ("folder", location_of(self)),
            ("documents", f"{len(self):,}"),
            ("tokens", f"{self.manifest.tokens:,}"),
            ("longest document", f"{self.longest:,} tokens"),
            ("shards", len(self.manifest.shards)),
            (
                "tokenizer",
                f"{self.tokenizer.name or 'unknown'} ({self.tokenizer.vocab_size:,} ids)",
            ),
            ("chat template", "yes" if self.chat else "no"),
        ]
        bins = [f"{1 << i:,} to {(2 << i) - 1:,} tokens" for i in range(len(counts))]
        return card(f"Dataset {self.name}", facts, bars(counts, bins))

    __getitem__ = documents_at

    def _read(self, document: int) -> Document:
        kinds = (TOKENS, SPANS, ORIGINS, EXTRAS)
        return self.table.with_held(np.array([document]), kinds, lambda: self._read_held(document))

    def _read_held(self, document: int) -> Document:
        shard, batch, row = self.table.locate(document)
        tokens = self.table.read(document, document + 1).values
        data, line = self.table.mappings[shard], self.table.batches[batch]
        local = document - int(self.table.shard_starts[shard])
        rows = min(
            self.manifest.documents_per_batch, self.manifest.shards[shard].documents - local + row
        )
        try:
            files, lines, place = other_places(data, line, rows)
            text = (
                read_texts(data, place, rows, row, row + 1)[0] if self.manifest.has_text else None
            )
        except ValueError as error:
            raise CorruptionError(
                f"{self.table.paths[shard]}: a text is damaged: {error}; copy the file again, "
                "or prepare again"
            ) from None
        extras = self.extras
        file = int(numbers_at(data, files, np.int32, row, 1)[0])
        return Document(
            tokens=tokens,
            loss_weights=loss_weights_at(data, line, row, len(tokens))
            if self.table.has_spans
            else np.ones_like(tokens, "f4"),
            origin=Origin(
                file=self.files[file] if 0 <= file < len(self.files) else "",
                line=int(numbers_at(data, lines, np.int64, row, 1)[0]),
            ),
            text=text,
            columns={} if extras is None else extras.read(document),
            tree=None if extras is None else extras.tree(document),
            images=() if extras is None else tuple(extras.images(document)),
        )


@contextmanager
def _in_cache(url: str, kept: Path) -> Iterator[None]:
    """Say where the copies of a dataset are that is damaged although it was just compared with the
    store.
    """
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(
            f"{error}; that is the copy of {url}, which was just compared with it: upload the "
            f"dataset again, or remove {kept} if `penstock verify {url}` finds it sound"
        ) from error


def _reopened(location: str | Path, cache: str | Path | None) -> Dataset:
    return Dataset.open(location, cache=cache)


def check_batches(path: Path, manifest: Manifest, batches: Array) -> None:
    """Check that the batch table of a dataset (`BATCH` [batches]) leads to places inside its
    shards.

    Raises:
        CorruptionError: It does not; names the shard and the batch.
    """
    begin = 0
    for shard in manifest.shards:
        lines = batches[begin : begin + shard.batches]
        wrong = k.wrong_batch(lines, shard.documents, shard.bytes, manifest.has_spans)
        if wrong >= 0:
            raise CorruptionError(
                f"{path / BATCHES}: batch {wrong} of {shard.file} does not lie in its "
                f"{shard.bytes} bytes; copy it again, or prepare again"
            )
        begin += shard.batches


def load_saved_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a dataset's folder; None: there is none.

    Raises:
        CorruptionError: It contains links, which may lead out of the dataset.
        TokenizerError: It cannot be loaded.
    """
    folder = path / TOKENIZER_FOLDER
    if folder.is_symlink():
        check_regular(folder)
    if not folder.is_dir():
        return None
    for file in folder.iterdir():
        check_regular(file)
    return load_tokenizer(folder)


def _table(
    path: Path,
    manifest: Manifest,
    mappings: Sequence[Array],
    numbers: tuple[LazyNumbers, LazyNumbers | None] | None,
) -> DocumentTable:
    lengths, weight_sums = numbers or (
        map_numbers(f"{path}/{LENGTHS}", "<u4", (manifest.documents, 2), may_read=True),
        map_numbers(f"{path}/{WEIGHT_SUMS}", "<f8", (manifest.documents,), may_read=True)
        if manifest.fractional_weights
        else None,
    )
    documents, batches = (
        [getattr(shard, name) for shard in manifest.shards] for name in ("documents", "batches")
    )
    starts = np.array([0, *accumulate(documents)], np.int64)
    addresses, sizes = addresses_of(mappings)
    return DocumentTable(
        num_documents=manifest.documents,
        lengths=lengths,
        weight_sums=weight_sums,
        token_bytes=manifest.token_bytes,
        documents_per_batch=manifest.documents_per_batch,
        shard_starts=starts,
        shard_first_batch=np.array([0, *accumulate(batches)], np.int64),
        shard_addresses=addresses,
        shard_bytes=sizes,
        batches=map_numbers(f"{path}/{BATCHES}", k.BATCH, (sum(batches),), may_read=True),
        offset_bytes=manifest.token_bytes,
        has_checksums=True,
        has_spans=manifest.has_spans,
        vocab_size=manifest.tokenizer.vocab_size,
        paths=[path / shard.file for shard in manifest.shards],
        mappings=mappings,
        holder=ShardHolder(mappings, starts) if isinstance(mappings, MappedShards) else None,
    )
