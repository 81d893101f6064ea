"""Kernels of denoising: the task of a document, the length of what is written, and the writing.

All lengths and masks are integer arithmetic on (program, length, key); only loss weights are
floats. A length takes constant time. Writing costs two random words a span, Floyd's sampling in a
bitset, and one copy of each token.

A **program** is int64: the header, then `TASK_FIELDS` numbers for each task, then the ids of the
sentinels.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from penstock.core.compiled import bare, inline_kernel, kernel, view_u32
from penstock.core.randomness import below, philox
from penstock.plan.objectives._span_kernels import DECIDE, place_spans, scratch_size

KIND = 1
"""Kinds of denoisers, in program[0]."""
NUM_TASKS, ROLL, FINAL_SENTINEL, INPUT_END, BIDIRECTIONAL, TRAIN_ON_INPUTS, NUM_SENTINELS = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
)
"""Places in the header. INPUT_END is an id, or -1 for none; the others are counts, or 0 and 1."""
HEADER = 8
(
    CUMULATIVE,
    TASK_KIND,
    MODE,
    RATE_NUMERATOR,
    RATE_DENOMINATOR,
    MEAN_NUMERATOR,
    MEAN_DENOMINATOR,
    SENTINEL,
) = range(8)
"""Places in a task. CUMULATIVE is its upper end on the scale of 2^32; MODE an id or -1; a
RATE_NUMERATOR of 0 (prefixes only) draws the pivot; SENTINEL is 1 where sentinels stand before what
is predicted: always for spans.
"""
TASK_FIELDS = 8
CAUSAL, SPANS, PREFIX = 0, 1, 2
"""Kinds of tasks."""
WIDTH = 16
"""Tokens that are copied at once."""


@inline_kernel
def round_half_even(numerator, denominator):
    """numerator / denominator to the nearest integer, halves to the even one; both above or at
    0.
    """
    down = numerator // denominator
    twice = 2 * (numerator - down * denominator)
    return down + ((twice > denominator) | ((twice == denominator) & (down & 1 == 1)))


@inline_kernel
def count_noise(program, task, length):
    """(noise tokens, spans) of span corruption on `length` >= 2 tokens, by the published rounding.

    Never more spans than kept tokens, so that a composition exists: a guard that the published code
    lacks.
    """
    noise = round_half_even(
        length * program[task + RATE_NUMERATOR], program[task + RATE_DENOMINATOR]
    )
    noise = min(max(noise, 1), length - 1)
    spans = round_half_even(
        noise * program[task + MEAN_DENOMINATOR], program[task + MEAN_NUMERATOR]
    )
    return noise, min(max(spans, 1), noise, length - noise)


@inline_kernel
def choose(program, length, key):
    """(place of the task in the program, noise tokens, spans without a split, word 1 of the
    decision).
    """
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
            noise = round_half_even(
                length * program[task + RATE_NUMERATOR], program[task + RATE_DENOMINATOR]
            )
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

    `prefix` leading tokens see each other; `reads` leading tokens are no targets; the slots after
    them are.
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


@inline_kernel
def memory_size(length):
    """uint64 that `write_denoise` works in for a document of up to `length` tokens, whatever its
    task.
    """
    spans = length // 2 + 1
    return scratch_size(length, spans) + spans + 2


@kernel
def find_spans(program, length, key, begins, ends):
    """The spans that are taken out of one document, ascending, into uint32 arrays with room for one
    more; their number.

    A causal task has none; a prefix has one, its continuation.
    """
    task, noise, spans, word = choose(program, length, key)
    if length < 2 or spans == 0:
        return 0
    if program[task + TASK_KIND] == PREFIX:
        begins[0] = length - noise
        ends[0] = length
        return 1
    scratch = np.empty(scratch_size(length, spans), np.uint64)
    return place_spans(program[ROLL] != 0, length, noise, spans, word, key, scratch, begins, ends)


@inline_kernel
def _heaviest(weights, begin, end):
    heaviest = np.float32(0)
    for i in range(begin, end):
        heaviest = max(heaviest, weights[i])
    return heaviest


@intrinsic
def _copy_vector(typing_context, source, destination):
    """Copy `WIDTH` int32 from one address to another, as vectors."""

    def codegen(context, builder, signature, arguments):
        pointer = ir.VectorType(ir.IntType(32), WIDTH).as_pointer()
        loaded = builder.load(builder.inttoptr(arguments[0], pointer), align=4)
        builder.store(loaded, builder.inttoptr(arguments[1], pointer), align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@inline_kernel
def _copy(tokens, source, begin, end, out, destination, at):
    """Copy tokens[begin:end] to out[at:]; `source` and `destination` are the addresses of the
    arrays.

    May write up to WIDTH - 1 more slots of `out`, which are written later. Most runs are short, and
    how short cannot be foreseen: to copy too much costs less than to guess wrong. Near either end
    of memory, the rest is copied one by one.
    """
    size = end - begin
    whole = size
    has_room = end + WIDTH <= len(tokens) and at + size + WIDTH <= len(out)
    if not has_room:
        whole &= -WIDTH
    for i in range(0, whole, WIDTH):
        _copy_vector(source + np.uint64(4 * (begin + i)), destination + np.uint64(4 * (at + i)))
    if not has_room:
        for i in range(whole, size):
            out[at + i] = tokens[begin + i]


@kernel
def write_denoise(program, tokens, weights, key, out_tokens, out_weights, memory):
    """Write one document: [mode] inputs [input end] | sentinel 0, span 0, sentinel 1, span 1, …
    [final sentinel].

    The outputs hold exactly the measured slots. With no weights, none are written. `memory`:
    uint64, at least `memory_size` of the length; to allocate it here took half as long as the
    draws.
    """
    length = len(tokens)
    task, noise, spans, word = choose(program, length, key)
    _, bar, count = lay_out(program, task, length, noise, spans, word)
    drawn = program[task + TASK_KIND] == SPANS and count > 0
    size = scratch_size(length, spans) if drawn else 0
    begins = view_u32(np.uint64(memory.ctypes.data + 8 * size), count + 1)
    ends = view_u32(np.uint64(memory.ctypes.data + 8 * size + 4 * (count + 1)), count + 1)
    if drawn:
        place_spans(program[ROLL] != 0, length, noise, spans, word, key, memory, begins, ends)
    elif count > 0:
        begins[0] = length - noise
        ends[0] = length
    _write_tokens(bare(program), task, bare(tokens), begins, ends, count, bar, bare(out_tokens))
    if len(weights) > 0:
        _write_weights(program, task, weights, begins, ends, count, bar, out_weights)


@inline_kernel
def _write_tokens(program, task, tokens, begins, ends, spans, bar, out):
    source, destination = np.uint64(tokens.ctypes.data), np.uint64(out.ctypes.data)
    sentinels = HEADER + TASK_FIELDS * program[NUM_TASKS]
    in_place = np.int64(program[task + TASK_KIND] == SPANS)
    marked = program[task + SENTINEL]
    at = np.int64(program[task + MODE] >= 0)
    if at:
        out[0] = program[task + MODE]
    behind = np.int64(0)
    for span in range(spans):
        begin = np.int64(begins[span])
        _copy(tokens, source, behind, begin, out, destination, at)
        at += begin - behind
        behind = np.int64(ends[span])
        if in_place:
            out[at] = program[sentinels + span]
            at += 1
    _copy(tokens, source, behind, len(tokens), out, destination, at)
    if spans == 0:
        return
    if program[INPUT_END] >= 0:
        out[bar - 1] = program[INPUT_END]
    at = bar
    for span in range(spans):
        if marked:
            out[at] = program[sentinels + span]
            at += 1
        begin = np.int64(begins[span])
        end = np.int64(ends[span])
        _copy(tokens, source, begin, end, out, destination, at)
        at += end - begin
    if program[FINAL_SENTINEL] != 0:
        out[at] = program[sentinels + marked * spans]


@inline_kernel
def _write_weights(program, task, weights, begins, ends, spans, bar, out):
    """Targets keep their weights; a sentinel weighs as much as the heaviest token of its span, the
    final one as any.
    """
    in_place = program[task + TASK_KIND] == SPANS
    share = np.float32(program[TRAIN_ON_INPUTS] != 0 or program[task + TASK_KIND] == CAUSAL)
    at = np.int64(program[task + MODE] >= 0)
    if at:
        out[0] = 0
    behind = np.int64(0)
    all_noise = np.float32(0)
    for span in range(spans + 1):
        begin = np.int64(begins[span]) if span < spans else len(weights)
        for i in range(behind, begin):
            out[at] = share * weights[i]
            at += 1
        if span == spans:
            break
        behind = np.int64(ends[span])
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
        begin = np.int64(begins[span])
        end = np.int64(ends[span])
        if program[task + SENTINEL]:
            out[at] = _heaviest(weights, begin, end)
            at += 1
        for i in range(begin, end):
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
