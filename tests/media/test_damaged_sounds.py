"""Sounds that are cut, damaged, absurd or too long are rejects, before work is done for them;
silence is a sound.
"""

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.media_files import (
    RATE,
    SOUNDS,
    forged_rate,
    long_flac,
    mp3_without_tag,
    sound,
    tones,
    wave_header,
)
from penstock.core.errors import RecordError
from penstock.media import sounds
from penstock.media.header import read_header
from penstock.media.sounds import LOUDEST, read_sound, sound_size

pytest.importorskip("soundfile")
pytest.importorskip("soxr")
ANY = 1 << 40
WHOLE = {kind: sound(kind, tones(3001)) for kind in SOUNDS}
"""With an odd number of samples, so that some end with a byte of padding."""


@pytest.mark.parametrize("kind", sorted(WHOLE))
@given(share=st.floats(0.02, 1, exclude_max=True))
@settings(max_examples=25)
def test_a_sound_that_was_cut_is_refused(kind, share):
    data = WHOLE[kind]
    cut = data[: int(len(data) * share)]
    try:
        found = read_sound(cut, RATE, ANY)
    except RecordError:
        return
    # Only a byte of padding after the samples is gone.
    np.testing.assert_array_equal(found, read_sound(data, RATE, ANY))
    assert len(data) - len(cut) <= 1


@pytest.mark.parametrize("kind", ["OGG VORBIS", "OGG OPUS"])
def test_an_ogg_file_that_was_cut_between_pages_is_refused(kind):
    data = sound(kind, tones(100_000))
    pages = [at for at in range(1, len(data)) if data[at : at + 4] == b"OggS"]
    assert len(pages) > 2
    for at in pages:
        with pytest.raises(RecordError, match=r"so it was cut|not a sound"):
            read_header(data[:at], "audio")
    begin, end = pages[1], pages[2]
    with pytest.raises(RecordError, match="a page is missing before byte"):
        read_header(data[:begin] + data[end:], "audio")


@pytest.mark.parametrize("tag", [True, False])
def test_an_mp3_that_was_cut_between_frames_is_refused(tag):
    data = sound("MP3", tones(50_000), bitrate_mode="CONSTANT", compression_level=0.5)
    bare = mp3_without_tag(data)
    size = len(data) - len(bare)
    if tag:
        with pytest.raises(RecordError, match="frames, so it was cut"):
            read_header(data[:-size], "audio")
    else:
        # Whole frames are all that it is.
        assert read_header(bare[:-size], "audio").frames == read_header(bare, "audio").frames - 576
        with pytest.raises(RecordError, match="it ends within a frame, so it was cut"):
            read_header(bare[: len(bare) // 2 + 7], "audio")


@pytest.mark.parametrize("kind", ["OGG VORBIS", "OGG OPUS", "FLAC PCM_16", "FLAC PCM_24"])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_a_damaged_byte_of_a_format_with_checksums_is_seen(kind, place, bit):
    data = bytearray(WHOLE[kind])
    first = 42 if kind.startswith("FLAC") else 0  # its header has no checksum
    data[first + int((len(data) - first) * place)] ^= 1 << bit
    try:
        found = read_sound(bytes(data), RATE, ANY)
    except RecordError:
        return
    np.testing.assert_array_equal(found, read_sound(WHOLE[kind], RATE, ANY))


@pytest.mark.parametrize("extra", [b"", b"LIST\x04\0\0\0abcd", b"x" * 50])
def test_what_follows_a_whole_sound_does_not_matter(extra):
    for kind in ("WAV PCM_16", "WAV FLOAT", "OGG VORBIS", "MP3", "AU"):
        found = read_sound(WHOLE[kind] + extra, RATE, ANY)
        np.testing.assert_array_equal(found, read_sound(WHOLE[kind], RATE, ANY))


@pytest.mark.parametrize(("place", "channel"), [(0, 0), (1234, 1), (2999, 1)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e5, -40])
@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE"])
def test_samples_that_are_none_are_named(subtype, value, place, channel):
    samples = tones(3000, 2).astype(np.float64)
    samples[place, channel] = value
    # The other channel must not hide it in their mean.
    samples[place, 1 - channel] = -value
    data = sound(f"WAV {subtype}", samples)
    with pytest.raises(RecordError, match=rf"sample {place:,}.*channel 0.*-1.*1"):
        read_sound(data, RATE, ANY)
    samples[place, 0] = 0.5
    samples[place, 1] = value
    with pytest.raises(RecordError, match=rf"sample {place:,} of channel 1 is "):
        read_sound(sound(f"WAV {subtype}", samples), RATE, ANY)


def test_values_of_doubles_beyond_single_precision_are_named():
    samples = tones(10).astype(np.float64)
    samples[3] = 1e300
    with pytest.raises(RecordError, match="sample 3 of channel 0 is inf"):
        read_sound(sound("WAV DOUBLE", samples), RATE, ANY)


def test_places_count_over_all_blocks(monkeypatch):
    monkeypatch.setattr(sounds, "_BLOCK", 64)
    samples = tones(3000)
    samples[2500] = np.nan
    with pytest.raises(RecordError, match="sample 2,500 of channel 0 is nan"):
        read_sound(sound("WAV FLOAT", samples), RATE, ANY)


def test_silence_and_loud_sounds_are_sounds():
    assert not read_sound(sound("WAV FLOAT", np.zeros((100, 1), np.float32)), RATE, ANY).any()
    loud = tones(100) * np.float32(LOUDEST / 2)
    np.testing.assert_array_equal(read_sound(sound("WAV FLOAT", loud), RATE, ANY), loud[:, 0])


@pytest.mark.parametrize("rate", [0, 1, 99, 1_000_001, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", ["WAV", "AIFF"])
def test_rates_that_cannot_be_are_refused(kind, rate):
    for read in (read_sound, sound_size):
        with pytest.raises(RecordError, match=r"100 to 1,000,000|cannot be read"):
            read(forged_rate(kind, rate), RATE, ANY)


@pytest.mark.parametrize("rate", [100, 4000, 1_000_000])
def test_rates_that_can_be_are_read(rate):
    assert read_header(forged_rate("WAV", rate), "audio").rate == rate
    assert len(read_sound(forged_rate("WAV", rate), rate, ANY)) == 4000


@pytest.mark.parametrize("channels", [0, 65, 65_535])
def test_channels_that_cannot_be_are_refused(channels):
    data = bytearray(WHOLE["WAV PCM_16"])
    data[22:24] = struct.pack("<H", channels)
    with pytest.raises(RecordError, match=r"channels; expected 1 to 64"):
        read_sound(bytes(data), RATE, ANY)


def test_an_empty_sound_is_refused():
    for kind in ("WAV PCM_16", "WAV FLOAT", "FLAC PCM_16", "AIFF PCM_16"):
        with pytest.raises(RecordError, match=r"is empty|not a sound|how long"):
            read_sound(sound(kind, np.zeros((0, 1), np.float32)), RATE, ANY)
    for data in (b"", b"RIFF", WHOLE["WAV PCM_16"][:12], WHOLE["WAV PCM_16"][:30]):
        with pytest.raises(RecordError, match=r"a known format|is damaged"):
            read_sound(data, RATE, ANY)
    with pytest.raises(RecordError, match=r"short: 1.*48,000.*4,000"):
        read_sound(sound("WAV PCM_16", tones(1), 48_000), 4000, ANY)


def decoded_blocks(monkeypatch):
    """Counts what is decoded and resampled."""
    counts = {"decoded": 0, "resampled": 0}
    check, resampled = sounds._check_samples, sounds._resampled

    def count(block, begin):
        counts["decoded"] += block.size
        check(block, begin)

    def resample(samples, *rates):
        counts["resampled"] += len(samples)
        return resampled(samples, *rates)

    monkeypatch.setattr(sounds, "_check_samples", count)
    monkeypatch.setattr(sounds, "_resampled", resample)
    return counts


def test_a_long_sound_is_refused_before_it_is_decoded(monkeypatch):
    counts = decoded_blocks(monkeypatch)
    for data, longest, says in (
        (
            long_flac(5_000_000),
            30 * RATE,
            "the sound has 312.5 s, and the processor reads at most 30.0 s",
        ),
        (wave_header(100, 200_000) + bytes(400_000), 8000, "the sound has 2000.0 s"),
        (wave_header(1_000_000, 40_000) + bytes(80_000), 500, "the sound has 0.0 s"),
    ):
        for read in (read_sound, sound_size):
            with pytest.raises(RecordError, match=says):
                read(data, RATE, longest)
    with pytest.raises(RecordError, match=r"312.5.*60.0.*\(max_seconds\)"):
        read_sound(long_flac(5_000_000), RATE, ANY, 60)
    assert counts == {"decoded": 0, "resampled": 0}
    assert len(read_sound(forged_rate("WAV", 8000), RATE, ANY)) == 8000
    assert counts == {"decoded": 4000, "resampled": 4000}


@pytest.mark.parametrize("total", [0, 1, 100_000, 2**36 - 1])
def test_a_flac_file_may_not_say_another_length(total, monkeypatch):
    counts = decoded_blocks(monkeypatch)
    data = bytearray(WHOLE["FLAC PCM_16"])
    fields = int.from_bytes(data[18:26], "big") >> 36 << 36 | total
    data[18:26] = fields.to_bytes(8, "big")
    if total == 1:
        assert len(read_sound(bytes(data), RATE, ANY)) == 1
        return
    with pytest.raises(RecordError, match=r"how long|damaged|cannot be read"):
        read_sound(bytes(data), RATE, ANY)
    assert counts["decoded"] <= 3001


@pytest.mark.parametrize("size", [2**31, 2**32 - 1, 6003])
def test_a_data_chunk_longer_than_the_file_is_refused(size):
    for kind in ("WAV PCM_16", "WAV FLOAT", "WAV ULAW", "WAVEX PCM_24"):
        data = bytearray(WHOLE[kind])
        at = data.index(b"data") + 4
        data[at : at + 4] = struct.pack("<I", max(size, len(data)))
        with pytest.raises(RecordError, match=r"bytes.*samples.*written"):
            read_sound(bytes(data), RATE, ANY)


def test_other_files_are_named():
    for data in (b"not a sound", b"RIFF\0\0\0\0AVI LIST", b"\0" * 100, b"ID3\4\0\0\0\0\0\0"):
        with pytest.raises(RecordError, match=r"sound.*format.*WAV.*FLAC"):
            read_sound(data, RATE, ANY)
    odd = wave_header(RATE, 10, bits=64) + bytes(80)
    with pytest.raises(RecordError, match=r"64.*expected 8, 16, 24.*32"):
        read_sound(odd, RATE, ANY)
    many = WHOLE["WAV PCM_16"][:12] + b"abcd\0\0\0\0" * 20_000
    with pytest.raises(RecordError, match="more than 10,000 chunks"):
        read_sound(many, RATE, ANY)


def test_messages_do_not_change_from_run_to_run():
    data = b"fLaC" + bytes(100)
    says = set()
    for _ in range(3):
        _kept = io.BytesIO()  # so that addresses differ
        with pytest.raises(RecordError, match="not a sound that can be read") as caught:
            read_sound(data, RATE, ANY)
        says.add(str(caught.value))
    assert len(says) == 1
    assert "0x" not in says.pop()
