"""Limits come before the work: what is refused costs little memory, and pixels are counted before
decoding.
"""

import io
import json
import re
import struct
import subprocess
import sys
import zlib

import pytest
from PIL import Image, ImageFile

from makers.media_files import (
    animation,
    chunk,
    encoded,
    film,
    forged_rate,
    long_flac,
    noise,
    wave_header,
    with_chunks,
)
from penstock.core.errors import ConfigError, RecordError
from penstock.media import videos
from penstock.media.images import ImageSettings, read_picture
from penstock.media.videos import read_frames

SIDE = 9000
MOST_MEGABYTES = 200
CHILD = """
import json, resource, sys
from penstock.core.errors import RecordError
from penstock.media.images import ImageSettings, read_picture, read_size
from penstock.media.sounds import read_sound, sound_size
from penstock.media.videos import read_frames
from PIL import Image
import io, numpy, soxr, soundfile

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
settings = ImageSettings(video_frames=4)
readers = {
    "image": lambda data: (read_size(data, settings), read_picture(data, settings)),
    "sound": lambda data: (sound_size(data, 16000, 480000), read_sound(data, 16000, 480000)),
    "video": lambda data: read_frames(data, 4, settings),
}
soxr.resample(numpy.zeros(100, numpy.float32), 8000, 16000)
found = {}
for name, kind, path in json.loads(sys.argv[1]):
    data = open(path, "rb").read()
    before, said = peak(), "accepted"
    try:
        readers[kind](data)
    except RecordError as error:
        said = str(error)
    found[name] = peak() - before, said
print(json.dumps(found))
"""  # noqa: E501


def large_gif():
    frames = [Image.new("P", (SIDE, SIDE), number) for number in range(4)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def large_jpeg(**more):
    data = bytearray(encoded(noise(), "JPEG", **more))
    at = data.index(b"\xff\xc2" if more else b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", SIDE, SIDE)
    return bytes(data)


def large_png(raw=b""):
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(raw))
        + chunk(b"IEND", b"")
    )


def many_tags():
    """Metadata of 5,000 tags that all lie in the same half megabyte."""
    size, count = 500_000, 5000
    entries = b"".join(struct.pack("<HHII", 1000 + number, 7, size, 8) for number in range(count))
    return b"II*\0" + struct.pack("<IH", 8, count) + entries + bytes(4 + size)


HOSTILE = {
    "a GIF of 324 million pixels": (
        "video",
        large_gif,
        "4 frames of 9000x9000 pixels; accepted are 89,478,485",
    ),
    "a JPEG with another size": ("image", large_jpeg, "more than its .* bytes can hold"),
    "a progressive JPEG with another size": (
        "image",
        lambda: large_jpeg(progressive=True),
        "bytes can hold",
    ),
    "a PNG with another size": ("image", large_png, "more than its .* bytes can hold"),
    "a PNG with few pixels": ("image", lambda: large_png(bytes(20_000_000)), "is damaged"),
    "a PNG with texts": (
        "image",
        lambda: with_chunks(
            large_png(), chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(9_000_000))), b"IDAT"
        ),
        "not an image|cannot be read|bytes can hold",
    ),
    "an EXIF of 2.5 gigabytes": (
        "image",
        lambda: with_chunks(large_png(), chunk(b"eXIf", many_tags()), b"IDAT"),
        "is damaged",
    ),
    "a FLAC of 60 million samples": (
        "sound",
        lambda: long_flac(60_000_000),
        "the sound has 3750.0 s",
    ),
    "a WAV at 1 Hz": (
        "sound",
        lambda: wave_header(1, 200_000) + bytes(400_000),
        "1 samples a second",
    ),
    "a WAV at 1 Hz that needs 16 GB": (
        "sound",
        lambda: wave_header(1, 1_000_000) + bytes(2_000_000),
        "1 samples a",
    ),
    "a WAV at 0 Hz": ("sound", lambda: forged_rate("WAV", 0), "0 samples a second"),
    "a WAV at 2³² Hz": (
        "sound",
        lambda: forged_rate("WAV", 2**32 - 1),
        "4,294,967,295 samples a second",
    ),
    "a WAV with 4 GB of samples": (
        "sound",
        lambda: wave_header(16_000, 9, data_size=2**32 - 1),
        "it was cut",
    ),
    "a WAV with 65,535 channels": (
        "sound",
        lambda: wave_header(16_000, 9, 65_535) + bytes(2_000_000),
        "65,535 channels",
    ),
}


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc"
)
def test_what_is_refused_costs_little_memory(tmp_path):
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    cases = []
    for number, (name, (kind, make, _)) in enumerate(HOSTILE.items()):
        (tmp_path / str(number)).write_bytes(make())
        cases.append((name, kind, str(tmp_path / str(number))))
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for name, (megabytes, said) in json.loads(ran.stdout.splitlines()[-1]).items():
        assert megabytes < MOST_MEGABYTES, (name, megabytes, said)
        pattern = HOSTILE[name][2]
        with pytest.raises(RecordError, match=pattern):
            raise RecordError(said)
        assert said != "accepted", name


@pytest.fixture
def decoded(monkeypatch):
    """Counts the pictures that Pillow decodes."""
    counts, load = [], ImageFile.ImageFile.load

    def count(image):
        counts.append(image.size)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", count)
    return counts


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_pixels_of_all_frames_count_before_any_is_decoded(kind, decoded):
    data = animation(kind, 5)
    decoded.clear()
    with pytest.raises(RecordError, match=r"5.*96x64.*30,719.*\(max_pixels\)"):
        read_frames(data, 2, ImageSettings(max_pixels=5 * 96 * 64 - 1))
    assert decoded == []
    assert len(read_frames(data, 2, ImageSettings(max_pixels=5 * 96 * 64))) == 2


def test_pixels_of_films_count_before_any_frame_is_decoded(monkeypatch):
    data = film("MP4", 5)
    monkeypatch.setattr(videos, "_by_av", lambda *_: pytest.fail("decoded"))
    with pytest.raises(RecordError, match=r"30,719.*\(max_video_pixels\)"):
        read_frames(data, 2, ImageSettings(max_video_pixels=5 * 96 * 64 - 1))
    with pytest.raises(RecordError, match=r"96x64.*6,143 \(max_pixels\)"):
        read_frames(data, 2, ImageSettings(max_pixels=96 * 64 - 1))


def test_pixels_count_again_while_a_video_is_decoded(monkeypatch):
    from penstock.media.header import Header

    settings = ImageSettings(max_pixels=4 * 96 * 64, max_video_pixels=4 * 96 * 64)
    monkeypatch.setattr(videos, "read_header", lambda *_: Header(frames=4, height=64, width=96))
    with pytest.raises(RecordError, match=r"together \(max_video_pixels\)"):
        read_frames(film("MP4", 7), 4, settings)
    monkeypatch.setattr(videos, "read_header", lambda *_: Header(frames=7, height=32, width=48))
    with pytest.raises(RecordError, match=r"together \(max_pixels\)"):
        read_frames(animation("GIF", 7), 7, settings)


def test_frames_that_grow_count_as_they_are():
    data = bytearray(animation("GIF", 3))
    at = [found.end() for found in re.finditer(rb"!\xf9\x04.{4}\0,", data, re.DOTALL)][1]
    data[at : at + 4] = struct.pack("<HH", 2000, 2000)
    with pytest.raises(RecordError, match=r"together \(max_pixels\)"):
        read_frames(bytes(data), 3, ImageSettings(max_pixels=1_000_000))


def test_a_playlist_opens_no_other_file(tmp_path, monkeypatch):
    pytest.importorskip("av")
    (tmp_path / "secret.mp4").write_bytes(film("MP4", 3))
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "secret.mp4"
    for text in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{place}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{place}'\n",
        "ffconcat version 1.0\nfile secret.mp4\n",
    ):
        with pytest.raises(RecordError, match="not a video that can be read"):
            read_frames(text.encode(), 3)


def test_a_png_whose_pixels_end_early_is_refused():
    whole = b"".join(b"\0" + bytes([200]) * 90 for _ in range(40))
    for is_interlaced in (0, 1):
        head = struct.pack(">IIBBBBB", 30, 40, 8, 2, 0, 0, is_interlaced)
        for raw in (whole[: 91 * 20], whole[:-90], b""):
            data = (
                b"\x89PNG\r\n\x1a\n"
                + chunk(b"IHDR", head)
                + chunk(b"IDAT", zlib.compress(raw))
                + chunk(b"IEND", b"")
            )
            with pytest.raises(RecordError, match=r"bytes of pixels, expected \d|is damaged"):
                read_picture(data, ImageSettings())
    for mode in ("1", "L", "P", "RGB", "RGBA", "I;16"):
        black = Image.new(mode, (37, 21))
        assert read_picture(encoded(black, "PNG"), ImageSettings(alpha="black")).size == (37, 21)


def test_a_picture_of_pillow_is_measured_before_it_is_loaded(decoded):
    from penstock.media.loading import load_image

    picture = Image.open(io.BytesIO(encoded(noise(), "PNG")))
    decoded.clear()
    with pytest.raises(RecordError, match="30x20 pixels; accepted are"):
        load_image(picture, "", ImageSettings(max_pixels=599))
    assert decoded == []
    with pytest.raises(RecordError, match="32-bit numbers"):
        load_image(Image.new("F", (3, 3)), "", ImageSettings())


@pytest.mark.parametrize("name", ["max_video_pixels", "max_seconds"])
def test_limits_out_of_range(name):
    for value in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match=f"{name} must be more than 0"):
            ImageSettings(**{name: value})
    assert name not in ImageSettings().describe(), "older preparations do not name it"
    assert ImageSettings(**{name: 5}).describe()[name] == 5
