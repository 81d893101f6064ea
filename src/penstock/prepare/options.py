"""Settings given as keywords become settings; unknown ones are refused, with what is known."""

from dataclasses import fields, replace
from typing import Any

from penstock.errors import ConfigError
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
    unknown = [name for name in options if name not in known and name not in _FIELD_OPTIONS]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no option of prepare; known: {', '.join([*known, *_FIELD_OPTIONS])}")
    named = {_FIELD_OPTIONS[name]: value for name, value in options.items() if name in _FIELD_OPTIONS}
    chosen = {name: value for name, value in options.items() if name in known}
    if named:
        base: Fields = chosen.get("fields", settings.fields)
        chosen["fields"] = replace(base, **named)
    return replace(settings, **chosen)
