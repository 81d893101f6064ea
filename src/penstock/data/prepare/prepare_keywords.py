"""Keyword arguments of `prepare`, and `ChatOptions`."""

# Written by `make keywords` from the classes that declare these settings.

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from penstock.chat import Boundary, Template
from penstock.chat.masks.mask_keywords import MaskKeywords
from penstock.chat.records.cleaning import TooLong
from penstock.core.json_values import JsonMapping
from penstock.data.prepare.chat_settings import ChatSettings
from penstock.data.prepare.settings import Choice
from penstock.data.sources import Fields
from penstock.data.sources.formats import Format


class ChatKeywords(MaskKeywords, total=False):
    """Settings of chats that are also keywords of `prepare`; see `ChatOptions`."""

    chat_template_kwargs: JsonMapping
    date: str | None
    role_boundaries: Sequence[Boundary]
    processor: str | Path | None
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
    call_ids: Literal["keep", "short"]
    join_text_parts: bool
    media: Literal["error", "drop"]
    oasst_paths: Literal["best", "all", "ranked"]
    answers: Literal["best", "tree", "separate"]
    shared_weights: Literal["sum", "once"]
    trim_trailing: bool
    drop_untrained: bool
    max_tokens: int | None
    too_long: TooLong
    probe: Literal["decode", "header"]
    alpha: Literal["white", "black", "ignore", "error"]
    animated: Literal["first", "error"]
    max_pixels: int
    min_pixels: int
    video_frames: int
    max_video_pixels: int
    max_seconds: float
    shrink_pixels: int | None
    max_ratio: float
    image_folder: str | None
    image_storage: Literal["copy", "reference"]
    verify_all: bool
    layout: str


class ChatOptions(ChatKeywords, total=False):
    """Settings that make records conversations, side by side: `prepare(…,
    chat=ps.ChatOptions(mask_history=True))`.

    A plain dict of keywords, so `chat={"mask_history": True}` is the same. `penstock prepare
    --help` says what each means.
    """

    template: Template | str | Path
    fields: Mapping[str, str]


class PrepareOptions(ChatKeywords, total=False):
    """Keywords of `prepare`: fields of `PrepareSettings`, of `Fields`, and settings of chats."""

    text_field: str
    weights_field: str | None
    columns: dict[str, str]
    fields: Fields | Mapping[str, str]
    format: Format | None
    separator: str | None
    delimiter: str | None
    subset: str | None
    split: str | None
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
