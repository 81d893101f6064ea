"""Types of arrays for signatures: a dtype by name, with a shape.

A signature says `Annotated[Int64, "rows 2"]`. mypy and editors see the dtype; the shape, in
jaxtyping's words, is for readers and for a test that runs whole loaders with each array held
against its annotation. At run time nothing is checked and nothing costs time. The same word twice
in one signature is the same size; `_` is any size, and "" a scalar. Records name their dtype before
the shape: `Annotated[Records, PIECE, "pieces"]`.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
"""An array of any type."""
Bool = np.ndarray[Any, np.dtype[np.bool_]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]
UInt32 = np.ndarray[Any, np.dtype[np.uint32]]
UInt64 = np.ndarray[Any, np.dtype[np.uint64]]
Float32 = np.ndarray[Any, np.dtype[np.float32]]
Float64 = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
"""int32 or int64, as the requirements of a model say."""
Records = np.ndarray[Any, np.dtype[np.void]]
"""Structured arrays; `array["begin"]` is one field of all records."""
