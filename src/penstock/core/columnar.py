"""Objects of columnar formats (Arrow, Parquet, `datasets`, pandas, NumPy) as plain Python values.

In such a format all objects of a column have the same fields, so one that lacks a field gets a null
there. An object that was stored as JSON text or as a map has just the fields that it was written
with; if one of them is null, it becomes an `OwnNulls`, so that the two kinds of nulls stay apart.
"""

from collections.abc import Mapping
from typing import final

import numpy as np

from penstock.core.json_values import JsonObject, JsonValue

_MEDIA = ("image", "audio", "video", "sound", "frame", "picture", "pixel", "array")
"""How fields begin that hold media as arrays."""


@final
class OwnNulls(JsonObject):
    """An object whose nulls were written as such: no format added them."""


def has_none(value: Mapping[str, object]) -> bool:
    """Whether a value of an object is null; `None in …` would compare arrays."""
    return any(item is None for item in value.values())


def as_plain(value: object) -> JsonValue:
    """A value with lists for NumPy arrays, dicts for other mappings, and Python's numbers for
    NumPy's, at any depth.

    Arrays of numbers stay what they are where they are pictures or sounds: with several dimensions,
    or under the name of a medium. What holds none of these is returned itself, not a copy.
    """
    return _plain(value, is_medium=False)


def _plain(value: object, *, is_medium: bool) -> JsonValue:
    if isinstance(value, dict):
        return _changed(value)
    if isinstance(value, list | tuple):
        items = [_plain(item, is_medium=is_medium) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, np.ndarray):
        is_list = value.dtype == object or (value.ndim == 1 and not is_medium)
        return _plain(value.tolist(), is_medium=is_medium) if is_list else value
    if isinstance(value, np.generic):
        return value.item()
    return _changed(dict(value)) if isinstance(value, Mapping) else value


def _changed(value: JsonObject) -> JsonObject:
    items = {
        key: _plain(item, is_medium=str(key).startswith(_MEDIA)) for key, item in value.items()
    }
    return value if all(items[key] is item for key, item in value.items()) else items
