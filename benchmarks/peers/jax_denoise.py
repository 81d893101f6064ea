"""Denoising as a jitted JAX function of one padded document, as training libraries on JAX map it
over a dataset.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from peers.numpy_denoise import TASKS, WEIGHTS


def jitted_denoiser(
    documents: Sequence[np.ndarray], sentinels: Sequence[int], longest: int
) -> Callable[[], None] | None:
    """Work that denoises each document; None where jax is not installed."""
    try:
        import jax
    except ImportError:
        return None
    denoise = jax.jit(partial(_denoise, sentinels=np.array(sentinels, np.int32)))
    random = np.random.default_rng(0)
    tasks = np.array(TASKS, np.float32)[random.choice(len(TASKS), len(documents), p=WEIGHTS)]
    padded = [np.pad(document, (0, longest - len(document))) for document in documents]
    keys = jax.random.split(jax.random.key(0), len(documents))

    def work() -> None:
        for document, padding, task, key in zip(documents, padded, tasks, keys, strict=True):
            jax.block_until_ready(denoise(padding, len(document), task, key))

    return work


def _denoise(tokens: Any, length: Any, task: Any, key: Any, *, sentinels: np.ndarray) -> Any:
    """int32 [T + 2 sentinels + 1]: mode token, inputs, targets, zeros."""
    import jax
    import jax.numpy as jnp

    size, slots = len(tokens), len(tokens) + 2 * len(sentinels) + 1
    place = jnp.arange(size)
    rate, mean, mode = task
    keys = jax.random.split(key, 4)

    def span_of(total: Any, parts: Any, key: Any) -> Any:
        """Which part each of `total` items is in: the ones of a shuffled row of booleans begin
        parts.
        """
        order = jnp.argsort(jnp.where(place < total - 1, jax.random.uniform(key, (size,)), 2.0))
        begins = jnp.zeros(size, jnp.int32).at[order + 1].set(place < parts - 1, mode="drop")
        return jnp.cumsum(begins)

    def spans() -> Any:
        noise = jnp.clip(jnp.round(length * rate).astype(jnp.int32), 1, length - 1)
        parts = jnp.maximum(jnp.round(noise / mean).astype(jnp.int32), 1)
        counts = [
            jnp.zeros(size, jnp.int32)
            .at[span_of(total, parts, key)]
            .add(place < total, mode="drop")
            for total, key in ((length - noise, keys[0]), (noise, keys[1]))
        ]
        starts = jnp.cumsum(jnp.stack(counts, axis=1).reshape(-1))
        begins = (
            jnp.zeros(size, jnp.int32)
            .at[jnp.where(starts < length, starts, size)]
            .add(1, mode="drop")
        )
        mask = jnp.cumsum(begins) % 2 == 1
        offset = jax.random.randint(keys[2], (), 0, length)
        return mask[(place + offset) % length]

    def prefix() -> Any:
        return place >= jax.random.randint(keys[3], (), 1, length)

    mask = jax.lax.cond(rate > 0, spans, prefix) & (place < length)
    real = place < length

    def part(taken: Any) -> tuple[Any, Any, Any]:
        """What stands at each place when runs of `taken` become sentinels, whether anything does,
        and how many do.
        """
        first = taken & ~jnp.concatenate([jnp.zeros(1, bool), taken[:-1]])
        ids = jnp.asarray(sentinels)[jnp.clip(jnp.cumsum(first) - 1, 0, len(sentinels) - 1)]
        stays = real & (~taken | first)
        return jnp.where(first, ids, tokens), stays, jnp.sum(stays)

    inputs, in_stays, in_count = part(mask)
    targets, target_stays, _ = part(real & ~mask)
    out = jnp.zeros(slots, jnp.int32).at[0].set(mode.astype(jnp.int32))
    out = out.at[jnp.where(in_stays, jnp.cumsum(in_stays), slots)].set(inputs, mode="drop")
    return out.at[jnp.where(target_stays, in_count + jnp.cumsum(target_stays), slots)].set(
        targets, mode="drop"
    )
