"""The order of a source's documents in one epoch: a keyed permutation of [0, size), without storing
it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, final

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.data.shards.format._kernels import RUN_DOCUMENTS
from penstock.plan.sampling._kernels import (
    MODE_BITS,
    SHUFFLE_BLOCK,
    SHUFFLE_FULL,
    SHUFFLE_NONE,
    SMALL,
    WINDOW_BLOCKS,
    permute_range,
)

Shuffle = Literal["full", "block", "none"]
"""`full`: any document may follow any other. `block`: documents of runs of 256 are mixed in windows
of 1, 2, 4, … runs, for datasets in object storage. `none`: the order on disk, every epoch.
"""

SHUFFLE_CODES: dict[str, int] = {"full": SHUFFLE_FULL, "block": SHUFFLE_BLOCK, "none": SHUFFLE_NONE}
MOST_RUNS = 1 << 20
"""Of a window of block shuffle."""


def shuffle_mode(shuffle: Shuffle, runs: int = WINDOW_BLOCKS) -> int:
    """How documents are shuffled, as one number for kernels; `runs`: of the largest window of block
    shuffle.
    """
    code = SHUFFLE_CODES[shuffle]
    return code | runs << MODE_BITS if code == SHUFFLE_BLOCK else code


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A bijection of [0, size); equal settings give equal images on every machine."""

    size: int
    """Number of elements, at least 1."""
    key: int
    """64-bit key, from `penstock.core.randomness.key_for`."""
    shuffle: Shuffle = "full"
    shuffle_runs: int = WINDOW_BLOCKS
    """Runs of the largest window of block shuffle."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a permutation needs a size of at least 1, got {self.size}")
        if self.shuffle not in SHUFFLE_CODES:
            raise ConfigError(
                f"shuffle must be one of {', '.join(SHUFFLE_CODES)}, got {self.shuffle!r}"
            )
        if not 1 <= self.shuffle_runs <= MOST_RUNS:
            raise ConfigError(f"shuffle_runs must be 1 to {MOST_RUNS:,}, got {self.shuffle_runs}")

    def images(self, begin: int = 0, end: int | None = None) -> Annotated[Int64, "images"]:
        """Images of begin … end − 1 (to the end when None)."""
        end = self.size if end is None else end
        if not 0 <= begin <= end <= self.size:
            raise IndexError(f"[{begin}, {end}) is not inside [0, {self.size})")
        out = np.empty(end - begin, np.int64)
        permute_range(
            begin,
            self.size,
            np.uint64(self.key),
            shuffle_mode(self.shuffle, self.shuffle_runs),
            out,
        )
        return out


def mixed_with(
    index: int, size: int, shuffle: Shuffle, runs: int = WINDOW_BLOCKS
) -> tuple[int, int]:
    """(first, last + 1) of the places in an order of `size` documents that are mixed with place
    `index`.

    They are all of them with shuffle `full`, a window of the runs with `block`, one with `none`.
    """
    if shuffle == "none":
        return index, index + 1
    if shuffle == "full" or size <= SMALL:
        return 0, size
    block = index // RUN_DOCUMENTS
    begin, blocks = 0, 1
    while block >= begin + blocks and blocks < runs:
        begin, blocks = begin + blocks, 2 * blocks
    if blocks >= runs:
        begin, blocks = begin + (block - begin) // runs * runs, runs
    return begin * RUN_DOCUMENTS, min((begin + blocks) * RUN_DOCUMENTS, size)
