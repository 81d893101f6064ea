"""Nulls that a columnar format added to the objects of a record are removed; nulls that were
written stay.

A column of structs gives every object the fields of all, so the arguments of one call get the names
of another's with null, and a template would write them. Who added a null is known from where the
record comes from:

- JSON: nobody did. All nulls stay.
- Arrow, Parquet, `datasets`: all nulls of structs were added, but not those in columns of JSON or
  of maps.
- A Python object may be a row of such a table. It is taken for one where objects in the same place
  have the same names in the same order, and some have nulls: people and JSON leave missing fields
  out.

Two kinds are in doubt even so, and a JSON schema settles them: an argument that its tool requires
and that may be null keeps its null, and so does the `default` of a parameter that may be null. In a
Python object a null for a name that is not among those that the tool declares was added.

The nulls of messages themselves (`tool_calls: null`) stay, because nothing tells them from a
missing field.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.columnar import OwnNulls, as_plain, has_none
from penstock.core.json_values import JsonMapping, JsonObject

_TOOL_FIELDS = ("tools", "functions")
_SCHEMAS = ("parameters", "input_schema", "inputSchema")
_ROLES = ("role", "from")

Schema = JsonMapping
Removed = Counter[str]
"""Place, such as `messages[].tool_calls[].function.arguments` → number of nulls that were removed
there.
"""


def without_added_nulls(
    record: JsonObject, *, columnar: bool = False
) -> tuple[JsonObject, Removed]:
    """A record without the nulls that a columnar format added, and their places.

    Args:
        record: A record with Python's lists and dicts.
        columnar: It comes from a columnar format; False: it is a Python object, which may.
    """
    removed: Removed = Counter()
    if not _has_null(record):
        return record, removed
    places = None if columnar else _columnar_places(record)
    return _Remover(_schemas(record), places, removed).object(record, "", None), removed


def as_record(value: object) -> Any:
    """A Python object as a record: with lists for NumPy arrays, and without the nulls of a columnar
    format.
    """
    plain = as_plain(value)
    return without_added_nulls(plain)[0] if isinstance(plain, dict) else plain


class _Remover:
    """Copies a record without added nulls; what holds none is not copied."""

    def __init__(
        self, tools: Mapping[str, Schema], places: frozenset[str] | None, removed: Removed
    ) -> None:
        self.tools, self.places, self.removed = tools, places, removed

    def value(self, value: object, place: str, schema: Schema | None) -> Any:
        """A value in a place; `schema` is that of arguments, where it is known."""
        if isinstance(value, OwnNulls):
            return value
        if isinstance(value, dict):
            return self.object(value, place, schema)
        if isinstance(value, list | tuple):
            items = None if schema is None else schema.get("items")
            inner = items if isinstance(items, Mapping) else None
            return [self.value(item, f"{place}[]", inner) for item in value]
        return value

    def object(self, value: JsonObject, place: str, schema: Schema | None) -> JsonObject:
        """An object in a place."""
        kept: JsonObject = {}
        inside = _known(schema, "properties")
        for key, item in value.items():
            if item is None:
                if place and self._is_added(key, value, place, schema):
                    self.removed[place] += 1
                    continue
            elif isinstance(item, dict | list | tuple):
                own = inside.get(key)
                if key == "arguments" and isinstance(value.get("name"), str):
                    own = self.tools.get(value["name"])
                item = self.value(
                    item,
                    f"{place}.{key}" if place else key,
                    own if isinstance(own, Mapping) else None,
                )
            kept[key] = item
        return kept

    def _is_added(self, key: str, owner: JsonObject, place: str, schema: Schema | None) -> bool:
        if _is_message(owner):
            return False
        declared = _known(schema, "properties")
        if key in declared and key in _names(schema, "required") and _may_be_null(declared[key]):
            return False
        if key == "default" and _may_be_null(owner):
            return False
        if self.places is None or place in self.places:
            return True
        # No schema is null, and nobody writes an argument that the tool does not have.
        return place.endswith(".properties") or (bool(declared) and key not in declared)


def _is_message(value: JsonMapping) -> bool:
    return any(isinstance(value.get(key), str) for key in _ROLES)


def _known(schema: Schema | None, name: str) -> JsonMapping:
    found = None if schema is None else schema.get(name)
    return found if isinstance(found, Mapping) else {}


def _names(schema: Schema | None, name: str) -> list[object]:
    found = None if schema is None else schema.get(name)
    return list(found) if isinstance(found, list | tuple) else []


def _may_be_null(schema: object) -> bool:
    """Whether a JSON schema says that null is a value."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    if (
        kinds == "null"
        or (isinstance(kinds, list | tuple) and "null" in kinds)
        or schema.get("nullable") is True
    ):
        return True
    if None in _names(schema, "enum"):
        return True
    return any(_may_be_null(one) for name in ("anyOf", "oneOf") for one in _names(schema, name))


def _schemas(record: JsonMapping) -> dict[str, Schema]:
    """Name of each tool of a record → the JSON schema of its arguments."""
    found: dict[str, Schema] = {}
    for name, value in record.items():
        value = _parsed(value) if name in _TOOL_FIELDS else value
        for tool in value if isinstance(value, list | tuple) else ():
            tool = _parsed(tool) if name in _TOOL_FIELDS else tool
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                continue
            given = next((function[key] for key in _SCHEMAS if function.get(key) is not None), None)
            schema = _parsed(given)
            if isinstance(schema, Mapping):
                found[function["name"]] = schema
    return found


def _parsed(value: object) -> object:
    """A value, decoded where it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _has_null(value: object, *, top: bool = True) -> bool:
    """Whether an object below the record itself has a null that is neither a message's nor known to
    be its own.
    """
    if isinstance(value, dict):
        if (
            not top
            and not isinstance(value, OwnNulls)
            and has_none(value)
            and not _is_message(value)
        ):
            return True
        return any(
            _has_null(item, top=False)
            for item in value.values()
            if isinstance(item, dict | list | tuple)
        )
    return isinstance(value, list | tuple) and any(_has_null(item, top=False) for item in value)


def _columnar_places(record: JsonObject) -> frozenset[str]:
    """Places whose objects may have been filled up by a columnar format; none without a sign of
    one.
    """
    groups: dict[str, tuple[str, list[JsonObject]]] = {}
    for place, above, value in _objects(record, "", ""):
        groups.setdefault(place, (above, []))[1].append(value)
    uniform: dict[str, bool] = {"": True}
    is_filled = False
    for place, (above, objects) in groups.items():
        first = tuple(objects[0])
        uniform[place] = uniform.get(above, False) and all(tuple(one) == first for one in objects)
        if uniform[place] and len(objects) > 1:
            is_filled = is_filled or any(map(has_none, objects))
    return (
        frozenset(place for place, is_uniform in uniform.items() if is_uniform)
        if is_filled
        else frozenset()
    )


def _objects(value: object, place: str, above: str) -> Iterator[tuple[str, str, JsonObject]]:
    """Each object below a value with its place and that of the object around it, outer ones
    first.
    """
    if isinstance(value, dict):
        if place:
            yield place, above, value
        for key, item in value.items():
            if isinstance(item, dict | list | tuple):
                yield from _objects(item, f"{place}.{key}" if place else key, place)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _objects(item, f"{place}[]", above)
