"""Images: files become RGB pictures, decoded once, by Pillow, with their orientation applied.

The size that decides a document's slots and the pixels that a model sees must come from the same
picture. So there is one decoder, and transformers' processors get its pictures, not files. Pillow
reads neither more nor less because of this: formats are those of `penstock.media.header`, and
nothing is fetched here.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal, final

import numpy as np

from penstock.core.errors import ConfigError, RecordError, record_errors
from penstock.core.json_values import JsonObject
from penstock.core.urls import url_key
from penstock.media.header import open_image, settle_metadata, upright_size
from penstock.media.png_files import MOST_PIXELS_PER_BYTE, check_pixels

if TYPE_CHECKING:
    import PIL.Image

_MOST_PIXELS = {"JPEG": 512, "MPO": 512, "PNG": MOST_PIXELS_PER_BYTE}
"""Format → pixels a byte of its file, at most. JPEG: a bit for each block of 8 x 8."""
_NEWER = ("max_video_pixels", "max_seconds")
"""Settings that datasets and preparations of earlier versions do not name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Which images are accepted, and how they become RGB."""

    probe: Literal["decode", "header"] = "decode"
    """How preparation looks at an image. decode: all of it, so that a truncated file is found now.
    header: its size only, which is fast; damage is then found in training, as an error.
    """

    alpha: Literal["white", "black", "ignore", "error"] = "white"
    """Transparent images: put on white or black; use the colours stored under the transparency; or
    reject.
    """

    animated: Literal["first", "error"] = "first"
    """Images with several frames: use the first one, or reject."""

    max_pixels: int = 89_478_485
    """Reject images with more pixels, before they are decoded; by default where Pillow warns of
    decompression bombs. In a GIF, WebP or PNG file that is read as a video, all its frames count
    together.
    """

    min_pixels: int = 1
    """Reject images with fewer pixels."""

    video_frames: int = 0
    """Frames of a video that become images, one after another, evenly spread; all if it has fewer.
    0: videos are refused.
    """

    max_video_pixels: int = 1 << 34
    """Reject other videos whose frames have more pixels together, before they are decoded: by
    default 10 minutes of 1280x720, or 4.5 minutes of 1920x1080, at 30 frames a second.
    """

    max_seconds: float = 3600.0
    """Reject longer sounds, before they are decoded, also where the model's processor would read
    them.
    """

    shrink_pixels: int | None = None
    """Make images with more pixels smaller, in proportion, before the model's processor sees them;
    counted. So sources of one mixture may have images of different detail. None: the processor
    alone decides.
    """

    max_ratio: float = 200.0
    """Reject images whose longer side is more than this many times the shorter one."""

    image_folder: str | None = None
    """Folder or URL that relative paths of images begin at; None: the folder of the record's
    file.
    """

    image_storage: Literal["copy", "reference"] = "copy"
    """copy: the images' bytes are stored next to the shards, each once a shard. reference: path and
    digest only, so the files must stay where they are; those that are part of a record are copied.
    """

    verify_all: bool = False
    """Compare every conversation with the processor's own encoding of text and images together, id
    for id; False: the first ones of each block.
    """

    def __post_init__(self) -> None:
        choices = {
            "probe": ("decode", "header"),
            "alpha": ("white", "black", "ignore", "error"),
            "animated": ("first", "error"),
            "image_storage": ("copy", "reference"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise ConfigError(
                f"min_pixels ({self.min_pixels}) and max_pixels ({self.max_pixels}) must be 1 "
                "or more, in this order"
            )
        for name in ("max_video_pixels", "max_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0; got {getattr(self, name)}")
        if self.video_frames < 0:
            raise ConfigError(f"video_frames must be 0 or more; got {self.video_frames}")
        if self.shrink_pixels is not None and self.shrink_pixels < 1:
            raise ConfigError(f"shrink_pixels must be 1 or more; got {self.shrink_pixels}")
        if not self.max_ratio >= 1:
            raise ConfigError(f"max_ratio must be 1 or more; got {self.max_ratio}")

    def describe(self) -> JsonObject:
        """Every setting, as plain JSON values; newer ones only where they are not at their
        defaults.

        A URL is without what is secret in it.
        """
        defaults = {one.name: one.default for one in fields(self) if one.name in _NEWER}
        plain = {
            name: value for name, value in asdict(self).items() if defaults.get(name, ...) != value
        }
        return plain | {
            "image_folder": None if self.image_folder is None else url_key(self.image_folder)
        }

    @property
    def decoding(self) -> JsonObject:
        """The settings that decide the pixels of an accepted image."""
        return {
            "alpha": self.alpha,
            **({"shrink_pixels": self.shrink_pixels} if self.shrink_pixels else {}),
        }


def read_size(data: bytes, settings: ImageSettings) -> tuple[int, int]:
    """(height, width) of an image as `read_picture` gives it, from its header.

    Raises:
        RecordError: It is not an image that the settings accept.
    """
    return shrunk(_checked_size(_opened(data, settings), data, settings), settings)


def probed_size(data: bytes, settings: ImageSettings) -> tuple[int, int]:
    """As `read_size`; with the probe "decode", all pixels are decoded too.

    Raises:
        RecordError: It is not an image that the settings accept; or it is damaged.
    """
    if settings.probe == "header":
        return read_size(data, settings)
    picture = read_picture(data, settings)
    return picture.height, picture.width


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


def read_picture(data: bytes, settings: ImageSettings) -> "PIL.Image.Image":
    """Decode an image.

    Args:
        data: The bytes of a file.
        settings: Which images are accepted.

    Returns:
        A `PIL.Image.Image` of mode RGB, upright, of the size that `read_size` gives.

    Raises:
        RecordError: It is not an image that the settings accept, or it is damaged.
    """
    image = _opened(data, settings)
    expected = _checked_size(image, data, settings)
    picture = _decoded(image, data, settings)
    if (picture.height, picture.width) != expected:
        raise RecordError(
            f"the image ({image.format}) is damaged: its header says "
            f"{expected[1]}x{expected[0]} pixels, and {picture.width}x{picture.height} were "
            "decoded"
        )
    height, width = shrunk(expected, settings)
    if (height, width) == expected:
        return picture
    from PIL import Image

    with record_errors("the image cannot be made smaller"):
        return picture.resize((width, height), Image.Resampling.LANCZOS)


def _decoded(image: "PIL.Image.Image", data: bytes, settings: ImageSettings) -> "PIL.Image.Image":
    """The upright RGB picture of an opened image."""
    from PIL import ImageOps

    with record_errors(f"the image ({image.format}, {image.width}x{image.height}) is damaged"):
        image.load()
        if image.format == "PNG":
            check_pixels(image, data)
        _check_transparency(image, settings)  # a PNG may say it after its pixels
        settle_metadata(image)
        ImageOps.exif_transpose(image, in_place=True)
        return _as_rgb(image, settings.alpha)


def _opened(data: bytes, settings: ImageSettings) -> "PIL.Image.Image":
    image = open_image(data)
    if settings.animated == "error" and image.format != "MPO" and (frames := _frames_of(image)) > 1:
        raise RecordError(f"the image has {frames} frames; animated: first takes the first one")
    _check_transparency(image, settings)
    check_picture(image, settings)
    return image


def _accepted(settings: ImageSettings) -> str:
    return f"{settings.min_pixels:,} to {settings.max_pixels:,} (min_pixels, max_pixels)"


def check_picture(picture: "PIL.Image.Image", settings: ImageSettings) -> None:
    """Refuse a picture of Pillow that is too large, before it is loaded, or whose pixels have no
    known range.
    """
    if picture.width * picture.height > settings.max_pixels:
        raise RecordError(
            f"the image has {picture.width}x{picture.height} pixels; accepted are "
            f"{_accepted(settings)}"
        )
    if picture.mode in ("I", "F"):
        raise RecordError(
            f"the image has 32-bit numbers for pixels (mode {picture.mode}), whose range is "
            "not known"
        )


def _frames_of(image: object) -> int:
    with record_errors("the image is damaged"):
        return int(getattr(image, "n_frames", 1))


def _checked_size(
    image: "PIL.Image.Image", data: bytes, settings: ImageSettings
) -> tuple[int, int]:
    """(height, width) of the upright picture, if the settings accept it."""
    width, height = image.size
    if width * height < settings.min_pixels:
        raise RecordError(
            f"the image has {width}x{height} pixels; accepted are {_accepted(settings)}"
        )
    if width * height > _MOST_PIXELS.get(str(image.format), math.inf) * len(data):
        raise RecordError(
            f"the image ({image.format}) is damaged: its header says {width}x{height} pixels, "
            f"more than its {len(data):,} bytes can hold"
        )
    if max(width, height) > settings.max_ratio * min(width, height):
        raise RecordError(
            f"the image is too elongated: {width}x{height}; max_ratio is {settings.max_ratio:g}"
        )
    return upright_size(image, data)


def _check_transparency(image: "PIL.Image.Image", settings: ImageSettings) -> None:
    if settings.alpha == "error" and _is_transparent(image):
        raise RecordError("the image is transparent; alpha: white, black or ignore accepts it")


def _is_transparent(image: "PIL.Image.Image") -> bool:
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def _as_rgb(image: "PIL.Image.Image", alpha: str) -> "PIL.Image.Image":
    """The picture in RGB, eight bits a channel."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        # Pillow would clip at 255; the high byte keeps the picture.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if _is_transparent(image) and alpha in ("white", "black"):
        whole = image.convert("RGBA")
        ground = Image.new(
            "RGBA", whole.size, (255, 255, 255, 255) if alpha == "white" else (0, 0, 0, 255)
        )
        return Image.alpha_composite(ground, whole).convert("RGB")
    return image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")
