"""Sounds: files become one channel of float32 samples at the rate that a model's processor expects.

WAV files with whole numbers are read by Python's own reader. Other formats (FLAC, Ogg, MP3) need the package soundfile,
and another rate needs soxr; both come with the extra `audio`. Nothing is fetched here.
"""

import io
import wave
from typing import Any

import numpy as np

from penstock.core.errors import MissingExtraError, RecordError

Samples = np.ndarray[Any, np.dtype[np.float32]]
_FULL_SCALE = {1: 1 << 7, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}
"""Bytes of a sample → what stands for 1.0."""


def read_sound(data: bytes, rate: int, longest: int) -> Samples:
    """Decode a sound.

    Args:
        data: The bytes of a file.
        rate: Samples a second of the result.
        longest: Maximum samples of the result; processors would cut the rest without an error.

    Returns:
        float32 [samples], from −1 to 1, the mean of the channels.

    Raises:
        RecordError: It is no sound of a known format, or damaged, empty or too long.
    """
    samples, found = _from_wave(data) if data[:4] == b"RIFF" else _from_others(data)
    if not len(samples):
        raise RecordError("the sound is empty")
    mono: Samples = samples.mean(axis=1, dtype=np.float32)
    if found != rate:
        mono = _resampled(mono, found, rate)
    if len(mono) > longest:
        raise RecordError(
            f"the sound has {len(mono) / rate:.1f} s, and the processor reads at most {longest / rate:.1f} s; cut it"
        )
    return np.ascontiguousarray(mono)


def _from_wave(data: bytes) -> tuple[Samples, int]:
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate, count = file.getparams()[:4]
            raw = file.readframes(count)
    except wave.Error as error:
        if "unknown format" in str(error):
            return _from_others(data)
        raise RecordError(f"the sound is damaged: {error}") from error
    except (EOFError, ValueError) as error:
        raise RecordError(f"the sound is damaged: {error}, or it ends too early") from error
    if width not in _FULL_SCALE or channels < 1 or len(raw) != count * width * channels:
        raise RecordError(
            f"the sound is damaged: {len(raw):,} bytes for {count:,} samples of {channels} channels, {width} bytes each"
        )
    if width == 3:
        # 24 bits: into the upper bytes of 32.
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        whole = wide.view("<i4").reshape(-1) >> 8
    elif width == 1:
        whole = np.frombuffer(raw, np.uint8).astype(np.int16) - 128
    else:
        whole = np.frombuffer(raw, f"<i{width}")
    return (whole.astype(np.float32) / np.float32(_FULL_SCALE[width])).reshape(-1, channels), rate


def _from_others(data: bytes) -> tuple[Samples, int]:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise MissingExtraError("soundfile", "audio") from error
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (RuntimeError, ValueError, TypeError) as error:
        raise RecordError(f"not a sound of a known format ({len(data):,} bytes that begin {data[:8]!r})") from error
    return samples, int(rate)


def _resampled(samples: Samples, found: int, wanted: int) -> Samples:
    try:
        import soxr
    except ImportError as error:
        raise MissingExtraError("soxr", "audio") from error
    made: Samples = soxr.resample(samples, found, wanted)
    return made
