"""Checksums of bytes: compiled, without the GIL, on raw addresses.

The checksum of a block is the sum of its 32-bit words, each multiplied by its own odd constant,
modulo 2^64, then mixed with its key. A change within one word always changes it, any other with
probability 1 − 2^-64.
"""

import hashlib

import numpy as np

from penstock.core.compiled import inline_kernel, kernel, view_u8, view_u32
from penstock.core.randomness import mix
from penstock.core.vectors import dot_words

MULTIPLIERS = np.frombuffer(
    hashlib.shake_256(b"penstock shards 1").digest(1024), "<u4"
) | np.uint32(1)
"""One odd constant for each word of a block, uint32 [256]; part of the format."""

_0, _2, _3, _4, _32 = (np.uint64(number) for number in (0, 2, 3, 4, 32))
_LAST = np.uint64(len(MULTIPLIERS) - 1)
_FILE_BLOCK = np.uint64(1024)


@inline_kernel
def sum_words(address, num_bytes):
    """Sum of the 32-bit words at `address`, each times its multiplier (uint64, uint64 ≤ 1024, →
    uint64).

    An incomplete last word is padded with zeros.
    """
    num_words, rest = num_bytes >> _2, num_bytes & _3
    total, word = dot_words(view_u32(address, num_words), MULTIPLIERS), _0
    if num_words != _0:
        # The last four bytes without those that were in the word before: no branch, since most
        # documents are short, and half of them have such a rest.
        word = np.uint64(view_u32(address + num_bytes - _4, 1)[0]) >> (_32 - (rest << _3))
    elif rest != _0:
        tail = view_u8(address, rest)
        for i in range(rest):
            word |= np.uint64(tail[i]) << (np.uint64(i) << _3)
    return total + word * np.uint64(MULTIPLIERS[min(num_words, _LAST)])


@inline_kernel
def continue_checksum(key, address, num_bytes):
    """`bytes_checksum` of whole blocks, which gave this key, and of the bytes that follow (uint64,
    uint64, uint64 → uint64).
    """
    for begin in range(_0, num_bytes, _FILE_BLOCK):
        key = mix(
            key,
            sum_words(address + np.uint64(begin), min(_FILE_BLOCK, num_bytes - np.uint64(begin))),
        )
    return key


@kernel
def bytes_checksum(address, num_bytes):
    """Checksum of a whole file or buffer: its blocks of 1,024 bytes, chained from its size (uint64,
    uint64 → uint64).
    """
    return continue_checksum(num_bytes, address, num_bytes)
