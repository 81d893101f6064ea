"""Randomness as a function of place: a key is a hash of where it is used, never of what was drawn
before.

`key_for(seed, "shuffle", "web", epoch)` returns the same 64 bits on every machine, in every
process, in any order of calls. Kernels derive further keys with `mix`, which has full avalanche:
each bit of the input flips each bit of the output about half of the time, so neighbouring places
have unrelated keys.

Kernels that need many numbers for one document draw them from `philox`, a counter-based generator:
word `i` is a function of (key, purpose, i) alone, in arithmetic that is the same with 32-bit
integers.

All integers are unsigned: in Numba, int64 mixed with uint64 silently becomes float64.

Counter-based random numbers: one for each token of each sequence.
"""

import hashlib

import numpy as np

from penstock.core.arrays import UInt64
from penstock.core.compiled import inline_kernel, kernel

MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
INCREMENT = np.uint64(0x9E3779B97F4A7C15)
LOW_32 = np.uint64(0xFFFFFFFF)
PHILOX_MULTIPLIER_1 = np.uint64(0xD2511F53)
PHILOX_MULTIPLIER_2 = np.uint64(0xCD9E8D57)
PHILOX_WEYL_1 = np.uint64(0x9E3779B9)
PHILOX_WEYL_2 = np.uint64(0xBB67AE85)
_SHIFT_32 = np.uint64(32)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)

_SHIFT_20 = np.uint64(20)
_SCALE = np.float64(2.0**-52)


def key_for(seed: int, *place: str | int) -> int:
    """A 64-bit key for one place.

    Args:
        seed: The run's seed, any integer.
        place: What is drawn and where: a purpose, then names and numbers from coarse to fine. Types
            matter: `1` and `"1"` are different places.

    Returns:
        An integer in [0, 2^64).
    """
    text = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@inline_kernel
def mix(key, value):
    """Fold one more number into a key (uint64, uint64 → uint64): SplitMix64's finaliser, Steele et
    al. 2014.
    """
    z = key + (value + np.uint64(1)) * INCREMENT
    z = (z ^ (z >> _SHIFT_30)) * MULTIPLIER_1
    z = (z ^ (z >> _SHIFT_27)) * MULTIPLIER_2
    return z ^ (z >> _SHIFT_31)


@kernel
def _mix_into(keys, values, out):
    for i in range(len(out)):
        out[i] = mix(keys[i if len(keys) > 1 else 0], values[i])


def mix_array(keys: object, values: object) -> UInt64:
    """`mix` for arrays: one key or [n], with values [n]; uint64 [n]."""
    values = np.ascontiguousarray(values).astype(np.uint64)
    out = np.empty(len(values), np.uint64)
    _mix_into(np.atleast_1d(np.asarray(keys, np.uint64)), values, out)
    return out


@inline_kernel
def philox_rounds(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al. 2011): four words of a counter and a key, each 32 bits in a
    uint64.
    """
    for _ in range(10):
        product_1 = c0 * PHILOX_MULTIPLIER_1
        product_2 = c2 * PHILOX_MULTIPLIER_2
        c0 = (product_2 >> _SHIFT_32) ^ c1 ^ k0
        c2 = (product_1 >> _SHIFT_32) ^ c3 ^ k1
        c1 = product_2 & LOW_32
        c3 = product_1 & LOW_32
        k0 = (k0 + PHILOX_WEYL_1) & LOW_32
        k1 = (k1 + PHILOX_WEYL_2) & LOW_32
    return c0, c1, c2, c3


@inline_kernel
def philox(block, purpose, key):
    """Four random words, each below 2^32 in a uint64: word number i of a purpose is word i % 4 of
    block i // 4.

    The counter is (block, purpose, 0, 0), the key its low and high 32 bits.
    """
    zero = np.uint64(0)
    key = np.uint64(key)
    return philox_rounds(
        np.uint64(block), np.uint64(purpose), zero, zero, key & LOW_32, key >> _SHIFT_32
    )


@inline_kernel
def below(word, bound):
    """Map a word below 2^32 to a number in [0, bound), bound at most 2^32; uint64.

    Each number's probability is 1 / bound up to a relative error of bound / 2^32: 1 in 65,536 for a
    bound of 65,536.
    """
    return (np.uint64(word) * np.uint64(bound)) >> _SHIFT_32


@kernel
def uniforms(keys, places, out):
    """Numbers in [0, 1), multiples of 2^-52; each depends only on its key and place.

    Args:
        keys: uint64 [n], a key for each sequence.
        places: uint64 [n], place in the sequence, below 2^32.
        out: float64 [n], written.
    """
    for i in range(len(out)):
        high, low, _, _ = philox(places[i], np.uint64(0), keys[i])
        out[i] = np.float64((high << _SHIFT_20) | (low >> np.uint64(12))) * _SCALE
