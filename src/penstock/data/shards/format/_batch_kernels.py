"""What is computed of the documents of a batch as it is written: checksums, lengths and sums of
loss weights.
"""

import numpy as np

from penstock.core.compiled import inline_kernel, kernel
from penstock.data.shards.format._kernels import (
    CHUNK_TOKENS,
    null_spans_checksum,
    num_chunks,
    spans_checksum,
    token_checksum,
)

_2 = np.uint64(2)


@kernel
def checksum_counts(offsets, has_spans, counts):
    """Checksum words of each document (int64 [n + 1] token offsets, bool, int64 [n] written)."""
    extra = 1 if has_spans else 0
    for i in range(len(counts)):
        counts[i] = num_chunks(offsets[i + 1] - offsets[i]) + extra


@kernel
def checksum_batch(tokens, token_bytes, offsets, starts, spans, checksums):
    """Checksum words of all documents of a batch.

    Args:
        tokens: uint64, address of the tokens.
        token_bytes: 2 or 4.
        offsets: int64 [n + 1], of the documents, in tokens.
        starts: int64 [n + 1], of each document's words in `checksums`: one word per chunk, and one
            more if the dataset has spans.
        spans: (valid bool [n], offsets int64 [n + 1], addresses uint64 [3] of begins, ends,
            weights); `valid` is empty if the dataset has no spans.
        checksums: uint64 [starts[n]], written.
    """
    valid, span_offsets, columns = spans
    for i in range(len(offsets) - 1):
        length = offsets[i + 1] - offsets[i]
        address = tokens + np.uint64(offsets[i]) * np.uint64(token_bytes)
        for chunk in range(num_chunks(length)):
            count = min(CHUNK_TOKENS, length - chunk * CHUNK_TOKENS)
            checksums[starts[i] + chunk] = token_checksum(address, token_bytes, chunk, count)
        if len(valid) > 0:
            word = null_spans_checksum()
            if valid[i]:
                at = np.uint64(span_offsets[i]) << _2
                count = np.uint64(span_offsets[i + 1] - span_offsets[i])
                word = spans_checksum(columns[0] + at, columns[1] + at, columns[2] + at, count)
            checksums[starts[i + 1] - 1] = word


@inline_kernel
def spans_summary(begins, ends, weights, num_tokens):
    """Summary of a document's spans: uint32 [k], uint32 [k], float32 [k], int64 → (state, trained,
    weight sum).

    `state` is 0 for sound spans with weights 0 and 1 only, 1 for sound spans with other weights, 2
    for spans that are out of order, empty, outside the document, or have a weight that is not
    finite. The first token is never trained.
    """
    state, trained, total, last = 0, np.int64(0), 0.0, np.int64(0)
    for k in range(len(begins)):
        begin, end, weight = np.int64(begins[k]), np.int64(ends[k]), np.float64(weights[k])
        if begin < last or end <= begin or end > num_tokens or not np.isfinite(weight):
            return 2, trained, total
        last = end
        if weight != 0.0:
            trained += end - max(begin, 1)
            total += weight * (end - max(begin, 1))
            if weight != 1.0:
                state = 1
    return state, trained, total


@kernel
def summarise_batch(offsets, valid, span_offsets, begins, ends, weights, lengths, weight_sums):
    """Tokens, trained tokens and weight sums of each document.

    Args:
        offsets: int64 [n + 1], of the documents, in tokens.
        valid: bool [n], whether a document has a list of spans; empty if the dataset has no spans.
        span_offsets: int64 [n + 1].
        begins: uint32 [spans], tokens.
        ends: uint32 [spans], tokens.
        weights: float32 [spans].
        lengths: uint32 [n, 2], written.
        weight_sums: float64 [n], written.

    Returns:
        (first document with unsound spans or −1, whether any weight is neither 0 nor 1).
    """
    fractional = False
    for i in range(len(offsets) - 1):
        num_tokens = offsets[i + 1] - offsets[i]
        trained, total = max(num_tokens - 1, 0), np.float64(max(num_tokens - 1, 0))
        if len(valid) > 0 and valid[i]:
            low, high = span_offsets[i], span_offsets[i + 1]
            state, trained, total = spans_summary(
                begins[low:high], ends[low:high], weights[low:high], num_tokens
            )
            if state == 2:
                return i, False
            fractional |= state == 1
        lengths[i, 0], lengths[i, 1], weight_sums[i] = num_tokens, trained, total
    return -1, fractional
