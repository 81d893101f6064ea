"""Numbers by column as bytes: each takes the bits of its distance from the smallest of its column;
a zero takes one.
"""

import struct
import zlib
from typing import Annotated

import numpy as np

from penstock.core.arrays import Int64

_HEAD = struct.Struct("<qB")
"""Of each column: its smallest number that is not 0, and the bits of each number's distance from
it.
"""


def pack(numbers: Annotated[Int64, "rows columns"]) -> bytes:
    """Numbers as bytes, for `unpack`."""
    present = numbers != 0
    heads, bits = b"", []
    for column, there in zip(numbers.T, present.T, strict=True):
        values = column[there]
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        width = (high - low).bit_length()
        heads += _HEAD.pack(low, width)
        # Unsigned, so that the distance of any two numbers has room.
        distances = values.view(np.uint64) - np.int64(low).view(np.uint64)
        octets = distances.astype(">u8").view(np.uint8).reshape(-1, 8)
        bits.append(np.unpackbits(octets, axis=1)[:, 64 - width :].ravel())
    return zlib.compress(
        heads + np.packbits(present).tobytes() + np.packbits(np.concatenate(bits)).tobytes(), 9
    )


def unpack(packed: bytes, rows: int, columns: int) -> Annotated[Int64, "rows columns"]:
    """The numbers that `pack` was given.

    Raises:
        ValueError, zlib.error, struct.error: These bytes do not come from `pack` with as many rows
            and columns.
    """
    # What packs to some bytes may unpack to gigabytes.
    stream, most = (
        zlib.decompressobj(),
        columns * _HEAD.size + rows * columns * 8 + -(-rows * columns // 8) + 8,
    )
    data = stream.decompress(packed, most)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError(f"more than {most} bytes, or cut")
    heads = [_HEAD.unpack_from(data, column * _HEAD.size) for column in range(columns)]
    body = np.unpackbits(np.frombuffer(data, np.uint8, offset=columns * _HEAD.size))
    present = body[: rows * columns].reshape(rows, columns).astype(bool)
    offset = -(-rows * columns // 8) * 8
    numbers = np.zeros((rows, columns), np.int64)
    for (low, width), there, column in zip(heads, present.T, numbers.T, strict=True):
        count = int(there.sum())
        bits = np.zeros((count, 64), np.uint8)
        bits[:, 64 - width :] = body[offset : offset + count * width].reshape(count, width)
        distances = np.packbits(bits, axis=1).view(">u8").ravel().astype(np.uint64)
        column[there] = (distances + np.int64(low).view(np.uint64)).view(np.int64)
        offset += count * width
    if not 0 <= len(body) - offset < 8:
        raise ValueError(f"{len(body) - offset} bits are left over")
    return numbers
