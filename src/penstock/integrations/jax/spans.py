"""Chooses the noise tokens of a document: the draws of `penstock.Denoise` in 32-bit integers, all
at once.

A denoiser's settings are a pytree of integers, so other settings of the same shapes need no new
trace. The random words are those of `penstock.core.randomness`: Philox4x32-10, here without 64-bit
integers.

The compiled writer draws a set of cuts one after another (Floyd's algorithm): draw i adds its
number or, if the set already has it, the largest number that draw i may return. Here, all draws are
resolved at once. A draw collides if an earlier draw has the same number; or if an earlier collision
has added that number, a chain of references that is followed twice as far in each round.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from penstock.core.errors import ConfigError
from penstock.plan.objectives import _denoise_kernels as k
from penstock.plan.objectives._span_kernels import CUT_KEPT, CUT_NOISE, DECIDE
from penstock.plan.objectives.denoise import Denoise, check_capacity
from penstock.plan.objectives.denoise_tasks import LONGEST

_MULTIPLIERS = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW, _HALF = np.uint32(0xFFFF), np.uint32(16)


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenoiseSettings:
    """What `denoise` needs of a `penstock.Denoise`, for documents of up to `max_length` tokens: K
    tasks, S sentinels.

    Everything except `max_length` is data to a jitted function. The arrays are parts of the
    compiled writer's program; the constants of `penstock.plan.objectives._denoise_kernels` name
    their columns.
    """

    max_length: int = field(metadata={"static": True})
    """Tokens of the longest document; a longer one could need more sentinels."""
    header: Any
    """int32 [8]: settings of all tasks."""
    thresholds: Any
    """uint32 [K − 1]: the number of thresholds that the first random word reaches is the number of
    the task.
    """
    tasks: Any
    """int32 [K, 8]."""
    sentinels: Any
    """int32 [S]: the most that a document of `max_length` can need, at least one."""

    @classmethod
    def of(cls, objective: Denoise, max_length: int) -> "DenoiseSettings":
        """The settings of an objective with resolved names, as NumPy arrays.

        Raises:
            ConfigError: `max_length` is out of range, names are not resolved, or there are fewer
                sentinels than a document of `max_length` can need.
        """
        if not 1 <= max_length <= LONGEST:
            raise ConfigError(
                f"{objective.name}: max_length is {max_length:,}; expected: 1 … {LONGEST:,}"
            )
        program = objective.program()
        check_capacity(objective, max_length, objective.name)
        needed = objective.worst(max_length)[1]
        header, tasks, sentinels = np.split(
            program, [k.HEADER, k.HEADER + k.TASK_FIELDS * len(objective.tasks)]
        )
        tasks = tasks.reshape(-1, k.TASK_FIELDS)
        # The last task ends at 2^32, which no word reaches.
        thresholds = tasks[:-1, k.CUMULATIVE].astype(np.uint32)
        return cls(
            max_length=max_length,
            header=header.astype(np.int32),
            thresholds=thresholds,
            tasks=np.where(np.arange(k.TASK_FIELDS) == k.CUMULATIVE, 0, tasks).astype(np.int32),
            sentinels=np.resize(sentinels, needed).astype(np.int32)
            if needed
            else np.zeros(1, np.int32),
        )


def multiply_high(a: jax.Array, b: jax.Array | np.uint32) -> jax.Array:
    """The upper 32 bits of a * b, uint32, from four products of 16-bit halves."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low, cross_1, cross_2 = a_low * b_low, a_high * b_low, a_low * b_high
    carry = ((low >> _HALF) + (cross_1 & _LOW) + (cross_2 & _LOW)) >> _HALF
    return a_high * b_high + (cross_1 >> _HALF) + (cross_2 >> _HALF) + carry


def random_words(key: jax.Array, purpose: object, count: int) -> jax.Array:
    """Words 0 … count − 1 of a purpose, uint32 [count]: lane i % 4 of block i // 4 (Salmon et al.
    2011).

    Args:
        key: uint32 [2], low and high half of a document's key.
        purpose: Second word of the counter.
        count: Number of words, static.
    """
    block = jnp.arange(-(-count // 4), dtype=jnp.uint32)
    zero = jnp.zeros_like(block)
    start = (block, zero + jnp.asarray(purpose, jnp.uint32), zero, zero, key[0], key[1])
    # A loop, not ten unrolled rounds: XLA would fuse those, and compute the first again for every
    # use in later ones.
    words = jax.lax.fori_loop(0, 10, _round, start)[:4]
    return jnp.stack(words, axis=-1).reshape(-1)[:count]


def _round(_: object, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    c0, c1, c2, c3, k0, k1 = state
    high_0, low_0 = multiply_high(c0, _MULTIPLIERS[0]), c0 * _MULTIPLIERS[0]
    high_1, low_1 = multiply_high(c2, _MULTIPLIERS[1]), c2 * _MULTIPLIERS[1]
    return high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0, k0 + _WEYL[0], k1 + _WEYL[1]


def below(word: jax.Array, bound: jax.Array) -> jax.Array:
    """Map each word to an int32 in [0, bound): (word * bound) >> 32; 0 if bound is not positive."""
    return multiply_high(word, jnp.maximum(bound, 0).astype(jnp.uint32)).astype(jnp.int32)


class Layout(NamedTuple):
    """How one document will be written; all fields except `task` are int32 scalars."""

    task: jax.Array
    """int32 [8]: the row of the chosen task."""
    noise: jax.Array
    """Number of tokens taken out."""
    whole_spans: jax.Array
    """Number of spans."""
    spans: jax.Array
    """Number of spans, if a span that the roll splits counts as two."""
    offset: jax.Array
    """Offset of the roll, in [0, length)."""
    bar: jax.Array
    """Number of slots before the targets."""
    slots: jax.Array
    """Number of all slots."""


def share_of(number: jax.Array, numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """number * numerator / denominator rounded to the nearest integer, halves to even; int32.

    Numbers are at most 2^22, and shares at most 1 with denominators up to 1,000, so products stay
    below 2^32.
    """
    product, denominator = (
        number.astype(jnp.uint32) * numerator.astype(jnp.uint32),
        denominator.astype(jnp.uint32),
    )
    down = product // denominator
    twice = 2 * (product - down * denominator)
    up = (twice > denominator) | ((twice == denominator) & (down & 1 == 1))
    return (down + up.astype(jnp.uint32)).astype(jnp.int32)


def lay_out(settings: DenoiseSettings, length: jax.Array, key: jax.Array) -> Layout:
    """Choose the task of a document, and compute the length of its result; constant time."""
    words = random_words(key, DECIDE, 2)
    header, task = settings.header, settings.tasks[jnp.sum(words[0] >= settings.thresholds)]
    is_spans, is_prefix = task[k.TASK_KIND] == k.SPANS, task[k.TASK_KIND] == k.PREFIX
    offset = below(words[1], length)
    share = jnp.clip(
        share_of(length, task[k.RATE_NUMERATOR], task[k.RATE_DENOMINATOR]), 1, length - 1
    )
    pivot = 1 + below(words[1], length - 1)
    noise = jnp.where(is_prefix & (task[k.RATE_NUMERATOR] == 0), length - pivot, share)
    whole_spans = jnp.maximum(share_of(noise, task[k.MEAN_DENOMINATOR], task[k.MEAN_NUMERATOR]), 1)
    whole_spans = jnp.where(
        is_prefix, 1, jnp.minimum(whole_spans, jnp.minimum(noise, length - noise))
    )
    has_noise = (length >= 2) & (is_spans | is_prefix)
    noise, whole_spans = jnp.where(has_noise, noise, 0), jnp.where(has_noise, whole_spans, 0)
    split = is_spans & (header[k.ROLL] != 0) & (offset < noise - whole_spans)
    spans = whole_spans + split.astype(jnp.int32)
    mode, input_end = (
        (task[k.MODE] >= 0).astype(jnp.int32),
        (header[k.INPUT_END] >= 0).astype(jnp.int32),
    )
    in_place = jnp.where(is_spans, spans, 0)
    bar = mode + length - noise + jnp.where(has_noise, in_place + input_end, 0)
    marks = jnp.where(is_spans, spans, task[k.SENTINEL])
    slots = bar + noise + jnp.where(has_noise, marks + header[k.FINAL_SENTINEL], 0)
    return Layout(task, noise, whole_spans, spans, offset, bar, slots)


def draw_ends(
    total: jax.Array, parts: jax.Array, purpose: object, key: jax.Array, room: int, limit: int
) -> jax.Array:
    """int32 [room]: ascending ends of `parts` positive parts of `total`, drawn uniformly; `total`
    after the last.

    Args:
        total: At most `limit`.
        parts: At most `room`.
        purpose: Purpose of the random words.
        key: uint32 [2].
        room: Length of the result, static.
        limit: Bound of `total`, static.
    """
    draw = jnp.arange(room, dtype=jnp.int32)
    cuts = parts - 1
    live = draw < cuts
    first_last = total - 1 - cuts
    last = first_last + draw
    drawn = below(random_words(key, purpose, room), last + 1)
    first = (
        jnp.full(limit, room, jnp.int32).at[jnp.where(live, drawn, limit)].min(draw, mode="drop")
    )
    collides = live & (first[jnp.clip(drawn, 0, limit - 1)] < draw)
    # A number from first_last on may have been added by the collision of an earlier draw: point to
    # that draw.
    pointer = jnp.where(live & (drawn >= first_last), drawn - first_last, draw)
    # A loop, not unrolled rounds: XLA would fuse those, and compute the first again for every use
    # in later ones.
    collides, pointer = jax.lax.while_loop(_has_chains, _follow_pointers, (collides, pointer))
    collides = collides | collides[pointer]
    return 1 + jnp.sort(jnp.where(live, jnp.where(collides, last, drawn), total - 1))


def _has_chains(state: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Whether some draw points to a draw that points to another."""
    _, pointer = state
    return jnp.any(pointer != pointer[pointer])


def _follow_pointers(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Inherit the collision of the draw pointed to, and point to where that draw points."""
    collides, pointer = state
    return collides | collides[pointer], pointer[pointer]


def find_cut(
    kept_ends: jax.Array, noise_ends: jax.Array, layout: Layout, length: jax.Array
) -> jax.Array:
    """Where the circle is cut, in 1 … length: low offsets cut inside a span, the others between
    spans, ascending.
    """
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
    """(begins, ends), int32 [S] each: the spans of noise, ascending; `length` for unused spans."""
    room, limit = len(settings.sentinels), settings.max_length
    parts = layout.whole_spans
    totals, purposes = (
        jnp.stack([length - layout.noise, layout.noise]),
        np.array([CUT_KEPT, CUT_NOISE], np.uint32),
    )
    draw_both = jax.vmap(draw_ends, in_axes=(0, None, 0, None, None, None))
    kept_ends, noise_ends = draw_both(totals, parts, purposes, key, room, limit)
    is_spans = layout.task[k.TASK_KIND] == k.SPANS
    rolls = is_spans & (settings.header[k.ROLL] != 0)
    cut = jnp.where(rolls, find_cut(kept_ends, noise_ends, layout, length), length)
    span = jnp.arange(room, dtype=jnp.int32)
    all_ends = kept_ends + noise_ends
    # Spans beyond the cut come first, moved back; then the others, then the head of a split span.
    number = span + jnp.sum((span < parts) & (all_ends <= cut), dtype=jnp.int32)
    turned = number >= parts
    number = jnp.clip(jnp.where(turned, number - parts, number), 0, room - 1)
    move = jnp.where(turned, length - cut, -cut)
    ends = jnp.minimum(all_ends[number] + move, length)
    begins = kept_ends[number] + jnp.where(number > 0, noise_ends[number - 1], 0) + move
    live = span < layout.spans
    return jnp.where(live, jnp.maximum(begins, 0), length), jnp.where(live, ends, length)
