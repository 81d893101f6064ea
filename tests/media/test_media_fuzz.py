"""Damaged files of every format: only RecordErrors come out, and what is accepted is what its
header says.
"""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from makers.media_files import FILMS, SOUNDS, animation, film, sound, tones, turned_images
from penstock.core.errors import RecordError
from penstock.media import sound_files
from penstock.media.images import ImageSettings, read_picture, read_size
from penstock.media.sounds import read_sound, sound_size
from penstock.media.videos import read_frames

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")
ANY_SHAPE = ImageSettings(max_ratio=math.inf)
IMAGES = turned_images(6)
EXTREME = [0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
FUZZ = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)


@st.composite
def changes(draw):
    """A function that damages bytes, most of them at the front: flips, cuts, insertions, fields
    with other numbers.
    """
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "field", "cut", "drop", "insert", "repeat"]),
                st.sampled_from([32, 128, 512, None]),
                st.floats(0, 1, exclude_max=True),
                st.sampled_from(EXTREME) | st.integers(0, 2**64 - 1),
                st.sampled_from([1, 2, 4, 8]),
                st.sampled_from(["little", "big"]),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def change(data):
        made = bytearray(data)
        for kind, front, place, number, width, order in steps:
            at = int(place * min(len(made), front or len(made)))
            if kind == "flip" and made:
                made[at] ^= 1 << (number % 8)
            elif kind == "field":
                made[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, order)
            elif kind == "cut":
                del made[max(at, 1) :]
            elif kind == "drop":
                del made[at : at + width]
            elif kind == "insert":
                made[at:at] = number.to_bytes(8, order)[:width]
            else:
                made[at:at] = made[at : at + 10 * width]
        return bytes(made)

    return change


@pytest.mark.parametrize("name", sorted(IMAGES))
@given(change=changes())
@FUZZ
def test_images(name, change):
    data = change(IMAGES[name])
    try:
        size = read_size(data, ANY_SHAPE)
        picture = read_picture(data, ANY_SHAPE)
    except RecordError:
        return
    assert (picture.mode, picture.height, picture.width) == ("RGB", *size)


@pytest.mark.parametrize("kind", sorted(SOUNDS))
@given(change=changes())
@FUZZ
def test_sounds(kind, change):
    pytest.importorskip("soxr")
    data = change(sound(kind, tones(3001, 2)))
    try:
        count = sound_size(data, 24_000, 1 << 20)
        found = read_sound(data, 24_000, 1 << 20)
    except RecordError:
        return
    assert len(found) == count
    assert np.isfinite(found).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", *sorted(FILMS)])
@given(change=changes())
@FUZZ
def test_videos(kind, change):
    whole = film(kind, 4) if kind in FILMS else animation(kind, 4)
    try:
        frames = read_frames(change(whole), 3, ANY_SHAPE)
    except RecordError:
        return
    for frame in frames:
        assert read_picture(frame, ANY_SHAPE).mode == "RGB"


@given(
    data=st.binary(max_size=300),
    magic=st.sampled_from([b"RIFF\x24\0\0\0WAVE", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"FORM"]),
)
@settings(max_examples=200)
def test_bytes_that_begin_like_a_sound(data, magic):
    pytest.importorskip("soundfile")
    with pytest.raises(RecordError, match="sound"):
        read_sound(magic + data, 16_000, 1 << 20)


def test_a_place_before_the_begin_is_the_begin():
    """libsndfile asks for such places of damaged AIFF files, in a callback that must not raise."""
    data = sound_files._Bytes(b"0123456789")
    assert [data.seek(*place) for place in ((3,), (-9, 1), (-1,), (-2, 2), (-99, 2))] == [
        3, 0, 0, 8, 0,
    ]  # fmt: skip
