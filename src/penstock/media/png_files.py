"""What Pillow does not say about a PNG: metadata that follows its pixels, and whether all of its
pixels are there.

Source: the PNG specification, third edition, sections 5 (chunks) and 8.1 (interlacing).
"""

import re
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.core.errors import RecordError

if TYPE_CHECKING:
    import PIL.Image

MOST_PIXELS_PER_BYTE = 8 * 1032
"""Of one bit each, compressed by deflate as well as it can."""

_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
_NAME = re.compile(rb"\w{4}")
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Type of colour → numbers of a pixel."""
_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""First column and row, and steps between columns and rows, of the passes of an interlaced
image.
"""
_STEP = 1 << 20
"""Bytes that are decompressed at once."""


def with_late_metadata(data: bytes, is_animated: bool) -> bytes | None:
    """A PNG file without pixels, with the metadata that follows them before them; None: no metadata
    follows.

    Args:
        data: The bytes of a file.
        is_animated: Whether it has several frames; metadata counts up to the second one.
    """
    pixels, late = 0, []
    for name, begin, size in _chunks(data):
        if pixels and is_animated and name == b"fcTL":
            break
        if name == b"IDAT":
            pixels = pixels or begin - 8
        elif pixels and name in _METADATA:
            late.append(_chunk(name, data[begin : begin + size]))
    return (
        b"".join([data[:pixels], *late, _chunk(b"IDAT", b""), _chunk(b"IEND", b"")])
        if late
        else None
    )


def check_pixels(image: "PIL.Image.Image", data: bytes) -> None:
    """Refuse a PNG whose compressed pixels end before its last row: Pillow leaves the rest 0
    without a word.

    Args:
        image: Decoded by Pillow.
        data: The bytes of its file.

    Raises:
        RecordError: Pixels are missing.
    """
    last_row = image.crop((0, image.height - 1, image.width, image.height)).tobytes()
    if any(last_row) and not image.info.get("interlace"):
        return
    left = expected = _raw_size(data)
    decompress = zlib.decompressobj()
    for name, begin, size in _chunks(data):
        rest = data[begin : begin + size] if name == b"IDAT" else b""
        while rest and left > 0:
            left -= len(decompress.decompress(rest, _STEP))
            rest = decompress.unconsumed_tail
    while left > 0 and (more := decompress.decompress(decompress.unconsumed_tail, _STEP)):
        left -= len(more)
    if left > 0:
        raise RecordError(
            f"the image (PNG, {image.width}x{image.height}) is damaged: it has "
            f"{expected - left:,} bytes of pixels, expected {expected:,}"
        )


def _raw_size(data: bytes) -> int:
    """Bytes of the pixels of a PNG before compression, with one more for each row."""
    width, height, depth, colour, _, _, is_interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    bits = depth * _CHANNELS[colour]
    passes = _PASSES if is_interlaced else ((0, 0, 1, 1),)
    total = 0
    for column, row, across, down in passes:
        columns, rows = -(-(width - column) // across), -(-(height - row) // down)
        total += rows * (1 + -(-columns * bits // 8)) if columns > 0 and rows > 0 else 0
    return total


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, first byte of the content, its bytes) of each chunk up to the end of the image."""
    at = 8
    while at + 8 <= len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        if name == b"IEND" or not _NAME.match(name):
            return
        yield name, at + 8, size
        at += 12 + size


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
