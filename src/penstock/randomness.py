"""Randomness as a function of place: a key is a hash of where it is used, never of what was drawn before.

`key_for(seed, "shuffle", "web", epoch)` gives the same 64 bits on every machine, in every process, in any order
of calls. Kernels go on from a key with `mix`, which has full avalanche: any bit of the input flips each bit of the
output about half of the time, so neighbouring places have unrelated keys.

Kept unsigned throughout: in Numba int64 mixed with uint64 silently becomes float64.
"""

import hashlib
from typing import Any

import numpy as np

from penstock.compiled import inline_kernel, kernel

MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


def key_for(seed: int, *place: str | int) -> int:
    """A 64-bit key for one place.

    Args:
        seed: The run's seed, any integer.
        place: What is drawn and where: a purpose, then names and numbers from coarse to fine. Types count:
            `1` and `"1"` are different places.

    Returns:
        An integer in [0, 2^64).
    """
    text = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@inline_kernel
def mix(key, value):
    """Fold one more number into a key (uint64, uint64 → uint64): SplitMix64's finaliser, Steele et al. 2014."""
    z = key + (value + np.uint64(1)) * INCREMENT
    z = (z ^ (z >> _SHIFT_30)) * MULTIPLIER_1
    z = (z ^ (z >> _SHIFT_27)) * MULTIPLIER_2
    return z ^ (z >> _SHIFT_31)


@kernel
def _mix_into(keys, values, out):
    for i in range(len(out)):
        out[i] = mix(keys[i if len(keys) > 1 else 0], values[i])


def mix_array(keys: Any, values: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`mix` for arrays: one key or [n], with values [n]; uint64 [n]."""
    values = np.ascontiguousarray(values).astype(np.uint64)
    out = np.empty(len(values), np.uint64)
    _mix_into(np.atleast_1d(np.asarray(keys, np.uint64)), values, out)
    return out
