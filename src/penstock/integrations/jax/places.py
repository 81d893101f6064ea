"""Which slot of what is written holds which token of the document, and where the control tokens are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from penstock.integrations.jax.settings import DenoiseSettings
from penstock.integrations.jax.spans import Layout
from penstock.objectives import _denoise_kernels as k


class Places(NamedTuple):
    """Of one document, in M slots."""

    source: jax.Array
    """int32 [M]: place in the document of what the slot holds; anything where it holds a control token or nothing."""
    control: jax.Array
    """int32 [2 S + 3]: slots of the sentinels among the inputs and among the targets, of the mode token, of the token
    that ends the inputs, of the final sentinel; M for one that is not there."""


def place(settings: DenoiseSettings, layout: Layout, begins: jax.Array, ends: jax.Array, max_slots: int) -> Places:
    """Find the places of a document whose spans are `begins` … `ends`, int32 [S] each."""
    task, header, room = layout.task, settings.header, len(begins)
    span = jnp.arange(room, dtype=jnp.int32)
    live = span < layout.spans
    in_place = (task[k.TASK_KIND] == k.SPANS).astype(jnp.int32)
    marked = in_place | task[k.SENTINEL]
    mode = (task[k.MODE] >= 0).astype(jnp.int32)
    noise_before = jnp.cumsum(ends - begins, dtype=jnp.int32) - (ends - begins)
    read_marks = mode + begins - noise_before + span * in_place
    target_marks = layout.bar + noise_before + span * marked

    has_noise = layout.spans > 0
    singles = [
        (mode > 0, jnp.zeros_like(mode)),
        (has_noise & (header[k.INPUT_END] >= 0), layout.bar - 1),
        (has_noise & (header[k.FINAL_SENTINEL] != 0), layout.slots - 1),
    ]
    control = jnp.concatenate(
        [
            jnp.where(live & (in_place > 0), read_marks, max_slots),
            jnp.where(live & (marked > 0), target_marks, max_slots),
            jnp.stack([jnp.where(there, slot, max_slots) for there, slot in singles]),
        ]
    )

    # A run of tokens is copied from its place shifted; each slot's shift is the sum of the changes of shift before it.
    run_slots = jnp.concatenate([read_marks + in_place, target_marks + marked])
    shifts = jnp.concatenate([ends, begins]) - run_slots
    changes = jnp.diff(shifts, prepend=-mode)
    # The first target follows the last run of the inputs, which is not the last of S.
    last_read = shifts[jnp.maximum(layout.spans - 1, 0)]
    changes = changes.at[room].set(shifts[room] - last_read)
    starts = jnp.where(jnp.concatenate([live, live]), run_slots, max_slots)
    by_slot = jnp.zeros(max_slots, jnp.int32).at[starts].add(changes, mode="drop")
    source = jnp.arange(max_slots, dtype=jnp.int32) - mode + jnp.cumsum(by_slot, dtype=jnp.int32)
    return Places(source, control)
