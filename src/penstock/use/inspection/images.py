"""Images where documents are shown: their names in place of their slots, and small pictures of them
in pages.
"""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self, final

from penstock.chat.encoded_chat import EncodedChat
from penstock.core.errors import PenstockError
from penstock.data.shards.format.images import ImageOf
from penstock.media.images import ImageSettings, read_picture

SIDE = 160
"""Maximum width and height of a small picture, in pixels."""
MOST_PICTURES = 400
"""Maximum number of different pictures in a page; others are only named."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImage:
    """An image of a document or row."""

    begin: int
    end: int
    """Tokens that stand for it, [begin, end)."""
    label: str
    """Its name, size and slots."""
    picture: str = ""
    """A small picture as a data URL; empty: none was made."""

    def moved(self, by: int) -> Self:
        """The same in a row, where its document begins at slot `by`."""
        return replace(self, begin=self.begin + by, end=self.end + by)


def images_shown(images: Iterable[ImageOf], *, pictures: bool = False) -> tuple[ShownImage, ...]:
    """Images of a document of a dataset; `pictures`: make small pictures of them."""
    return tuple(
        ShownImage(
            begin=image.begin,
            end=image.end,
            label=_label(image.name, image.digest, (image.height, image.width), image.slots),
            picture=_picture(image.read) if pictures else "",
        )
        for image in images
    )


def images_of_chat(encoded: EncodedChat) -> tuple[ShownImage, ...]:
    """Images of a conversation, with small pictures."""
    return tuple(
        ShownImage(
            begin=place.begin,
            end=place.end,
            label=_label(image.origin, image.digest, image.size, place.layout.slots),
            picture=_picture(image.read),
        )
        for image, place in encoded.images
    )


def with_labels(texts: Sequence[str], images: Sequence[ShownImage]) -> list[str]:
    """Texts of tokens, where the first token of an image names it, and its others say nothing."""
    shown = list(texts)
    for image in images:
        shown[image.begin : image.end] = [image.label, *[""] * (image.end - image.begin - 1)]
    return shown


def _label(name: str, digest: bytes, size: tuple[int, int], slots: int) -> str:
    height, width = size
    if height == 1:
        return (
            f"[audio {name.rpartition('/')[2] or digest.hex()[:8]}, {width:,} samples, {slots} "
            "slots]"
        )
    return f"[image {name.rpartition('/')[2] or digest.hex()[:8]} {width}x{height}, {slots} slots]"


def _picture(read: Callable[[], bytes]) -> str:
    """A small picture as a data URL; empty if the image cannot be read, which `penstock verify`
    reports.
    """
    try:
        return _small(read())
    except (PenstockError, OSError):
        return ""


@lru_cache(MOST_PICTURES)
def _small(data: bytes) -> str:
    picture = read_picture(data, ImageSettings())
    picture.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
