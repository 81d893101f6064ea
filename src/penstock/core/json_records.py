"""A dataclass from a JSON object that a stranger may have written.

The object must have exactly the fields of the dataclass, each of its type. Integers must fit 64
bits, floats must be finite, `true` is not a number, and text must be valid Unicode. The caller
checks what the values mean.
"""

import math
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

Record = TypeVar("Record")

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def record_of(
    kind: type[Record], value: object, where: str = "", *, may_lack: frozenset[str] = frozenset()
) -> Record:
    """A dataclass from a JSON object.

    Args:
        kind: The dataclass; its fields are of int, float, bool, str, None, Literal, tuples, dicts
            by name, dataclasses, or Any.
        value: The result of `json.loads`.
        where: Path to the value, for messages: "shards[3]".
        may_lack: Fields with a default that may be missing.

    Raises:
        ValueError: A field is missing, unknown, or of another type; the message names it.
    """
    known = _fields(kind)  # type: ignore[arg-type]
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'}: expected an object, found {_shown(value)}")  # noqa: TRY004  (a file's type, not a caller's)
    if known.keys() != value.keys() and (wrong := sorted((known.keys() ^ value.keys()) - may_lack)):
        state = "unknown" if wrong[0] in value else "missing"
        raise ValueError(f"{_below(where, wrong[0])}: {state}")
    given = {}
    for name, of in known.items():
        if name not in value:
            continue
        # Most values fit their types: only others need to know where they are.
        one = given[name] = value[name]
        found = type(one)
        if found is not of or not (
            found is bool
            or (found is int and -(2**63) <= one < 2**64)
            or (found is str and one.isascii())
        ):
            given[name] = _typed(of, one, _below(where, name))
    return kind(**given)


@cache
def _fields(kind: type) -> dict[str, Any]:
    """Name → type of the fields of a dataclass."""
    return {field.name: field.type for field in fields(kind)}


def _typed(kind: object, value: object, where: str) -> Any:
    """`value` as a `kind`."""
    origin, arguments = _shape(kind)
    if origin is None and type(value) is kind and kind is not float:
        # Most values: a manifest may have millions.
        return value if kind is bool or _fits(kind, value) else _refused(kind, value, where)
    if origin is tuple and type(value) is list and _are_numbers(arguments, value):
        return tuple(value)
    if origin is UnionType:
        fits = next((each for each in arguments if _fits(each, value)), arguments[0])
        return _typed(fits, value, where)
    if origin is tuple:
        if not isinstance(value, list) or (
            arguments[-1] is not ... and len(value) != len(arguments)
        ):
            raise ValueError(f"{where}: expected a list{_length(arguments)}, found {_shown(value)}")
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return tuple(
            _typed(each, one, f"{where}[{i}]")
            for i, (each, one) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, found {_shown(value)}")
        return {
            _typed(str, name, where): _typed(arguments[1], one, _below(where, name))
            for name, one in value.items()
        }
    if origin is Literal:
        if value not in arguments:
            raise ValueError(
                f"{where}: expected one of {', '.join(arguments)}, found {_shown(value)}"
            )
        return value
    if is_dataclass(kind):
        return record_of(kind, value, where)  # type: ignore[arg-type]
    if kind is not Any and not _fits(kind, value):
        _refused(kind, value, where)
    return value


def _are_numbers(arguments: tuple[Any, ...], value: list[Any]) -> bool:
    """Whether a list is one of whole numbers, and as long as it should be."""
    return (
        arguments[0] is int
        and (arguments[-1] is ... or (arguments == (int,) * len(value)))
        and set(map(type, value)) == _NUMBERS
        and min(value) >= -(2**63)
        and max(value) < 2**64
    )


_NUMBERS = {int}


@cache
def _shape(kind: object) -> tuple[object, tuple[Any, ...]]:
    """What a type is made of."""
    return get_origin(kind), get_args(kind)


def _refused(kind: Any, value: object, where: str) -> NoReturn:
    raise ValueError(f"{where}: expected {_NAMES.get(kind, kind)}, found {_shown(value)}")


def _fits(kind: object, value: object) -> bool:
    if kind is int:
        return type(value) is int and -(2**63) <= value < 2**64
    if kind is float:
        return (
            isinstance(value, int | float)
            and type(value) is not bool
            and abs(value) < 2**63
            and math.isfinite(value)
        )
    if kind is str:
        return isinstance(value, str) and (
            value.isascii() or not any(0xD800 <= ord(character) < 0xE000 for character in value)
        )
    return type(value) is kind


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _length(arguments: tuple[object, ...]) -> str:
    return "" if arguments[-1] is ... else f" of {len(arguments)}"


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
