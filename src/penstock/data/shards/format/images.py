"""Images of documents: which tokens stand for each, and its bytes in a file next to the shard.

A shard `part.arrow` with images has `part.assets`: the original bytes of its images end to end,
each image once, followed by its name. A document lists its images as records (`IMAGE`), with a
checksum of each; the bytes of an image are checked by its digest whenever they are read.
"""

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.errors import ConfigError, CorruptionError
from penstock.core.json_values import JsonObject
from penstock.core.ragged import Ragged
from penstock.data.shards.format.manifest import TOKENIZER_FILES
from penstock.data.stores.files import (
    checksum,
    output_errors,
    read_json,
    sync,
    unreadable,
    write_json,
)
from penstock.media.expansion import ImagePlace
from penstock.media.images import ImageSettings
from penstock.media.loading import DIGEST_BYTES, LoadedImage, digest_of, read_reference
from penstock.media.processor import Processor

IMAGE = np.dtype(
    [
        ("begin", "<u4"),
        ("end", "<u4"),
        ("slots", "<u4"),
        ("patches", "<u4"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("size", "<u4"),
        ("name_size", "<u2"),
        ("is_reference", "<u2"),
        ("offset", "<u8"),
        ("digest", "u1", DIGEST_BYTES),
        ("checksum", "<u8"),
    ]
)
"""An image of a document, as it is stored."""
WORDS = IMAGE.itemsize // 4
ASSETS = ".assets"
MEDIA, PROCESSOR_FOLDER = "media.json", "processor"
PROCESSOR_FILES = (
    "patch_processor.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    *TOKENIZER_FILES,
)
"""Files of a processor of images, which has a tokenizer of its own; as `TOKENIZER_FILES`."""
_LONGEST_NAME = 1000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOf:
    """An image of a document."""

    begin: int
    end: int
    """Tokens that stand for it, markers of its rows and ends among them, [begin, end)."""
    slots: int
    """Tokens among them that become its features."""
    patches: int
    """Patches that the vision tower reads."""
    height: int
    width: int
    """Upright, in pixels."""
    digest: bytes
    """Of its original bytes; see `penstock.media.loading.digest_of`."""
    read: Callable[[], bytes]
    """Its original bytes; raises CorruptionError or RecordError where they are not what they
    were.
    """
    origin: str | Callable[[], str] = ""
    """Path or URL that it came from, as far as that is known, or what finds it; see `name`."""
    reference: bytes | None = None
    """What is stored instead of the bytes; None: the bytes."""
    fetch: Callable[[], object] | None = None
    """Brings its bytes from a store, for `read`; None: they are on this machine."""

    @property
    def name(self) -> str:
        """Path or URL that it came from; empty: unknown."""
        return self.origin if isinstance(self.origin, str) else self.origin()

    @property
    def key(self) -> tuple[int, int, int, int, bytes]:
        """What two equal images of documents have in common."""
        return self.begin, self.end, self.slots, self.patches, self.digest


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInfo:
    """How the images of a dataset became tokens."""

    processor: str
    """Class of the processor of transformers; its files are in the folder `processor`."""
    fingerprint: str
    """`penstock.media.processor.fingerprint_of` it."""
    slot_id: int
    """The token that becomes features of an image."""
    settings: JsonObject
    """Which images were accepted, and how they become RGB (`penstock.media.ImageSettings`)."""

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write it to a dataset's folder; returns the name of the file, for `finish_dataset` to
        seal.
        """
        write_json(
            folder / MEDIA,
            {
                "processor": self.processor,
                "fingerprint": self.fingerprint,
                "slot_id": self.slot_id,
                "settings": self.settings,
            },
        )
        return (MEDIA,)

    @classmethod
    def load(cls, folder: Path) -> "MediaInfo":
        """That of a dataset with images.

        Raises:
            CorruptionError: It is missing or damaged.
        """
        found = read_json(folder / MEDIA)
        try:
            return cls(**found)
        except TypeError as error:
            raise CorruptionError(
                f"{folder / MEDIA}: damaged: {error}; copy it again, or prepare again"
            ) from None


def save_processor(folder: Path, processor: Processor, settings: ImageSettings) -> tuple[str, ...]:
    """Write how the images of a dataset became tokens to its folder; see `MediaInfo.save`."""
    processor.save(folder / PROCESSOR_FOLDER)
    return MediaInfo(
        processor=processor.kind,
        fingerprint=processor.fingerprint,
        slot_id=processor.slot_id,
        settings=settings.describe(),
    ).save(folder)


def stored_image(image: LoadedImage, place: ImagePlace, storage: str) -> ImageOf:
    """An image of a conversation, as it is stored with its document.

    Args:
        image: It itself.
        place: Its tokens in the document.
        storage: copy or reference, as in `ImageSettings.image_storage`.
    """
    by_reference = storage == "reference" and not image.is_embedded
    return ImageOf(
        begin=place.begin,
        end=place.end,
        slots=place.layout.slots,
        patches=place.layout.patches,
        height=image.size[0],
        width=image.size[1],
        digest=image.digest,
        read=image.read,
        origin=image.origin,
        reference=image.reference() if by_reference else None,
    )


def assets_path(shard: Path) -> Path:
    """The file with the images of a shard."""
    return shard.with_suffix(ASSETS)


@final
class AssetWriter:
    """Writes the images of one shard; `finish` gives the file its name, `abandon` removes it.

    Args:
        shard: The shard's file.
    """

    def __init__(self, shard: Path) -> None:
        self.path = assets_path(shard)
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._known: dict[tuple[bytes, bool], tuple[int, int, int]] = {}
        self.size = 0
        with output_errors(self.path):
            self._file = open(self._partial, "wb")  # noqa: SIM115  (closed by finish and abandon)

    def add(self, images: Sequence[Sequence[ImageOf]], lengths: Sequence[int]) -> Ragged:
        """Store the images of documents.

        Args:
            images: Of each document, in order.
            lengths: Tokens of each document.

        Returns:
            uint32, `WORDS` for each image: `IMAGE` records.

        Raises:
            ConfigError: An image's tokens are not in its document, or overlap.
            RecordError: An image's file has changed.
        """
        rows = []
        for number, (of_document, length) in enumerate(zip(images, lengths, strict=True)):
            records = np.zeros(len(of_document), IMAGE)
            at = 0
            for record, image in zip(records, of_document, strict=True):
                if (
                    not at <= image.begin < image.end <= length
                    or not 0 < image.slots <= image.end - image.begin
                ):
                    raise ConfigError(
                        f"document {number}: an image with tokens {image.begin} to "
                        f"{image.end} of {length}, {image.slots} of them slots"
                    )
                at = image.end
                record["offset"], record["size"], record["name_size"] = self._store(image)
                for name in ("begin", "end", "slots", "patches", "height", "width"):
                    record[name] = getattr(image, name)
                record["digest"] = np.frombuffer(image.digest, np.uint8)
                record["is_reference"] = image.reference is not None
                record["checksum"] = _record_checksum(record)
            rows.append(records.view(np.uint32))
        return Ragged.from_rows(rows, np.uint32)

    def _store(self, image: ImageOf) -> tuple[int, int, int]:
        key = image.digest, image.reference is not None
        if key not in self._known:
            content = image.read() if image.reference is None else image.reference
            name = image.name.encode("utf-8", "backslashreplace")[-_LONGEST_NAME:]
            with output_errors(self.path):
                self._file.write(content)
                self._file.write(name)
            self._known[key] = self.size, len(content), len(name)
            self.size += len(content) + len(name)
        return self._known[key]

    def finish(self) -> int:
        """Force the file to the disk; without images there is none. Returns its bytes."""
        with output_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if self.size:
                os.replace(self._partial, self.path)
                sync(self.path.parent)
            else:
                self._partial.unlink()
                self.path.unlink(missing_ok=True)
        return self.size

    def abandon(self) -> None:
        """Remove what was written; nothing after `finish`."""
        if not self._file.closed:
            self._file.close()
            self._partial.unlink(missing_ok=True)


def _record_checksum(record: Any) -> int:
    return checksum(np.frombuffer(record.tobytes()[:-8], np.uint8))


def records_of(words: Any, length: int) -> Any:
    """The `IMAGE` records of a document of `length` tokens, checked.

    Raises:
        CorruptionError: They are not what was written.
    """
    if len(words) % WORDS:
        raise CorruptionError("the list of its images is cut")
    records = np.ascontiguousarray(words).view(np.uint8).view(IMAGE)
    for record in records:
        if int(record["checksum"]) != _record_checksum(record):
            raise CorruptionError("the list of its images differs from its checksums")
        if not record["begin"] < record["end"] <= length:
            raise CorruptionError("the tokens of an image leave it")
    return records


def image_of(
    record: Any, shard: Path, near: tuple[str, Callable[[int, int], bytes]] | None = None
) -> ImageOf:
    """An image of a document from its record.

    Args:
        record: Of `records_of`.
        shard: The shard's file.
        near: URL of the file next to the shard, and (first byte, number) → bytes of it; None: it is
            here.
    """
    is_reference = bool(record["is_reference"])
    begin, size, name_size = (int(record[name]) for name in ("offset", "size", "name_size"))
    digest, path = record["digest"].tobytes(), assets_path(shard)

    @functools.cache
    def fetched() -> bytes:
        assert near is not None
        return near[1](begin, size + name_size)

    def at(first: int, count: int) -> bytes:
        if near is None:
            return _stored(path, begin + first, count)
        return fetched()[first : first + count]

    def name() -> str:
        return at(size, name_size).decode("utf-8", "replace")

    def read() -> bytes:
        stored = at(0, size)
        if is_reference:
            content, where = read_reference(stored), json.loads(stored)["path"]
        else:
            content, where = stored, str(path) if near is None else near[0]
        if digest_of(content) != digest:
            what = "is not the one that was prepared" if is_reference else "differs from its digest"
            raise CorruptionError(
                f"{where}: the image {digest.hex()} {what}; restore the file, or prepare again"
            )
        return content

    return ImageOf(
        **{
            name: int(record[name])
            for name in ("begin", "end", "slots", "patches", "height", "width")
        },
        digest=digest,
        read=read,
        origin=name() if near is None else name,
        reference=at(0, size) if is_reference else None,
        fetch=None if near is None else fetched,
    )


def _stored(path: Path, begin: int, size: int) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.pread(handle, size, begin)
        finally:
            os.close(handle)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(found) != size:
        raise CorruptionError(
            f"{path}: ends before byte {begin + size}; copy it again, or prepare again"
        )
    return found


def portable(records: object) -> bytes:
    """What of image records does not depend on the division into shards, for the fingerprint of a
    dataset.
    """
    kept = np.array(records)
    for name in ("offset", "checksum", "name_size"):
        kept[name] = 0
    return kept.tobytes()
