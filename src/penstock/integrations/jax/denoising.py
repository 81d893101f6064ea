"""Denoising on the device: jitted functions with the result of `penstock.Denoise.write`, bit for
bit.

Which slot holds which token of the document, and where the control tokens go, is 32-bit integer
arithmetic on (length, key) with static shapes. A document is at the beginning of `max_length` slots
and comes with its length, so padding is recognised by position, and any ids may occur. `Denoiser`
adds the checks that only the host can make.
"""

from functools import partial
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from penstock.core.arrays import UInt32
from penstock.core.errors import ConfigError
from penstock.integrations.jax.spans import DenoiseSettings, Layout, find_spans, lay_out
from penstock.plan.objectives import _denoise_kernels as k
from penstock.plan.objectives.denoise import Denoise


class Places(NamedTuple):
    """Where the tokens of one document, written in M slots, come from."""

    source: jax.Array
    """int32 [M]: position in the document of each slot's token; undefined for control tokens and
    unused slots.
    """
    control: jax.Array
    """int32 [2 S + 3]: slots of the sentinels in the inputs, the sentinels in the targets, the mode
    token, the token that ends the inputs, and the final sentinel; M for an absent one.
    """


def place(
    settings: DenoiseSettings, layout: Layout, begins: jax.Array, ends: jax.Array, max_slots: int
) -> Places:
    """Find the places of a document with the spans `begins` … `ends`, int32 [S] each."""
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

    # A run of tokens is copied with a constant shift; each slot's shift is the sum of all changes
    # of shift before it.
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


class Denoised(NamedTuple):
    """One document as the model sees it, in M slots; with a leading axis under `jax.vmap`."""

    tokens: jax.Array
    """int32 [M]; 0 past `slots`."""
    weights: jax.Array
    """float32 [M]: how much each token counts as a target; 0 for input tokens, and past `slots`."""
    prefix: jax.Array
    """int32 []: length of the prefix in which tokens see each other in both directions."""
    slots: jax.Array
    """int32 []: number of used slots. Above M, the rest was cut off: compare, or let `Denoiser` do
    it.
    """


@partial(jax.jit, static_argnames="max_slots")
def denoise(
    tokens: Any,
    length: Any,
    key: Any,
    settings: DenoiseSettings,
    weights: Any = None,
    *,
    max_slots: int,
) -> Denoised:
    """Denoise one document; `denoise_batch` does several.

    Args:
        tokens: int32 [T], the document first; the rest is ignored.
        length: int32 [], tokens of the document, at most T (not checked here).
        key: uint32 [2], low and high half of the document's key; see `split_keys`.
        settings: From `DenoiseSettings.of`, for T tokens or more.
        weights: float32 [T], how much each token counts as a target, not below 0; None: 1.
        max_slots: M, static.

    Raises:
        ConfigError: The settings are for shorter documents than T.
    """
    if tokens.shape[0] > settings.max_length:
        raise ConfigError(
            f"denoise: room for documents of {tokens.shape[0]} tokens, but the settings have "
            f"sentinels for {settings.max_length}; make them with "
            f"DenoiseSettings.of(objective, {tokens.shape[0]})"
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
    """[M]: the values copied from the document [T], and those of the control tokens between
    them.
    """
    copied = document[jnp.clip(places.source, 0, len(document) - 1)]
    return copied.at[places.control].set(control, mode="drop")


def _control_tokens(settings: DenoiseSettings, layout: Layout) -> jax.Array:
    """int32 [2 S + 3]: ids in the order of `Places.control`."""
    sentinels, header = settings.sentinels, settings.header
    marked = (layout.task[k.TASK_KIND] == k.SPANS) | (layout.task[k.SENTINEL] != 0)
    final = sentinels[jnp.minimum(jnp.where(marked, layout.spans, 0), len(sentinels) - 1)]
    return jnp.concatenate(
        [sentinels, sentinels, jnp.stack([layout.task[k.MODE], header[k.INPUT_END], final])]
    )


def _control_weights(
    layout: Layout, weights: jax.Array, begins: jax.Array, ends: jax.Array
) -> jax.Array:
    """float32 [2 S + 3]: a sentinel has the largest weight of its span, the end tokens the largest
    of all spans.
    """
    place, room = jnp.arange(len(weights), dtype=jnp.int32), len(begins)
    # Unused spans begin at the document's end, so they only affect positions after it.
    begun = jnp.zeros(len(weights), jnp.int32).at[begins].add(1, mode="drop")
    span = jnp.cumsum(begun, dtype=jnp.int32) - 1
    in_span = (span >= 0) & (place < ends[span])
    heaviest = (
        jnp.zeros(room, jnp.float32).at[jnp.where(in_span, span, room)].max(weights, mode="drop")
    )
    of_all = heaviest.max()
    return jnp.concatenate(
        [heaviest, heaviest, jnp.stack([jnp.zeros((), jnp.float32), of_all, of_all])]
    )


def split_keys(keys: object) -> UInt32:
    """uint32 [n, 2], low and high half of 64-bit keys [n]; JAX without x64 has no type for them."""
    keys = np.asarray(keys, np.uint64)
    return np.stack([keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)], axis=-1).astype(
        np.uint32
    )


@partial(jax.jit, static_argnames="max_slots")
def denoise_batch(
    tokens: object,
    lengths: object,
    keys: object,
    settings: DenoiseSettings,
    weights: object = None,
    *,
    max_slots: int,
) -> Denoised:
    """`denoise` for [B, T] tokens and weights, [B] lengths and [B, 2] keys; all results have a
    leading axis [B].
    """
    each = jax.vmap(partial(denoise, max_slots=max_slots), in_axes=(0, 0, 0, None, 0))
    written: Denoised = each(tokens, lengths, keys, settings, weights)
    return written


@final
class Denoiser:
    """A `penstock.Denoise` on the device, for documents of up to `max_length` tokens; traced once
    per batch size.

    ```python
    denoiser = psj.Denoiser(objective, max_length=2048)     # with resolved names: objective.resolve(facts), or ids
    written = denoiser(tokens, lengths, keys)               # int32 [B, 2048], [B], 64-bit keys [B]
    ```

    Inside your own jitted function, call `denoise` or `denoise_batch` with its `settings` and
    `max_slots`, and check the returned `slots`.

    Args:
        objective: The objective, with resolved names.
        max_length: T, tokens of the longest document.
        max_slots: M, slots of the result; None: the most that a document of `max_length` can take.

    Raises:
        ConfigError: `max_length` is out of range, names are not resolved, or there are fewer
            sentinels than a document of `max_length` can need.
    """  # noqa: E501

    def __init__(
        self, objective: Denoise, *, max_length: int, max_slots: int | None = None
    ) -> None:
        self.objective, self.max_length = objective, max_length
        self.settings: DenoiseSettings = jax.device_put(DenoiseSettings.of(objective, max_length))
        self.max_slots = objective.worst(max_length)[0] if max_slots is None else max_slots

    def __call__(self, tokens: Any, lengths: Any, keys: Any, weights: Any = None) -> Denoised:
        """Denoise a batch.

        Args:
            tokens: int32 [B, max_length], each document first in its row; the rest is ignored.
            lengths: [B], tokens of each document, on the host.
            keys: uint64 [B], on the host.
            weights: float32 [B, max_length], how much each token counts as a target; None: 1.

        Raises:
            ConfigError: A document is longer than `max_length`, empty, or takes more than
                `max_slots`: names it.
        """
        lengths, keys = np.asarray(lengths, np.int64), np.asarray(keys, np.uint64)
        if np.shape(tokens) != (len(lengths), self.max_length) or keys.shape != lengths.shape:
            raise ConfigError(
                f"Denoiser: tokens are {list(np.shape(tokens))}, lengths "
                f"{list(lengths.shape)}, keys {list(keys.shape)}; expected: [B, "
                f"{self.max_length}], [B] and [B]"
            )
        self._refuse(
            lengths, (lengths < 1) | (lengths > self.max_length), "tokens", f"1 … {self.max_length}"
        )
        slots = self.objective.measure(lengths, keys)
        self._refuse(
            slots, slots > self.max_slots, "slots", f"at most {self.max_slots}; raise max_slots"
        )
        written: Denoised = denoise_batch(
            tokens,
            lengths.astype(np.int32),
            split_keys(keys),
            self.settings,
            weights,
            max_slots=self.max_slots,
        )
        return written

    def _refuse(self, numbers: Any, wrong: Any, what: str, expected: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ConfigError(
                f"Denoiser: document {first} of the batch has {numbers[first]} {what}; "
                f"expected: {expected}"
            )
