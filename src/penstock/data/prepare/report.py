"""Finished datasets and the report: what went in, what came out, and that the two agree.

The report of a preparation: its input, its output, and that the two agree.

Makes finished datasets from prepared parts: their shards, the manifests, the report.

Only the small files next to the shards are read. A preparation without any document is an error,
because an empty dataset is useless and hides a mistake.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.errors import OutputError, PenstockError, RecordError
from penstock.core.json_values import JsonObject
from penstock.core.notebook import card
from penstock.data.prepare.answers import PATH_VALUES
from penstock.data.prepare.chat_summary import ChatSummary, describe_chat
from penstock.data.prepare.part import Workshop, join_files
from penstock.data.prepare.part_record import (
    HASHES,
    PARTS,
    REJECTED,
    REPORT,
    PartRecord,
    forget_part,
    hashes_path,
    rejects_path,
)
from penstock.data.prepare.reasons import Reasons
from penstock.data.prepare.recipe import ChatRecipe
from penstock.data.prepare.settings import fingerprint
from penstock.data.shards import (
    ChatInfo,
    DamagedSource,
    Manifest,
    ShardInfo,
    TokenizerInfo,
    finish_dataset,
)
from penstock.data.shards.format.images import PROCESSOR_FOLDER, MediaInfo
from penstock.data.shards.format.layout import TOKENIZER_FOLDER
from penstock.data.shards.format.manifest import LENGTHS
from penstock.data.shards.writing.finish import load_shard
from penstock.data.sources import Damage, Reject
from penstock.data.stores.files import map_numbers, write_json

BAR = 30
"""Characters of the longest bar of the histogram."""

SHOWN = 5
"""Maximum number of files listed by name."""

PASSING = ("output", "seconds", "parts_resumed", "input_changes")
"""Fields that describe the run, not the data."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """One resulting dataset."""

    path: str
    documents: int
    tokens: int
    trained_tokens: int
    text_bytes: int
    longest: int
    shards: int
    fingerprint: str
    histogram: tuple[int, ...]
    """Documents by length: bin b counts those with a number of tokens of b bits (0, 1, 2–3, 4–7,
    …).
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrepareReport:
    """What `prepare` returns; `report.json` holds it without the fields that describe only the
    run.
    """

    output: str
    records: int
    """Records read, good and bad."""
    documents: int
    rejects: int
    filtered: int
    """Records that the transform dropped."""
    tokens: int
    text_bytes: int
    raw_bytes: int
    parts: int
    straddling_tokens: int
    """Tokens that hold characters of different loss weights; each has the weight of its last
    byte.
    """
    edge_controls: int
    """Texts that spelled BOS at their start or EOS at their end, which replaced the added token."""
    encoder: str
    fallback_reason: str | None
    input: str
    """Fingerprint of the input: names, sizes and times of files, or the content of records from
    Python.
    """
    splits: dict[str, SplitReport]
    reasons: dict[str, list[Any]] = field(default_factory=dict)
    """Why records were rejected: reason → how many, and the first of them."""
    weighted: int | None = None
    """Records with loss weights of their own; None if no field for them was named."""
    untrained_documents: int | None = None
    """Documents of texts without a trained token, by their loss weights; None if no field for them
    was named.
    """
    damaged: tuple[JsonObject, ...] = ()
    """Files that could not be read completely: file, line, reason, size_bytes, unread_bytes (see
    `DamagedSource`).
    """
    unread_bytes: int = 0
    """Bytes of the input that could not be read; not part of `raw_bytes`."""
    dropped: int = 0
    """Records removed by the clean-up of chats."""
    more_documents: int = 0
    """Documents beyond the first of their record: other paths of a tree, other replies of a
    rewritten chat.
    """
    chats: JsonObject | None = None
    """Statistics about chats: a `ChatSummary` as JSON."""
    duplicates: dict[str, int] | None = None
    """File → its documents that were dropped because an earlier one is the same; None: they were
    not looked for.
    """
    seconds: float | None = None
    """Time of this run; None if there was nothing left to do."""
    parts_resumed: int = 0
    """Parts that an earlier run had finished."""
    input_changes: dict[str, str] = field(default_factory=dict)
    """File → "changed", "new" or "gone" since the last run, if there was one."""

    def __fspath__(self) -> str:
        """The folder of the dataset, so that a report stands wherever a path does:
        `Loader(prepare(…))`.
        """
        return self.output

    def __post_init__(self) -> None:
        total = sum(split.documents for split in self.splits.values())
        used = total + self.num_duplicates - self.more_documents
        if (
            self.records != used + self.rejects + self.filtered + self.dropped
            or total != self.documents
        ):
            raise PenstockError(
                f"{self.output}: {self.records} records were read, but {used} with documents, "
                f"{self.rejects} rejects, {self.filtered} filtered and {self.dropped} dropped "
                "were counted; this is a bug of penstock: please report it with this line"
            )

    @property
    def num_duplicates(self) -> int:
        """Documents that were dropped because an earlier document is the same."""
        return sum((self.duplicates or {}).values())

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, including BOS and EOS."""
        return self.text_bytes / max(self.tokens, 1)

    def __repr__(self) -> str:
        """One line; `str`, and so `print`, gives the report as text."""
        counts = (
            f"{_count(self.documents, 'document')}, {_count(self.tokens, 'token')}, "
            f"{self.rejects:,} rejected"
        )
        return f"PrepareReport({self.output!r}: {counts})"

    def __str__(self) -> str:
        return self.as_text()

    def _repr_html_(self) -> str:
        """What a notebook shows: the report as text."""
        return card(f"Prepared {self.output}", (), f"<pre>{escape(self.as_text())}</pre>")

    def as_json(self, *, lasting: bool = False) -> JsonObject:
        """The report as JSON; `lasting` leaves out what differs between runs."""
        value = asdict(self) | {"bytes_per_token": round(self.bytes_per_token, 4)}
        if self.untrained_documents is None:
            del value["untrained_documents"]
        if lasting:
            for name in PASSING:
                del value[name]
            for split in value["splits"].values():
                del split["path"]
        return value

    def warnings(self) -> list[str]:
        """Signs of a mistake, one line each."""
        lines = []
        if self.damaged:
            lines.append(
                f"WARNING: {_count(len(self.damaged), 'file')} could not be read completely; "
                f"{self.unread_bytes:,} bytes were not read, not counting what was cut off:"
            )
            lines += [f"  {Damage(**one)}" for one in self.damaged[:SHOWN]]
            if len(self.damaged) > SHOWN:
                lines.append(
                    f"  and {len(self.damaged) - SHOWN} more, in {REPORT} and the manifest"
                )
        if self.weighted == 0:
            lines.append(
                "warning: no record has the field that weights_field names, so all tokens "
                "count in full"
            )
        lines += [
            f"warning: {name} is empty: too few documents for this share of validation"
            for name, split in self.splits.items()
            if not split.documents
        ]
        return lines

    def untrained(self) -> str | None:
        """One line on what trains nothing: conversations, which were dropped, or documents of
        texts; None: nothing.
        """
        if self.untrained_documents:
            verb = "trains" if self.untrained_documents == 1 else "train"
            return (
                f"{_count(self.untrained_documents, 'document')} of {self.documents:,} {verb} "
                "nothing: no token after the first has a loss weight (text outside all "
                "ranges of weights_field has none; an empty list is no range)"
            )
        if self.chats is None or not (count := self.chats["cleaned"]["untrained"]):
            return None
        first = self.chats["dropped"].get("untrained")
        such = f"; the first: {first}" if first else ""
        noun = "conversation was" if count == 1 else "conversations were"
        return (
            f"{count:,} {noun} dropped, because the settings train nothing in "
            f"{'it' if count == 1 else 'them'}{such}"
        )

    def as_text(self) -> str:
        """The report as text."""
        documents, tokens, records = (
            _count(getattr(self, noun), noun.removesuffix("s"))
            for noun in ("documents", "tokens", "records")
        )
        good = self.documents + self.num_duplicates - self.more_documents
        dropped = f", {self.dropped:,} dropped" if self.chats else ""
        lines = [
            f"{documents}, {tokens}, {self.bytes_per_token:.2f} bytes per token",
            (
                f"{records}: {good:,} good, {self.rejects:,} rejected, {self.filtered:,} "
                f"filtered{dropped}"
            ),
        ]
        if self.reasons:
            lines += ["rejected, by reason:", *Reasons.total([self.reasons]).lines()]
        if self.duplicates is not None:
            shown = sorted(self.duplicates.items(), key=lambda one: -one[1])[:SHOWN]
            files = ", ".join(f"{count:,} of {file}" for file, count in shown)
            more = (
                f", and of {len(self.duplicates) - SHOWN} more files"
                if len(self.duplicates) > SHOWN
                else ""
            )
            lines.append(
                f"{_count(self.num_duplicates, 'duplicate')} dropped"
                + (f": {files}{more}" if files else "")
            )
        if self.chats:
            lines += ChatSummary.from_json(self.chats).lines()
        if len(self.splits) > 1:
            lines += [
                f"{name}: {_count(split.documents, 'document')}, {_count(split.tokens, 'token')}"
                for name, split in self.splits.items()
            ]
        lines += self.warnings()
        if self.untrained_documents and (line := self.untrained()):
            lines.append(line)
        if self.straddling_tokens:
            lines.append(
                f"tokens that hold characters of different loss weights: {self.straddling_tokens:,}"
            )
        if self.edge_controls:
            lines.append(
                "texts that spell BOS or EOS at their edge (not added again): "
                f"{self.edge_controls:,}"
            )
        lines.append(
            f"encoder: {self.encoder}{f' ({self.fallback_reason})' if self.fallback_reason else ''}"
        )
        if self.input_changes:
            lines.append(f"since the last run {describe_changes(self.input_changes)}")
        if self.seconds is not None:
            resumed = (
                f", {self.parts_resumed} of {self.parts} parts from an earlier run"
                if self.parts_resumed
                else ""
            )
            lines.append(f"{self.seconds:.1f} s{resumed}")
        else:
            lines.append("nothing to do: already prepared")
        return "\n".join([*lines, *self._bars()])

    def _bars(self) -> list[str]:
        bins = [
            sum(counts)
            for counts in zip(*(split.histogram for split in self.splits.values()), strict=True)
        ]
        used = [number for number, count in enumerate(bins) if count]
        if not used:
            return []
        highest = max(bins)
        lines = ["length, tokens"]
        for number in range(used[0], used[-1] + 1):
            low, high = (1 << number) >> 1, max((1 << number) - 1, 0)
            bar = "█" * max(round(BAR * bins[number] / highest), 1 if bins[number] else 0)
            lines.append(
                f"{f'{low:,}–{high:,}' if high > low else f'{low:,}':>21} {bins[number]:>12,} {bar}"
            )
        return lines


def describe_changes(changes: dict[str, str]) -> str:
    """`{"b.jsonl": "gone"}` → "b.jsonl is gone"; at most `SHOWN` files by name."""
    verbs = {"changed": "changed", "new": "is new", "gone": "is gone"}
    shown = ", ".join(f"{file} {verbs[change]}" for file, change in list(changes.items())[:SHOWN])
    return (
        shown
        if len(changes) <= SHOWN
        else f"{shown}, and {len(changes) - SHOWN} more files changed"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def read_report(content: bytes, output: str) -> PrepareReport:
    """The report in `report.json`."""
    value = json.loads(content)
    del value["bytes_per_token"]
    splits = {
        name: SplitReport(
            **{
                **split,
                "path": f"{output}/{name}".rstrip("/"),
                "histogram": tuple(split["histogram"]),
            }
        )
        for name, split in value.pop("splits").items()
    }
    return PrepareReport(
        **{**value, "damaged": tuple(value["damaged"])}, splits=splits, output=output
    )


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
        processor.save(folder / PROCESSOR_FOLDER)
        info = MediaInfo(
            processor=processor.kind,
            fingerprint=processor.fingerprint,
            slot_id=processor.slot_id,
            settings=shop.recipe.chat.images.describe(),
        )
        sealed = (*sealed, *info.save(folder))
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
