"""Reads plain text: a file a document, or several in a file with a separator between them.

A UTF-8 BOM at the start of a file is dropped; line ends stay as they are. With a separator, what stands before the
first, between two, and after the last is a document each; nothing after the last one is no document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError
from penstock.sources.files import SourceFile, open_stream
from penstock.sources.lines import BLOCK_BYTES, BOM
from penstock.sources.objects import ObjectBlock
from penstock.sources.records import Fields, RecordBlock, Reject, excerpt


@final
@dataclass(frozen=True, slots=True)
class TextPart:
    """Some text files, small ones together."""

    sources: tuple[SourceFile, ...]
    fields: Fields
    separator: bytes | None

    @property
    def name(self) -> str:
        """For people."""
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return self.sources[0].path + more

    @property
    def identity(self) -> str:
        """Changes when the input does."""
        return f"{self.separator!r} " + "\n".join(file.identity for file in self.sources)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that `RecordBlock.files` points into."""
        return tuple(file.path for file in self.sources)

    @property
    def size_bytes(self) -> int:
        """Raw bytes, for progress."""
        return sum(file.size_bytes for file in self.sources)

    def objects(self) -> Iterator[ObjectBlock]:
        """Plain text holds none.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.sources[0].path}: plain text holds no conversations; due: JSON, Parquet or Arrow")

    def blocks(self) -> Iterator[RecordBlock]:
        """The documents, in order of files and lines."""
        batch = _Batch()
        for number, file in enumerate(self.sources):
            for raw, line, failure in self._documents(file):
                batch.add(raw, line, number, file.path, failure)
                if batch.text_bytes >= BLOCK_BYTES:
                    yield batch.block()
                    batch = _Batch()
            batch.size_bytes += file.size_bytes
        yield batch.block()

    def _documents(self, file: SourceFile) -> Iterator[tuple[bytes, int, str | None]]:
        """Raw documents of a file, the line each begins on, and why the rest is lost, if it is."""
        pieces = _pieces(file, self.separator)
        line = 1
        while True:
            try:
                raw = next(pieces, None)
            except (OSError, EOFError) as error:
                yield b"", line, f"the file cannot be read further: {error}; it was cut, or is damaged"
                return
            if raw is None:
                return
            yield raw, line, None
            line += raw.count(b"\n") + (self.separator or b"").count(b"\n")


def _pieces(file: SourceFile, separator: bytes | None) -> Iterator[bytes]:
    """The raw documents; reads about a block at a time when there is a separator."""
    with open_stream(file) as stream:
        first = stream.read(BLOCK_BYTES if separator else None)
        rest = first.removeprefix(BOM)
        if separator is None:
            yield rest
            return
        while True:
            *whole, rest = rest.split(separator)
            yield from whole
            more = stream.read(max(BLOCK_BYTES, len(rest)))
            if not more:
                break
            rest += more
        if rest:
            yield rest


class _Batch:
    """Documents that will be one block."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.lines: list[int] = []
        self.files: list[int] = []
        self.rejects: list[Reject] = []
        self.text_bytes = self.size_bytes = 0

    def add(self, raw: bytes, line: int, number: int, path: str, failure: str | None) -> None:
        try:
            text = raw.decode()
            reason = failure or (None if text else "the document is empty; due: at least one character")
        except UnicodeDecodeError as error:
            text = ""
            at_line = line + raw.count(b"\n", 0, error.start)
            reason = f"byte 0x{raw[error.start]:02x} on line {at_line} is not UTF-8 ({error.reason})"
        if reason:
            self.rejects.append(Reject(path, line, reason, excerpt(raw)))
            return
        self.texts.append(text)
        self.lines.append(line)
        self.files.append(number)
        self.text_bytes += len(raw)

    def block(self) -> RecordBlock:
        return RecordBlock(
            pa.array(self.texts, pa.large_string()),
            np.array(self.lines, np.int64),
            np.array(self.files, np.int32),
            None,
            {},
            self.size_bytes,
            self.rejects,
        )
