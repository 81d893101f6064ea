"""Folders of images with captions: files with the same name up to its first dot are one record, as
in tar shards.

Next to an image there is a `.txt` or `.caption` file with its caption, or a `.json` file whose
fields become the record's own. Or the folder has a `metadata.jsonl`, where each line names its
image (`file_name`) and has its caption (`text` or `caption`) or other fields of the record; then
only the images that it names are records.

Source of `metadata.jsonl`: the `imagefolder` layout of Hugging Face Datasets.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.data.sources.files import Extent, SourceFile, WholeFilePart, open_random, whole_file
from penstock.data.sources.objects import ObjectBlock, parse_lines
from penstock.data.sources.records import (
    Damage,
    OnDamage,
    RecordBlock,
    Reject,
    excerpt,
    stop_at_damage,
)
from penstock.data.sources.tar_files import CAPTIONS, IMAGES, Member, record_of
from penstock.data.stores.remote_files import Unreadable

METADATA = "metadata.jsonl"
_RECORDS = 1024
"""Of a part, at most."""
_BLOCK = 256


@final
@dataclass(frozen=True, slots=True)
class ImageFolderPart:
    """Some records of a folder: the files of each."""

    records: tuple[tuple[SourceFile, ...], ...]

    @property
    def name(self) -> str:
        """Name for messages."""
        return os.path.dirname(self.records[0][0].path)

    @property
    def identity(self) -> str:
        """Identity of the input (path and range), independent of its bytes."""
        return "\n".join(file.key for file in self.sources)

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """The files that it reads."""
        return tuple(file for record in self.records for file in record)

    @property
    def files(self) -> tuple[str, ...]:
        """The names that `files` of its blocks points into."""
        return tuple(record[0].path for record in self.records)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What opens each of `files`; secret."""
        return tuple(record[0].full for record in self.records)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return sum(file.size_bytes for file in self.sources)

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of local files that determine the result."""
        return tuple(extent for file in self.sources for extent in whole_file(file))

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """It has no texts; `open_sources` refuses it."""
        raise NotImplementedError(self.name)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield the records in order; each is named by its first file."""
        for begin in range(0, len(self.records), _BLOCK):
            taken = self.records[begin : begin + _BLOCK]
            values, places, bad = [], [], []
            for number, record in enumerate(taken, begin):
                value, reason = _record(record, damaged)
                if reason is None:
                    values.append(value)
                    places.append(number)
                else:
                    bad.append(Reject(record[0].path, 0, reason, excerpt(record[0].path)))
            size = sum(file.size_bytes for record in taken for file in record)
            yield ObjectBlock(
                values, np.zeros(len(places), np.int64), np.array(places, np.int32), size, bad
            )


@final
@dataclass(frozen=True, slots=True)
class MetadataPart(WholeFilePart):
    """The `metadata.jsonl` of a folder; images are read where records need them."""

    @property
    def identity(self) -> str:
        """Identity of the input (path and range), independent of its bytes."""
        return f"{self.file.key} with images"

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """It has no texts; `open_sources` refuses it."""
        raise NotImplementedError(self.name)

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Yield the records of its lines."""
        data = _read(self.file, damaged)
        block = parse_lines(data, self.file.path, 1, self.size_bytes)
        for value in block.objects:
            name, caption = value.pop("file_name", None), None
            for field in ("text", "caption"):
                caption = value.get(field) if caption is None else caption
            if name is not None and "images" not in value:
                value["images"] = [name] if isinstance(name, str) else name
            if isinstance(caption, str) and not any(
                one in value for one in ("messages", "conversations", "prompt")
            ):
                value |= {
                    "prompt": "<image>" * len(value.get("images", ())),
                    "completion": caption.strip(),
                }
        yield block


def cut_image_folders(files: Iterable[SourceFile]) -> Iterator[ImageFolderPart | MetadataPart]:
    """Parts of the files of folders, in order; files that are neither images nor about them are
    left out.
    """
    folders: dict[str, list[SourceFile]] = {}
    for file in files:
        folders.setdefault(os.path.dirname(file.path), []).append(file)
    for found in folders.values():
        listed = next((file for file in found if os.path.basename(file.path) == METADATA), None)
        if listed is not None:
            yield MetadataPart(listed)
            continue
        records: dict[str, list[SourceFile]] = {}
        for file in found:
            if _kind(file) in (*IMAGES, *CAPTIONS, "json"):
                records.setdefault(os.path.basename(file.path).partition(".")[0], []).append(file)
        groups = [tuple(record) for record in records.values()]
        for begin in range(0, len(groups), _RECORDS):
            yield ImageFolderPart(tuple(groups[begin : begin + _RECORDS]))


def _kind(file: SourceFile) -> str:
    return "".join(file.suffixes).rpartition(".")[2]


def _record(files: tuple[SourceFile, ...], damaged: OnDamage) -> tuple[Any, str | None]:
    members = []
    for file in files:
        name = os.path.basename(file.path)
        is_image = _kind(file) in IMAGES
        data = b"" if is_image else _read(file, damaged)
        image = {"path": file.address or file.path} if is_image else None
        members.append(Member(name, name.partition(".")[2].lower(), data, image))
    value, reason = record_of(members)
    if reason is None and not set(value) - {"images"}:
        return (
            None,
            (
                "the image has no caption; put it into a .txt file with the same name, or into "
                "metadata.jsonl"
            ),
        )
    return value, reason


def _read(file: SourceFile, damaged: OnDamage) -> bytes:
    try:
        with open_random(file) as stream:
            content: bytes = stream.read()
            return content
    except (OSError, Unreadable) as error:
        damaged(Damage(file.path, 0, f"cannot be read: {error}", file.size_bytes, file.size_bytes))
        return b""
