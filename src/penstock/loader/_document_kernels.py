"""Compiled reading of documents in mapped shards, by address, each thing checked as it is read.

The length is compared with the lengths file, every chunk of tokens with its checksum, its ids with the vocabulary,
spans with their checksum. Nothing outside a mapping is read, whatever a damaged or forged offset or length says.
"""

import numpy as np

from penstock.compiled import inline_kernel, prefetch, view_f32, view_i64, view_u32, view_u64
from penstock.loader._kernels import SOURCE
from penstock.sampling import BEGIN, DOCUMENT, TOKENS, TOTAL
from penstock.shards._kernels import (
    BATCH_COLUMNS,
    CHUNK_TOKENS,
    foreign_tokens,
    has_span_list,
    largest_id,
    locate,
    null_spans_checksum,
    num_chunks,
    spans_checksum,
    spans_of,
    token_checksum,
    tokens_of,
    values_of,
)
from penstock.vectors import CACHE_LINE

SHARD_STARTS, NUM_SHARDS, FIRST_BATCHES, ADDRESSES, BATCHES, PER_BATCH, OFFSET_BYTES, TOKEN_BYTES = range(8)
CHECKED, WEIGHTED, LENGTHS, LENGTHS_STRIDE, WEIGHT_SUMS, SHARD_BYTES = range(8, 14)
OBJECTIVE, PROGRAM, PROGRAM_WORDS, KEY, EPOCH, FRAMED, ID_LIMIT = range(14, 21)
TABLE_COLUMNS = 21
"""Columns of a source's line in `tables` (uint64): addresses and numbers of its `DocumentTable`, then of its
objective: which of the three below, its program and the words of that, the key of the source, documents of an epoch,
and 1 where all documents begin with BOS plus 2 where all end with EOS; last what every id must be below, 0 where any
that can be stored will do."""

CAUSAL, COMPILED, STAGED = range(3)
"""Who writes a source's documents: the fill itself; an objective's program; Python, before the fill copies them."""

FAULT, TOKENS_AT, CHECKSUMS_AT, STORED, ASK_FROM, ASK_TO = range(6)
FOUND_COLUMNS = 6
"""Where a piece's document was found (uint64): a fault or OK, address of its first token and first checksum, its length
in tokens; from and to which address its bytes are still to be asked for."""

FIRST_LINES = 64
"""Cache lines of a call's first row that are asked for before it is written: no other row is written meanwhile."""

OK, WRONG_LENGTH, WRONG_CHECKSUM, WRONG_SPANS, WRONG_MEASURE, WRONG_ID = range(6)


@inline_kernel
def find(table, document):
    """(shard address, shard size, address of its line in the batch table, row in the batch) of a document."""
    num_shards = np.int64(table[NUM_SHARDS])
    shard, batch, row = locate(
        document,
        view_i64(table[SHARD_STARTS], num_shards + 1),
        view_i64(table[FIRST_BATCHES], num_shards + 1),
        np.int64(table[PER_BATCH]),
    )
    base = view_u64(table[ADDRESSES], num_shards)[shard]
    size = view_u64(table[SHARD_BYTES], num_shards)[shard]
    return base, size, table[BATCHES] + np.uint64(batch * BATCH_COLUMNS * 8), row


@inline_kernel
def find_tokens(table, document):
    """(fault or OK, address of the document's first token, of its first checksum or 0, its length in tokens).

    Nothing outside the shard's mapping is ever read, whatever stands in its offsets.
    """
    base, size, line, row = find(table, document)
    length = np.int64(view_u32(table[LENGTHS] + np.uint64(document) * table[LENGTHS_STRIDE], 1)[0])
    token_bytes, weighted = np.int64(table[TOKEN_BYTES]), table[WEIGHTED] != np.uint64(0)
    if table[CHECKED] == np.uint64(0):
        address = foreign_tokens(base, size, line, row, token_bytes, np.int64(table[OFFSET_BYTES]), length)
        return OK if address != np.uint64(0) else WRONG_LENGTH, address, np.uint64(0), length
    batch = view_u64(line, BATCH_COLUMNS)
    first, count = tokens_of(base, size, line, row, token_bytes, weighted)
    address = base + batch[1] + np.uint64(first) * np.uint64(token_bytes)
    if count != length:
        return WRONG_LENGTH, address, np.uint64(0), length
    first, count = values_of(base, size, line, row, 2, batch[3], size, 8)
    checksums = base + batch[3] + np.uint64(first) * np.uint64(8)
    return OK if count == num_chunks(length) + np.int64(weighted) else WRONG_CHECKSUM, address, checksums, length


@inline_kernel
def find_pieces(tables, pieces, begin, end, found):
    """Find the documents of the pieces [begin, end) into the lines of `found`, uint64 [end − begin, FOUND_COLUMNS]."""
    for p in range(begin, end):
        table, line = tables[pieces[p, SOURCE]], found[p - begin]
        status, address, checksums, length = find_tokens(table, pieces[p, DOCUMENT])
        line[FAULT], line[TOKENS_AT], line[CHECKSUMS_AT], line[STORED] = np.uint64(status), address, checksums, length
        begins = address + np.uint64(pieces[p, BEGIN]) * table[TOKEN_BYTES]
        line[ASK_FROM] = begins - begins % np.uint64(CACHE_LINE)
        line[ASK_TO] = begins + np.uint64(pieces[p, TOKENS]) * table[TOKEN_BYTES]
        prefetch(checksums)


@inline_kernel
def ask_ahead(found, at, end, lines):
    """Ask memory for the next `lines` cache lines of the pieces whose lines of `found` are [at, end); the new `at`.

    Documents lie anywhere, so that reading one waits for memory. A row's pieces are asked for while the row before it
    is written, a few lines with each of its pieces: more at once would themselves wait, for free line-fill buffers.
    """
    while at < end and lines > 0:
        line = found[at]
        while line[ASK_FROM] < line[ASK_TO] and lines > 0:
            prefetch(line[ASK_FROM])
            line[ASK_FROM] += np.uint64(CACHE_LINE)
            lines -= 1
        at += line[ASK_FROM] >= line[ASK_TO]
    return at


@inline_kernel
def check_piece(table, piece, found, reach):
    """Check what will be read of a piece's document, `reach` tokens past the piece included; a fault or OK."""
    status, address, length = np.int64(found[FAULT]), found[TOKENS_AT], np.int64(found[STORED])
    if status == OK and piece[TOTAL] > length:
        status = WRONG_LENGTH  # the lengths file was changed since the plan read it
    last = min(piece[BEGIN] + piece[TOKENS] + reach, length)
    if status == OK and table[CHECKED] != np.uint64(0):
        words = view_u64(found[CHECKSUMS_AT], num_chunks(length))
        size = np.int64(table[TOKEN_BYTES])
        for chunk in range(piece[BEGIN] // CHUNK_TOKENS, num_chunks(last)):
            count = min(CHUNK_TOKENS, length - chunk * CHUNK_TOKENS)
            if token_checksum(address, size, chunk, count) != words[chunk]:
                status = WRONG_CHECKSUM
    if status == OK and table[ID_LIMIT] != np.uint64(0):
        size = np.int64(table[TOKEN_BYTES])
        begin = address + np.uint64(piece[BEGIN] * size)
        if largest_id(begin, last - piece[BEGIN], size) >= np.int64(table[ID_LIMIT]):
            status = WRONG_ID
    return status


@inline_kernel
def read_spans(table, document):
    """A document's spans, checked: (fault or OK, number or −1 when all weights are 1, begins, ends, weights)."""
    base, size, line, row = find(table, document)
    batch = view_u64(line, BATCH_COLUMNS)
    status, _, checksums, tokens = find_tokens(table, document)
    first, count = spans_of(base, size, line, row)
    if status == OK and (count < 0 or count > tokens):
        status = WRONG_SPANS
    at = np.uint64(first) * np.uint64(4)
    begins, ends, values = base + batch[6] + at, base + batch[7] + at, base + batch[8] + at
    number = count
    if status == OK:
        stored = view_u64(checksums + np.uint64(num_chunks(tokens) * 8), 1)[0]
        if has_span_list(base, line, row):
            found = spans_checksum(begins, ends, values, np.uint64(count))
        else:
            found, number = null_spans_checksum(), np.int64(-1)
        if found != stored:
            status = WRONG_SPANS
    if status != OK:
        count = np.int64(0)
    return status, number, view_u32(begins, count), view_u32(ends, count), view_f32(values, count)
