"""Records of tables in memory: of `datasets`, Arrow, polars and pandas."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from penstock.core.errors import RecordError
from penstock.core.json_values import JsonObject
from penstock.data.sources.arrow_values import decoded_rows

_ROWS = 1024


def records_of(source: Any) -> tuple[Iterable[Any], bool]:
    """The records of a Python object, and whether they come from a columnar format.

    A `datasets.Dataset` is read as the Arrow table that it is, in the order of its rows, unless it
    has a transform. A table of pandas is read by its cells, where a missing value is null.

    Raises:
        RecordError: It holds several tables, it is one record, or it holds no records.
    """
    room = type(source).__module__.partition(".")[0]
    if isinstance(source, Mapping):
        if room == "datasets":
            raise RecordError(
                f"a `datasets` dictionary with splits {', '.join(source)}; give one of them"
            )
        raise RecordError("one record is no source; put it into a list")
    if room == "datasets" and hasattr(source, "with_format") and hasattr(source, "format"):
        shape = source.format
        if shape["type"] == "custom":
            return source, False
        tables = source.with_format("arrow", columns=shape["columns"]).iter(batch_size=_ROWS)
        return _rows(tables), True
    if room == "pandas" and hasattr(source, "columns"):
        return _cells(source), False
    if room == "pandas" and hasattr(source, "tolist"):
        return source.tolist(), False  # one column; missing values are nan
    if hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__"):
        try:
            table = pa.table(source)
        except (pa.ArrowInvalid, TypeError):
            column = getattr(source, "to_list", None) or source.to_pylist
            return column(), False
        return _rows(table.slice(0).to_batches(_ROWS)), True
    if not isinstance(source, Iterable):
        cure = "; collect() it first" if hasattr(source, "collect") else ""
        raise RecordError(
            f"found {type(source).__name__}, expected a path, a list or another iterable of "
            f"records, or a table{cure}"
        )
    return source, False


def _rows(tables: Iterable[object]) -> Iterator[JsonObject]:
    for table in tables:
        whole = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
        for row, reason in decoded_rows(whole):
            if row is None:
                raise RecordError(str(reason))
            yield row


def _cells(frame: Any) -> Iterator[JsonObject]:
    missing = frame.isna().to_numpy()
    names = list(frame.columns)
    for at in range(len(frame)):
        cells = frame.iloc[at]
        yield {
            name: None if missing[at, place] else cells.iloc[place]
            for place, name in enumerate(names)
        }
