"""Compiles all kernels, and gives them access to memory-mapped bytes.

`kernel` is `numba.njit` with the options that all our kernels need: cached on disk, so that only
the first run on a machine compiles; without the GIL, so that threads fill rows in parallel; with
NumPy's error model, so that a division does not cost a branch.

Kernels get memory-mapped shards as plain addresses (uint64), because one compiled function must
work for any number of files. `view_*` turn an address into an array inside a kernel. They check
nothing: callers keep the mapping alive and stay inside it.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import _dynfunc, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, DefaultPassBuilder, StateDict
from numba.core.compiler_machinery import register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import from_dtype
from numpy.typing import DTypeLike

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.core.kernel_cache import KernelCache
from penstock.core.system import refuse_windows

refuse_windows()
if numba.config.DISABLE_JIT:
    raise ConfigError(
        "NUMBA_DISABLE_JIT is set, so nothing is compiled, and the kernels of penstock exist "
        "only compiled; unset it: unset NUMBA_DISABLE_JIT"
    )

Function = TypeVar("Function", bound=Callable[..., Any])
_OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_PART = {**_OPTIONS, "no_cpython_wrapper": True}


def kernel(function: Function) -> Function:
    """Compile `function`: cached on disk, without the GIL, with NumPy's division."""
    return cast(Function, _Kernel(function, targetoptions=_OPTIONS))


def inline_kernel(function: Function) -> Function:
    """Compile a function that kernels call in their inner loops; LLVM inlines it."""
    return cast(
        Function,
        _Part(function, targetoptions={**_PART, "forceinline": True}, pipeline_class=_PartCompiler),
    )


def kernel_part(function: Function) -> Function:
    """Compile a large function that other kernels call; it costs nothing where only they do."""
    return cast(Function, _Part(function, targetoptions=_PART, pipeline_class=_PartCompiler))


def from_python(part: Function) -> Function:
    """A kernel of its own for a function that is also a part of others: without their call's way
    through the part.
    """
    return cast(Function, cast(Any, part).from_python)


class _Kernel(CPUDispatcher):  # type: ignore[misc]
    """A function that Python calls, compiled to machine code of its own."""

    def __init__(self, function: object, **options: object) -> None:
        super().__init__(function, **options)
        self._cache = KernelCache(self.py_func)

    def _compilation_chain_init_hook(self) -> None:
        """Numba would import all packages that extend it, which takes longer than to load a kernel.

        Where something is compiled, they are imported later, by `refresh`.
        """


class _Part(CPUDispatcher):  # type: ignore[misc]
    """A function that kernels call, compiled as a part of each.

    Numba would also optimise it as a whole, make machine code of it and wrap it for Python, and
    then only link its first form into the kernels: half of the time that they take to compile. A
    call from Python compiles a kernel of its own.
    """

    def __call__(self, *arguments: Any) -> Any:
        return self.from_python(*arguments)

    @cached_property
    def from_python(self) -> Any:
        """The kernel."""
        return kernel(self.py_func)


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """LLVM code that is only linked into other code, and never made machine code of its own."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in self._linking_libraries:
            _reload_init(self).update(_reload_init(library))
        self._finalize_dynamic_globals()
        self._finalized = True


def _reload_init(library: object) -> set[Callable[..., object]]:
    """Initialiser that runs when the library's code is loaded from a file; Numba 0.61 has none."""
    return getattr(library, "_reload_init", set())


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerPart(NativeLowering):  # type: ignore[misc]
    """The last pass: makes LLVM code in a `_PartLibrary`, and no machine code."""

    _name = "penstock_lower_part"

    def run_pass(self, state: StateDict) -> bool:
        library = state.library = _PartLibrary(
            state.targetctx.codegen(), state.func_id.func_qualname
        )
        state.flags.no_compile = True
        super().run_pass(state)
        library._ensure_finalized()
        fndesc, helper, _, environment = state["cr"]
        module, name = fndesc.lookup_module(), fndesc.qualname.split(".")[-1]
        # At address 0: `_Part` never calls it.
        entry = _dynfunc.make_function(module, name, "part", 0, environment, (library,))
        # Whoever calls it links what it calls as well.
        state.targetctx.insert_user_function(entry, fndesc, [library, *library._linking_libraries])
        state.reload_init.extend(_reload_init(library))
        state["cr"] = type(state["cr"])(fndesc, helper, cfunc=entry, env=environment)
        return True


class _PartCompiler(Compiler):  # type: ignore[misc]
    def define_pipelines(self) -> list[DefaultPassBuilder]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes[:] = [
            (_LowerPart if one is NativeLowering else one, text) for one, text in manager.passes
        ]
        manager._finalized = False
        manager.finalize()
        return [manager]


def _array_at(
    context: BaseContext,
    builder: ir.IRBuilder,
    kind: types.Array,
    address: ir.Value,
    shape: Sequence[ir.Value],
) -> ir.Value:
    """An array over `address`, C-contiguous and without reference counting."""
    array = make_array(kind)(context, builder)
    item = context.get_constant(
        types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype))
    )
    strides: list[ir.Value] = []
    step = item
    for size in reversed(shape):
        strides.insert(0, step)
        step = builder.mul(step, size)
    is_pointer = isinstance(address.type, ir.PointerType)
    data = (builder.bitcast if is_pointer else builder.inttoptr)(address, array.data.type)
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=item, meminfo=None)
    return array._getvalue()


def viewer(dtype: DTypeLike) -> Any:
    """For kernels: shows memory as an array of numbers or records: address (uint64), length (int64)
    → array.
    """
    kind = types.Array(from_dtype(np.dtype(dtype)), 1, "C")

    def view(typing_context, address, length):
        def codegen(context, builder, signature, arguments):
            return _array_at(context, builder, kind, arguments[0], [arguments[1]])

        return kind(types.uint64, types.intp), codegen

    return intrinsic(view)


view_u8 = viewer(np.uint8)
view_u16 = viewer(np.uint16)
view_u32 = viewer(np.uint32)
view_i32 = viewer(np.int32)
view_i64 = viewer(np.int64)
view_u64 = viewer(np.uint64)
view_f32 = viewer(np.float32)
view_f64 = viewer(np.float64)


@intrinsic
def view_array(typing_context, address, shape, dtype):
    """The memory at an address (uint64) as an array of a shape (tuple), without Numba's reference
    counting.
    """
    kind = types.Array(dtype.dtype, len(shape), "C")

    def codegen(context, builder, signature, arguments):
        return _array_at(
            context, builder, kind, arguments[0], cgutils.unpack_tuple(builder, arguments[1])
        )

    return kind(types.uint64, types.UniTuple(types.intp, len(shape)), dtype), codegen


@intrinsic
def bare(typing_context, array):
    """The same memory as an array without Numba's reference counting, for inner loops that slice a
    lot.

    Slicing a counted array costs two atomic additions, as much as copying a short document. The
    caller's array must outlive the result: a kernel's arguments do, and an array that the kernel
    makes does up to `keep_alive`. The array must be contiguous.
    """
    kind = types.Array(array.dtype, array.ndim, "C")

    def codegen(context, builder, signature, arguments):
        given = make_array(array)(context, builder, arguments[0])
        return _array_at(
            context, builder, kind, given.data, cgutils.unpack_tuple(builder, given.shape)
        )

    return kind(array), codegen


@intrinsic
def keep_alive(typing_context, array):
    """Does nothing, but counts as a use: Numba frees an array that a kernel made after its last
    use.
    """

    def codegen(context, builder, signature, arguments):
        return context.get_dummy_value()

    return types.void(array), codegen


def address_of(array: Array) -> int:
    """Address of the first byte of `array`, which the caller must keep alive while a kernel uses
    it.
    """
    # Not of `__array_interface__`, which describes the fields of records each time.
    return int(array.ctypes.data)


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
