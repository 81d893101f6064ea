# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Kernels that check whole batches and foreign corpora, for `penstock verify`, and find the ends of
documents.
"""

import numpy as np

from penstock.core.compiled import kernel, view_f32, view_u16, view_u32, view_u64
from penstock.data.shards.format._batch_kernels import spans_summary
from penstock.data.shards.format._kernels import (
    BAD_LENGTH,
    BAD_SPAN_ORDER,
    BAD_TRAINED,
    CHUNK_TOKENS,
    OK,
    batch_at,
    check_document,
    checksums_of,
    has_span_list,
    line_of,
    locate,
    num_chunks,
    offsets_of,
    spans_are_right,
    spans_of,
    token_checksum,
    tokens_of,
)
from penstock.data.stores._kernels import bytes_checksum

_2, _3 = np.uint64(2), np.uint64(3)


@kernel
def check_batch(shard, size, line, layout, lengths, faults, weight_sums, seen):
    """Check all documents of one batch of a shard, and count what the manifest records about them.

    Args:
        shard: uint64, address of the shard.
        size: uint64, bytes of its mapping.
        line: uint64, address of the batch's line in the batch table, which `wrong_batch` has
            accepted.
        layout: (token_bytes int64, has_spans bool, vocab_size int64).
        lengths: uint32 [n, 2], of the batch's documents, from the lengths file.
        faults: uint8 [n], written: `OK` or what is wrong with each document.
        weight_sums: float64 [n], written: sum of the loss weights over tokens[1:].
        seen: int64 [5], updated: whether a loss weight is neither 0 nor 1; lowest and highest first
            id, lowest and highest last id.
    """
    token_bytes, has_spans, _ = layout
    batch = batch_at(line)
    first_tokens = offsets_of(shard + batch.token_offsets, 0)[0]
    first_checksums = offsets_of(shard + batch.checksum_offsets, 0)[0]
    for row in range(len(lengths)):
        length = np.int64(lengths[row, 0])
        faults[row] = check_document(shard, size, line, row, layout, length)
        if row == 0 and (first_tokens != 0 or first_checksums != 0):
            faults[row] = BAD_LENGTH
        if faults[row] != OK:
            continue
        trained, weight_sums[row] = max(length - 1, 0), np.float64(max(length - 1, 0))
        if has_spans and has_span_list(shard, line, row):
            first, count = spans_of(shard, size, line, row)
            skip = shard + (np.uint64(first) << _2)
            state, trained, weight_sums[row] = spans_summary(
                view_u32(batch.span_begins + skip, count), view_u32(batch.span_ends + skip, count),
                view_f32(batch.span_weights + skip, count), length,
            )  # fmt: skip
            seen[0] |= state == 1
            if state == 2:
                faults[row] = BAD_SPAN_ORDER
        if faults[row] == OK and trained != np.int64(lengths[row, 1]):
            faults[row] = BAD_TRAINED
        if length > 0:
            begin = tokens_of(shard, size, line, row, token_bytes, has_spans)[0]
            address = shard + batch.tokens + np.uint64(begin) * np.uint64(token_bytes)
            for side, place in ((1, np.int64(0)), (3, length - 1)):
                at = address + np.uint64(place) * np.uint64(token_bytes)
                token = (
                    np.int64(view_u16(at, 1)[0])
                    if token_bytes == 2
                    else np.int64(view_u32(at, 1)[0])
                )
                seen[side] = min(seen[side], token)
                seen[side + 1] = max(seen[side + 1], token)


@kernel
def check_sequences(lengths, pointers, documents, token_bytes, num_bytes):
    """Check a Megatron index.

    Args:
        lengths: int32 [n], not negative.
        pointers: int64 [n], byte positions, contiguous from 0 and inside `num_bytes`.
        documents: int64 [d + 1], borders of documents, increasing from 0 to n.
        token_bytes: 2 or 4.
        num_bytes: Size of the tokens' file.

    Returns:
        (−1 or the first wrong sequence, −1 or the first wrong border).
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
    """Tokens of documents made of several sequences: int32 [n], int64 [d + 1] borders, int64 [d]
    written.
    """
    for i in range(len(sums)):
        total = np.int64(0)
        for sequence in range(documents[i], documents[i + 1]):
            total += np.int64(lengths[sequence])
        sums[i] = total


@kernel
def find_ends(tokens, last_id, ends):
    """Find the ends of documents, one past each `last_id`.

    Args:
        tokens: uint16 or uint32 [tokens].
        last_id: The token that ends a document; of the dtype of `tokens`.
        ends: int64, written up to its length; empty to count first.

    Returns:
        Number of documents; tokens after the last `last_id` are one more.
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
    """Position of the first token that is not below `vocab_size`, or −1: uint16 or uint32 [tokens],
    int64.
    """
    for i in range(len(tokens)):
        if np.int64(tokens[i]) >= vocab_size:
            return i
    return -1


@kernel
def wrong_tokens(places, batches, layout, lengths, first, last):
    """The first of the documents [first, last) whose tokens or spans differ from their checksums,
    or −1.

    Args:
        places, batches: As in `_kernels.wrong_document`.
        layout: (token_bytes int64, has_spans bool, spans_only bool: check spans rather than
            tokens).
        lengths: uint32 [N, 2].
    """
    shard_starts, shard_first_batch, shard_addresses, shard_bytes, documents_per_batch = places
    token_bytes, has_spans, spans_only = layout
    for document in range(first, last):
        number, index, row = locate(document, shard_starts, shard_first_batch, documents_per_batch)
        shard, size, line = shard_addresses[number], shard_bytes[number], line_of(batches, index)
        length, batch = np.int64(lengths[document, 0]), batch_at(line)
        chunks = num_chunks(length)
        begin, count = tokens_of(shard, size, line, row, token_bytes, has_spans)
        word, words = checksums_of(shard, size, line, row)
        if count != length or words != chunks + np.int64(has_spans):
            return document
        stored = view_u64(shard + batch.checksums + (np.uint64(word) << _3), words)
        if spans_only:
            if not spans_are_right(shard, size, line, row, length, stored[chunks]):
                return document
            continue
        address = shard + batch.tokens + np.uint64(begin) * np.uint64(token_bytes)
        for chunk in range(chunks):
            part = min(CHUNK_TOKENS, length - chunk * CHUNK_TOKENS)
            if token_checksum(address, token_bytes, chunk, part) != stored[chunk]:
                return document
    return np.int64(-1)


@kernel
def compare_ranges(address, size, width, numbers, sums, sound):
    """Compare ranges of a table with their checksums.

    Args:
        address: uint64, address of the table.
        size: int64, its bytes.
        width: int64, bytes of each range but the last.
        numbers: int64 [n], the ranges.
        sums: uint64 [ranges], the checksum of each.
        sound: bool [n], set to False where they differ.
    """
    for i in range(len(numbers)):
        begin = numbers[i] * width
        found = bytes_checksum(address + np.uint64(begin), np.uint64(min(width, size - begin)))
        sound[i] &= found == sums[numbers[i]]
