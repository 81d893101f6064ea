"""Videos as frames: some frames, evenly spread, become images.

Animated GIF, WebP and PNG files are read by Pillow; other formats (MP4, WebM, …) need PyAV, with
the extra `video`. All frames of a video are decoded up to the last one that is taken, so its pixels
are counted by its header first, and again while it is decoded: frames may be larger than the header
says.
"""

import io
from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.core.errors import RecordError, record_errors
from penstock.media.header import Header, open_animation, open_film, read_header
from penstock.media.images import ImageSettings

if TYPE_CHECKING:
    import PIL.Image

_DEFAULTS = ImageSettings()


def spread(total: int, count: int) -> list[int]:
    """Which of `total` frames to take: the middles of `count` stretches of equal length; all, if
    there are fewer.
    """
    count = min(total, count)
    return [(2 * number + 1) * total // (2 * count) for number in range(count)]


def read_frames(data: bytes, count: int, settings: ImageSettings = _DEFAULTS) -> list[bytes]:
    """Some frames of a video.

    Args:
        data: The bytes of a file.
        count: How many, evenly spread; all, if there are fewer.
        settings: Which videos are accepted.

    Returns:
        The frames as PNG files, in order.

    Raises:
        RecordError: It is no video of a known format, or damaged, or has more pixels than the
            settings accept.
        MissingExtraError: PyAV is needed, and not installed.
    """
    header = read_header(data, "video")
    if not header.frames:
        raise RecordError("the video has no frames")
    animation = open_animation(data)
    # A frame of an animation is composed in memory, which costs ten times as much as one of a film.
    most = settings.max_video_pixels if animation is None else settings.max_pixels
    pixels = _Pixels(header, most, "max_video_pixels" if animation is None else "max_pixels")
    pixels.check_frame(header.width, header.height, settings)
    pixels.check(header.pixels)
    if animation is not None:
        return _by_pillow(animation, spread(header.frames, count), pixels)
    found, taken = _by_av(data, spread(header.frames, count), pixels, settings)
    if found != header.frames:
        # Containers may say something wrong; then all frames are counted by decoding them.
        _, taken = _by_av(data, spread(found, count), pixels, settings)
    if not taken:
        raise RecordError("the video has no frames")
    return taken


class _Pixels:
    """Counts the pixels of a video."""

    def __init__(self, header: Header, most: int, setting: str) -> None:
        self._header, self._most, self._setting = header, most, setting

    def check(self, count: int) -> None:
        """Refuse more pixels than are accepted."""
        if count > self._most:
            frames, (height, width) = self._header.frames, self._header.size
            raise RecordError(
                f"the video has {frames:,} frames of {width}x{height} pixels; accepted are "
                f"{self._most:,} pixels together ({self._setting})"
            )

    def check_frame(self, width: int, height: int, settings: ImageSettings) -> None:
        """Refuse a frame that would be refused as an image."""
        if width * height > settings.max_pixels:
            raise RecordError(
                f"the video has frames of {width}x{height} pixels; accepted are "
                f"{settings.max_pixels:,} (max_pixels)"
            )


def _by_pillow(image: "PIL.Image.Image", wanted: list[int], pixels: _Pixels) -> list[bytes]:
    taken, done = [], 0
    with record_errors("the video is damaged"):
        for number in range(wanted[-1] + 1):
            image.seek(number)
            done += image.width * image.height
            pixels.check(done)
            if number in wanted:
                taken.append(_as_png(image.convert("RGB")))
    return taken


def _by_av(
    data: bytes, wanted: Collection[int], pixels: _Pixels, settings: ImageSettings
) -> tuple[int, list[bytes]]:
    """The number of frames that can be decoded, and some of them."""
    taken, found, done = [], 0, 0
    with (
        open_film(data) as file,
        record_errors(f"not a video that can be read ({len(data):,} bytes)"),
    ):
        for frame in file.decode(video=0):
            pixels.check_frame(frame.width, frame.height, settings)
            done += frame.width * frame.height
            pixels.check(done)
            if found in wanted:
                taken.append(_as_png(frame.to_image().convert("RGB")))
            found += 1
    return found, taken


def _as_png(picture: "PIL.Image.Image") -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return out.getvalue()
