"""Who sees whom in a row, for attention that takes a dense mask."""

import jax
import jax.numpy as jnp


def attention_mask(segment_ids: jax.Array, prefix: jax.Array | None = None) -> jax.Array:
    """bool [B, 1, T, T], for `jax.nn.dot_product_attention(mask=…)`: [b, 0, q, k] says whether q sees k.

    A token sees those of its own segment that lie before it, itself, and, where both are in its prefix, those after it.
    Padding is a segment too, so no row of the mask is empty and no softmax is NaN.

    It costs T² bytes a row, 16 MiB for 4,096 tokens: for long rows give `segment_ids` to an attention that takes them,
    and refuse a prefix there if it cannot honour one.

    Args:
        segment_ids: int32 [B, T].
        prefix: bool [B, T], or None where there is none.
    """
    slots = segment_ids.shape[-1]
    place = jnp.arange(slots, dtype=jnp.int32)
    seen = place[:, None] >= place[None, :]
    if prefix is not None:
        seen = seen | (prefix[:, :, None] & prefix[:, None, :])
    return (seen & (segment_ids[:, :, None] == segment_ids[:, None, :]))[:, None]
