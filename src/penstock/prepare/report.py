"""The report of a preparation: what went in, what came out, and that the two agree."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, final

from penstock.errors import PenstockError
from penstock.prepare.chat_summary import ChatSummary
from penstock.prepare.part import REPORT
from penstock.sources import Damage

BAR = 30
"""Characters of the longest bar of the histogram."""

SHOWN = 5
"""Files that are listed by name, at most."""

PASSING = ("output", "seconds", "parts_resumed", "input_changes")
"""Fields that are no property of the data."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """One dataset that came out."""

    path: str
    documents: int
    tokens: int
    trained_tokens: int
    text_bytes: int
    longest: int
    shards: int
    fingerprint: str
    histogram: tuple[int, ...]
    """Documents by length: bin b counts those whose number of tokens takes b bits."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What `prepare` returns; `report.json` holds it without the times, which are no property of the data."""

    output: str
    records: int
    """Records that were read, good and bad."""
    documents: int
    rejects: int
    filtered: int
    """Records that the transform dropped."""
    tokens: int
    text_bytes: int
    raw_bytes: int
    parts: int
    straddling_tokens: int
    """Tokens that hold characters of different loss weights; each weighs what its last byte does."""
    edge_controls: int
    """Texts that spelled BOS at their start or EOS at their end, which took the place of the added ones."""
    encoder: str
    fallback_reason: str | None
    input: str
    """Fingerprint of the input: names, sizes and times of files, or the content of what Python handed over."""
    splits: dict[str, SplitReport]
    weighted: int | None = None
    """Records with loss weights of their own; None where no field for them was named."""
    damaged: tuple[dict[str, Any], ...] = ()
    """Files that could not be read whole: file, line, reason, size_bytes, unread_bytes (see `DamagedSource`)."""
    unread_bytes: int = 0
    """Bytes of the input that could not be read, and are not in `raw_bytes`."""
    dropped: int = 0
    """Records of which the clean-up of chats left nothing."""
    more_documents: int = 0
    """Documents beyond the first of their record: other paths of a tree, other replies of a rewritten chat."""
    chats: dict[str, Any] | None = None
    """What was found out about chats: a `ChatSummary` as JSON."""
    seconds: float | None = None
    """Time of this run; None when there was nothing left to do."""
    parts_resumed: int = 0
    """Parts that an earlier run had finished."""
    input_changes: dict[str, str] = field(default_factory=dict)
    """File → "changed", "new" or "gone" since the last run, where there was one."""

    def __post_init__(self) -> None:
        total = sum(split.documents for split in self.splits.values())
        used = total - self.more_documents
        if self.records != used + self.rejects + self.filtered + self.dropped or total != self.documents:
            raise PenstockError(
                f"{self.output}: {self.records} records went in, but {used} that gave documents, {self.rejects} "
                f"rejects, {self.filtered} filtered and {self.dropped} dropped came out; this is a bug of penstock: "
                "please report it with this line"
            )

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text for each token, BOS and EOS counted."""
        return self.text_bytes / max(self.tokens, 1)

    def as_json(self, *, lasting: bool = False) -> dict[str, Any]:
        """For machines; `lasting` leaves out what differs between runs."""
        value = asdict(self) | {"bytes_per_token": round(self.bytes_per_token, 4)}
        if lasting:
            for name in PASSING:
                del value[name]
            for split in value["splits"].values():
                del split["path"]
        return value

    def warnings(self) -> list[str]:
        """What may not be as it was meant, a line each."""
        lines = []
        if self.damaged:
            lines.append(
                f"WARNING: {_count(len(self.damaged), 'file')} could not be read whole; {self.unread_bytes:,} bytes "
                "were not read, and what was cut off is not counted:"
            )
            lines += [f"  {Damage(**one)}" for one in self.damaged[:SHOWN]]
            if len(self.damaged) > SHOWN:
                lines.append(f"  and {len(self.damaged) - SHOWN} more, in {REPORT} and the manifest")
        if self.weighted == 0:
            lines.append("warning: no record has the field of --weights-field, so all tokens count in full")
        lines += [
            f"warning: {name} is empty: there are too few documents for this --validation share"
            for name, split in self.splits.items()
            if not split.documents
        ]
        return lines

    def as_text(self) -> str:
        """For people."""
        documents, tokens, records = (
            _count(getattr(self, noun), noun.removesuffix("s")) for noun in ("documents", "tokens", "records")
        )
        good, dropped = self.documents - self.more_documents, f", {self.dropped:,} dropped" if self.chats else ""
        lines = [
            f"{documents}, {tokens}, {self.bytes_per_token:.2f} bytes a token",
            f"{records}: {good:,} good, {self.rejects:,} rejected, {self.filtered:,} filtered{dropped}",
        ]
        if self.chats:
            lines += ChatSummary.from_json(self.chats).lines()
        if len(self.splits) > 1:
            lines += [
                f"{name}: {_count(split.documents, 'document')}, {_count(split.tokens, 'token')}"
                for name, split in self.splits.items()
            ]
        lines += self.warnings()
        if self.straddling_tokens:
            lines.append(f"tokens that hold characters of different loss weights: {self.straddling_tokens:,}")
        if self.edge_controls:
            lines.append(f"texts that spelled BOS or EOS at their edge, which was not doubled: {self.edge_controls:,}")
        lines.append(f"encoder: {self.encoder}{f' ({self.fallback_reason})' if self.fallback_reason else ''}")
        if self.input_changes:
            lines.append(f"since the last run {describe_changes(self.input_changes)}")
        if self.seconds is not None:
            resumed = f", {self.parts_resumed} of {self.parts} parts from an earlier run" if self.parts_resumed else ""
            lines.append(f"{self.seconds:.1f} s{resumed}")
        else:
            lines.append("nothing to do: it was already prepared")
        return "\n".join([*lines, *self._bars()])

    def _bars(self) -> list[str]:
        bins = [sum(counts) for counts in zip(*(split.histogram for split in self.splits.values()), strict=True)]
        used = [number for number, count in enumerate(bins) if count]
        if not used:
            return []
        highest = max(bins)
        lines = ["length, tokens"]
        for number in range(used[0], used[-1] + 1):
            low, high = (1 << number) >> 1, max((1 << number) - 1, 0)
            bar = "█" * max(round(BAR * bins[number] / highest), 1 if bins[number] else 0)
            lines.append(f"{f'{low:,}–{high:,}' if high > low else f'{low:,}':>21} {bins[number]:>12,} {bar}")
        return lines


def describe_changes(changes: dict[str, str]) -> str:
    """`{"b.jsonl": "gone"}` → "b.jsonl is gone", at most some files by name."""
    verbs = {"changed": "changed", "new": "is new", "gone": "is gone"}
    shown = ", ".join(f"{file} {verbs[change]}" for file, change in list(changes.items())[:SHOWN])
    return shown if len(changes) <= SHOWN else f"{shown}, and {len(changes) - SHOWN} more files changed"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def read_report(content: bytes, output: str) -> PrepareReport:
    """A report from `report.json`."""
    value = json.loads(content)
    del value["bytes_per_token"]
    splits = {
        name: SplitReport(**{**split, "path": f"{output}/{name}".rstrip("/"), "histogram": tuple(split["histogram"])})
        for name, split in value.pop("splits").items()
    }
    return PrepareReport(**{**value, "damaged": tuple(value["damaged"])}, splits=splits, output=output)
