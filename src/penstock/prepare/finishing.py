"""Prepared parts to finished datasets: their shards, the manifests, the report.

Reads only the small files beside the shards.
"""

import shutil
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from penstock.errors import OutputError, RecordError
from penstock.prepare.chat_info import describe_chat
from penstock.prepare.chat_summary import ChatSummary
from penstock.prepare.empty import refuse_empty
from penstock.prepare.part import PARTS, REJECTED, REPORT, PartRecord, Workshop, rejects_path
from penstock.prepare.recipe import ChatRecipe
from penstock.prepare.rejects import join_files
from penstock.prepare.report import PrepareReport, SplitReport
from penstock.prepare.settings import fingerprint
from penstock.shards import (
    TOKENIZER_FOLDER,
    ChatInfo,
    DamagedSource,
    Manifest,
    ShardInfo,
    TokenizerInfo,
    finish_dataset,
    load_shard,
    write_json,
)


def finish(shop: Workshop, records: list[PartRecord], files: list[str], configuration: str) -> PrepareReport:
    """Make the finished shards datasets, and write the report, which says that all is done."""
    settings = shop.settings
    refuse_empty(shop.output, records, files)
    total, rejects = sum(record.records for record in records), sum(record.rejects for record in records)
    if rejects > (limit := settings.reject_limit(total)):
        allowed = f"the {limit} that may be" if settings.max_rejects is None else settings.max_rejects
        raise RecordError(
            f"{rejects} of {total} records were rejected, more than {allowed}; look at "
            f"{rejects_path(shop.output, 0).parent}/*.rejected.jsonl, then raise --max-rejects: finished parts are kept"
        )
    rejected = [rejects_path(shop.output, n) for n, record in enumerate(records) if record.rejects]
    join_files(rejected, shop.output / REJECTED)
    damaged = _damaged(records)
    chats = ChatSummary.total(record.chats for record in records) if settings.chat is not None else None
    info = None
    if isinstance(shop.recipe, ChatRecipe) and chats is not None:
        info = describe_chat(shop.recipe.encoder, shop.recipe.chat, chats)
    splits = {}
    for split in settings.splits:
        manifest = _finish_split(shop, split, records, files, configuration, info, damaged)
        splits[split] = SplitReport(
            path=str(shop.output / split),
            documents=manifest.documents,
            tokens=manifest.tokens,
            trained_tokens=manifest.trained_tokens,
            text_bytes=manifest.text_bytes,
            longest=manifest.longest,
            shards=len(manifest.shards),
            fingerprint=manifest.fingerprint,
            histogram=manifest.histogram,
        )
    report = PrepareReport(
        output=str(shop.output),
        records=total,
        documents=sum(record.documents for record in records),
        rejects=rejects,
        filtered=sum(record.filtered for record in records),
        tokens=sum(split.tokens for split in splits.values()),
        text_bytes=sum(split.text_bytes for split in splits.values()),
        raw_bytes=sum(record.raw_bytes for record in records),
        parts=len(records),
        dropped=sum(record.dropped for record in records),
        more_documents=sum(record.more_documents for record in records),
        chats=chats.as_json() if chats is not None else None,
        straddling_tokens=sum(record.straddling for record in records),
        edge_controls=sum(record.edge_controls for record in records),
        weighted=sum(record.weighted for record in records) if settings.fields.weights else None,
        damaged=tuple(map(asdict, damaged)),
        unread_bytes=sum(one.unread_bytes for one in damaged),
        input=input_of(records),
        encoder=shop.tokenizer.encoder,
        fallback_reason=shop.tokenizer.fallback_reason,
        splits=splits,
    )
    write_json(shop.output / PARTS, [asdict(record) for record in records])
    write_json(shop.output / REPORT, report.as_json(lasting=True))
    return report


def input_of(records: Iterable[PartRecord]) -> str:
    """A hash of what the parts read, with sizes and times."""
    return fingerprint([[record.identity, record.stamp] for record in records])


def _damaged(records: Iterable[PartRecord]) -> list[DamagedSource]:
    """The damaged files, each once, in order."""
    files: dict[str, DamagedSource] = {}
    for found in (DamagedSource(**one) for record in records for one in record.damaged):
        before = files.get(found.file)
        files[found.file] = (
            found
            if before is None
            else replace(
                before,
                size_bytes=before.size_bytes + found.size_bytes,
                unread_bytes=before.unread_bytes + found.unread_bytes,
            )
        )
    return list(files.values())


def _finished_shard(folder: Path, name: str) -> ShardInfo:
    info = load_shard(folder, name)
    if info is None:
        raise OutputError(f"{folder / name}: went away, or was cut, meanwhile; run it again: finished parts are kept")
    return info


def _finish_split(
    shop: Workshop,
    split: str,
    records: list[PartRecord],
    files: list[str],
    configuration: str,
    chat: ChatInfo | None,
    damaged: list[DamagedSource],
) -> Manifest:
    folder = shop.output / split
    if (folder / "manifest.json").is_file():
        # A killed run wrote it, and nothing has changed since, or it would be gone (see `Interrupted`).
        shutil.rmtree(folder / "unfinished", ignore_errors=True)
        return Manifest.load(folder)
    # The dataset carries its tokenizer, so that whoever opens it can say what its tokens spell.
    shop.tokenizer.save(folder / TOKENIZER_FOLDER)
    sealed = chat.save(folder) if chat is not None else ()
    shards = [_finished_shard(folder, record.shards[split]) for record in records if split in record.shards]
    return finish_dataset(
        folder,
        shards=shards,
        layout=shop.layout,
        tokenizer=TokenizerInfo.of(shop.tokenizer),
        configuration=configuration,
        files=files,
        sealed=sealed,
        damaged=damaged,
    )
