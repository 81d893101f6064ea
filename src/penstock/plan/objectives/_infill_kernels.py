"""The draws and the rewriting of fill-in-the-middle: four words of one Philox block per document,
then three copies.

A program is int64 numbers: INFILL, the rates as multiples of 2^-32, the ids, whether the context is
trained, and the room of character splits. Measuring takes constant time; writing costs a copy and,
with weights, a second pass over them.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel, kernel_part
from penstock.core.randomness import below, philox
from penstock.core.vectors import copy_into

INFILL = 2
"""The kind of these programs."""
RATE, SPM_RATE, PREFIX, SUFFIX, MIDDLE, CONTEXT, ROOM = 1, 2, 3, 4, 5, 6, 7
"""Places in a program."""
CAUSAL, PSM, SPM = 0, 1, 2
"""Orders: the document as it is, prefix-suffix-middle, suffix-prefix-middle."""
DECIDE = 3
"""The purpose of the draws: word 0 whether, word 1 which order, words 2 and 3 the split points."""


@inline_kernel
def decide_infill(program, units, key):
    """Order and split points, 0 ≤ first ≤ second, of a document of `units` tokens (or characters).

    The points are drawn independently from the units + 1 gaps, both ends included, and sorted.
    """
    whether, which, word_1, word_2 = philox(np.uint64(0), np.uint64(DECIDE), key)
    if whether >= np.uint64(program[RATE]):
        return CAUSAL, np.int64(0), np.int64(0)
    gaps = np.uint64(units) + np.uint64(1)
    point_1, point_2 = np.int64(below(word_1, gaps)), np.int64(below(word_2, gaps))
    order = SPM if which < np.uint64(program[SPM_RATE]) else PSM
    return order, min(point_1, point_2), max(point_1, point_2)


@inline_kernel
def measure_infill(program, length, key):
    """(slots, prefix, reads) of a document; `prefix` is 0, `reads` counts leading tokens with
    weight 0.
    """
    order, first, second = decide_infill(program, length, key)
    if order == CAUSAL:
        return np.int64(length), np.int64(0), np.int64(0)
    slots = np.int64(length) + 3 + program[ROOM]
    reads = np.int64(0) if program[CONTEXT] else slots - (second - first)
    return slots, np.int64(0), reads


@kernel
def measure_each(program, lengths, keys, slots):
    """Slots of each document."""
    for i in range(len(lengths)):
        slots[i] = measure_infill(program, lengths[i], keys[i])[0]


@inline_kernel
def places_of(order, length, first, second):
    """Where prefix, suffix and middle begin in what is written; the suffix and middle tokens stand
    before theirs.

    In SPM the middle token stands before the prefix, which the middle follows.
    """
    if order == PSM:
        return np.int64(1), first + 2, first + length - second + 3
    return length - second + 3, np.int64(2), length - second + 3 + first


@inline_kernel
def heaviest(weights, begin, end):
    """The largest weight of [begin, end); of an empty section, that of the document."""
    if begin == end:
        begin, end = 0, len(weights)
    largest = weights[begin]
    for i in range(begin, end):
        largest = max(largest, weights[i])
    return largest


@inline_kernel
def _copy_sections(document, first, second, out, prefix, suffix, middle):
    """Copy the sections of [0, first), [first, second) and [second, …) to their places."""
    copy_into(document, out[prefix : prefix + first])
    copy_into(document[first:], out[middle : middle + second - first])
    copy_into(document[second:], out[suffix : suffix + len(document) - second])


@kernel_part
def write_infill(program, tokens, weights, key, out_tokens, out_weights):
    """Rewrite one document into exactly its measured slots; `weights` and `out_weights` may be
    empty: all count 1.
    """
    length = np.int64(len(tokens))
    order, first, second = decide_infill(program, length, key)
    if order == CAUSAL:
        out_tokens[:] = tokens
        out_weights[:] = weights
        return
    prefix, suffix, middle = places_of(order, length, first, second)
    middle_token = middle - 1 if order == PSM else prefix - 1
    out_tokens[0] = program[PREFIX]
    out_tokens[suffix - 1] = program[SUFFIX]
    out_tokens[middle_token] = program[MIDDLE]
    _copy_sections(tokens, first, second, out_tokens, prefix, suffix, middle)
    if len(weights) == 0:
        return
    _copy_sections(weights, first, second, out_weights, prefix, suffix, middle)
    # In SPM the first token opens nothing, and the middle token prefix and middle.
    opened = first if order == PSM else np.int64(0)
    out_weights[0] = heaviest(weights, 0, opened)
    out_weights[suffix - 1] = heaviest(weights, second, length)
    out_weights[middle_token] = heaviest(weights, opened, second)
    if not program[CONTEXT]:
        out_weights[:middle] = 0
