"""Settings of `prepare` given as keywords, put over given settings."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.suggestions import refuse_unknown
from penstock.data.prepare.chat_settings import ChatSettings, chat_names
from penstock.data.prepare.prepare_keywords import PrepareOptions
from penstock.data.prepare.settings import PrepareSettings
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
