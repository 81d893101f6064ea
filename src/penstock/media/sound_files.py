"""Files of sounds: rate, channels and length as their headers say, and whether all of it is there.

libsndfile gives what is left of a file that was cut, or skips a damaged page, without a word. So
containers are walked here before anything is decoded: samples must not end behind the file, pages
of Ogg must be whole, in order and as their checksums say, and frames of MP3 must be as many as its
first one says.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from penstock.core.errors import MissingExtraError, RecordError, record_errors
from penstock.media.mp3_frames import count_samples, end_of_tags, is_mp3

KNOWN = "WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF, AU, CAF, RF64, W64"
"""What is read; libsndfile reads more, but does not notice where those are cut."""
RATES = (100, 1_000_000)
"""Lowest and highest samples a second that are believed."""
MOST_CHANNELS = 64

_UNKNOWN_LENGTH = 1 << 60
"""As many frames and more mean to libsndfile that a header gives no length."""
_MOST_TRIMMED = 1 << 13
"""Samples at both ends of an MP3 that are its encoder's own, at most: two numbers of 12 bits."""
_MOST_CHUNKS = 10_000
Places = dict[bytes, tuple[int, int]]
"""Name of a chunk → first byte of its content, and its bytes."""
_PCM, _EXTENSIBLE = 1, 0xFFFE
_SUBTYPE = bytes.fromhex("000000001000800000aa00389b71")
"""End of the identifier of a format in an extensible header of WAV; its first two bytes are the
format.
"""
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
"""Each byte with its bits in reverse order: Ogg's checksum is that of zlib, read from the other
end.
"""
_PAGE = struct.Struct("<4sBBqIIIB")
"""Name, version, flags, position, stream, number, checksum, number of sizes that follow."""
_LAST_PAGE = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SoundFile:
    """What the header of a sound says, of a file that is whole."""

    frames: int
    """Samples of each channel."""
    rate: int
    channels: int
    width: int = 0
    """WAV with whole numbers: bytes of a sample; 0: libsndfile decodes it."""
    begin: int = 0
    """WAV with whole numbers: the first byte of the samples."""


def sound_file(data: bytes) -> SoundFile:
    """The header of a sound.

    Raises:
        RecordError: It is no sound of a known format, cut, damaged, empty, or its rate is not
            plausible.
        MissingExtraError: soundfile is needed, and not installed.
    """
    begin = end_of_tags(data)
    magic = data[begin : begin + 4]
    chunks = next((one for one in _CHUNKED if one.accepts(data)), None)
    if chunks is not None:
        places = _checked_chunks(data, chunks)
        plain = _plain_wave(data, places) if data[:4] == b"RIFF" else None
        return _checked(plain or _by_libsndfile(data))
    if is_mp3(data, begin):
        return _checked(_mp3(data, begin))
    if magic == b"OggS":
        _check_pages(data, begin)
    elif data[:4] == b".snd" and len(data) >= 12:
        _check_end(data, *struct.unpack_from(">II", data, 4))
    elif magic != b"fLaC":
        found = f"{len(data):,} bytes that begin {data[:8]!r}"
        raise RecordError(f"not a sound of a known format ({found}); known: {KNOWN}")
    return _checked(_by_libsndfile(data))


def _checked(found: SoundFile) -> SoundFile:
    if not RATES[0] <= found.rate <= RATES[1]:
        raise RecordError(
            f"the sound's header says {found.rate:,} samples a second; expected {RATES[0]:,} "
            f"to {RATES[1]:,}"
        )
    if not 1 <= found.channels <= MOST_CHANNELS:
        raise RecordError(
            f"the sound has {found.channels:,} channels; expected 1 to {MOST_CHANNELS}"
        )
    if found.frames >= _UNKNOWN_LENGTH:
        raise RecordError(
            "the sound's header does not say how long it is; convert it once more, into a file"
        )
    if found.frames < 1:
        raise RecordError("the sound is empty")
    return found


# Containers of chunks: WAV and the like.


class _Chunks(NamedTuple):
    """How a container is made of chunks, each with a name and a size before its content."""

    begins: tuple[bytes, ...]
    kinds: tuple[bytes, ...]
    """What follows after the size of the whole; empty: anything."""
    first: int
    """Where its first chunk is."""
    name_bytes: int
    size: str
    """As `struct` reads it."""
    samples: bytes
    """First four letters of the chunk with the samples."""
    align: int
    is_inclusive: bool = False
    """Whether a size counts name and size, too."""

    def accepts(self, data: bytes) -> bool:
        """Whether a file is such a container."""
        return data.startswith(self.begins) and (not self.kinds or data[8:12] in self.kinds)

    def walk(self, data: bytes) -> Iterator[tuple[bytes, int, int]]:
        """(first four letters of the name, first byte of the content, its bytes) of each chunk that
        has a head.
        """
        head, at = self.name_bytes + struct.calcsize(self.size), self.first
        while at + head <= len(data):
            (size,) = struct.unpack_from(self.size, data, at + self.name_bytes)
            size -= head if self.is_inclusive else 0
            yield data[at : at + 4], at + head, size
            if size < 0:
                return
            at += head + size + -size % self.align


_CHUNKED = (
    _Chunks((b"RIFF", b"RF64"), (b"WAVE",), 12, 4, "<I", b"data", 2),
    _Chunks((b"RIFX",), (b"WAVE",), 12, 4, ">I", b"data", 2),
    _Chunks((b"FORM",), (b"AIFF", b"AIFC"), 12, 4, ">I", b"SSND", 2),
    _Chunks((b"riff",), (), 40, 16, "<q", b"data", 8, True),
    _Chunks((b"caff",), (), 8, 4, ">q", b"data", 1),
)


def _checked_chunks(data: bytes, chunks: _Chunks) -> Places:
    """The chunks up to the samples; refuses a container that has none, or ends before they do."""
    places: Places = {}
    for number, (name, begin, size) in enumerate(chunks.walk(data)):
        places.setdefault(name, (begin, size))
        if name == chunks.samples:
            break
        if number > _MOST_CHUNKS:
            raise RecordError(
                f"the sound is damaged: it has more than {_MOST_CHUNKS:,} chunks before its samples"
            )
    else:
        raise RecordError("the sound is damaged: it has no chunk with samples, or ends before it")
    if size == 0xFFFFFFFF and b"ds64" in places:
        # Its size takes 64 bits, in a chunk of their own.
        size = int.from_bytes(data[places[b"ds64"][0] + 8 :][:8], "little")
    if not (data[:4] == b"caff" and size == -1):
        _check_end(data, begin, size)
    return places


def _check_end(data: bytes, begin: int, size: int) -> None:
    if size == 0xFFFFFFFF and data[:4] == b".snd":
        return  # not known
    there = max(len(data) - begin, 0)
    if not 0 <= size <= there:
        raise RecordError(
            f"the sound is damaged: its header says {size:,} bytes of samples, and {there:,} "
            "are there; it was cut, or written to a pipe"
        )


def _plain_wave(data: bytes, places: Places) -> SoundFile | None:
    """A WAV with whole numbers, which needs no other package; None: it has other samples."""
    begin, size = places.get(b"fmt ", (0, 0))
    if size < 16 or begin + 16 > len(data):
        raise RecordError(
            "the sound is damaged: its header does not say how its samples are stored"
        )
    kind, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", data, begin)
    if kind == _EXTENSIBLE and size >= 40 and data[begin + 26 : begin + 40] == _SUBTYPE:
        (kind,) = struct.unpack_from("<H", data, begin + 24)
    width = -(-bits // 8)
    if kind != _PCM or block > channels * width > 0:
        return None  # also samples with padding, which libsndfile knows
    if not 1 <= width <= 4:
        raise RecordError(f"the sound is damaged: {bits} bits a sample; expected 8, 16, 24 or 32")
    begin, size = places[b"data"]
    return SoundFile(
        frames=size // (width * max(channels, 1)),
        rate=rate,
        channels=channels,
        width=width,
        begin=begin,
    )


# All others.


@final
class _Bytes(io.BytesIO):
    """Bytes of a sound. A damaged one makes libsndfile ask for places before its begin, in a
    callback from which an exception would be printed and lost: it gets the begin.
    """

    def seek(self, offset: int, whence: int = 0, /) -> int:
        begin = {0: 0, 1: self.tell(), 2: len(self.getbuffer())}[whence]
        return super().seek(max(begin + offset, 0))


def open_sound(data: bytes) -> Any:
    """A file that libsndfile reads, as a `soundfile.SoundFile`, to be used within `with`."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise MissingExtraError("soundfile", "audio") from error
    with record_errors(
        f"not a sound that can be read ({len(data):,} bytes that begin {data[:8]!r})"
    ):
        return soundfile.SoundFile(_Bytes(data))


def _by_libsndfile(data: bytes) -> SoundFile:
    with open_sound(data) as file, record_errors("the sound's header is damaged"):
        return SoundFile(
            frames=int(file.frames), rate=int(file.samplerate), channels=int(file.channels)
        )


def _mp3(data: bytes, begin: int) -> SoundFile:
    """The header of an MP3, with its true length: without a tag that says it, libsndfile guesses by
    the file's size.
    """
    samples, is_promised = count_samples(data, begin)
    found = _by_libsndfile(data)
    if not is_promised and found.frames >= samples:
        return replace(found, frames=samples)
    if not samples - _MOST_TRIMMED <= found.frames <= samples:
        raise RecordError(
            f"the sound is damaged, or its header gives no length: {samples:,} samples are in "
            f"its frames, and {found.frames:,} would be decoded; convert it to FLAC or WAV"
        )
    return found


# Ogg: RFC 3533, section 6.


def _page_checksum(page: bytes) -> int:
    without = page[:22] + bytes(4) + page[26:]
    backwards = zlib.crc32(without.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{backwards:032b}"[::-1], 2)


def _check_pages(data: bytes, at: int) -> None:
    """Refuse an Ogg file that was cut, or in which a page is damaged or missing; `at` is its first
    page.
    """
    following, unfinished = dict[int, int](), set[int]()
    while data[at : at + 4] == b"OggS":
        end = _end_of_page(data, at)
        _, _, flags, _, stream, number, checksum, _ = _PAGE.unpack_from(data, at)
        if checksum != _page_checksum(data[at:end]):
            raise RecordError(
                f"the sound is damaged: its page at byte {at:,} differs from its checksum"
            )
        if number != following.get(stream, number):
            raise RecordError(f"the sound is damaged: a page is missing before byte {at:,}")
        following[stream] = number + 1 & 0xFFFFFFFF
        unfinished = unfinished - {stream} if flags & _LAST_PAGE else unfinished | {stream}
        at = end
    if unfinished:
        raise RecordError(
            f"the sound is damaged: its pages end at byte {at:,} without a last one, so it was cut"
        )


def _end_of_page(data: bytes, at: int) -> int:
    end = at + _PAGE.size
    if end <= len(data):
        end += data[end - 1] + sum(data[end : end + data[end - 1]])
    if end > len(data):
        raise RecordError("the sound is damaged: it ends within a page, so it was cut")
    return end
