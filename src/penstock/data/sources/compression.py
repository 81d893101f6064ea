"""Decompresses files front to back: gzip, bzip2 and xz with Python's own libraries, Zstandard and
LZ4 with Arrow's.

As with the gzip, bzip2 and xz programs, several streams in a row are one file, and zeros after the
last stream are padding. A Zstandard frame with a window of more than 128 MiB is decoded whole, in
memory, because Arrow cannot decode such a frame piece by piece.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Protocol, final

import pyarrow as pa

from penstock.core.errors import RecordError
from penstock.data.stores.remote_files import Unreadable

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4"}
"""Extension → codec."""

PACKED = (
    ".zip",
    ".7z",
    ".rar",
    ".tgz",
    ".tbz2",
    ".txz",
    ".br",
    ".lzma",
    ".lzo",
    ".sz",
    ".snappy",
    ".z",
)
"""Extensions of compressed files and archives that are not supported."""

RAW_BYTES = 1 << 18
"""Compressed bytes per read."""

ARROW_WINDOW = 1 << 27
"""Largest window of a Zstandard frame that Arrow decodes piece by piece."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_HEADER = 18
"""Bytes of the longest header of a frame."""
_MOST_TIMES = 1 << 16
"""Upper bound of Zstandard's ratio: a block of at most 128 KiB takes at least three bytes."""
_TOO_LARGE = "requires too much memory"
"""libzstd's message for a window above its limit."""


class Reader(Protocol):
    """Bytes, front to back."""

    def read(self, amount: int | None = None) -> bytes:
        """Read `amount` bytes, fewer only at the end; None: all that are left."""


class RawFile(Reader, Protocol):
    """An open file: Python's, Arrow's or ours of a store."""

    def seek(self, position: int, /) -> int:
        """Move."""

    def tell(self) -> int:
        """Where it is."""


def decompressed(raw: RawFile, codec: str, path: str) -> Reader:
    """The decompressed bytes of a file.

    Args:
        raw: The file, open at its start.
        codec: One of the values of `COMPRESSIONS`.
        path: For messages.

    Raises:
        RecordError: The file is sound, but needs a Zstandard window that is not supported here.
    """
    if codec in _STREAMS:
        return Streams(raw, _STREAMS[codec])
    if codec == "zstd" and (whole := _wide_frame(raw, path)) is not None:
        return whole
    return _Arrow(pa.CompressedInputStream(raw, codec), path)


@final
class _Gzip:
    """zlib's decompressor with the interface of bz2's and lzma's."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(31)  # 31: a gzip header, and its checksum verified

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def waiting(self) -> int:
        return len(self._inner.unconsumed_tail)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


class _Decompressor(Protocol):
    """A decompressor of one stream, as bz2 and lzma have them."""

    def decompress(self, data: bytes, max_length: int) -> bytes: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


_STREAMS: dict[str, Callable[[], _Decompressor]] = {
    "gzip": _Gzip,
    "bz2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}


@final
class Streams:
    """Compressed streams, one after another."""

    def __init__(self, raw: RawFile, new: Callable[[], _Decompressor]) -> None:
        self._raw, self._new = raw, new
        self._inner: _Decompressor | None = new()
        self._left = b""

    def read(self, amount: int | None = None) -> bytes:
        """See `Reader`."""
        pieces: list[bytes] = []
        missing = amount
        while missing is None or missing > 0:
            piece = self._next(RAW_BYTES * 4 if missing is None else missing)
            if not piece:
                break
            pieces.append(piece)
            missing = None if missing is None else missing - len(piece)
        return b"".join(pieces)

    @property
    def waiting(self) -> int:
        """Raw bytes that were read but not used yet, except those inside the decompressors of bz2
        and xz.
        """
        inner = self._inner.waiting if isinstance(self._inner, _Gzip) else 0
        return len(self._left) + inner

    def _next(self, most: int) -> bytes:
        """Some bytes; none at the end."""
        while True:
            if self._inner is None:
                if not self._find_stream():
                    return b""
                self._inner = self._new()
            inner = self._inner
            piece, fed = self._feed(inner, most)
            if inner.eof:
                self._left, self._inner = inner.unused_data, None
            elif not piece and not fed:
                raise Unreadable(
                    "its compressed stream ends before its end mark, so the file was cut", cut=True
                )
            if piece:
                return piece

    def _feed(self, inner: _Decompressor, most: int) -> tuple[bytes, bool]:
        """The decompressor's next output, and whether it had any input."""
        data = b""
        if wanted := inner.needs_input:
            data = self._left or self._raw.read(RAW_BYTES)
            self._left = b""
        try:
            return inner.decompress(data, most), bool(data) or not wanted
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
            raise Unreadable(f"its compressed data are damaged ({error})") from error

    def _find_stream(self) -> bool:
        """Skip padding; returns whether another stream follows."""
        while True:
            self._left = self._left.lstrip(b"\0")
            if not self._left:
                self._left = self._raw.read(RAW_BYTES)
                if not self._left:
                    return False
                continue
            return True


@final
class _Arrow:
    """One of Arrow's streams."""

    def __init__(self, inner: Reader, path: str) -> None:
        self._inner, self._path = inner, path

    def read(self, amount: int | None = None) -> bytes:
        try:
            return self._inner.read(amount)
        except OSError as error:
            if _TOO_LARGE in str(error):
                raise _too_wide(self._path) from error
            cut = "Truncated" in str(error)
            raise Unreadable(
                f"its compressed data are {'cut' if cut else 'damaged'} ({error})", cut=cut
            ) from error


def _wide_frame(raw: RawFile, path: str) -> Reader | None:
    """The content of a Zstandard frame with a window too large for Arrow's stream; None (and
    rewind) for others.
    """
    window, size = _zstd_header(raw.read(_ZSTD_HEADER))
    raw.seek(0)
    if window <= ARROW_WINDOW:
        return None
    if size is None:
        raise _too_wide(path)
    data = raw.read()
    if size > len(data) * _MOST_TIMES:
        raise Unreadable(
            f"its header claims {size:,} bytes of content, more than {len(data):,} bytes can hold"
        )
    try:
        return _Arrow(pa.BufferReader(pa.Codec("zstd").decompress(data, size)), path)
    except MemoryError as error:
        raise Unreadable(
            f"its header claims {size:,} bytes of content, more than there is memory for"
        ) from error
    except OSError as error:
        if "too small" in str(error):  # another frame follows
            raise _too_wide(path) from error
        raise Unreadable(f"its compressed data are cut or damaged ({error})") from error


def _zstd_header(head: bytes) -> tuple[int, int | None]:
    """Window and content size of a file's first frame, in bytes; 0 and None if unknown (RFC
    8878).
    """
    if head[:4] != _ZSTD_MAGIC or len(head) < 6:
        return 0, None
    flags = head[4]
    single = bool(flags & 0x20)
    at = 5 if single else 6
    exponent, mantissa = head[5] >> 3, head[5] & 7
    window = (1 << (10 + exponent)) // 8 * (8 + mantissa)
    at += (0, 1, 2, 4)[flags & 3]
    length = (int(single), 2, 4, 8)[flags >> 6]
    if not length:
        return window, None
    size = int.from_bytes(head[at : at + length], "little") + (256 if length == 2 else 0)
    return size if single else window, size


def _too_wide(path: str) -> RecordError:
    return RecordError(
        f"{path}: was compressed with a window of more than {ARROW_WINDOW >> 20} MiB, which is not "
        "supported; compress it again: zstd -dc -M2048MB FILE | zstd -o NEW.zst"
    )
