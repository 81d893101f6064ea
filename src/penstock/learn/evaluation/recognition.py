"""Which benchmark a record or a file belongs to, so that a task that gets another's file can say
which task reads it.

Every reader of a task converts records through `converted`: whatever is wrong with one is a
RecordError with its place.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet

from penstock.core.errors import RecordError
from penstock.core.json_values import JsonObject

Made = TypeVar("Made")

_FIELDS: Mapping[str, Sequence[frozenset[str]]] = {
    "gsm8k": [frozenset({"question", "answer"})],
    "mmlu": [frozenset({"question", "choices", "answer"})],
    "mbpp": [frozenset({"task_id", "text", "code", "test_list"})],
    "mbpp_plus": [frozenset({"task_id", "prompt", "code", "test", "test_list"})],
}
"""Task → fields that its records have."""
_FUNCTIONS = frozenset({"task_id", "prompt", "entry_point", "canonical_solution"})
"""Fields of HumanEval, HumanEval+, and EvalPlus's own files."""
_PLUS_TEST = re.compile(r"^\s*inputs\s*=", re.MULTILINE)
"""In the tests of the hub's HumanEval+, which have lists of inputs and results; HumanEval's own
call the function.
"""
_HEADER = ("question", "answer")
_MMLU_CELLS = 6
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of Python where a value has another type than expected."""


def task_of(record: object) -> str | None:
    """The task whose records look like this one; None: none that is known."""
    if not isinstance(record, Mapping):
        return None
    names = {name for name, value in record.items() if value is not None}
    if names >= _FUNCTIONS:
        if "plus_input" in names:
            family = str(record["task_id"]).lower().partition("/")[0]
            return f"{family}_plus" if family in ("mbpp", "humaneval") else None
        return "humaneval_plus" if _PLUS_TEST.search(str(record.get("test", ""))) else "humaneval"
    matches = [task for task, forms in _FIELDS.items() if any(names >= form for form in forms)]
    return max(matches, key=lambda task: max(map(len, _FIELDS[task])), default=None)


def task_of_file(path: Path) -> str | None:
    """The task whose file this is, by its first record, whatever its name; None: none that is
    known.
    """
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
        if head == b"PAR1":
            rows = pyarrow.parquet.ParquetFile(path).iter_batches(1)
            return task_of(next(iter(rows)).to_pylist()[0])
        opened = gzip.open if head.startswith(b"\x1f\x8b") else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            lines = (line for line in file if line.strip())
            first = next(lines)
            if first.startswith(("{", "[")):
                return task_of(json.loads(first))
            return "mmlu" if is_mmlu(next(csv.reader(chain([first], lines)))) else None
    except (
        OSError,
        EOFError,
        StopIteration,
        zlib.error,
        csv.Error,
        pyarrow.ArrowException,
        *_FAULTS,
    ):
        return None


def is_mmlu(cells: Sequence[str]) -> bool:
    """Whether a row of cells is one of MMLU's, or its header."""
    named = len(cells) == _MMLU_CELLS and (cells[0], cells[-1]) == _HEADER
    return named or (len(cells) == _MMLU_CELLS and cells[-1] in tuple("ABCD0123"))


def advice(found: str | None, task: str) -> str:
    """The end of a message about a record that `task` cannot read: which task can; empty: none that
    is known.
    """
    if found in (None, task):
        return ""
    return f"; it is a record of {found}: run task {found}, or give the file of {task}"


def refuse_other(record: Any, where: str, task: str) -> None:
    """Refuse a record of another task, whose scores would have the wrong name.

    Raises:
        RecordError: It is one.
    """
    found = task_of(record)
    if found not in (None, task):
        raise RecordError(f"{where}: has {_listed(record)}{advice(found, task)}")


def refuse_file(data: str, task: str) -> None:
    """Refuse a file of another task where a folder is needed.

    Raises:
        RecordError: It is one.
    """
    found = task_of_file(Path(data)) if Path(data).is_file() else None
    if found not in (None, task):
        raise RecordError(f"{data}: its first record is not one of {task}{advice(found, task)}")


def converted(
    make: Callable[[JsonObject, str], Made], record: dict[str, object], where: str, task: str
) -> Made:
    """Result of a reader for a record.

    Args:
        make: The reader: (record, its place) → what it is.
        record: The record.
        where: Its file and line, for errors.
        task: The task, for errors.

    Raises:
        RecordError: The record cannot be read, or belongs to another task; names that, if it is
            known.
    """
    refuse_other(record, where, task)
    try:
        return make(record, where)
    except RecordError:
        raise
    except _FAULTS as error:
        raise RecordError(
            f"{where}: cannot be read as a record of {task}: {type(error).__name__}: "
            f"{error!s:.200}; it has {_listed(record)}; give the file of this benchmark"
        ) from error


def _listed(record: Mapping[str, object]) -> str:
    return f"the fields {', '.join(sorted(map(str, record)))}" if record else "no fields"
