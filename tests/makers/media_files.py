"""Small files of every format of images, sounds and videos, whole and forged."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

HEIGHT, WIDTH = 20, 30
ORIENTATION = 0x0112
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def noise(mode: str = "RGB", height: int = HEIGHT, width: int = WIDTH) -> Any:
    """A picture whose rows all differ from 0."""
    values = np.random.default_rng(0).integers(1, 255, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(values)
    if mode == "I;16":
        return Image.fromarray(values[..., 0].astype(np.uint16) << 7)
    if mode in ("La", "RGBa"):
        return image.convert({"La": "LA", "RGBa": "RGBA"}[mode]).convert(mode)
    if mode == "LAB":
        return Image.frombytes("LAB", image.size, image.tobytes())
    return image.convert("LA").convert("PA") if mode == "PA" else image.convert(mode)


def encoded(image: Any, kind: str, **more: Any) -> bytes:
    """The bytes of a picture's file."""
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def exif(orientation: int) -> bytes:
    """Metadata with an orientation, as cameras write it."""
    made = Image.Exif()
    made[ORIENTATION] = orientation
    return made.tobytes()


def chunk(name: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def with_chunks(png: bytes, chunks: bytes, before: bytes) -> bytes:
    """A PNG with more chunks before the first one of a name."""
    at = png.index(before) - 4
    return png[:at] + chunks + png[at:]


def _raw_profile(orientation: int) -> bytes:
    body = exif(orientation)
    text = f"\nexif\n{len(body):8}\n{body.hex()}\n"
    return chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text.encode()))


def _xmp_chunk(orientation: int) -> bytes:
    return chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.format(orientation).encode())


def turned_images(orientation: int) -> dict[str, bytes]:
    """Name → a file that says its orientation in one of the ways that there are."""
    image, body, xmp = noise(), exif(orientation), XMP.format(orientation).encode()
    png = encoded(image, "PNG")
    tag = chunk(b"eXIf", body.removeprefix(b"Exif\0\0"))
    broken = chunk(b"eXIf", body.removeprefix(b"Exif\0\0")[:-9])
    made = {
        "JPEG exif": encoded(image, "JPEG", exif=body),
        "JPEG xmp": encoded(image, "JPEG", xmp=xmp),
        "JPEG exif cut": encoded(image, "JPEG", exif=body[:-9]),
        "JPEG exif nonsense": encoded(image, "JPEG", exif=b"Exif\0\0nonsense"),
        "JPEG broken exif and xmp": encoded(image, "JPEG", exif=b"Exif\0\0nonsense", xmp=xmp),
        "JPEG two of them": encoded(image, "JPEG", exif=body, xmp=XMP.format(1).encode()),
        "WEBP exif nonsense": encoded(image, "WEBP", exif=b"Exif\0\0nonsense"),
        "WEBP exif nonsense and xmp": encoded(image, "WEBP", exif=b"Exif\0\0nonsense", xmp=xmp),
        "PNG exif nonsense": with_chunks(png, chunk(b"eXIf", b"nonsense"), b"IDAT"),
        "PNG late exif nonsense": with_chunks(png, chunk(b"eXIf", b"nonsense"), b"IEND"),
        "PNG exif nonsense and xmp": with_chunks(
            png, chunk(b"eXIf", b"nonsense") + _xmp_chunk(orientation), b"IDAT"
        ),
        "MPO": encoded(image, "MPO", save_all=True, append_images=[image], exif=body),
        "PNG exif": encoded(image, "PNG", exif=body),
        "PNG late exif": with_chunks(png, tag, b"IEND"),
        "PNG late exif with a wrong sum": with_chunks(png, tag[:-4] + bytes(4), b"IEND"),
        "PNG two of them": with_chunks(
            with_chunks(png, chunk(b"eXIf", exif(1)[6:]), b"IDAT"), tag, b"IEND"
        ),
        "PNG broken late exif": with_chunks(png, broken, b"IEND"),
        "PNG xmp": with_chunks(png, _xmp_chunk(orientation), b"IDAT"),
        "PNG late xmp": with_chunks(png, _xmp_chunk(orientation), b"IEND"),
        "PNG late exif and xmp": with_chunks(png, _xmp_chunk(8) + tag, b"IEND"),
        "PNG raw profile": with_chunks(png, _raw_profile(orientation), b"IDAT"),
        "PNG late raw profile": with_chunks(png, _raw_profile(orientation), b"IEND"),
        "PNG animated": encoded(
            image, "PNG", save_all=True, append_images=[noise("L").convert("RGB")], exif=body
        ),
        "WEBP exif": encoded(image, "WEBP", exif=body),
        "WEBP xmp": encoded(image, "WEBP", xmp=xmp),
        "WEBP animated": encoded(
            image, "WEBP", save_all=True, append_images=[noise("L").convert("RGB")], exif=body
        ),
        "TIFF tag": encoded(image, "TIFF", exif=body),
        "TIFF xmp": encoded(image, "TIFF", tiffinfo={700: xmp}),
        "TIFF of two pages": encoded(
            image, "TIFF", exif=body, save_all=True, append_images=[image]
        ),
        "JPEG2000": encoded(image, "JPEG2000"),
        "GIF": encoded(image, "GIF"),
        "BMP": encoded(image, "BMP"),
        "PPM": encoded(image, "PPM"),
    }
    late = "PNG animated, late exif", with_chunks(made["PNG animated"], tag, b"IEND")
    if 1 <= orientation <= 8:  # writers refuse others
        made["TIFF tag and compression"] = encoded(image, "TIFF", exif=body, compression="tiff_lzw")
        more = {"tiffinfo": {700: xmp}, "compression": "tiff_adobe_deflate"}
        made["TIFF xmp and compression"] = encoded(image, "TIFF", **more)
    if 1 <= orientation <= 8 and "AVIF" in Image.SAVE:
        made["AVIF exif"] = encoded(image, "AVIF", exif=body)
    return {**made, late[0]: late[1]}


# Sounds.

RATE = 16_000
SOUNDS = {
    **{
        f"WAV {sub}": ("WAV", sub)
        for sub in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
    },
    **{f"WAV {sub}": ("WAV", sub) for sub in ("ALAW", "ULAW", "IMA_ADPCM", "MS_ADPCM")},
    **{f"WAVEX {sub}": ("WAVEX", sub) for sub in ("PCM_16", "PCM_24", "FLOAT")},
    **{f"AIFF {sub}": ("AIFF", sub) for sub in ("PCM_S8", "PCM_16", "FLOAT")},
    **{f"FLAC {sub}": ("FLAC", sub) for sub in ("PCM_16", "PCM_24")},
    **{f"OGG {sub}": ("OGG", sub) for sub in ("VORBIS", "OPUS")},
    "MP3": ("MP3", "MPEG_LAYER_III"),
    "RF64": ("RF64", "PCM_16"),
    "W64": ("W64", "PCM_16"),
    "AU": ("AU", "PCM_16"),
    "CAF": ("CAF", "PCM_16"),
}
"""Name → format and encoding of libsndfile."""


def tones(count: int, channels: int = 1, rate: int = RATE) -> np.ndarray[Any, Any]:
    """float32 [count, channels] from -1 to 1, with noise, so that no two blocks are equal."""
    random = np.random.default_rng([count, channels])
    times = np.arange(count)[:, None] / rate
    waves = np.sin(2 * np.pi * (220 + 110 * np.arange(channels)) * times) / 2
    return (waves + random.normal(0, 0.05, (count, channels))).clip(-1, 1).astype(np.float32)


def sound(kind: str, samples: np.ndarray[Any, Any], rate: int = RATE, **more: Any) -> bytes:
    """The bytes of a sound in one of the formats `SOUNDS`."""
    soundfile = pytest.importorskip("soundfile")
    form, subtype = SOUNDS[kind]
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=form, subtype=subtype, **more)
    return out.getvalue()


def wave_header(
    rate: int, count: int, channels: int = 1, data_size: int | None = None, bits: int = 16
) -> bytes:
    """The header of a WAV file of whole numbers, with what it says of its samples."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block % 2**32, block % 2**16, bits)
    size = count * block if data_size is None else data_size
    return (
        b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size)
    )


def forged_rate(kind: str, rate: int) -> bytes:
    """A WAV or AIFF file of 4,000 samples whose header says some rate."""
    if kind == "WAV":
        return wave_header(rate, 4000) + bytes(8000)
    data = bytearray(sound("AIFF PCM_16", tones(4000)))
    at = data.index(b"COMM") + 16
    exponent = max(rate, 1).bit_length() + 16382
    mantissa = (max(rate, 0) << (64 - max(rate, 1).bit_length())) if rate else 0
    data[at : at + 10] = struct.pack(">HQ", exponent if rate else 0, mantissa)
    return bytes(data)


def long_flac(count: int, rate: int = RATE) -> bytes:
    """A small FLAC file with many samples, all of them 0."""
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", rate, 1, format="FLAC") as file:
        block = np.zeros(1 << 18, np.int16)
        for begin in range(0, count, len(block)):
            file.write(block[: count - begin])
    return out.getvalue()


def mp3_without_tag(data: bytes) -> bytes:
    """An MP3 without its first frame, which says how many there are."""
    at = next(at for at in range(4, len(data)) if data[at] == 0xFF and data[at + 1] == data[1])
    return data[at:]


# Videos.


def colours(count: int, height: int = 64, width: int = 96) -> list[Any]:
    """Frames of one colour each."""
    return [
        Image.new("RGB", (width, height), (30 * at % 256, 255 - 30 * at % 256, 128))
        for at in range(count)
    ]


def animation(kind: str, count: int, **more: Any) -> bytes:
    """An animated GIF, WebP or PNG."""
    first, *rest = colours(count)
    return encoded(first, kind, save_all=True, append_images=rest, duration=40, **more)


FILMS = {
    "MP4": ("mp4", "mpeg4"),
    "AVI": ("avi", "mpeg4"),
    "FLV": ("flv", "flv1"),
    "MPEG": ("mpeg", "mpeg1video"),
}
"""Name → container and codec, which every build of FFmpeg has."""


def film(kind: str, count: int) -> bytes:
    """A video that PyAV writes and reads."""
    av = pytest.importorskip("av")
    container, codec = FILMS[kind]
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for image in colours(count):
            file.mux(stream.encode(av.VideoFrame.from_image(image)))
        file.mux(stream.encode())
    return out.getvalue()
