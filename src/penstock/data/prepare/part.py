"""Prepares one part of the input: a shard for each split, a file of rejected records, and a part
record, written last.

Rejected records are written as they come, so memory does not grow with their number.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self, final

import numpy as np

from penstock.core.errors import RecordError
from penstock.core.urls import Address
from penstock.data.prepare.hashes import HashFile
from penstock.data.prepare.part_record import (
    WORK,
    PartRecord,
    hashes_path,
    rejects_path,
    save_record,
    shard_name,
)
from penstock.data.prepare.recipe import Recipe
from penstock.data.prepare.settings import PrepareSettings
from penstock.data.prepare.stored_shards import made_apart, put_shard
from penstock.data.prepare.transform import Transform
from penstock.data.reports.chat_summary import ChatSummary
from penstock.data.reports.reasons import Reasons
from penstock.data.shards import ShardInfo, ShardLayout, ShardWriter
from penstock.data.sources import Part, Reject
from penstock.data.sources.files import copied_file, open_ranges
from penstock.data.stores.copies import Copies
from penstock.data.stores.files import checksum, output_errors
from penstock.data.stores.remote_files import Unreadable
from penstock.tokenizers import Tokenizer

Progressed = Callable[[int, int, int], None]
"""Called after each block with its raw bytes, tokens and rejects."""

DIGEST_BYTES = 4 << 20
"""Bytes that are hashed at once."""

COPIES = "remote"
"""Folder inside `WORK` for copies of remote files."""


@final
class RejectFile:
    """Writes the rejects of one part; use it as a context manager, and call `finish` inside.

    Without rejects there is no file; leaving without `finish` removes the file.

    Args:
        path: Target file, one JSON object per line.
        settings: Whether a reject stops the work, and how many are allowed.
    """

    def __init__(self, path: Path, settings: PrepareSettings) -> None:
        self.count = 0
        self._path, self._settings = path, settings
        self._partial = path.with_name(f"{path.name}.partial")
        self._file: IO[bytes] | None = None
        self.reasons = Reasons()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def stop_at(self, found: Sequence[Reject]) -> None:
        """Raise if the settings allow no rejects, or fewer.

        Raises:
            RecordError: With the first reject, or the last.
        """
        if not found:
            return
        if self._settings.on_error == "stop":
            raise RecordError(f"{found[0]} (set on_error to skip to leave such records out)")
        limit = self._settings.reject_count
        if limit is not None and self.count + len(found) > limit:
            every = Reasons.total([self.reasons.as_json()])
            for reject in found:
                every.add(reject)
            table = "\n".join(["by reason:", *every.lines()])
            raise RecordError(
                f"{found[-1]}; more than {self._settings.max_rejects} records were rejected; "
                f"set max_rejects higher; {table}"
            )

    def write(self, found: Iterable[Reject]) -> None:
        """Write some rejects."""
        for reject in found:
            with output_errors(self._path):
                self._file = self._file or open(self._partial, "wb")  # noqa: SIM115  (closed on exit)
                line = json.dumps(asdict(reject), ensure_ascii=False) + "\n"
                self._file.write(line.encode("utf-8", "backslashreplace"))
            self.count += 1
            self.reasons.add(reject)

    def finish(self) -> None:
        """Force the rejects to the disk and rename the file, replacing an older one."""
        with output_errors(self._path):
            if self._file is None:
                self._path.unlink(missing_ok=True)
                return
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            os.replace(self._partial, self._path)


def join_files(paths: Iterable[Path], target: Path) -> None:
    """Join files end to end into `target`, forced to the disk, then renamed; without any, `target`
    is removed.
    """
    partial = target.with_name(f"{target.name}.partial")
    with output_errors(target):
        listed = list(paths)
        if not listed:
            target.unlink(missing_ok=True)
            return
        with open(partial, "wb") as joined:
            for path in listed:
                with open(path, "rb") as one:
                    shutil.copyfileobj(one, joined)
            joined.flush()
            os.fsync(joined.fileno())
        os.replace(partial, target)


def copy_lines(source: Path, first: int, count: int, target: Path) -> bool:
    """Copy `count` lines of a file, from number `first` on, to another file.

    Returns:
        Whether all were copied; False if `source` cannot be opened or holds too few.
    """
    partial, found = target.with_name(f"{target.name}.partial"), 0
    try:
        lines = open(source, "rb")  # noqa: SIM115  (closed below)
    except OSError:
        return False
    with lines, output_errors(target):
        with open(partial, "wb") as copied:
            for line in islice(lines, first, first + count):
                copied.write(line)
                found += line.endswith(b"\n")
            copied.flush()
            os.fsync(copied.fileno())
        if found == count:
            os.replace(partial, target)
        else:
            partial.unlink()
    return found == count


def in_order(rejects: list[Reject], files: tuple[str, ...]) -> list[Reject]:
    """Sort rejects by the files of their part, then by line."""
    numbers = {name: number for number, name in enumerate(files)}
    return sorted(rejects, key=lambda reject: (numbers.get(reject.file, 0), reject.line))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What every process needs for every part."""

    output: Path
    tokenizer: Tokenizer
    settings: PrepareSettings
    transform: Transform | None
    layout: ShardLayout
    recipe: Recipe
    copies: Path | None = None
    """Folder of copies of remote files, which all processes share; None: there are none."""
    store: Address | None = None
    """URL where shards go; None: to the output."""
    scratch: Path | None = None
    """Folder of this machine for shards on their way to the store; None: that for temporary
    files.
    """

    def elsewhere(self, folder: Path) -> "Workshop":
        """The same work in another folder, which has no copies."""
        (folder / WORK).mkdir()
        for split in self.settings.splits:
            (folder / split).mkdir(exist_ok=True)
        return replace(self, output=folder, copies=None)

    def making(self) -> AbstractContextManager[Path]:
        """The folder where shards are made; `keep` takes them from there."""
        return (
            nullcontext(self.output)
            if self.store is None
            else made_apart(self.scratch, self.settings.splits)
        )

    def keep(self, made: Path, split: str, info: ShardInfo) -> str:
        """Take a finished shard from the folder where it was made; returns its name."""
        if self.store is not None:
            put_shard(self.store.full, split, made, self.output, info, self.layout)
        return info.file


@final
@dataclass(frozen=True, slots=True)
class Task:
    """A part, its number, and the numbers of its files among all files of the dataset."""

    number: int
    part: Part
    files: tuple[int, ...]


def prepare_part(shop: Workshop, task: Task, report: Progressed) -> PartRecord:
    """Read, encode and write one part.

    Args:
        shop: Tokenizer and settings.
        task: The part.
        report: Called after each block with raw bytes, tokens and rejects.

    Raises:
        RecordError: A record or the rest of a file cannot be read, and the settings say stop; or
            there are too many.
        OutputError: The disk is full, or the folder was removed.
    """
    # The digest comes first: input that changes during reading then differs from it, and is read
    # again next time.
    record = PartRecord(
        identity=task.part.identity,
        stamp=stamp_of(task.part),
        digest=digest_of(task.part),
        files=list(task.files),
        encoder=shop.tokenizer.encoder,
    )
    chats: ChatSummary | None = None
    writers: dict[str, ShardWriter] = {}
    numbers = np.array(task.files, np.int32)
    hashes = HashFile(shop.layout, shop.settings.splits) if shop.settings.drop_duplicates else None
    with ExitStack() as stack:
        rejects = stack.enter_context(
            RejectFile(rejects_path(shop.output, task.number), shop.settings)
        )
        made = stack.enter_context(shop.making())
        for block in shop.recipe.blocks(task.part, shop.settings.on_damage(record.damaged)):
            record.records += len(block) + len(block.rejects)
            record.raw_bytes += block.size_bytes
            if shop.transform is not None:
                rejects.stop_at(block.rejects)
                read = len(block) + len(block.rejects)
                block = shop.recipe.transform(shop.transform, block, task.part.files)
                record.filtered += read - len(block) - len(block.rejects)
            encoded = shop.recipe.encode(block, task.part.files, task.part.addresses)
            found = in_order([*block.rejects, *encoded.rejects], task.part.files)
            rejects.stop_at(found)
            rejects.write(found)
            tokens = 0
            for split, documents in encoded.splits.items():
                if split not in writers:
                    writer = ShardWriter(made / split, shard_name(task.number), shop.layout)
                    writers[split] = stack.enter_context(writer)
                writers[split].write(
                    documents.tokens,
                    files=numbers[documents.files],
                    lines=documents.lines,
                    spans=documents.spans,
                    texts=documents.texts,
                    text_bytes=documents.text_bytes,
                    trees=documents.trees,
                    columns=documents.columns,
                    images=documents.images if shop.layout.has_images else None,
                )
                if hashes is not None:
                    hashes.add(split, documents)
                record.documents += len(documents.tokens)
                tokens += len(documents.tokens.values)
            record.weighted += encoded.weighted
            record.straddling += encoded.straddling
            record.edge_controls += encoded.edge_controls
            record.dropped += encoded.dropped
            record.more_documents += encoded.more_documents
            if encoded.chats is not None:
                chats = chats or ChatSummary()
                chats.add(encoded.chats)
            report(block.size_bytes, tokens, len(found))
        record.rejects, record.reasons = rejects.count, rejects.reasons.as_json()
        record.chats = chats.as_json() if chats is not None else None
        record.shards = {
            split: shop.keep(made, split, writer.finish())
            for split, writer in sorted(writers.items())
        }
        rejects.finish()
    if hashes is not None:
        record.hashed, record.hashes_checksum = hashes.finish(hashes_path(shop.output, task.number))
    save_record(shop.output, task.number, record)
    forget_copies(task.part)
    return record


def using_copies(shop: Workshop) -> AbstractContextManager[Any]:
    """Read remote files through the copies that the preparation keeps."""
    return nullcontext() if shop.copies is None else Copies(shop.copies).used()


def forget_copies(part: Part) -> None:
    """Remove copies of remote files that no other part reads."""
    if part.size_bytes == sum(file.size_bytes for file in part.sources):
        for file in part.sources:
            if file.is_remote and (kept := copied_file(file)) is not None:
                kept.copies.forget(kept.name)


def stamp_of(part: Part) -> str:
    """Sizes and times of a part's files."""
    return "\n".join(file.version for file in part.sources)


def digest_of(part: Part) -> str:
    """A hash of the bytes of local files that determine a part's result; empty if the files are not
    local.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        extents = part.extents()
        for file, begin, end in extents:
            digest.update((end - begin).to_bytes(8, "little"))
            with open_ranges(file) as read:
                while begin < end and (data := read(begin, min(DIGEST_BYTES, end - begin))):
                    digest.update(checksum(np.frombuffer(data, np.uint8)).to_bytes(8, "little"))
                    begin += len(data)
    except Unreadable:
        return ""
    return digest.hexdigest() if extents else ""
