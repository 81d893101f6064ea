"""Compiles all kernels, and gives them access to memory-mapped bytes.

`kernel` is `numba.njit` with the options that all our kernels need: cached on disk, so that only the first run on a
machine compiles; without the GIL, so that threads fill rows in parallel; with NumPy's error model, so that a division
does not cost a branch.

Kernels get memory-mapped shards as plain addresses (uint64), because one compiled function must work for any number of
files. `view_*` turn an address into an array inside a kernel. They check nothing: callers keep the mapping alive and
stay inside it.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from penstock.core.errors import ConfigError
from penstock.core.system import refuse_windows

refuse_windows()
if numba.config.DISABLE_JIT:
    raise ConfigError(
        "NUMBA_DISABLE_JIT is set, so nothing is compiled, and the kernels of penstock exist only compiled; "
        "unset it: unset NUMBA_DISABLE_JIT"
    )

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile `function`: cached on disk, without the GIL, with NumPy's division."""
    return _compile(function, forceinline=False)


def inline_kernel(function: Function) -> Function:
    """Compile a small function that kernels call in their inner loops; LLVM inlines it."""
    return _compile(function, forceinline=True)


@cache
def _newest_source() -> float:
    package = Path(__file__).parents[1]
    return max(source.stat().st_mtime for source in [*package.rglob("_*kernels.py"), *package.glob("core/*.py")])


@cache
def _forget_stale_kernels(folder: Path) -> None:
    """Delete the kernels in one folder of Numba's cache that are older than any kernel source of penstock.

    Numba notices a change of a kernel's own file, but not of functions that it inlines from other files; a stale kernel
    would be silently wrong.
    """
    for cached in folder.glob("*.nb[ci]"):
        try:
            if cached.stat().st_mtime < _newest_source():
                cached.unlink()
        except OSError:
            # Another process was faster, or the installation is read-only and never changes.
            continue


def _compile(function: Function, *, forceinline: bool) -> Function:
    options = {"nogil": True, "error_model": "numpy", "forceinline": forceinline}
    try:
        compiled: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written: compile in every process.
        compiled = numba.njit(**options)(function)
    else:
        _forget_stale_kernels(Path(compiled.stats.cache_path))
        _use_unique_names(compiled)
    return cast(Function, compiled)


def _use_unique_names(compiled: Any) -> None:
    """Keep cached code apart if several processes compile the same kernel at once.

    Numba numbers the files of a kernel's signatures and records them in an index, without a lock: one process could
    leave its code under the other's signature, permanently. With unique names, the worst case is an entry lost from the
    index, which is compiled again. The names are internal to Numba; a version with other names is not protected, and
    the tests notice that.
    """
    with suppress(AttributeError):
        file = compiled._cache._cache_file
        pattern = file._data_name_pattern
        file._data_name = lambda number: pattern.format(number=uuid4().int)


@intrinsic
def _pointer(typing_context, address):
    """Reinterpret a uint64 as a pointer."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), codegen


def viewer(dtype: Any) -> Any:
    """A kernel that shows memory as an array of numbers or records: address (uint64), length (int64) → array."""

    def view(address, length):
        return numba.carray(_pointer(address), (length,), dtype)

    return numba.njit(nogil=True, forceinline=True)(view)


view_u8 = viewer(np.uint8)
view_u16 = viewer(np.uint16)
view_u32 = viewer(np.uint32)
view_i32 = viewer(np.int32)
view_i64 = viewer(np.int64)
view_u64 = viewer(np.uint64)
view_f32 = viewer(np.float32)
view_f64 = viewer(np.float64)


@inline_kernel
def view_array(address, shape, dtype):
    """The memory at an address (uint64) as an array without Numba's reference counting."""
    return numba.carray(_pointer(address), shape, dtype)


@inline_kernel
def bare(array):
    """The same memory as an array without Numba's reference counting, for inner loops that slice a lot.

    Slicing a counted array costs two atomic additions, as much as copying a short document. The caller's array must
    outlive the result: a kernel's arguments do, and an array that the kernel makes does up to `keep_alive`. The array
    must be contiguous.
    """
    return view_array(np.uint64(array.ctypes.data), array.shape, array.dtype)


@inline_kernel
def keep_alive(array):
    """Does nothing, but counts as a use: Numba frees an array that a kernel made after its last use."""


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Address of the first byte of `array`, which the caller must keep alive while a kernel uses it."""
    return int(array.__array_interface__["data"][0])


@intrinsic
def trailing_zeros(typing_context, value):
    """Number of zero bits below the lowest set bit of a non-zero uint64 (one instruction)."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), codegen


@intrinsic
def prefetch(typing_context, address):
    """Prefetch the cache line at an address (uint64); any address is harmless."""

    def codegen(context, builder, signature, arguments):
        number = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        # For reading, into all cache levels, data.
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), codegen
