"""Checksums of documents, and where documents lie: compiled, without the GIL, on raw addresses.

A document's tokens are checked in chunks of `CHUNK_TOKENS`. The checksum of a chunk is the sum of its 32-bit words,
each times its own odd 32-bit constant, modulo 2^64, then mixed with the chunk's length and place. Any change inside
one word changes the sum (a non-zero difference below 2^32 times an odd constant below 2^32 is not 0 modulo 2^64),
and mixing is one to one; so such a change is always found, and any other with probability 1 - 2^-64. It is not a
guard against a forger.

Nothing here checks addresses: callers pass those of mappings that they keep alive. All arithmetic is unsigned,
because Numba turns int64 with uint64 into float64.
"""

import hashlib

import numpy as np

from penstock.compiled import inline_kernel, kernel, view_i64, view_u8, view_u16, view_u32, view_u64
from penstock.randomness import mix

CHUNK_TOKENS = 256
"""Tokens in a chunk, the unit of checking; part of the format."""

BATCH_COLUMNS = 9
"""Numbers on a line of the batch table; part of the format."""

SPANS_PER_BLOCK = 64
"""Spans summed before mixing: 192 words, which the multipliers cover; part of the format."""

MULTIPLIERS = np.frombuffer(hashlib.shake_256(b"penstock shards 1").digest(1024), "<u4") | np.uint32(1)
"""One odd constant for each word of a chunk, uint32 [256]; part of the format."""

_0, _1, _2, _3, _16 = (np.uint64(number) for number in (0, 1, 2, 3, 16))
_CHUNK = np.uint64(CHUNK_TOKENS)
_SPAN_KEY = np.uint64(0x5350414E53)
_NULL_SPANS = np.uint64(0x4E554C4C)
_FILE_BLOCK = np.uint64(1024)

OK, BAD_LENGTH, BAD_TOKENS, BAD_SPANS, BAD_TOKEN_ID, BAD_SPAN_ORDER, BAD_TRAINED, BAD_CHECKSUM_COUNT = range(8)
"""What can be wrong with a document."""


@inline_kernel
def sum_words(address, num_bytes):
    """Sum of the 32-bit words at `address`, each times its multiplier (uint64, uint64 ≤ 1024, → uint64).

    A last half word, or bytes short of one, count as padded with zeros.
    """
    num_words = num_bytes >> _2
    words = view_u32(address, num_words)
    total = _0
    for i in range(num_words):
        total += np.uint64(words[i]) * np.uint64(MULTIPLIERS[i])
    rest = num_bytes & _3
    if rest != _0:
        tail = view_u8(address + (num_words << _2), rest)
        word = _0
        for i in range(rest):
            word |= np.uint64(tail[i]) << (np.uint64(i) << _3)
        total += word * np.uint64(MULTIPLIERS[num_words])
    return total


@inline_kernel
def token_checksum(address, token_bytes, chunk, count):
    """Checksum of one chunk of a document.

    Args:
        address: uint64, of the document's first token.
        token_bytes: 2 or 4.
        chunk: Which chunk of the document, from 0.
        count: Tokens in the chunk, at most `CHUNK_TOKENS`.

    Returns:
        uint64.
    """
    size = np.uint64(token_bytes)
    begin = address + np.uint64(chunk) * _CHUNK * size
    num_bytes = np.uint64(count) * size
    return mix(sum_words(begin, num_bytes), (np.uint64(chunk) << _16) | num_bytes)


@inline_kernel
def num_chunks(num_tokens):
    """Chunks of a document of `num_tokens` (int64 → int64)."""
    return (num_tokens + CHUNK_TOKENS - 1) // CHUNK_TOKENS


@inline_kernel
def spans_checksum(begins, ends, weights, count):
    """Checksum of the spans of one document that has some or an empty list of them.

    Args:
        begins: uint64, address of the first span's begin (uint32, tokens).
        ends: uint64, address of the first span's end (uint32, tokens).
        weights: uint64, address of the first span's loss weight (float32).
        count: uint64, number of spans.

    Returns:
        uint64.
    """
    key = _SPAN_KEY
    begin_words, end_words, weight_words = view_u32(begins, count), view_u32(ends, count), view_u32(weights, count)
    block = np.uint64(SPANS_PER_BLOCK)
    for first in range(_0, count, block):
        total = _0
        for i in range(min(block, count - np.uint64(first))):
            at, place = np.uint64(first) + np.uint64(i), np.uint64(i) * _3
            total += np.uint64(begin_words[at]) * np.uint64(MULTIPLIERS[place])
            total += np.uint64(end_words[at]) * np.uint64(MULTIPLIERS[place + _1])
            total += np.uint64(weight_words[at]) * np.uint64(MULTIPLIERS[place + _2])
        key = mix(key, total)
    return mix(key, count)


@inline_kernel
def null_spans_checksum():
    """Checksum word of a document without a list of spans (all weights 1)."""
    return mix(_SPAN_KEY, _NULL_SPANS)


@inline_kernel
def locate(document, shard_starts, shard_first_batch, documents_per_batch):
    """Where a document lies.

    Args:
        document: int64, its number in the dataset.
        shard_starts: int64 [shards + 1], first document of each shard, then their number.
        shard_first_batch: int64 [shards + 1], first batch of each shard, then their number.
        documents_per_batch: int64, in every batch but a shard's last.

    Returns:
        (shard, batch, row in the batch), int64 each.
    """
    low, high = 0, len(shard_starts) - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if shard_starts[middle] <= document:
            low = middle
        else:
            high = middle
    local = document - shard_starts[low]
    return low, shard_first_batch[low] + local // documents_per_batch, local % documents_per_batch


@inline_kernel
def offsets_of(shard, line, column, row):
    """Two neighbouring offsets of a row: of tokens (column 0), checksum words (2) or spans (5), int64 each."""
    pair = view_i64(shard + view_u64(line, BATCH_COLUMNS)[column] + (np.uint64(row) << _3), 2)
    return pair[0], pair[1]


@inline_kernel
def has_span_list(shard, line, row):
    """Whether a row of a dataset with spans has a list of them; if not, all its weights are 1."""
    bitmap = view_u64(line, BATCH_COLUMNS)[4]
    if bitmap == _0:
        return True
    return (view_u8(shard + bitmap, (row >> 3) + 1)[row >> 3] >> np.uint8(row & 7)) & 1 == 1


@inline_kernel
def spans_are_right(shard, line, row):
    """Whether the spans of one document are those that were written.

    Args:
        shard: uint64, address of the shard.
        line: uint64, address of the batch's line in the batch table.
        row: int64, the document's row in the batch. The dataset has spans; the row's length and its number of
            checksum words have been checked, so that its offsets can be trusted.

    Returns:
        bool.
    """
    batch = view_u64(line, BATCH_COLUMNS)
    word = offsets_of(shard, line, 2, row)[1] - 1
    stored = view_u64(shard + batch[3] + (np.uint64(word) << _3), 1)[0]
    first, last = offsets_of(shard, line, 5, row)
    if not has_span_list(shard, line, row):
        return first == last and stored == null_spans_checksum()
    length = offsets_of(shard, line, 0, row)
    if last < first or last - first > length[1] - length[0]:
        return False
    skip, count = np.uint64(first) << _2, np.uint64(last - first)
    begins, ends, weights = shard + batch[6] + skip, shard + batch[7] + skip, shard + batch[8] + skip
    return spans_checksum(begins, ends, weights, count) == stored


@kernel
def read_documents(places, batches, layout, lengths, first, offsets, tokens):
    """Copy documents in a row, checked.

    Args:
        places: (shard_starts, shard_first_batch, shard_addresses, documents_per_batch) of the `DocumentTable`.
        batches: uint64, address of the batch table.
        layout: (token_bytes int64, offset_bytes int64, has_checksums bool, has_spans bool).
        lengths: uint32 or int32 [N, 1 or 2].
        first: int64, the first document.
        offsets: int64 [n + 1], where each document begins in `tokens`, by the lengths.
        tokens: uint32, written.

    Returns:
        (`OK` or what is wrong, with which document).
    """
    shard_starts, shard_first_batch, shard_addresses, documents_per_batch = places
    token_bytes, offset_bytes, has_checksums, has_spans = layout
    for i in range(len(offsets) - 1):
        shard_number, batch, row = locate(first + i, shard_starts, shard_first_batch, documents_per_batch)
        shard, line = shard_addresses[shard_number], batches + np.uint64(batch * BATCH_COLUMNS * 8)
        begin, end = offsets_of(shard, line, 0, row)
        address = shard + view_u64(line, BATCH_COLUMNS)[1] + np.uint64(begin) * np.uint64(offset_bytes)
        length = np.int64(lengths[first + i, 0])
        if has_checksums:
            if end - begin != length:
                return BAD_LENGTH, first + i
            fault = check_tokens(shard, line, row, address, token_bytes, length, has_spans)
            if fault != OK:
                return fault, first + i
            if has_spans and not spans_are_right(shard, line, row):
                return BAD_SPANS, first + i
        if token_bytes == 2:
            tokens[offsets[i] : offsets[i + 1]] = view_u16(address, length)
        else:
            tokens[offsets[i] : offsets[i + 1]] = view_u32(address, length)
    return OK, first


@inline_kernel
def check_tokens(shard, line, row, address, token_bytes, length, has_spans):
    """Check all tokens of a document whose length is right → `OK`, `BAD_CHECKSUM_COUNT` or `BAD_TOKENS`."""
    first, last = offsets_of(shard, line, 2, row)
    if last - first != num_chunks(length) + np.int64(has_spans):
        return BAD_CHECKSUM_COUNT
    words = view_u64(shard + view_u64(line, BATCH_COLUMNS)[3] + (np.uint64(first) << _3), last - first)
    good = True
    for chunk in range(num_chunks(length)):
        count = min(CHUNK_TOKENS, length - chunk * CHUNK_TOKENS)
        good &= token_checksum(address, token_bytes, chunk, count) == words[chunk]
    return OK if good else BAD_TOKENS


@kernel
def wrong_length(places, batches, lengths, documents):
    """The first of some documents (int64 [n]) whose length in its shard is not that of the lengths file, or -1.

    The rest as in `read_documents`, for shards with checksums.
    """
    shard_starts, shard_first_batch, shard_addresses, documents_per_batch = places
    for document in documents:
        shard, batch, row = locate(document, shard_starts, shard_first_batch, documents_per_batch)
        begin, end = offsets_of(shard_addresses[shard], batches + np.uint64(batch * BATCH_COLUMNS * 8), 0, row)
        if end - begin != np.int64(lengths[document, 0]):
            return document
    return np.int64(-1)


@kernel
def find_document(document, shard_starts, shard_first_batch, documents_per_batch):
    """`locate`, for callers in Python."""
    return locate(document, shard_starts, shard_first_batch, documents_per_batch)


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
        starts: int64 [n + 1], of each document's words in `checksums`; one word more than it has chunks where the
            dataset has spans.
        spans: (valid bool [n], offsets int64 [n + 1], addresses uint64 [3] of begins, ends, weights); no rows in
            `valid` when the dataset has no spans.
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
    """What a document's spans train: uint32 [k], uint32 [k], float32 [k], int64 → (state, trained, weight sum).

    `state` is 0 for sound spans of weights 0 and 1 only, 1 for sound spans of other weights, 2 for spans out of
    order, empty, outside the document, or with a weight that is not finite. The first token is never trained.
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
        valid: bool [n], whether a document has a list of spans; no rows when the dataset has no spans.
        span_offsets: int64 [n + 1].
        begins: uint32 [spans], tokens.
        ends: uint32 [spans], tokens.
        weights: float32 [spans].
        lengths: uint32 [n, 2], written.
        weight_sums: float64 [n], written.

    Returns:
        (first document with unsound spans or -1, whether any weight is neither 0 nor 1).
    """
    fractional = False
    for i in range(len(offsets) - 1):
        num_tokens = offsets[i + 1] - offsets[i]
        trained, total = max(num_tokens - 1, 0), np.float64(max(num_tokens - 1, 0))
        if len(valid) > 0 and valid[i]:
            low, high = span_offsets[i], span_offsets[i + 1]
            state, trained, total = spans_summary(begins[low:high], ends[low:high], weights[low:high], num_tokens)
            if state == 2:
                return i, False
            fractional |= state == 1
        lengths[i, 0], lengths[i, 1], weight_sums[i] = num_tokens, trained, total
    return -1, fractional


@kernel
def bytes_checksum(address, num_bytes):
    """Checksum of a whole file or buffer: its blocks of 1,024 bytes, chained (uint64, uint64 → uint64)."""
    key = num_bytes
    for begin in range(_0, num_bytes, _FILE_BLOCK):
        key = mix(key, sum_words(address + np.uint64(begin), min(_FILE_BLOCK, num_bytes - np.uint64(begin))))
    return key
