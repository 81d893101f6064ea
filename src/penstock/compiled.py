"""The one way kernels are compiled, and how they reach memory-mapped bytes.

`kernel` is `numba.njit` with what every kernel of ours needs: cached on disk, so that only the first run on a
machine compiles; no GIL, so that threads fill rows side by side; NumPy's error model, so that a division does
not cost a branch.

Kernels get memory-mapped shards as plain addresses (uint64), because one compiled function must serve any
number of files. `view_*` turn an address into an array inside a kernel. They check nothing: callers keep the
mapping alive and stay inside it.
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

from penstock.errors import ConfigError
from penstock.system import refuse_windows

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
    """Compile a small function that other kernels call in their inner loops; LLVM inlines it."""
    return _compile(function, forceinline=True)


@cache
def _newest_source() -> float:
    package = Path(__file__).parent
    return max(source.stat().st_mtime for source in [*package.glob("*/_*kernels.py"), *package.glob("*.py")])


@cache
def _forget_stale_kernels(folder: Path) -> None:
    """Delete the kernels of one folder of Numba's cache that are older than any kernel source of penstock.

    Numba notices a change of the file that a kernel stands in, but not of what it inlines from other files; a stale
    kernel would be silently wrong.
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
        _name_files_apart(compiled)
    return cast(Function, compiled)


def _name_files_apart(compiled: Any) -> None:
    """Keep the cached code of processes that compile the same kernel at once from getting mixed.

    Numba numbers the files of a kernel's signatures and notes them in an index, without a lock: one process could leave
    its code under the other's signature, for good. With names that nobody else takes, the worst is an entry lost from
    the index, and compiled again. The names are Numba's own business, so a Numba that has others goes unprotected; the
    tests tell.
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


def _viewer(dtype: Any) -> Any:
    def view(address, length):
        return numba.carray(_pointer(address), (length,), dtype)

    return numba.njit(nogil=True, forceinline=True)(view)


view_u8 = _viewer(np.uint8)
view_u16 = _viewer(np.uint16)
view_u32 = _viewer(np.uint32)
view_i32 = _viewer(np.int32)
view_i64 = _viewer(np.int64)
view_u64 = _viewer(np.uint64)
view_f32 = _viewer(np.float32)
view_f64 = _viewer(np.float64)


@inline_kernel
def view_array(address, shape, dtype):
    """The memory at an address (uint64) as an array that Numba does not count references to."""
    return numba.carray(_pointer(address), shape, dtype)


@inline_kernel
def bare(array):
    """The same memory as an array that Numba does not count references to, for inner loops that slice a lot.

    Slicing a counted array costs two atomic additions, as much as copying a short document. The caller's array
    must outlive the result: a kernel's arguments do, and an array that it makes does up to `keep_alive`. The array must
    be contiguous.
    """
    return view_array(np.uint64(array.ctypes.data), array.shape, array.dtype)


@inline_kernel
def keep_alive(array):
    """Does nothing: Numba frees an array that a kernel made after its last use, and this is one."""


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Address of the first byte of `array`, which the caller must keep alive while a kernel uses it."""
    return int(array.__array_interface__["data"][0])


@intrinsic
def trailing_zeros(typing_context, value):
    """Number of zero bits below the lowest set bit of a uint64 that is not 0 (one instruction)."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), codegen


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at an address (uint64) before it is needed; any address is harmless."""

    def codegen(context, builder, signature, arguments):
        number = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        # To read, to keep in all caches, data.
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), codegen
