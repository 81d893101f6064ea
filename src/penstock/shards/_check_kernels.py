# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Checking whole batches and foreign corpora, for `penstock verify`, and finding documents by their last token."""

import numpy as np

from penstock.compiled import inline_kernel, kernel, view_f32, view_u16, view_u32, view_u64
from penstock.shards._kernels import (
    BAD_CHECKSUM_COUNT,
    BAD_LENGTH,
    BAD_SPAN_ORDER,
    BAD_SPANS,
    BAD_TOKEN_ID,
    BAD_TRAINED,
    BATCH_COLUMNS,
    OK,
    check_tokens,
    has_span_list,
    num_chunks,
    offsets_of,
    spans_are_right,
    spans_summary,
)

_2 = np.uint64(2)


@kernel
def check_batch(shard, line, layout, limits, lengths, faults):
    """Check all documents of one batch of a shard.

    Args:
        shard: uint64, address of the shard.
        line: uint64, address of the batch's line in the batch table.
        layout: (token_bytes int64, has_spans bool, vocab_size uint32 or more).
        limits: int64 [3], how many tokens, checksum words and spans the batch's buffers hold.
        lengths: uint32 [n, 2], of the batch's documents, from the lengths file.
        faults: uint8 [n], written: `OK` or what is wrong with each document.
    """
    token_bytes, has_spans, vocab_size = layout
    expected = np.zeros(3, np.int64)
    for row in range(len(lengths)):
        length = np.int64(lengths[row, 0])
        first, last = offsets_of(shard, line, 0, row)
        words = offsets_of(shard, line, 2, row)
        spans = offsets_of(shard, line, 5, row) if has_spans else (np.int64(0), np.int64(0))
        address = shard + view_u64(line, BATCH_COLUMNS)[1] + np.uint64(first) * np.uint64(token_bytes)
        if first != expected[0] or last - first != length or last > limits[0]:
            faults[row] = BAD_LENGTH
        elif words[0] != expected[1] or words[1] > limits[1]:
            faults[row] = BAD_CHECKSUM_COUNT
        elif spans[0] != expected[2] or spans[1] < spans[0] or spans[1] > limits[2]:
            faults[row] = BAD_SPANS
        else:
            faults[row] = check_tokens(shard, line, row, address, token_bytes, length, has_spans)
            if faults[row] == OK and _largest(address, length, token_bytes) >= vocab_size:
                faults[row] = BAD_TOKEN_ID
            if faults[row] == OK:
                faults[row] = _check_trained(shard, line, row, has_spans, length, np.int64(lengths[row, 1]))
        expected[0], expected[2] = expected[0] + length, spans[1]
        expected[1] += num_chunks(length) + np.int64(has_spans)


@inline_kernel
def _largest(address, length, token_bytes):
    """The highest token id of a document, -1 when it is empty → int64."""
    highest = np.int64(-1)
    if token_bytes == 2:
        for token in view_u16(address, length):
            highest = max(highest, np.int64(token))
    else:
        for token in view_u32(address, length):
            highest = max(highest, np.int64(token))
    return highest


@inline_kernel
def _check_trained(shard, line, row, has_spans, length, trained):
    """Check the spans of a row, and its trained tokens against the lengths file → fault."""
    counted = max(length - 1, 0)
    if has_spans:
        if not spans_are_right(shard, line, row):
            return BAD_SPANS
        if has_span_list(shard, line, row):
            batch = view_u64(line, BATCH_COLUMNS)
            first, last = offsets_of(shard, line, 5, row)
            skip, count = np.uint64(first) << _2, last - first
            state, counted, _ = spans_summary(
                view_u32(shard + batch[6] + skip, count),
                view_u32(shard + batch[7] + skip, count),
                view_f32(shard + batch[8] + skip, count),
                length,
            )
            if state == 2:
                return BAD_SPAN_ORDER
    return OK if counted == trained else BAD_TRAINED


@kernel
def check_sequences(lengths, pointers, documents, token_bytes, num_bytes):
    """Check a Megatron index: lengths int32 [n] not negative, byte positions int64 [n] one after another from 0 and
    inside `num_bytes`, document borders int64 [d + 1] rising from 0 to n.

    Returns:
        (-1 or the first wrong sequence, -1 or the first wrong border).
    """
    end = np.int64(0)
    for i in range(len(lengths)):
        size = np.int64(lengths[i]) * token_bytes
        if size < 0 or pointers[i] != end or end + size > num_bytes:
            return i, -1
        end += size
    last = np.int64(0)
    for i in range(len(documents)):
        if documents[i] < last or documents[i] > len(lengths) or (i == 0 and documents[i] != 0):
            return -1, i
        last = documents[i]
    return -1, -1 if last == len(lengths) else len(documents) - 1


@kernel
def one_sequence_each(documents):
    """Whether every document is one sequence: int64 [d + 1] borders are 0, 1, 2, …"""
    same = True
    for i in range(len(documents)):
        same &= documents[i] == i
    return same


@kernel
def document_sums(lengths, documents, sums):
    """Tokens of documents made of several sequences: int32 [n], int64 [d + 1] borders, int64 [d] written."""
    for i in range(len(sums)):
        total = np.int64(0)
        for sequence in range(documents[i], documents[i + 1]):
            total += np.int64(lengths[sequence])
        sums[i] = total


@kernel
def find_ends(tokens, last_id, ends):
    """Where documents that end with `last_id` end: one past each such token.

    Args:
        tokens: uint16 or uint32 [tokens].
        last_id: The token that ends a document; of the dtype of `tokens`.
        ends: int64, written as far as it reaches; none to count first.

    Returns:
        How many documents there are; tokens after the last `last_id` are one more.
    """
    count = 0
    for i in range(len(tokens)):
        if tokens[i] == last_id:
            if count < len(ends):
                ends[count] = i + 1
            count += 1
    if len(tokens) > 0 and tokens[len(tokens) - 1] != last_id:
        if count < len(ends):
            ends[count] = len(tokens)
        count += 1
    return count


@kernel
def first_outside(tokens, vocab_size):
    """Place of the first token that is not below `vocab_size`, or -1: uint16 or uint32 [tokens], int64."""
    for i in range(len(tokens)):
        if np.int64(tokens[i]) >= vocab_size:
            return i
    return -1
