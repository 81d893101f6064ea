"""Plain values as text: the messages between tests and a solution, which run in two processes.

The texts are JSON. A type that JSON lacks is an object with one key, the type's name: `{"tuple":
[1, 2]}`. Whatever a text holds, reading makes only values of the types in `_MAKERS` and runs no
code of the sender. So the reader may compare them: `==` of these types is Python's own.

A long list takes several texts, and rows with few different strings or integers are sent as indices
into a table: some answers in EvalPlus have a hundred million items.

Part of the script that runs in the sandbox, so it imports little.
"""

import json
import re
from collections import deque
from decimal import Decimal
from fractions import Fraction
from itertools import chain, islice

TYPE_CHECKING = False  # as typing's, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_SEQUENCES: "dict[Any, str]" = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_DICTIONARIES = {
    ("builtins", "dict"),
    *(("collections", name) for name in ("Counter", "OrderedDict", "defaultdict")),
}
_VIEWS: "dict[Any, str]" = {
    type({}.keys()): "keys",
    type({}.values()): "values",
    type({}.items()): "items",
}
_LARGE = 1 << 63
_TOGETHER = 1 << 13
"""Items of a long list in one text."""
_SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
"""Signs for the items of rows with few different ones."""
_NUMPY_KINDS = "biufcSU"
"""Booleans, numbers and strings, but no objects."""


def encode(value: "Any", other: "Callable[[Any], Any]") -> "Iterator[str]":
    """The texts of a value.

    Args:
        value: Any value.
        other: Converts a value of a type that is not plain to JSON; may raise.

    Raises:
        RecursionError: The value is nested too deeply, or contains itself.
    """
    if type(value) in (list, tuple) and len(value) > _TOGETHER:
        yield json.dumps({"parts": _SEQUENCES[type(value)]})
        for begin in range(0, len(value), _TOGETHER):
            yield json.dumps(_sequence(list(value[begin : begin + _TOGETHER]), list, other))
    else:
        yield json.dumps(_plain(value, other))


def decode(texts: "Iterator[str]", **more: "Callable[[Any], Any]") -> "Any":
    """The value of the texts.

    Args:
        texts: All texts of one value.
        more: Makers for further type names, such as `object`, for what `other` returned.

    Raises:
        KeyError, ValueError, TypeError, RecursionError: `encode` did not write the texts.
    """
    whole: list[Any] = []
    makers = {**_MAKERS, **more, "parts": lambda kind: whole.append(_MAKERS[kind])}

    def make(said: "dict[str, Any]") -> "Any":
        ((name, content),) = said.items()
        return makers[name](content)

    first = json.loads(next(texts), object_hook=make)
    if whole:
        return whole[0](part for text in texts for part in json.loads(text, object_hook=make))
    if list(texts):
        raise ValueError("more texts than one value has")
    return first


def _plain(value: "Any", other: "Callable[[Any], Any]") -> "Any":
    """The value in a form that `json.dumps` can write."""
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is str:
        return value
    if kind is int:
        return value if -_LARGE < value < _LARGE else {"int": hex(value)}  # long decimals are slow
    if kind in _SEQUENCES:
        return _sequence(value, kind, other)
    if (kind.__module__, kind.__name__) in _DICTIONARIES and isinstance(value, dict):
        return {"dict": [[_plain(part, other) for part in pair] for pair in value.items()]}
    return _rarely(value, kind, other)


def _sequence(value: "Any", kind: type, other: "Callable[[Any], Any]") -> "Any":
    parts = _few(value) or [_plain(part, other) for part in value]
    return parts if kind is list else {_SEQUENCES[kind]: parts}


def _few(value: "Any") -> "dict[str, Any] | None":
    """Rows with few different strings or integers, as a table; None for anything else."""
    kinds = set(map(type, value))
    if kinds != {list} and kinds != {tuple}:
        return None
    flat = list(chain.from_iterable(value))
    if len(flat) <= len(_SIGNS) or set(map(type, flat)) not in ({str}, {int}):
        return None
    table: dict[Any, Any] = dict.fromkeys(flat)
    if len(table) > len(_SIGNS) or any(type(part) is int and abs(part) >= _LARGE for part in table):
        return None
    table.update(zip(table, _SIGNS, strict=False))
    signs = "".join(map(table.__getitem__, flat))
    return {"rows": [_SEQUENCES[kinds.pop()], list(map(len, value)), list(table), signs]}


def _rows(content: "Any") -> "Any":
    kind, lengths, table, signs = content
    parts = map(dict(zip(_SIGNS, table, strict=False)).__getitem__, signs)
    make = _MAKERS[kind]
    return [make(islice(parts, length)) for length in lengths]


def _rarely(value: "Any", kind: "Any", other: "Callable[[Any], Any]") -> "Any":
    """`_plain` for the rarer types."""
    module = kind.__module__
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {"bytes": value.hex()}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if kind is type and value in _TYPES:
        return {"type": value.__name__}
    if module == "re" and kind.__name__ == "Match":
        return {"match": []}
    if module in ("fractions", "decimal"):
        return {kind.__name__: str(value)}
    if kind in _VIEWS:
        return {_VIEWS[kind]: [_plain(part, other) for part in value]}
    if (module, kind.__name__) == ("collections", "deque"):
        return {"deque": [_plain(part, other) for part in value]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):  # a named tuple is equal to the tuple
        return _sequence(tuple(tuple.__iter__(value)), tuple, other)
    if module in ("builtins", "itertools") and hasattr(kind, "__next__"):
        return {"iterator": [_plain(part, other) for part in value]}
    if module == "numpy" and hasattr(value, "dtype") and value.dtype.kind in _NUMPY_KINDS:
        flat = [_plain(part, other) for part in value.ravel().tolist()]
        return {"numpy": [value.dtype.str, list(value.shape), kind.__name__ == "ndarray", flat]}
    return {"object": other(value)}


def _array(content: "Any") -> "Any":
    """A NumPy array or scalar."""
    import numpy

    dtype, shape, is_array, flat = content
    if numpy.dtype(dtype).kind not in _NUMPY_KINDS:
        raise ValueError(f"an array of type {dtype} is not plain")
    array = numpy.array(flat, dtype).reshape(shape)
    return array if is_array else array[()]


def _match(_: "Any") -> "Any":
    """A match object: it is true, not None, and equal to nothing else."""
    return re.match("", "")


def _fraction(text: str) -> "Any":
    return Fraction(text)


def _decimal(text: str) -> "Any":
    return Decimal(text)


def _deque(parts: "Any") -> "Any":
    return deque(parts)


_MAKERS: "dict[str, Callable[[Any], Any]]" = {
    "int": lambda text: int(text, 16),
    "rows": _rows,
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "iterator": iter,
    "keys": lambda parts: dict.fromkeys(parts).keys(),
    "values": lambda parts: dict(enumerate(parts)).values(),
    "items": lambda parts: dict(parts).items(),
    "deque": _deque,
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "range": lambda parts: range(*parts),
    "type": {kind.__name__: kind for kind in _TYPES}.__getitem__,
    "match": _match,
    "Fraction": _fraction,
    "Decimal": _decimal,
    "numpy": _array,
}
