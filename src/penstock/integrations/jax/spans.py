"""Which tokens are noise: the draws of `penstock.Denoise` in 32-bit integers, all of a document at once.

The compiled writer draws a set of cuts one after another (Floyd's algorithm): draw i adds its number, or, if the set
has that number, the largest that draw i may give. Here it is first said of each draw whether an earlier one drew the
same, and then the only other way to a collision, a number that an earlier collision has added, is followed for all
draws at once, twice as far in each round.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from penstock.integrations.jax.philox import below, random_words
from penstock.integrations.jax.settings import DenoiseSettings
from penstock.objectives import _denoise_kernels as k


class Layout(NamedTuple):
    """How one document will be written; scalars int32 but for `task`."""

    task: jax.Array
    """int32 [8]: the line of the chosen task."""
    noise: jax.Array
    """Tokens that are taken out."""
    whole_spans: jax.Array
    """In so many spans."""
    spans: jax.Array
    """The same, where a span that the roll splits counts as two."""
    offset: jax.Array
    """Of the roll, in [0, length)."""
    bar: jax.Array
    """Slots before the targets."""
    slots: jax.Array
    """All slots."""


def share_of(number: jax.Array, numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """number * numerator / denominator to the nearest integer, halves to the even one; int32.

    Numbers are up to 2^22 and shares up to 1, in thousandths at most, so products stay below 2^32.
    """
    product, denominator = number.astype(jnp.uint32) * numerator.astype(jnp.uint32), denominator.astype(jnp.uint32)
    down = product // denominator
    twice = 2 * (product - down * denominator)
    up = (twice > denominator) | ((twice == denominator) & (down & 1 == 1))
    return (down + up.astype(jnp.uint32)).astype(jnp.int32)


def lay_out(settings: DenoiseSettings, length: jax.Array, key: jax.Array) -> Layout:
    """The task of a document and the length of what is written of it; constant time."""
    words = random_words(key, k.DECIDE, 2)
    header, task = settings.header, settings.tasks[jnp.sum(words[0] >= settings.thresholds)]
    is_spans, is_prefix = task[k.TASK_KIND] == k.SPANS, task[k.TASK_KIND] == k.PREFIX
    offset = below(words[1], length)
    share = jnp.clip(share_of(length, task[k.RATE_NUMERATOR], task[k.RATE_DENOMINATOR]), 1, length - 1)
    pivot = 1 + below(words[1], length - 1)
    noise = jnp.where(is_prefix & (task[k.RATE_NUMERATOR] == 0), length - pivot, share)
    whole_spans = jnp.maximum(share_of(noise, task[k.MEAN_DENOMINATOR], task[k.MEAN_NUMERATOR]), 1)
    whole_spans = jnp.where(is_prefix, 1, jnp.minimum(whole_spans, jnp.minimum(noise, length - noise)))
    has_noise = (length >= 2) & (is_spans | is_prefix)
    noise, whole_spans = jnp.where(has_noise, noise, 0), jnp.where(has_noise, whole_spans, 0)
    split = is_spans & (header[k.ROLL] != 0) & (offset < noise - whole_spans)
    spans = whole_spans + split.astype(jnp.int32)
    mode, input_end = (task[k.MODE] >= 0).astype(jnp.int32), (header[k.INPUT_END] >= 0).astype(jnp.int32)
    in_place = jnp.where(is_spans, spans, 0)
    bar = mode + length - noise + jnp.where(has_noise, in_place + input_end, 0)
    marks = jnp.where(is_spans, spans, task[k.SENTINEL])
    slots = bar + noise + jnp.where(has_noise, marks + header[k.FINAL_SENTINEL], 0)
    return Layout(task, noise, whole_spans, spans, offset, bar, slots)


def draw_ends(total: jax.Array, parts: jax.Array, purpose: Any, key: jax.Array, room: int, limit: int) -> jax.Array:
    """int32 [room]: the ascending ends of `parts` positive parts of `total`, all ways alike; `total` from there on.

    Args:
        total: At most `limit`, static.
        parts: At most `room`, static.
        purpose: Of the random words.
        key: uint32 [2].
        room: See above.
        limit: See above.
    """
    draw = jnp.arange(room, dtype=jnp.int32)
    cuts = parts - 1
    live = draw < cuts
    first_last = total - 1 - cuts
    last = first_last + draw
    drawn = below(random_words(key, purpose, room), last + 1)
    first = jnp.full(limit, room, jnp.int32).at[jnp.where(live, drawn, limit)].min(draw, mode="drop")
    collides = live & (first[jnp.clip(drawn, 0, limit - 1)] < draw)
    # A number from first_last on may have been added by the collision of that draw; who asks nobody asks itself.
    asked = jnp.where(live & (drawn >= first_last), drawn - first_last, draw)
    # A loop, not as many rounds in a row: XLA would fuse those, and compute the first once for every use in later ones.
    collides, asked = jax.lax.while_loop(_asks_on, _ask_on, (collides, asked))
    collides = collides | collides[asked]
    return 1 + jnp.sort(jnp.where(live, jnp.where(collides, last, drawn), total - 1))


def _asks_on(state: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Whether somebody asks one who asks another."""
    _, asked = state
    return jnp.any(asked != asked[asked])


def _ask_on(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Take over the answer so far of whom one asks, and ask whom that one asks."""
    collides, asked = state
    return collides | collides[asked], asked[asked]


def find_cut(kept_ends: jax.Array, noise_ends: jax.Array, layout: Layout, length: jax.Array) -> jax.Array:
    """Where the circle is cut, in 1 … length: first come the cuts inside a span, then the others, ascending."""
    span = jnp.arange(len(kept_ends), dtype=jnp.int32)
    live = span < layout.whole_spans
    inside = layout.noise - layout.whole_spans
    number = jnp.sum(live & (noise_ends - (span + 1) <= layout.offset), dtype=jnp.int32)
    splitting = kept_ends[number] + layout.offset + number + 1
    rest = layout.offset - inside
    number = jnp.sum(live & (kept_ends + span <= rest), dtype=jnp.int32)
    between = 1 + rest + jnp.where(number > 0, noise_ends[number - 1] - number, 0)
    return jnp.where(layout.offset < inside, splitting, between)


def find_spans(
    settings: DenoiseSettings, layout: Layout, length: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(begins, ends), int32 [S] each: the spans of noise, ascending; `length` past their number."""
    room, limit = len(settings.sentinels), settings.max_length
    parts = layout.whole_spans
    totals, purposes = jnp.stack([length - layout.noise, layout.noise]), np.array([k.CUT_KEPT, k.CUT_NOISE], np.uint32)
    draw_both = jax.vmap(draw_ends, in_axes=(0, None, 0, None, None, None))
    kept_ends, noise_ends = draw_both(totals, parts, purposes, key, room, limit)
    is_spans = layout.task[k.TASK_KIND] == k.SPANS
    rolls = is_spans & (settings.header[k.ROLL] != 0)
    cut = jnp.where(rolls, find_cut(kept_ends, noise_ends, layout, length), length)
    span = jnp.arange(room, dtype=jnp.int32)
    all_ends = kept_ends + noise_ends
    # Those that reach beyond the cut come first, moved back; then the others, and the head of one that was split.
    number = span + jnp.sum((span < parts) & (all_ends <= cut), dtype=jnp.int32)
    turned = number >= parts
    number = jnp.clip(jnp.where(turned, number - parts, number), 0, room - 1)
    move = jnp.where(turned, length - cut, -cut)
    ends = jnp.minimum(all_ends[number] + move, length)
    begins = kept_ends[number] + jnp.where(number > 0, noise_ends[number - 1], 0) + move
    live = span < layout.spans
    return jnp.where(live, jnp.maximum(begins, 0), length), jnp.where(live, ends, length)
