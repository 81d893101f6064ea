"""Compiled reading of documents in mapped shards, by address, each thing checked as it is read.

The length is compared with the lengths file, every chunk of tokens with its checksum, its ids with
the vocabulary, spans with their checksum. Nothing outside a mapping is read, whatever a damaged or
forged offset or length says.
"""

import numpy as np

from penstock.core.compiled import (
    inline_kernel,
    prefetch,
    view_f32,
    view_i64,
    view_u32,
    view_u64,
    viewer,
)
from penstock.core.vectors import CACHE_LINE
from penstock.data.shards.format._kernels import (
    BAD_CHECKSUM_COUNT,
    BAD_LENGTH,
    BAD_SPANS,
    BAD_TOKEN_ID,
    BAD_TOKENS,
    CHUNK_TOKENS,
    OK,
    batch_at,
    checksums_of,
    foreign_tokens,
    has_span_list,
    largest_id,
    line_of,
    locate,
    null_spans_checksum,
    num_chunks,
    spans_checksum,
    spans_of,
    token_checksum,
    tokens_of,
)

SOURCE_RECORD = np.dtype(
    [
        # Of its `DocumentTable`, by the same names; arrays by address.
        (
            "shard_starts",
            np.uint64,
        ),  # int64 [num_shards + 1], first document of each shard, then their number
        (
            "shard_first_batch",
            np.uint64,
        ),  # int64 [num_shards + 1], first batch of each shard, then their number
        ("shard_addresses", np.uint64),  # uint64 [num_shards], of each mapping
        ("shard_bytes", np.uint64),  # uint64 [num_shards], bytes of each mapping
        ("num_shards", np.int64),
        ("batches", np.uint64),  # `BATCH` [batches]
        ("documents_per_batch", np.int64),  # in every batch but a shard's last
        ("token_bytes", np.int64),  # 2 or 4
        ("offset_bytes", np.int64),  # bytes of one unit of the tokens' offsets
        ("has_checksums", np.bool_),
        ("has_spans", np.bool_),
        ("lengths", np.uint64),  # uint32 [documents, 1 or 2]: tokens, trained tokens
        ("lengths_stride", np.uint64),  # bytes from one document's length to the next
        ("weight_sums", np.uint64),  # float64 [documents]; 0 where all loss weights are 0 or 1
        (
            "id_limit",
            np.int64,
        ),  # every token id must be below; 0 where any id that can be stored is good
        # Of its objective.
        ("objective", np.int64),  # CAUSAL, COMPILED or PYTHON
        ("own_targets", np.bool_),  # whether targets are its own, not the tokens behind slots
        ("program", np.uint64),  # address of int64 [program_length], where it is COMPILED
        ("program_length", np.int64),
        ("key", np.uint64),  # of seed and source, for what objectives draw
        ("epoch_documents", np.int64),  # documents of an epoch
        (
            "begins_with_bos",
            np.bool_,
        ),  # whether all documents do, and the objective must not touch it
        ("ends_with_eos", np.bool_),
    ],
    align=True,
)
"""A source as the fill sees it: where its documents are, and what its objective does to them."""

_view_sources = viewer(SOURCE_RECORD)
_RECORD_SIZE = SOURCE_RECORD.itemsize // 8

CAUSAL, COMPILED, PYTHON = range(3)
"""What writes a source's documents: the fill itself; an objective's program; Python, before the
fill copies them.
"""

LOCATION = np.dtype(
    [
        ("status", np.int64),  # a fault or OK
        ("stored", np.int64),  # tokens of the document
        ("tokens", np.uint64),  # address of its first token
        ("readable", np.int64),  # tokens from there to the end of the mapping
        ("checksums", np.uint64),  # address of its first checksum; 0 where it has none
        (
            "prefetch_begin",
            np.uint64,
        ),  # address from which the piece's bytes are not prefetched yet
        ("prefetch_end", np.uint64),  # address where they end
    ],
    align=True,
)
"""Where the document of a piece is in memory."""

FIRST_LINES = 64
"""Cache lines of a call's first row that are prefetched before it is written: no other row is
written meanwhile.
"""

PIECES_AHEAD = 16
"""Pieces before which the places of a document are prefetched."""

BAD_MEASURE = BAD_CHECKSUM_COUNT + 1
"""A fault next to those of `shards`: the objective measured a piece differently when it was
planned.
"""


@inline_kernel
def sources_of(raw):
    """Records `SOURCE_RECORD` from the same bytes as uint64.

    To unpack an argument that is an array of records costs Numba 0.2 µs more than one of numbers,
    so those that are the same in every call come as uint64.
    """
    return _view_sources(np.uint64(raw.ctypes.data), len(raw) // _RECORD_SIZE)


@inline_kernel
def find(source, document):
    """(shard address, shard size, address of its line in the batch table, row in the batch) of a
    document.
    """
    shard, batch, row = locate(
        document,
        view_i64(source.shard_starts, source.num_shards + 1),
        view_i64(source.shard_first_batch, source.num_shards + 1),
        source.documents_per_batch,
    )
    base = view_u64(source.shard_addresses, source.num_shards)[shard]
    size = view_u64(source.shard_bytes, source.num_shards)[shard]
    return base, size, line_of(source.batches, batch), row


@inline_kernel
def stored_tokens(source, document):
    """Tokens of a document, as the lengths file says (int64 → int64)."""
    return np.int64(view_u32(source.lengths + np.uint64(document) * source.lengths_stride, 1)[0])


@inline_kernel
def find_tokens(source, document):
    """(fault or OK, address of the document's first token, of its first checksum or 0, its length
    in tokens, the address where the shard ends).

    Nothing outside the shard's mapping is ever read, whatever its offsets say.
    """
    base, size, line, row = find(source, document)
    length = stored_tokens(source, document)
    if not source.has_checksums:
        address = foreign_tokens(
            base, size, line, row, source.token_bytes, source.offset_bytes, length
        )
        status = OK if address != np.uint64(0) else BAD_LENGTH
        return status, address, np.uint64(0), length, base + size
    batch = batch_at(line)
    first, count = tokens_of(base, size, line, row, source.token_bytes, source.has_spans)
    address = base + batch.tokens + np.uint64(first) * np.uint64(source.token_bytes)
    if count != length:
        return BAD_LENGTH, address, np.uint64(0), length, base + size
    first, count = checksums_of(base, size, line, row)
    checksums = base + batch.checksums + np.uint64(first) * np.uint64(8)
    fits = count == num_chunks(length) + np.int64(source.has_spans)
    return OK if fits else BAD_TOKENS, address, checksums, length, base + size


@inline_kernel
def prefetch_length(sources, piece):
    """Prefetch the length of a piece's document."""
    source = sources[piece.source]
    prefetch(source.lengths + np.uint64(piece.document) * source.lengths_stride)


@inline_kernel
def prefetch_places(sources, piece):
    """Prefetch what says where the document of a piece is: its length, and its offsets."""
    source = sources[piece.source]
    base, _, line, row = find(source, piece.document)
    batch, at = batch_at(line), base + (np.uint64(row) << np.uint64(3))
    prefetch_length(sources, piece)
    prefetch(at + batch.token_offsets)
    if source.has_checksums:
        prefetch(at + batch.checksum_offsets)


@inline_kernel
def locate_pieces(sources, pieces, begin, end, locations):
    """Find the documents of the pieces [begin, end); `locations` (`LOCATION` [end − begin]) is
    written.

    Each waits for three places in memory, which lie anywhere: those of the pieces behind it are on
    their way meanwhile.
    """
    for p in range(begin, end):
        if p + PIECES_AHEAD < len(pieces):
            prefetch_places(sources, pieces[p + PIECES_AHEAD])
        piece, location = pieces[p], locations[p - begin]
        source = sources[piece.source]
        location.status, location.tokens, location.checksums, location.stored, end = find_tokens(
            source, piece.document
        )
        token_bytes = np.uint64(source.token_bytes)
        # Of a document that is sound; whoever finds a fault reads nothing.
        location.readable = np.int64(end - location.tokens) // source.token_bytes
        first = location.tokens + np.uint64(piece.begin) * token_bytes
        location.prefetch_begin = first - first % np.uint64(CACHE_LINE)
        location.prefetch_end = first + np.uint64(piece.tokens) * token_bytes
        prefetch(location.checksums)
        # The rest of the piece comes later; this one brings in the entry of the page table, too.
        prefetch(location.prefetch_begin)


@inline_kernel
def prefetch_ahead(locations, at, end, lines):
    """Prefetch the next `lines` cache lines of the pieces locations[at:end]; returns the new `at`.

    Documents lie anywhere, so that reading one waits for memory. A row's pieces are prefetched
    while the row before it is written, a few lines with each of its pieces: more at once would
    themselves wait, for free line-fill buffers.
    """
    while at < end and lines > 0:
        location = locations[at]
        while location.prefetch_begin < location.prefetch_end and lines > 0:
            prefetch(location.prefetch_begin)
            location.prefetch_begin += np.uint64(CACHE_LINE)
            lines -= 1
        at += location.prefetch_begin >= location.prefetch_end
    return at


@inline_kernel
def check_piece(source, piece, location, reach):
    """Check what will be read of a piece's document, `reach` tokens past the piece included; a
    fault or OK.
    """
    status, address, length, token_bytes = (
        location.status,
        location.tokens,
        location.stored,
        source.token_bytes,
    )
    if status == OK and piece.total > length:
        status = BAD_LENGTH  # the lengths file was changed since the plan read it
    last = min(piece.begin + piece.tokens + reach, length)
    if status == OK and source.has_checksums:
        checksums = view_u64(location.checksums, num_chunks(length))
        for chunk in range(piece.begin // CHUNK_TOKENS, num_chunks(last)):
            count = min(CHUNK_TOKENS, length - chunk * CHUNK_TOKENS)
            if token_checksum(address, token_bytes, chunk, count) != checksums[chunk]:
                status = BAD_TOKENS
    if status == OK and source.id_limit != 0:
        begin = address + np.uint64(piece.begin * token_bytes)
        if largest_id(begin, last - piece.begin, token_bytes) >= source.id_limit:
            status = BAD_TOKEN_ID
    return status


@inline_kernel
def read_spans(source, document):
    """A document's spans, checked: (fault or OK, number or −1 when all weights are 1, begins, ends,
    weights).
    """
    base, size, line, row = find(source, document)
    batch = batch_at(line)
    status, _, checksums, tokens, _ = find_tokens(source, document)
    first, count = spans_of(base, size, line, row)
    if status == OK and (count < 0 or count > tokens):
        status = BAD_SPANS
    at = np.uint64(first) * np.uint64(4)
    begins, ends, values = (
        base + batch.span_begins + at,
        base + batch.span_ends + at,
        base + batch.span_weights + at,
    )
    number = count
    if status == OK:
        stored = view_u64(checksums + np.uint64(num_chunks(tokens) * 8), 1)[0]
        if has_span_list(base, line, row):
            found = spans_checksum(begins, ends, values, np.uint64(count))
        else:
            found, number = null_spans_checksum(), np.int64(-1)
        if found != stored:
            status = BAD_SPANS
    if status != OK:
        count = np.int64(0)
    return status, number, view_u32(begins, count), view_u32(ends, count), view_f32(values, count)
