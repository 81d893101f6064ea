"""Denoising on the device: jitted functions that give what `penstock.Denoise.write` gives, bit for bit.

All is integer arithmetic on (length, key) in 32 bits, with static shapes: a document stands at the beginning of
`max_length` slots, and its length is a number beside it, so any ids may occur. What is past the end is told by place.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from penstock.errors import ConfigError
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
def denoise(tokens: Any, length: Any, key: Any, settings: DenoiseSettings, *, max_slots: int) -> Denoised:
    """Denoise one document; for a batch, `jax.vmap(partial(denoise, max_slots=…), in_axes=(0, 0, 0, None))`.

    Args:
        tokens: int32 [T], the document first; what comes after it is not looked at.
        length: int32 [], tokens of the document, at most T: nothing checks it here.
        key: uint32 [2], the low and the high half of the document's key; see `split_keys`.
        settings: Of `DenoiseSettings.of`, for T tokens or more.
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
    written = _write(settings, layout, tokens, begins, ends, max_slots)
    slot = jnp.arange(max_slots, dtype=jnp.int32)
    has_mode = (layout.task[k.MODE] >= 0).astype(jnp.int32)
    is_causal = layout.task[k.TASK_KIND] == k.CAUSAL
    header = settings.header
    reads = jnp.where(is_causal | (header[k.TRAIN_ON_INPUTS] != 0), has_mode, layout.bar)
    used = slot < layout.slots
    return Denoised(
        tokens=jnp.where(used, written, 0),
        weights=(used & (slot >= reads)).astype(jnp.float32),
        prefix=jnp.where(is_causal | (header[k.BIDIRECTIONAL] == 0), 0, layout.bar),
        slots=layout.slots,
    )


def _write(
    settings: DenoiseSettings, layout: Layout, tokens: jax.Array, begins: jax.Array, ends: jax.Array, max_slots: int
) -> jax.Array:
    """int32 [max_slots]: runs of the document, copied from where they stand, and the control tokens between them."""
    task, header, sentinels = layout.task, settings.header, settings.sentinels
    room = len(sentinels)
    span = jnp.arange(room, dtype=jnp.int32)
    live = span < layout.spans
    in_place = (task[k.TASK_KIND] == k.SPANS).astype(jnp.int32)
    marked = in_place | task[k.SENTINEL]
    mode = (task[k.MODE] >= 0).astype(jnp.int32)
    before = jnp.cumsum(ends - begins, dtype=jnp.int32) - (ends - begins)
    """Noise before each span."""
    read_marks = mode + begins - before + span * in_place
    target_marks = layout.bar + before + span * marked

    # Each run continues the one before it but for a jump, so places in the document are a sum of jumps.
    run_slots = jnp.concatenate([read_marks + in_place, target_marks + marked])
    shifts = jnp.concatenate([ends, begins]) - run_slots
    last_read = jnp.sum(jnp.where(span == layout.spans - 1, ends - read_marks - in_place, 0))
    jumps = jnp.diff(shifts, prepend=-mode)
    jumps = jumps.at[room].set(shifts[room] - last_read)
    live_runs = jnp.concatenate([live, live])
    steps = jnp.zeros(max_slots, jnp.int32).at[jnp.where(live_runs, run_slots, max_slots)].add(jumps, mode="drop")
    source = jnp.cumsum(steps, dtype=jnp.int32) + jnp.arange(max_slots, dtype=jnp.int32) - mode
    written = tokens[jnp.clip(source, 0, tokens.shape[0] - 1)].astype(jnp.int32)

    has_noise = layout.spans > 0
    control = [
        (jnp.where(live & (in_place > 0), read_marks, max_slots), sentinels),
        (jnp.where(live & (marked > 0), target_marks, max_slots), sentinels),
        _one(mode > 0, 0, task[k.MODE], max_slots),
        _one(has_noise & (header[k.INPUT_END] >= 0), layout.bar - 1, header[k.INPUT_END], max_slots),
        _one(
            has_noise & (header[k.FINAL_SENTINEL] != 0),
            layout.slots - 1,
            sentinels[jnp.clip(jnp.where(marked > 0, layout.spans, 0), 0, room - 1)],
            max_slots,
        ),
    ]
    places, ids = (jnp.concatenate(parts) for parts in zip(*control, strict=True))
    return written.at[places].set(ids, mode="drop")


def _one(wanted: jax.Array, place: jax.Array | int, token: jax.Array, nowhere: int) -> tuple[jax.Array, jax.Array]:
    return jnp.where(wanted, place, nowhere)[None], token[None]
