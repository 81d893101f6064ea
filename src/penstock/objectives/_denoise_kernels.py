"""Kernels of denoising: the draws, the length of what is written, and the writing of one document.

All lengths and masks are integer arithmetic on (program, length, key); only loss weights are floats. A length takes
constant time. Writing costs two random words a span, Floyd's sampling in a bitset, and one copy of each token.

Random words: purpose 0 decides (word 0 the task, word 1 the roll or the pivot), purpose 1 cuts what is kept into parts,
purpose 2 cuts the noise.

A **program** is int64: the header, then `TASK_FIELDS` numbers for each task, then the ids of the sentinels.
"""

import numpy as np

from penstock.compiled import inline_kernel, kernel, trailing_zeros
from penstock.randomness import below, philox

KIND = 1
"""What program[0] says of a denoiser."""
NUM_TASKS, ROLL, FINAL_SENTINEL, INPUT_END, BIDIRECTIONAL, TRAIN_ON_INPUTS, NUM_SENTINELS = 1, 2, 3, 4, 5, 6, 7
"""Places in the header. INPUT_END is an id, or -1 for none; the others are counts, or 0 and 1."""
HEADER = 8
CUMULATIVE, TASK_KIND, MODE, RATE_NUMERATOR, RATE_DENOMINATOR, MEAN_NUMERATOR, MEAN_DENOMINATOR, SENTINEL = range(8)
"""Places in a task. CUMULATIVE is its upper end on the scale of 2^32; MODE an id or -1; a RATE_NUMERATOR of 0 (prefixes
only) draws the pivot; SENTINEL is 1 where one stands before the continuation of a prefix."""
TASK_FIELDS = 8
CAUSAL, SPANS, PREFIX = 0, 1, 2
"""Kinds of tasks."""
DECIDE, CUT_KEPT, CUT_NOISE = 0, 1, 2
"""Purposes of random words."""


@inline_kernel
def round_half_even(numerator, denominator):
    """numerator / denominator to the nearest integer, halves to the even one; both above or at 0."""
    down = numerator // denominator
    twice = 2 * (numerator - down * denominator)
    return down + ((twice > denominator) | ((twice == denominator) & (down & 1 == 1)))


@inline_kernel
def count_noise(program, task, length):
    """(noise tokens, spans) of span corruption on `length` >= 2 tokens, by the published rounding.

    Never more spans than kept tokens, so that a composition exists: a guard that the published code lacks.
    """
    noise = round_half_even(length * program[task + RATE_NUMERATOR], program[task + RATE_DENOMINATOR])
    noise = min(max(noise, 1), length - 1)
    spans = round_half_even(noise * program[task + MEAN_DENOMINATOR], program[task + MEAN_NUMERATOR])
    return noise, min(max(spans, 1), noise, length - noise)


@inline_kernel
def choose(program, length, key):
    """(place of the task in the program, noise tokens, spans without a split, word 1 of the decision)."""
    words = philox(np.uint64(DECIDE), np.uint64(0), np.uint64(key))
    word = np.int64(words[0])
    task = np.int64(HEADER)
    while word >= program[task + CUMULATIVE]:
        task += TASK_FIELDS
    kind = program[task + TASK_KIND]
    noise = np.int64(0)
    spans = np.int64(0)
    if length >= 2 and kind == SPANS:
        noise, spans = count_noise(program, task, length)
    elif length >= 2 and kind == PREFIX:
        spans = np.int64(1)
        if program[task + RATE_NUMERATOR] > 0:
            noise = round_half_even(length * program[task + RATE_NUMERATOR], program[task + RATE_DENOMINATOR])
            noise = min(max(noise, 1), length - 1)
        else:
            noise = length - 1 - np.int64(below(words[1], np.uint64(length - 1)))
    return task, noise, spans, words[1]


@inline_kernel
def lay_out(program, task, length, noise, spans, word):
    """(slots, place of the bar between inputs and targets, spans with a split) of one document."""
    kind = program[task + TASK_KIND]
    mode = np.int64(program[task + MODE] >= 0)
    if kind == CAUSAL:
        return mode + length, mode, spans
    if length < 2:
        return mode + length, mode + length, spans
    bar = mode + length - noise + np.int64(program[INPUT_END] >= 0)
    sentinels = program[task + SENTINEL]
    if kind == SPANS:
        if program[ROLL] != 0:
            spans += np.int64(np.int64(below(word, np.uint64(length))) < noise - spans)
        bar += spans
        sentinels = spans
    return bar + sentinels + noise + program[FINAL_SENTINEL], bar, spans


@inline_kernel
def measure_denoise(program, length, key):
    """(slots, prefix, reads) of one document: constant time.

    `prefix` leading tokens see each other; `reads` leading tokens are no targets; the slots after them are.
    """
    task, noise, spans, word = choose(program, length, key)
    slots, bar, spans = lay_out(program, task, length, noise, spans, word)
    reads = bar
    if program[TRAIN_ON_INPUTS] != 0:
        reads = np.int64(program[task + MODE] >= 0)
    prefix = np.int64(0)
    if program[BIDIRECTIONAL] != 0 and program[task + TASK_KIND] != CAUSAL:
        prefix = bar
    return slots, prefix, reads


@kernel
def draw_ends(total, purpose, key, ends):
    """Cut `total` into len(ends) positive parts, all compositions alike; ascending ends, the last is `total`.

    A uniform set of cuts among the total - 1 gaps, by Floyd's algorithm (Bentley and Floyd 1987), in a bitset.
    """
    cuts = len(ends) - 1
    ends[cuts] = total
    if cuts == 0:
        return
    chosen = np.zeros((total + 62) >> 6, np.uint64)
    one = np.uint64(1)
    for i in range(cuts):
        if i & 3 == 0:
            words = philox(np.uint64(i >> 2), np.uint64(purpose), np.uint64(key))
        word = words[0] if i & 3 == 0 else words[1] if i & 3 == 1 else words[2] if i & 3 == 2 else words[3]
        last = np.uint64(total - 1 - cuts + i)
        drawn = below(word, last + one)
        taken = (chosen[drawn >> np.uint64(6)] >> (drawn & np.uint64(63))) & one
        if taken:
            drawn = last
        chosen[drawn >> np.uint64(6)] |= one << (drawn & np.uint64(63))
    found = 0
    for place in range(len(chosen)):
        bits = chosen[place]
        while bits != np.uint64(0):
            ends[found] = (place << 6) + np.int64(trailing_zeros(bits)) + 1
            found += 1
            bits &= bits - one


@inline_kernel
def find_cut(kept_ends, noise_ends, offset):
    """The cut number `offset` of the circle, in 1..length: first those inside a span, then the others, ascending.

    The first noise_ends[-1] - spans numbers are the cuts with noise on both sides, which split a span.
    """
    spans = len(kept_ends)
    inside = noise_ends[spans - 1] - spans
    low, high = 0, spans - 1
    if offset < inside:
        while low < high:
            middle = (low + high) >> 1
            if noise_ends[middle] - (middle + 1) > offset:
                high = middle
            else:
                low = middle + 1
        return kept_ends[low] + offset + low + 1
    offset -= inside
    while low < high:
        middle = (low + high) >> 1
        if kept_ends[middle] + middle + 1 > offset:
            high = middle
        else:
            low = middle + 1
    before = noise_ends[low - 1] if low > 0 else 0
    cut = offset - low + 1
    if cut > kept_ends[low]:
        return kept_ends[low] + noise_ends[low]
    return cut + before


@kernel
def find_spans(program, length, key, begins, ends):
    """The spans of noise of one document, ascending, into int32 arrays with room for one more; gives their number.

    A causal task has none; a prefix has one, its continuation.
    """
    task, noise, spans, word = choose(program, length, key)
    kind = program[task + TASK_KIND]
    if length < 2 or kind == CAUSAL:
        return 0
    if kind == PREFIX:
        begins[0] = length - noise
        ends[0] = length
        return 1
    kept_ends = np.empty(spans, np.int32)
    noise_ends = np.empty(spans, np.int32)
    draw_ends(length - noise, CUT_KEPT, key, kept_ends)
    draw_ends(noise, CUT_NOISE, key, noise_ends)
    cut = length
    if program[ROLL] != 0:
        cut = find_cut(kept_ends, noise_ends, np.int64(below(word, np.uint64(length))))
    # The document begins at `cut` of the circle: spans after it come first, those before it a whole length later.
    shift = cut if cut < length else 0
    first = 0
    while kept_ends[first] + noise_ends[first] <= shift:
        first += 1
    found = 0
    for k in range(spans + 1):
        span = first + k
        turn = -shift
        if span >= spans:
            span -= spans
            turn += length
        before = noise_ends[span - 1] if span > 0 else 0
        begin = max(kept_ends[span] + before + turn, 0)
        end = min(kept_ends[span] + noise_ends[span] + turn, length)
        if begin < end:
            begins[found] = begin
            ends[found] = end
            found += 1
    return found


@inline_kernel
def _heaviest(weights, begin, end):
    heaviest = np.float32(0)
    for i in range(begin, end):
        heaviest = max(heaviest, weights[i])
    return heaviest


@inline_kernel
def _copy(tokens, begin, end, out, at):
    for i in range(end - begin):
        out[at + i] = tokens[begin + i]


@kernel
def write_denoise(program, tokens, weights, key, out_tokens, out_weights):
    """Write one document: [mode] inputs [input end] | sentinel 0, span 0, sentinel 1, span 1, … [final sentinel].

    The outputs hold exactly the measured slots. With no weights, none are written.
    """
    length = len(tokens)
    task, noise, spans, word = choose(program, length, key)
    _, bar, spans = lay_out(program, task, length, noise, spans, word)
    begins = np.empty(spans + 1, np.int32)
    ends = np.empty(spans + 1, np.int32)
    find_spans(program, length, key, begins, ends)
    _write_tokens(program, task, tokens, begins[:spans], ends[:spans], bar, out_tokens)
    if len(weights) > 0:
        _write_weights(program, task, weights, begins[:spans], ends[:spans], bar, out_weights)


@inline_kernel
def _write_tokens(program, task, tokens, begins, ends, bar, out):
    sentinels = program[HEADER + TASK_FIELDS * program[NUM_TASKS] :]
    spans = len(begins)
    in_place = program[task + TASK_KIND] == SPANS
    marked = in_place or program[task + SENTINEL] != 0
    at = 0
    if program[task + MODE] >= 0:
        out[0] = program[task + MODE]
        at = 1
    behind = 0
    for span in range(spans):
        _copy(tokens, behind, begins[span], out, at)
        at += begins[span] - behind
        behind = ends[span]
        if in_place:
            out[at] = sentinels[span]
            at += 1
    _copy(tokens, behind, len(tokens), out, at)
    if spans == 0:
        return
    if program[INPUT_END] >= 0:
        out[bar - 1] = program[INPUT_END]
    at = bar
    for span in range(spans):
        if marked:
            out[at] = sentinels[span]
            at += 1
        _copy(tokens, begins[span], ends[span], out, at)
        at += ends[span] - begins[span]
    if program[FINAL_SENTINEL] != 0:
        out[at] = sentinels[spans if marked else 0]


@inline_kernel
def _write_weights(program, task, weights, begins, ends, bar, out):
    """Targets keep their weights; a sentinel weighs as much as the heaviest token of its span, the final one as any."""
    in_place = program[task + TASK_KIND] == SPANS
    marked = in_place or program[task + SENTINEL] != 0
    spans = len(begins)
    causal = program[task + TASK_KIND] == CAUSAL
    share = np.float32(program[TRAIN_ON_INPUTS] != 0 or causal)
    at = 0
    if program[task + MODE] >= 0:
        out[0] = 0
        at = 1
    behind = 0
    all_noise = np.float32(0)
    for span in range(spans + 1):
        begin = begins[span] if span < spans else len(weights)
        for i in range(behind, begin):
            out[at] = share * weights[i]
            at += 1
        if span == spans:
            break
        behind = ends[span]
        heaviest = _heaviest(weights, begin, behind)
        all_noise = max(all_noise, heaviest)
        if in_place:
            out[at] = share * heaviest
            at += 1
    if spans == 0:
        return
    if program[INPUT_END] >= 0:
        out[bar - 1] = share * all_noise
    at = bar
    for span in range(spans):
        if marked:
            out[at] = _heaviest(weights, begins[span], ends[span])
            at += 1
        for i in range(begins[span], ends[span]):
            out[at] = weights[i]
            at += 1
    if program[FINAL_SENTINEL] != 0:
        out[at] = all_noise


@kernel
def measure_documents(program, lengths, keys, slots):
    """Slots of each document: int64 [documents] lengths, uint64 keys."""
    for i in range(len(lengths)):
        slots[i] = measure_denoise(program, lengths[i], keys[i])[0]


@kernel
def measure_document(program, length, key):
    """`measure_denoise`, to call from Python."""
    return measure_denoise(program, length, key)


@kernel
def worst_of_task(program, number, length):
    """(slots, sentinels) that a document of `length` takes in one task, whatever its key may be."""
    task = HEADER + TASK_FIELDS * number
    kind = program[task + TASK_KIND]
    mode = np.int64(program[task + MODE] >= 0)
    if length < 2 or kind == CAUSAL:
        return mode + length, 0
    in_place, sentinels = 0, program[task + SENTINEL]
    if kind == SPANS:
        noise, spans = count_noise(program, task, length)
        in_place = spans + np.int64(program[ROLL] != 0 and noise > spans)
        sentinels = in_place
    sentinels += program[FINAL_SENTINEL]
    return mode + length + in_place + np.int64(program[INPUT_END] >= 0) + sentinels, sentinels


@kernel
def task_number(program, length, key):
    """Which task a document gets."""
    return (choose(program, length, key)[0] - HEADER) // TASK_FIELDS


@kernel
def bar_of(program, length, key):
    """How many slots come before the targets."""
    task, noise, spans, word = choose(program, length, key)
    return lay_out(program, task, length, noise, spans, word)[1]
