"""The holders of the parts of a joined corpus, as one; its methods are those of `Holder`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Bool, Int64
from penstock.core.errors import CorruptionError
from penstock.data.shards.tables.holder import Holder, Stored

Units = Annotated[Int64, "units"]


@final
class JoinedResidency:
    """The holders of the parts of a joined corpus, as one: units are numbered through, part after
    part.

    Args:
        starts: First document of each part, and the number of all.
        parts: One for each part; None: it is on this machine, and mapped.
    """

    def __init__(self, starts: Sequence[int], parts: Sequence[Holder | None]) -> None:
        self._starts, self.parts = np.array(starts, np.int64), parts
        self._firsts = np.cumsum(
            [0, *(0 if part is None else len(part) for part in parts)], dtype=np.int64
        )

    @property
    def stored(self) -> list[Stored]:
        """As in `Holder`."""
        return [one for part in self.parts if part is not None for one in part.stored]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def find(self, documents: Annotated[Int64, "documents"], kinds: Sequence[int]) -> Units:
        """As in `Residency`."""
        found = [np.empty(0, np.int64)]
        of = np.searchsorted(self._starts, documents, side="right") - 1
        for number, part in enumerate(self.parts):
            if part is not None and (mine := documents[of == number]).size:
                found.append(self._firsts[number] + part.find(mine - self._starts[number], kinds))
        return np.concatenate(found)

    def file_near(self, document: int, suffix: str) -> tuple[str, Callable[[int, int], bytes]]:
        """As in `Residency`."""
        number = int(np.searchsorted(self._starts, document, side="right")) - 1
        part = self.parts[number]
        assert part is not None
        return part.file_near(document - int(self._starts[number]), suffix)

    def is_remote(self, documents: Annotated[Int64, "documents"]) -> Annotated[Bool, "documents"]:
        """As in `Residency`."""
        some = np.zeros(1, np.int64)
        remote = np.array(
            [part is not None and bool(part.is_remote(some)[0]) for part in self.parts]
        )
        found: Annotated[Bool, "documents"] = remote[
            np.searchsorted(self._starts, documents, side="right") - 1
        ]
        return found

    @contextmanager
    def held(self, units: Units) -> Iterator[None]:
        """As in `Residency`."""
        self.want(units)
        try:
            self.wait(units)
            yield
        finally:
            self.release(units)

    def want(self, units: Units, may_wait: Callable[[], bool] | None = None) -> None:
        """As in `Residency`."""
        for part, mine in self._split(units):
            part.want(mine, may_wait)

    def wait(self, units: Units) -> None:
        """As in `Residency`."""
        for part, mine in self._split(units):
            part.wait(mine)

    def hold_all(self, begin: int, end: int, kinds: Sequence[int]) -> Units | None:
        """As in `Residency`."""
        found = [np.empty(0, np.int64)]
        for number, part in enumerate(self.parts):
            first, last = (
                np.clip([begin, end], *self._starts[number : number + 2]) - self._starts[number]
            ).tolist()
            if part is None or first == last:
                continue
            units = part.hold_all(first, last, kinds)
            if units is None:
                self.release(np.concatenate(found))
                return None
            found.append(self._firsts[number] + units)
        return np.concatenate(found)

    def release(self, units: Units) -> None:
        """As in `Residency`."""
        for part, mine in self._split(units):
            part.release(mine)

    def renew(self, units: Units, error: CorruptionError) -> None:
        """As in `Residency`."""
        for part, mine in self._split(units):
            part.renew(mine, error)

    def explained(self, units: Units, error: CorruptionError) -> CorruptionError:
        """As in `Residency`."""
        for part, mine in self._split(units):
            error = part.explained(mine, error)
        return error

    def _split(self, units: Units) -> Iterator[tuple[Holder, Units]]:
        for number, part in enumerate(self.parts):
            low, high = self._firsts[number : number + 2].tolist()
            mine = units[(low <= units) & (units < high)]
            if part is not None and mine.size:
                yield part, mine - low
