"""Images become RGB pictures: orientation, transparency, depth, animation, limits, damage."""

import io
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.core.errors import ConfigError, RecordError
from penstock.media.images import ImageSettings, read_picture, read_size, shrunk

PLAIN = ImageSettings()


def encoded(image, kind="PNG", **more):
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def gradient(height=4, width=6):
    values = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    return Image.fromarray(values)


def pixels(picture):
    return np.asarray(picture)


@given(orientation=st.integers(1, 8), height=st.integers(1, 9), width=st.integers(1, 9))
def test_the_size_is_that_of_the_upright_picture(orientation, height, width):
    image = gradient(height, width)
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, exif=exif)
    picture = read_picture(data, PLAIN)
    assert read_size(data, PLAIN) == (picture.height, picture.width)
    # The tag's definition (TIFF 6.0): where row 0 and column 0 of the stored picture are.
    turned = {
        1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1), 6: lambda a: a.swapaxes(0, 1)[:, ::-1],
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1), 8: lambda a: a.swapaxes(0, 1)[::-1],
    }  # fmt: skip
    np.testing.assert_array_equal(pixels(picture), turned[orientation](pixels(image)))


@pytest.mark.parametrize(
    ("alpha", "expected"), [("white", (255, 255, 255)), ("black", (0, 0, 0)), ("ignore", (9, 8, 7))]
)
def test_transparency_is_put_on_a_ground(alpha, expected):
    data = encoded(Image.new("RGBA", (2, 2), (9, 8, 7, 0)))
    assert read_picture(data, ImageSettings(alpha=alpha)).getpixel((0, 0)) == expected


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_can_be_refused(mode):
    image = (
        Image.new("RGBA", (2, 2), (9, 8, 7, 100)).convert(mode)
        if mode != "P"
        else Image.new("P", (2, 2))
    )
    data = encoded(image, **({"transparency": 0} if mode == "P" else {}))
    with pytest.raises(RecordError, match="transparent"):
        read_picture(data, ImageSettings(alpha="error"))
    assert read_picture(data, PLAIN).mode == "RGB"


def test_sixteen_bits_keep_the_high_byte():
    values = np.array([[0, 256, 65535]], np.uint16)
    picture = read_picture(encoded(Image.fromarray(values)), PLAIN)
    assert pixels(picture)[0, :, 0].tolist() == [0, 1, 255]


def test_numbers_without_a_range_are_refused():
    with pytest.raises(RecordError, match="32-bit"):
        read_picture(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), PLAIN)


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read_picture(data, PLAIN).getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(RecordError, match="2 frames"):
        read_picture(data, ImageSettings(animated="error"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_truncated_file_is_damaged(kind):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    data = encoded(image, kind)
    assert read_picture(data, PLAIN).size == (64, 64)
    with pytest.raises(RecordError, match=r"damaged|read|not an image"):
        read_picture(data[: len(data) // 2], PLAIN)


def test_the_header_alone_does_not_show_damage():
    data = encoded(
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)),
        "JPEG",
    )
    assert read_size(data[: len(data) // 2], PLAIN) == (64, 64)


def forged_png(width, height):
    """A PNG that claims a size and has hardly any data."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(20_000, 20_000), (9_500, 9_500)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(size):
    with pytest.raises(RecordError, match=r"too large|pixels"):
        read_picture(forged_png(*size), PLAIN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pixels": 23}, "6x4 pixels"),
        ({"min_pixels": 25}, "6x4 pixels"),
        ({"max_ratio": 1.4}, "elongated: 6x4"),
    ],
)
def test_limits_name_the_size(settings, message):
    with pytest.raises(RecordError, match=message):
        read_size(encoded(gradient()), ImageSettings(**settings))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 10**6))
def test_shrunk_sizes_keep_the_proportion(height, width, limit):
    found = shrunk((height, width), ImageSettings(shrink_pixels=limit))
    if height * width <= limit:
        assert found == (height, width)
    else:
        assert 1 <= found[0] * found[1] <= limit
        scale = (limit / (height * width)) ** 0.5
        for now, before in zip(found, (height, width), strict=True):
            assert now <= max(1, before * scale)
            # Where one side is cut off at 1 pixel, the other gives way.
            assert now + 1 > before * scale or min(found) == 1


def test_large_images_are_made_smaller():
    settings = ImageSettings(shrink_pixels=6)
    data = encoded(gradient())
    assert read_size(data, PLAIN) == (4, 6)
    size = read_size(data, settings)
    picture = read_picture(data, settings)
    assert (picture.height, picture.width) == size == (2, 3)
    assert settings.decoding != PLAIN.decoding
    with pytest.raises(ConfigError, match="shrink_pixels must be 1 or more"):
        ImageSettings(shrink_pixels=0)


@pytest.mark.parametrize(
    "data", [b"", b"not an image", b"%PDF-1.4\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>"]
)
def test_other_bytes_are_no_image(data):
    with pytest.raises(RecordError, match="not an image of a known format"):
        read_picture(data, PLAIN)


@given(
    data=st.binary(max_size=200),
    kind=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM"]),
)
def test_whatever_the_bytes_the_error_is_ours(data, kind):
    with suppress(RecordError):
        assert read_picture(kind + data, PLAIN).mode == "RGB"


@pytest.mark.parametrize(
    "settings",
    [
        {"probe": "all"},
        {"alpha": "green"},
        {"animated": "last"},
        {"image_storage": "link"},
        {"max_ratio": 0.5},
        {"min_pixels": 0},
        {"max_pixels": 5, "min_pixels": 6},
    ],
)
def test_settings_out_of_range(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ImageSettings(**settings)
