"""Checksums of documents and their places in shards: compiled, without the GIL, on raw addresses.

A document's tokens are checked in chunks of `CHUNK_TOKENS`. The checksum of a chunk is the sum of
its 32-bit words, each multiplied by its own odd 32-bit constant, modulo 2^64, then mixed with the
chunk's length and number. A change within one word always changes the sum (a non-zero difference
below 2^32 times an odd constant below 2^32 is not 0 modulo 2^64), and mixing is one-to-one. So such
a change is always found, and any other with probability 1 − 2^-64. A checksum does not protect
against forgery.

Callers pass addresses of mappings that they keep alive, and a batch table that `wrong_batch` has
accepted (or one that we made). Everything that shards and lengths contain is checked against the
mapping before it is used: a shard may come from a stranger, and checksums detect damage only. All
arithmetic is unsigned, because Numba turns int64 with uint64 into float64.
"""

import numpy as np

from penstock.core.compiled import (
    inline_kernel,
    kernel,
    view_i64,
    view_u8,
    view_u16,
    view_u32,
    view_u64,
    viewer,
)
from penstock.core.randomness import mix
from penstock.core.vectors import largest_u16, largest_u32
from penstock.data.stores._kernels import MULTIPLIERS, sum_words

CHUNK_TOKENS = 256
"""Tokens per chunk, the unit of checking; part of the format."""

BATCH = np.dtype(
    [
        (
            "token_offsets",
            "<u8",
        ),  # of documents, int64 [rows + 1], in tokens (foreign corpora: in units of their own)
        ("tokens", "<u8"),  # uint16 or uint32
        ("checksum_offsets", "<u8"),  # of documents, int64 [rows + 1], in checksums
        ("checksums", "<u8"),  # uint64
        (
            "span_bitmap",
            "<u8",
        ),  # a bit for each document, set where it has a list of spans; 0: all have one
        ("span_offsets", "<u8"),  # of documents, int64 [rows + 1], in spans
        ("span_begins", "<u8"),  # uint32, tokens of the document
        ("span_ends", "<u8"),  # uint32, tokens of the document
        ("span_weights", "<u8"),  # float32
    ],
    align=True,
)
"""A line of the batch table: where the buffers of a batch begin, in bytes from the shard's address,
modulo 2^64; part of the format. Without checksums only the first two are used.
"""

_FIELDS: tuple[str, ...] = BATCH.names or ()
_IN_FILE = tuple(
    _FIELDS.index(name)
    for name in (
        "token_offsets",
        "tokens",
        "span_bitmap",
        "span_offsets",
        "span_begins",
        "span_ends",
        "span_weights",
        "checksum_offsets",
        "checksums",
    )
)
"""The fields of `BATCH`, by number, in the order in which their buffers lie in a shard."""
_OFFSETS = tuple(
    _FIELDS.index(name) for name in ("token_offsets", "checksum_offsets", "span_offsets")
)
_OF_SPANS = tuple(number for number, name in enumerate(_FIELDS) if name.startswith("span_"))
_BITMAP, _CHECKSUM_OFFSETS = _FIELDS.index("span_bitmap"), _FIELDS.index("checksum_offsets")
_LINE_BYTES, _LINE_WORDS = np.uint64(BATCH.itemsize), len(_FIELDS)

SPANS_PER_BLOCK = 64
"""Spans summed before mixing: 192 words, which the multipliers cover; part of the format."""

DOCUMENTS_PER_BATCH = 1024
"""Documents in every batch of a shard but its last; part of the format."""

RUN_DOCUMENTS = 256
"""Documents of a run, counted from the first of a dataset: block shuffle keeps them together, and a
store is read in runs.
"""

_0, _1, _2, _3, _7, _8, _16 = (np.uint64(number) for number in (0, 1, 2, 3, 7, 8, 16))
_CHUNK = np.uint64(CHUNK_TOKENS)
_SPAN_KEY = np.uint64(0x5350414E53)
_NULL_SPANS = np.uint64(0x4E554C4C)
(
    OK,
    BAD_LENGTH,
    BAD_TOKENS,
    BAD_SPANS,
    BAD_TOKEN_ID,
    BAD_SPAN_ORDER,
    BAD_TRAINED,
    BAD_CHECKSUM_COUNT,
) = range(8)
"""What can be wrong with a document."""

_view_batches = viewer(BATCH)


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
    """Number of chunks of a document of `num_tokens` (int64 → int64)."""
    return (num_tokens + CHUNK_TOKENS - 1) // CHUNK_TOKENS


@inline_kernel
def spans_checksum(begins, ends, weights, count):
    """Checksum of the spans of one document that has a list of spans, perhaps empty.

    Args:
        begins: uint64, address of the first span's begin (uint32, tokens).
        ends: uint64, address of the first span's end (uint32, tokens).
        weights: uint64, address of the first span's loss weight (float32).
        count: uint64, number of spans.

    Returns:
        uint64.
    """
    key = _SPAN_KEY
    begin_words, end_words, weight_words = (
        view_u32(begins, count),
        view_u32(ends, count),
        view_u32(weights, count),
    )
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
    """Locate a document.

    Args:
        document: int64, its number in the dataset.
        shard_starts: int64 [shards + 1], first document of each shard, then the number of
            documents.
        shard_first_batch: int64 [shards + 1], first batch of each shard, then the number of
            batches.
        documents_per_batch: int64, in every batch except a shard's last.

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
    local, first = document - shard_starts[low], shard_first_batch[low]
    if documents_per_batch == DOCUMENTS_PER_BATCH:
        # By a number that the compiler knows: a shift in place of a division, which short documents
        # would notice.
        local = np.uint64(local)
        batch, row = local // np.uint64(DOCUMENTS_PER_BATCH), local % np.uint64(DOCUMENTS_PER_BATCH)
        return low, first + np.int64(batch), np.int64(row)
    return low, first + local // documents_per_batch, local % documents_per_batch


@inline_kernel
def batch_at(line):
    """The record `BATCH` at an address (uint64)."""
    return _view_batches(line, 1)[0]


@inline_kernel
def line_of(batches, batch):
    """Address of the line of a batch (int64) in a batch table at an address (uint64)."""
    return batches + np.uint64(batch) * _LINE_BYTES


@inline_kernel
def offsets_of(offsets, row):
    """Two consecutive offsets of a row (int64), int64 each, from those of its batch at an address
    (uint64).
    """
    pair = view_i64(offsets + (np.uint64(row) << _3), 2)
    return pair[0], pair[1]


@inline_kernel
def has_span_list(shard, line, row):
    """Whether a row of a dataset with spans has a list of spans; if not, all its weights are 1."""
    bitmap = batch_at(line).span_bitmap
    if bitmap == _0:
        return True
    return (view_u8(shard + bitmap, (row >> 3) + 1)[row >> 3] >> np.uint8(row & 7)) & 1 == 1


@inline_kernel
def values_of(offsets, row, size, begin, end, item_bytes):
    """The position of a row's values in their buffer, checked against its bounds.

    Args:
        offsets: uint64, address of the batch's offsets of these values.
        row: int64, row in the batch.
        size: uint64, bytes of the shard's mapping.
        begin: uint64, where the buffer begins in the shard; at most `size`.
        end: uint64, upper bound of the buffer's end; at most `size`.
        item_bytes: Bytes of one value.

    Returns:
        (first value, number of values or −1 if the offsets decrease or leave the buffer), int64
        each.
    """
    first, last = offsets_of(offsets, row)
    room = np.int64(end) - np.int64(begin)
    # The second comparison keeps the product from overflowing.
    inside = (
        first >= 0
        and first <= last
        and last <= np.int64(size)
        and last * np.int64(item_bytes) <= room
    )
    return first, last - first if inside else np.int64(-1)


@inline_kernel
def tokens_of(shard, size, line, row, token_bytes, has_spans):
    """(first token, number of tokens or −1) of a row; batches never share tokens: each ends before
    the next buffer.
    """
    batch = batch_at(line)
    end = batch.span_offsets if has_spans else batch.checksum_offsets
    # 0 means no buffer (a batch of empty documents): the file's head is at 0.
    end = end if batch.tokens != _0 else _0
    return values_of(shard + batch.token_offsets, row, size, batch.tokens, end, token_bytes)


@inline_kernel
def spans_of(shard, size, line, row):
    """(first span, number of spans or −1) of a row of a dataset with spans."""
    batch = batch_at(line)
    last = max(batch.span_begins, batch.span_ends, batch.span_weights)
    return values_of(shard + batch.span_offsets, row, size, last, size, 4)


@inline_kernel
def checksums_of(shard, size, line, row):
    """(first checksum, number of checksums or −1) of a row."""
    batch = batch_at(line)
    return values_of(shard + batch.checksum_offsets, row, size, batch.checksums, size, 8)


@inline_kernel
def check_document(shard, size, line, row, layout, length):
    """Check one document against its checksums, without reading outside the mapping.

    Args:
        shard: uint64, address of the shard.
        size: uint64, bytes of its mapping.
        line: uint64, address of the batch's line in the batch table.
        row: int64, row in the batch.
        layout: (token_bytes int64, has_spans bool, vocab_size int64).
        length: int64, number of tokens according to the lengths file.

    Returns:
        `OK` or what is wrong.
    """
    token_bytes, has_spans, vocab_size = layout
    batch = batch_at(line)
    first, count = tokens_of(shard, size, line, row, token_bytes, has_spans)
    if count != length:
        return BAD_LENGTH
    chunks = num_chunks(length)
    word, words = checksums_of(shard, size, line, row)
    if words != chunks + np.int64(has_spans):
        return BAD_CHECKSUM_COUNT
    address = shard + batch.tokens + np.uint64(first) * np.uint64(token_bytes)
    stored = view_u64(shard + batch.checksums + (np.uint64(word) << _3), words)
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
    """The highest of `count` tokens at an address, −1 if there are none → int64."""
    if count <= 0:
        return np.int64(-1)
    words = view_u32(address, (count * token_bytes) >> 2)
    if token_bytes == 2:
        # The last one is in no word if their number is odd.
        last = view_u16(address, count)[count - 1]
        return np.int64(max(largest_u16(words), last))
    return np.int64(largest_u32(words))


@inline_kernel
def spans_are_right(shard, size, line, row, length, stored):
    """Whether the spans of a document of `length` tokens have the checksum `stored` (uint64)."""
    first, count = spans_of(shard, size, line, row)
    if count < 0 or count > length:
        return False
    if not has_span_list(shard, line, row):
        return count == 0 and stored == null_spans_checksum()
    batch, skip = batch_at(line), shard + (np.uint64(first) << _2)
    found = spans_checksum(
        batch.span_begins + skip,
        batch.span_ends + skip,
        batch.span_weights + skip,
        np.uint64(count),
    )
    return found == stored


@kernel
def wrong_batch(batches, documents, size, has_spans):
    """The first batch of a shard with buffers that are not in order inside the shard, or −1.

    Checks what the rest of this file relies on: every array of offsets, the bitmap of spans and the
    origins are completely inside the shard, values begin inside it, and no two buffers begin at the
    same place.

    Args:
        batches: `BATCH` [b], the shard's part of the batch table.
        documents: int64, number of documents; all batches except the last are full.
        size: uint64, bytes of the shard's mapping.
        has_spans: Whether the dataset has spans.
    """
    end, left = _8, np.uint64(documents)  # a file begins with a mark of 8 bytes
    for number in range(len(batches)):
        line = view_u64(np.uint64(batches[number:].ctypes.data), _LINE_WORDS)
        rows = min(left, np.uint64(DOCUMENTS_PER_BATCH))
        offsets, left = (rows + _1) << _3, left - rows
        origins = (((rows << _2) + _7) >> _3 << _3) + (rows << _3)
        for field in _IN_FILE:
            if field in _OF_SPANS and not has_spans:
                continue
            place = line[field]
            holds_offsets = field in _OFFSETS
            if place == _0 and not holds_offsets:
                continue  # no bitmap, or no values
            end += origins if field == _CHECKSUM_OFFSETS else _0
            if place < end or place > size or place & _7 != _0:
                return number
            end = place + (
                offsets if holds_offsets else ((rows + _7) >> _3) if field == _BITMAP else _1
            )
        if end > size:
            return number
    return -1


@kernel
def wrong_document(places, batches, layout, lengths, first, last):
    """The first of the documents [first, last) without as many tokens in its file as its length
    says, or −1.

    Args:
        places: (shard_starts, shard_first_batch, shard_addresses, shard_bytes, documents_per_batch)
            of the `DocumentTable`.
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
    """`wrong_document` for some documents, int64 [n]."""
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
    line = line_of(batches, batch)
    if has_checksums:
        return tokens_of(shard, size, line, row, token_bytes, has_spans)[1] == length
    return foreign_tokens(shard, size, line, row, token_bytes, offset_bytes, length) != _0


@inline_kernel
def foreign_tokens(shard, size, line, row, token_bytes, offset_bytes, length):
    """Address of a document's tokens in a corpus without checksums; 0 if they would leave its file.

    Such a corpus stores only where a document begins (int64, in units of `offset_bytes`).
    """
    batch = batch_at(line)
    first = view_i64(shard + batch.token_offsets + (np.uint64(row) << _3), 1)[0]
    room, needed = np.int64(size) - np.int64(batch.tokens), length * np.int64(token_bytes)
    if first < 0 or first > room or needed > room or first * np.int64(offset_bytes) > room - needed:
        return _0
    return shard + batch.tokens + np.uint64(first) * np.uint64(offset_bytes)


@kernel
def read_documents(places, batches, layout, vocab_size, first, offsets, tokens):
    """Copy consecutive documents, checked.

    Args:
        places, batches, layout: As in `wrong_document`.
        vocab_size: int64, upper bound of the token ids (exclusive).
        first: int64, the first document.
        offsets: int64 [n + 1], where each document begins in `tokens`, according to the lengths.
        tokens: uint32, written.

    Returns:
        (`OK` or what is wrong, with which document).
    """
    shard_starts, shard_first_batch, shard_addresses, shard_bytes, documents_per_batch = places
    token_bytes, offset_bytes, has_checksums, has_spans = layout
    for i in range(len(offsets) - 1):
        number, batch, row = locate(first + i, shard_starts, shard_first_batch, documents_per_batch)
        shard, size = shard_addresses[number], shard_bytes[number]
        line = line_of(batches, batch)
        length = offsets[i + 1] - offsets[i]
        if has_checksums:
            fault = check_document(
                shard, size, line, row, (token_bytes, has_spans, vocab_size), length
            )
            if fault != OK:
                return fault, first + i
            begin = tokens_of(shard, size, line, row, token_bytes, has_spans)[0]
            address = shard + batch_at(line).tokens + np.uint64(begin) * np.uint64(token_bytes)
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
