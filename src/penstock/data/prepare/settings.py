"""The settings of `prepare`, checked, and which of them determine the bytes of the result."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from typing import Literal, final

from penstock.chat import Template
from penstock.core.errors import ConfigError
from penstock.core.formats import PREPARATION
from penstock.core.json_values import JsonObject
from penstock.data.prepare.chat_settings import ChatSettings, day_of
from penstock.data.reports.report import SPLITS
from penstock.data.shards.format.layout import Column
from penstock.data.sources import Fields, OnDamage
from penstock.data.sources.formats import FORMATS, Format, check_delimiter
from penstock.data.sources.records import stop_at_damage
from penstock.tokenizers import Tokenizer

CHAT_PART_BYTES = 4 << 20
"""Approximate raw bytes of a part: a conversation takes far more time per byte than a text."""

Choice = Literal["auto", "yes", "no"]


RETIRED = ("on_error",)
"""Keys of `as_plan` in earlier versions that no longer have an effect."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """Settings of a preparation that determine its result."""

    fields: Fields = field(default_factory=Fields)
    """Which fields of a record are read."""

    format: Format | None = None
    """Raw format; None: by the file names and the first bytes."""

    separator: str | None = None
    r"""Plain text: the text between documents, such as `\n\n`; None: each file is one document."""

    delimiter: str | None = None
    """CSV and TSV: the character between cells; None: a tab in TSV, else a comma."""

    subset: str | None = None
    """Of `hf://datasets/OWNER/NAME`: which of its subsets (configs). None: the default one, or the
    only one.
    """

    split: str | None = None
    """Of `hf://datasets/OWNER/NAME`: which split. None: `train`, or the only one."""

    part_bytes: int | None = None
    """Approximate raw bytes of a part; each part becomes a shard. None: 64 MiB, more for
    terabytes.
    """

    add_bos: Choice = "auto"
    """BOS before each document. auto: if the tokenizer's own encoding puts it there. What trains on
    the dataset begins texts likewise when it is used.
    """

    add_eos: Choice = "auto"
    """EOS after each document. auto: when the tokenizer has one."""

    validation: float = 0.0
    """Share of documents that go to `validation`, the rest to `train`, by a hash of the text. 0: no
    split.
    """

    keep_text: bool = False
    """Store the text next to its tokens."""

    drop_duplicates: bool = False
    """Of documents with the same tokens, keep the first in input order, across all sources and
    splits. Hashes stay next to the dataset, 24 bytes a document.
    """

    on_error: Literal["stop", "skip"] = "stop"
    """At a record that cannot be read: stop, or skip it and write it to rejected.jsonl."""

    on_damaged_file: Literal["stop", "skip"] = "stop"
    """At a file that was cut or is damaged: stop, or continue without the unreadable part, which
    the report and the manifest count. "skip" reads compressed files twice, and uses nothing of a
    file with wrong data.
    """

    max_rejects: int | float | str | None = None
    """With "skip": more rejects than this are an error. A whole number (1000) counts records; a
    percentage ("1%") or a decimal below 1 (0.01) is a share of all records, judged at the end.
    None: 1%, or 100 records where that is more.
    """

    token_columns: Sequence[str] = ()
    """Fields that become columns, a number for each token. Texts: among `columns`, of type
    int64, float64 (the same for all tokens) or ranges (by character; 0 elsewhere). Chats: a number,
    or a list of one for each message. A record without the field has 0.
    """

    chat: ChatSettings | None = None
    """Records are conversations, and become documents with loss weights; None: they are texts."""

    def __post_init__(self) -> None:
        if self.chat is not None:
            self._accept_chats()
        for name, known in (("add_bos", ("auto", "yes", "no")), ("add_eos", ("auto", "yes", "no"))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        for name in ("on_error", "on_damaged_file"):
            if getattr(self, name) not in ("stop", "skip"):
                raise ConfigError(f"{name} must be stop or skip; got {getattr(self, name)!r}")
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}; got {self.format!r}")
        check_delimiter(self.delimiter)
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation must be a share in [0, 1); got {self.validation}")
        if self.part_bytes is not None and self.part_bytes < 1:
            raise ConfigError(f"part_bytes must be >= 1; got {self.part_bytes}")
        object.__setattr__(self, "token_columns", tuple(self.token_columns))
        for name in self.token_columns if self.chat is None else ():
            if self.fields.columns.get(name) not in ("int64", "float64", "ranges"):
                raise ConfigError(
                    f"token_columns: {name!r} must be among columns, with type int64, float64 "
                    f"or ranges; found {self.fields.columns.get(name) or 'nothing'} (--column "
                    f"{name}:float64)"
                )
        self.reject_limit(0)

    def _accept_chats(self) -> None:
        """Read whole records, in smaller parts; refuse what is about texts."""
        for name, default in (("add_bos", "auto"), ("add_eos", "auto"), ("separator", None)):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is for texts; for chats the template does this: leave it out"
                )
        if replace(self.fields, whole=False) != Fields():
            raise ConfigError(
                "text_field, weights_field and columns are for texts; chats are read whole: "
                "say with field_messages and the like where the messages are"
            )
        object.__setattr__(self, "fields", Fields(whole=True))
        if self.part_bytes is None:
            object.__setattr__(self, "part_bytes", CHAT_PART_BYTES)

    def refuse_choice(self) -> None:
        """Raise if files are chosen by subset or split, and the source has no files."""
        if self.subset is not None or self.split is not None:
            raise ConfigError(
                "subset and split choose the files of hf://datasets/OWNER/NAME; records from "
                "Python are read as they come: leave them out"
            )

    @property
    def reject_count(self) -> int | None:
        """The allowed number of rejects; None if a share of the records is allowed instead."""
        limit = _limit(self.max_rejects) if self.max_rejects is not None else None
        return limit if isinstance(limit, int) else None

    def reject_limit(self, num_records: int) -> int:
        """The allowed number of rejects among `num_records`.

        Raises:
            ConfigError: `max_rejects` is neither a number nor a share.
        """
        if self.max_rejects is None:
            return max(num_records // 100, 100)
        limit = _limit(self.max_rejects)
        return limit if isinstance(limit, int) else int(limit * num_records)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the resulting datasets."""
        return tuple(
            Column(
                name=column_name(name),
                dtype="int32" if self.fields.columns.get(name) == "int64" else "float32",
            )
            for name in self.token_columns
        )

    def on_damage(self, found: list[JsonObject]) -> OnDamage:
        """The handler for a file that cannot be read further: stop, or note it in `found` and
        continue.
        """
        return (
            stop_at_damage
            if self.on_damaged_file == "stop"
            else lambda damage: found.append(asdict(damage))
        )

    def accepts(self, rejects: int, damaged: Sequence[object]) -> bool:
        """Whether these settings allow a result with this number of rejects and these damaged
        files.
        """
        return not (rejects and self.on_error == "stop") and not (
            damaged and self.on_damaged_file == "stop"
        )

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the resulting datasets, as folders inside the output; ("",) is the output
        itself.
        """
        return SPLITS if self.validation else ("",)

    def as_plan(
        self,
        tokenizer: Tokenizer,
        transform: str | None,
        template: Template | None = None,
        processor: str | None = None,
    ) -> JsonObject:
        """The settings that determine the bytes of the result, for comparison with an earlier run.

        The handling of bad records and damaged files may change: parts without any are the same
        either way.
        """
        chat = {}
        if self.chat is not None and template is not None:
            groups = self.chat.describe().values()
            chat = {f"chat.{name}": value for group in groups for name, value in group.items()}
            chat |= {
                "chat.template": f"{template.name} {template.fingerprint}",
                "chat.date": day_of(template),
            }
            chat |= {} if processor is None else {"chat.processor": processor}
        return {
            **chat,
            "version": PREPARATION.version,
            "tokenizer": tokenizer.fingerprint,
            "text_field": self.fields.text,
            "weights_field": self.fields.weights,
            "columns": dict(self.fields.columns),
            **({"token_columns": list(self.token_columns)} if self.token_columns else {}),
            "format": self.format,
            "separator": self.separator,
            "part_bytes": self.part_bytes,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            **self._begins_otherwise(tokenizer),
            "validation": self.validation,
            "keep_text": self.keep_text,
            "transform": transform,
            **({"drop_duplicates": True} if self.drop_duplicates else {}),
            **({"delimiter": self.delimiter} if self.delimiter is not None else {}),
        }

    def _begins_otherwise(self, tokenizer: Tokenizer) -> JsonObject:
        """What tells a preparation from one of earlier versions, in which a BOS that is not EOS was
        always added.
        """
        named = () if tokenizer.bos_id in (None, tokenizer.eos_id) else (tokenizer.bos_id,)
        same = self.chat is not None or self.add_bos != "auto" or tokenizer.begin_ids == named
        return {} if same else {"begin_ids": list(tokenizer.begin_ids)}


def column_name(field_name: str) -> str:
    """Name of the column of a field: its last part."""
    return field_name.rpartition(".")[2]


def _limit(given: int | float | str) -> int | Decimal:
    """A number of records, or a share of them as a decimal from 0 to 1, exact: 0.29 of 100 is
    29.
    """
    text = str(given).strip()
    if text.isdecimal():
        return int(text)
    try:
        share = Decimal(text.removesuffix("%"))
        if text.endswith("%") and 0 <= share <= 100:
            return share / 100
        if not text.endswith("%") and 0 <= share < 1:
            return share
    except ArithmeticError:
        pass
    raise ConfigError(
        "max_rejects must be a number of records (1000), or a share of them as a percentage "
        f"(1%) or a decimal below 1 (0.01); got {given!r}"
    )


def fingerprint(value: object) -> str:
    """A short hash of JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
