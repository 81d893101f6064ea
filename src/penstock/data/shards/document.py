"""Documents of a dataset with their origins, the table of where their bytes are, and the interface of all datasets.

The plan and the fill read the table (`DocumentTable`), not the objects.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, final, overload

import numpy as np

from penstock.core.arrays import Float32, Float64, Int64, Records, UInt32, UInt64
from penstock.core.compiled import address_of
from penstock.core.errors import ConfigError, CorruptionError
from penstock.core.notebook import card, marked_text, row_strip
from penstock.core.ragged import Ragged
from penstock.data.shards import _kernels as k
from penstock.data.shards.images import ImageOf
from penstock.data.shards.lengths import LazyNumbers, for_kernel
from penstock.data.shards.manifest import TokenizerInfo
from penstock.data.shards.trees import Tree
from penstock.tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
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
TOKENS, SPANS, ORIGINS, EXTRAS = range(4)
"""Kinds of what is fetched of a remote dataset: tokens and their checksums; loss-weight spans; origins and texts; trees
and columns. See `penstock.data.shards.units`."""


class Holder(Protocol):
    """Has documents of a remote dataset on this machine, and mapped, in units of fetching; units are numbers.

    One of a local dataset maps what is not mapped yet (`penstock.data.shards.mappings`).
    """

    def __len__(self) -> int:
        """Number of units."""

    def find(self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]) -> Annotated[Int64, "units"]:
        """The units that hold some kinds of data of documents, rising."""

    def is_remote(self, documents: Annotated[Int64, "documents"]) -> Any:
        """bool [documents], whether each lies in a store."""

    def file_near(self, document: int, suffix: str) -> tuple[str, Callable[[int, int], bytes]]:
        """The URL of the file with a suffix next to a document's shard, and (first byte, number) → bytes of it.

        These raise StoreError or CorruptionError if they cannot be read.
        """

    def held(self, units: Annotated[Int64, "units"]) -> AbstractContextManager[None]:
        """Have units here, and keep them, while the block runs."""

    def hold_all(self, begin: int, end: int, kinds: Sequence[int]) -> Annotated[Int64, "units"] | None:
        """Hold some kinds of data of documents [begin, end), if all of it is here and none has to go.

        Returns:
            The units, which the caller must release; None: not all is here.
        """

    def want(self, units: Annotated[Int64, "units"], may_wait: Callable[[], bool] | None = None) -> None:
        """Begin to bring units; each stays until it is released as often as it was wanted.

        Args:
            units: Their numbers, each once.
            may_wait: Asked while there is no room: False brings a unit nevertheless. None: never wait for room.
        """

    def wait(self, units: Annotated[Int64, "units"]) -> None:
        """Wait until wanted units are here.

        Raises:
            StoreError, CorruptionError, OutputError: One cannot be brought; names the URL.
        """

    def release(self, units: Annotated[Int64, "units"]) -> None:
        """Let units go that were wanted, once."""

    def renew(self, units: Annotated[Int64, "units"], error: CorruptionError) -> None:
        """Fetch held units again, of which one is damaged as an error says; others may be reading them.

        Raises:
            StoreError, CorruptionError, OutputError: They cannot be brought, or the store's are wrong, too.
        """

    def explained(self, units: Annotated[Int64, "units"], error: CorruptionError) -> CorruptionError:
        """An error that came again after `renew`, with where the copies are."""


def renewed(
    held: Sequence[tuple[Holder, Annotated[Int64, "units"]]], error: CorruptionError, read: Callable[[], Result]
) -> Result:
    """What `read` returns once units that are held were fetched again; it has found one of them damaged.

    Raises:
        StoreError, CorruptionError, OutputError: They cannot be brought, or are wrong in the store, too.
    """
    for holder, units in held:
        holder.renew(units, error)
    try:
        return read()
    except CorruptionError as again:
        for holder, units in held:
            again = holder.explained(units, again)
        raise again from error


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTable:
    """Numbers and mapped arrays that lead to every document of a dataset; it holds the mappings alive.

    Document i of shard s is row `r` of batch `b`, where `local = i - shard_starts[s]`,
    `b = shard_first_batch[s] + local // documents_per_batch`, `r = local % documents_per_batch`. Its tokens begin at
    `shard_addresses[s] + batches[b].tokens + offsets[r] * offset_bytes`, `offsets` (int64) at
    `shard_addresses[s] + batches[b].token_offsets`; all modulo 2^64, so a table may point into several files.
    """

    num_documents: int
    lengths: Annotated[UInt32, "documents columns"] | LazyNumbers
    """[N, 2] tokens, trained tokens; [N, 1] where every token but the first is trained. Of a large remote dataset they
    come when they are indexed; kernels take them from `penstock.data.shards.lengths.for_kernel`."""
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
    """One more than the highest id that a token may have; None where that is not known, and for foreign corpora."""
    paths: Sequence[Path | str]
    """The shards' files [S], for messages; URLs of a remote dataset."""
    mappings: Sequence[Array]
    """What the addresses point into; the first S are the shards. Some may be mapped only while they are held."""
    holder: "Holder | None" = None
    """Brings documents to this machine, and has them mapped; None: all are there. Bytes of a shard may be read only
    while they are held."""

    def held(self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]) -> AbstractContextManager[None]:
        """Have some kinds of units (`penstock.data.shards.units`) of documents on this machine while the block runs.

        Raises:
            StoreError, CorruptionError, OutputError: They cannot be brought; names the URL.
        """
        holder = self.holder
        return nullcontext() if holder is None else holder.held(holder.find(documents, kinds))

    def with_held(
        self, documents: Annotated[Int64, "documents"], kinds: Sequence[int], read: Callable[[], Result]
    ) -> Result:
        """What `read` returns while kinds of units of documents are held; damaged copies are fetched again, once.

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
        self._refuse(k.BAD_LENGTH, k.wrong_length(*self.kernel_view, for_kernel(self.lengths, documents), documents))

    @property
    def kernel_view(self) -> tuple[Any, Any, Any]:
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
        return self.with_held(np.arange(first, last), (TOKENS, SPANS), lambda: self._read_held(first, last))

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a document came from."""

    file: str
    """Empty when it is not known."""
    line: int
    """Line (from 1) or row (from 0) in the file."""

    def __str__(self) -> str:
        return f"{self.file or '?'}:{self.line}"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Document:
    """One document of a dataset. Two are equal when all their fields are; they cannot be hashed, as arrays cannot."""

    tokens: Annotated[UInt32, "tokens"]
    loss_weights: Annotated[Float32, "tokens"]
    """How much each token counts as a target."""
    origin: Origin
    text: str | None = None
    """The raw text, where the dataset keeps it."""
    columns: dict[str, Array] = field(default_factory=dict)
    """Name → a number for each token, where the dataset has columns."""
    tree: Tree | None = None
    """Its branches and paths, if it is a prefix tree or its paths have values."""
    images: tuple[ImageOf, ...] = ()
    """Its images, in order."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        arrays: tuple[tuple[Any, Any], ...] = (
            (self.tokens, other.tokens), (self.loss_weights, other.loss_weights)
        )  # fmt: skip
        arrays += tuple((mine, other.columns.get(name, ())) for name, mine in self.columns.items())
        trees = [None if one.tree is None else one.tree.words().tolist() for one in (self, other)]
        same = all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in arrays) and trees[0] == trees[1]
        return (
            same
            and self.columns.keys() == other.columns.keys()
            and (self.origin, self.text) == (other.origin, other.text)
            and [one.key for one in self.images] == [one.key for one in other.images]
        )

    def __repr__(self) -> str:
        """One line, however long the document."""
        trained = int(np.count_nonzero(self.loss_weights))
        text = "" if self.text is None else f", text of {len(self.text)} characters"
        tree = "" if self.tree is None else f", {self.tree!r}"
        columns = f", columns {', '.join(self.columns)}" if self.columns else ""
        return f"Document({self.origin}, {len(self.tokens)} tokens, {trained} with loss weight{text}{columns}{tree})"

    def _repr_html_(self) -> str:
        """What a notebook shows: where it is from, what is trained as a strip, and its raw text where that is kept."""
        used = len(self.tokens)
        facts = [
            ("from", self.origin),
            ("tokens", f"{used:,}"),
            ("with loss weight", f"{np.count_nonzero(self.loss_weights):,}"),
            ("images", len(self.images)),
            ("columns", ", ".join(self.columns)),
            ("tree", self.tree or ""),
        ]
        strip = row_strip(np.zeros(used, np.int64), self.loss_weights > 0, used) if used else ""
        text = marked_text([(self.text, 0.0)]) if self.text else ""
        return card("Document", [(name, value) for name, value in facts if value], strip, text)


class _Documents(Protocol):
    """What `documents_at` needs of a corpus."""

    def __len__(self) -> int: ...

    def _read(self, document: int) -> Document: ...


@overload
def documents_at(corpus: _Documents, index: int) -> Document: ...
@overload
def documents_at(corpus: _Documents, index: slice) -> list[Document]: ...
def documents_at(corpus: _Documents, index: int | slice) -> Document | list[Document]:
    """One document, or a list of those of a slice: the `__getitem__` of each corpus.

    Raises:
        CorruptionError: They are not what was written; names the shard. Foreign corpora have no checksums.
        IndexError: There is no such document; iterating ends by it.
        ConfigError: The index is neither a whole number nor a slice.
    """
    count = len(corpus)
    if isinstance(index, slice):
        return [corpus._read(document) for document in range(*index.indices(count))]
    try:
        number = operator.index(index)
    except TypeError:
        raise ConfigError(f"documents have numbers: expected a whole number or a slice, got {index!r}") from None
    if not -count <= number < count:
        raise IndexError(f"document {number} of {count}")
    return corpus._read(number % count)


class Corpus(Protocol):
    """Documents that rows can be made of: a prepared `Dataset`, or a foreign corpus read in place."""

    @property
    def name(self) -> str:
        """Short name, for messages."""

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""

    @property
    def path(self) -> Path:
        """Its folder, or its first file, for messages."""

    @property
    def table(self) -> DocumentTable:
        """Where the bytes lie."""

    @property
    def tokenizer(self) -> TokenizerInfo | None:
        """The tokenizer that made it, where that is known."""

    @property
    def loaded_tokenizer(self) -> Tokenizer | None:
        """The tokenizer itself, ready to use; None where the corpus has none."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text that the tokens stand for; None where that is not known."""

    @property
    def framed(self) -> tuple[bool, bool]:
        """Whether all documents begin with BOS, and whether all end with EOS, as far as is known."""

    def __len__(self) -> int: ...

    def __getitem__(self, document: int) -> Document: ...


def location_of(corpus: Any) -> str:
    """Where a corpus is, for messages: its URL or path."""
    return str(getattr(corpus, "url", None) or corpus.path)


def is_corpus(value: Any) -> bool:
    """Whether a value is an opened dataset, rather than a path to one."""
    return hasattr(value, "table")


def _numbers(data: Array, place: int, dtype: Any, first: int, count: int) -> Array:
    """Numbers `first` to `first + count` of an array that begins at byte `place`."""
    begin = place + first * np.dtype(dtype).itemsize
    return data[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)


def loss_weights_at(data: Array, line: Array, row: int, length: int) -> Array:
    """Loss weights of a document, float32 [length]; its spans must have been checked."""
    bitmap = int(line["span_bitmap"])
    if bitmap and not data[bitmap + row // 8] >> (row % 8) & 1:
        return np.ones(length, np.float32)
    weights = np.zeros(length, np.float32)
    first, last = _numbers(data, int(line["span_offsets"]), np.int64, row, 2).tolist()
    fields = (("span_begins", np.uint32), ("span_ends", np.uint32), ("span_weights", np.float32))
    spans = [_numbers(data, int(line[name]), dtype, first, last - first).tolist() for name, dtype in fields]
    for begin, end, weight in zip(*spans, strict=True):
        weights[begin:end] = weight
    return weights
