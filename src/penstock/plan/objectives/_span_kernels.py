"""Kernels that draw which tokens of a document are noise: spans of a uniform composition, on a
circle.

Random words: purpose 0 decides (word 0 the task, word 1 the roll or the pivot), purpose 1 cuts what
is kept into parts, purpose 2 cuts the noise.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic

from penstock.core.compiled import inline_kernel, trailing_zeros, view_u32, view_u64
from penstock.core.randomness import LOW_32, below, philox_rounds
from penstock.core.vectors import fill_with

DECIDE, CUT_KEPT, CUT_NOISE = 0, 1, 2
"""Purposes of random words."""

CHUNK_BLOCKS = 64
"""Blocks of random words that are drawn at once."""

SPARE_ENDS = 8
"""Entries that listing ends may write too many."""


@inline_kernel
def draw_words(first_block, blocks, purpose, key, words):
    """Random words of `blocks` blocks, by lane: word j of block i goes to j * CHUNK_BLOCKS + i.
    Compiles to vectors.
    """
    zero = np.uint64(0)
    low, high = key & LOW_32, key >> np.uint64(32)
    for i in range(blocks):
        a, b, c, d = philox_rounds(
            np.uint64(first_block + i), np.uint64(purpose), zero, zero, low, high
        )
        words[i] = a
        words[i + CHUNK_BLOCKS] = b
        words[i + 2 * CHUNK_BLOCKS] = c
        words[i + 3 * CHUNK_BLOCKS] = d


@inline_kernel
def choose_gap(chosen, last, word):
    """One step of Floyd's algorithm in a bitset: a gap in [0, last], or `last` where that one is
    chosen already.

    Both places are written, so that no address waits for what was read: a third of the time of
    writing to the one.
    """
    one, six, low = np.uint64(1), np.uint64(6), np.uint64(63)
    drawn = below(word, last + one)
    there = chosen[drawn >> six]
    chosen[drawn >> six] = there | (one << (drawn & low))
    chosen[last >> six] |= ((there >> (drawn & low)) & one) << (last & low)


@inline_kernel
def choose_gaps(kept, noise, cuts, key, words, kept_gaps, noise_gaps):
    """Uniform sets of `cuts` among the gaps between the kept tokens and among those between the
    noise tokens.

    Floyd's algorithm (Bentley and Floyd 1987). Each step waits for the one before it, so the two go
    side by side.
    """
    for begin in range(0, cuts, 4 * CHUNK_BLOCKS):
        size = min(cuts - begin, 4 * CHUNK_BLOCKS)
        # Whole vectors: a remainder would cost more than the blocks that are not needed.
        blocks = (((size + 3) >> 2) + 7) & ~7
        draw_words(begin >> 2, blocks, CUT_KEPT, key, words[: 4 * CHUNK_BLOCKS])
        draw_words(begin >> 2, blocks, CUT_NOISE, key, words[4 * CHUNK_BLOCKS :])
        for i in range(size):
            place = (i & 3) * CHUNK_BLOCKS + (i >> 2)
            choose_gap(kept_gaps, np.uint64(kept - 1 - cuts + begin + i), words[place])
            choose_gap(
                noise_gaps, np.uint64(noise - 1 - cuts + begin + i), words[4 * CHUNK_BLOCKS + place]
            )


@intrinsic
def popcount(typing_context, value):
    """Number of set bits of a uint64 (one instruction), int64."""

    def codegen(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), codegen


@inline_kernel
def list_ends(gaps, total, ends):
    """Ends of the parts that `total` is cut into, ascending; may write eight entries too many.

    Eight bits at once, whether they are set or not: the number of set bits in a word cannot be
    foreseen.
    """
    found = 0
    for place in range((total + 62) >> 6):
        bits = gaps[place]
        first = found
        found += popcount(bits)
        while first < found:
            for i in range(8):
                ends[first + i] = (place << 6) + np.int64(trailing_zeros(bits)) + 1
                bits &= bits - np.uint64(1)
            first += 8
    ends[found] = total


@inline_kernel
def find_cut(kept_ends, noise_ends, spans, offset):
    """The cut number `offset` of the circle, in 1..length: first those inside a span, then the
    others, ascending.

    The first noise_ends[-1] - spans numbers are the cuts with noise on both sides, which split a
    span.
    """
    inside = np.int64(noise_ends[spans - 1]) - spans
    low, high = 0, spans - 1
    if offset < inside:
        while low < high:
            middle = (low + high) >> 1
            if np.int64(noise_ends[middle]) - (middle + 1) > offset:
                high = middle
            else:
                low = middle + 1
        return np.int64(kept_ends[low]) + offset + low + 1
    offset -= inside
    while low < high:
        middle = (low + high) >> 1
        if np.int64(kept_ends[middle]) + middle + 1 > offset:
            high = middle
        else:
            low = middle + 1
    before = np.int64(noise_ends[low - 1]) if low > 0 else 0
    cut = offset - low + 1
    if cut > np.int64(kept_ends[low]):
        return np.int64(kept_ends[low]) + np.int64(noise_ends[low])
    return cut + before


@inline_kernel
def scratch_size(length, spans):
    """uint64 of working memory for one document: random words, two bitsets, two lists of ends."""
    return 4 * CHUNK_BLOCKS + 2 * ((length >> 6) + 1) + spans + 1 + SPARE_ENDS


@inline_kernel
def place_spans(roll, length, noise, spans, word, key, scratch, begins, ends):
    """Draw the spans of noise of one document, ascending, into `begins` and `ends`, uint32; gives
    their number.

    The mask is drawn on a circle that begins with kept tokens. The document begins at `cut` of it:
    the spans after it come first, those before it a whole length later.
    """
    bitset = (length >> 6) + 1
    memory = scratch.ctypes.data
    words = view_u32(np.uint64(memory), 8 * CHUNK_BLOCKS)
    memory += 32 * CHUNK_BLOCKS
    kept_gaps = view_u64(np.uint64(memory), bitset)
    noise_gaps = view_u64(np.uint64(memory + 8 * bitset), bitset)
    memory += 16 * bitset
    kept_ends = view_u32(np.uint64(memory), spans + SPARE_ENDS)
    noise_ends = view_u32(np.uint64(memory + 4 * (spans + SPARE_ENDS)), spans + SPARE_ENDS)
    fill_with(kept_gaps, 0)
    fill_with(noise_gaps, 0)
    choose_gaps(length - noise, noise, spans - 1, key, words, kept_gaps, noise_gaps)
    list_ends(kept_gaps, length - noise, kept_ends)
    list_ends(noise_gaps, noise, noise_ends)
    if not roll:
        return turn_spans(kept_ends, noise_ends, spans, 0, length, begins, ends)
    cut = find_cut(kept_ends, noise_ends, spans, np.int64(below(word, np.uint64(length))))
    return turn_spans(kept_ends, noise_ends, spans, cut % length, length, begins, ends)


@inline_kernel
def shift_spans(kept_ends, noise_ends, shift, begins, ends):
    """Begins and ends of spans 1, 2, … of a circle, plus `shift` (uint32, wrapping around).
    Compiles to vectors.
    """
    for i in range(len(kept_ends) - 1):
        begins[i] = kept_ends[i + 1] + noise_ends[i] + shift
        ends[i] = kept_ends[i + 1] + noise_ends[i + 1] + shift


@inline_kernel
def turn_spans(kept_ends, noise_ends, spans, shift, length, begins, ends):
    """Spans in the order of a document that begins at `shift` of the circle; gives their number."""
    first = 0
    while np.int64(kept_ends[first]) + np.int64(noise_ends[first]) <= shift:
        first += 1
    turn = length - shift
    found = spans - first
    shift_spans(
        kept_ends[first:spans], noise_ends[first:spans], np.uint32(-shift), begins[1:], ends[1:]
    )
    before = np.int64(noise_ends[first - 1]) if first > 0 else np.int64(0)
    begins[0] = max(np.int64(kept_ends[first]) + before - shift, 0)
    ends[0] = np.int64(kept_ends[first]) + np.int64(noise_ends[first]) - shift
    if first > 0:
        begins[found] = np.int64(kept_ends[0]) + turn
        ends[found] = np.int64(kept_ends[0]) + np.int64(noise_ends[0]) + turn
        shift_spans(
            kept_ends[:first],
            noise_ends[:first],
            np.uint32(turn),
            begins[found + 1 :],
            ends[found + 1 :],
        )
    # What is left of the span that the document begins in, or the kept tokens before it.
    begin = np.int64(kept_ends[first]) + before + turn
    if begin >= length:
        return spans
    begins[spans] = begin
    ends[spans] = length
    return spans + 1
