"""Cuts files into blocks of whole lines; only the byte b"\\n" ends a line.

A byte range, of a local or a remote file, gives the lines whose first byte lies in it, so that ranges side by side give
each line once. A stream (compressed, or a small remote file) is read front to back. A UTF-8 BOM at the start of a file
is dropped.
"""

from collections.abc import Iterator

import numpy as np

from penstock.sources.files import ReadRange, SourceFile, open_ranges, open_stream

BLOCK_BYTES = 4 << 20
"""Bytes in a block, about; a block holds at least one line, however long."""

REMOTE_BLOCK_BYTES = 16 << 20
"""The same for ranges of remote files, where each block waits for an answer."""

TAIL_BYTES = 1 << 16
"""Bytes read first when only the end of a line is looked for."""

BOM = b"\xef\xbb\xbf"
NEWLINE = ord("\n")


def count_newlines(file: SourceFile, begin: int, end: int) -> int:
    """Newlines in bytes [begin, end) of a file; of a local one some GB/s."""
    block = REMOTE_BLOCK_BYTES if file.is_remote else BLOCK_BYTES
    total = 0
    with open_ranges(file) as read:
        while begin < end:
            data = read(begin, min(block, end - begin))
            if not data:
                break
            total += num_newlines(data)
            begin += len(data)
    return total


def num_newlines(data: bytes | memoryview) -> int:
    """Newlines in `data`; 8 GB/s, twice as fast as `bytes.count`."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == NEWLINE))


def cut_range(file: SourceFile, begin: int, end: int) -> Iterator[tuple[bytes | memoryview, int, str | None]]:
    """The lines of a file that begin in bytes [begin, end).

    Yields:
        Whole lines; the raw bytes they took; and why the rest is lost, when it is: then there are no lines.
    """
    size = file.size_bytes
    block = REMOTE_BLOCK_BYTES if file.is_remote else BLOCK_BYTES
    with open_ranges(file) as read:
        position, counted = begin, begin
        if begin == 0:
            position = len(BOM) if read(0, min(len(BOM), size)) == BOM else 0
        else:
            position = _next_line(read, begin - 1, end, size)
        while position < end:
            data = _read_lines(read, position, min(block, end - position), size)
            if data is None:
                yield b"", 0, f"the file has become shorter: it had {size} when the work began"
                return
            position += len(data)
            yield data, min(position, end) - counted, None
            counted = min(position, end)
        if counted < end:
            yield b"", end - counted, None


def _next_line(read: ReadRange, position: int, end: int, size: int) -> int:
    """Where the first line after `position` begins; `end` if that is not before it."""
    while position < end:
        data = read(position, min(TAIL_BYTES, size - position))
        at = data.find(b"\n")
        if at >= 0 or not data:
            return position + at + 1 if data else end
        position += len(data)
    return end


def _read_lines(read: ReadRange, position: int, amount: int, size: int) -> bytes | memoryview | None:
    """Whole lines from `position`, `amount` bytes or a little more or less; None when the file was cut short."""
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


def cut_stream(file: SourceFile) -> Iterator[tuple[bytes | memoryview, int, str | None]]:
    """All lines of a file that is read front to back; yields as `cut_range` does."""
    carry: list[bytes] = []
    counted, first, done = 0, True, 0
    with open_stream(file) as stream:
        while True:
            try:
                data = stream.read(BLOCK_BYTES)
                done += len(data)
            except (OSError, EOFError) as error:
                whole, newline, _ = b"".join([*carry, _salvage(file, done)]).rpartition(b"\n")
                if newline:
                    yield (whole + newline).removeprefix(BOM if first else b""), 0, None
                yield (
                    b"",
                    file.size_bytes - counted,
                    f"the file cannot be read further: {error}; it was cut, or is damaged",
                )
                return
            if first and data.startswith(BOM):
                data = data[len(BOM) :]
            first = False
            last = data.rfind(b"\n")
            if last < 0 and data:
                carry.append(data)
                continue
            block = b"".join([*carry, data[: last + 1]])
            carry = [data[last + 1 :]]
            position = file.size_bytes if not data else min(stream.raw_position(), file.size_bytes)
            if block or not data:
                yield block, position - counted, None
                counted = position
            if not data:
                return


def _salvage(file: SourceFile, offset: int) -> bytes:
    """What can be read of a damaged file after its first `offset` decompressed bytes, up to the fault.

    A read that fails gives nothing of what it had decompressed, so the file is read again, in ever smaller pieces.
    """
    found = bytearray()
    for step in (1 << 16, 1 << 8, 1):
        with open_stream(file) as stream:
            left = offset + len(found)
            try:
                while left and (passed := len(stream.read(min(left, step if left < BLOCK_BYTES else BLOCK_BYTES)))):
                    left -= passed
                while piece := stream.read(step):
                    found += piece
            except (OSError, EOFError):
                continue
    return bytes(found)
