"""A keyed permutation of [0, size): the order of a source's documents in one epoch, without storing it."""

from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling._kernels import SHUFFLE_BLOCK, SHUFFLE_FULL, SHUFFLE_NONE, permute_range

Shuffle = Literal["full", "block", "none"]
"""`full`: any document may follow any other. `block`: runs of 256 documents stay near each other, for remote
stores. `none`: the order on disk, every epoch."""

SHUFFLE_CODES: dict[str, int] = {"full": SHUFFLE_FULL, "block": SHUFFLE_BLOCK, "none": SHUFFLE_NONE}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A bijection of [0, size); equal settings give equal images on every machine."""

    size: int
    """Number of elements, at least 1."""
    key: int
    """64-bit key, from `penstock.randomness.key_for`."""
    shuffle: Shuffle = "full"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a permutation needs a size of at least 1, got {self.size}")
        if self.shuffle not in SHUFFLE_CODES:
            raise ConfigError(f"shuffle must be one of {', '.join(SHUFFLE_CODES)}, got {self.shuffle!r}")

    def images(self, begin: int = 0, end: int | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Images of begin … end − 1 (to the end when None), int64."""
        end = self.size if end is None else end
        if not 0 <= begin <= end <= self.size:
            raise IndexError(f"[{begin}, {end}) is not inside [0, {self.size})")
        out = np.empty(end - begin, np.int64)
        permute_range(begin, self.size, np.uint64(self.key), SHUFFLE_CODES[self.shuffle], out)
        return out
