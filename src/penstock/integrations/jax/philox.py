"""Philox4x32-10 in 32-bit arithmetic: the random words of `penstock.randomness`, without 64-bit integers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MULTIPLIERS = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW, _HALF = np.uint32(0xFFFF), np.uint32(16)


def multiply_high(a: jax.Array, b: jax.Array | np.uint32) -> jax.Array:
    """The upper 32 bits of a * b, uint32, from four products of 16-bit halves."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low, cross_1, cross_2 = a_low * b_low, a_high * b_low, a_low * b_high
    carry = ((low >> _HALF) + (cross_1 & _LOW) + (cross_2 & _LOW)) >> _HALF
    return a_high * b_high + (cross_1 >> _HALF) + (cross_2 >> _HALF) + carry


def random_words(key: jax.Array, purpose: Any, count: int) -> jax.Array:
    """Words 0 … count − 1 of a purpose, uint32 [count]: lane i % 4 of block i // 4 (Salmon et al. 2011).

    Args:
        key: uint32 [2], the low and the high half of a document's key.
        purpose: Second word of the counter.
        count: How many, static.
    """
    block = jnp.arange(-(-count // 4), dtype=jnp.uint32)
    zero = jnp.zeros_like(block)
    start = (block, zero + jnp.asarray(purpose, jnp.uint32), zero, zero, key[0], key[1])
    # A loop, not ten rounds in a row: XLA would fuse those, and compute the first once for every use in the later ones.
    words = jax.lax.fori_loop(0, 10, _round, start)[:4]
    return jnp.stack(words, axis=-1).reshape(-1)[:count]


def _round(_: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    c0, c1, c2, c3, k0, k1 = state
    high_0, low_0 = multiply_high(c0, _MULTIPLIERS[0]), c0 * _MULTIPLIERS[0]
    high_1, low_1 = multiply_high(c2, _MULTIPLIERS[1]), c2 * _MULTIPLIERS[1]
    return high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0, k0 + _WEYL[0], k1 + _WEYL[1]


def below(word: jax.Array, bound: jax.Array) -> jax.Array:
    """A number in [0, bound), int32, of each word: (word * bound) >> 32; 0 where bound is not above 0."""
    return multiply_high(word, jnp.maximum(bound, 0).astype(jnp.uint32)).astype(jnp.int32)
