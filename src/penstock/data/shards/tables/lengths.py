"""Numbers of documents (lengths, sums of loss weights) that come in ranges, before anything reads
them.

0 is a valid length, so a place that was not fetched must never be read as one. A `DocumentTable` of
a large remote dataset therefore holds `LazyNumbers` where others hold an array: it is indexed like
an array, and fetches first what an index names. Kernels do not take it; `for_kernel` gives them the
array once their documents are there.

`range_checksums` makes what such ranges are checked against: a file next to the lengths of a large
dataset.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol, final

import numpy as np

from penstock.core.arrays import Array, Bytes, Int64, UInt64
from penstock.core.compiled import address_of
from penstock.data.stores.files import checksum

RANGE_DOCUMENTS = 2048
"""Documents of a range of lengths: 16 KB, which a request brings in the time that it waits."""
DOCUMENT_BYTES = 8
"""Of a document in each table: two uint32, or a float64."""

Documents = Annotated[Int64, "documents"]


class Ranges(Protocol):
    """Brings lengths (and weight sums) of documents to this process."""

    @property
    def size(self) -> int:
        """Documents of a range."""

    @property
    def here(self) -> Annotated[Bytes, "ranges"]:
        """Whether each range may be read: 1 or 0. It only grows."""

    def has(self, begin: int, end: int) -> bool:
        """Whether documents `begin` … `end` − 1 are on this machine, whoever brought them."""

    def want(self, begins: Documents, ends: Documents) -> None:
        """Begin to bring documents begins[i] … ends[i] − 1, with those that the same record batches
        hold.
        """

    def need(self, begins: Documents, ends: Documents) -> None:
        """Have documents begins[i] … ends[i] − 1 here.

        Raises:
            StoreError, CorruptionError, OutputError: They cannot be brought; names the URL.
        """


@final
class LazyNumbers:
    """An array with a row for each document, of which ranges come when they are asked for.

    Args:
        array: Where they come to.
        ranges: What brings them; several arrays may share it.
    """

    __slots__ = ("_array", "dtype", "ranges", "shape")

    def __init__(self, array: Array, ranges: Ranges) -> None:
        self._array, self.ranges = array, ranges
        self.shape, self.dtype = array.shape, array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"LazyNumbers({self.shape}, {self.dtype}, {100 * self.ranges.here.mean():.3g}% here)"

    def __getitem__(self, key: Any) -> Any:
        self.ranges.need(*_named(key[0] if isinstance(key, tuple) else key, len(self)))
        return self._array[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self[:], dtype)

    @property
    def places(self) -> tuple[np.uint64, np.uint64]:
        """Address of the first row, and bytes from one to the next, for kernels: rows that are not
        here are zeros.
        """
        return np.uint64(address_of(self._array)), np.uint64(self._array.strides[0])

    def for_kernel(self, documents: Documents) -> Array:
        """The whole array, of which these documents may be read."""
        self.ranges.need(documents, documents + 1)
        return self._array


def for_kernel(numbers: Any, documents: Documents) -> Array:
    """An array as it is; of `LazyNumbers` the array, of which these documents may be read."""
    found: Array = numbers.for_kernel(documents) if isinstance(numbers, LazyNumbers) else numbers
    return found


def places_of(numbers: Any) -> tuple[np.uint64, np.uint64]:
    """Address of the first row and bytes from one to the next, of an array or of `LazyNumbers`."""
    if isinstance(numbers, LazyNumbers):
        return numbers.places
    return np.uint64(address_of(numbers)), np.uint64(numbers.strides[0])


def _named(key: object, count: int) -> tuple[Documents, Documents]:
    """The documents that an index names, as ranges [begin, end)."""
    if isinstance(key, slice):
        found = range(*key.indices(count))
        if found.step == 1:
            return np.array([found.start]), np.array([max(found.stop, found.start)])
        documents = np.arange(found.start, found.stop, found.step)
        return documents, documents + 1
    if key is None or key is Ellipsis:
        return np.array([0]), np.array([count])
    documents = np.asarray(key)
    documents = (
        np.flatnonzero(documents)
        if documents.dtype == np.bool_
        else documents.ravel().astype(np.int64)
    )
    # What is out of range is the array's own error.
    documents = np.where(documents < 0, documents + count, documents)
    documents = documents[(documents >= 0) & (documents < count)]
    return documents, documents + 1


def ranges_of(begins: Documents, ends: Documents, size: int) -> Annotated[Int64, "ranges"]:
    """Numbers of the ranges of `size` documents that hold documents begins[i] … ends[i] − 1,
    rising.
    """
    some = ends > begins
    first, last = begins[some] // size, (ends[some] - 1) // size
    wide = np.flatnonzero(last > first + 1).tolist()
    found: Int64 = np.unique(
        np.concatenate([first, last, *(np.arange(first[i] + 1, last[i]) for i in wide)])
    )
    return found


def runs_of(ranges: Annotated[Int64, "ranges"], most: int) -> list[Annotated[Int64, "ranges"]]:
    """Rising numbers in groups of at most `most` that follow one another without a gap."""
    if not len(ranges):
        return []
    parts = np.split(ranges, np.flatnonzero(np.diff(ranges) != 1) + 1)
    return [part[begin : begin + most] for part in parts for begin in range(0, len(part), most)]


def range_checksums(
    tables: Sequence[Annotated[Bytes, "bytes"]], size: int
) -> Annotated[UInt64, "words"]:
    """What the ranges of some tables are checked against.

    Args:
        tables: The bytes of each, `DOCUMENT_BYTES` a document.
        size: Documents of a range.

    Returns:
        Documents of a range, then the checksum of each range of the first table, of the second, ….
    """
    width = size * DOCUMENT_BYTES
    sums = [
        checksum(data[begin : begin + width])
        for data in tables
        for begin in range(0, len(data), width)
    ]
    return np.array([size, *sums], np.uint64)
