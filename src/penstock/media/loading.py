"""Images of records, looked at: their size and digest; their bytes are kept, or read again."""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from penstock.core.errors import CorruptionError, RecordError, reason_of
from penstock.core.folders import is_url
from penstock.core.json_values import JsonMapping
from penstock.core.urls import (
    Address,
    fsspec_arguments,
    has_secrets,
    plain_cause,
    shown_url,
    without_secrets,
)
from penstock.media.finding import IMAGE_FIELDS, find_image, within_of
from penstock.media.images import ImageSettings, probed_size
from penstock.media.layout import NOUNS
from penstock.media.processor import Processor
from penstock.media.videos import read_frames, spread

DIGEST_BYTES = 16
_MOST_BYTES = 1 << 30
"""Of one image's file."""


def digest_of(data: bytes) -> bytes:
    """What identifies the bytes of an image: the first 16 bytes of SHA-256, for which CPUs have
    instructions.
    """
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def key_at(digest: bytes, begin: int, end: int) -> int:
    """A number below 0 for the tokens of an image, so that token lists in which they have it are
    equal only where the same image stands at the same place.

    Args:
        digest: Of its bytes.
        begin, end: Its tokens, [begin, end).
    """
    content = digest + begin.to_bytes(8, "little") + end.to_bytes(8, "little")
    return -1 - (int.from_bytes(digest_of(content)[:8], "little") >> 2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """An image of a record that was looked at."""

    size: tuple[int, int]
    """Height and width, upright, as a model's processor gets it."""
    digest: bytes
    """Of its bytes."""
    origin: str
    """Path or URL as it is stored and shown; empty: unknown."""
    is_embedded: bool
    """Whether the record itself has its bytes, so that the origin is only a name."""
    data: bytes | None
    """Its bytes; None: a local file, which is read again where they are needed."""
    is_shrunk: bool = False
    """Whether it was made smaller, as the settings say."""
    within: JsonMapping | None = None
    """`file`, `begin` and `size`, if its bytes are a part of a larger file."""
    address: str = ""
    """What opens it, if that is not `origin`; it may hold secrets."""

    def __repr__(self) -> str:
        return f"<image {self.size[1]}x{self.size[0]} {self.digest.hex()}>"

    def read(self) -> bytes:
        """Its bytes.

        Raises:
            RecordError: The file has changed since it was looked at.
        """
        if self.data is not None:
            return self.data
        data = read_bytes(self.address or self.origin)
        if digest_of(data) != self.digest:
            raise RecordError(
                f"{self.origin}: the image changed while it was prepared; run it again"
            )
        return data

    def reference(self) -> bytes:
        """What is stored where the image is not: where it is, as JSON."""
        where = {"path": self.origin}
        if self.within is not None:
            where = {
                "path": str(self.within["file"]),
                "begin": self.within["begin"],
                "size": self.within["size"],
            }
        return json.dumps(where, ensure_ascii=False).encode("utf-8", "backslashreplace")

    def check_reference(self) -> None:
        """Refuse an image that cannot be read again by what is stored of its URL.

        Raises:
            RecordError: Its URL has secrets, which are not stored, or does not lead to it without
                its query.
        """
        given = (
            self.within["file"] if self.within is not None else Address(self.address or self.origin)
        )
        full = given.full if isinstance(given, Address) else str(given)
        shown = shown_url(full)
        if full == shown or (self.is_embedded and self.within is None):
            return
        cure = "store the image itself: image_storage copy (--image-storage copy)"
        if has_secrets(full):
            raise RecordError(
                f"{shown}: its URL has user info or a signature, which is not stored, so the "
                f"image could not be read again for training; {cure}"
            )
        if not self._leads_here(shown):
            raise RecordError(
                f"{shown}: URLs are stored without their query, and without it this one does "
                f"not lead to the image; {cure}"
            )

    def _leads_here(self, shown: str) -> bool:
        """Whether the image can be read by its URL as it is stored."""
        try:
            begin, size = (
                (0, None) if self.within is None else (self.within["begin"], self.within["size"])
            )
            return digest_of(read_bytes(shown, begin, size)) == self.digest
        except RecordError:
            return False


@final
class Room:
    """How many bytes of images may stay in memory, so that files need not be read twice."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes

    def take(self, size_bytes: int) -> bool:
        """Whether there is room for an image; then it is taken."""
        fits = size_bytes <= self._left
        self._left -= size_bytes if fits else 0
        return fits


def load_image(
    value: object,
    folder: str,
    settings: ImageSettings,
    processor: Processor | None = None,
    room: Room | None = None,
) -> LoadedImage:
    """Look at an image of a record.

    Args:
        value: A path, a URL, a data URL, bytes, a picture of Pillow; or a mapping with one of
            these, as in a part of a content, or in a column of images of the Hub (`{"bytes": …,
            "path": …}`).
        folder: Where relative paths begin.
        settings: Which images are accepted.
        processor: The model's, which reads them; None: any of images.
        room: For the bytes of local files; None: they are read again where they are needed.

    Raises:
        RecordError: There is no image, it cannot be read, or the settings do not accept it.
    """
    noun = NOUNS["image" if processor is None else processor.medium]
    origin, data = find_image(value, folder, settings, noun)
    content = read_bytes(origin, noun=noun) if data is None else data
    size_of = probed_size if processor is None else processor.size
    try:
        size = size_of(content, settings)
        is_shrunk = settings.shrink_pixels is not None and size != size_of(
            content, replace(settings, shrink_pixels=None, probe="header")
        )
    except RecordError as error:
        raise RecordError(f"{shown_url(origin)}: {error}" if origin else str(error)) from error
    within = within_of(value)
    is_kept = data is not None or is_url(origin) or (room is not None and room.take(len(content)))
    shown = shown_url(origin)
    made = LoadedImage(
        size=size,
        digest=digest_of(content),
        origin=shown,
        is_shrunk=is_shrunk,
        within=within,
        is_embedded=data is not None and within is None,
        data=content if is_kept else None,
        address=origin if origin != shown else "",
    )
    if settings.image_storage == "reference":
        made.check_reference()
    return made


def load_frames(
    value: object,
    folder: str,
    settings: ImageSettings,
    processor: Processor | None = None,
    room: Room | None = None,
) -> list[LoadedImage]:
    """Look at some frames of a video of a record, as images.

    Args:
        value: As for `load_image`, of a video; or its frames, in order.
        folder: Where relative paths begin.
        settings: Which images are accepted, and how many frames.
        processor: The model's.
        room: As for `load_image`.

    Raises:
        RecordError: There is no video, it cannot be read, or the settings do not accept a frame.
    """
    while isinstance(value, Mapping) and "bytes" not in value:
        given = [value[name] for name in IMAGE_FIELDS if value.get(name)]
        if len(given) != 1:
            fields = ", ".join(map(str, value))
            raise RecordError(f"a video needs one of {', '.join(IMAGE_FIELDS)}; found {fields}")
        [value] = given
    if isinstance(value, list | tuple):
        chosen = [value[number] for number in spread(len(value), settings.video_frames)]
        return [load_image(frame, folder, settings, processor, room) for frame in chosen]
    origin, data = find_image(value, folder, settings, "video")
    content = read_bytes(origin, noun="video") if data is None else data
    try:
        frames = read_frames(content, settings.video_frames, settings)
    except RecordError as error:
        raise RecordError(f"{shown_url(origin)}: {error}" if origin else str(error)) from error
    made = [load_image(frame, folder, settings, processor, room) for frame in frames]
    name = shown_url(origin) or "video"
    return [replace(image, origin=f"{name} frame {number}") for number, image in enumerate(made)]


def read_bytes(path: str, begin: int = 0, size: int | None = None, *, noun: str = "image") -> bytes:
    """The bytes of a local file or full URL, or some of them.

    Raises:
        RecordError: It cannot be read, or is larger than any image.
    """
    most = _MOST_BYTES + 1 if size is None else size
    try:
        if is_url(path):
            import fsspec

            plain, options = fsspec_arguments(path)
            with fsspec.open(plain, "rb", **options) as file:
                file.seek(begin) if begin else None
                data: bytes = file.read(most)
        else:
            _check_file(path, size, noun)
            with open(path, "rb") as file:
                file.seek(begin)
                data = file.read(most)
    except RecordError:
        raise
    except Exception as error:  # each store has an error tree of its own
        reason = without_secrets(reason_of(error), path)
        raise RecordError(
            f"{shown_url(path)}: the {noun} cannot be read: {reason}"
        ) from plain_cause(error, path)
    if len(data) > _MOST_BYTES or (size is not None and len(data) < size):
        raise RecordError(
            f"{shown_url(path)}: {len(data):,} bytes could be read, expected "
            f"{size or 'at most 1 GiB'}"
        )
    return data


def _check_file(path: str, size: int | None, noun: str) -> None:
    """Refuse what would never end or is too large, before it is opened."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise RecordError(
            f"{path}: the {noun} cannot be read: it is no file, but a device or a pipe"
        )
    if size is None and found.st_size > _MOST_BYTES:
        raise RecordError(f"{path}: the {noun} has {found.st_size:,} bytes, expected at most 1 GiB")


def read_reference(stored: bytes) -> bytes:
    """The image that `LoadedImage.reference` leads to.

    Raises:
        RecordError: It cannot be read.
        CorruptionError: This is no reference.
    """
    try:
        found = json.loads(stored)
        path, begin, size = found["path"], found.get("begin", 0), found.get("size")
        is_reference = (
            isinstance(path, str) and _is_place(begin) and (size is None or _is_place(size))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_reference = False
    if not is_reference:
        raise CorruptionError(
            f"not a reference to an image: {stored[:60]!r}; restore the file, or prepare again"
        )
    return read_bytes(path, begin, size)


def _is_place(value: object) -> bool:
    return isinstance(value, int) and value >= 0


@final
@dataclass(frozen=True, slots=True)
class ImageLoader:
    """Looks at the images of a record, or at its sounds."""

    folder: str = field(repr=False)
    """Where relative paths begin; a full URL."""
    settings: ImageSettings
    processor: Processor
    room: Room | None = None

    def __call__(self, value: object) -> LoadedImage:
        """See `load_image`."""
        return load_image(value, self.folder, self.settings, self.processor, self.room)

    @property
    def frames(self) -> Callable[[object], list[LoadedImage]] | None:
        """What looks at videos; None: they are refused."""
        return (
            self._frames
            if self.settings.video_frames and self.processor.medium == "image"
            else None
        )

    def _frames(self, value: object) -> list[LoadedImage]:
        return load_frames(value, self.folder, self.settings, self.processor, self.room)
