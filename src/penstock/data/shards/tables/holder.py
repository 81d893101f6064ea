"""The protocol that brings documents to this machine: all that tables and the loader know of stores
and mappings.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Protocol, TypeVar

from penstock.core.arrays import Bool, Int64
from penstock.core.errors import CorruptionError

Result = TypeVar("Result")

TOKENS, SPANS, ORIGINS, EXTRAS = range(4)
"""Kinds of what is fetched of a remote dataset: tokens and their checksums; loss-weight spans;
origins and texts; trees and columns. See `penstock.data.shards.remote.units`.
"""


class Stored(Protocol):
    """Documents in a store, as far as they take room on this machine and requests to the store."""

    budget: int | None
    """Maximum bytes on the disk; None: no limit."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all shards in the store."""

    @property
    def run_bytes(self) -> int:
        """Mean bytes on the disk of a run of documents, with its spans and columns."""

    @property
    def fetched_bytes(self) -> int:
        """Bytes of shards that this process fetched."""

    @property
    def requests(self) -> int:
        """Requests for shards that this process made."""


class Holder(Protocol):
    """Has documents of a remote dataset on this machine, and mapped, in units of fetching; units
    are numbers.

    One of a local dataset maps what is not mapped yet (`penstock.data.shards.tables.mappings`).
    """

    @property
    def stored(self) -> "Sequence[Stored]":
        """What of it lies in a store, part after part; empty: it only maps."""

    def __len__(self) -> int:
        """Number of units."""

    def find(
        self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]
    ) -> Annotated[Int64, "units"]:
        """The units that hold some kinds of data of documents, rising."""

    def is_remote(self, documents: Annotated[Int64, "documents"]) -> Annotated[Bool, "documents"]:
        """[documents] whether each lies in a store."""

    def file_near(self, document: int, suffix: str) -> tuple[str, Callable[[int, int], bytes]]:
        """The URL of the file with a suffix next to a document's shard, and (first byte, number) →
        bytes of it.

        These raise StoreError or CorruptionError if they cannot be read.
        """

    def held(self, units: Annotated[Int64, "units"]) -> AbstractContextManager[None]:
        """Have units here, and keep them, while the block runs."""

    def hold_all(
        self, begin: int, end: int, kinds: Sequence[int]
    ) -> Annotated[Int64, "units"] | None:
        """Hold some kinds of data of documents [begin, end), if all of it is here and none has to
        go.

        Returns:
            The units, which the caller must release; None: not all is here.
        """

    def want(
        self, units: Annotated[Int64, "units"], may_wait: Callable[[], bool] | None = None
    ) -> None:
        """Begin to bring units; each stays until it is released as often as it was wanted.

        Args:
            units: Their numbers, each once.
            may_wait: Asked while there is no room: False brings a unit nevertheless. None: never
                wait for room.
        """

    def wait(self, units: Annotated[Int64, "units"]) -> None:
        """Wait until wanted units are here.

        Raises:
            StoreError, CorruptionError, OutputError: One cannot be brought; names the URL.
        """

    def release(self, units: Annotated[Int64, "units"]) -> None:
        """Let units go that were wanted, once."""

    def renew(self, units: Annotated[Int64, "units"], error: CorruptionError) -> None:
        """Fetch held units again, of which one is damaged as an error says; others may be reading
        them.

        Raises:
            StoreError, CorruptionError, OutputError: They cannot be brought, or the store's are
                wrong, too.
        """

    def explained(
        self, units: Annotated[Int64, "units"], error: CorruptionError
    ) -> CorruptionError:
        """An error that came again after `renew`, with where the copies are."""


def renewed(
    held: Sequence[tuple[Holder, Annotated[Int64, "units"]]],
    error: CorruptionError,
    read: Callable[[], Result],
) -> Result:
    """What `read` returns once units that are held were fetched again; it has found one of them
    damaged.

    Raises:
        StoreError, CorruptionError, OutputError: They cannot be brought, or are wrong in the store,
            too.
    """
    for holder, units in held:
        holder.renew(units, error)
    try:
        return read()
    except CorruptionError as again:
        for holder, units in held:
            again = holder.explained(units, again)
        raise again from error
