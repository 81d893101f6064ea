"""Videos as frames: some frames, evenly spread, become images.

Animated GIF, WebP and PNG files are read by Pillow; other formats (MP4, WebM, …) need PyAV, with the extra `video`.
"""

import io
from collections.abc import Sequence
from typing import Any

from penstock.core.errors import MissingExtraError, RecordError
from penstock.media.images import DAMAGE

_ANIMATED = ("GIF", "WEBP", "PNG")


def spread(total: int, count: int) -> list[int]:
    """Which of `total` frames to take: the middles of `count` stretches of equal length; all, if there are fewer."""
    count = min(total, count)
    return [(2 * number + 1) * total // (2 * count) for number in range(count)]


def read_frames(data: bytes, count: int) -> list[bytes]:
    """Some frames of a video.

    Args:
        data: The bytes of a file.
        count: How many, evenly spread; all, if there are fewer.

    Returns:
        The frames as PNG files, in order.

    Raises:
        RecordError: It is no video of a known format, or damaged.
        MissingExtraError: PyAV is needed, and not installed.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_ANIMATED) as image:
            frames = []
            for number in spread(getattr(image, "n_frames", 1), count):
                image.seek(number)
                frames.append(_as_png(image.convert("RGB")))
            return frames
    except UnidentifiedImageError:
        return _by_av(data, count)
    except (*DAMAGE, Image.DecompressionBombError) as error:
        raise RecordError(f"the video is damaged: {error}") from error


def _by_av(data: bytes, count: int) -> list[bytes]:
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("av", "video") from error
    try:
        # Counted by decoding: containers may say nothing, or something wrong.
        with av.open(io.BytesIO(data)) as file:
            total = sum(1 for _ in file.decode(video=0))
        wanted = set(spread(total, count))
        with av.open(io.BytesIO(data)) as file:
            taken: Sequence[Any] = [
                frame.to_image() for number, frame in enumerate(file.decode(video=0)) if number in wanted
            ]
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise RecordError(f"not a video that can be read ({len(data):,} bytes): {error}") from error
    if not taken:
        raise RecordError("the video has no frames")
    return [_as_png(frame.convert("RGB")) for frame in taken]


def _as_png(picture: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return out.getvalue()
