"""Denoising on the device: jitted functions that give what `penstock.Denoise.write` gives, bit for bit.

All is integer arithmetic on (length, key) in 32 bits, with static shapes: a document stands at the beginning of
`max_length` slots, and its length is a number beside it, so any ids may occur. What is past the end is told by place.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from penstock.errors import ConfigError
from penstock.integrations.jax.places import Places, place
from penstock.integrations.jax.settings import DenoiseSettings
from penstock.integrations.jax.spans import Layout, find_spans, lay_out
from penstock.objectives import _denoise_kernels as k


class Denoised(NamedTuple):
    """One document as the model sees it, in M slots; with a leading axis under `jax.vmap`."""

    tokens: jax.Array
    """int32 [M]; 0 past `slots`."""
    weights: jax.Array
    """float32 [M]: how much each token counts as a target; 0 where it is only read, and past `slots`."""
    prefix: jax.Array
    """int32 []: so many tokens at the beginning see each other in both directions."""
    slots: jax.Array
    """int32 []: slots that are used. Above M, what is beyond M was left out: compare, or let `Denoiser` do it."""


@partial(jax.jit, static_argnames="max_slots")
def denoise(
    tokens: Any, length: Any, key: Any, settings: DenoiseSettings, weights: Any = None, *, max_slots: int
) -> Denoised:
    """Denoise one document; `denoise_batch` does several.

    Args:
        tokens: int32 [T], the document first; what comes after it is not looked at.
        length: int32 [], tokens of the document, at most T: nothing checks it here.
        key: uint32 [2], the low and the high half of the document's key; see `split_keys`.
        settings: Of `DenoiseSettings.of`, for T tokens or more.
        weights: float32 [T], how much each token counts where it is a target, not below 0; None = 1.
        max_slots: M, static.

    Raises:
        ConfigError: The settings are for shorter documents than T.
    """
    if tokens.shape[0] > settings.max_length:
        raise ConfigError(
            f"denoise: room for documents of {tokens.shape[0]} tokens, but the settings have sentinels for "
            f"{settings.max_length}; make them with DenoiseSettings.of(objective, {tokens.shape[0]})"
        )
    length = jnp.asarray(length, jnp.int32)
    layout = lay_out(settings, length, key)
    begins, ends = find_spans(settings, layout, length, key)
    places = place(settings, layout, begins, ends, max_slots)
    written = _write(jnp.asarray(tokens, jnp.int32), places, _control_tokens(settings, layout))
    slot = jnp.arange(max_slots, dtype=jnp.int32)
    used = slot < layout.slots
    is_causal = layout.task[k.TASK_KIND] == k.CAUSAL
    reads_little = is_causal | (settings.header[k.TRAIN_ON_INPUTS] != 0)
    has_mode = (layout.task[k.MODE] >= 0).astype(jnp.int32)
    is_target = used & (slot >= jnp.where(reads_little, has_mode, layout.bar))
    given = jnp.ones((), jnp.float32)
    if weights is not None:
        weights = jnp.asarray(weights, jnp.float32)
        given = _write(weights, places, _control_weights(layout, weights, begins, ends))
    return Denoised(
        tokens=jnp.where(used, written, 0),
        weights=jnp.where(is_target, given, 0),
        prefix=jnp.where(is_causal | (settings.header[k.BIDIRECTIONAL] == 0), 0, layout.bar),
        slots=layout.slots,
    )


def _write(document: jax.Array, places: Places, control: jax.Array) -> jax.Array:
    """[M] what is copied from the document, [T], with what belongs to the control tokens between."""
    copied = document[jnp.clip(places.source, 0, len(document) - 1)]
    return copied.at[places.control].set(control, mode="drop")


def _control_tokens(settings: DenoiseSettings, layout: Layout) -> jax.Array:
    """int32 [2 S + 3]: ids, in the order of `Places.control`."""
    sentinels, header = settings.sentinels, settings.header
    marked = (layout.task[k.TASK_KIND] == k.SPANS) | (layout.task[k.SENTINEL] != 0)
    final = sentinels[jnp.minimum(jnp.where(marked, layout.spans, 0), len(sentinels) - 1)]
    return jnp.concatenate([sentinels, sentinels, jnp.stack([layout.task[k.MODE], header[k.INPUT_END], final])])


def _control_weights(layout: Layout, weights: jax.Array, begins: jax.Array, ends: jax.Array) -> jax.Array:
    """float32 [2 S + 3]: a sentinel counts as the heaviest token of its span, the ends as the heaviest of all spans."""
    place, room = jnp.arange(len(weights), dtype=jnp.int32), len(begins)
    # Spans past the last begin at the document's end, so they number only tokens after it.
    begun = jnp.zeros(len(weights), jnp.int32).at[begins].add(1, mode="drop")
    span = jnp.cumsum(begun, dtype=jnp.int32) - 1
    in_span = (span >= 0) & (place < ends[span])
    heaviest = jnp.zeros(room, jnp.float32).at[jnp.where(in_span, span, room)].max(weights, mode="drop")
    of_all = heaviest.max()
    return jnp.concatenate([heaviest, heaviest, jnp.stack([jnp.zeros((), jnp.float32), of_all, of_all])])
