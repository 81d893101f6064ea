"""Tar shards of WebDataset: files that follow each other with the same name up to its first dot are
one record.

The fields of a `.json` file become the record's own; a `.txt` or `.caption` file is what is said of
the images. Images become `{"bytes", "path", …}`: where a text in the JSON names the file of an
image, that text is replaced, so interleaved documents keep their order; other images become the
field `images`. A record of images and a caption becomes a prompt that holds the images, and the
caption as its completion.

Source of the layout: https://github.com/webdataset/webdataset, "The WebDataset Format".
"""

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.core.json_values import JsonObject
from penstock.data.sources.files import (
    WholeFilePart,
    open_random,
    other_content,
)
from penstock.data.sources.objects import Found, ObjectBlock, gather
from penstock.data.sources.records import Damage, OnDamage, RecordBlock, stop_at_damage
from penstock.data.stores.remote_files import Unreadable

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2", "avif")
CAPTIONS = ("txt", "caption", "text")
_BLOCK_BYTES = 32 << 20
"""Raw bytes of a block, for the memory."""
_BLOCK_RECORDS = 256


@final
@dataclass(frozen=True, slots=True)
class TarPart(WholeFilePart):
    """One tar file."""

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """It has no texts; `open_sources` refuses it."""
        raise NotImplementedError(self.file.path)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield the records in order; the place of a record is its number, from 0."""
        found: list[Found] = []
        number = begin = waiting = 0
        for members, end in self._samples(damaged):
            value, reason = record_of(members)
            found.append((number, value, reason, members[0].name))
            number, waiting = number + 1, waiting + sum(len(one.data) for one in members)
            if waiting >= _BLOCK_BYTES or len(found) >= _BLOCK_RECORDS:
                yield gather(found, self.file.path, end - begin)
                found, begin, waiting = [], end, 0
        yield gather(found, self.file.path, max(self.size_bytes - begin, 0))

    def _samples(self, damaged: OnDamage) -> Iterator[tuple[list["Member"], int]]:
        """The files of each record, and the place in the tar after them."""
        sample: list[Member] = []
        key, number, end = "", 0, 0
        try:
            with open_random(self.file) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                for info in tar:
                    if not info.isfile():
                        continue
                    folder, _, file = info.name.rpartition("/")
                    stem, _, kind = file.partition(".")
                    if f"{folder}/{stem}" != key and sample:
                        yield sample, info.offset
                        sample, number = [], number + 1
                    content = tar.extractfile(info)
                    assert content is not None
                    key, end = f"{folder}/{stem}", info.offset_data + info.size
                    data = content.read()
                    if len(data) != info.size:
                        raise tarfile.ReadError("unexpected end of data")
                    sample.append(
                        Member(file, kind.lower(), data, self._image(file, data, info.offset_data))
                    )
        except (tarfile.TarError, OSError, Unreadable) as error:
            reason = f"not a sound tar: {error}{other_content(self.file)}"
            damaged(Damage(self.file.path, number, reason, self.size_bytes, self.size_bytes - end))
            return
        if sample:
            yield sample, self.size_bytes

    def _image(self, name: str, data: bytes, begin: int) -> JsonObject | None:
        """What stands for a file in a record, if it is an image."""
        if name.rpartition(".")[2].lower() not in IMAGES:
            return None
        where = {"file": self.file.address or self.file.path, "begin": begin, "size": len(data)}
        return {"bytes": data, "path": f"{self.file.path}/{name}", "within": where}


@final
@dataclass(frozen=True, slots=True)
class Member:
    """One file of a record."""

    name: str
    kind: str
    """Its name after the first dot, in lower case: "jpg", "0.jpg", "json"."""
    data: bytes
    image: JsonObject | None = None
    """What stands for it in the record, if it is an image."""


def record_of(members: Sequence[Member]) -> tuple[Any, str | None]:
    """The record of some files, or None and what is wrong with it."""
    value: JsonObject = {}
    caption: str | None = None
    images: dict[str, JsonObject] = {}
    for one in members:
        kind = one.kind.rpartition(".")[2]
        if one.image is not None:
            images[one.name] = one.image
        elif kind == "json":
            try:
                found = json.loads(one.data)
            except ValueError as error:
                return None, f"{one.name}: not JSON: {error}"
            if not isinstance(found, dict):
                found = {"messages": found}
            value |= found
        elif kind in CAPTIONS:
            try:
                caption = one.data.decode().strip()
            except UnicodeDecodeError as error:
                return None, f"{one.name}: not UTF-8: {error}"
    names = {name: name for name in images} | {
        one.kind: one.name for one in members if one.name in images
    }
    used: set[str] = set()
    value = _with_images(value, images, names, used)
    left = [image for name, image in images.items() if name not in used]
    if left and "images" not in value:
        value["images"] = left
    if caption is not None and not any(
        name in value for name in ("messages", "conversations", "prompt")
    ):
        value |= {"prompt": "<image>" * len(left), "completion": caption}
    return value, None


def _with_images(
    value: object, images: dict[str, JsonObject], names: dict[str, str], used: set[str]
) -> Any:
    """A value of JSON in which names of files are replaced by their images."""
    if isinstance(value, str):
        name = names.get(value)
        if name is None:
            return value
        used.add(name)
        return images[name]
    if isinstance(value, dict):
        return {
            key: one if key == "text" else _with_images(one, images, names, used)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_with_images(one, images, names, used) for one in value]
    return value
