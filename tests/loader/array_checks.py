"""Every call of annotated functions held against dtypes and shapes: `Annotated[Int64, "rows+1"]`,
by jaxtyping.
"""

import functools
import inspect
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin

import jaxtyping
import numpy as np

KINDS = {
    np.dtype[np.bool_]: jaxtyping.Bool,
    np.dtype[np.uint8]: jaxtyping.UInt8,
    np.dtype[np.int32]: jaxtyping.Int32,
    np.dtype[np.int64]: jaxtyping.Int64,
    np.dtype[np.uint32]: jaxtyping.UInt32,
    np.dtype[np.uint64]: jaxtyping.UInt64,
    np.dtype[np.float32]: jaxtyping.Float32,
    np.dtype[np.float64]: jaxtyping.Float64,
    np.dtype[np.signedinteger[Any]]: jaxtyping.Int,
}


class UnfitError(AssertionError):
    """An array is not what the signature says."""


def expected_of(annotation: Any) -> tuple[Any, np.dtype | None] | None:
    """What jaxtyping checks, and the dtype of records; None of an annotation without a shape."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return next(filter(None, map(expected_of, get_args(annotation))), None)
    if get_origin(annotation) is not Annotated:
        return None
    array, *record, shape = get_args(annotation)
    kind = get_args(array)[1]
    if kind == np.dtype[np.void]:
        return jaxtyping.Shaped[np.ndarray, shape], record[0] if record else None
    return KINDS[kind][np.ndarray, shape], None


def check(where: str, value: Any, annotation: Any) -> None:
    if value is None:
        return
    if get_origin(annotation) is tuple and isinstance(value, tuple):
        for part, inner in zip(value, get_args(annotation), strict=False):
            check(where, part, inner)
        return
    expected = expected_of(annotation)
    if expected is None:
        return
    array, record = expected
    try:
        fits = isinstance(value, array)
    except jaxtyping.AnnotationError:
        # "rows+1" where nothing says how many rows there are: any size will do.
        fits = isinstance(value, array.dtype[np.ndarray, re.sub(r"\w+[+-]\w+", "_", array.dim_str)])
    if not fits or (record is not None and value.dtype != record):
        raise UnfitError(f"{where}: {value.dtype}{list(value.shape)} is not {annotation}")


def has_shapes(annotation: Any) -> bool:
    parts = get_args(annotation) if get_origin(annotation) is tuple else (annotation,)
    return any(expected_of(part) is not None for part in parts)


def checked(function: Callable[..., Any], where: str, calls: Counter[str]) -> Callable[..., Any]:
    """The function, checking its arguments and its result; the same function where it has no
    shapes.
    """
    shaped = {name: hint for name, hint in function.__annotations__.items() if has_shapes(hint)}
    if not shaped:
        return function
    signature = inspect.signature(function)
    calls[where] += 0

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        calls[where] += 1
        bound = signature.bind(*arguments, **named)
        with jaxtyping.jaxtyped("context"):
            for name, hint in shaped.items():
                check(f"{where}({name})", bound.arguments.get(name), hint)
            result = function(*arguments, **named)
            check(f"{where} → ", result, shaped.get("return"))
        return result

    return call


def checked_fields(kind: type, where: str, calls: Counter[str]) -> Callable[..., None] | None:
    """The `__init__` of a dataclass, which then checks its fields; None where no field has a
    shape.
    """
    shaped = {name: hint for name, hint in kind.__annotations__.items() if has_shapes(hint)}
    if not shaped:
        return None
    make = kind.__init__
    calls[where] += 0

    @functools.wraps(make)
    def call(self: Any, *arguments: Any, **named: Any) -> None:
        calls[where] += 1
        make(self, *arguments, **named)
        with jaxtyping.jaxtyped("context"):
            for name, hint in shaped.items():
                check(f"{where}.{name}", getattr(self, name), hint)

    return call


@contextmanager
def arrays_checked(*rooms: str) -> Iterator[Counter[str]]:
    """Check all annotated functions and dataclasses of rooms that are imported; gives how often
    each was called.
    """
    calls: Counter[str] = Counter()
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, new: Any) -> None:
        undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    modules = {name: module for name, module in sys.modules.items() if name.startswith("penstock")}
    mine = [
        name for name in modules if {*rooms} & set(name.split(".")[1:3]) and "kernels" not in name
    ]
    for module in mine:
        for name, value in list(vars(modules[module]).items()):
            if getattr(value, "__module__", None) != module:
                continue
            if isinstance(value, types.FunctionType):
                new = checked(value, f"{module}.{name}", calls)
                for other in modules.values() if new is not value else ():
                    for alias in [alias for alias, held in vars(other).items() if held is value]:
                        put(other, alias, new)
            elif isinstance(value, type) and not getattr(value, "_is_protocol", False):
                _check_class(value, f"{module}.{value.__qualname__}", calls, put)
    try:
        yield calls
    finally:
        for owner, name, old in reversed(undo):
            setattr(owner, name, old)


def _check_class(
    kind: type, where: str, calls: Counter[str], put: Callable[[Any, str, Any], None]
) -> None:
    for name, value in list(vars(kind).items()):
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, types.FunctionType) and (name == "__init__") <= (
            not is_dataclass(kind)
        ):
            new = checked(function, f"{where}.{name}", calls)
            if new is not function:
                put(kind, name, property(new) if isinstance(value, property) else new)
    if is_dataclass(kind) and (init := checked_fields(kind, where, calls)) is not None:
        put(kind, "__init__", init)
