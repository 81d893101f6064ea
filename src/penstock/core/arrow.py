"""Conversions between Arrow and NumPy arrays, without a copy where possible.

pyarrow's own conversions (`pyarrow.array`, `numpy.asarray` of an Arrow array, `fill_null`,
`empty_table`) import pandas if it is installed, which takes 0.2 s in each process.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.core.arrays import Array


def to_numpy(array: pa.Array, null: float | bool = 0) -> Array:
    """The numbers or booleans of an Arrow array [n], with `null` in place of nulls."""
    kind = pa.uint8() if pa.types.is_boolean(array.type) else array.type
    dtype = np.dtype(np.bool_ if kind != array.type else array.type.to_pandas_dtype())
    if not len(array):
        return np.empty(0, dtype)
    cast = array.cast(kind) if kind != array.type else array
    values: Array = np.frombuffer(cast.buffers()[1], dtype)[cast.offset : cast.offset + len(cast)]
    return (
        np.where(to_numpy(array.is_valid()), values, np.array(null, dtype))
        if array.null_count
        else values
    )


def from_numpy(values: Array) -> pa.Array:
    """An Arrow array on the memory of native numbers [n], not booleans."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def from_texts(texts: Sequence[str]) -> pa.LargeStringArray:
    """A large string array of texts, which must be encodable as UTF-8."""
    data = [text.encode() for text in texts]
    offsets = np.zeros(len(data) + 1, np.int64)
    np.cumsum([len(one) for one in data], out=offsets[1:])
    return pa.LargeStringArray.from_buffers(
        len(data), pa.py_buffer(offsets), pa.py_buffer(b"".join(data))
    )


def empty_table(schema: pa.Schema) -> pa.Table:
    """A table without rows."""
    return pa.Table.from_batches([], schema)
