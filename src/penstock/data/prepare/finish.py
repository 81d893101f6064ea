"""Makes finished datasets from prepared parts: their shards, the manifests, the report.

Only the small files next to the shards are read. A preparation without any document is an error,
because an empty dataset is useless and hides a mistake.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from penstock.core.errors import OutputError, RecordError
from penstock.data.prepare.answers import PATH_VALUES
from penstock.data.prepare.chat_notices import describe_chat
from penstock.data.prepare.part import Workshop, join_files
from penstock.data.prepare.part_record import (
    HASHES,
    PARTS,
    REJECTED,
    PartRecord,
    forget_part,
    hashes_path,
    rejects_path,
)
from penstock.data.prepare.recipe import ChatRecipe
from penstock.data.prepare.settings import fingerprint
from penstock.data.reports.chat_summary import ChatSummary
from penstock.data.reports.reasons import Reasons
from penstock.data.reports.report import REPORT, PrepareReport, SplitReport
from penstock.data.shards import (
    ChatInfo,
    DamagedSource,
    Manifest,
    ShardInfo,
    TokenizerInfo,
    finish_dataset,
)
from penstock.data.shards.format.images import save_processor
from penstock.data.shards.format.manifest import LENGTHS, TOKENIZER_FOLDER
from penstock.data.shards.writing.finish import load_shard
from penstock.data.sources import Damage, Reject
from penstock.data.stores.files import map_numbers, write_json


def refuse_empty(output: Path, records: Sequence[PartRecord], files: Sequence[str]) -> None:
    """Raise if there is no document, and remove the finished parts, so that the next try may have
    other settings.

    Args:
        output: The folder of the preparation.
        records: The record of each part.
        files: Names of all files.

    Raises:
        RecordError: There is no document; the message says what happened to the records.
    """
    if any(record.documents for record in records):
        return
    reason = _reason(output, records, files)
    for number, record in enumerate(records):
        forget_part(output, number, record)
    raise RecordError(f"the input gave no document, so there is no dataset: {reason}")


def _reason(output: Path, records: Sequence[PartRecord], files: Sequence[str]) -> str:
    total, rejects, filtered = (
        sum(getattr(record, name) for record in records)
        for name in ("records", "rejects", "filtered")
    )
    damaged = [one for record in records for one in record.damaged]
    if not total and damaged:
        return f"no record could be read; the first damaged file: {Damage(**damaged[0])}"
    if not total:
        others = len(files) - 1
        more = f" and {others} more {'file' if others == 1 else 'files'}" if others > 0 else ""
        return (
            f"no record in {files[0] if files else 'the input'}{more}; name files that contain "
            "records"
        )
    if not rejects and not filtered:
        return (
            f"the clean-up of chats dropped all {total:,} records, because none has a reply "
            "that is trained; is the role of the replies in roles_to_train?"
        )
    if not rejects:
        return f"the transform dropped all {total:,} records"
    number = next(number for number, record in enumerate(records) if record.rejects)
    with open(rejects_path(output, number), "rb") as rejected:
        first = Reject(**json.loads(rejected.readline()))
    dropped = f" and the transform dropped {filtered:,}" if filtered else ""
    return f"{rejects:,} of {total:,} records were rejected{dropped}; the first: {first}"


def finish(
    shop: Workshop, records: list[PartRecord], files: list[str], configuration: str
) -> PrepareReport:
    """Turn the finished shards into datasets, and write the report, which marks the preparation as
    complete.
    """
    settings = shop.settings
    refuse_empty(shop.output, records, files)
    total, rejects = (
        sum(record.records for record in records),
        sum(record.rejects for record in records),
    )
    reasons = Reasons.total(record.reasons for record in records)
    if rejects > (limit := settings.reject_limit(total)):
        allowed = (
            f"the {limit} that are allowed"
            if settings.max_rejects is None
            else settings.max_rejects
        )
        table = "\n".join(["by reason:", *reasons.lines()])
        raise RecordError(
            f"{rejects} of {total} records were rejected, more than {allowed}; see "
            f"{rejects_path(shop.output, 0).parent}/*.rejected.jsonl, then set max_rejects "
            f"higher: finished parts are kept; {table}"
        )
    rejected = [rejects_path(shop.output, n) for n, record in enumerate(records) if record.rejects]
    join_files(rejected, shop.output / REJECTED)
    if settings.drop_duplicates:
        join_files(
            (hashes_path(shop.output, number) for number in range(len(records))),
            shop.output / HASHES,
        )
    damaged = _damaged(records)
    chats = (
        ChatSummary.total(record.chats for record in records) if settings.chat is not None else None
    )
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
        reasons=reasons.as_json(),
        filtered=sum(record.filtered for record in records),
        tokens=sum(split.tokens for split in splits.values()),
        text_bytes=sum(split.text_bytes for split in splits.values()),
        raw_bytes=sum(record.raw_bytes for record in records),
        parts=len(records),
        dropped=sum(record.dropped for record in records),
        more_documents=sum(record.more_documents for record in records),
        chats=chats.as_json() if chats is not None else None,
        duplicates=_duplicates(records, files, settings.splits)
        if settings.drop_duplicates
        else None,
        straddling_tokens=sum(record.straddling for record in records),
        edge_controls=sum(record.edge_controls for record in records),
        weighted=sum(record.weighted for record in records) if settings.fields.weights else None,
        untrained_documents=_untrained(shop) if settings.fields.weights else None,
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


def _untrained(shop: Workshop) -> int:
    """Documents without a trained token in the finished datasets."""
    folders = [shop.output / split for split in shop.settings.splits]
    lengths = (
        map_numbers(folder / LENGTHS, "<u4", (Manifest.load(folder).documents, 2))
        for folder in folders
    )
    return sum(int(np.count_nonzero(one[:, 1] == 0)) for one in lengths)


def input_of(records: Iterable[PartRecord]) -> str:
    """A hash of what the parts read, with sizes and times."""
    return fingerprint([[record.identity, record.stamp] for record in records])


def _duplicates(
    records: Iterable[PartRecord], files: Sequence[str], splits: Sequence[str]
) -> dict[str, int]:
    """File → its documents that were dropped from some splits, in the order of the files."""
    counts: Counter[int] = Counter()
    for record in records:
        for split in splits:
            counts.update(
                {int(file): count for file, count in record.dropped_from.get(split, {}).items()}
            )
    return {files[number]: counts[number] for number in sorted(counts)}


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
        raise OutputError(
            f"{folder / name}: was removed or cut meanwhile; run it again: finished parts are kept"
        )
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
        # A killed run wrote it, and nothing has changed since; otherwise it would be gone (see
        # `Interrupted`).
        shutil.rmtree(folder / "unfinished", ignore_errors=True)
        return Manifest.load(folder)
    # The dataset contains its tokenizer, so that its tokens can be decoded wherever it is opened.
    shop.tokenizer.save(folder / TOKENIZER_FOLDER)
    sealed = chat.save(folder) if chat is not None else ()
    if (
        isinstance(shop.recipe, ChatRecipe)
        and (processor := shop.recipe.encoder.processor) is not None
    ):
        sealed = (*sealed, *save_processor(folder, processor, shop.recipe.chat.images))
    shards = [
        _finished_shard(folder, record.shards[split])
        for record in records
        if split in record.shards
    ]
    return finish_dataset(
        folder,
        shards=shards,
        layout=shop.layout,
        tokenizer=TokenizerInfo.of(shop.tokenizer),
        configuration=configuration,
        files=files,
        sealed=sealed,
        damaged=damaged,
        duplicates=_duplicates(records, files, [split]),
        path_values=PATH_VALUES if shop.layout.has_trees else (),
    )
