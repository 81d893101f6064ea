"""Limits of JSON schemas, checked before anything is compiled: size, nesting, and the texts that
they prescribe.

The limits of properties and levels are those of OpenAI's structured outputs. Costs: microseconds
for each part.
"""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject

MOST_PROPERTIES, MOST_LEVELS, MOST_PARTS = 5000, 10, 10_000
"""Properties of all objects; objects within objects; schemas within the schema, such as
alternatives.
"""
MOST_STATES = 10_000
"""Divisor of `multipleOf`, without zeros at its end."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
)
_WITHIN = frozenset(
    {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}
)
"""Keywords whose schemas are those of values within an object."""


def check_schema(schema: str) -> Iterator[str]:
    """Refuse a schema that is too large.

    Returns:
        The texts that stand in it as values and names: of const, enum, properties and required.

    Raises:
        ConfigError: There are too many properties, levels or parts; says how many are allowed.
    """
    root = json.loads(schema)
    properties = parts = 0
    literals = []
    waiting: list[tuple[Any, int]] = [(root, 0)]
    while waiting:
        part, level = waiting.pop()
        if not isinstance(part, dict):
            continue
        own = part.get("properties")
        properties, parts = properties + (len(own) if isinstance(own, dict) else 0), parts + 1
        level += part.get("type") == "object" or not _WITHIN.isdisjoint(part)
        if properties > MOST_PROPERTIES:
            raise _too_large(f"more than {MOST_PROPERTIES:,} properties", "leave some out")
        if level > MOST_LEVELS:
            raise _too_large(f"objects in more than {MOST_LEVELS} levels", "make it flatter")
        if parts > MOST_PARTS:
            raise _too_large(f"more than {MOST_PARTS:,} schemas within it", "leave some out")
        _check_multiple(part.get("multipleOf"))
        literals += [part.get(name) for name in ("const", "enum", "required")]
        literals += list(own) if isinstance(own, dict) else []
        waiting += ((inner, level) for inner in _inner(part))
    return _texts(literals)


def _check_multiple(value: object) -> None:
    """The grammar of a multiple has as many states as the divisor without zeros at its end."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return
    digits = Decimal(str(value)).normalize().as_tuple().digits
    if len(digits) > 6 or int("".join(map(str, digits))) > MOST_STATES:
        raise ConfigError(
            f"json_schema: multipleOf is {value!r:.30}, at most {MOST_STATES:,} is allowed; "
            "use a smaller one"
        )


def _inner(part: JsonObject) -> Iterator[Any]:
    """All schemas directly within one."""
    for name in _MAPS:
        if isinstance(part.get(name), dict):
            yield from part[name].values()
    for name in _LISTS:
        if isinstance(part.get(name), list):
            yield from part[name]
    yield from (part[name] for name in _SINGLE if isinstance(part.get(name), dict))


def _texts(values: list[object]) -> Iterator[str]:
    """All texts within JSON values."""
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value


def _too_large(found: str, cure: str) -> ConfigError:
    return ConfigError(f"json_schema: it has {found}, which is the limit; {cure}")
