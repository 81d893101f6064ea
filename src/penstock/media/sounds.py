"""Sounds: files become one channel of float32 samples at the rate that a model's processor expects.

WAV files with whole numbers need no other package. Other formats (FLAC, Ogg, MP3, …) need the
package soundfile, and another rate needs soxr; both come with the extra `audio`. Nothing is fetched
here. A sound's length is checked by its header, before anything is decoded; it is decoded in
blocks, so that no header makes this allocate more than the file holds; and each sample is looked
at.
"""

from collections.abc import Iterator

import numpy as np

from penstock.core.arrays import Array, Float32
from penstock.core.errors import MissingExtraError, RecordError, record_errors
from penstock.media.header import Header, header_of_sound, read_header
from penstock.media.sound_files import SoundFile, open_sound, sound_file

Samples = Float32
LOUDEST = 32.0
"""Largest sample that is believed, where 1.0 is full scale; files of floats may exceed that, by a
little.
"""
_FULL_SCALE = {1: 1 << 7, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}
"""Bytes of a sample → what stands for 1.0."""
_BLOCK = 1 << 18
"""Samples of all channels that are decoded at once."""


def sound_size(data: bytes, rate: int, longest: int, longest_seconds: float = np.inf) -> int:
    """Samples that `read_sound` gives, by the header.

    Args:
        data: The bytes of a file.
        rate: Samples a second of the result.
        longest: Maximum samples of the result; processors would cut the rest without an error.
        longest_seconds: Maximum length, whatever the processor reads.

    Raises:
        RecordError: It is no sound of a known format, or cut, empty or too long.
    """
    return _accepted(read_header(data, "audio"), rate, longest, longest_seconds)


def _accepted(header: Header, rate: int, longest: int, longest_seconds: float) -> int:
    samples = header.samples(rate)
    if header.seconds > longest_seconds:
        raise RecordError(
            f"the sound has {header.seconds:,.1f} s, and at most {longest_seconds:,.1f} s are "
            "accepted (max_seconds)"
        )
    if samples > longest:
        raise RecordError(
            f"the sound has {samples / rate:.1f} s, and the processor reads at most "
            f"{longest / rate:.1f} s; cut it"
        )
    if not samples:
        raise RecordError(
            f"the sound is too short: {header.frames} samples at {header.rate:,} Hz are none "
            f"at {rate:,}"
        )
    return samples


def read_sound(data: bytes, rate: int, longest: int, longest_seconds: float = np.inf) -> Samples:
    """Decode a sound.

    Args:
        data: The bytes of a file.
        rate: Samples a second of the result.
        longest: Maximum samples of the result; processors would cut the rest without an error.
        longest_seconds: Maximum length, whatever the processor reads.

    Returns:
        float32 [samples], from −1 to 1, the mean of the channels; as many as `sound_size` says.

    Raises:
        RecordError: It is no sound of a known format; or it is damaged, cut, empty or too long; or
            a sample is not a number, or not one of a sound.
    """
    found = sound_file(data)
    expected = _accepted(header_of_sound(found), rate, longest, longest_seconds)
    mono = _mono(data, found)
    if found.rate != rate:
        mono = _resampled(mono, found.rate, rate)
    if len(mono) != expected:
        raise RecordError(
            f"the sound is damaged: {len(mono):,} samples at {rate:,} Hz, expected {expected:,}"
        )
    return np.ascontiguousarray(mono)


def _mono(data: bytes, found: SoundFile) -> Samples:
    """The mean of the channels, all samples checked."""
    parts, done = [], 0
    for block in _blocks_of_wave(data, found) if found.width else _blocks_of_others(data, found):
        _check_samples(block, done)
        done += len(block)
        parts.append(block.mean(axis=1, dtype=np.float32))
    if done != found.frames:
        raise RecordError(
            f"the sound is damaged: {done:,} samples could be decoded, and its header says "
            f"{found.frames:,}; it was cut"
        )
    return np.concatenate(parts)


def _check_samples(block: Samples, begin: int) -> None:
    """Refuse samples that are no numbers, or far from full scale; `begin` is the place of the first
    one.
    """
    # A comparison with NaN is False.
    if float(block.min()) >= -LOUDEST and float(block.max()) <= LOUDEST:
        return
    place, channel = np.argwhere(~(np.abs(block) <= LOUDEST))[0].tolist()
    raise RecordError(
        f"the sound is damaged: sample {begin + place:,} of channel {channel} is "
        f"{block[place, channel]:g}; expected numbers from -1 to 1, and never beyond "
        f"{LOUDEST:g}"
    )


def _blocks_of_wave(data: bytes, found: SoundFile) -> Iterator[Samples]:
    count = max(1, _BLOCK // found.channels)
    for first in range(0, found.frames, count):
        size = min(count, found.frames - first) * found.channels
        begin = found.begin + first * found.channels * found.width
        whole = _whole_numbers(data[begin : begin + size * found.width], found.width)
        yield (whole.astype(np.float32) / np.float32(_FULL_SCALE[found.width])).reshape(
            -1, found.channels
        )


def _whole_numbers(raw: bytes, width: int) -> Array:
    if width == 3:
        # 24 bits: into the upper bytes of 32.
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return wide.view("<i4").reshape(-1) >> 8
    if width == 1:
        return np.frombuffer(raw, np.uint8).astype(np.int16) - 128
    return np.frombuffer(raw, f"<i{width}")


def _blocks_of_others(data: bytes, found: SoundFile) -> Iterator[Samples]:
    with open_sound(data) as file, record_errors("the sound is damaged"):
        # The last bits of an MP3 depend on the steps in which it is read. Its frames were counted,
        # so one step is safe.
        count = found.frames if file.format == "MP3" else max(1, _BLOCK // found.channels)
        left = found.frames
        if file.seekable():
            file.seek(0)
        while left > 0 and len(
            block := file.read(min(count, left), dtype="float32", always_2d=True)
        ):
            left -= len(block)
            yield block


def _resampled(samples: Samples, found: int, wanted: int) -> Samples:
    try:
        import soxr
    except ImportError as error:
        raise MissingExtraError("soxr", "audio") from error
    with record_errors(f"the sound cannot be resampled from {found:,} to {wanted:,} Hz"):
        made: Samples = soxr.resample(samples, found, wanted)
    return made
