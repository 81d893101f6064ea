"""What prepare is told, checked, and what of it decides the bytes of the result."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal, final

from penstock.chat import Template
from penstock.errors import ConfigError
from penstock.prepare.chat_settings import CHAT_PART_BYTES, ChatSettings, day_of
from penstock.sources import FORMATS, Fields, OnDamage, stop_at_damage

Choice = Literal["auto", "yes", "no"]
FORMAT_VERSION = 1
"""Changes when prepare gives other bytes for the same settings, so that old parts are not mixed with new ones."""


RETIRED = ("on_error",)
"""Keys of `as_plan` in earlier versions that no longer decide anything."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """Settings of a preparation that decide its result."""

    fields: Fields = field(default_factory=Fields)
    """Which fields of a record are read."""

    format: str | None = None
    """Raw format; None goes by the file names."""

    separator: str | None = None
    """Plain text: what stands between documents; None: a file is a document."""

    part_bytes: int | None = None
    """Raw bytes of a part, about; a part becomes a shard. None: 64 MiB, more for terabytes."""

    add_bos: Choice = "auto"
    """BOS before each document. auto: when the tokenizer has one that is not also its EOS."""

    add_eos: Choice = "auto"
    """EOS after each document. auto: when the tokenizer has one."""

    validation: float = 0.0
    """Share of documents that go to `validation`, the rest to `train`, by a hash of the text. 0: no split."""

    keep_text: bool = False
    """Store the text beside its tokens."""

    on_error: Literal["stop", "skip"] = "stop"
    """At a record that cannot be read: stop, or skip it and write it to rejected.jsonl."""

    on_damaged_file: Literal["stop", "skip"] = "stop"
    """At a file that was cut or is damaged: stop, or go on without what cannot be read of it, which the report and the
    manifest count. "skip" reads compressed files twice: of one whose data are wrong nothing is used."""

    max_rejects: int | float | str | None = None
    """With "skip": more rejects than this are an error. A whole number (1000) counts records; a percentage ("1%") or a
    decimal below 1 (0.01) is a share of all records, judged at the end. None: 1%, or 100 records where that is more."""

    chat: ChatSettings | None = None
    """Records are conversations, and become documents with loss weights; None: they are texts."""

    def __post_init__(self) -> None:
        if self.chat is not None:
            self._accept_chats()
        for name, known in (("add_bos", ("auto", "yes", "no")), ("add_eos", ("auto", "yes", "no"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        for name in ("on_error", "on_damaged_file"):
            if getattr(self, name) not in ("stop", "skip"):
                raise ConfigError(f"{name} must be stop or skip; got {getattr(self, name)!r}")
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}; got {self.format!r}")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation must be a share in [0, 1); got {self.validation}")
        if self.part_bytes is not None and self.part_bytes < 1:
            raise ConfigError(f"part_bytes must be >= 1; got {self.part_bytes}")
        self.reject_limit(0)

    def _accept_chats(self) -> None:
        """Read whole records, in smaller parts; refuse what is about texts."""
        for name, default in (("add_bos", "auto"), ("add_eos", "auto"), ("separator", None)):
            if getattr(self, name) != default:
                raise ConfigError(f"{name} is for texts; of chats the template says what is written: leave it out")
        if replace(self.fields, whole=False) != Fields():
            raise ConfigError(
                "text_field, weights_field and columns are for texts; chats are read whole: "
                "say with field_messages and the like where the messages are"
            )
        object.__setattr__(self, "fields", Fields(whole=True))
        if self.part_bytes is None:
            object.__setattr__(self, "part_bytes", CHAT_PART_BYTES)

    @property
    def reject_count(self) -> int | None:
        """How many rejects are fine whatever the number of records; None where a share is."""
        limit = _limit(self.max_rejects) if self.max_rejects is not None else None
        return limit if isinstance(limit, int) else None

    def reject_limit(self, num_records: int) -> int:
        """How many rejects are still fine among `num_records`.

        Raises:
            ConfigError: `max_rejects` is neither a number nor a share.
        """
        if self.max_rejects is None:
            return max(num_records // 100, 100)
        limit = _limit(self.max_rejects)
        return limit if isinstance(limit, int) else int(limit * num_records)

    def on_damage(self, found: list[dict[str, Any]]) -> OnDamage:
        """What is done where a file cannot be read further: stop, or note it in `found` and go on."""
        return stop_at_damage if self.on_damaged_file == "stop" else lambda damage: found.append(asdict(damage))

    def accepts(self, rejects: int, damaged: Sequence[Any]) -> bool:
        """Whether a result with so many rejects, and with these damaged files, is one of these settings."""
        return not (rejects and self.on_error == "stop") and not (damaged and self.on_damaged_file == "stop")

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the datasets that come out, as folders inside the output; ("",) is the output itself."""
        return ("train", "validation") if self.validation else ("",)

    def as_plan(self, tokenizer: Any, transform: str | None, template: Template | None = None) -> dict[str, Any]:
        """What decides the bytes of the result, for comparing with an earlier run.

        What is done about bad records and damaged files may change: parts without any are the same either way.
        """
        chat = {}
        if self.chat is not None and template is not None:
            groups = self.chat.describe().values()
            chat = {f"chat.{name}": value for group in groups for name, value in group.items()}
            chat |= {"chat.template": f"{template.name} {template.fingerprint}", "chat.date": day_of(template)}
        return {
            **chat,
            "version": FORMAT_VERSION,
            "tokenizer": tokenizer.fingerprint,
            "text_field": self.fields.text,
            "weights_field": self.fields.weights,
            "columns": dict(self.fields.columns),
            "format": self.format,
            "separator": self.separator,
            "part_bytes": self.part_bytes,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "validation": self.validation,
            "keep_text": self.keep_text,
            "transform": transform,
        }


def _limit(given: int | float | str) -> int | Decimal:
    """A number of records, or a share of them as a decimal from 0 to 1, exact: 0.29 of 100 is 29."""
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
        "max_rejects must be a number of records (1000), or a share of them as a percentage (1%) or a decimal below 1 "
        f"(0.01); got {given!r}"
    )


def fingerprint(value: Any) -> str:
    """A short hash of JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
