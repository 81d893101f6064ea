"""Shares of sources as exact integers, so that a blend is the same on every machine and never
drifts.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from penstock.core.arrays import Bool, Float64, Int64
from penstock.core.errors import ConfigError

UNIT = 1 << 30
"""What all shares add up to. A token is worth UNIT credits; those of the longest documents (2^32
tokens) fit int64.
"""


def integer_shares(
    shares: Sequence[float] | Float64, active: Sequence[bool] | Bool | None = None
) -> Annotated[Int64, "sources"]:
    """Scale shares to integers that add up to UNIT, by largest remainder; a positive share stays at
    least 1.

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
        raise ConfigError(f"shares must be finite and not negative, got {values.tolist()}")
    if active is not None:
        if not np.any(active):
            return np.zeros(len(values), np.int64)
        values = np.where(active, values, 0.0)
    if values.max() <= 0:
        raise ConfigError(
            "the shares of the sources that are left add up to 0: "
            f"{np.asarray(shares).tolist()}; give one of them a share"
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
