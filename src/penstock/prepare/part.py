"""One unit of work: a part of the input becomes a shard of each split, and a record that says so, written last."""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.prepare.chat_summary import ChatSummary
from penstock.prepare.recipe import Recipe
from penstock.prepare.rejects import RejectFile, in_order
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.transform import Transform
from penstock.shards import ShardLayout, ShardWriter, checksum, output_errors, write_json
from penstock.sources import Part
from penstock.sources.damage import Unreadable
from penstock.sources.files import open_ranges
from penstock.tokenizers import Tokenizer

Progressed = Callable[[int, int, int], None]
"""Called after each block with its raw bytes, tokens and rejects."""

DIGEST_BYTES = 4 << 20
"""Bytes that are hashed at once."""

WORK = ".prepare"
"""Folder inside the output for what a preparation leaves between its parts; it is gone at the end."""

REPORT, PARTS, REJECTED = "report.json", "parts.json", "rejected.jsonl"
"""Of a finished preparation: what came out, the record of each part, and the rejects of all parts."""


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


@final
@dataclass(frozen=True, slots=True)
class Task:
    """A part, its number, and the numbers of its files among all files of the dataset."""

    number: int
    part: Part
    files: tuple[int, ...]


@final
@dataclass(slots=True)
class PartRecord:
    """What became of a part; a later run of the same preparation uses it again where its input is still the same."""

    identity: str
    """What was read: the path of a file, and what of it; of records from Python, their hash."""
    stamp: str = ""
    """Sizes and times of its files when the work began."""
    digest: str = ""
    """Of the bytes that were read; empty where they are not on this machine."""
    files: list[int] = field(default_factory=list)
    """Numbers of its files among all files of the dataset, which its shards hold."""
    encoder: str = ""
    """Who encoded its texts, as `Tokenizer.encoder`: the look at other input may choose another."""
    records: int = 0
    documents: int = 0
    weighted: int = 0
    """Records with loss weights of their own."""
    filtered: int = 0
    rejects: int = 0
    straddling: int = 0
    edge_controls: int = 0
    dropped: int = 0
    more_documents: int = 0
    chats: dict[str, Any] | None = None
    raw_bytes: int = 0
    damaged: list[dict[str, Any]] = field(default_factory=list)
    """Stretches of its files that could not be read, as `Damage`."""
    shards: dict[str, str] = field(default_factory=dict)
    """Split → file name, of the splits that got documents."""


def shard_name(number: int) -> str:
    """File name of the shard that part `number` becomes."""
    return f"part-{number:06}.arrow"


def record_path(output: Path, number: int) -> Path:
    """Where the record of part `number` is."""
    return output / WORK / f"part-{number:06}.json"


def rejects_path(output: Path, number: int) -> Path:
    """Where the rejects of part `number` are."""
    return output / WORK / f"part-{number:06}.rejected.jsonl"


def prepare_part(shop: Workshop, task: Task, report: Progressed) -> PartRecord:
    """Read, encode and write one part.

    Args:
        shop: Tokenizer and settings.
        task: What to do.
        report: Called after each block with raw bytes, tokens and rejects.

    Raises:
        RecordError: A record or the rest of a file cannot be read, and the settings say stop; or too many cannot.
        OutputError: The disk is full, or the folder went away.
    """
    # The digest comes first: what changes while the part is read then differs from it, and is read again another time.
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
    with ExitStack() as stack:
        rejects = stack.enter_context(RejectFile(rejects_path(shop.output, task.number), shop.settings))
        for block in shop.recipe.blocks(task.part, shop.settings.on_damage(record.damaged)):
            record.records += len(block) + len(block.rejects)
            record.raw_bytes += block.size_bytes
            if shop.transform is not None:
                rejects.stop_at(block.rejects)
                read = len(block) + len(block.rejects)
                block = shop.recipe.transform(shop.transform, block, task.part.files)
                record.filtered += read - len(block) - len(block.rejects)
            encoded = shop.recipe.encode(block, task.part.files)
            found = in_order([*block.rejects, *encoded.rejects], task.part.files)
            rejects.stop_at(found)
            rejects.write(found)
            tokens = 0
            for split, documents in encoded.splits.items():
                if split not in writers:
                    writer = ShardWriter(shop.output / split, shard_name(task.number), shop.layout)
                    writers[split] = stack.enter_context(writer)
                writers[split].write(
                    documents.tokens,
                    files=numbers[documents.files],
                    lines=documents.lines,
                    spans=documents.spans,
                    texts=documents.texts,
                    text_bytes=documents.text_bytes,
                )
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
        record.rejects = rejects.count
        record.chats = chats.as_json() if chats is not None else None
        record.shards = {split: writer.finish().file for split, writer in sorted(writers.items())}
        rejects.finish()
    save_record(shop.output, task.number, record)
    return record


def save_record(output: Path, number: int, record: PartRecord) -> None:
    """Write down that a part is finished."""
    write_json(record_path(output, number), asdict(record))


def forget_part(output: Path, number: int, record: PartRecord) -> None:
    """Remove a finished part; first what says that it is finished."""
    with output_errors(output):
        record_path(output, number).unlink(missing_ok=True)
        rejects_path(output, number).unlink(missing_ok=True)
        for split, name in record.shards.items():
            (output / split / name).unlink(missing_ok=True)


def finished_numbers(output: Path) -> list[int]:
    """Numbers of the parts of which there is a record, in order."""
    return sorted(int(path.stem.removeprefix("part-")) for path in (output / WORK).glob("part-??????.json"))


def load_record(output: Path, number: int) -> PartRecord | None:
    """The record of a part that is finished; None when it is not."""
    try:
        return PartRecord(**json.loads(record_path(output, number).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def stamp_of(part: Part) -> str:
    """Sizes and times of a part's files."""
    return "\n".join(file.version for file in part.sources)


def digest_of(part: Part) -> str:
    """A hash of the bytes of local files that decide what comes of a part; empty where they are elsewhere."""
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
