"""Compiled rewriting: pieces of sources with an objective other than causal become slots of a row.

A piece is written as tokens with the weight of each, straight into the row's tokens where those have 4 bytes (else into
a buffer first); then each token becomes the target of the positions before it. So every objective gets targets at all
distances alike. The buffers are a row long and stay in the first caches.
"""

import numpy as np

from penstock.core.compiled import (
    inline_kernel,
    kernel,
    kernel_part,
    view_f32,
    view_i32,
    view_i64,
    view_u16,
    view_u32,
    view_u64,
)
from penstock.core.randomness import mix
from penstock.core.vectors import copy_into, fill_with
from penstock.loader._document_kernels import OK, WRONG_MEASURE, read_spans, stored_tokens
from penstock.objectives._denoise_kernels import memory_words
from penstock.objectives._kernels import measure_words, write_words


@inline_kernel
def key_of(table, piece):
    """The key of a piece: of (seed and source, epoch, document, part); as `Rewriting.keys`."""
    epoch = np.uint64(piece.position // table.epoch_documents)
    return mix(mix(mix(table.key, epoch), np.uint64(piece.document)), np.uint64(piece.begin))


@inline_kernel
def frame_of(table, piece):
    """(1 if the piece begins with a BOS to be kept out, 1 if it ends with such an EOS, tokens between them, key)."""
    stored = stored_tokens(table, piece.document)
    head = np.int64(piece.begin == 0 and table.begins_with_bos)
    tail = np.int64(piece.begin + piece.tokens == stored and table.ends_with_eos)
    words = piece.tokens - head - tail
    if words <= 0:
        return np.int64(0), np.int64(0), np.int64(0), np.uint64(0)
    return head, tail, words, key_of(table, piece)


@inline_kernel
def measure_piece(table, piece, frame):
    """(slots, prefix, leading tokens that are only read) of a piece of a source with a program."""
    head, tail, words, key = frame
    if words == 0:
        return piece.tokens, np.int64(0), piece.tokens
    program = view_i64(table.program, table.program_words)
    slots, prefix, reads = measure_words(program, words, key)
    return slots + head + tail, prefix + head if prefix > 0 else prefix, reads + head


@kernel
def scratch_words(slots):
    """uint64 that rewriting pieces of rows of `slots` works in."""
    return 2 * slots + memory_words(slots)


@inline_kernel
def work_space(scratch, slots):
    """Parts of `scratch`, uint64 [scratch_words(row's slots)]: tokens and weights of a piece before and after it is
    rewritten (int32, float32, int32, float32, each [slots]), and memory for an objective (uint64).
    """
    at, step = np.uint64(scratch.ctypes.data), np.uint64(4 * slots)
    return (
        view_i32(at, slots),
        view_f32(at + step, slots),
        view_i32(at + step * np.uint64(2), slots),
        view_f32(at + step * np.uint64(3), slots),
        view_u64(at + step * np.uint64(4), len(scratch) - 2 * slots),
    )


@inline_kernel
def read_weights(table, piece, weights):
    """Write a piece's stored loss weights (float32 [tokens]); (fault or OK, whether they are not all 1)."""
    if not table.has_spans:
        return OK, False
    status, number, begins, ends, values = read_spans(table, piece.document)
    if status != OK or number < 0:
        return status, False
    fill_with(weights, 0)
    for span in range(number):
        begin = min(max(np.int64(begins[span]) - piece.begin, 0), len(weights))
        end = min(max(np.int64(ends[span]) - piece.begin, begin), len(weights))
        fill_with(weights[begin:end], values[span])
    return OK, True


@kernel_part
def run_program(table, frame, words, weights, weighted, out_tokens, out_weights, memory):
    """Rewrite a piece (int32 and float32 [tokens]) with its source's program, BOS and EOS kept outside."""
    head, tail, count, key = frame
    slots = len(out_tokens)
    if count == 0:
        copy_into(words, out_tokens)
        if weighted:
            fill_with(out_weights[:slots], 0)
        return
    end = slots - tail
    program = view_i64(table.program, table.program_words)
    kept, inner = (head + count, end) if weighted else (head, head)
    write_words(
        program, words[head : head + count], weights[head:kept], key, out_tokens[head:end], out_weights[head:inner],
        memory,
    )  # fmt: skip
    if head:
        out_tokens[0] = words[0]
    if tail:
        out_tokens[end] = words[head + count]
    if weighted:
        if head:
            out_weights[0] = weights[0]
        if tail:
            out_weights[end] = weights[head + count]


@inline_kernel
def rewrite_piece(table, piece, address, out_tokens, out_weights, scratch):
    """Rewrite a piece, found at `address` and checked, into `out_tokens` and `out_weights`; `scratch` as `work_space`.

    Returns (fault or OK, whether weights were written, leading tokens that are only read where they were not, prefix).
    """
    count, slots = piece.tokens, piece.length
    frame = frame_of(table, piece)
    measured, prefix, reads = measure_piece(table, piece, frame)
    if measured != slots:
        return WRONG_MEASURE, False, reads, prefix
    words, weights, _, _, memory = work_space(scratch, slots)
    words, weights = words[:count], weights[:count]
    begin = address + np.uint64(piece.begin * table.token_bytes)
    if table.token_bytes == 2:
        copy_into(view_u16(begin, count), words)
    else:
        copy_into(view_u32(begin, count), words)
    status, weighted = read_weights(table, piece, weights)
    if status == OK:
        run_program(table, frame, words, weights, weighted, out_tokens, out_weights, memory)
    return status, weighted, reads, prefix


@inline_kernel
def write_rewritten(new, new_weights, weighted, reads, place, tokens, targets, weights):
    """Write a rewritten piece to the slots from `place` on of a row ([T], [D, T], [D, T or 0]).

    Token i of `new` is the target at distance d of slot i − d. Where `weighted`, `new_weights` says how much it counts;
    else the tokens from `reads` on count 1.
    """
    count = len(new)
    if new.ctypes.data != tokens[place:].ctypes.data:
        copy_into(new, tokens[place : place + count])
    for d in range(len(targets)):
        distance = d + 1
        first = min(max(reads, distance), count) - distance
        last = max(count - distance, 0)
        first = min(max(first, 0), last)
        if weighted:
            first = np.int64(0)
        row = targets[d, place : place + count]
        fill_with(row[:first], -100)
        copy_into(new[first + distance :], row[first:last])
        fill_with(row[last:], -100)
        if weights.shape[1]:
            fill_with(weights[d, place : place + first], 0)
            fill_with(weights[d, place + first : place + last], 1)
            fill_with(weights[d, place + last : place + count], 0)
        if weighted:
            for i in range(last):
                weight = new_weights[i + distance]
                if weight == np.float32(0.0):
                    row[i] = -100
                if weights.shape[1]:
                    weights[d, place + i] = weight


@inline_kernel
def weigh_staged(weights, sums):
    """Add what the tokens (float32 [slots]) count as targets at each distance to `sums`."""
    for d in range(len(sums)):
        for i in range(d + 1, len(weights)):
            sums[d] += np.float64(weights[i])


@inline_kernel
def weigh_compiled(table, piece, scratch, sums):
    """Add the weights of a rewritten piece's targets at each distance to `sums`; returns a fault or OK.

    Without loss weights of its own a document takes constant time; with them it is rewritten (weights alone matter,
    so its tokens are not read).
    """
    if scratch is None:
        return np.int64(WRONG_MEASURE)
    slots, count, frame = piece.length, piece.tokens, frame_of(table, piece)
    _, _, reads = measure_piece(table, piece, frame)
    words, weights, new, new_weights, memory = work_space(scratch, max(count, slots))
    status, weighted = read_weights(table, piece, weights[:count])
    if status != OK:
        return np.int64(status)
    if weighted:
        run_program(table, frame, words[:count], weights[:count], True, new[:slots], new_weights[:slots], memory)
        weigh_staged(new_weights[:slots], sums)
    else:
        for d in range(len(sums)):
            sums[d] += max(slots - max(reads, d + 1), 0)
    return np.int64(OK)
