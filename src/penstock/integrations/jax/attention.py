"""Attention of packed rows without a T × T mask: segment ids for kernels that take them, and splash
attention.

Kernels with segment ids (Pallas' splash and flash attention, those of MaxText) let a token see the
earlier tokens of its segment. That is the rule of a row without prefixes. With prefixes, two calls
are enough: a prefix stands at the beginning of its document, so its tokens see exactly the prefix,
and all others see exactly what causal attention shows them. `prefix_segment_ids` gives the segments
of the call without a causal mask, `splash_attention` makes both.
"""

from math import gcd

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from penstock.core.arrays import Int32
from penstock.core.errors import ConfigError
from penstock.integrations.jax.batch import segments_of
from penstock.integrations.jax.batches import Axis
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader import Step

SMALLEST_BLOCK, LARGEST_BLOCK = 128, 512
"""Slots that splash attention works on at once."""


def segment_ids(rows: Step | ModelInput) -> Int32:
    """int32 [R, T]: 1 … n for the documents of each row, 0 for padding; what `Batch.segment_ids`
    holds.

    For loops that take rows or steps from a loader themselves.

    Args:
        rows: A step, or one row (R = 1).

    Raises:
        ConfigError: The loader's requirements leave out `document_ids` or `cu_seqlens`.
    """
    listed = [rows] if isinstance(rows, ModelInput) else list(rows)
    return np.stack([segments_of(row) for row in listed])


def prefix_segment_ids(segment_ids: jax.Array, prefix: jax.Array) -> jax.Array:
    """int32 [B, T]: two slots have the same id iff they are in the same document and both, or
    neither, in its prefix.

    Attention with these ids and *no* causal mask is right for the tokens of prefixes, and for no
    other.

    Args:
        segment_ids: int32 [B, T].
        prefix: bool [B, T].
    """
    return 2 * segment_ids + prefix.astype(jnp.int32)


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    prefix: jax.Array | None = None,
    *,
    scale: float | None = None,
    mesh: Mesh | None = None,
    axis: Axis = "data",
    interpret: bool = False,
) -> jax.Array:
    """JAX's splash attention over packed rows; with `attention_mask`,
    `jax.nn.dot_product_attention` gives the same.

    Memory grows with T, not T². Prefixes cost a second call. It runs on TPUs, and anywhere with
    `interpret`.

    Args:
        q: [B, T, heads, head size], as `jax.nn.dot_product_attention` takes it; T is a multiple of
            128.
        k: [B, T, heads or a divisor of them, head size].
        v: As `k`.
        segment_ids: int32 [B, T].
        prefix: bool [B, T]; None: no prefixes.
        scale: Factor of the scores; None: 1 / √(head size).
        mesh: The mesh of rows that are split over `axis`; None: rows are on one device.
        axis: Name of the mesh axis, or axes.
        interpret: Run the kernel in JAX's interpreter: slow, for tests.

    Raises:
        ConfigError: T is no multiple of 128, or the heads of `k` do not divide those of `q`.
    """
    slots, heads = q.shape[1], q.shape[2]
    if slots % SMALLEST_BLOCK:
        raise ConfigError(
            f"splash attention needs rows of a multiple of {SMALLEST_BLOCK} slots, got {slots}"
        )
    if heads % k.shape[2]:
        raise ConfigError(
            f"the {k.shape[2]} heads of keys must divide the {heads} heads of queries"
        )

    def attend(*arrays: jax.Array) -> jax.Array:
        q, k, v, segments = arrays[:4]
        causal = _attend(q, k, v, segments, causal=True, scale=scale, interpret=interpret)
        if len(arrays) == 4:
            return causal
        inside = arrays[4]
        both_ways = _attend(
            q,
            k,
            v,
            prefix_segment_ids(segments, inside),
            causal=False,
            scale=scale,
            interpret=interpret,
        )
        return jnp.where(inside[:, :, None, None], both_ways, causal)

    arrays = (q, k, v, segment_ids) if prefix is None else (q, k, v, segment_ids, prefix)
    if mesh is None:
        return attend(*arrays)
    split = PartitionSpec(axis)
    # XLA cannot split a kernel of Pallas; each device gets its rows.
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(split,) * len(arrays), out_specs=split, check_vma=False
    )
    out: jax.Array = mapped(*arrays)
    return out


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    causal: bool,
    scale: float | None,
    interpret: bool,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    slots, heads, size = q.shape[1:]
    mask = (splash.CausalMask if causal else splash.FullMask)((slots, slots))
    block = gcd(slots, LARGEST_BLOCK)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )
    factor = size**-0.5 if scale is None else scale
    heads_first = (x.transpose(0, 2, 1, 3) for x in (q * factor, k, v))
    out: jax.Array = jax.vmap(kernel)(
        *heads_first, segment_ids=splash.SegmentIds(segments, segments)
    )
    return out.transpose(0, 2, 1, 3)
