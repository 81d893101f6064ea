"""Cuts files into blocks of whole lines; only the byte b"\\n" ends a line.

A byte range of a local or remote file gives the lines that begin in it, so adjacent ranges give
each line once. A stream (a compressed file, or a small remote one) is read front to back. A UTF-8
BOM at the start of a file is dropped.
"""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.sources.files import (
    ReadRange,
    SourceFile,
    open_ranges,
    open_stream,
    shorter,
    wrong_name,
)
from penstock.data.sources.signatures import HEAD_BYTES, recognise
from penstock.data.stores.remote_files import Unreadable

BLOCK_BYTES = 4 << 20
"""Approximate bytes per block; a block holds at least one line, however long."""

BLOCK_LINES = 1 << 14
"""Maximum lines per parsed block: each may become a reject, which takes more memory than its
line.
"""

REMOTE_BLOCK_BYTES = 16 << 20
"""`BLOCK_BYTES` for ranges of remote files, where each block is a request."""

TAIL_BYTES = 1 << 16
"""Bytes of the first read when only the end of a line is wanted."""

BOM = b"\xef\xbb\xbf"
NEWLINE = ord("\n")


def count_newlines(file: SourceFile, begin: int, end: int) -> int:
    """Number of newlines in bytes [begin, end) of a file; gigabytes per second for a local file.

    If the file cannot be read further, counting stops there; the line reader reports it.
    """
    block = REMOTE_BLOCK_BYTES if file.is_remote else BLOCK_BYTES
    total = 0
    with open_ranges(file) as read, suppress(Unreadable):
        while begin < end and (data := read(begin, min(block, end - begin))):
            total += num_newlines(data)
            begin += len(data)
    return total


def num_newlines(data: bytes | memoryview) -> int:
    """Number of newlines in `data`; 8 GB/s, twice as fast as `bytes.count`."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == NEWLINE))


def cut_range(file: SourceFile, begin: int, end: int) -> Iterator[tuple[bytes | memoryview, int]]:
    """The lines of a file that begin in bytes [begin, end).

    Yields:
        Whole lines, and the raw bytes they took.

    Raises:
        Unreadable: The file has become shorter, or cannot be read.
    """
    size = file.size_bytes
    block = REMOTE_BLOCK_BYTES if file.is_remote else BLOCK_BYTES
    with open_ranges(file) as read:
        position, counted = begin, begin
        if begin == 0:
            position = len(BOM) if read(0, min(len(BOM), size)) == BOM else 0
        else:
            position = next_line(read, begin - 1, end, size)
        while position < end:
            data = _read_lines(read, position, min(block, end - position), size)
            if data is None:
                raise Unreadable(shorter(size), position)
            if not position and (found := recognise(bytes(data[:HEAD_BYTES]))) is not None:
                raise RecordError(wrong_name(file, found))
            position += len(data)
            yield data, min(position, end) - counted
            counted = min(position, end)
        if counted < end:
            yield b"", end - counted


def next_line(read: ReadRange, position: int, end: int, size: int) -> int:
    """Where the first line after `position` begins; `end` if it does not begin before that.

    Raises:
        Unreadable: The file has become shorter.
    """
    while position < end:
        data = read(position, min(TAIL_BYTES, size - position))
        if not data:
            raise Unreadable(shorter(size), position)
        at = data.find(b"\n")
        if at >= 0:
            return position + at + 1
        position += len(data)
    return end


def _read_lines(
    read: ReadRange, position: int, amount: int, size: int
) -> bytes | memoryview | None:
    """Whole lines from `position`, about `amount` bytes; None if the file has become shorter."""
    data = read(position, min(amount, size - position))
    if not data:
        return None
    if position + len(data) == size:
        return data
    last = data.rfind(b"\n")
    if last >= 0:
        return memoryview(data)[: last + 1]
    pieces, total = [data], len(data)
    while position + total < size:
        more = read(position + total, min(max(total, TAIL_BYTES), size - position - total))
        if not more:
            return None
        at = more.find(b"\n")
        pieces.append(more[: at + 1] if at >= 0 else more)
        total += len(pieces[-1])
        if at >= 0:
            break
    return b"".join(pieces)


def cut_stream(file: SourceFile) -> Iterator[tuple[bytes | memoryview, int]]:
    """All lines of a file that is read front to back; yields what `cut_range` yields.

    Raises:
        Unreadable: The file was cut, after all its whole lines; or it is damaged, after some lines
            that may be wrong.
    """
    carry: list[bytes] = []
    counted = 0
    for data, position in read_blocks(file):
        last = data.rfind(b"\n")
        if last < 0 and data:
            carry.append(data)
            continue
        block = b"".join([*carry, data[: last + 1]])
        carry = [data[last + 1 :]]
        if block or not data:
            yield block, max(position - counted, 0)
            counted = max(position, counted)


def read_blocks(file: SourceFile) -> Iterator[tuple[bytes, int]]:
    """All bytes of a file, decompressed, front to back.

    Yields:
        Bytes, and the raw bytes read so far; no bytes at the end.

    Raises:
        Unreadable: The file was cut, after all bytes before the cut; or it is damaged, after some
            that may be wrong.
    """
    done = 0
    with open_stream(file) as stream:
        while True:
            try:
                data, position = stream.read(BLOCK_BYTES), stream.raw_position()
            except Unreadable as error:
                data, position = _salvage(file, done) if error.cut else (b"", 0)
                if data := data if done else data.removeprefix(BOM):
                    yield data, position
                raise
            yield data if done else data.removeprefix(BOM), position if data else file.size_bytes
            if not data:
                return
            done += len(data)


def _salvage(file: SourceFile, offset: int) -> tuple[bytes, int]:
    """The content of a cut file after its first `offset` decompressed bytes, and the raw bytes read
    for it.

    A failed read discards decompressed data, so it is tried again with smaller reads.
    """
    found, position = bytearray(), 0
    for step in (1 << 16, 1 << 8, 1):
        with open_stream(file) as stream:
            left = offset + len(found)
            try:
                while left and (
                    passed := len(
                        stream.read(min(left, step if left < BLOCK_BYTES else BLOCK_BYTES))
                    )
                ):
                    left -= passed
                while piece := stream.read(step):
                    found += piece
            except Unreadable as error:
                position = error.position
    return bytes(found), position


def few_lines(
    data: bytes | memoryview, size_bytes: int
) -> Iterator[tuple[bytes | memoryview, int, int]]:
    """Whole lines in pieces of at most `BLOCK_LINES`: (lines, their newlines, the raw bytes they
    took).
    """
    count = num_newlines(data)
    if count <= BLOCK_LINES:
        yield data, count, size_bytes
        return
    ends = (
        np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)[BLOCK_LINES - 1 :: BLOCK_LINES] + 1
    )
    begin = counted = 0
    for end in [*ends.tolist(), len(data)]:
        if end > begin:
            piece = memoryview(data)[begin:end]
            position = size_bytes * end // len(data)
            yield piece, num_newlines(piece), position - counted
            begin, counted = end, position
