"""The order of documents: a keyed permutation of [0, size), and shares as exact integers.

A keyed permutation of [0, size): the order of a source's documents in one epoch, without storing it.

Shares as exact integers, so that a blend is the same on every machine and never drifts.
"""

from collections.abc import Sequence
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
"""`full`: any document may follow any other. `block`: documents of runs of 256 are mixed in windows of 1, 2, 4, … runs,
for datasets in object storage. `none`: the order on disk, every epoch."""

SHUFFLE_CODES: dict[str, int] = {"full": SHUFFLE_FULL, "block": SHUFFLE_BLOCK, "none": SHUFFLE_NONE}
MOST_RUNS = 1 << 20
"""Of a window of block shuffle."""


def shuffle_mode(shuffle: Shuffle, runs: int = WINDOW_BLOCKS) -> int:
    """How documents are shuffled, as one number for kernels; `runs`: of the largest window of block shuffle."""
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
            raise ConfigError(f"shuffle must be one of {', '.join(SHUFFLE_CODES)}, got {self.shuffle!r}")
        if not 1 <= self.shuffle_runs <= MOST_RUNS:
            raise ConfigError(f"shuffle_runs must be 1 to {MOST_RUNS:,}, got {self.shuffle_runs}")

    def images(self, begin: int = 0, end: int | None = None) -> Annotated[Int64, "images"]:
        """Images of begin … end − 1 (to the end when None)."""
        end = self.size if end is None else end
        if not 0 <= begin <= end <= self.size:
            raise IndexError(f"[{begin}, {end}) is not inside [0, {self.size})")
        out = np.empty(end - begin, np.int64)
        permute_range(begin, self.size, np.uint64(self.key), shuffle_mode(self.shuffle, self.shuffle_runs), out)
        return out


def mixed_with(index: int, size: int, shuffle: Shuffle, runs: int = WINDOW_BLOCKS) -> tuple[int, int]:
    """(first, last + 1) of the places in an order of `size` documents that are mixed with place `index`.

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


UNIT = 1 << 30
"""What all shares add up to. A token is worth UNIT credits; those of the longest documents (2^32 tokens) fit int64."""


def integer_shares(shares: Sequence[float], active: Sequence[bool] | None = None) -> Annotated[Int64, "sources"]:
    """Scale shares to integers that add up to UNIT, by largest remainder; a positive share stays at least 1.

    Args:
        shares: Relative shares, finite and not negative, in any scale.
        active: False takes a source out (it is finished); the others keep their proportions.

    Returns:
        Shares of UNIT; all 0 when nothing is active.

    Raises:
        ConfigError: A share is negative or not finite, or active shares are all zero.
    """
    values = np.asarray(shares, np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        raise ConfigError(f"shares must be finite and not negative, got {list(shares)}")
    if active is not None:
        if not any(active):
            return np.zeros(len(values), np.int64)
        values = np.where(active, values, 0.0)
    if values.max() <= 0:
        raise ConfigError(
            f"the shares of the sources that are left add up to 0: {list(shares)}; give one of them a share"
        )
    # Scaled first, so that the sum is finite.
    scaled = values / values.max()
    exact = scaled / scaled.sum() * UNIT
    whole: Int64 = np.floor(exact).astype(np.int64)
    whole[(values > 0) & (whole == 0)] = 1
    missing = UNIT - int(whole.sum())
    if missing > 0:
        whole[np.argsort(whole - exact, kind="stable")[:missing]] += 1
    elif missing < 0:
        whole[np.argmax(whole)] += missing
    return whole
