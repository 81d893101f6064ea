"""The draws and the rewriting of fill-in-the-middle: four words of one Philox block per document,
or per fragment of it, then three copies.

A program is int64 numbers: INFILL, the rates as multiples of 2^-32, the ids, whether the context is
trained, the room of character splits, and the settings of middles and fragments. Measuring takes
constant time; writing costs a copy and, with weights, a second pass over them.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel, kernel_part
from penstock.core.randomness import below, philox
from penstock.core.vectors import copy_into

INFILL = 2
"""The kind of these programs."""
RATE, SPM_RATE, PREFIX, SUFFIX, MIDDLE, CONTEXT, ROOM = 1, 2, 3, 4, 5, 6, 7
"""Places in a program."""
LONGEST_MIDDLE, FRAGMENT_RATE, FRAGMENT_TOKENS = 8, 9, 10
"""Places in a program, 0 where the setting is not given."""
CAUSAL, PSM, SPM = 0, 1, 2
"""Orders: the document as it is, prefix-suffix-middle, suffix-prefix-middle."""
DECIDE = 3
"""The purpose of the draws: word 0 whether, word 1 which order, words 2 and 3 the split points.
Block 0 is of the document, block i + 1 of its fragment i.
"""


@inline_kernel
def draw_cut(program, units, key, block, rate):
    """Order and split points, 0 ≤ first ≤ second, of `units` tokens (or characters).

    The points are drawn independently from the units + 1 gaps, both ends included, and sorted. With
    a longest middle, the middle's length is drawn first, then its place.
    """
    whether, which, word_1, word_2 = philox(np.uint64(block), np.uint64(DECIDE), key)
    if whether >= np.uint64(rate):
        return CAUSAL, np.int64(0), np.int64(0)
    order = SPM if which < np.uint64(program[SPM_RATE]) else PSM
    units, longest = np.int64(units), np.int64(program[LONGEST_MIDDLE])
    if longest > 0:
        size = np.int64(below(word_1, np.uint64(min(longest, units) + 1)))
        begin = np.int64(below(word_2, np.uint64(units - size + 1)))
        return order, begin, begin + size
    gaps = np.uint64(units + 1)
    point_1, point_2 = np.int64(below(word_1, gaps)), np.int64(below(word_2, gaps))
    return order, min(point_1, point_2), max(point_1, point_2)


@inline_kernel
def decide_infill(program, units, key):
    """Order and split points of a document; with fragments, the order says whether any is
    infilled.
    """
    return draw_cut(program, units, key, 0, program[RATE])


@inline_kernel
def reserved(program, length):
    """Slots that an infilled document of `length` tokens gets besides them: for one fragment, and
    one more for each FRAGMENT_TOKENS tokens.
    """
    each = np.int64(3) + program[ROOM]
    if program[FRAGMENT_TOKENS] == 0:
        return each
    return each * (1 + np.int64(length) // program[FRAGMENT_TOKENS])


@inline_kernel
def measure_infill(program, length, key):
    """(slots, prefix, reads) of a document; `prefix` is 0, `reads` counts leading tokens with
    weight 0.
    """
    order, first, second = decide_infill(program, length, key)
    if order == CAUSAL:
        return np.int64(length), np.int64(0), np.int64(0)
    slots = np.int64(length) + reserved(program, length)
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


@inline_kernel
def write_cut(program, tokens, weights, order, first, second, out_tokens, out_weights):
    """Rewrite tokens that are infilled into exactly three slots more than they are; `weights` and
    `out_weights` may be empty: all count 1.
    """
    length = np.int64(len(tokens))
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


@kernel_part
def write_infill(program, tokens, weights, key, out_tokens, out_weights):
    """Rewrite one document into exactly its measured slots; `weights` and `out_weights` may be
    empty: all count 1.
    """
    order, first, second = decide_infill(program, np.int64(len(tokens)), key)
    if order == CAUSAL:
        out_tokens[:] = tokens
        out_weights[:] = weights
        return
    write_cut(program, tokens, weights, order, first, second, out_tokens, out_weights)


@inline_kernel
def begins_with(tokens, start, data, offsets):
    """Whether tokens spell a text that begins with the bytes `start`.

    Args:
        tokens: int32 [n].
        start: uint8 [b], at least one.
        data: uint8, bytes of all ids, end to end.
        offsets: int64 [vocabulary + 1], where each id's bytes begin; an id without bytes ends the
            text.
    """
    place = 0
    for token in tokens:
        if token >= len(offsets) - 1 or offsets[token] == offsets[token + 1]:
            return False
        for byte in range(offsets[token], offsets[token + 1]):
            if data[byte] != start[place]:
                return False
            place += 1
            if place == len(start):
                return True
    return False


@kernel
def find_ignored(tokens, begins, ends, first_id, starts, start_ends, data, offsets, ignored):
    """Which fragments begin with a token, or with one of some texts.

    Args:
        tokens: int32 [n], the document.
        begins: int64 [f], where each fragment begins.
        ends: int64 [f].
        first_id: The token; −1: none.
        starts: uint8, the texts end to end.
        start_ends: int64, where each text ends.
        data: As for `begins_with`.
        offsets: As for `begins_with`.
        ignored: bool [f], written.
    """
    for i in range(len(begins)):
        fragment = tokens[begins[i] : ends[i]]
        ignored[i] = len(fragment) > 0 and fragment[0] == first_id
        begin = 0
        for end in start_ends:
            if begins_with(fragment, starts[begin:end], data, offsets):
                ignored[i] = True
            begin = end


@kernel
def draw_fragments(program, sizes, units, key, ignored, orders, cuts, words):
    """Order and split points of each fragment, and the word that its order was drawn with.

    A document without a separator is one fragment, and is drawn as a document is. An empty fragment
    stays as it is, and so does an ignored one.

    Args:
        program: See the module.
        sizes: int64 [f], tokens of each.
        units: int64 [f], its tokens, or its characters.
        key: uint64, the document's.
        ignored: bool [f].
        orders: int64 [f], written.
        cuts: int64 [f, 2], written.
        words: uint64 [f], written.
    """
    alone = len(sizes) == 1
    rate = program[RATE] if alone else program[FRAGMENT_RATE]
    for i in range(len(sizes)):
        block = 0 if alone else i + 1
        orders[i] = CAUSAL
        words[i] = philox(np.uint64(block), np.uint64(DECIDE), key)[0]
        if sizes[i] > 0 and not ignored[i]:
            orders[i], cuts[i, 0], cuts[i, 1] = draw_cut(program, units[i], key, block, rate)


@kernel
def write_fragments(program, tokens, weights, begins, ends, orders, cuts, out_tokens, out_weights):
    """Rewrite the fragments of a document, with the separators between them; gives the number of
    slots written.

    Args:
        program: See the module.
        tokens: int32 [n], the document.
        weights: float32 [n].
        begins: int64 [f], where each fragment begins.
        ends: int64 [f], where it ends: at its separator, or at the document's end.
        orders: int64 [f].
        cuts: int64 [f, 2].
        out_tokens: int32 [n + 3 f or more], written from the first slot on.
        out_weights: float32, as `out_tokens`.
    """
    place = np.int64(0)
    for i in range(len(begins)):
        begin, end = begins[i], ends[i]
        stop = place + end - begin
        if orders[i] == CAUSAL:
            copy_into(tokens[begin:end], out_tokens[place:stop])
            copy_into(weights[begin:end], out_weights[place:stop])
        else:
            stop += 3
            write_cut(
                program,
                tokens[begin:end],
                weights[begin:end],
                orders[i],
                cuts[i, 0],
                cuts[i, 1],
                out_tokens[place:stop],
                out_weights[place:stop],
            )
        if i + 1 < len(begins):
            out_tokens[stop], out_weights[stop] = tokens[end], weights[end]
            stop += 1
        place = stop
    return place
