"""What headers say equals what is decoded: every format and orientation of images, formats of
sounds and videos.
"""

import io
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps, PngImagePlugin

from makers.media_files import (
    FILMS,
    HEIGHT,
    SOUNDS,
    WIDTH,
    animation,
    encoded,
    film,
    mp3_without_tag,
    noise,
    sound,
    tones,
    turned_images,
)  # fmt: skip
from penstock.core.errors import RecordError
from penstock.media.header import Header, read_header
from penstock.media.images import ImageSettings, read_picture, read_size
from penstock.media.sounds import read_sound, sound_size
from penstock.media.videos import read_frames

pytestmark = pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
PLAIN = ImageSettings()
NAMES = sorted(turned_images(6))
MODES = (
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I;16",
)


def as_pillow(data):
    """The picture as Pillow alone would make it; None: it cannot."""
    with suppress(Exception):
        image = Image.open(io.BytesIO(data))
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    return None


@pytest.fixture
def no_decoding(monkeypatch):
    def refuse(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", refuse, raising=False)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_turned_images(name, orientation):
    if (data := turned_images(orientation).get(name)) is None:
        pytest.skip("no such file")
    size, picture = read_header(data, "image").size, read_picture(data, PLAIN)
    assert size == read_size(data, PLAIN) == (picture.height, picture.width)
    expected = as_pillow(data)
    if expected is not None:
        np.testing.assert_array_equal(np.asarray(picture), np.asarray(expected))
    silent = ("cut", "nonsense", "broken", "GIF", "BMP", "PPM", "2000", "animated, late")
    if not any(word in name for word in silent) and not name.startswith("PNG late exif and"):
        turned = 5 <= orientation <= 8
        if "xmp" in name and expected is not None and expected.size == (WIDTH, HEIGHT):
            turned = False  # older versions of Pillow look for that in fewer formats
        assert size == ((WIDTH, HEIGHT) if turned else (HEIGHT, WIDTH))


@pytest.mark.parametrize("name", NAMES)
def test_headers_of_images_decode_nothing(name, no_decoding):
    assert sorted(read_header(turned_images(6)[name], "image").size) == [HEIGHT, WIDTH]


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    "kind", ["PNG", "JPEG", "WEBP", "TIFF", "JPEG2000", "GIF", "BMP", "PPM", "AVIF"]
)
def test_sizes_of_all_modes(kind, orientation):
    compared = 0
    for mode in MODES:
        exif = Image.Exif()
        exif[0x0112] = orientation
        try:
            data = encoded(
                noise(mode),
                kind,
                **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}),
            )
        except (OSError, KeyError, ValueError):
            continue  # the format has no such pictures
        if (kind, mode) == ("PPM", "I;16"):
            continue  # read as numbers of 32 bits, which are refused
        if as_pillow(data) is None:
            continue  # some versions of Pillow write what they cannot read
        picture = read_picture(data, PLAIN)
        assert picture.mode == "RGB"
        assert read_header(data, "image").size == (picture.height, picture.width)
        compared += 1
    assert compared or (kind == "AVIF" and "AVIF" not in Image.SAVE)


def test_a_picture_that_turns_as_it_loads_is_turned_once(tmp_path):
    from penstock.media.loading import load_image

    (tmp_path / "a.tif").write_bytes(turned_images(6)["TIFF tag"])
    found = load_image(Image.open(tmp_path / "a.tif"), "", PLAIN)
    assert found.size == (WIDTH, HEIGHT)
    expected = as_pillow(turned_images(6)["TIFF tag"])
    np.testing.assert_array_equal(
        np.asarray(read_picture(found.read(), PLAIN)), np.asarray(expected)
    )


def test_a_size_that_is_not_that_of_the_header_is_an_error(monkeypatch):
    data = turned_images(6)["JPEG exif"]
    monkeypatch.setattr(ImageOps, "exif_transpose", lambda image, in_place: None)
    with pytest.raises(RecordError, match=r"header.*20x30.*30x20.*decoded"):
        read_picture(data, PLAIN)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 16_000, 44_100])
@pytest.mark.parametrize("kind", sorted(SOUNDS))
def test_headers_of_sounds(kind, rate, channels):
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    if kind == "OGG OPUS" and rate == 44_100:
        rate = 48_000
    data = sound(kind, tones(5000, channels), rate)
    expected, found_rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    header = read_header(data, "audio")
    assert header == Header(frames=len(expected), rate=found_rate, channels=channels)
    assert header.seconds == len(expected) / found_rate
    np.testing.assert_array_equal(
        read_sound(data, found_rate, 1 << 40), expected.mean(axis=1, dtype=np.float32)
    )
    for wanted in (4000, 24_000):
        assert (
            sound_size(data, wanted, 1 << 40)
            == header.samples(wanted)
            == len(read_sound(data, wanted, 1 << 40))
        )


def test_blocks_do_not_change_a_sound(monkeypatch):
    data = sound("FLAC PCM_24", tones(5000, 3))
    whole = read_sound(data, 16_000, 1 << 40)
    plain = read_sound(sound("WAV PCM_24", tones(5000, 3)), 16_000, 1 << 40)
    monkeypatch.setattr("penstock.media.sounds._BLOCK", 997)
    np.testing.assert_array_equal(read_sound(data, 16_000, 1 << 40), whole)
    np.testing.assert_array_equal(
        read_sound(sound("WAV PCM_24", tones(5000, 3)), 16_000, 1 << 40), plain
    )


@given(
    frames=st.integers(1, 5000), rate=st.integers(100, 400_000), wanted=st.integers(1000, 48_000)
)
@settings(max_examples=60)
def test_lengths_after_resampling(frames, rate, wanted):
    soxr = pytest.importorskip("soxr")
    header = Header(frames=frames, rate=rate, channels=1)
    if header.samples(wanted) < 200_000:
        assert header.samples(wanted) == len(
            soxr.resample(np.zeros(frames, np.float32), rate, wanted)
        )


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize("rate", [8000, 22_050, 44_100])
def test_lengths_of_mp3_files_with_and_without_a_tag(rate, mode):
    samples = tones(60_000)
    samples[20_000:40_000] = 0  # cheap frames, so that a guess by the file's size is wrong
    # Only with a level does its writer keep to one bit rate.
    level = {"compression_level": 0.5} if mode == "CONSTANT" else {}
    data = sound("MP3", samples, rate, bitrate_mode=mode, **level)
    assert read_header(data, "audio").frames == len(read_sound(data, rate, 1 << 40)) == 60_000
    tags = b"ID3\4\0\0\0\0\0\x0a" + bytes(10), b"TAG" + bytes(125)
    assert read_header(tags[0] + data + tags[1], "audio").frames == 60_000
    bare = mp3_without_tag(data)
    if mode == "VARIABLE":
        with pytest.raises(RecordError, match="its header gives no length"):
            read_header(bare, "audio")
    else:
        assert (
            60_000
            <= read_header(bare, "audio").frames
            == len(read_sound(bare, rate, 1 << 40))
            < 64_000
        )


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_headers_of_animations(kind, count):
    data = animation(kind, count)
    header, frames = read_header(data, "video"), read_frames(data, 100)
    assert header == Header(frames=len(frames), height=64, width=96)
    assert {Image.open(io.BytesIO(one)).size for one in frames} == {(96, 64)}


@pytest.mark.parametrize("kind", sorted(FILMS))
def test_headers_of_films(kind):
    data = film(kind, 7)
    header, frames = read_header(data, "video"), read_frames(data, 100)
    assert header == Header(frames=len(frames), height=64, width=96)
    assert header.pixels == 7 * 64 * 96
    assert {Image.open(io.BytesIO(one)).size for one in frames} == {(96, 64)}


def test_frames_are_counted_again_where_a_container_is_wrong(monkeypatch):
    import penstock.media.videos as videos

    data = film("MP4", 7)
    expected = read_frames(data, 3)
    monkeypatch.setattr(videos, "read_header", lambda *_: Header(frames=9, height=64, width=96))
    assert read_frames(data, 3) == expected
