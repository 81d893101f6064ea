"""Applies the user's own function, which changes or drops records one at a time.

It gets a record as a dict of the requested fields, and returns it, changed or not, or None to drop
it. The result is checked like any other record. As Python code per record, it limits the speed.
"""

import hashlib
import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module

import numpy as np
import pyarrow as pa

from penstock.core.errors import ConfigError, RecordError
from penstock.core.json_values import JsonObject
from penstock.data.sources import Fields, ObjectBlock, RecordBlock, Reject
from penstock.data.sources.checks import check_table, diagnose
from penstock.data.sources.records import excerpt

Transform = Callable[[JsonObject], JsonObject | None]


def load_transform(given: str | Transform | None) -> Transform | None:
    """Import `"module:function"`, or take the function itself.

    Raises:
        ConfigError: There is no such function.
    """
    if given is None or not isinstance(given, str):
        return given
    module, colon, name = given.partition(":")
    try:
        function = import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"transform {given!r} cannot be imported: {error}; expected: module:function"
        ) from error
    if not colon or not callable(function):
        raise ConfigError(f"transform {given!r} is not a function; expected: module:function")
    loaded: Transform = function
    return loaded


def describe_transform(function: Transform | None) -> str | None:
    """The function's name and a hash of its code; changes when the function does."""
    if function is None:
        return None
    try:
        code = inspect.getsource(function)
    except (OSError, TypeError):
        code = repr(getattr(function, "__code__", function).__class__)
    name = getattr(function, "__qualname__", type(function).__name__)
    return (
        f"{function.__module__}:{name} {hashlib.blake2b(code.encode(), digest_size=8).hexdigest()}"
    )


def require_picklable(function: Transform) -> None:
    """Refuse a function that other processes cannot import.

    Raises:
        ConfigError: It is a lambda, a local function, or in the main script.
    """
    try:
        pickle.dumps(function)
        reachable = function.__module__ != "__main__"
    except (pickle.PicklingError, AttributeError, TypeError):
        reachable = False
    if not reachable:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"transform {name} cannot be imported by other processes; define it at the top "
            "level of a separate module, or use processes=1"
        )


def apply_transform(
    function: Transform, block: RecordBlock, files: tuple[str, ...], fields: Fields
) -> RecordBlock:
    """Run a function over the records of a block.

    Returns:
        The remaining block; results that are not usable records are among the rejects.

    Raises:
        RecordError: The function itself failed.
    """
    kept: list[JsonObject] = []
    rows: list[int] = []
    rejects = list(block.rejects)
    for row, changed in _changed(function, as_records(block, fields), block, files):
        reason = diagnose(_nested(changed), fields)
        if reason:
            shown = excerpt(repr(changed))
            rejects.append(
                Reject(
                    files[block.files[row]],
                    int(block.lines[row]),
                    f"after transform: {reason}",
                    shown,
                )
            )
            continue
        kept.append(_nested(changed))
        rows.append(row)
    keep = np.array(rows, np.int64)
    return check_table(
        pa.Table.from_pylist(kept, schema=fields.schema),
        fields,
        lines=block.lines[keep],
        files=block.files[keep],
        size_bytes=block.size_bytes,
        explain=lambda row: Reject(
            "", 0, "after transform: the record cannot be read", repr(kept[row])
        ),
        rejects=rejects,
    )


def transform_objects(
    function: Transform, block: ObjectBlock, files: tuple[str, ...]
) -> ObjectBlock:
    """Run a function over the whole records of a block.

    Returns:
        The remaining block.

    Raises:
        RecordError: The function itself failed.
    """
    kept = dict(_changed(function, block.objects, block, files))
    keep = np.array(list(kept), np.int64)
    return replace(
        block, objects=list(kept.values()), lines=block.lines[keep], files=block.files[keep]
    )


def _changed(
    function: Transform,
    records: Sequence[JsonObject],
    block: RecordBlock | ObjectBlock,
    files: tuple[str, ...],
) -> Iterator[tuple[int, JsonObject]]:
    """The rows that the function keeps, and its results for them."""
    for row, record in enumerate(records):
        place = f"{files[block.files[row]]}:{block.lines[row]}"
        try:
            changed = function(record)
        except Exception as error:
            raise RecordError(
                f"{place}: transform failed: {type(error).__name__}: {error}"
            ) from error
        if changed is None:
            continue
        if not isinstance(changed, dict):
            raise RecordError(
                f"{place}: transform returned {type(changed).__name__}; expected: the record "
                "as a dict, or None"
            )
        yield row, changed


def as_records(block: RecordBlock, fields: Fields) -> list[JsonObject]:
    """The records of a block as dicts of their fields."""
    columns = {fields.text: block.texts.to_pylist()}
    columns |= {name: column.to_pylist() for name, column in block.columns.items()}
    if block.weights is not None and fields.weights:
        weights = block.weights
        columns[fields.weights] = [
            [
                {
                    "begin": int(weights.begin[r]),
                    "end": int(weights.end[r]),
                    "weight": float(weights.weight[r]),
                }
                for r in range(weights.offsets[row], weights.offsets[row + 1])
            ]
            if weights.present[row]
            else None
            for row in range(len(block))
        ]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _nested(record: JsonObject) -> JsonObject:
    """`{"a.b": 1}` → `{"a": {"b": 1}}`."""
    result: JsonObject = {}
    for name, value in record.items():
        *parents, leaf = name.split(".")
        branch = result
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return result
