"""The report of a preparation: what went in, what came out, and that the two agree."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from penstock.core.errors import CorruptionError, PenstockError
from penstock.core.folders import is_url
from penstock.core.json_values import JsonObject
from penstock.core.notebook import card, plain_text
from penstock.core.urls import shown_url, split_query
from penstock.data.reports.chat_summary import ChatSummary
from penstock.data.reports.reasons import Reasons
from penstock.data.sources import Damage
from penstock.data.stores.files import check_regular, unreadable
from penstock.data.stores.store import Store

REPORT = "report.json"
"""Its file, next to the dataset, or next to those of training and validation."""

SPLITS = ("train", "validation")
"""Folders of the datasets, if a share is for validation."""

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
    """The report of a preparation; `report.json` holds it without the fields that describe only
    the run.
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

    @classmethod
    def of_dataset(cls, location: str, fingerprint: str) -> "PrepareReport | None":
        """The report of the preparation that made a dataset; None: there is none, or the dataset
        was changed since.

        Args:
            location: The dataset's folder, or its URL.
            fingerprint: That of the dataset.

        Raises:
            CorruptionError: The report is damaged.
            StoreError: The store cannot be read.
        """
        base, query = split_query(location)
        above, _, name = base.rpartition("/")
        places = [(location, ""), *([(above + query, name)] if name in SPLITS else [])]
        for folder, split in places:
            content = _content(folder)
            if content is not None and _fingerprint(content, split, folder) == fingerprint:
                try:
                    return read_report(content, shown_url(folder))
                except (TypeError, KeyError, ValueError, AttributeError, PenstockError) as error:
                    raise _damaged(folder, error) from error
        return None

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
        return card(f"Prepared {self.output}", (), plain_text(self.as_text()))

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
            f"warning: {name} is empty: too few documents for this share of "
            "validation; prepare again with a larger one, or with more data"
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


def _content(folder: str) -> bytes | None:
    """The report's file in a folder or a store; None: there is none."""
    if is_url(folder):
        return Store(folder).read_if_there(REPORT)
    path = Path(folder) / REPORT
    if not path.exists():
        return None
    check_regular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def _fingerprint(content: bytes, split: str, folder: str) -> object:
    """The fingerprint that a report gives one of its datasets; None: the file is no report, or one
    of others.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, error) from None
    for key in ("splits", split, "fingerprint"):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _damaged(folder: str, error: Exception) -> CorruptionError:
    return CorruptionError(
        f"{shown_url(folder)}/{REPORT}: damaged: {error}; copy it again, or prepare again"
    )


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
