"""Settings of `prepare` given as keywords, which are typed so that editors complete them.

A test checks that their names and types equal those of the settings classes, which document them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from penstock.chat import Boundary, Template
from penstock.chat.masks.mask_settings import MaskKeywords
from penstock.core.errors import ConfigError
from penstock.core.suggestions import refuse_unknown
from penstock.data.prepare.chat_settings import ChatSettings, chat_names
from penstock.data.prepare.settings import Choice, PrepareSettings
from penstock.data.sources import Fields

FIELD_OPTIONS = {"text_field": "text", "weights_field": "weights", "columns": "columns"}
"""Keyword → the field of `Fields` that it gives."""

PARAMETERS = (
    "tokenizer",
    "output",
    "template",
    "settings",
    "transform",
    "processes",
    "executor",
    "overwrite",
    "progress",
    "verbose",
)
"""Parameters of `prepare` that stand in its signature, which a mistyped keyword may mean too."""


class ChatKeywords(MaskKeywords, total=False):
    """Settings of chats that are also keywords of `prepare`, those of the mask included; see
    `ChatOptions`.
    """

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
    """Settings that make records conversations, side by side: `prepare(…,
    chat=ps.ChatOptions(mask_history=True))`.

    A plain dict of keywords, so `chat={"mask_history": True}` is the same. `penstock prepare
    --help` says what each means.
    """

    template: Template | str | Path
    fields: Mapping[str, str]


class PrepareOptions(ChatKeywords, total=False):
    """Keywords of `prepare`: the fields of `PrepareSettings`, of `Fields`, and settings of
    chats.
    """

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
    if not isinstance(
        options.get("fields", settings.fields), Fields
    ):  # those of chats have the same name
        known.remove("fields")
    about_chats = {
        name: value for name, value in options.items() if name in chat_names() and name not in known
    }
    chat = _chat_settings(options.get("chat", settings.chat))
    if about_chats and chat is None and "template" not in options:
        raise ConfigError(
            f"{next(iter(about_chats))} is for chats: give a template, a .jinja file or auto"
        )
    named = {FIELD_OPTIONS[name]: value for name, value in options.items() if name in FIELD_OPTIONS}
    chosen = {name: value for name, value in options.items() if name in known}
    if chat is not None or about_chats:
        chosen["chat"] = (chat or ChatSettings()).merge(about_chats)
    if named:
        base: Fields = chosen.get("fields", settings.fields)
        chosen["fields"] = replace(base, **named)
    return replace(settings, **chosen)


def _chat_settings(given: object) -> ChatSettings | None:
    """Settings of chats from `ChatOptions`; others as they are."""
    if isinstance(given, Mapping):
        return ChatSettings().merge(given)
    if given is not None and not isinstance(given, ChatSettings):
        raise ConfigError(
            f"chat must be penstock.ChatOptions(…), such as mask_history=True, got {given!r}"
        )
    return given
