"""Reads plain text: each file is one document, or holds several with a separator between them.

A UTF-8 BOM at the start of a file is dropped; line ends are kept. With a separator, the text before
the first, between two, and after the last separator is a document each; no text after the last
separator is not an empty document. If the separator consists of line ends, blank lines between
documents are skipped, as between lines of JSON.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.core.arrow import from_texts
from penstock.core.errors import ConfigError
from penstock.data.sources.files import (
    Extent,
    SourceFile,
    open_stream,
    refuse_wrong_data,
    whole_file,
)
from penstock.data.sources.lines import BLOCK_BYTES, BLOCK_LINES, BOM, read_blocks
from penstock.data.sources.objects import ObjectBlock
from penstock.data.sources.records import (
    Damage,
    Fields,
    OnDamage,
    RecordBlock,
    Reject,
    excerpt,
    stop_at_damage,
)
from penstock.data.sources.signatures import described
from penstock.data.stores.remote_files import Unreadable


@final
@dataclass(frozen=True, slots=True)
class TextPart:
    """One text file, or several small ones."""

    sources: tuple[SourceFile, ...]
    fields: Fields
    separator: bytes | None

    @property
    def name(self) -> str:
        """Name for messages."""
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return self.sources[0].path + more

    @property
    def identity(self) -> str:
        """Identity of the input (path and range), independent of its bytes."""
        return f"{self.separator!r} " + "\n".join(file.key for file in self.sources)

    @property
    def files(self) -> tuple[str, ...]:
        """The names that `files` of its blocks points into."""
        return tuple(file.path for file in self.sources)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What opens each of `files`; secret."""
        return tuple(file.full for file in self.sources)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return sum(file.size_bytes for file in self.sources)

    def extents(self) -> tuple[Extent, ...]:
        """The bytes of local files that determine the result."""
        return tuple(extent for file in self.sources for extent in whole_file(file))

    def objects(self, damaged: OnDamage = stop_at_damage) -> Iterator[ObjectBlock]:
        """Raise a `ConfigError`: plain text holds no objects."""
        raise ConfigError(
            f"{self.sources[0].path}: plain text holds no conversations; expected: JSON, "
            "Parquet or Arrow"
        )

    def blocks(self, damaged: OnDamage = stop_at_damage) -> Iterator[RecordBlock]:
        """Yield the documents in order of files and lines."""
        batch = _Batch()
        for number, file in enumerate(self.sources):
            line, unread = 1, 0
            try:
                if damaged is not stop_at_damage:
                    refuse_wrong_data(file)
                for raw in _pieces(file, self.separator) if self.separator else _whole(file):
                    if not self._is_blank(raw):
                        batch.add(raw, line, number, file.path)
                    line += raw.count(b"\n") + (self.separator or b"").count(b"\n")
                    if batch.is_full:
                        yield batch.block()
                        batch = _Batch()
            except Unreadable as error:
                unread = file.size_bytes - (error.position if self.separator else 0)
                damaged(Damage(file.path, line, str(error), file.size_bytes, unread))
            batch.size_bytes += file.size_bytes - unread
        yield batch.block()

    def _is_blank(self, raw: bytes) -> bool:
        return (
            self.separator is not None
            and not self.separator.strip(b"\r\n")
            and not raw.strip(b" \t\r\n")
        )


def _whole(file: SourceFile) -> Iterator[bytes]:
    with open_stream(file) as stream:
        yield stream.read().removeprefix(BOM)


def _pieces(file: SourceFile, separator: bytes) -> Iterator[bytes]:
    """The raw documents between separators; for a cut file, only those before the last
    separator.
    """
    rest, waiting = b"", bytearray()
    try:
        for data, _ in read_blocks(file):
            waiting += data
            # A long document is searched again only after it has doubled.
            if len(waiting) > len(rest):
                *whole, rest = (rest + waiting).split(separator)
                waiting.clear()
                yield from whole
    except Unreadable:
        yield from (rest + waiting).split(separator)[:-1]
        raise
    *whole, rest = (rest + waiting).split(separator)
    yield from whole
    if rest:
        yield rest


class _Batch:
    """Collects the documents of one block."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.lines: list[int] = []
        self.files: list[int] = []
        self.rejects: list[Reject] = []
        self.text_bytes = self.size_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.text_bytes >= BLOCK_BYTES or len(self.texts) + len(self.rejects) >= BLOCK_LINES

    def add(self, raw: bytes, line: int, number: int, path: str) -> None:
        try:
            text = raw.decode()
            reason = None if text else "the document is empty; expected: at least one character"
        except UnicodeDecodeError as error:
            text = ""
            at_line = line + raw.count(b"\n", 0, error.start)
            reason = described(raw) if line == 1 else None
            reason = (
                reason
                or f"byte 0x{raw[error.start]:02x} on line {at_line} is not UTF-8 ({error.reason})"
            )
        if reason:
            self.rejects.append(Reject(path, line, reason, excerpt(raw)))
            return
        self.texts.append(text)
        self.lines.append(line)
        self.files.append(number)
        self.text_bytes += len(raw)

    def block(self) -> RecordBlock:
        return RecordBlock(
            from_texts(self.texts),
            np.array(self.lines, np.int64),
            np.array(self.files, np.int32),
            None,
            {},
            self.size_bytes,
            self.rejects,
        )
