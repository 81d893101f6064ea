"""The dense mask for attention in JAX against its rule, one pair of tokens at a time."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from penstock import jax as psj  # noqa: E402

SEGMENTS = np.int32([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 3, 3, 3, 3, 3, 3]])
PREFIX = np.array([[1, 1, 1, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0, 0]], bool)


def slow(segments, prefix):
    slots = len(segments)
    mask = np.zeros((slots, slots), bool)
    for q in range(slots):
        for k in range(slots):
            mask[q, k] = segments[q] == segments[k] and (k <= q or (prefix[q] and prefix[k]))
    return mask


@pytest.mark.parametrize("prefix", [PREFIX, None])
def test_it_is_the_rule(prefix):
    mask = psj.attention_mask(SEGMENTS, prefix)
    assert mask.shape == (2, 1, 9, 9)
    assert mask.dtype == bool
    for row in range(2):
        expected = slow(SEGMENTS[row], np.zeros(9, bool) if prefix is None else prefix[row])
        np.testing.assert_array_equal(mask[row, 0], expected)


def test_attention_sees_what_it_may_and_nothing_else():
    """Documents side by side give what each gives alone; padding gives numbers."""
    generator = np.random.default_rng(0)
    q, k, v = (generator.normal(size=(2, 9, 2, 4)).astype(np.float32) for _ in range(3))

    @jax.jit
    def attend(q, k, v, segments, prefix):
        return jax.nn.dot_product_attention(q, k, v, mask=psj.attention_mask(segments, prefix))

    out = np.asarray(attend(q, k, v, SEGMENTS, PREFIX))
    assert np.isfinite(out).all()
    second = slice(0, 1), slice(4, 7)
    alone = attend(q[second], k[second], v[second], SEGMENTS[second], PREFIX[second])
    np.testing.assert_allclose(out[second], alone, rtol=1e-5, atol=1e-6)
