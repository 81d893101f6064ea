"""Options that several verbs share."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.core.declarations import declared
from penstock.core.errors import ConfigError
from penstock.use.cli.declared_options import Option, options

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
"""Escape → its character: what cannot be typed inside plain shell quotes."""
Given = dict[str, Any]
"""The settings that were given, which a verb passes to the function of Python users."""


def unescape(text: str) -> str:
    r"""Replace escapes: `\n\n` as typed → two newlines.

    Raises:
        ConfigError: Something else follows a backslash.
    """
    strange = re.search(r"\\[^ntr\\]|\\$", re.sub(r"\\\\", "", text))
    if strange:
        raise ConfigError(
            f"{strange[0]!r} is not a known escape; expected one of {' '.join(ESCAPES)}"
        )
    return re.sub(r"\\.", lambda found: ESCAPES[found[0]], text)


SOURCES = "Files, folders, globs (quoted) or URLs such as s3://… and hf://datasets/OWNER/NAME."
ESCAPED = Option(read=unescape)
MODEL = options("use.runs.run.open_run", path=Option(keyword="model", argument=True, metavar="RUN"))
OPENING = options("use.runs.opening.load_opened", "context_length", "device", "threads")
_OWN = "the model's own"
SAMPLING = options(
    "learn.generation.settings.Sampling",
    temperature=Option(default=f"{_OWN}, else 0.8"),
    top_k=Option(default=f"{_OWN}; 0: all", read=lambda found: found or None),
    top_p=Option(default=_OWN),
    min_p=Option(default=f"{_OWN}, else 0"),
    seed=Option(),
    stop=Option(),
)
FIELDS = options("data.sources.records.Fields", text=Option(keyword="text_field"))
ASSIGNMENTS = options(
    "use.runs.training.train", assignments=Option(flag="--set", metavar="KEY=VALUE")
)
BARE_TOKENS = options("data.shards.opening.open_dataset", "dtype", "eos_id")
CHAT = (
    options("data.prepare.chat_settings.ChatSettings", "template", "processor", panel="Chats"),
    options(
        "chat.masks.mask_settings.MaskSettings",
        "train_on_inputs",
        "train_on_eos",
        "train_on_eot",
        "train_on_reasoning",
        "mask_history",
        "on_missing_terminator",
        "on_rewrite",
        "on_merged_prompt",
        "trained_control_text",
        "allow_forged",
        panel="Chats",
        roles_to_train=Option(read=lambda text: tuple(text.split(",")), default="assistant"),
    ),
    options(
        "chat.records.layout_settings.LayoutSettings",
        "answers",
        "oasst_paths",
        "media",
        panel="Chats",
    ),
    options("chat.records.cleaning.CleaningSettings", "max_tokens", "too_long", panel="Chats"),
    options(
        "media.images.ImageSettings",
        "image_folder",
        "image_storage",
        "probe",
        "shrink_pixels",
        "video_frames",
        "verify_all",
        panel="Chats",
    ),
)
"""All that decides how a conversation becomes a document, apart from what only `--set` gives."""


def chat_settings() -> list[str]:
    """Names of all settings of chats, those that only `--set` gives included."""
    return [*declared("penstock.data.prepare.prepare_keywords.ChatOptions")]


ChatConfig = Annotated[
    Path | None,
    typer.Option(
        "--chat-config",
        metavar="FILE",
        help=(
            "YAML file of chat settings: those of these options, and how records are read "
            "(layout, field_messages, message_property_mappings, roles, …)."
        ),
        rich_help_panel="Chats",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")]
"""A flag takes no value, hence the empty metavar here and elsewhere."""
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Hide progress.")]
