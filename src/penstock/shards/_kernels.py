"""Checksums of documents, and where documents lie: compiled, without the GIL, on raw addresses.

A document's tokens are checked in chunks of `CHUNK_TOKENS`. The checksum of a chunk is the sum of its 32-bit words,
each times its own odd 32-bit constant, modulo 2^64, then mixed with the chunk's length and place. Any change inside
one word changes the sum (a non-zero difference below 2^32 times an odd constant below 2^32 is not 0 modulo 2^64),
and mixing is one to one; so such a change is always found, and any other with probability 1 - 2^-64. It is not a
guard against a forger.

Callers pass addresses of mappings that they keep alive, and a batch table that `wrong_batch` found sound (or one of
our own). Everything that shards and lengths say is checked against the mapping before it is followed: a shard may come
from a stranger, and checksums keep out damage only. All arithmetic is unsigned, because Numba turns int64 with uint64
into float64.
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

DOCUMENTS_PER_BATCH = 1024
"""Documents in every batch of a shard but its last; part of the format."""

_0, _1, _2, _3, _7, _8, _16 = (np.uint64(number) for number in (0, 1, 2, 3, 7, 8, 16))
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
def values_of(shard, size, line, row, column, begin, end, item_bytes):
    """Where a row's values lie in their buffer, as far as that can be believed.

    Args:
        shard: uint64, address of the shard.
        size: uint64, bytes of its mapping.
        line: uint64, address of the batch's line in the batch table.
        row: int64, row in the batch.
        column: Of the row's offsets: 0, 2 or 5.
        begin: uint64, where the buffer begins in the shard; at most `size`.
        end: uint64, where it ends at the latest; at most `size`.
        item_bytes: Of one value.

    Returns:
        (first value, number of values or −1 where the offsets fall or leave the buffer), int64 each.
    """
    first, last = offsets_of(shard, line, column, row)
    room = np.int64(end) - np.int64(begin)
    # The second comparison keeps the product from overflowing.
    inside = first >= 0 and first <= last and last <= np.int64(size) and last * np.int64(item_bytes) <= room
    return first, last - first if inside else np.int64(-1)


@inline_kernel
def tokens_of(shard, size, line, row, token_bytes, has_spans):
    """(first token, tokens or −1) of a row; batches never share tokens, as each must end before what follows it."""
    batch = view_u64(line, BATCH_COLUMNS)
    end = batch[5] if has_spans else batch[2]
    # At 0 is the file's own head: a batch of empty documents has no buffer of tokens.
    return values_of(shard, size, line, row, 0, batch[1], end if batch[1] != _0 else _0, token_bytes)


@inline_kernel
def spans_of(shard, size, line, row):
    """(first span, spans or −1) of a row of a dataset with spans."""
    batch = view_u64(line, BATCH_COLUMNS)
    return values_of(shard, size, line, row, 5, max(batch[6], batch[7], batch[8]), size, 4)


@inline_kernel
def check_document(shard, size, line, row, layout, length):
    """Check one document against its checksums, without reading outside the mapping.

    Args:
        shard: uint64, address of the shard.
        size: uint64, bytes of its mapping.
        line: uint64, address of the batch's line in the batch table.
        row: int64, row in the batch.
        layout: (token_bytes int64, has_spans bool, vocab_size int64).
        length: int64, tokens that the lengths file says.

    Returns:
        `OK` or what is wrong.
    """
    token_bytes, has_spans, vocab_size = layout
    batch = view_u64(line, BATCH_COLUMNS)
    first, count = tokens_of(shard, size, line, row, token_bytes, has_spans)
    if count != length:
        return BAD_LENGTH
    chunks = num_chunks(length)
    word, words = values_of(shard, size, line, row, 2, batch[3], size, 8)
    if words != chunks + np.int64(has_spans):
        return BAD_CHECKSUM_COUNT
    address = shard + batch[1] + np.uint64(first) * np.uint64(token_bytes)
    stored = view_u64(shard + batch[3] + (np.uint64(word) << _3), words)
    good = True
    for chunk in range(chunks):
        count = min(CHUNK_TOKENS, length - chunk * CHUNK_TOKENS)
        good &= token_checksum(address, token_bytes, chunk, count) == stored[chunk]
    if not good:
        return BAD_TOKENS
    if largest_id(address, length, token_bytes) >= vocab_size:
        return BAD_TOKEN_ID
    if has_spans and not spans_are_right(shard, size, line, row, length, stored[chunks]):
        return BAD_SPANS
    return OK


@inline_kernel
def largest_id(address, count, token_bytes):
    """The highest of `count` tokens at an address, −1 when there are none → int64."""
    if count <= 0:
        return np.int64(-1)
    # In their own width, so that the loops compile to vector instructions.
    narrow, wide = np.uint16(0), np.uint32(0)
    if token_bytes == 2:
        for token in view_u16(address, count):
            narrow = max(narrow, token)
        return np.int64(narrow)
    for token in view_u32(address, count):
        wide = max(wide, token)
    return np.int64(wide)


@inline_kernel
def spans_are_right(shard, size, line, row, length, stored):
    """Whether the spans of a document of `length` tokens have the checksum `stored` (uint64)."""
    first, count = spans_of(shard, size, line, row)
    if count < 0 or count > length:
        return False
    if not has_span_list(shard, line, row):
        return count == 0 and stored == null_spans_checksum()
    batch, skip = view_u64(line, BATCH_COLUMNS), shard + (np.uint64(first) << _2)
    return spans_checksum(batch[6] + skip, batch[7] + skip, batch[8] + skip, np.uint64(count)) == stored


@kernel
def wrong_batch(batches, documents, size, has_spans):
    """The first batch of a shard whose buffers do not lie in it one after another, or −1.

    Checks what the rest of this file relies on: every array of offsets, the bitmap of spans and the origins lie wholly
    inside the shard, values begin inside it, and no two buffers begin at one place.

    Args:
        batches: uint64 [b, 9], the shard's part of the batch table; of `documents` (int64), all but the last full.
        size: uint64, bytes of the shard's mapping.
        has_spans: Whether the dataset has spans.
    """
    end, left = _8, np.uint64(documents)  # a file begins with a mark of 8 bytes
    for number in range(len(batches)):
        line, rows = batches[number], min(left, np.uint64(DOCUMENTS_PER_BATCH))
        offsets, left = (rows + _1) << _3, left - rows
        origins = (((rows << _2) + _7) >> _3 << _3) + (rows << _3)
        for column in (0, 1, 4, 5, 6, 7, 8, 2, 3):
            if column in (4, 5, 6, 7, 8) and not has_spans:
                continue
            place = line[column]
            holds_offsets = column in (0, 2, 5)
            if place == _0 and not holds_offsets:
                continue  # no bitmap, or no values
            end += origins if column == 2 else _0
            if place < end or place > size or place & _7 != _0:
                return number
            end = place + (offsets if holds_offsets else ((rows + _7) >> _3) if column == 4 else _1)
        if end > size:
            return number
    return -1


@kernel
def wrong_document(places, batches, layout, lengths, first, last):
    """The first of the documents [first, last) whose tokens do not lie in its file, as many as its length says, or −1.

    Args:
        places: (shard_starts, shard_first_batch, shard_addresses, shard_bytes, documents_per_batch) of the
            `DocumentTable`.
        batches: uint64, address of the batch table.
        layout: (token_bytes int64, offset_bytes int64, has_checksums bool, has_spans bool).
        lengths: uint32 or int32 [N, 1 or 2].
    """
    for document in range(first, last):
        if not _lies_inside(places, batches, layout, document, np.int64(lengths[document, 0])):
            return document
    return np.int64(-1)


@kernel
def wrong_length(places, batches, layout, lengths, documents):
    """`wrong_document` of some documents, int64 [n]."""
    for document in documents:
        if not _lies_inside(places, batches, layout, document, np.int64(lengths[document, 0])):
            return document
    return np.int64(-1)


@inline_kernel
def _lies_inside(places, batches, layout, document, length):
    shard_starts, shard_first_batch, shard_addresses, shard_bytes, documents_per_batch = places
    token_bytes, offset_bytes, has_checksums, has_spans = layout
    number, batch, row = locate(document, shard_starts, shard_first_batch, documents_per_batch)
    shard, size = shard_addresses[number], shard_bytes[number]
    line = batches + np.uint64(batch * BATCH_COLUMNS * 8)
    if has_checksums:
        return tokens_of(shard, size, line, row, token_bytes, has_spans)[1] == length
    return foreign_tokens(shard, size, line, row, token_bytes, offset_bytes, length) != _0


@inline_kernel
def foreign_tokens(shard, size, line, row, token_bytes, offset_bytes, length):
    """Address of a document's tokens in a corpus without checksums; 0 where they would leave its file.

    Such a corpus has only the place where a document begins (int64, in units of `offset_bytes`).
    """
    batch = view_u64(line, BATCH_COLUMNS)
    first = view_i64(shard + batch[0] + (np.uint64(row) << _3), 1)[0]
    room, needed = np.int64(size) - np.int64(batch[1]), length * np.int64(token_bytes)
    if first < 0 or first > room or needed > room or first * np.int64(offset_bytes) > room - needed:
        return _0
    return shard + batch[1] + np.uint64(first) * np.uint64(offset_bytes)


@kernel
def read_documents(places, batches, layout, vocab_size, first, offsets, tokens):
    """Copy documents in a row, checked.

    Args:
        places, batches, layout: As in `wrong_document`.
        vocab_size: int64, that every token id must be below.
        first: int64, the first document.
        offsets: int64 [n + 1], where each document begins in `tokens`, by the lengths.
        tokens: uint32, written.

    Returns:
        (`OK` or what is wrong, with which document).
    """
    shard_starts, shard_first_batch, shard_addresses, shard_bytes, documents_per_batch = places
    token_bytes, offset_bytes, has_checksums, has_spans = layout
    for i in range(len(offsets) - 1):
        number, batch, row = locate(first + i, shard_starts, shard_first_batch, documents_per_batch)
        shard, size = shard_addresses[number], shard_bytes[number]
        line = batches + np.uint64(batch * BATCH_COLUMNS * 8)
        length = offsets[i + 1] - offsets[i]
        if has_checksums:
            fault = check_document(shard, size, line, row, (token_bytes, has_spans, vocab_size), length)
            if fault != OK:
                return fault, first + i
            begin = tokens_of(shard, size, line, row, token_bytes, has_spans)[0]
            address = shard + view_u64(line, BATCH_COLUMNS)[1] + np.uint64(begin) * np.uint64(token_bytes)
        else:
            address = foreign_tokens(shard, size, line, row, token_bytes, offset_bytes, length)
            if address == _0:
                return BAD_LENGTH, first + i
        if token_bytes == 2:
            tokens[offsets[i] : offsets[i + 1]] = view_u16(address, length)
        else:
            tokens[offsets[i] : offsets[i + 1]] = view_u32(address, length)
    return OK, first


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
