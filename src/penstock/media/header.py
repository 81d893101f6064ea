"""What a medium is, by its header: sizes, frames, rate and length, as they will be when it is
decoded.

Slots are planned and limits are applied with these numbers, before any work is done; decoders
compare their results with them. So there is one function for all media, and a test compares it with
the decoded result for every format.

Which way up an image is stands in its metadata, and Pillow's `getexif` says it: the same that turns
the pixels. Two traps are closed here. Pillow turns a TIFF as it loads it, and newer versions report
its size already turned. And it reads what follows the pixels of a PNG only after decoding them.
"""

import io
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from penstock.core.errors import MissingExtraError, RecordError, record_errors
from penstock.core.json_values import JsonObject
from penstock.media.layout import Size
from penstock.media.png_files import with_late_metadata
from penstock.media.sound_files import SoundFile, sound_file

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Names of Pillow's readers that may see the bytes; an MPO is a JPEG with more than one picture."""
ANIMATED = ("GIF", "WEBP", "PNG")
"""Videos that Pillow reads."""
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,ivf,h264,hevc,m4v,mxf,nut"  # noqa: E501
"""Other videos: names of FFmpeg's readers. Playlists and lists of files are not among them, because
their content would decide which files and URLs are opened.
"""
_SAYS_WHERE = {"mp4", "avi"}
"""Containers with a list of their frames, so that one that ends too early was cut; streams may
begin anywhere.
"""

_ORIENTATION, _WIDTH, _HEIGHT = 0x0112, 0x0100, 0x0101
"""Tags of EXIF and TIFF."""
_TURNED = (5, 6, 7, 8)
"""Orientations in which height and width change places."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a medium will be when it is decoded. Numbers that it has not are 0."""

    frames: int = 1
    """Pictures of a video, 1 of an image; of a sound, samples of each channel."""
    height: int = 0
    width: int = 0
    """Of an upright picture, in pixels; of a video, as its container says."""
    rate: int = 0
    """Samples a second, as stored."""
    channels: int = 0

    @property
    def size(self) -> Size:
        """(height, width)."""
        return self.height, self.width

    @property
    def pixels(self) -> int:
        """Of all frames together."""
        return self.frames * self.height * self.width

    @property
    def seconds(self) -> float:
        """Length of a sound."""
        return self.frames / self.rate

    def samples(self, rate: int) -> int:
        """Samples of a sound at another rate, rounded as soxr does it."""
        return self.frames if rate == self.rate else int(self.frames / (self.rate / rate) + 0.5)


def read_header(data: bytes, kind: Literal["image", "audio", "video"]) -> Header:
    """What a medium is, without decoding it.

    Args:
        data: The bytes of a file.
        kind: How it will be read. An animation is an image with one frame, or a video.

    Raises:
        RecordError: It is of no known format, or its header is damaged.
        MissingExtraError: The package that reads it is not installed.
    """
    if kind == "audio":
        return header_of_sound(sound_file(data))
    if kind == "image":
        height, width = upright_size(open_image(data), data)
        return Header(height=height, width=width)
    animation = open_animation(data)
    return _header_of_film(data) if animation is None else _header_of_animation(animation)


def header_of_sound(found: SoundFile) -> Header:
    """Of a file that was opened."""
    return Header(frames=found.frames, rate=found.rate, channels=found.channels)


def open_image(data: bytes) -> "PIL.Image.Image":
    """A `PIL.Image.Image` of a known format, not decoded yet."""
    image = _opened(data, [name for name in FORMATS if name in _readers()], "image", "vision")
    if image is None:
        begin = f"{len(data):,} bytes that begin {data[:8]!r}"
        raise RecordError(f"not an image of a known format ({begin}); known: {', '.join(FORMATS)}")
    return image


def open_animation(data: bytes) -> "PIL.Image.Image | None":
    """A video that Pillow reads, as a `PIL.Image.Image` at its first frame; None: it is none."""
    return _opened(data, ANIMATED, "video", "video")


def _opened(
    data: bytes, formats: list[str] | tuple[str, ...], what: str, extra: str
) -> "PIL.Image.Image | None":
    """As Pillow opens it; None: it is of another format."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("pillow", extra) from error
    with record_errors(f"the {what} cannot be read"):
        try:
            return Image.open(io.BytesIO(data), formats=formats)
        except UnidentifiedImageError:
            return None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise RecordError(f"the {what} is too large: {error}") from None


def _readers() -> JsonObject:
    """Pillow's readers, all of them registered."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error

    if "WEBP" not in Image.OPEN:
        Image.init()
    return Image.OPEN


def upright_size(image: "PIL.Image.Image", data: bytes) -> Size:
    """(height, width) of an opened image as it will be after decoding, upright."""
    with record_errors("the image's metadata cannot be read"):
        width, height = stored_size(image)
        is_turned = _orientation(image, data) in _TURNED
    return (width, height) if is_turned else (height, width)


def stored_size(image: "PIL.Image.Image") -> tuple[int, int]:
    """(width, height) of an opened image as its pixels are stored."""
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined] # as all TIFFs have
        return int(tags[_WIDTH]), int(tags[_HEIGHT])
    width, height = image.size
    return width, height


def _orientation(image: "PIL.Image.Image", data: bytes) -> object:
    """The number from 1 to 8 by which Pillow will turn an image, if it has one."""
    from PIL import Image

    animated = image.format == "PNG" and image.is_animated  # type: ignore[attr-defined] # as PNGs say
    if image.format == "PNG" and (metadata := with_late_metadata(data, animated)) is not None:
        try:
            image = Image.open(io.BytesIO(metadata), formats=["PNG"])
        except Exception:
            return None  # the image itself will not load either
    settle_metadata(image)
    # Not the method of the class: for a PNG that one decodes the pixels.
    return Image.Image.getexif(image).get(_ORIENTATION)


def settle_metadata(image: "PIL.Image.Image") -> None:
    """Read the EXIF of an image once. Where it is damaged Pillow raises now, and from then on takes
    what it read.
    """
    from PIL import Image

    with suppress(Exception):
        Image.Image.getexif(image)


def _header_of_animation(image: "PIL.Image.Image") -> Header:
    with record_errors("the video is damaged"):
        return Header(frames=getattr(image, "n_frames", 1), height=image.height, width=image.width)


def open_film(data: bytes) -> Any:
    """A video that FFmpeg reads, as a container of PyAV, to be used within `with`."""
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("av", "video") from error
    with record_errors(f"not a video that can be read ({len(data):,} bytes)"):
        return av.open(
            io.BytesIO(data), options={"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
        )


def _header_of_film(data: bytes) -> Header:
    """Its packets are counted, each of which is a frame: a container's own number may be missing or
    wrong.
    """
    with (
        open_film(data) as file,
        record_errors(f"not a video that can be read ({len(data):,} bytes)"),
    ):
        if not file.streams.video:
            raise RecordError("the video has no pictures, or ends before them")
        stream, found = file.streams.video[0], 0
        for packet in file.demux(stream):
            found += packet.size > 0
            if packet.is_corrupt and _SAYS_WHERE & set(file.format.name.split(",")):
                raise RecordError(
                    f"the video is damaged: it ends within its frame {found - 1:,}; it was cut"
                )
        return Header(frames=found, height=stream.height, width=stream.width)
