"""Compiled rewriting: pieces of sources with an objective other than causal become slots of a row.

A piece is written as tokens with the weight of each, straight into the row's tokens where those
have 4 bytes (else into a buffer first); then each token becomes the target of the positions before
it. So every objective gets targets at all distances alike. The buffers are a row long and stay in
the first caches.
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
from penstock.data.shards.format._kernels import OK
from penstock.plan.loader._document_kernels import BAD_MEASURE, read_spans, stored_tokens
from penstock.plan.objectives._denoise_kernels import memory_size
from penstock.plan.objectives._diffusion_kernels import words_size
from penstock.plan.objectives._kernels import (
    document_denominator,
    measure_document,
    write_document,
)


@inline_kernel
def key_of(source, piece):
    """The key of a piece: of (seed and source, epoch, document, part); as `Rewriting.keys`."""
    epoch = np.uint64(piece.position // source.epoch_documents)
    return mix(mix(mix(source.key, epoch), np.uint64(piece.document)), np.uint64(piece.begin))


@inline_kernel
def frame_of(source, piece):
    """(1 if the piece begins with a BOS to be kept out, 1 if it ends with such an EOS, tokens
    between them, key).
    """
    stored = stored_tokens(source, piece.document)
    head = np.int64(piece.begin == 0 and source.begins_with_bos)
    tail = np.int64(piece.begin + piece.tokens == stored and source.ends_with_eos)
    inner = piece.tokens - head - tail
    if inner <= 0:
        return np.int64(0), np.int64(0), np.int64(0), np.uint64(0)
    return head, tail, inner, key_of(source, piece)


@inline_kernel
def measure_piece(source, piece, frame):
    """(slots, prefix, leading tokens that are only read) of a piece of a source with a program."""
    head, tail, inner, key = frame
    if inner == 0:
        return piece.tokens, np.int64(0), piece.tokens
    program = view_i64(source.program, source.program_length)
    slots, prefix, reads = measure_document(program, inner, key)
    return slots + head + tail, prefix + head if prefix > 0 else prefix, reads + head


@kernel
def scratch_size(slots):
    """Number of uint64 that rewriting pieces of rows of `slots` works in."""
    return 2 * slots + slots // 2 + 1 + max(memory_size(slots), words_size(slots))


@inline_kernel
def work_space(scratch, slots):
    """Parts of `scratch`, uint64 [scratch_size(row's slots)]: tokens and weights of a piece before
    and after it is rewritten (int32, float32, int32, float32, each [slots]), its own targets (int32
    [slots]), and memory for an objective (uint64).
    """
    at, step = np.uint64(scratch.ctypes.data), np.uint64(4 * slots)
    used = 2 * slots + slots // 2 + 1
    return (
        view_i32(at, slots),
        view_f32(at + step, slots),
        view_i32(at + step * np.uint64(2), slots),
        view_f32(at + step * np.uint64(3), slots),
        view_i32(at + step * np.uint64(4), slots),
        view_u64(at + np.uint64(8 * used), len(scratch) - used),
    )


@inline_kernel
def read_weights(source, piece, weights):
    """Write a piece's stored loss weights (float32 [tokens]); (fault or OK, whether they are not
    all 1).
    """
    if not source.has_spans:
        return OK, False
    status, number, begins, ends, values = read_spans(source, piece.document)
    if status != OK or number < 0:
        return status, False
    fill_with(weights, 0)
    for span in range(number):
        begin = min(max(np.int64(begins[span]) - piece.begin, 0), len(weights))
        end = min(max(np.int64(ends[span]) - piece.begin, begin), len(weights))
        fill_with(weights[begin:end], values[span])
    return OK, True


@kernel_part
def run_program(
    source, frame, tokens, weights, weighted, out_tokens, out_weights, out_targets, memory
):
    """Rewrite a piece (int32 and float32 [tokens]) with its source's program, BOS and EOS kept
    outside; `out_targets` (int32 [slots]) is written if targets are the objective's own.
    """
    head, tail, inner, key = frame
    slots = len(out_tokens)
    if inner == 0:
        copy_into(tokens, out_tokens)
        if weighted or source.own_targets:
            fill_with(out_weights[:slots], 0)
        if source.own_targets:
            fill_with(out_targets[:slots], -100)
        return
    end = slots - tail
    program = view_i64(source.program, source.program_length)
    # Without loss weights, both arrays of weights are empty.
    read_end, written_end = (head + inner, end) if weighted else (head, head)
    if source.own_targets:
        written_end = end
    write_document(
        program, tokens[head : head + inner], weights[head:read_end], key, out_tokens[head:end],
        out_weights[head:written_end], out_targets[head:end], memory,
    )  # fmt: skip
    if head:
        out_tokens[0] = tokens[0]
    if source.own_targets:
        if head:
            out_targets[0], out_weights[0] = -100, np.float32(0)
        if tail:
            out_targets[end], out_weights[end] = -100, np.float32(0)
            out_tokens[end] = tokens[head + inner]
        return
    if tail:
        out_tokens[end] = tokens[head + inner]
    if weighted:
        if head:
            out_weights[0] = weights[0]
        if tail:
            out_weights[end] = weights[head + inner]


@inline_kernel
def rewrite_piece(source, piece, address, out_tokens, out_weights, out_targets, scratch):
    """Rewrite a piece, found at `address` and checked, into `out_tokens`, `out_weights` and, if
    they are the objective's own, `out_targets`; `scratch` as `work_space`.

    Returns (fault or OK, whether weights were written, leading tokens that are only read where they
    were not, prefix).
    """
    count, slots = piece.tokens, piece.length
    frame = frame_of(source, piece)
    measured, prefix, reads = measure_piece(source, piece, frame)
    if measured != slots:
        return BAD_MEASURE, False, reads, prefix
    tokens, weights, _, _, _, memory = work_space(scratch, slots)
    tokens, weights = tokens[:count], weights[:count]
    begin = address + np.uint64(piece.begin * source.token_bytes)
    if source.token_bytes == 2:
        copy_into(view_u16(begin, count), tokens)
    else:
        copy_into(view_u32(begin, count), tokens)
    status, weighted = read_weights(source, piece, weights)
    if status == OK:
        run_program(
            source, frame, tokens, weights, weighted, out_tokens, out_weights, out_targets, memory
        )
    return status, weighted, reads, prefix


@inline_kernel
def write_rewritten(new, new_weights, weighted, reads, slot, tokens, targets, weights):
    """Write a rewritten piece to the slots from `slot` on of a row ([T], [D, T], [D, T or 0]).

    Token i of `new` is the target at distance d of slot i − d. Where `weighted`, `new_weights` says
    how much it counts; else the tokens from `reads` on count 1.
    """
    count = len(new)
    if new.ctypes.data != tokens[slot:].ctypes.data:
        copy_into(new, tokens[slot : slot + count])
    for d in range(len(targets)):
        distance = d + 1
        first = min(max(reads, distance), count) - distance
        last = max(count - distance, 0)
        first = min(max(first, 0), last)
        if weighted:
            first = np.int64(0)
        row = targets[d, slot : slot + count]
        fill_with(row[:first], -100)
        copy_into(new[first + distance :], row[first:last])
        fill_with(row[last:], -100)
        if weights.shape[1]:
            fill_with(weights[d, slot : slot + first], 0)
            fill_with(weights[d, slot + first : slot + last], 1)
            fill_with(weights[d, slot + last : slot + count], 0)
        if weighted:
            for i in range(last):
                weight = new_weights[i + distance]
                if weight == np.float32(0.0):
                    row[i] = -100
                if weights.shape[1]:
                    weights[d, slot + i] = weight


@inline_kernel
def write_own_targets(new, new_targets, new_weights, slot, tokens, targets, weights):
    """Write a rewritten piece with targets of its own (int32 [slots], float32 [slots]) to the slots
    from `slot` on of a row with one target a slot.
    """
    end = slot + len(new)
    if new.ctypes.data != tokens[slot:].ctypes.data:
        copy_into(new, tokens[slot:end])
    copy_into(new_targets, targets[0, slot:end])
    if weights.shape[1]:
        copy_into(new_weights, weights[0, slot:end])


@inline_kernel
def weigh_written(weights, sums):
    """Add what the tokens (float32 [slots]) count as targets at each distance to `sums`."""
    for d in range(len(sums)):
        for i in range(d + 1, len(weights)):
            sums[d] += np.float64(weights[i])


@inline_kernel
def weigh_own(source, piece, frame, scratch, sums):
    """Add the denominator of a piece whose program writes targets; returns a fault or OK.

    It is the expectation of the weights that are drawn, so nothing is rewritten.
    """
    head, _, inner, _ = frame
    program = view_i64(source.program, source.program_length)
    _, weights, _, _, _, _ = work_space(scratch, max(piece.tokens, piece.length))
    status, weighted = read_weights(source, piece, weights[: piece.tokens])
    if status == OK and inner > 0:
        end = head + inner if weighted else head
        sums[0] += document_denominator(program, inner, weights[head:end])
    return np.int64(status)


@inline_kernel
def weigh_compiled(source, piece, scratch, sums):
    """Add the weights of a rewritten piece's targets at each distance to `sums`; returns a fault or
    OK.

    Without loss weights of its own a document takes constant time; with them it is rewritten
    (weights alone matter, so its tokens are not read).
    """
    if scratch is None:
        return np.int64(BAD_MEASURE)
    slots, count, frame = piece.length, piece.tokens, frame_of(source, piece)
    if source.own_targets:
        return weigh_own(source, piece, frame, scratch, sums)
    _, _, reads = measure_piece(source, piece, frame)
    tokens, weights, new, new_weights, _, memory = work_space(scratch, max(count, slots))
    status, weighted = read_weights(source, piece, weights[:count])
    if status != OK:
        return np.int64(status)
    if weighted:
        run_program(
            source,
            frame,
            tokens[:count],
            weights[:count],
            True,
            new[:slots],
            new_weights[:slots],
            new[:0],
            memory,
        )
        weigh_written(new_weights[:slots], sums)
    else:
        for d in range(len(sums)):
            sums[d] += max(slots - max(reads, d + 1), 0)
    return np.int64(OK)
