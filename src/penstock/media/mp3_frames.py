"""Frames of an MP3, counted by their headers: how many samples it has, and whether it was cut.

Source: ISO/IEC 11172-3, 2.4.1.3, and 13818-3 for the headers. The first frame may hold, instead of
samples, how many frames follow: the tags Xing, Info and VBRI.
"""

import struct
from typing import NamedTuple

from penstock.core.errors import RecordError

_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
"""Version (3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5) → samples a second."""
_BITRATES = {
    (True, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""(whether it is MPEG 1, layer) → kilobits a second."""


class _Frame(NamedTuple):
    size: int
    """In bytes."""
    samples: int


def is_mp3(data: bytes, at: int) -> bool:
    """Whether a frame begins at a place."""
    return _frame_at(data, at) is not None


def end_of_tags(data: bytes) -> int:
    """Where the ID3 tags at the beginning of a file end."""
    at = 0
    while data[at : at + 3] == b"ID3" and at + 10 <= len(data):
        size = sum(
            (byte & 0x7F) << shift
            for byte, shift in zip(data[at + 6 : at + 10], (21, 14, 7, 0), strict=True)
        )
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    return at


def count_samples(data: bytes, at: int) -> tuple[int, bool]:
    """Samples in the frames of an MP3.

    Args:
        data: The bytes of a file.
        at: Where its first frame begins.

    Returns:
        Samples of each channel, and whether the first frame says how many frames follow.

    Raises:
        RecordError: It ends within a frame, or has fewer frames than its first one says.
    """
    frame = _frame_at(data, at)
    promised = None if frame is None else _promised_frames(data[at : at + frame.size])
    count, samples = (0 if promised is None else -1), 0
    while frame := _frame_at(data, at):
        if at + frame.size > len(data):
            raise RecordError("the sound is damaged: it ends within a frame, so it was cut")
        samples += frame.samples if count >= 0 else 0
        count, at = count + 1, at + frame.size
    if count < (promised or 0):
        raise RecordError(
            f"the sound is damaged: it has {count:,} of {promised:,} frames, so it was cut"
        )
    return samples, promised is not None


def _frame_at(data: bytes, at: int) -> _Frame | None:
    if at + 4 > len(data) or data[at] != 0xFF or data[at + 1] & 0xE0 != 0xE0:
        return None
    version, layer = data[at + 1] >> 3 & 3, 4 - (data[at + 1] >> 1 & 3)
    bitrate, speed, padding = data[at + 2] >> 4, data[at + 2] >> 2 & 3, data[at + 2] >> 1 & 1
    if version == 1 or layer == 4 or bitrate in (0, 15) or speed == 3:
        return None
    samples = 384 if layer == 1 else 576 if layer == 3 and version != 3 else 1152
    unit = 4 if layer == 1 else 1
    bits = 1000 * _BITRATES[version == 3, layer][bitrate - 1]
    return _Frame((samples // 8 // unit * bits // _RATES[version][speed] + padding) * unit, samples)


def _promised_frames(frame: bytes) -> int | None:
    """How many frames follow the first one, if it says so instead of holding samples; 0: it does
    not say how many.
    """
    at = next((at for name in (b"Xing", b"Info") if (at := frame.find(name, 4, 48)) >= 0), None)
    if at is not None and len(frame) >= at + 12:
        flags, number = struct.unpack_from(">II", frame, at + 4)
        return number if flags & 1 else 0
    return 0 if frame[36:40] == b"VBRI" else None
