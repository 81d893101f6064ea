"""Objects of columnar formats (Arrow, Parquet, `datasets`, pandas, NumPy) as plain Python values.

In such a format all objects of a column have the same fields, so one that lacks a field gets a null there. An object
that was stored as JSON text or as a map has just the fields that it was written with; if one of them is null, it
becomes an `OwnNulls`, so that the two kinds of nulls stay apart.
"""

from collections.abc import Mapping
from typing import Any, final

import numpy as np


@final
class OwnNulls(dict[str, Any]):
    """An object whose nulls were written as such: no format added them."""


def as_plain(value: Any) -> Any:
    """A value with lists for NumPy arrays, dicts for other mappings, and Python's numbers for NumPy's, at any depth.

    What holds none of these is returned itself, not a copy.
    """
    if isinstance(value, dict):
        return _changed(value)
    if isinstance(value, list | tuple):
        items = [as_plain(item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, np.ndarray):  # not a picture or a table of numbers, which is no list of objects
        return as_plain(value.tolist()) if value.ndim < 2 or value.dtype == object else value
    if isinstance(value, np.generic):
        return value.item()
    return _changed(dict(value)) if isinstance(value, Mapping) else value


def _changed(value: dict[Any, Any]) -> dict[Any, Any]:
    items = {key: as_plain(item) for key, item in value.items()}
    return value if all(items[key] is item for key, item in value.items()) else items
