"""One unit of work: a part of the input becomes a shard of each split, and a record that says so, written last."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.errors import RecordError
from penstock.prepare.chat_summary import ChatSummary
from penstock.prepare.recipe import Recipe
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.transform import Transform
from penstock.shards import ShardLayout, ShardWriter, write_json, write_text
from penstock.sources import Part, Reject
from penstock.tokenizers import Tokenizer

Progressed = Callable[[int, int, int], None]
"""Called after each block with its raw bytes, tokens and rejects."""

WORK = ".prepare"
"""Folder inside the output for what a preparation leaves between its parts; it is gone at the end."""


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
    """What became of a part; kept until the dataset is finished."""

    identity: str
    records: int = 0
    documents: int = 0
    filtered: int = 0
    rejects: int = 0
    straddling: int = 0
    edge_controls: int = 0
    dropped: int = 0
    more_documents: int = 0
    chats: dict[str, Any] | None = None
    raw_bytes: int = 0
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
        RecordError: A record cannot be read, and the settings say stop; or too many cannot.
        OutputError: The disk is full, or the folder went away.
    """
    record = PartRecord(task.part.identity)
    chats: ChatSummary | None = None
    writers: dict[str, ShardWriter] = {}
    numbers = np.array(task.files, np.int32)
    rejects: list[Reject] = []
    try:
        for block in shop.recipe.blocks(task.part):
            record.records += len(block) + len(block.rejects)
            record.raw_bytes += block.size_bytes
            if shop.transform is not None:
                _stop_at(block.rejects, shop.settings, rejects)
                read = len(block) + len(block.rejects)
                block = shop.recipe.transform(shop.transform, block, task.part.files)
                record.filtered += read - len(block) - len(block.rejects)
            encoded = shop.recipe.encode(block, task.part.files)
            found = _in_order([*block.rejects, *encoded.rejects], task.part.files)
            _stop_at(found, shop.settings, rejects)
            rejects += found
            tokens = 0
            for split, documents in encoded.splits.items():
                if split not in writers:
                    writers[split] = ShardWriter(shop.output / split, shard_name(task.number), shop.layout).__enter__()
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
            record.straddling += encoded.straddling
            record.edge_controls += encoded.edge_controls
            record.dropped += encoded.dropped
            record.more_documents += encoded.more_documents
            if encoded.chats is not None:
                chats = chats or ChatSummary()
                chats.add(encoded.chats)
            report(block.size_bytes, tokens, len(found))
        record.rejects = len(rejects)
        record.chats = chats.as_json() if chats is not None else None
        record.shards = {split: writer.finish().file for split, writer in sorted(writers.items())}
    finally:
        for writer in writers.values():
            writer.__exit__(None, None, None)
    _save_rejects(rejects_path(shop.output, task.number), rejects)
    write_json(record_path(shop.output, task.number), asdict(record))
    return record


def load_record(output: Path, number: int) -> PartRecord | None:
    """The record of a part that is finished; None when it is not."""
    try:
        return PartRecord(**json.loads(record_path(output, number).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _stop_at(found: list[Reject], settings: PrepareSettings, before: list[Reject]) -> None:
    if not found:
        return
    if settings.on_error == "stop":
        raise RecordError(f"{found[0]} (or skip such records: --on-error skip)")
    if settings.reject_count is not None and len(before) + len(found) > settings.reject_count:
        raise RecordError(f"{found[-1]}; more than {settings.max_rejects} records were rejected: raise --max-rejects")


def _in_order(rejects: list[Reject], files: tuple[str, ...]) -> list[Reject]:
    numbers = {name: number for number, name in enumerate(files)}
    return sorted(rejects, key=lambda reject: (numbers.get(reject.file, 0), reject.line))


def _save_rejects(path: Path, rejects: list[Reject]) -> None:
    if rejects:
        write_text(path, "".join(json.dumps(asdict(reject), ensure_ascii=False) + "\n" for reject in rejects))
