"""Where an image of a record is: a path, a URL, base64, bytes or a picture, at any field."""

import base64
import binascii
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import RecordError, record_errors
from penstock.core.folders import is_url
from penstock.core.json_values import JsonMapping
from penstock.core.urls import Address, quoted, split_query
from penstock.media.images import ImageSettings, check_picture

if TYPE_CHECKING:
    pass

IMAGE_FIELDS = (
    "image",
    "path",
    "url",
    "base64",
    "data",
    "bytes",
    "image_url",
    "audio",
    "audio_url",
    "input_audio",
    "source",
    "file",
    "file_name",
    "video",
    "video_url",
    "frames",
)
"""Fields of a part or of a struct that hold an image, or lead to one."""

_DEEPEST = 8
"""Fields within fields that lead to an image."""

_DEFAULTS = ImageSettings()


def within_of(value: object) -> JsonMapping | None:
    """Where an image lies in a larger file, if that is known."""
    while isinstance(value, Mapping):
        if isinstance(found := value.get("within"), Mapping):
            return found
        value = next(
            (value[name] for name in IMAGE_FIELDS if isinstance(value.get(name), Mapping)), None
        )
    return None


def find_image(
    value: object, folder: str, settings: ImageSettings = _DEFAULTS, noun: str = "image"
) -> tuple[str, bytes | None]:
    """Where an image is, and its bytes if the value has them.

    Args:
        value: As for `load_image`.
        folder: Where relative paths begin.
        settings: Which pictures of Pillow are accepted.
        noun: What messages call it.

    Returns:
        Path or full URL, or the name that comes with bytes, or ""; and the bytes, or None.

    Raises:
        RecordError: The value leads to no image, or to several.
    """
    for _ in range(_DEEPEST):
        if not isinstance(value, Mapping):
            return _found(value, folder, settings, noun)
        given = {
            name: value[name]
            for name in IMAGE_FIELDS
            if value.get(name) is not None and value.get(name) != ""
        }
        content = given.get("bytes")
        if content is not None and set(given) <= {"bytes", "path"}:
            return str(given.get("path", "")), _as_bytes(content, noun)
        if len(given) != 1:
            fields = ", ".join(map(str, value)) or "no fields"
            found = f"several: {', '.join(given)}" if given else f"none: it has {fields}"
            raise RecordError(f"{_a(noun)} needs one of {', '.join(IMAGE_FIELDS)}; found {found}")
        ((name, value),) = given.items()
        if name in ("base64", "data") and isinstance(value, str) and not value.startswith("data:"):
            return "", _from_base64(value, noun)
    raise RecordError(f"{_a(noun)} lies more than {_DEEPEST} fields deep")


def _found(
    value: object, folder: str, settings: ImageSettings, noun: str
) -> tuple[str, bytes | None]:
    """As `find_image`, for what is no mapping."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "", bytes(value)
    if isinstance(value, Address):
        return value.full, None
    if isinstance(value, os.PathLike):
        return _located(os.fspath(value), folder, noun), None
    if isinstance(value, str):
        if value.startswith("data:"):
            return "", _from_data_url(value, noun)
        return _located(value, folder, noun), None
    if hasattr(value, "save") and hasattr(value, "getexif"):
        return "", _as_png(value, settings)
    raise RecordError(
        f"{_a(noun)} is {quoted(repr(value)):.60}; expected a path, a URL, base64 or bytes"
    )


def _a(noun: str) -> str:
    return f"an {noun}" if noun == "image" else f"a {noun}"


def _located(path: str | bytes, folder: str, noun: str) -> str:
    """A path or URL; a relative path begins at the folder."""
    path = os.fsdecode(path).removeprefix("file://")
    if not path or "\0" in path:
        raise RecordError(f"{_a(noun)} has the path {path!r}")
    if is_url(path) or os.path.isabs(path) or not folder:
        return path
    if not is_url(folder):
        return os.path.join(folder, path)
    base, query = split_query(folder)
    return f"{base.rstrip('/')}/{path}{query}"


def _as_bytes(content: Any, noun: str) -> bytes:
    """Bytes as records hold them: themselves, base64, or in JSON a list of numbers."""
    if isinstance(content, str):
        return _from_base64(content, noun)
    try:
        # Not `bytes(content)`, to which a number is a length.
        return (
            bytes(content) if isinstance(content, list | tuple) else memoryview(content).tobytes()
        )
    except (TypeError, ValueError):
        shown = f"{content!r:.60}"
    raise RecordError(
        f"{_a(noun)} has the bytes {shown}; expected bytes, base64, or a list of numbers from "
        "0 to 255"
    )


def _from_data_url(text: str, noun: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RecordError(
            f"{_a(noun)}'s data URL begins {text[:40]!r}; expected data:{noun}/…;base64,…"
        )
    return _from_base64(body, noun)


def _from_base64(text: str, noun: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"{_a(noun)} is not valid base64 ({text[:40]!r}…): {error}") from None


def _as_png(picture: Any, settings: ImageSettings) -> bytes:
    """The bytes of a picture of Pillow as a PNG, which loses nothing."""
    check_picture(picture, settings)
    with record_errors("the image is damaged"):
        # Before its metadata is read: Pillow turns some pictures as it loads them.
        picture.load()
        out = io.BytesIO()
        kept = (
            picture
            if picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
            else picture.convert("RGB")
        )
        kept.save(out, "PNG", exif=picture.getexif().tobytes() if len(picture.getexif()) else b"")
        return out.getvalue()


def folder_of(file: str, settings: ImageSettings) -> str:
    """Where relative paths of the images of a record begin: `file` is the path or full URL that the
    record is in.
    """
    if settings.image_folder is not None:
        return settings.image_folder
    if is_url(file):
        return split_query(file)[0].rpartition("/")[0]
    return str(Path(file).parent) if file else ""
