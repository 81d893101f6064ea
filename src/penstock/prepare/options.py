"""Settings given as keywords become settings; unknown ones are refused, with what is known."""

from dataclasses import fields, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.prepare.chat_settings import ChatSettings, chat_names
from penstock.prepare.settings import PrepareSettings
from penstock.sources import Fields

_FIELD_OPTIONS = {"text_field": "text", "weights_field": "weights", "columns": "columns"}


def merge_options(settings: PrepareSettings | None, options: dict[str, Any]) -> PrepareSettings:
    """Put keywords over settings.

    Raises:
        ConfigError: A keyword is not known.
    """
    settings = settings or PrepareSettings()
    known = [field.name for field in fields(PrepareSettings)]
    known_all = [*known, *_FIELD_OPTIONS, *(name for name in chat_names() if name not in known)]
    unknown = [name for name in options if name not in known_all]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no option of prepare; known: {', '.join(known_all)}")
    about_chats = {name: value for name, value in options.items() if name in chat_names() and name not in known}
    chat: ChatSettings | None = options.get("chat", settings.chat)
    if about_chats and chat is None and "template" not in options:
        raise ConfigError(f"{next(iter(about_chats))} is for chats: give a template, a .jinja file or auto")
    named = {_FIELD_OPTIONS[name]: value for name, value in options.items() if name in _FIELD_OPTIONS}
    chosen = {name: value for name, value in options.items() if name in known}
    if about_chats:
        chosen["chat"] = (chat or ChatSettings()).merge(about_chats)
    if named:
        base: Fields = chosen.get("fields", settings.fields)
        chosen["fields"] = replace(base, **named)
    return replace(settings, **chosen)
