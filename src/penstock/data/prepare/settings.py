"""What prepare is asked for, checked, and what of it decides the bytes of the result.

Settings of `prepare` for chats: the template, how records are read, what is trained, what is cleaned up.

All settings have different names, so that they can be given together: as keywords, in a file, on the command line.

The settings of `prepare`, checked, and which of them determine the bytes of the result.

They can also be given as keywords, which are typed so that editors complete them. A test checks that the names and
types of the keywords equal those of the settings classes, which document them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, final

from penstock.chat import Boundary, ChatEncoder, LayoutSettings, MaskSettings, Template, load_template
from penstock.chat.masks.mask_settings import MaskKeywords
from penstock.chat.records.cleaning import CleaningSettings
from penstock.chat.records.layout_settings import resolve_roles
from penstock.chat.render.template import own_template
from penstock.core.errors import ConfigError
from penstock.core.formats import PREPARATION
from penstock.core.suggestions import refuse_unknown
from penstock.data.shards.format.layout import Column
from penstock.data.sources import Fields, OnDamage
from penstock.data.sources.formats import FORMATS, check_delimiter
from penstock.data.sources.records import stop_at_damage
from penstock.media.images import ImageSettings
from penstock.media.processor import load_processor
from penstock.tokenizers import Tokenizer

CHAT_PART_BYTES = 4 << 20
"""Approximate raw bytes of a part: a conversation takes far more time per byte than a text."""

OF_TEMPLATE = ("template", "date", "chat_template_kwargs", "role_boundaries", "processor")
"""Settings of the template itself."""

CROSS_CHECK = "cross-check"
"""Name of the role boundaries in the result of `describe`."""

GROUPS: dict[str, type] = {
    "layout": LayoutSettings,
    "mask_settings": MaskSettings,
    "cleaning": CleaningSettings,
    "images": ImageSettings,
}
"""The other settings, by the field of `ChatSettings` that holds them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Settings for records that are conversations."""

    template: Template | str | Path = "auto"
    """A .jinja file, a folder with a tokenizer, the text of a template, the name of a family that has one (chatml), or
    auto: the tokenizer's own."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as `enable_thinking`; those of a record take precedence."""

    date: str | None = None
    """The date for templates that write one, such as 2026-12-31; None: the day on which the preparation begins."""

    role_boundaries: Sequence[Boundary] = ()
    """Markers of turns for checking the masks, each with role, start, end, also as mappings; empty: those of the
    template's family."""

    processor: str | Path | None = None
    """A model's folder, or its name on the Hub, with a processor of transformers: conversations may then have images,
    and `template: auto` is the processor's. None: images are refused, or dropped (`media: drop`)."""

    layout: LayoutSettings = field(default_factory=LayoutSettings)
    """How records become conversations."""

    mask_settings: MaskSettings = field(default_factory=MaskSettings)
    """What is trained."""

    cleaning: CleaningSettings = field(default_factory=CleaningSettings)
    """What is trimmed and dropped, and the maximum length of a conversation."""

    images: ImageSettings = field(default_factory=ImageSettings)
    """Which images are accepted, and how they are stored."""

    def __post_init__(self) -> None:
        given: Sequence[Any] = self.role_boundaries
        boundaries = tuple(one if isinstance(one, Boundary) else Boundary.from_mapping(one) for one in given)
        object.__setattr__(self, "role_boundaries", boundaries)
        if self.date is not None:
            try:
                datetime.strptime(self.date, "%Y-%m-%d")
            except (ValueError, TypeError):
                raise ConfigError(f"date must be a day such as 2026-12-31, got {self.date!r}") from None
        # Role names after mapping; a name that no message can have is refused.
        roles = resolve_roles(self.mask_settings.roles_to_train, self.layout.roles)
        object.__setattr__(self, "mask_settings", replace(self.mask_settings, roles_to_train=roles))

    @property
    def keeps_answers(self) -> bool:
        """Whether all answers of a record are kept, as one document."""
        return self.layout.answers != "best"

    def merge(self, options: Mapping[str, Any]) -> "ChatSettings":
        """These settings, overridden by others by name: `{"mask_history": True, "roles": …}`.

        Raises:
            ConfigError: A name is unknown, or a value is out of range.
        """
        refuse_unknown(options, chat_names(), "a setting of chats")
        merged = {name: options[name] for name in OF_TEMPLATE if name in options}
        for group, kind in GROUPS.items():
            chosen = {name: options[name] for name in _names(kind) if name in options}
            merged[group] = replace(getattr(self, group), **chosen)
        return replace(self, **merged)

    def open(self, tokenizer: Tokenizer, day: str | None) -> ChatEncoder:
        """The encoder that these settings describe.

        Args:
            tokenizer: The tokenizer; the template `auto` is its own.
            day: The date that an earlier run of this preparation has fixed, if any.

        Raises:
            ConfigError: There is no template.
        """
        template = self.template
        processor = None if self.processor is None else load_processor(self.processor)
        if template == "auto" and processor is not None and isinstance(processor.template, str):
            template = replace(own_template(tokenizer, source=processor.template), name=f"of {processor.name}")
        elif template == "auto":
            template = own_template(tokenizer)
        elif not isinstance(template, Template):
            template = load_template(template, tokenizer=tokenizer)
        template = replace(template, variables={**template.variables, **self.chat_template_kwargs})
        if template.now is None and "strftime_now" in template.source:
            now = datetime.fromisoformat(self.date or day or date.today().isoformat())
            template = replace(template, now=now)
        return ChatEncoder(tokenizer, template, self.mask_settings, self.role_boundaries, processor=processor)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Every setting in effect except the template, as plain JSON values."""
        layout = {name: getattr(self.layout, name) for name in _names(LayoutSettings)}
        described = {
            "layout": layout,
            "mask_settings": dict(self.mask_settings.describe()),
            "cleaning": asdict(self.cleaning),
        }
        if self.processor is not None:
            described["images"] = {"processor": str(self.processor), **self.images.describe()}
        if self.role_boundaries:
            described[CROSS_CHECK] = {"role_boundaries": [asdict(one) for one in self.role_boundaries]}
        plain: dict[str, dict[str, Any]] = json.loads(json.dumps(described, default=dict))
        return plain


def chat_names() -> list[str]:
    """The names of all settings of chats."""
    return [*OF_TEMPLATE, *(name for kind in GROUPS.values() for name in _names(kind))]


def day_of(template: Template) -> str | None:
    """The date that a template writes; None: it writes none."""
    return template.now.date().isoformat() if template.now is not None else None


def _names(settings: type) -> list[str]:
    return [one.name for one in fields(settings) if one.init]


Choice = Literal["auto", "yes", "no"]


RETIRED = ("on_error",)
"""Keys of `as_plan` in earlier versions that no longer have an effect."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """Settings of a preparation that determine its result."""

    fields: Fields = field(default_factory=Fields)
    """Which fields of a record are read."""

    format: str | None = None
    """Raw format; None goes by the file names and first bytes."""

    separator: str | None = None
    """Plain text: the text between documents; None: each file is one document."""

    delimiter: str | None = None
    """CSV and TSV: the character between cells; None: a tab in TSV, else a comma."""

    part_bytes: int | None = None
    """Approximate raw bytes of a part; each part becomes a shard. None: 64 MiB, more for terabytes."""

    add_bos: Choice = "auto"
    """BOS before each document. auto: if the tokenizer's own encoding puts it there. What trains on the dataset
    begins texts likewise when it is used."""

    add_eos: Choice = "auto"
    """EOS after each document. auto: when the tokenizer has one."""

    validation: float = 0.0
    """Share of documents that go to `validation`, the rest to `train`, by a hash of the text. 0: no split."""

    keep_text: bool = False
    """Store the text next to its tokens."""

    drop_duplicates: bool = False
    """Of documents with the same tokens, keep the first in input order, across all sources and splits. Hashes stay
    next to the dataset, 24 bytes a document."""

    on_error: Literal["stop", "skip"] = "stop"
    """At a record that cannot be read: stop, or skip it and write it to rejected.jsonl."""

    on_damaged_file: Literal["stop", "skip"] = "stop"
    """At a file that was cut or is damaged: stop, or continue without the unreadable part, which the report and the
    manifest count. "skip" reads compressed files twice, and uses nothing of a file with wrong data."""

    max_rejects: int | float | str | None = None
    """With "skip": more rejects than this are an error. A whole number (1000) counts records; a percentage ("1%") or a
    decimal below 1 (0.01) is a share of all records, judged at the end. None: 1%, or 100 records where that is more."""

    token_columns: Sequence[str] = ()
    """Fields that become columns, a number for each token. Texts: among `fields.columns`, of type int64, float64 (the
    same for all tokens) or ranges (by character; 0 elsewhere). Chats: a number, or a list of one for each message. A
    record without the field has 0."""

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
        check_delimiter(self.delimiter)
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation must be a share in [0, 1); got {self.validation}")
        if self.part_bytes is not None and self.part_bytes < 1:
            raise ConfigError(f"part_bytes must be >= 1; got {self.part_bytes}")
        object.__setattr__(self, "token_columns", tuple(self.token_columns))
        for name in self.token_columns if self.chat is None else ():
            if self.fields.columns.get(name) not in ("int64", "float64", "ranges"):
                raise ConfigError(
                    f"token_columns: {name!r} must be among columns, with type int64, float64 or ranges; found "
                    f"{self.fields.columns.get(name) or 'nothing'} (--column {name}:float64)"
                )
        self.reject_limit(0)

    def _accept_chats(self) -> None:
        """Read whole records, in smaller parts; refuse what is about texts."""
        for name, default in (("add_bos", "auto"), ("add_eos", "auto"), ("separator", None)):
            if getattr(self, name) != default:
                raise ConfigError(f"{name} is for texts; for chats the template does this: leave it out")
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
            Column(name=column_name(name), dtype="int32" if self.fields.columns.get(name) == "int64" else "float32")
            for name in self.token_columns
        )

    def on_damage(self, found: list[dict[str, Any]]) -> OnDamage:
        """The handler for a file that cannot be read further: stop, or note it in `found` and continue."""
        return stop_at_damage if self.on_damaged_file == "stop" else lambda damage: found.append(asdict(damage))

    def accepts(self, rejects: int, damaged: Sequence[Any]) -> bool:
        """Whether these settings allow a result with this number of rejects and these damaged files."""
        return not (rejects and self.on_error == "stop") and not (damaged and self.on_damaged_file == "stop")

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the resulting datasets, as folders inside the output; ("",) is the output itself."""
        return ("train", "validation") if self.validation else ("",)

    def as_plan(
        self, tokenizer: Any, transform: str | None, template: Template | None = None, processor: str | None = None
    ) -> dict[str, Any]:
        """The settings that determine the bytes of the result, for comparison with an earlier run.

        The handling of bad records and damaged files may change: parts without any are the same either way.
        """
        chat = {}
        if self.chat is not None and template is not None:
            groups = self.chat.describe().values()
            chat = {f"chat.{name}": value for group in groups for name, value in group.items()}
            chat |= {"chat.template": f"{template.name} {template.fingerprint}", "chat.date": day_of(template)}
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

    def _begins_otherwise(self, tokenizer: Any) -> dict[str, Any]:
        """What tells a preparation from one of earlier versions, in which a BOS that is not EOS was always added."""
        named = () if tokenizer.bos_id in (None, tokenizer.eos_id) else (tokenizer.bos_id,)
        same = self.chat is not None or self.add_bos != "auto" or tokenizer.begin_ids == named
        return {} if same else {"begin_ids": list(tokenizer.begin_ids)}


def column_name(field_name: str) -> str:
    """Name of the column of a field: its last part."""
    return field_name.rpartition(".")[2]


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


FIELD_OPTIONS = {"text_field": "text", "weights_field": "weights", "columns": "columns"}
"""Keyword → the field of `Fields` that it gives."""

PARAMETERS = (
    "tokenizer", "output", "template", "settings", "transform", "processes", "executor", "overwrite", "progress",
    "verbose",
)  # fmt: skip
"""Parameters of `prepare` that stand in its signature, which a mistyped keyword may mean too."""


class ChatKeywords(MaskKeywords, total=False):
    """Settings of chats that are also keywords of `prepare`, those of the mask included; see `ChatOptions`."""

    chat_template_kwargs: Mapping[str, Any]
    date: str | None
    role_boundaries: Sequence[Boundary]
    # What is trimmed and dropped.
    trim_trailing: bool
    drop_untrained: bool
    max_tokens: int | None
    too_long: Literal["error", "drop", "truncate"]
    # How records become conversations: `penstock.chat.LayoutSettings`.
    layout: str
    field_messages: str | None
    field_system: str | None
    field_tools: str | None
    message_property_mappings: Mapping[str, str]
    message_field_training: str | None
    message_field_training_detail: str | None
    roles: Mapping[str, Sequence[str]]
    drop_system_message: bool
    split_thinking: bool
    thinking_key: str
    decode_arguments: bool
    call_ids: str
    join_text_parts: bool
    media: str
    oasst_paths: str
    answers: str
    shared_weights: str
    processor: str | Path | None
    probe: Literal["decode", "header"]
    alpha: Literal["white", "black", "ignore", "error"]
    animated: Literal["first", "error"]
    max_pixels: int
    min_pixels: int
    shrink_pixels: int | None
    video_frames: int
    max_video_pixels: int
    max_seconds: float
    max_ratio: float
    image_folder: str | None
    image_storage: Literal["copy", "reference"]
    verify_all: bool


class ChatOptions(ChatKeywords, total=False):
    """Settings that make records conversations, side by side: `prepare(…, chat=ps.ChatOptions(mask_history=True))`.

    A plain dict of keywords, so `chat={"mask_history": True}` is the same. `penstock prepare --help` says what each
    means.
    """

    template: Template | str | Path
    fields: Mapping[str, str]


class PrepareOptions(ChatKeywords, total=False):
    """Keywords of `prepare`: the fields of `PrepareSettings`, of `Fields`, and settings of chats."""

    fields: Fields | Mapping[str, str]
    """A mapping is that of `LayoutSettings`, for chats."""
    text_field: str
    weights_field: str | None
    columns: dict[str, str]
    format: str | None
    separator: str | None
    delimiter: str | None
    part_bytes: int | None
    add_bos: Choice
    add_eos: Choice
    validation: float
    keep_text: bool
    drop_duplicates: bool
    on_error: Literal["stop", "skip"]
    on_damaged_file: Literal["stop", "skip"]
    max_rejects: int | float | str | None
    token_columns: Sequence[str]
    chat: ChatOptions | ChatSettings | None


def merge_options(settings: PrepareSettings | None, options: Mapping[str, Any]) -> PrepareSettings:
    """Put keywords over settings.

    Args:
        settings: What holds where no keyword says otherwise; None: the defaults.
        options: As in `PrepareOptions`, and `template`.

    Raises:
        ConfigError: A keyword is not known, or a value is out of range.
    """
    settings = settings or PrepareSettings()
    known = [field.name for field in fields(PrepareSettings)]
    refuse_unknown(options, [*PARAMETERS, *PrepareOptions.__annotations__], "an option of prepare")
    if not isinstance(options.get("fields", settings.fields), Fields):  # those of chats have the same name
        known.remove("fields")
    about_chats = {name: value for name, value in options.items() if name in chat_names() and name not in known}
    chat = _chat_settings(options.get("chat", settings.chat))
    if about_chats and chat is None and "template" not in options:
        raise ConfigError(f"{next(iter(about_chats))} is for chats: give a template, a .jinja file or auto")
    named = {FIELD_OPTIONS[name]: value for name, value in options.items() if name in FIELD_OPTIONS}
    chosen = {name: value for name, value in options.items() if name in known}
    if chat is not None or about_chats:
        chosen["chat"] = (chat or ChatSettings()).merge(about_chats)
    if named:
        base: Fields = chosen.get("fields", settings.fields)
        chosen["fields"] = replace(base, **named)
    return replace(settings, **chosen)


def _chat_settings(given: Any) -> ChatSettings | None:
    """Settings of chats from `ChatOptions`; others as they are."""
    if isinstance(given, Mapping):
        return ChatSettings().merge(given)
    if given is not None and not isinstance(given, ChatSettings):
        raise ConfigError(f"chat must be penstock.ChatOptions(…), such as mask_history=True, got {given!r}")
    return given
