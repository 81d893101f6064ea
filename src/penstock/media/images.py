"""Images: files become RGB pictures, decoded once, by Pillow, with their orientation applied.

The size that decides a document's slots and the pixels that a model sees must come from the same picture. So there is
one decoder, and transformers' processors get its pictures, not files. Pillow reads neither more nor less because of
this: formats are those of `FORMATS`, and nothing is fetched here.
"""

import io
import math
import struct
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from penstock.core.errors import ConfigError, MissingExtraError, RecordError
from penstock.core.urls import url_key

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Names of Pillow's readers that may see the bytes; an MPO is a JPEG with more than one picture."""

DAMAGE = (
    OSError, SyntaxError, ValueError, EOFError, MemoryError, IndexError, KeyError, TypeError, OverflowError,
    struct.error,
)  # fmt: skip
"""What Pillow's readers raise for damaged files."""

_ORIENTATION = 0x0112
"""EXIF tag."""
_TURNED = (5, 6, 7, 8)
"""Orientations in which height and width change places."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Which images are accepted, and how they become RGB."""

    probe: Literal["decode", "header"] = "decode"
    """How preparation looks at an image. decode: all of it, so that a truncated file is found now. header: its size
    only, which is fast; damage is then found in training, as an error."""

    alpha: Literal["white", "black", "ignore", "error"] = "white"
    """Transparent images: put on white or black; use the colours stored under the transparency; or reject."""

    animated: Literal["first", "error"] = "first"
    """Images with several frames: use the first one, or reject."""

    max_pixels: int = 89_478_485
    """Reject images with more pixels, before they are decoded; by default where Pillow warns of decompression bombs."""

    min_pixels: int = 1
    """Reject images with fewer pixels."""

    video_frames: int = 0
    """Frames of a video that become images, one after another, evenly spread; all if it has fewer. 0: videos are
    refused."""

    shrink_pixels: int | None = None
    """Make images with more pixels smaller, in proportion, before the model's processor sees them; counted. So sources
    of one mixture may have images of different detail. None: the processor alone decides."""

    max_ratio: float = 200.0
    """Reject images whose longer side is more than this many times the shorter one."""

    image_folder: str | None = None
    """Folder or URL that relative paths of images begin at; None: the folder of the record's file."""

    image_storage: Literal["copy", "reference"] = "copy"
    """copy: the images' bytes are stored next to the shards, each once a shard. reference: path and digest only, so the
    files must stay where they are; those that are part of a record are copied."""

    verify_all: bool = False
    """Compare every conversation with the processor's own encoding of text and images together, id for id; False: the
    first ones of each block."""

    def __post_init__(self) -> None:
        choices = {
            "probe": ("decode", "header"),
            "alpha": ("white", "black", "ignore", "error"),
            "animated": ("first", "error"),
            "image_storage": ("copy", "reference"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise ConfigError(
                f"min_pixels ({self.min_pixels}) and max_pixels ({self.max_pixels}) must be 1 or more, in this order"
            )
        if self.video_frames < 0:
            raise ConfigError(f"video_frames must be 0 or more; got {self.video_frames}")
        if self.shrink_pixels is not None and self.shrink_pixels < 1:
            raise ConfigError(f"shrink_pixels must be 1 or more; got {self.shrink_pixels}")
        if not self.max_ratio >= 1:
            raise ConfigError(f"max_ratio must be 1 or more; got {self.max_ratio}")

    def describe(self) -> dict[str, Any]:
        """Every setting, as plain JSON values; a URL without what is secret in it."""
        folder = None if self.image_folder is None else url_key(self.image_folder)
        return asdict(self) | {"image_folder": folder}

    @property
    def decoding(self) -> dict[str, Any]:
        """The settings that decide the pixels of an accepted image."""
        return {"alpha": self.alpha, **({"shrink_pixels": self.shrink_pixels} if self.shrink_pixels else {})}


def read_size(data: bytes, settings: ImageSettings) -> tuple[int, int]:
    """(height, width) of an image as `read_picture` gives it, from its header.

    Raises:
        RecordError: It is not an image that the settings accept.
    """
    return shrunk(_checked_size(_opened(data, settings), settings), settings)


def shrunk(size: tuple[int, int], settings: ImageSettings) -> tuple[int, int]:
    """(height, width) with at most `shrink_pixels` pixels, in the same proportion."""
    height, width = size
    if settings.shrink_pixels is None or height * width <= settings.shrink_pixels:
        return size
    scale = math.sqrt(settings.shrink_pixels / (height * width))
    # Of a very long image, the short side stays 1 pixel.
    short = max(1, math.floor(min(size) * scale))
    long = min(max(1, math.floor(max(size) * scale)), settings.shrink_pixels // short)
    return (short, long) if height < width else (long, short)


def read_picture(data: bytes, settings: ImageSettings) -> Any:
    """Decode an image.

    Args:
        data: The bytes of a file.
        settings: Which images are accepted.

    Returns:
        A `PIL.Image.Image` of mode RGB, upright, of the size that `read_size` gives.

    Raises:
        RecordError: It is not an image that the settings accept, or it is damaged.
    """
    from PIL import ImageOps

    image = _opened(data, settings)
    _checked_size(image, settings)
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
    except DAMAGE as error:
        raise RecordError(f"the image ({image.format}, {image.width}x{image.height}) is damaged: {error}") from error
    picture = _as_rgb(upright, settings.alpha)
    height, width = shrunk((picture.height, picture.width), settings)
    if (width, height) == picture.size:
        return picture
    from PIL import Image

    return picture.resize((width, height), Image.Resampling.LANCZOS)


def _opened(data: bytes, settings: ImageSettings) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error

    try:
        image = Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in _readers()])
    except UnidentifiedImageError:
        begin = data[:8]
        raise RecordError(
            f"not an image of a known format ({len(data):,} bytes that begin {begin!r}); known: {', '.join(FORMATS)}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RecordError(f"the image is too large: {error}") from None
    except DAMAGE as error:
        raise RecordError(f"the image cannot be read: {error}") from error
    if settings.animated == "error" and image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
        raise RecordError(f"the image has {frames} frames; animated: first takes the first one")
    if settings.alpha == "error" and _is_transparent(image):
        raise RecordError("the image is transparent; alpha: white, black or ignore accepts it")
    if image.mode in ("I", "F"):
        raise RecordError(f"the image has 32-bit numbers for pixels (mode {image.mode}), whose range is not known")
    return image


def _readers() -> dict[str, Any]:
    """Pillow's readers, all of them registered."""
    from PIL import Image

    if "WEBP" not in Image.OPEN:
        Image.init()
    return Image.OPEN


def _checked_size(image: Any, settings: ImageSettings) -> tuple[int, int]:
    """(height, width) of the upright picture, if the settings accept it."""
    width, height = image.size
    if not settings.min_pixels <= width * height <= settings.max_pixels:
        raise RecordError(
            f"the image has {width}x{height} pixels; accepted are {settings.min_pixels:,} to {settings.max_pixels:,}"
        )
    if max(width, height) > settings.max_ratio * min(width, height):
        raise RecordError(f"the image is too elongated: {width}x{height}; max_ratio is {settings.max_ratio:g}")
    try:
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    except (SyntaxError, ValueError, OSError, KeyError, TypeError):
        turned = False  # Pillow ignores such tags as well when it turns the picture
    return (width, height) if turned else (height, width)


def _is_transparent(image: Any) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def _as_rgb(image: Any, alpha: str) -> Any:
    """The picture in RGB, eight bits a channel."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        import numpy as np

        # Pillow would clip at 255; the high byte keeps the picture.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if _is_transparent(image) and alpha in ("white", "black"):
        whole = image.convert("RGBA")
        ground = Image.new("RGBA", whole.size, (255, 255, 255, 255) if alpha == "white" else (0, 0, 0, 255))
        return Image.alpha_composite(ground, whole).convert("RGB")
    return image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")
